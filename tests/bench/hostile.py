"""`make bench NAME=hostile`: members of a lab and an outsider attack it with a million messages.

A lab of real processes on a real mosquitto, whose roles compute nothing. Meanwhile attackers
publish what an access control list allows them: below their own names, and under these in others'
inboxes and seeks. `device-0` attacks its institution, `institution-1` the cloud and its devices,
each beside its honest process and with its session, and `mallory`, who is no node of the run, all
of them. Now and then a message has 100 MB. The run must end with the undisturbed final model, at
most a factor 2 slower for each global round, with memory within 20 %, at its peak too, and every
class of messages refused and counted by reason.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import subprocess
import time
import urllib.request
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion
from xxhash import xxh3_64_digest

from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.traffic import TcpStats, Traffic
from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import WireError
from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.processes import free_port
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import (
    DIGEST_BYTES,
    About,
    Acknowledgement,
    Alive,
    Ask,
    Declined,
    Gone,
    Goodbye,
    Key,
    Manifest,
    Message,
    NodeState,
    Phase,
    Preparing,
    Presence,
    Probe,
    Probed,
    Progress,
    Question,
    Reports,
    Result,
    Task,
)
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.simulation.hardware import Durations
from tests.bench.running import MB, folder, run, started
from tests.helpers.commands import command
from tests.helpers.null_lab import MODEL_BYTES
from tests.simulation.lab import ScenarioLab
from tests.simulation.outcome import model_digest, round_rows

LAB, CLOUD = "lab", "cloud"
# each with the nodes that it may reach: its parent, its children
MEMBERS: Final[Mapping[str, tuple[str, ...]]] = {
    "device-0": ("institution-0",),
    "institution-1": (CLOUD, "device-2", "device-3"),
}
PARENTS: Final = {"device-2": "institution-1", "device-3": "institution-1"}
MALLORY: Final = "mallory"
OTHER_SESSION: Final = "feedfeedfeedfeed"
KEPT: Final = 200  # real messages, to be mutated and replayed
BURST: Final = 50
LOOK_S: Final = 0.2
FIELDS_AT: Final = 19  # behind the header, the version and a session of 16 characters
UNDISTURBED_ROUNDS: Final = 8  # before the attack begins
LARGE_BYTES: Final = 100_000_000
# of the large messages; the others are as small as one that is too large can be
LARGE_EVERY: Final = 1000
FUTURE, EVER = Key(0, 10**6, 0), 2**63 - 1
MUCH: Final = Traffic(*[EVER] * 12, TcpStats(*[EVER] * 11))  # type: ignore[call-arg, arg-type]
EXPERIMENT: Final[dict[str, Any]] = {
    "name": "hostile",
    "topology": {"institutions": 2, "devices": 4},
    "training": {"epochs": 20},  # 0.2 s with roles that compute nothing
    "transfer": {"inline_bytes": 0, "chunk_bytes": 32_768, "idle_s": 60.0},
    "links": {"check": "off"},
}

Publication = tuple[str, bytes]


@dataclass(slots=True)
class Wire:
    """What the attackers have seen: the run, the sessions, and real messages of members, each with
    its topic.
    """

    run: str = ""
    sessions: dict[str, str] = field(default_factory=dict)
    real: deque[Publication] = field(default_factory=lambda: deque(maxlen=KEPT))
    blobs: deque[str] = field(default_factory=lambda: deque(["0" * 16], maxlen=KEPT))

    def see(self, _client: object, _data: object, message: mqtt.MQTTMessage) -> None:
        """Take a message of the run."""
        body = bytes(message.payload)
        try:
            topic = topics.parse(message.topic)
            session, record = serialization.decode(body)
        except WireError:
            return
        if session == OTHER_SESSION or not isinstance(topic, topics.InboxTopic | topics.StateTopic):
            return
        name = topic.sender if isinstance(topic, topics.InboxTopic) else topic.node
        self.run = topic.run
        if isinstance(topic, topics.StateTopic):
            self.sessions[name] = session
        # before the attack: its own messages come back, too
        elif name in MEMBERS and len(self.real) < KEPT:
            self.real.append((message.topic, body))
        if isinstance(record, Task | Result) and record.key.global_round < FUTURE.global_round:
            self.blobs.append(record.model.blob)


class Attack:
    """The classes of hostile publications; `next` draws one."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._draw = random.Random(1)
        self._larges = itertools.count()
        self.classes: dict[str, Callable[[str, str], Publication]] = {
            "mutated": self._mutated,
            "random": self._random,
            "manifests": self._manifest,
            "replayed": self._replayed,
            "asks": self._ask,
            "late": self._late,
            "misfits": self._misfit,
            "presences": self._presence,
            "sessions": self._session,
            "seekers": self._seeker,
            "chunks": self._chunk,
            "large": self._large,
            "outsider": self._outsider,
        }

    def next(self, kind: str) -> Publication:
        """Return one publication of a class."""
        member = self._draw.choice(list(MEMBERS))
        return self.classes[kind](member, self._draw.choice(MEMBERS[member]))

    def _to(
        self, node: str, member: str, message: Message, *, session: str | None = None
    ) -> Publication:
        body = serialization.encode(
            message, self._wire.sessions[member] if session is None else session
        )
        return topics.inbox(LAB, self._wire.run, node, member), body

    def _mutated(self, member: str, node: str) -> Publication:
        """Flip bits of a real message, of another session, half of the time under a right digest."""
        topic, body = self._draw.choice(self._wire.real)
        session = self._wire.sessions[topic.rpartition("/")[2]]
        packed = bytearray(body[DIGEST_BYTES:].replace(session.encode(), OTHER_SESSION.encode()))
        for _ in range(self._draw.randrange(1, 4)):
            packed[self._draw.randrange(FIELDS_AT, len(packed))] ^= 1 << self._draw.randrange(8)
        sound = self._draw.random() < 0.5 and OTHER_SESSION.encode() in packed
        return topic, (xxh3_64_digest(packed) if sound else body[:DIGEST_BYTES]) + bytes(packed)

    def _random(self, member: str, node: str) -> Publication:
        packed = self._draw.randbytes(self._draw.randrange(1, 400))
        return topics.inbox(LAB, self._wire.run, node, member), xxh3_64_digest(packed) + packed

    def _manifest(self, member: str, node: str) -> Publication:
        chunk_bytes = self._draw.choice([1024, 4_000_000])
        chunks = self._draw.choice([1, 1000])
        huge = Manifest(
            f"{self._draw.getrandbits(64):016x}",
            chunks * chunk_bytes,
            chunk_bytes,
            bytes(8 * chunks),
            "x",
            "y",
        )
        if node in PARENTS:
            return self._to(node, member, Task(FUTURE, EVER, huge, None))
        return self._to(node, member, self._result(FUTURE, huge))

    def _replayed(self, member: str, node: str) -> Publication:
        return self._draw.choice(self._wire.real)

    def _ask(self, member: str, node: str) -> Publication:
        blob = self._draw.choice([f"{self._draw.getrandbits(64):016x}", *self._wire.blobs])
        return self._to(node, member, Ask(blob, b"\xc0", EVER, EVER, 64, True))

    def _late(self, member: str, node: str) -> Publication:
        if node in PARENTS:
            return self._to(node, member, Acknowledgement(Key(0, 0, 0), "no"))
        model = Manifest("a" * 16, 40_000, 32_768, bytes(16), "fp32", "0" * 16)
        key = Key(0, self._draw.randrange(2), 0)
        late: list[Message] = [self._result(key, model), Reports((ChildReport("nobody"),))]
        return self._to(node, member, self._draw.choice(late))

    def _misfit(self, member: str, node: str) -> Publication:
        alive = Alive("f" * 16, Presence(NodeState.READY, "x"))
        both: list[Message] = [
            Gone(f"{self._draw.getrandbits(64):016x}"),
            alive,
            Question("n", About.ENTRY),
        ]
        if node in PARENTS:
            noise = Manifest("b" * 16, 1 << 30, 4_000_000, bytes(8 * 269), "noise", "")
            return self._to(
                node, member, self._draw.choice([*both, Probed("a" * 16, 1e300, noise)])
            )
        probe = Probe(Manifest("c" * 16, 1 << 20, 1 << 20, bytes(8), "noise", ""))
        progress = Progress(FUTURE, Phase.TRAINING, 1, 1, MUCH, (MUCH,))
        mine: list[Message] = [
            probe,
            progress,
            Preparing(EVER, "x" * 5000),
            Declined(FUTURE, "y" * 5000),
            Goodbye(),
        ]
        return self._to(node, member, self._draw.choice([*both, *mine]))

    def _presence(self, member: str, node: str) -> Publication:
        """Publish a presence of the member's own session, as it may."""
        samples = self._draw.choice([1, EVER])
        role = "institution" if member in PARENTS.values() else "device"
        presence = Presence(
            NodeState.READY, role, samples=samples, reason="z" * self._draw.randrange(3000)
        )
        return topics.state(LAB, self._wire.run, member), serialization.encode(
            presence, self._wire.sessions[member]
        )

    def _session(self, member: str, node: str) -> Publication:
        return self._to(node, member, Preparing(1, ""), session=OTHER_SESSION)

    def _seeker(self, member: str, node: str) -> Publication:
        parent = PARENTS.get(node, node)
        question = Question(
            f"{self._draw.getrandbits(64):016x}", run=self._draw.choice(["", self._wire.run])
        )
        return topics.ask(LAB, parent, member), serialization.encode(question, OTHER_SESSION)

    def _chunk(self, member: str, node: str) -> Publication:
        blob = self._draw.choice(self._wire.blobs)
        number = self._draw.randrange(10**17)
        return topics.chunk(
            LAB, self._wire.run, member, topics.ALL, blob, 0, number
        ), self._draw.randbytes(2000)

    def _large(self, member: str, node: str) -> Publication:
        """Publish a text that a node may not even escape, where the member may publish."""
        letters = 20_000 if next(self._larges) % LARGE_EVERY else LARGE_BYTES
        body = serialization.encode(Preparing(1, "\x1b" * letters), self._wire.sessions[member])
        inbox, seek = (
            topics.inbox(LAB, self._wire.run, node, member),
            topics.ask(LAB, PARENTS.get(node, node), member),
        )
        state, roll = topics.state(LAB, self._wire.run, member), topics.ask(LAB, topics.ALL, member)
        return self._draw.choice([inbox, inbox, inbox, seek, state, roll]), body

    def _outsider(self, member: str, node: str) -> Publication:
        """Publish as somebody who is no node of the run."""
        body = serialization.encode(Question("n"), OTHER_SESSION)
        name = self._draw.choice([MALLORY, f"mallory-{self._draw.randrange(10**6)}"])
        parent = PARENTS.get(node, node)
        where = [
            topics.ask(LAB, parent, name),
            topics.ask(LAB, topics.ALL, name),
            topics.inbox(LAB, self._wire.run, node, name),
        ]
        return self._draw.choice(where), body

    @staticmethod
    def _result(key: Key, model: Manifest) -> Result:
        return Result(
            key,
            model,
            None,
            Work(10**12, 1e300, EVER, EVER, 1e300, 0.0, 0.0),
            EVER,
            (),
            "{",
            MUCH,
            (MUCH,),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What an attacked run came to. `refused`: messages by role and reason.

    `rss`: bytes by role, before and after; `peaks`: the most before the attack, and during it.
    """

    ok: bool
    same: bool
    published: Mapping[str, int]
    refused: Mapping[str, Mapping[str, int]]
    rss: Mapping[str, tuple[int, int]]
    peaks: Mapping[str, tuple[int, int]]
    round_s: tuple[float, float]
    seconds: float

    @property
    def reasons(self) -> set[str]:
        """The reasons for which messages were refused, anywhere."""
        return {
            reason for counts in self.refused.values() for reason, count in counts.items() if count
        }

    def problems(self) -> list[str]:
        """Return what is not as it must be."""
        found = [] if self.ok else ["a role failed, or a round closed without a child"]
        found += [] if self.same else ["the final model differs"]
        for sizes, what in ((self.rss, "as large"), (self.peaks, "as large for a moment")):
            for role, (before, after) in sizes.items():
                if after > 1.2 * before:
                    found.append(f"memory of {role} was {after / before:.2f} times {what}")
        factor = self.round_s[1] / self.round_s[0]
        found += [f"a global round took {factor:.2f} times as long"] if factor > 2 else []
        lacking = {
            "malformed",
            "unknown session",
            "does not fit",
            "too many",
            "too large",
        } - self.reasons
        return found + [f"nothing was refused as {reason!r}" for reason in sorted(lacking)]


class HostileLab:
    """A lab of processes, and what they show meanwhile."""

    def __init__(self, home: Path, experiment: Experiment, port: int, stack: ExitStack) -> None:
        self.runs = home / "runs"
        self._metrics: dict[str, int] = {}
        self._roles: dict[str, subprocess.Popen[bytes]] = {}
        self.refused: dict[str, dict[str, int]] = {}
        file = home / "experiment.toml"
        file.write_text(to_toml(experiment))
        own = {CLOUD: ["cloud", str(file), "--runs", str(self.runs)]}
        for name in experiment.tree.aggregators:
            own[name] = ["institution", "--name", name]
        for name in experiment.tree.devices:
            own[name] = ["device", "--name", name, "--parent", experiment.tree.parent(name)]
        for name, words in own.items():
            self._metrics[name] = free_port()
            common = ["--broker", f"127.0.0.1:{port}", "--spool", "none"]
            metrics = ["--metrics", f"127.0.0.1:{self._metrics[name]}"]
            line = command(*words, *common, *metrics, null=True)
            self._roles[name] = stack.enter_context(started(line, home / f"{name}.log"))

    def rounds(self) -> list[float]:
        """Return the times of day at which global rounds ended, Unix seconds."""
        files = list(self.runs.glob("*/events.jsonl"))
        lines = files[0].read_text().splitlines() if files else []
        events = [
            json.loads(line) for line in lines if line.endswith("}") and '"global_round"' in line
        ]
        return [
            datetime.fromisoformat(e["time"]).timestamp()
            for e in events
            if e["event"] == "global_round"
        ]

    def rss(self, *, peak: bool = False) -> dict[str, int]:
        """Return the resident bytes of each role, or the most so far."""
        found = {}
        for name, process in self._roles.items():
            amount = (
                Path(f"/proc/{process.pid}/status")
                .read_text()
                .partition("VmHWM:" if peak else "VmRSS:")[2]
            )
            found[name] = 1024 * int(amount.split()[0]) if amount else 0  # it has ended
        return found

    def scrape(self) -> None:
        """Read the counts of refused messages of each role that answers."""
        for name, port in self._metrics.items():
            try:
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{port}/metrics", timeout=5
                ) as answer:
                    lines = answer.read().decode().splitlines()
            except OSError:
                continue
            counts = [
                line for line in lines if line.startswith("fedstrata_ignored_messages_total{")
            ]
            reasons = {
                line.partition('reason="')[2].partition('"')[0]: int(float(line.split()[-1]))
                for line in counts
            }
            self.refused[name] = reasons or self.refused.get(name, {})

    def running(self) -> bool:
        """Whether the cloud runs."""
        return self._roles[CLOUD].poll() is None

    def ends(self, timeout_s: float, look: Callable[[], None]) -> dict[str, int]:
        """Wait for the roles' ends, with looks at them meanwhile, and return their exit codes."""
        deadline = time.monotonic() + timeout_s
        while self.running() and time.monotonic() < deadline:
            look()
            time.sleep(LOOK_S)
        return {name: process.wait(timeout_s) for name, process in self._roles.items()}


def measure(home: Path, *, messages: int, rate: float, kinds: Sequence[str] = ()) -> Findings:
    """Run the lab under an attack of so many messages, `rate` of them a second; `kinds`: all
    classes if empty.
    """
    rounds = UNDISTURBED_ROUNDS + 10 + int(messages / rate / 0.3)
    experiment = parse(EXPERIMENT | {"rounds": rounds})
    twin = ScenarioLab(
        experiment, model_bytes=MODEL_BYTES, durations=Durations(train_s=0.001)
    ).run()
    assert twin.ok, twin.result
    wire = Wire()
    attack = Attack(wire)
    published: Counter[str] = Counter()
    with ExitStack() as stack:
        served = stack.enter_context(broker.start(directory=home, kind="mosquitto"))
        spy, client = (mqtt.Client(CallbackAPIVersion.VERSION2) for _ in range(2))
        for each in (spy, client):
            each.connect(served.host, served.port)
            each.loop_start()
            stack.callback(each.loop_stop)
        spy.on_message = wire.see
        spy.subscribe([(f"fs1/{LAB}/+/+/state", 0), (f"fs1/{LAB}/+/+/inbox/+", 0)])
        lab = HostileLab(home, experiment, served.port, stack)
        while len(before_s := lab.rounds()) < UNDISTURBED_ROUNDS:
            assert lab.running(), "the lab ended before the attack"
            time.sleep(0.1)
        spy.unsubscribe(f"fs1/{LAB}/+/+/inbox/+")
        rss, peaks, began, scraped = lab.rss(), lab.rss(peak=True), time.time(), 0.0
        rss_after, peaks_after = rss, dict(peaks)

        def look() -> None:
            found = lab.rss(peak=True)
            peaks_after.update((role, max(peaks_after[role], found[role])) for role in peaks_after)
            lab.scrape()

        for kind in itertools.islice(itertools.cycle(kinds or attack.classes), messages):
            topic, body = attack.next(kind)
            client.publish(topic, body, qos=0)
            published[kind] += 1
            if published.total() % BURST:
                continue
            if (now := time.time()) > scraped + 1.0:
                scraped = now
                if not lab.running():
                    break
                rss_after = lab.rss()
                look()
            time.sleep(max(0.0, began + published.total() / rate - now))
        seconds = time.time() - began
        lab.scrape()
        ended = time.time()
        codes = lab.ends(60.0 + rounds, look)
        incomplete = [row for row in round_rows(lab.runs) if row["missing"] or row["refused"]]
        times = lab.rounds()
        usual = [b - a for a, b in pairwise(before_s)] + [
            b - a for a, b in pairwise(times) if a > ended + 1.0
        ]
        attacked = [b - a for a, b in pairwise(times) if began < a and b < ended]
        return Findings(
            ok=not any(codes.values()) and not incomplete and published.total() == messages,
            same=model_digest(lab.runs) == twin.digest,
            published=published,
            refused=lab.refused,
            rss={role: (rss[role], rss_after[role]) for role in rss},
            peaks={role: (peaks[role], peaks_after[role]) for role in rss},
            round_s=(statistics.median(usual), statistics.median(attacked or [seconds])),
            seconds=seconds,
        )


def main(
    *,
    messages: Annotated[int, "of all classes together"] = 1_000_000,
    rate: Annotated[float, "messages a second"] = 4000.0,
    kind: Annotated[Sequence[str], "only this class; repeat it for several"] = (),
) -> str:
    """Measure and print; return what is not as it must be."""
    with folder(prefix="hostile-") as home:
        found = measure(home, messages=messages, rate=rate, kinds=kind)
    print(f"published in {found.seconds:.0f} s: {dict(found.published)}")
    for role, counts in found.refused.items():
        before, after = (size / MB for size in found.rss[role])
        peak = found.peaks[role][1] / MB
        print(
            f"{role}: memory {before:.1f} -> {after:.1f} MB, at most {peak:.1f} MB; "
            f"refused {counts}"
        )
    print(
        f"a global round: {found.round_s[0]:.3f} s undisturbed, {found.round_s[1]:.3f} s attacked"
    )
    print(f"the same final model: {'yes' if found.same else 'NO'}")
    return "; ".join(found.problems())


if __name__ == "__main__":
    run(main)
