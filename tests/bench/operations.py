"""`make bench NAME=operations`: watch, unplug, upgrade and revoke machines of a TLS lab from its
kits, as root.

    server: cloud, broker, Prometheus == router == site-0: institution-0, broker == box-0: device-0,
    device-1
                                             router == site-1: institution-1 == box-1: device-2
                                                                       site-1 == box-2: device-3

The machines are those of `tests/bench/machines.py`; Prometheus has what is shipped for it, as it is
shipped. In one run: the targets, the queries of every dashboard, the alerts of a machine that is
unplugged, a node whose certificate is revoked. Then upgrades, the devices first and the server
first: a release of another version and wire version is this one with both numbers changed, and its
kits. At last a broker whose certificate is revoked. Needs root, mosquitto and Prometheus.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from fedstrata.common.metrics_server import SERVER_NAME
from fedstrata.deploy.kits.lab_file import KEPT_TLS, REVOKED, load
from fedstrata.deploy.kits.provision import revoke_certificates
from tests.bench.machines import (
    INSTALLED_FILE,
    POLL_S,
    ROUTER,
    SETTINGS,
    Checks,
    KitLab,
    home_of,
    until,
)
from tests.bench.running import Clock, Table, run
from tests.helpers.commands import table
from tests.helpers.monitoring import ROOT, SHIPPED, Prometheus, expressions, replaced
from tests.helpers.namespaces import Namespace, VethPair

ABOVE: Final = {
    "server": ROUTER,
    "site-0": ROUTER,
    "site-1": ROUTER,
    "box-0": "site-0",
    "box-1": "site-1",
    "box-2": "site-1",
}
SITES, BOXES = ("site-0", "site-1"), ("box-0", "box-1", "box-2")
NODES: Final = {
    ("cloud", "cloud"),
    ("institution", "institution-0"),
    ("institution", "institution-1"),
    ("device", ""),
    ("device", "device-2"),
    ("device", "device-3"),
}
METRICS_PORT: Final = 9464
PROMETHEUS_PORT: Final = 9090
INTERVAL_S: Final = 5  # of the shipped configuration
QUERIES_S: Final = 90  # rates want several scrapes, rules are worked out at their own pace
# A round does without one of two children after some seconds; models are large enough to measure
# their links.
WATCHED: Final = (
    "rounds=100000",
    "transfer.idle_s=150",
    "institution.rounds=1",
    "model.name=cnn_femnist",
    "training.epochs=1",
    "transfer.chunk_bytes=32768",
    'institution.closing={ rule = "quorum", quorum = 1, deadline_s = 5.0 }',
    (
        'data={ dataset = "synthetic", image_shape = [1, 28, 28], classes = 10, samples = 400, '
        "test_samples = 100 }"
    ),
)
BY_FILE: Final = ("--lab", str(INSTALLED_FILE))
# Without the lab's file the cloud does not call the roll, and meets its children in the run.
BY_NAME: Final = (
    "--lab", "rack", "--broker", "localhost:8883", "--tls-ca", f"{SETTINGS}/tls/ca.crt",
    "--tls-cert", f"{SETTINGS}/tls/{{name}}.crt", "--tls-key", f"{SETTINGS}/tls/{{name}}.key",
)  # fmt: skip
NUMBERS: Final = "topology={ institutions = 2, devices = 4 }"
SHORT: Final = ("rounds=3", "links.check=off")
# None: the wire version is the present one
RELEASES: Final = {"0.1.0": None, "0.2.0": 9, "0.3.0": 10}
LAB: Final = """\
name = "rack"
broker = "main"
[machines]
server = { address = "<server>", metrics = true, cloud = true }
site-0 = { address = "<site-0>", metrics = true }
site-1 = { address = "<site-1>", metrics = true }
box-0 = { address = "<box-0>", metrics = true, accelerator = "cpu", slots = 1 }
box-1 = { address = "<box-1>", metrics = true, accelerator = "cpu", slots = 1 }
box-2 = { address = "<box-2>", metrics = true, accelerator = "cpu", slots = 1 }
[brokers]
main = { machine = "server" }
site = { machine = "site-0" }
[institutions]
institution-0 = { machine = "site-0", broker = "site" }
institution-1 = { machine = "site-1" }
[[devices]]
names = ["device-0..1"]
machine = "box-0"
parent = "institution-0"
[[devices]]
names = ["device-2"]
machine = "box-1"
parent = "institution-1"
[[devices]]
names = ["device-3"]
machine = "box-2"
parent = "institution-1"
"""


def wheel_of(version: str, wire: int | None, home: Path) -> Path:
    """Return the wheel of this release, or of one that differs by its version and its wire version
    alone.
    """
    source, out = home / f"source-{version}", home / f"wheel-{version}"
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    for name in listed.split("\0"):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    changes = {"pyproject.toml": (r'(?m)^version = ".*"$', f'version = "{version}"')}
    if wire is not None:
        changes["common/protocol/serialization.py"] = (
            r"(?m)^VERSION: Final = \d+$",
            f"VERSION: Final = {wire}",
        )
    for name, (old, new) in changes.items():
        text, count = re.subn(old, new, (source / name).read_text())
        assert count == 1, name
        (source / name).write_text(text)
    built = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*built, "--wheel-dir", out, source], check=True)
    return next(out.iterdir())


def quoted(text: str, *words: str) -> None:
    """Print the lines of an output, or those that have one of the words."""
    for line in text.splitlines():
        if not words or any(word in line for word in words):
            print(f"       | {line.rstrip()}", flush=True)


class InsidePrometheus(Prometheus):
    """The one on a machine of the lab."""

    def __init__(self, space: Namespace) -> None:
        super().__init__(PROMETHEUS_PORT)
        self._space = space

    def get(self, path: str, **query: str) -> Any:
        with self._space.entered():
            return super().get(path, **query)

    def answers(self) -> bool:
        with self._space.entered():
            return super().answers()

    def nodes(self) -> set[tuple[str, str]]:
        """Return role and node of each target that answers over TLS."""
        targets = self.get("/api/v1/targets", state="active")["activeTargets"]
        good = [
            each
            for each in targets
            if each["health"] == "up" and each["scrapeUrl"].startswith("https://")
        ]
        return {(each["labels"]["role"], each["labels"].get("node", "")) for each in good}


class Run:
    """A run in the background: its folder, and what its cloud writes for people."""

    def __init__(
        self, lab: Operated, name: str, *sets: str, access: Sequence[str] = BY_FILE
    ) -> None:
        self._log = lab.machines["server"].log("commands")
        self._before = self._log.stat().st_size if self._log.exists() else 0
        words = (*access, "--metrics", f"0.0.0.0:{METRICS_PORT}")
        self.process, self._runs = lab.cloud(name, *words, pairs=sets, out=subprocess.DEVNULL)

    @property
    def folder(self) -> Path:
        return next(self._runs.iterdir())

    @property
    def written(self) -> str:
        return self._log.read_bytes()[self._before :].decode()

    @property
    def rounds(self) -> int:
        """The global rounds that are done."""
        found = list(self._runs.glob("*/rounds.csv"))
        return len(found[0].read_text().splitlines()) - 1 if found else 0

    def participants(self) -> dict[str, int]:
        """Return how often each device has given a result."""
        # a device that has moved has a row at its own parent, too
        rows = [row for row in table(self.folder / "devices.csv") if row["local_rounds"] != "0"]
        return Counter(row["node"].rpartition("/")[2] for row in rows)

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait()


class Operated(KitLab):
    """The lab, and what its keeper does."""

    def __init__(self, home: Path, text: str = LAB) -> None:
        """`text`: as of KitLab, of a lab of these six machines."""
        wires = [VethPair(i, name, above, name) for i, (name, above) in enumerate(ABOVE.items())]
        super().__init__(home, text, wires)

    def check_run(self, check: Checks, name: str, what: str) -> None:
        """Run the demo to its end, and check that its model is that of --direct."""
        run = Run(self, name, "topology=lab", *SHORT)
        code = run.process.wait()
        if code:
            quoted(run.written)
        same = not code and self.same(run.folder)
        check(f"{what}: exit code {code}, the model is that of --direct: {same}", same)

    def tls(self, machine: str) -> Path:
        """Return the folder of a machine's certificates."""
        return self.machines[machine].root / SETTINGS.strip("/") / KEPT_TLS

    def revoke(self, *names: str, wheel: Path) -> str:
        """Revoke certificates and write the kits anew; return what to do then."""
        text = revoke_certificates(load(self.file), self.file, names)
        self.provision(wheel)
        return text

    def link(self, machine: str, state: str) -> None:
        """Plug the cable of a machine out, or in again."""
        space = self.machines[machine].space
        wire = self.wires[machine]
        space.batch("ip", [f"link set up{wire.number} {state}"])
        if state == "up":  # the route went with the link
            space.batch("ip", [f"route replace default via {wire.parent_address}"])

    def scraped(self, asking: str, node: str) -> str:
        """Return the status with which the cloud answers a request for its metrics with a node's
        certificate.
        """
        tls = self.tls(asking)
        context = ssl.create_default_context(cafile=str(tls / "ca.crt"))
        context.load_cert_chain(tls / f"{node}.crt", tls / f"{node}.key")
        where = self.wires["server"].child_address, METRICS_PORT
        try:
            with (
                self.machines[asking].space.entered(),
                socket.create_connection(where, timeout=10) as plain,
                context.wrap_socket(plain, server_hostname=SERVER_NAME) as secured,
            ):
                secured.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                return secured.recv(4096).decode().partition("\r\n")[0] or "closed"
        except OSError as error:
            return str(error)

    @contextmanager
    def prometheus(self) -> Iterator[InsidePrometheus]:
        """Run a Prometheus at the server, with what is shipped for a lab with certificates."""
        server = self.machines["server"]
        words = [
            "prometheus",
            f"--config.file={SHIPPED / 'prometheus-tls.yml'}",
            "--storage.tsdb.path=/var/tmp/tsdb",
            f"--web.listen-address=127.0.0.1:{PROMETHEUS_PORT}",
            "--log.level=error",
        ]
        with server.log("prometheus").open("ab") as log:
            process = server.popen(words, log=log, env={})
        try:
            found = InsidePrometheus(server.space)
            assert until(found.answers) is not None, server.log("prometheus").read_text()
            yield found
        finally:
            process.terminate()
            process.wait()


