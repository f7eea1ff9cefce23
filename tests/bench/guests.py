"""`make bench NAME=guests`: sixty guests come and go in a TLS lab of six machines from its kits, as
root.

    server: cloud, broker, Prometheus == router == site-0: institution-0 == box-0: device-0,
    device-1
                                             router == site-1: institution-1 == box-1: device-2,
                                             device-3
                                                                       site-1 == box-2: device-4 to
                                                                       device-63, guests

The experiment names device-0 to device-3. A plug at box-1 reports what no machine can draw, all the
time.
(a) No institution has a place for guests: all sixty ask for one, in groups that leave or are
    killed. The model is that of `--direct`, bit for bit.
(b) Each institution has four places. Guests come for some seconds, take part, and leave or are
    killed; device-1 moves to the other institution and back; the certificate of a guest is revoked
    at the broker while it takes part. The run ends well, more guests than places took part, `watch`
    has no name twice, and no alert fires but of killed guests. All waits are in proportion to the
    host's load when it begins. Needs root, mosquitto and Prometheus.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from fedstrata.common.host.files import write_private
from fedstrata.deploy.kits.authority import Authority
from fedstrata.deploy.kits.lab_file import KEPT_TLS, REVOKED, load
from fedstrata.deploy.kits.units import environment
from tests.bench.machines import INSTALLED_FILE, PROGRAM, SETTINGS, Checks, home_of, until
from tests.bench.operations import ABOVE, InsidePrometheus, Operated, Run, quoted, wheel_of
from tests.bench.running import Clock, run

PLUG, PLUG_TOPIC = "plug-1", "plugs/box-1"
GUESTS: Final = [f"device-{i}" for i in range(4, 64)]
GROUP: Final = 10
PLACES: Final = 4
# As many times slower, at most, is a host that has other work: to import PyTorch, and so to begin,
# may take a minute.
SLOW: Final = min(5.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
STAY_S: Final = 15.0 * SLOW
IDLE_S: Final = round(10 * SLOW)
REVOKED_GUEST: Final = "device-4"
LIES: Final = ("1e306", "nan", "-5", '{"apower": 60, "aenergy": {"total": 1e306}}', "60", "1e9")
ALL: Final = (
    "topology={ institutions = 2, devices = 4 }",
    (
        'data={ dataset = "digits", partition = "dirichlet_overlap", partition_size = 200, '
        "concentration = 0.5 }"
    ),
    "model.name=mlp_digits",
    "training.epochs=1",
    "institution.rounds=2",
    "cloud.epoch_control.name=fixed",
    "links.check=off",
    f"transfer.idle_s={IDLE_S}",
)
# Rounds of a second, for as long as the guests come: each device emulates a slower machine.
STEPS: Final = "hardware.default.step_s=0.02"
CLOSED: Final = (f"rounds={round(60 * SLOW)}", STEPS)
OPEN: Final = (
    f"rounds={round(60 + 100 * SLOW)}",
    STEPS,
    f"institution.entering={PLACES}",
    "institution.min_available=0.5",
    f'availability.moves={{ device-1 = [{{ at_s = {20 * SLOW:.0f}, parent = "institution-1" }},'
    f' {{ at_s = {60 * SLOW:.0f}, parent = "institution-0" }}] }}',
)
LAB: Final = f"""\
name = "rack"
broker = "main"
moves = true
[machines]
server = {{ address = "<server>", metrics = true, cloud = true }}
site-0 = {{ address = "<site-0>", metrics = true }}
site-1 = {{ address = "<site-1>", metrics = true }}
box-0 = {{ address = "<box-0>", metrics = true, accelerator = "cpu", slots = 1 }}
box-1 = {{ address = "<box-1>", metrics = true, accelerator = "cpu", slots = 1, energy = "plug:{PLUG_TOPIC}" }}
box-2 = {{ address = "<box-2>", metrics = true, accelerator = "cpu", slots = 1 }}
[brokers]
main = {{ machine = "server" }}
[institutions]
institution-0 = {{ machine = "site-0" }}
institution-1 = {{ machine = "site-1" }}
[[devices]]
names = ["device-0..1"]
machine = "box-0"
parent = "institution-0"
[[devices]]
names = ["device-2..3"]
machine = "box-1"
parent = "institution-1"
[[devices]]
names = ["device-4..63"]
machine = "box-2"
parent = "institution-1"
"""
TALKS: Final = """
import sys, time
import paho.mqtt.client as mqtt
host, ca, cert, key, topic, *bodies = sys.argv[1:]
client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id="plug-1")
client.tls_set(ca, cert, key)
client.connect(host, 8883)
client.loop_start()
while True:
    for body in bodies:
        client.publish(topic, body)
        time.sleep(0.2)
