"""A real Prometheus beside a real lab: it finds the roles by itself, and all that is shipped for it
has data.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard as GrafanaDashboard

from docs.tools.dashboards import DASHBOARDS, PrometheusAnnotation, dashboard
from docs.tools.dashboards.panel import Panel
from fedstrata.common.host.energy_meters import rails_watts
from fedstrata.common.host.processes import free_port
from fedstrata.common.metrics import FAMILIES
from fedstrata.common.metrics_server import SERVER_NAME
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.kits.lab_file import KEPT_TLS, load
from fedstrata.deploy.kits.lab_file import Lab as KitLab
from fedstrata.deploy.kits.provision import LAB_FILE, provision
from fedstrata.deploy.kits.units import STATE, TLS, environment, services
from tests.helpers.commands import DEMO, PATIENCE_S, command, sets, table
from tests.helpers.energy import RECORDED, vcgencmd
from tests.helpers.kits import wheel_in
from tests.helpers.monitoring import (
    ROOT,
    SHIPPED,
    Prometheus,
    Row,
    configure,
    expressions,
    needs_prometheus,
    replaced,
    start,
    start_prometheus,
    until,
)
from tests.helpers.panels import assert_panels

GRAFANA: Final = ROOT / "deploy" / "grafana"
# the lab holds there until a device that came back was found again
GLOBAL_ROUNDS, HELD_ROUND = 8, 6
REGION: Final = "region-0"
HOME: Final = "institution-0"
# Slow links, not slow devices, leave the time to kill one: a global round takes a second on any
# machine. Models have more than eight chunks, so that they show the rate of their link.
MODEL_BYTES: Final = 320_000
PRIVACY: Final = (
    'unit = "device", clip_norm = 1.0, noise_multiplier = 1.0, delta = 1e-5, noise = "seeded"'
)
LAB: Final = f"""
rounds = {GLOBAL_ROUNDS}
transfer = {{ chunk_bytes = 32768 }}
evaluation = {{ at = "both", personalised = true }}
links = {{ check = "warn" }}  # a loaded host does not carry what the fast tiers declare
tiers = [
    {{ name = "core", children = "region", link = "wan-200mbit" }},
    {{ name = "wan", children = "institution", link = {{ up_mbit = 5.12, down_mbit = 5.12 }} }},
    {{ name = "lan", fan_out = 3, link = "lan-100mbit", privacy = {{ {PRIVACY} }} }},
]
"""
PARENTS: Final = {
    ("cloud", "", "cloud"),
    ("institution", "cloud", REGION),
    ("institution", REGION, HOME),
}
LATER_BYTES: Final = 1000
# not on every machine
ABSENT: Final = (
    "fedstrata_host_temperature",
    "fedstrata_gpu_",
    "fedstrata_device_energy",
    # the labs train nothing, so nobody attacks
    "fedstrata_attack_success",
    "fedstrata_honest_score",
)

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.timeout(300)]


@dataclass
class Story:
    """What Prometheus saw of a lab, from its start to its end."""

    found: set[tuple[str, str, str]] = field(default_factory=set)
    data: dict[str, list[Row]] = field(default_factory=dict)
    last: dict[str, list[Row]] = field(default_factory=dict)
    alerts: set[str] = field(default_factory=set)  # at the end
    folder: Path = Path()


def filled(where: str, expr: str, run: str) -> str:
    """Return an expression with the variables of dashboards replaced by those of the lab."""
    node = HOME if where.startswith("institution:") else "device-0"
    return replaced(expr, run=run, tier="lan", parent=HOME, node=node)


def play_story(home: Path) -> Story:
    """Play a lab of 1 + 1 + 1 + 3; one device comes late, is killed in the midst, and comes again."""
    reported = Story()
    with ExitStack() as stack:
        served = stack.enter_context(broker.start(directory=home))
        port, cloud_port = free_port(), free_port()
        held = stack.enter_context((home / "held").open("w"))
        fcntl.flock(held, fcntl.LOCK_EX)
        # a Raspberry Pi 5, so that there is an energy
        path = f"{vcgencmd(home).parent}:{os.environ['PATH']}"
        env = {
            **os.environ,
            "PATH": path,
            "NULL_LAB_HOLD": f"{HELD_ROUND}:{held.name}",
            "NULL_LAB_BYTES": str(MODEL_BYTES),
        }

        def role(*words: str | Path) -> subprocess.Popen[bytes]:
            return start(
                stack,
                *command(*words, "--broker", f"{served.host}:{served.port}", null=True),
                env=env,
            )

        def device(*names: str) -> subprocess.Popen[bytes]:
            return role(
                "device", "--parent", HOME, *(word for name in names for word in ("--name", name))
            )

        experiment = home / "lab.toml"
        experiment.write_text(LAB)
        metrics = f"127.0.0.1:{cloud_port}"
        lab = [
            role(
                "cloud",
                experiment,
                "--runs",
                home / "runs",
                "--metrics",
                metrics,
                "--spool",
                "none",
            ),
            role("institution", "--name", REGION, "--spool", "none"),
            role("institution", "--name", HOME, "--parent", REGION, "--spool", "none"),
            device("device-0", "device-1"),
        ]
        prometheus = Prometheus(start_prometheus(stack, home, port=port, cloud=cloud_port))
        until(prometheus.answers, *lab)
        shared = {*PARENTS, ("device", HOME, "")}
        until(lambda: prometheus.healthy() == shared, *lab)
        reported.found = prometheus.healthy()
        late = device("device-2")
        everybody = shared | {("device", HOME, "device-2")}
        until(lambda: prometheus.healthy() == everybody, *lab)
        (reported.folder,) = (home / "runs").iterdir()
        rounds = reported.folder / "rounds.csv"
        # the first is evaluated
        until(lambda: rounds.exists() and len(rounds.read_text().splitlines()) > 2, *lab)
        late.kill()
        until(lambda: prometheus.healthy() == shared, *lab)
        run = json.loads((reported.folder / "manifest.json").read_text())["run"]
        shipped = expressions()

        def everything() -> bool:
            for where, expr in shipped.items():
                reported.data[where] = reported.data.get(where) or prometheus.query(
                    filled(where, expr, run)
                )
            return all(
                reported.data[w]
                for w, expr in shipped.items()
                if not any(name in expr for name in ABSENT)
            )

        deadline = time.monotonic() + PATIENCE_S
        while not everything() and time.monotonic() < deadline:
            # rules are worked out at their own pace; what has no data fails the test
            time.sleep(0.2)
        lab.append(device("device-2"))
        until(lambda: prometheus.healthy() == everybody, *lab)
        held.close()
        for process in lab:
            _, errors = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, errors.decode()
        reported.last = prometheus.last()
        until(lambda: not prometheus.get("/api/v1/targets", state="active")["activeTargets"])
        # rules are worked out at their own pace
        until(lambda: "RunFinished" in prometheus.firing())
        reported.alerts = prometheus.firing()
    return reported


def assert_same_seconds(folder: Path, seen: list[Row]) -> None:
    """Compare the cloud's seconds by phase with rounds.csv, bit for bit."""
    rows = table(folder / "rounds.csv")
    found = {labels["phase"]: value for labels, value in seen if labels["role"] == "cloud"}
    written: dict[str, float] = defaultdict(float)
    for row in rows:
        for phase in found:
            written[phase] += float(row[f"{phase}_s"])
    assert rows and found == written
    assert sum(found.values()) == pytest.approx(float(rows[-1]["elapsed_s"]), abs=1e-4)