def show_queries(prometheus: InsidePrometheus, run: str, check: Checks) -> None:
    """Evaluate all that is shipped for Prometheus and Grafana, and print what has no data."""
    asked = {}
    for where, expr in expressions().items():
        node = "institution-1" if where.startswith("institution:") else "device-2"
        asked[where] = replaced(
            expr, run=run, tier="lan", parent="institution-1", node=node, interval_s=INTERVAL_S
        )
    empty = dict(asked)
    with Clock() as clock:
        while any(map(here, empty.values())) and clock.now_s < QUERIES_S:
            empty = {where: expr for where, expr in empty.items() if not prometheus.query(expr)}
    title = f"queries, within {clock.s:.0f} s"
    found = Table("shipped", "queries", "with data", title=title)
    sources = Counter(where.partition(": ")[0] for where in asked)
    without = Counter(where.partition(": ")[0] for where in empty)
    for source, count in sources.items():
        found.add(source, count, count - without[source])
    for where, expr in empty.items():
        quoted(f"no data: {where}: {expr}")
    unexpected = [where for where, expr in empty.items() if here(expr)]
    check(
        f"(b) queries without data that this host should have: {', '.join(unexpected) or 'none'}",
        not unexpected,
    )


def here(expr: str) -> bool:
    """Return whether this host has what an expression asks for."""
    lacking = ("fedstrata_host_temperature", "fedstrata_gpu_", "fedstrata_energy_")
    return not any(name in expr for name in lacking)


