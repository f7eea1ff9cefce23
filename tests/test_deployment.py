"""What ships for containers, clusters and batch systems: valid by its schema, and the lab that it
promises.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import typer
import yaml

from fedstrata.common.experiment.reading import parse, read
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.cli.main import app
from tests.helpers.commands import DEMO, EXPERIMENTS, NULL_LAB, PATIENCE_S, command, table

ROOT: Final = Path(__file__).parents[1]
DEPLOY: Final = ROOT / "deploy"
CONTAINERS: Final = DEPLOY / "containers"
BATCH: Final = DEPLOY / "slurm" / "lab.sbatch"
INSTALLERS: Final = [DEPLOY / "locked" / "install.sh", DEPLOY / "kits" / "install.sh"]
ENSURE_BROKER: Final = DEPLOY / "brokers" / "ensure-broker.sh"
SHELLCHECK: Final = Path(sys.executable).with_name("shellcheck")
KUBERNETES: Final = ("1.28", "1.34")
METRICS: Final = "0.0.0.0:9464"

Words = list[str]
Lab = dict[str, str]  # parents by the names of nodes


@cache
def compose() -> Mapping[str, Any]:
    """Return the services of compose.yaml."""
    services: Mapping[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return services


def composed(name: str) -> Words:
    """Return what a role's service runs, without `fedstrata`; the cloud's has no experiment yet."""
    service = compose()[name]
    if entrypoint := service.get("entrypoint"):
        return list(entrypoint[1:])
    given = service["command"]
    return shlex.split(given) if isinstance(given, str) else given


@cache
def manifests() -> Sequence[dict[str, Any]]:
    """Return the objects of the Kubernetes manifests."""
    paths = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    return [each for path in paths for each in yaml.safe_load_all(path.read_text())]


def manifest(kind: str, name: str = "") -> dict[str, Any]:
    """Return an object by its kind and name."""
    (found,) = (
        each
        for each in manifests()
        if each["kind"] == kind and each["metadata"].get("name", "") == name
    )
    return found


def container(kind: str, name: str = "") -> dict[str, Any]:
    """Return the one container of a workload."""
    (found,) = manifest(kind, name)["spec"]["template"]["spec"]["containers"]
    return dict(found)


def parents(*commands: Words) -> Lab:
    """Return the parents of the nodes that these commands start, after the command line has read
    them.
    """
    roles = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lab = {}
    for role, *words in commands:
        given = roles[role].make_context(role, list(words)).params
        assert given["metrics"] == METRICS, "where the health check asks"
        names = [given["name"]] if isinstance(given["name"], str) else given["name"]
        (parent,) = (
            [given["parent"]] if isinstance(given["parent"], str) else given["parent"] or [CLOUD]
        )
        lab |= dict.fromkeys(names, parent)
    return lab


def demo() -> Lab:
    """Return the demo's lab."""
    children = parse(read(DEMO, ())).tree.children
    return {name: parent for parent, names in children.items() for name in names}


def settings(configuration: str) -> list[str]:
    """Return the settings of a configuration of mosquitto, without the listener and comments."""
    lines = (line.strip() for line in configuration.splitlines())
    return [line for line in lines if line and not re.match(r"#|listener |user ", line)]


def test_compose_is_valid_by_its_schema() -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [*check, DEPLOY / "compose.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_composes_nodes_are_the_demos_lab() -> None:
    services = compose()
    nodes = [name for name in services if re.fullmatch(r"(institution|devices)-\d", name)]
    assert parents(*map(composed, nodes)) == demo()
    for name in (*nodes, "cloud"):
        role = composed(name)[0]
        assert services[name]["build"]["target"] == (
            "roles" if role == "institution" else "learning"
        )
        assert services[name]["image"] == f"fedstrata:{services[name]['build']['target']}"
        assert services[name]["environment"]["FEDSTRATA_BROKER"] in services


def test_compose_opens_ports_on_this_machine_alone_and_pins_its_images() -> None:
    for name, service in compose().items():
        ports = service.get("ports", ())
        assert all(re.match(r"(\$\{FEDSTRATA_BIND:-)?127\.0\.0\.1[:}]", port) for port in ports), (
            name
        )
        assert "build" in service or re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name
        assert service["deploy"]["resources"]["limits"]["memory"], name
        assert service["restart"] == ("no" if name == "cloud" else "unless-stopped")
        assert "healthcheck" in service or "build" in service, name  # or the image's own, below
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), volume
    port = METRICS.rpartition(":")[2]
    assert f"http://127.0.0.1:{port}/healthz" in (CONTAINERS / "Containerfile").read_text()


def test_mosquitto_has_the_settings_of_the_broker_command(tmp_path: Path) -> None:
    if broker.choose() != "mosquitto":
        pytest.skip("mosquitto is not installed")
    kept = (CONTAINERS / "mosquitto.conf").read_text()
    with broker.start(directory=tmp_path, kind="mosquitto") as started:
        written = (tmp_path / f"broker-{started.port}.conf").read_text()
    assert settings(kept) == settings(written)
    assert manifest("ConfigMap", "mosquitto")["data"] == {"mosquitto.conf": kept}


def test_prometheus_differs_by_names_of_hosts_alone() -> None:
    kept = yaml.safe_load((CONTAINERS / "prometheus.yml").read_text())
    shipped = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    hosts = shipped.replace("127.0.0.1:9464", "cloud:9464").replace(
        "127.0.0.1:9093", "alertmanager:9093"
    )
    assert kept == yaml.safe_load(hosts)
    services = compose()
    assert services["cloud"]["hostname"] == "cloud" and "alertmanager" in services
    mounted = {
        volume.split(":")[1].rpartition("/")[2] for volume in services["prometheus"]["volumes"]
    }
    assert {"prometheus.yml", *kept["rule_files"]} <= mounted


