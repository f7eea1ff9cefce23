"""`make bench NAME=kills`: kill broker, sender or receiver in mid-transfer, ten times each.

    sender (ParentEndpoint, link of so many Mbit/s) --model--> mosquitto --model--> receiver
    (ChildEndpoint)

Each is a process of its own. One of them gets SIGKILL and is started again at once: the broker on
its port, the sender with the same model (so the same blob), the receiver with nothing or, with
--spool, with what it had put into its file. Victims and moments are drawn from a seed. Each kill
has a lab of its own, and is measured against a transfer that nothing happened to.
"""

from __future__ import annotations

import asyncio
import csv
import ctypes
import hashlib
import random
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np

from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.host.memory import keep_large_buffers
from fedstrata.common.model.layout import Row
from fedstrata.common.net.bulk import Body
from fedstrata.common.runtime.endpoint import Endpoint
from fedstrata.common.runtime.world import new_session
from fedstrata.common.settings.links import LinkSettings
from fedstrata.common.storage.spool import Spool
from fedstrata.deploy.brokers import broker
from tests.bench.endpoints import RUN, child_of, dispatch, follow, lead, local, parent_of
from tests.bench.running import MB, SPAWN, Table, folder, run, tick
from tests.helpers.nodes import drawn, layout_of

SENDER, RECEIVER, BROKER = "sender", "receiver", "broker"
VICTIMS: Final = (BROKER, SENDER, RECEIVER)
NOBODY: Final = "nobody"
PATIENCE_S: Final = 60.0
POLL_S: Final = 0.002
TRANSFER: Final = TransferSettings(idle_s=PATIENCE_S)