def assert_same_bytes(folder: Path, seen: Mapping[str, list[Row]], *, but: str = "") -> int:
    """Compare both counts of bytes with links.csv, each where it arrived; return how many were
    compared.

    A child may receive a last control message, such as a repeated one on a busy host, after it has
    reported its bytes.
    """
    rows = [
        row
        for row in table(folder / "links.csv")
        if row["kind"] in ("model", "control") and row["to"] != but
    ]
    for count in ("payload_bytes", "message_bytes"):
        found = {
            (labels["tier"], labels["peer"], labels["node"], labels["kind"]): value
            for labels, value in seen[count]
            if labels["direction"] == "received" and labels["node"] != but
        }
        children = {labels["node"]: labels.get("parent") for labels, _ in seen[count]}
        for row in rows:
            later = found[row["tier"], row["from"], row["to"], row["kind"]] - int(row[count])
            down = row["kind"] == "control" and children[row["to"]] == row["from"]
            assert 0 <= later <= (LATER_BYTES if down else 0), row
    return len(rows)


@needs_prometheus
@pytest.mark.slow
def test_a_lab_is_found_whole_shown_and_counted_as_in_its_files(tmp_path: Path) -> None:
    story = play_story(tmp_path)
    assert story.found == {*PARENTS, ("device", HOME, "")}, (
        "a process of several devices is one target"
    )
    devices = {labels["node"] for labels, _ in story.last["round"] if labels["role"] == "device"}
    assert devices == {"device-0", "device-1", "device-2"}
    empty = {where: expr for where, expr in expressions().items() if not story.data[where]}
    assert [
        where for where, expr in empty.items() if not any(name in expr for name in ABSENT)
    ] == []
    assert story.alerts & {"RunFinished", "RunFailed", "RoleDown", "NoProgress"} == {"RunFinished"}
    (host,) = json.loads((story.folder / "manifest.json").read_text())["energy"].values()
    watts = rails_watts(RECORDED)
    assert watts and host["joules"] == {
        "pmic rails": pytest.approx(watts * host["seconds"], rel=0.05)
    }
    assert_same_seconds(story.folder, story.last["phase_seconds"])
    # What a device had received when it was killed nobody could tell.
    assert assert_same_bytes(story.folder, story.last, but="device-2") == 18