def watch(lab: Operated, check: Checks, *, wheel: Path) -> None:
    """Targets, panels, an unplugged machine and a revoked node, in one run."""
    with lab.prometheus() as prometheus:
        watched = Run(lab, "watched", "topology=lab", *WATCHED)
        check.until(
            "(a) every node of every role is a target and up over https",
            lambda: prometheus.nodes() == NODES,
        )
        for each in prometheus.get("/api/v1/targets", state="active")["activeTargets"]:
            labels = each["labels"]
            quoted(
                f"{labels['role']} {labels.get('node', 'of one process'):14} {each['health']} "
                f"{each['scrapeUrl']}"
            )
        until(lambda: watched.rounds >= 10)
        manifest = json.loads((watched.folder / "manifest.json").read_text())
        show_queries(prometheus, manifest["run"], check)
        check(
            f"(b) no alert fires: {sorted(prometheus.firing())}",
            not prometheus.firing() - {"HostMemoryLow"},
        )

        lab.link("box-1", "down")
        fired: dict[str, float] = {}
        with Clock() as clock:
            while "ChildLost" not in fired and clock.now_s < 140:
                for alert in prometheus.firing():
                    fired.setdefault(alert, clock.now_s)
                time.sleep(POLL_S)
        alerts = ", ".join(f"{alert} after {after:.0f} s" for alert, after in fired.items())
        check(f"(c) box-1 is unplugged: {alerts}", {"RoleDown", "ChildLost"} <= fired.keys())
        for labels, _ in prometheus.query('ALERTS{alertstate="firing"}'):
            facts = [f"{key}={value}" for key, value in sorted(labels.items())]
            quoted(" ".join(fact for fact in facts if not fact.startswith("__name__=")))
        before = watched.rounds
        check.until(
            "(c) the round goes on without it: two global rounds",
            lambda: watched.rounds >= before + 2,
            60,
        )
        lab.link("box-1", "up")
        check.until(
            "(c) box-1 is plugged in: no alert",
            lambda: not prometheus.firing() & {"ChildLost", "RoleDown"},
            150,
        )
        had = watched.participants()["device-2"]
        check.until(
            "(c) device-2 takes part again",
            lambda: watched.participants()["device-2"] >= had + 2,
            60,
        )
        quoted(watched.written, "device-2")

        quoted(lab.revoke("device-3", wheel=wheel))
        stolen = lab.machines["box-2"]
        answer = lab.scraped("box-2", "device-3")
        check("(e) /metrics answers device-3's certificate before", "200" in answer)
        # as by hand; installing the kit would restart the services, too
        for machine in ("server", *SITES):
            shutil.copy(lab.kits / machine / KEPT_TLS / REVOKED, lab.tls(machine))
        time.sleep(12)  # until brokers have read it, as docs/lab.md has it
        answer = lab.scraped("box-2", "device-3")
        check(f"(e) /metrics refuses it then: {answer}", "200" not in answer)
        stolen.shut_down(signal.SIGKILL)
        stolen.boot()
        log = stolen.log("fedstrata-devices")
        check.until("(e) the broker refuses device-3", lambda: "is revoked" in log.read_text(), 60)
        quoted(log.read_text(), "revoked")
        before = watched.rounds
        check.until(
            "(e) the rest goes on: three global rounds", lambda: watched.rounds >= before + 3, 60
        )
        code = watched.interrupt()
        check(f"the run is interrupted: exit code {code}", code == 130)
    code, listed, text = lab.status()
    quoted(listed, "device-3")
    quoted(text)
    check("(e) lab status: device-3 alone is away", code == 5 and "device-3" in listed)
    lab.install("server", *SITES, "box-2")
    lab.check_run(check, "renewed", "(e) device-3 has a new certificate")