def test_the_build_context_has_what_the_package_is_built_from() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    needed |= {path.partition("/")[0] for path in project["tool"]["hatch"]["build"]["only-include"]}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == needed


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_are_valid_by_the_schema_of_kubernetes(version: str) -> None:
    assert {each["kind"] for each in manifests()} >= {
        "ConfigMap",
        "Deployment",
        "Service",
        "StatefulSet",
        "Job",
    }
    for each in manifests():
        kubernetes_validate.validate(each, version, strict=True)


def test_pods_are_the_demos_lab(tmp_path: Path) -> None:
    program = tmp_path / "fedstrata"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    facts = manifest("ConfigMap", "lab")["data"]
    commands: list[Words] = []
    for role in ("institution", "device"):
        started = container("StatefulSet", role)
        assert started["envFrom"] == [{"configMapRef": {"name": "lab"}}]
        for ordinal in range(manifest("StatefulSet", role)["spec"]["replicas"]):
            pod = f"{role}-{ordinal}"
            words = started.get("command", ["fedstrata"]) + started.get("args", [])
            env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "POD_NAME": pod, **facts}
            filled = [word.replace("$(POD_NAME)", pod) for word in words]
            done = subprocess.run(filled, env=env, capture_output=True, text=True, check=True)
            commands.append(done.stdout.splitlines())
    assert parents(*commands) == demo()


def test_pods_are_probed_confined_and_bounded() -> None:
    for kind, name in (("StatefulSet", "institution"), ("StatefulSet", "device"), ("Job", "")):
        pod, started = manifest(kind, name)["spec"]["template"]["spec"], container(kind, name)
        assert (
            pod["securityContext"]["runAsNonRoot"]
            and started["securityContext"]["readOnlyRootFilesystem"]
        )
        assert started["resources"]["limits"]["memory"]
        for probe in ("startupProbe", "livenessProbe"):
            assert started[probe]["httpGet"] == {"path": "/healthz", "port": "metrics"}
        assert started["ports"] == [
            {"name": "metrics", "containerPort": int(METRICS.rpartition(":")[2])}
        ]


@pytest.mark.skipif(
    not SHELLCHECK.exists(), reason="no shellcheck: it has no wheel for this system"
)
@pytest.mark.parametrize(
    "script", [BATCH, ENSURE_BROKER, *INSTALLERS], ids=lambda path: path.parent.name
)
def test_the_scripts_have_no_fault_that_shellcheck_finds(script: Path) -> None:
    for words in (["bash", "-n"], [SHELLCHECK]):
        done = subprocess.run([*words, script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_demo_needs_pytorch_alone() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert [re.split(r"[>=<\[]", each)[0] for each in extras["training"]] == ["torch"]
    assert "fedstrata[training]" in extras["learning"] and "torchvision" in str(extras["learning"])


@pytest.mark.slow
def test_composes_commands_run_the_demo(tmp_path: Path) -> None:
    nodes = [
        composed(name) for name in compose() if re.fullmatch(r"(institution|devices)-\d", name)
    ]
    cloud = [
        *composed("cloud"),
        str(EXPERIMENTS / "demo.toml"),
        "--set",
        "rounds=2",
        "--runs",
        str(tmp_path / "runs"),
    ]
    with ExitStack() as stack:
        served = stack.enter_context(broker.start(directory=tmp_path))
        env = {**os.environ, "FEDSTRATA_BROKER": f"{served.host}:{served.port}"}
        roles = []
        for words in (*nodes, cloud):
            here = command(
                *[word.replace(METRICS, "127.0.0.1:0") for word in words],
                "--spool",
                "none",
                null=True,
            )
            roles.append(
                stack.enter_context(subprocess.Popen(here, env=env, stderr=subprocess.PIPE))
            )
            stack.callback(roles[-1].kill)
        for role in roles:
            _, errors = role.communicate(timeout=PATIENCE_S)
            assert role.returncode == 0, errors.decode()
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(table(folder / "rounds.csv")) == 2


SRUN: Final = """#!/usr/bin/env bash
# One process for each node, all on this machine.
trap 'kill $(jobs -p) 2>/dev/null' EXIT
trap 'exit 143' TERM
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do SLURM_PROCID=$node "$@" & done
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do wait -n || exit; done
"""


def batch(
    folder: Path, *words: str | Path, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run the batch script as on two nodes of a cluster, with roles that compute nothing."""
    programs = {
        "srun": SRUN,
        "hostname": "#!/bin/sh\necho localhost\n",
        "fedstrata": f'#!/bin/sh\nexec {sys.executable} {NULL_LAB} "$@"\n',
    }
    for name, text in programs.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    job = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": str(os.getpid()),
    }
    return subprocess.run(
        ["bash", BATCH, *words],
        cwd=folder,
        env={**os.environ, **job, **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.slow
def test_a_batch_job_is_a_lab_and_its_run(tmp_path: Path) -> None:
    # an institution with devices of both nodes
    sizes = {"INSTITUTIONS": "3", "DEVICES_PER_NODE": "4"}
    done = batch(tmp_path, DEMO, "--set", "rounds=2", env=sizes)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(table(folder / "rounds.csv")) == 2
    assert len({row["node"] for row in table(folder / "devices.csv")}) == 8
    (logs,) = tmp_path.glob("fedstrata-*")
    assert {path.name for path in logs.iterdir()} == {
        "broker.log",
        *(f"institution-{i}.log" for i in range(3)),
    }


@pytest.mark.slow
def test_a_batch_job_ends_with_its_first_failure(tmp_path: Path) -> None:
    done = batch(tmp_path, DEMO, "--set", "rounds=none", env={})
    assert done.returncode == 4, done.stderr
    assert "rounds" in done.stderr