"""


class GuestLab(Operated):
    """The lab, its plug, and the groups of guests."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, LAB)

    def admit_plug(self) -> None:
        """Give the plug a certificate of the lab, and the right to write its topic."""
        issued = Authority.open(self.file.parent / "rack-authority", name="rack").of(PLUG)
        tls = self.tls("box-1")
        write_private(tls / f"{PLUG}.crt", issued.certificate)
        write_private(tls / f"{PLUG}.key", issued.key)
        with (self.tls("server") / "broker-main.acl").open("a") as file:
            file.write(f"\nuser {PLUG}\ntopic write {PLUG_TOPIC}\n")

    @contextmanager
    def lying_plug(self) -> Iterator[None]:
        """Publish what no machine can draw, until the block ends."""
        box, tls = self.machines["box-1"], f"{SETTINGS}/{KEPT_TLS}"
        words = [sys.executable, "-c", TALKS, self.wires["server"].child_address, f"{tls}/ca.crt"]
        words += [f"{tls}/{PLUG}.crt", f"{tls}/{PLUG}.key", PLUG_TOPIC, *LIES]
        with box.log("plug").open("ab") as log:
            process = box.popen(words, log=log, env={})
        try:
            yield
            assert process.poll() is None, box.log("plug").read_text()
        finally:
            process.kill()
            process.wait()

    def guests(self, names: Sequence[str], parent: str) -> subprocess.Popen[bytes]:
        """Start a process of guests below an institution."""
        box = self.machines["box-2"]
        words = [PROGRAM, "device", "--lab", "rack", "--accelerator", "cpu", "--slots", "1"]
        broker = f"{self.wires['server'].child_address}:8883"
        for name in names:
            words += ["--name", name, "--parent", parent, "--broker", broker]
        with box.log("guests").open("ab") as log:
            return box.popen(words, log=log, env=environment(load(self.file), "box-2"))


def end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """End a process of guests, whose interpreter is below a shell of its own session."""
    process.send_signal(number)
    process.wait()


class Names:
    """Which nodes `watch` has shown twice at once."""

    def __init__(self, lab: GuestLab) -> None:
        self.twice: Counter[str] = Counter()
        self.looks = 0
        self._lab = lab

    def look(self) -> None:
        """Look once."""
        words = ("watch", "--once", "--format", "json", "--lab", str(INSTALLED_FILE))
        code, text, _ = self._lab.fedstrata(*words)
        if code:
            return
        self.looks += 1
        counted = Counter(names_of(json.loads(text)["nodes"]))
        self.twice.update(name for name, count in counted.items() if count > 1)


def names_of(nodes: Mapping[str, Any]) -> Iterator[str]:
    """Yield the name of each node of a tree."""
    for name, node in nodes.items():
        yield name
        yield from names_of(node.get("children", {}))


def closed(lab: GuestLab, check: Checks) -> None:
    """Sixty guests ask for places that nobody has."""
    print("\n(a) no places")
    with lab.lying_plug():
        run = Run(lab, "closed", *ALL, *CLOSED)
        await_first_round(run)
        for first in range(0, len(GUESTS), 2 * GROUP):
            some = [GUESTS[start : start + GROUP] for start in (first, first + GROUP)]
            processes = [lab.guests(names, f"institution-{i}") for i, names in enumerate(some)]
            time.sleep(STAY_S)
            end(processes[0], signal.SIGTERM)
            end(processes[1], signal.SIGKILL)
        check(
            f"(a) the run lasts for as long as guests come: {run.rounds} global rounds",
            run.process.poll() is None,
        )
        code = run.process.wait()
    quoted(run.written, "rror", "given up")
    check(f"(a) the run ends: exit code {code}", code == 0)
    same = lab.same(run.folder)
    check(f"(a) the model is that of --direct: {same}", same)
    none = run.participants().keys() & set(GUESTS)
    check(f"(a) no guest took part: {sorted(none) or 'none'}", not none)