def upgrade(
    lab: Operated, check: Checks, first: tuple[str, ...], rest: tuple[str, ...], *, of: str, to: str
) -> None:
    """Install another release on some machines first, and show what the server's commands print
    then.
    """
    print(f"\n(d) {of} to {to}: {', '.join(first)} first")
    other = sorted(
        node
        for node, machine in load(lab.file).machine_of.items()
        if (machine in first) != ("server" in first)
    )
    lab.install(*first)

    def named(text: str, *, version: bool = True) -> list[str]:
        """Return the nodes of the other release that are named in a line, with both releases if
        they are known.
        """
        lines = text.splitlines()
        if version:
            lines = [line for line in lines if of in line and to in line]
        return [node for node in other if any(node in line for line in lines)]

    # they connect again
    until(lambda: lab.status()[0] == 0, 30)
    code, listed, text = lab.status()
    quoted(listed)
    quoted(text)
    check(f"lab status: all are there, exit code {code}", code == 0 and "away" not in listed)
    check("lab status names both releases of each", named(text) == other)
    code, listed, text = lab.fedstrata("doctor", "--lab", INSTALLED_FILE)
    quoted(listed, "protocol")
    check(
        f"doctor names both releases of each, exit code {code}",
        code == 1 and named(listed) == other,
    )
    check("doctor: nobody is away", "away" not in listed and "does not answer" not in listed)

    for what, name, nodes in (
        ("topology=lab", f"{to}-lab", "topology=lab"),
        ("numbers of nodes", f"{to}-numbers", NUMBERS),
    ):
        refused = Run(lab, name, nodes, *SHORT)
        code = refused.process.wait()
        quoted(refused.written)
        check(
            f"cloud with {what} names both releases of each, exit code {code}",
            code == 4 and named(refused.written) == other,
        )
    waiting = Run(lab, f"{to}-waits", NUMBERS, *SHORT, access=BY_NAME)
    met = [node for node in other if node.startswith("institution")] or other

    def waits() -> bool:
        text = waiting.written
        return "is of another release" in text and named(text, version=False) == met

    check.until(f"cloud without the lab's file waits, and names {', '.join(met)}", waits, 90)
    quoted(waiting.written)
    check("it does not start", "Start" not in waiting.written)
    waiting.interrupt()

    lab.install(*rest)
    lab.check_run(check, f"all-{to}", f"all machines have {to}")


