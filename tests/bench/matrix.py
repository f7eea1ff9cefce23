"""`make bench NAME=matrix`: stop each role and the broker at each state of the protocol; is the
model the same?

    {device, institution, cloud, broker} x {dispatch, train, upload, collect, acknowledgement}
                                         x {SIGKILL, SIGSTOP for longer than the keep-alive,
                                         SIGTERM}

Each case is a lab of real processes on a real mosquitto. A listener on the broker waits for the
message that marks the state, then signals the victim; what was killed is started again at once, the
cloud with `--resume`. Each case prints whether the final model is that of an undisturbed lab, bit
for bit, and the seconds from the signal to the next global round's end, beside those that a global
round takes undisturbed.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, Any, Final

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from fedstrata.common.errors import WireError
from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.common.host.processes import free_port
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import (
    Acknowledgement,
    Ask,
    Message,
    Phase,
    Progress,
    Result,
    Task,
)
from fedstrata.deploy.brokers import broker
from tests.bench.running import Table, folder, run
from tests.helpers.commands import tensors

PATIENCE_S: Final = 120.0
KEEPALIVE_S: Final = 5
STOPPED_S: Final = 2.5 * KEEPALIVE_S
DEVICE, INSTITUTION, CLOUD, BROKER = "device-0", "institution-0", "cloud", "broker"
VICTIMS: Final = (DEVICE, INSTITUTION, CLOUD, BROKER)
SIGNALS: Final = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
NAMES: Final = tuple(number.name for number in SIGNALS)
EXPERIMENT: Final[dict[str, Any]] = {
    "name": "matrix",
    "rounds": 4,
    "topology": {"institutions": 2, "devices": 4},
    "data": {"partition": "dirichlet"},
    "model": {"name": "mlp_digits"},
    "training": {"epochs": 20},
    "institution": {"rounds": 2, "aggregation": {"name": "fedmr", "on_new_model": "recentre"}},
    "cloud": {
        "epoch_control": {"name": "tempo"},
        "aggregation": {"name": "fedcross", "alpha": 0.9},
    },
    "transfer": {
        "inline_bytes": 0,
        "chunk_bytes": 32_768,
        "keepalive_s": KEEPALIVE_S,
        "idle_s": 60.0,
    },
    "links": {
        "lan": {"up_mbit": 20, "down_mbit": 20},
        "wan": {"up_mbit": 20, "down_mbit": 20},
        "check": "off",
    },
}

Mark = Callable[[topics.Topic, Message], bool]


def control(sender: str, receiver: str, kind: type[Message], *, at: int = 1) -> Mark:
    """Match a control message of the second global round."""

    def match(topic: topics.Topic, message: Message) -> bool:
        if not isinstance(topic, topics.InboxTopic) or (topic.sender, topic.node) != (
            sender,
            receiver,
        ):
            return False
        if isinstance(message, Progress) and message.phase not in (Phase.WAITING, Phase.TRAINING):
            return False
        key = getattr(message, "key", None)
        return isinstance(message, kind) and (key is None or key.global_round >= at)

    return match


def mark_of(state: str, victim: str) -> Mark:
    """Return the message that shows that the victim's link, or the device's where it has none, is
    in a state.
    """
    parent, child = (CLOUD, INSTITUTION) if victim == CLOUD else (INSTITUTION, DEVICE)
    return {
        "dispatch": control(parent, child, Task),
        "train": control(child, parent, Progress),
        "upload": control(child, parent, Result),
        "collect": control(parent, child, Ask),
        "acknowledgement": control(parent, child, Acknowledgement),
    }[state]


STATES: Final = ("dispatch", "train", "upload", "collect", "acknowledgement")


class Listener:
    """All control messages of a broker; `wait` returns at the first one that a mark matches, from
    now on.
    """

    def __init__(self, port: int) -> None:
        self._mark: Mark | None = None
        self._after: Mark | None = None
        self._armed = False
        self._found = threading.Event()
        self._client = mqtt.Client(CallbackAPIVersion.VERSION2)
        self._client.on_message = self._take
        self._client.on_connect = lambda client, *_: client.subscribe("fs1/lab/+/+/inbox/+", qos=1)
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()

    def arm(self, mark: Mark, *, after: Mark | None) -> None:
        """Wait for a mark; one that carries no round counts once `after` was seen."""
        self._mark, self._after, self._armed = mark, after, after is None

    def wait(self) -> None:
        """Wait until the mark was seen."""
        assert self._found.wait(PATIENCE_S), "the state never came"

    def close(self) -> None:
        """End it."""
        self._client.disconnect()
        self._client.loop_stop()

    def _take(self, _client: object, _data: object, message: mqtt.MQTTMessage) -> None:
        try:
            topic, record = topics.parse(message.topic), serialization.decode(message.payload)[1]
        except WireError:
            return
        self._armed = self._armed or bool(self._after and self._after(topic, record))
        if self._armed and self._mark is not None and self._mark(topic, record):
            self._found.set()


class Lab:
    """A broker and the roles of the experiment, each a process."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        self.home, self.port, self.runs = home, free_port(), home / "runs"
        self.file = home / "experiment.toml"
        self.file.write_text(to_toml(parse(EXPERIMENT)))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        stack.callback(self.stop)

    def start(self, name: str, *, again: bool = False) -> None:
        """Start a role or the broker; a cloud that is started again resumes its run."""
        if name == BROKER:
            one = broker.start(directory=self.home, port=self.port, kind="mosquitto")
            self.processes[name] = one.process
            return
        common = ["--spool", str(self.home / "spool"), "--broker", f"127.0.0.1:{self.port}"]
        with (self.home / f"{name}.log").open("ab") as log:
            words = [sys.executable, "-m", "fedstrata", *self.words(name, again=again), *common]
            self.processes[name] = subprocess.Popen(
                words, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def words(self, name: str, *, again: bool) -> list[str]:
        """Return the words of a role's command."""
        file = str(self.folder) if again and name == CLOUD else str(self.file)
        homes = ((1, 0), (2, 1), (3, 1))
        others = [("--name", f"device-{i}", "--parent", f"institution-{home}") for i, home in homes]
        return {
            CLOUD: [
                "cloud",
                "--sole",
                *["--resume"] * again,
                file,
                "--runs",
                str(self.runs),
                "--format",
                "json",
            ],
            INSTITUTION: ["institution", "--once", "--name", INSTITUTION],
            "institution-1": ["institution", "--once", "--name", "institution-1"],
            DEVICE: ["device", "--once", "--name", DEVICE, "--parent", INSTITUTION, "--slots", "1"],
            "others": [
                "device",
                "--once",
                *(word for words in others for word in words),
                "--slots",
                "1",
            ],
        }[name]

    @property
    def folder(self) -> Path:
        (folder,) = self.runs.iterdir()
        return folder

    def signal(self, victim: str, number: signal.Signals) -> None:
        """Send a signal to a victim and bring it back."""
        process = self.processes[victim]
        process.send_signal(number)
        if number is signal.SIGSTOP:
            time.sleep(STOPPED_S)
            process.send_signal(signal.SIGCONT)
        else:
            process.wait(PATIENCE_S)
            self.start(victim, again=True)

    def rounds(self) -> list[float]:
        """Return the times of day at which global rounds ended, Unix seconds."""
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [
            datetime.fromisoformat(e["time"]).timestamp()
            for e in events
            if e["event"] == "global_round"
        ]

    def ends(self) -> dict[str, int]:
        """Wait until all roles have ended, and return their exit codes."""
        return {
            name: process.wait(PATIENCE_S)
            for name, process in self.processes.items()
            if name != BROKER
        }

    def model(self) -> bytes:
        """Return the final model's tensors, without the header, which carries the run's id."""
        return tensors(self.folder)

    def stop(self) -> None:
        """End what still runs."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


@contextmanager
def lab_of(home: Path) -> Iterator[Lab]:
    """Start a lab with all its processes."""
    with ExitStack() as stack:
        lab = Lab(home, stack)
        for name in (BROKER, CLOUD, INSTITUTION, "institution-1", DEVICE, "others"):
            lab.start(name)
        yield lab


@dataclass(frozen=True, slots=True)
class Case:
    """What became of one lab: seconds from the signal to the end of the next global round."""

    same: bool
    next_round_s: float
    codes: str


def play(home: Path, victim: str, state: str, number: signal.Signals, expected: bytes) -> Case:
    """Play one case."""
    home.mkdir()
    with lab_of(home) as lab:
        listener = Listener(lab.port)
        try:
            listener.arm(mark_of(state, victim), after=mark_of("dispatch", victim))
            listener.wait()
            at = time.time()
            lab.signal(victim, number)
        finally:
            listener.close()
        codes = lab.ends()
        after = [end - at for end in lab.rounds() if end > at]
        wrong = {name: code for name, code in codes.items() if code}
        same = not wrong and lab.model() == expected
        return Case(same, min(after, default=float("nan")), str(wrong or "0"))


def main(
    *,
    victim: Annotated[Sequence[str], VICTIMS] = VICTIMS,
    state: Annotated[Sequence[str], STATES] = STATES,
    signal_: Annotated[Sequence[str], NAMES] = NAMES,
) -> bool:
    """Play the cases and print a table; return whether a model differs."""
    with folder(prefix="matrix-") as root:
        with lab_of(root) as lab:
            assert not any(lab.ends().values())
            expected = lab.model()
            ends = lab.rounds()
        usual_s = statistics.median(b - a for a, b in pairwise(ends))
        table = Table(
            "victim",
            "state",
            "signal",
            "same model",
            "next global round, s",
            "exit codes",
            title=f"undisturbed: a global round each {usual_s:.1f} s; stopped for {STOPPED_S:g} s, "
            f"keep-alive {KEEPALIVE_S} s",
        )
        cases = []
        for number, one, at in product(SIGNALS, victim, state):
            if number.name not in signal_:
                continue
            case = play(root / f"{one}-{at}-{number.name}", one, at, number, expected)
            cases.append(case.same)
            same = "yes" if case.same else "NO"
            table.add(one, at, number.name, same, f"{case.next_round_s:.1f}", case.codes)
    print(f"{sum(cases)} of {len(cases)} with the same model, bit for bit")
    return not all(cases)


if __name__ == "__main__":
    run(main)