def opened(lab: GuestLab, check: Checks, prometheus: InsidePrometheus) -> None:
    """Guests come, take part and go."""
    print("\n(b) four places at each institution")
    # each alert's nodes, and after how many seconds each was seen first
    fired: dict[str, dict[str, float]] = defaultdict(dict)
    killed: set[str] = set()
    names = Names(lab)
    over = threading.Event()

    def observe() -> None:
        while not over.wait(2.0):
            for labels, _ in prometheus.query('ALERTS{alertstate="firing"}'):
                about = labels.get("peer", labels.get("node", ""))
                fired[labels["alertname"]].setdefault(about, clock.now_s)
            names.look()

    with lab.lying_plug():
        run = Run(lab, "opened", *ALL, *OPEN)
        await_first_round(run)
        clock = Clock()
        observer = threading.Thread(target=observe)
        observer.start()
        for wave, first in enumerate(range(0, len(GUESTS), GROUP)):
            group = GUESTS[first : first + GROUP]
            print(f"{group[0]} to {group[-1]} come after {clock.now_s:.0f} s", flush=True)
            process = lab.guests(group, f"institution-{wave % 2}")
            if wave == 0:
                takes_part = f"(b) {REVOKED_GUEST} takes part"
                check.until(takes_part, lambda: REVOKED_GUEST in run.participants())
                revoke_guest(lab)
            time.sleep(STAY_S)
            if wave % 2:
                killed.update(group)
                end(process, signal.SIGKILL)
            else:
                end(process, signal.SIGTERM)
        check(
            f"(b) the run lasts for as long as guests come: {run.rounds} global rounds",
            run.process.poll() is None,
        )
        code = run.process.wait()
        over.set()
        observer.join()
    quoted(run.written, "rror", "given up", "moved", "entered")
    check(f"(b) the run ends: exit code {code}", code == 0)
    counts = run.participants()
    guests = counts.keys() & set(GUESTS)
    own = {name: counts[name] for name in ("device-0", "device-1", "device-2", "device-3")}
    check(f"(b) {len(guests)} guests took part, at {2 * PLACES} places", len(guests) > 2 * PLACES)
    check(f"(b) the experiment's own devices took part to the end: {own}", min(own.values()) > 0)
    check(
        f"(b) watch: {names.looks} looks, names twice: {dict(names.twice) or 'none'}",
        not names.twice,
    )
    for alert, nodes in fired.items():
        seen = ", ".join(
            f"{node or 'the lab'} after {after_s:.0f} s" for node, after_s in nodes.items()
        )
        print(f"{alert}: {seen}")
    allowed = {"RunFinished": None, "HostMemoryLow": None, "ChildLost": killed | {REVOKED_GUEST}}
    false = {
        name: list(about)
        for name, about in fired.items()
        if not fits(set(about), allowed.get(name, set()))
    }
    check(f"(b) false alerts: {false or 'none'}", not false)


def await_first_round(run: Run) -> None:
    """Wait until a run has a global round."""
    until(lambda: run.rounds >= 1 or run.process.poll() is not None)
    assert run.rounds >= 1, run.written


def fits(about: set[str], allowed: set[str] | None) -> bool:
    """Return whether an alert was about allowed nodes alone; None allows all."""
    return allowed is None or {name.rpartition("/")[2] for name in about} <= allowed


def revoke_guest(lab: GuestLab) -> None:
    """Put the list with a guest's certificate where the broker reads it, as docs/lab.md has it."""
    authority = Authority.open(lab.file.parent / "rack-authority", name="rack")
    authority.revoke([REVOKED_GUEST])
    shutil.copy(authority.folder / REVOKED, lab.tls("server"))


def main() -> bool:
    """Let the guests come, and print what was seen; return whether anything is not as it should
    be.
    """
    check = Checks()
    with home_of("guests") as home:
        lab = GuestLab(home)
        lab.provision(wheel_of("0.1.0", None, home))
        with lab.connected():
            lab.install(*ABOVE)
            lab.admit_plug()
            lab.boot("server", "site-0", "site-1", "box-0", "box-1")
            closed(lab, check)
            with lab.prometheus() as prometheus:
                opened(lab, check, prometheus)
    return check.end()


if __name__ == "__main__":
    run(main)