def revoke_broker(lab: Operated, check: Checks, *, wheel: Path) -> None:
    """A broker whose certificate is revoked, as seen by its nodes and by the server."""
    print("\n(e) a revoked broker")
    quoted(lab.revoke("broker-site", wheel=wheel))
    log = lab.machines["box-0"].log("fedstrata-devices")
    lab.install("server")  # site-0 keeps the old certificate
    lab.install("box-0", ready=False)
    check.until("device-0 refuses the broker of site-0", lambda: "revoked" in log.read_text(), 60)
    quoted("".join([line for line in log.read_text().splitlines() if "revoked" in line][-1:]))
    code, listed, text = lab.status()
    quoted(text)
    check(f"lab status names the broker, exit code {code}", code == 5 and "revoked" in text)
    others = ("institution-1", "device-2", "device-3")
    check("the others are there", all(node in listed for node in others))
    lab.install(*SITES, "box-1", "box-2")
    lab.check_run(check, "new-broker", "with its new certificate")


def main() -> bool:
    """Play the keeper's year, and print what was seen; return whether anything is not as it should
    be.
    """
    check = Checks()
    with home_of("operations") as home:
        wheels = {version: wheel_of(version, wire, home) for version, wire in RELEASES.items()}
        old, middle, new = RELEASES
        lab = Operated(home)
        lab.provision(wheels[old])
        with lab.connected():
            lab.install(*ABOVE)
            lab.boot(*ABOVE)
            code, *_ = lab.status()
            check("lab status: all nodes of lab.toml are there", code == 0)
            watch(lab, check, wheel=wheels[old])
            lab.provision(wheels[middle])
            upgrade(lab, check, BOXES, ("server", *SITES), of=old, to=middle)
            lab.provision(wheels[new])
            upgrade(lab, check, ("server",), (*SITES, *BOXES), of=middle, to=new)
            revoke_broker(lab, check, wheel=wheels[new])
    return check.end()


if __name__ == "__main__":
    run(main)
