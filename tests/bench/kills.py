"""`make bench NAME=kills`: kill broker, sender or receiver in mid-transfer, ten times each.

    sender (ParentEndpoint, link of so many Mbit/s) --model--> mosquitto --model--> receiver
    (ChildEndpoint)

Each is a process of its own. One of them gets SIGKILL and is started again at once: the broker on
its port, the sender with the same model (so the same blob), the receiver with nothing or, with
--spool, with what it had put into its file. Victims and moments are drawn from a seed. Each kill
has a lab of its own, and is measured against a transfer that nothing happened to.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import ctypes
import hashlib
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, fields
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table
from rounds import layout_of

from fedstrata.common.accounting.work import Work
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.host.memory import keep_large_buffers
from fedstrata.common.model.layout import LinkLayouts, Row
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.bulk import Body
from fedstrata.common.protocol.messages import NodeState, Task
from fedstrata.common.protocol.peers import ToChildren, ToParent
from fedstrata.common.protocol.presence import Identity
from fedstrata.common.runtime.child_endpoint import ChildEndpoint
from fedstrata.common.runtime.endpoint import Endpoint
from fedstrata.common.runtime.lifecycle import live
from fedstrata.common.runtime.link_models import Arriving
from fedstrata.common.runtime.parent_endpoint import ParentEndpoint
from fedstrata.common.runtime.round import Dispatch, Report, WorkResult
from fedstrata.common.runtime.world import new_session
from fedstrata.common.settings.closing import Closing
from fedstrata.common.settings.links import LinkSettings
from fedstrata.common.storage.spool import Spool
from fedstrata.deploy.brokers import broker

RUN: Final = "kills-1"
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
        self._home, self._model_bytes, self._mbit = home, model_bytes, mbit
        self._spool = home / "spool" if spooled else None
        self._context = multiprocessing.get_context("spawn")
        self.meter: Any = self._context.RawValue(Meter)
        self._broker = broker.start(directory=home, kind="mosquitto")
        self._processes: dict[str, SpawnProcess] = {}
        self._reported: dict[str, list[Connection]] = {SENDER: [], RECEIVER: []}
        self._start(SENDER)
        self._start(RECEIVER)

    def kill(self, victim: str) -> None:
        """Kill it and start it again."""
        if victim == BROKER:
            self._broker.process.kill()
            self._broker.process.wait()
            self._broker = broker.start(
                directory=self._home, kind="mosquitto", port=self._broker.port
            )
            self.meter.back = time.monotonic()
        else:
            self._processes[victim].kill()
            self._processes[victim].join()
            self._start(victim)

    def hear(self, role: str, deadline: float) -> tuple[float, str] | None:
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
        ours, theirs = self._context.Pipe(duplex=False)
        reported = self.meter, theirs
        process = self._context.Process(
            target=_sender if role == SENDER else _receiver,
            args=(
                self._broker.port,
                self._model_bytes,
                self._mbit if role == SENDER else self._spool,
                *reported,
            ),
            daemon=True,
        )
        process.start()
        theirs.close()
        self._processes[role] = process
        self._reported[role].append(ours)


def play(kill: Kill, *, model_bytes: int, mbit: float, spooled: bool) -> Outcome:
    """Send one model from a fresh sender to a fresh receiver, kill in between, and return what
    became of it.
    """
    seconds = model_bytes * 8 / (mbit * 1e6)
    row = _model(model_bytes)
    with tempfile.TemporaryDirectory() as home:
        lab = Lab(Path(home), model_bytes, mbit, spooled=spooled)
        meter = lab.meter
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not meter.begun and time.monotonic() < deadline:
                time.sleep(POLL_S)
            begun = meter.begun
            if kill.victim != NOBODY:
                time.sleep(max(0.0, begun + kill.moment * seconds - time.monotonic()))
            had, killed = meter.arrived, time.monotonic()
            if kill.victim != NOBODY:
                lab.kill(kill.victim)
            deadline = time.monotonic() + PATIENCE_S
            received = lab.hear(RECEIVER, deadline)
            closed = lab.hear(SENDER, deadline)
            chunks, nbytes, back = meter.chunks, meter.nbytes, meter.back
        finally:
            lab.close()
    return Outcome(
        victim=kill.victim,
        moment=round(kill.moment, 3),
        had=had,
        away_s=round(max(0.0, back - killed), 3),
        complete=received is not None,
        right=received is not None and received[1] == _digest(row),
        closed=closed is not None and closed[1] == _digest(row),
        seconds=round(received[0] - begun, 3) if received else float("nan"),
        chunks_again=chunks - -(-model_bytes // TRANSFER.chunk_bytes),
        bytes_again=nbytes - model_bytes,
    )


def _model(model_bytes: int) -> Row:
    layout = layout_of(model_bytes)
    row = layout.empty()
    layout.floats(row)[:] = np.random.default_rng(1).standard_normal(layout.columns, np.float32)
    return row


def _digest(row: Row) -> str:
    return hashlib.sha256(row.data).hexdigest()


async def _nothing() -> None:
    pass


async def _introduced(endpoint: Endpoint, meter: Any) -> None:
    await endpoint.introduced(timeout_s=PATIENCE_S)
    meter.back = time.monotonic()


def _sender(port: int, model_bytes: int, mbit: float, meter: Any, reported: Connection) -> None:
    keep_large_buffers()

    async def run() -> None:
        endpoint = ParentEndpoint(
            BrokerAddress("127.0.0.1", port),
            Identity(RUN, SENDER, "institution", new_session()),
            ToChildren(links={RECEIVER: LinkSettings(down_mbit=mbit)}, transfer=TRANSFER),
        )
        endpoint.set_layouts(LinkLayouts.plain(layout_of(model_bytes)))
        publish = endpoint.connection.publish_body

        def counted(topic: str, body: Body, *, done: Callable[[], None]) -> None:
            if endpoint.connection.up:
                meter.begun = meter.begun or time.monotonic()
                meter.chunks += 1
                meter.nbytes += len(body.view)
            publish(topic, body, done=done)

        endpoint.connection.publish_body = counted  # type: ignore[method-assign]
        row = _model(model_bytes)

        async def work() -> None:
            await _introduced(endpoint, meter)
            endpoint.set_state(NodeState.READY)
            await endpoint.gather(Closing())
            played = await endpoint.round(
                Dispatch(0, 0, models=[(row, [RECEIVER])], epochs={RECEIVER: 1}, closing=Closing())
            )
            reported.send((time.monotonic(), _digest(played.uploads.rows_K[0])))
            await asyncio.Event().wait()

        await live((endpoint,), work(), connect_timeout_s=PATIENCE_S, goodbye=_nothing)

    asyncio.run(run())


def _receiver(
    port: int, model_bytes: int, spool: Path | None, meter: Any, reported: Connection
) -> None:
    keep_large_buffers()

    async def run() -> None:
        layout = layout_of(model_bytes)
        endpoint = ChildEndpoint(
            BrokerAddress("127.0.0.1", port),
            Identity(RUN, RECEIVER, "device", new_session()),
            ToParent(parent=SENDER, transfer=TRANSFER, link=LinkSettings()),
            spool=Spool.open(spool, run=RUN, node=RECEIVER),
        )
        out = layout.empty()
        receive = endpoint.session.link.receiver.receive_chunk

        def counted(*what: Any, **more: Any) -> bool:
            fresh = receive(*what, **more)
            meter.arrived += fresh
            return fresh

        endpoint.session.link.receiver.receive_chunk = counted  # type: ignore[method-assign]

        async def work(task: Task, model: Arriving, report: Report) -> WorkResult:
            row = await model.whole()
            moment = time.monotonic()
            np.copyto(out, row)
            reported.send((moment, _digest(row)))
            return WorkResult(out.data, Work(1, 0.0, 1, 1, 0.0, 0.0))

        async def serve() -> None:
            await _introduced(endpoint, meter)
            await endpoint.serve(LinkLayouts.plain(layout), work)

        endpoint.set_state(NodeState.READY, samples=1)
        await live((endpoint,), serve(), connect_timeout_s=PATIENCE_S, goodbye=_nothing)

    asyncio.run(run())


def _row_of(outcome: Outcome, undisturbed: Outcome) -> list[str]:
    return [
        outcome.victim,
        f"{outcome.moment:.3f}",
        str(outcome.had),
        f"{outcome.away_s:.2f} s",
        "yes" if outcome.complete and outcome.closed else "NO",
        "right" if outcome.right else "WRONG",
        f"{outcome.seconds:.2f} s",
        f"{outcome.seconds - undisturbed.seconds:+.2f} s",
        str(outcome.chunks_again),
        f"{outcome.bytes_again / 1e6:.1f} MB",
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


def main() -> None:
    """Play all kills, print a row for each, and end with 1 where one falls short."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--each", type=int, default=10, help="kills of each victim")
    parser.add_argument("--bytes", type=int, default=45_000_000)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument(
        "--spool", action="store_true", help="let the receiver keep its chunks in a file"
    )
    parser.add_argument(
        "--csv", action="store_true", help="print comma-separated values in place of a table"
    )
    options = parser.parse_args()
    how: dict[str, Any] = {
        "model_bytes": options.bytes,
        "mbit": options.mbit,
        "spooled": options.spool,
    }
    undisturbed = play(Kill(NOBODY, 0.0), **how)
    outcomes = []
    for kill in draw(options.seed, each=options.each):
        outcomes.append(play(kill, **how))
        print(".", end="", file=sys.stderr, flush=True)
    print(f"\nseed {options.seed}; undisturbed: {undisturbed.seconds:.2f} s", file=sys.stderr)
    outcomes.sort(key=lambda o: (o.victim, o.moment))
    if options.csv:
        table = csv.DictWriter(sys.stdout, [field.name for field in fields(Outcome)])
        table.writeheader()
        table.writerows(asdict(outcome) for outcome in (undisturbed, *outcomes))
    else:
        shown = Table(
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
            shown.add_row(*_row_of(outcome, undisturbed))
        Console(width=120).print(shown)
    shortcomings = judge(outcomes, keeping=VICTIMS if options.spool else (BROKER, SENDER))
    for words in shortcomings:
        print(words, file=sys.stderr)
    sys.exit(1 if shortcomings else 0)


if __name__ == "__main__":
    main()