@needs_prometheus
@pytest.mark.slow
def test_the_demo_is_found_whole_and_agrees_with_its_files(tmp_path: Path) -> None:
    port, cloud = free_port(), free_port()
    sizes = ("rounds=10", "links.wan.up_mbit=0.64", "links.wan.down_mbit=0.64")
    with ExitStack() as stack:
        words = [
            "run",
            DEMO,
            "--runs",
            tmp_path / "runs",
            "--metrics",
            f"127.0.0.1:{cloud}",
            *sets(*sizes),
        ]
        prometheus = Prometheus(start_prometheus(stack, tmp_path, port=port, cloud=cloud))
        lab = start(stack, *command(*words))
        until(prometheus.answers, lab)
        until(
            lambda: len(prometheus.query('count by (node) (fedstrata_round{role="device"})')) == 12,
            lab,
        )
        homes = {("institution", "cloud", f"institution-{i}") for i in range(3)}
        until(lambda: homes <= prometheus.healthy(), lab)
        _, errors = lab.communicate(timeout=PATIENCE_S)
        assert lab.returncode == 0, errors.decode()
        (folder,) = (tmp_path / "runs").glob("2*")
        last = prometheus.last()
        assert_same_seconds(folder, last["phase_seconds"])
        assert assert_same_bytes(folder, last) == 60
        run = json.loads((folder / "manifest.json").read_text())["run"]
        assert assert_panels(prometheus, folder, run=run) == 24
        until(lambda: "RunFinished" in prometheus.firing())
        until(lambda: not prometheus.get("/api/v1/targets", state="active")["activeTargets"])
        fired = {
            labels["alertname"]
            for labels, _ in prometheus.query('count_over_time(ALERTS{alertstate="firing"}[1h])')
        }
        assert not fired - {"RunFinished", "HostHot", "HostMemoryLow", "DiskLow"}, "a healthy run"


def kit_of(folder: Path) -> tuple[KitLab, Path]:
    """Return a lab of one machine, this one, and its kit."""
    wheel, file = wheel_in(folder), folder / "rack.toml"
    file.write_text(f"""
name = "rack"
broker = "main"
machines = {{ here = {{ address = "127.0.0.1", cloud = true, metrics = true }} }}
brokers = {{ main = {{ machine = "here", port = {free_port()} }} }}
institutions = {{ institution-0 = {{ machine = "here" }} }}
devices = [{{ names = ["device-0..1"], machine = "here", parent = "institution-0" }}]
""")
    found = load(file)
    (kit,) = provision(found, file, wheel=wheel, out=folder / "kits")
    return found, kit


@needs_prometheus
@pytest.mark.slow
def test_a_lab_of_kits_with_certificates_is_found_whole(tmp_path: Path) -> None:
    """From the kits' own commands, by the nodes' presence and the cloud's list of targets, to
    Prometheus.
    """
    if broker.choose() != "mosquitto":
        pytest.skip("mosquitto is not installed")
    lab, kit = kit_of(tmp_path)
    port, cloud = free_port(), free_port()
    with ExitStack() as stack:
        held = stack.enter_context((tmp_path / "held").open("w"))
        fcntl.flock(held, fcntl.LOCK_EX)
        here = {TLS: str(kit / KEPT_TLS), STATE: str(tmp_path)}

        def placed(text: str) -> str:
            return re.sub("|".join(here), lambda match: here[match[0]], text)

        env = os.environ | {name: placed(value) for name, value in environment(lab, "here").items()}
        env |= {"NULL_LAB_HOLD": f"1:{held.name}"}
        served, *nodes = [
            start(stack, *command(*map(placed, each.command), null=True), env=env)
            for each in services(lab, "here")
        ]
        words = [
            "--lab",
            kit / LAB_FILE,
            "--runs",
            tmp_path / "runs",
            "--metrics",
            f"0.0.0.0:{cloud}",
        ]
        pairs = ("topology.institutions=1", "topology.devices=2", "rounds=1")
        nodes.append(start(stack, *command("cloud", DEMO, *words, *sets(*pairs), null=True)))
        prometheus = Prometheus(
            start_prometheus(stack, tmp_path, port=port, cloud=cloud, tls=kit / KEPT_TLS)
        )
        until(prometheus.answers, served, *nodes)
        everybody = {("cloud", "", "cloud"), ("institution", "cloud", HOME), ("device", HOME, "")}
        until(lambda: prometheus.healthy() == everybody, served, *nodes)
        held.close()
        for process in nodes:
            _, errors = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, errors.decode()