class Meter(ctypes.Structure):
    """Counts in memory that all lives of a role share: what they handed to the socket, and what
    arrived first here.

    `begun`: monotonic seconds at the first chunk, 0 before; `back`: when the last life of a role
    was connected.
    """

    _fields_ = (
        ("begun", ctypes.c_double),
        ("back", ctypes.c_double),
        ("chunks", ctypes.c_int64),
        ("nbytes", ctypes.c_int64),
        ("arrived", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class Kill:
    """Who gets SIGKILL, after which share of the seconds that the transfer needs."""

    victim: str
    moment: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one transfer.

    `had`: chunks that the receiver held at the kill; `away_s`: from the kill until the victim was
    connected again; `seconds`: from the first chunk until the model was complete, NaN where it
    never was; `again`: what was published beyond the model once.
    """

    victim: str
    moment: float
    had: int
    away_s: float
    complete: bool
    right: bool
    closed: bool
    seconds: float
    chunks_again: int
    bytes_again: int


def draw(seed: int, *, each: int) -> list[Kill]:
    """Return `each` kills of every victim, in a random order."""
    randomness = random.Random(seed)
    kills = [Kill(victim, randomness.uniform(0.0, 1.0)) for victim in VICTIMS for _ in range(each)]
    randomness.shuffle(kills)
    return kills


class Lab:
    """One broker, sender and receiver, each of which may be killed and started again."""

    def __init__(self, home: Path, model_bytes: int, mbit: float, *, spooled: bool) -> None:
        self._home = home
        self._roles: dict[str, tuple[Callable[..., None], Any]] = {
            SENDER: (_sender, mbit),
            RECEIVER: (_receiver, home / "spool" if spooled else None),
        }
        self._model_bytes = model_bytes
        self.meter: Any = SPAWN.RawValue(Meter)
        self._broker = broker.start(directory=home, kind="mosquitto")
        self._processes: dict[str, SpawnProcess] = {}
        self._reported: dict[str, list[Connection]] = {SENDER: [], RECEIVER: []}
        self._start(SENDER)
        self._start(RECEIVER)

    def kill(self, victim: str) -> None:
        """Kill it and start it again."""
        if victim == BROKER:
            port = self._broker.port
            self._broker.process.kill()
            self._broker.process.wait()
            self._broker = broker.start(directory=self._home, kind="mosquitto", port=port)
            self.meter.back = time.monotonic()
        else:
            self._processes[victim].kill()
            self._processes[victim].join()
            self._start(victim)

    def report_of(self, role: str, deadline: float) -> tuple[float, str] | None:
        """Return when (monotonic seconds) and with which digest a role was done, None if it did not
        report in time.
        """
        while (left_s := deadline - time.monotonic()) > 0:
            for reported in wait(self._reported[role], left_s):
                assert isinstance(reported, Connection)
                try:
                    moment, digest = reported.recv()
                except EOFError:  # a life that ended before it was done
                    self._reported[role].remove(reported)
                else:
                    return moment, digest
        return None

    def close(self) -> None:
        """End all."""
        for process in self._processes.values():
            process.kill()
            process.join()
        self._broker.stop()

    def _start(self, role: str) -> None:
        ours, theirs = SPAWN.Pipe(duplex=False)
        work, own = self._roles[role]
        given = (self._broker.port, self._model_bytes, own, self.meter, theirs)
        process = SPAWN.Process(target=work, args=given, daemon=True)
        process.start()
        theirs.close()
        self._processes[role] = process
        self._reported[role].append(ours)


def play(kill: Kill, *, model_bytes: int, mbit: float, spooled: bool) -> Outcome:
    """Send one model from a fresh sender to a fresh receiver, kill in between, and return what
    became of it.
    """
    seconds = model_bytes * 8 / (mbit * 1e6)
    digest = _digest(_model(model_bytes))
    with ExitStack() as stack:
        lab = Lab(stack.enter_context(folder()), model_bytes, mbit, spooled=spooled)
        stack.callback(lab.close)
        meter = lab.meter
        deadline = time.monotonic() + PATIENCE_S
        while not meter.begun and time.monotonic() < deadline:
            time.sleep(POLL_S)
        begun = meter.begun
        if kill.victim != NOBODY:
            time.sleep(max(0.0, begun + kill.moment * seconds - time.monotonic()))
        had = meter.arrived
        killed = time.monotonic()
        if kill.victim != NOBODY:
            lab.kill(kill.victim)
        deadline = time.monotonic() + PATIENCE_S
        received = lab.report_of(RECEIVER, deadline)
        closed = lab.report_of(SENDER, deadline)
    took_s = received[0] - begun if received else float("nan")
    return Outcome(
        victim=kill.victim,
        moment=round(kill.moment, 3),
        had=had,
        away_s=round(max(0.0, meter.back - killed), 3),
        complete=received is not None,
        right=received is not None and received[1] == digest,
        closed=closed is not None and closed[1] == digest,
        seconds=round(took_s, 3),
        chunks_again=meter.chunks - -(-model_bytes // TRANSFER.chunk_bytes),
        bytes_again=meter.nbytes - model_bytes,
    )


def _model(model_bytes: int) -> Row:
    return drawn(layout_of(model_bytes), 1)


def _digest(row: Row) -> str:
    return hashlib.sha256(row.data).hexdigest()


async def _introduced(endpoint: Endpoint, meter: Any) -> None:
    """Note when a life is connected."""
    await endpoint.introduced(timeout_s=PATIENCE_S)
    meter.back = time.monotonic()


def _sender(port: int, model_bytes: int, mbit: float, meter: Any, reported: Connection) -> None:
    keep_large_buffers()

    async def run() -> None:
        links = {RECEIVER: LinkSettings(down_mbit=mbit)}
        layout = layout_of(model_bytes)
        endpoint = parent_of(local(port), SENDER, links, layout, TRANSFER, own=new_session())
        publish = endpoint.connection.publish_body

        def counted(topic: str, body: Body, *, done: Callable[[], None]) -> None:
            if endpoint.connection.up:
                meter.begun = meter.begun or time.monotonic()
                meter.chunks += 1
                meter.nbytes += len(body.view)
            publish(topic, body, done=done)

        endpoint.connection.publish_body = counted  # type: ignore[method-assign]

        async def work() -> None:
            played = await endpoint.round(dispatch(0, [(_model(model_bytes), [RECEIVER])]))
            reported.send((time.monotonic(), _digest(played.uploads.rows_K[0])))
            await asyncio.Event().wait()

        await asyncio.gather(_introduced(endpoint, meter), lead(endpoint, work))

    asyncio.run(run())


def _receiver(
    port: int, model_bytes: int, spool: Path | None, meter: Any, reported: Connection
) -> None:
    keep_large_buffers()

    async def run() -> None:
        endpoint = child_of(
            local(port),
            RECEIVER,
            parent=SENDER,
            transfer=TRANSFER,
            session="",
            spool=Spool.open(spool, run=RUN, node=RECEIVER),
        )
        receiver = endpoint.session.link.receiver
        receive = receiver.receive_chunk

        def counted(*what: Any, **more: Any) -> bool:
            fresh = receive(*what, **more)
            meter.arrived += fresh
            return fresh

        receiver.receive_chunk = counted  # type: ignore[method-assign]

        def answer(out: Row, row: Row) -> None:
            moment = time.monotonic()
            np.copyto(out, row)
            reported.send((moment, _digest(row)))

        layout = layout_of(model_bytes)
        await asyncio.gather(_introduced(endpoint, meter), follow(endpoint, layout, answer=answer))

    asyncio.run(run())


def _row_of(outcome: Outcome, undisturbed: Outcome) -> list[object]:
    complete = {True: "yes", False: "NO"}
    right = {True: "right", False: "WRONG"}
    return [
        outcome.victim,
        f"{outcome.moment:.3f}",
        outcome.had,
        f"{outcome.away_s:.2f} s",
        complete[outcome.complete and outcome.closed],
        right[outcome.right],
        f"{outcome.seconds:.2f} s",
        f"{outcome.seconds - undisturbed.seconds:+.2f} s",
        outcome.chunks_again,
        f"{outcome.bytes_again / MB:.1f} MB",
    ]


def judge(outcomes: Sequence[Outcome], *, keeping: Collection[str]) -> list[str]:
    """Return what falls short of: all complete, the right digest, at most a window of bytes again.

    `keeping`: the victims after whose death the receiver still has what it got.
    """
    window = TRANSFER.window * TRANSFER.chunk_bytes
    broken = [o for o in outcomes if not (o.complete and o.right and o.closed)]
    costly = [o for o in outcomes if o.victim in keeping and o.bytes_again > window]
    return [
        *(f"not complete, or wrong: {o}" for o in broken),
        *(f"more than a window of {window / 1e6:g} MB again: {o}" for o in costly),
    ]


def main(
    *,
    seed: int | None = None,
    each: Annotated[int, "kills of each victim"] = 10,
    bytes_: int = 45_000_000,
    mbit: float = 100.0,
    spool: Annotated[bool, "let the receiver keep its chunks in a file"] = False,
    csv_: Annotated[bool, "print comma-separated values in place of a table"] = False,
) -> bool:
    """Play all kills, print a row for each, and return whether one falls short."""
    if seed is None:
        seed = random.SystemRandom().randrange(10**6)
    how: dict[str, Any] = {"model_bytes": bytes_, "mbit": mbit, "spooled": spool}
    undisturbed = play(Kill(NOBODY, 0.0), **how)
    outcomes = []
    for kill in draw(seed, each=each):
        outcomes.append(play(kill, **how))
        tick()
    print(f"\nseed {seed}; undisturbed: {undisturbed.seconds:.2f} s", file=sys.stderr)
    outcomes.sort(key=lambda o: (o.victim, o.moment))
    if csv_:
        written = csv.DictWriter(sys.stdout, [field.name for field in fields(Outcome)])
        written.writeheader()
        written.writerows(asdict(outcome) for outcome in (undisturbed, *outcomes))
    else:
        table = Table(
            "victim",
            "moment",
            "had",
            "away",
            "complete",
            "digest",
            "took",
            "later",
            "chunks again",
            "bytes again",
        )
        for outcome in outcomes:
            table.add(*_row_of(outcome, undisturbed))
    keeping = VICTIMS if spool else (BROKER, SENDER)
    shortcomings = judge(outcomes, keeping=keeping)
    print(*shortcomings, sep="\n", file=sys.stderr)
    return bool(shortcomings)


if __name__ == "__main__":
    run(main)