@needs_prometheus
def test_what_is_shipped_for_tls_differs_by_tls_alone(tmp_path: Path) -> None:
    _, kit = kit_of(tmp_path)
    path = configure(tmp_path, cloud=9464, tls=kit / KEPT_TLS)
    done = subprocess.run(
        ["promtool", "check", "config", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shipped, plain = (
        yaml.safe_load((SHIPPED / name).read_text())
        for name in ("prometheus-tls.yml", "prometheus.yml")
    )
    (job,) = shipped["scrape_configs"]
    (asked,) = job["http_sd_configs"]
    tls = job.pop("tls_config")
    assert tls == asked.pop("tls_config") and tls["server_name"] == SERVER_NAME
    asked["url"] = asked["url"].replace("https", "http")
    assert shipped == plain


@needs_prometheus
def test_alerts_fire_on_their_faults() -> None:
    for words in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(
            ["promtool", *words], cwd=SHIPPED, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_that_is_asked_for_exists() -> None:
    exposed = {family.exposed(name) for name, family in FAMILIES.items()}
    rules = [
        rule
        for file in ("rules.yml", "alerts.yml")
        for group in yaml.safe_load((SHIPPED / file).read_text())["groups"]
        for rule in group["rules"]
    ]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    for where, expr in expressions().items():
        asked = set(re.findall(r"\b(?:\w+:)?fedstrata[_:][\w:]+", expr))
        assert asked <= exposed | recorded, where
        assert asked or re.search(r"ALERTS|up\{|vector", expr), where


PANELS: Final = [
    pytest.param(panel, id=f"{name}: {panel.title}")
    for name, (_, _, panels) in DASHBOARDS.items()
    for panel in panels
]


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_explains_itself(panel: Panel) -> None:
    """The description states what it shows, its unit, each metric that it comes from, and what to
    do.
    """
    shows, origin, remedy = panel.description.split("\n\n")
    assert all(text[0].isupper() or text[0] == "`" for text in (shows, remedy))
    assert all(text.endswith(".") and len(text.split()) >= 5 for text in (shows, remedy)), (
        "sentences"
    )
    assert shows != remedy and origin.startswith("Unit: ")
    asked = {name for expr, _ in panel.queries for name in re.findall(r"fedstrata[_:]\w+", expr)}
    assert all(name in origin for name in asked) and "`" in origin


@pytest.mark.parametrize("name", DASHBOARDS)
def test_dashboards_are_what_the_code_makes_and_lose_nothing_in_grafanas_types(name: str) -> None:
    """What is committed holds nothing that the types of Grafana's schema do not know, but two keys
    of Prometheus.
    """
    text = (GRAFANA / "dashboards" / f"{name}.json").read_text(encoding="utf-8")
    assert text == dashboard(name), (
        "write them anew: python -m docs.tools.dashboards deploy/grafana/dashboards"
    )
    kept = json.loads(text)
    read = json.loads(json.dumps(GrafanaDashboard.from_json(kept), cls=JSONEncoder))
    for mark in kept["annotations"]["list"]:
        for key in PrometheusAnnotation.OWN:
            mark.pop(key, None)
    assert read == kept and kept["schemaVersion"] == GrafanaDashboard().schema_version


def test_a_run_links_to_its_report_by_labels_that_exist() -> None:
    (panel,) = (panel for panel in DASHBOARDS["lab"][2] if panel.link)
    _, url = panel.link or ("", "")
    (label,) = re.findall(r"\$\{__field\.labels\.(\w+)\}", url)
    (variable,) = re.findall(r"\$\{(\w+):raw\}", url)  # Grafana escapes the others
    made = json.loads(dashboard("lab"))
    assert variable in {each["name"] for each in made["templating"]["list"]}
    assert url.endswith("/report.html")
    assert all(re.search(rf"by \([^)]*\b{label}\b", expr) for expr, _ in panel.queries)


def test_panels_stand_beside_each_other_and_have_names_of_their_own() -> None:
    assert {path.stem for path in (GRAFANA / "dashboards").glob("*.json")} == set(DASHBOARDS)
    (source,) = yaml.safe_load(
        (GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text()
    )["datasources"]
    for name in DASHBOARDS:
        made = json.loads(dashboard(name))
        assert made["uid"] == f"fedstrata-{name}"
        taken: set[tuple[int, int]] = set()
        for panel in made["panels"]:
            at = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            assert not cells & taken and at["x"] + at["w"] <= 24 and panel["description"]
            taken |= cells
            assert all(
                each["datasource"]["uid"] == source["uid"] for each in (panel, *panel["targets"])
            )
        assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
