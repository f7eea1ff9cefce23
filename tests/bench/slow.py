"""`make bench NAME=slow`: what slow receivers cost the fast ones beside them, the sender, and the
broker.

    sender (ParentEndpoint) --model--> mosquitto --model--> fast receivers (one process), slow ones
    (a process each)

A slow receiver needs so many milliseconds for each message, in which it reads nothing: its link is
as fast as the others', and nobody declared it. The fast are timed alone and beside the slow, in
turn, in one lab. Then one slow receiver beside a fast one meets brokers that drop what they queue
for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated, Any, Final, TypeAlias

import numpy as np

from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.host.memory import keep_large_buffers
from fedstrata.common.model.layout import ModelLayout
from fedstrata.common.runtime.child_endpoint import ChildEndpoint
from fedstrata.deploy.brokers import broker
from tests.bench.endpoints import (
    Arrivals,
    child_of,
    dispatch,
    lead,
    local,
    parent_of,
    returning,
    run_all,
)
from tests.bench.running import MB, SPAWN, Table, folder, peak_bytes, run, spawned
from tests.helpers.nodes import drawn, layout_of

SENDER: Final = "sender"
IDLE_S: Final = 120.0
TRANSFER: Final = TransferSettings(idle_s=IDLE_S)
DEFAULTS: Final = {"max_queued_messages": 1000, "max_inflight_messages": 20, "max_queued_bytes": 0}
BROKERS: Final[Sequence[tuple[str, Mapping[str, int], Sequence[str]]]] = (
    ("ours", {}, ["fast"]),
    ("mosquitto's defaults", DEFAULTS, ["fast"]),
    ("a queue of 50", {"max_queued_messages": 50}, ["fast"]),
    ("a queue of 50, the slow one alone", {"max_queued_messages": 50}, []),
)

Broadcast: TypeAlias = Callable[[Sequence[str]], Awaitable[dict[str, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """A broker and receivers of models; `slow_s` is what a slow receiver needs for a message."""

    fast: Sequence[str]
    slow: Sequence[str]
    model_bytes: int
    slow_s: float
    transfer: TransferSettings = TRANSFER
    settings: Mapping[str, int] = field(default_factory=dict)

    def play(self, rounds: Callable[[Broadcast], Awaitable[None]]) -> tuple[int, int, int]:
        """Start all, and play `rounds` with a function that broadcasts a new model and returns who
        had it when, in seconds from the task.

        Return the chunks published, those published again, and the broker's most bytes of memory.
        """
        keep_large_buffers()
        layout = layout_of(self.model_bytes)
        arrivals: Arrivals = SPAWN.SimpleQueue()
        groups = [(self.fast, 0.0), *(([name], self.slow_s) for name in self.slow)]
        with ExitStack() as stack:
            home = stack.enter_context(folder())
            served = stack.enter_context(
                broker.start(directory=home, kind="mosquitto", settings=self.settings)
            )
            for names, pause_s in groups:
                given = (served.port, names, layout, self.transfer, pause_s, arrivals)
                stack.enter_context(spawned(_receive, *given))
            chunks = asyncio.run(self._send(served.port, layout, rounds, arrivals))
            return *chunks, peak_bytes(served.process.pid)

    async def _send(
        self,
        port: int,
        layout: ModelLayout,
        rounds: Callable[[Broadcast], Awaitable[None]],
        arrivals: Arrivals,
    ) -> tuple[int, int]:
        names = [*self.fast, *self.slow]
        endpoint = parent_of(local(port), SENDER, names, layout, self.transfer)
        global_round = 0

        async def broadcast(to: Sequence[str]) -> dict[str, float]:
            nonlocal global_round
            row = drawn(layout, global_round)
            start = time.monotonic()
            played = await endpoint.round(dispatch(global_round, [(row, to)]))
            global_round += 1
            same = [np.array_equal(upload, row) for upload in played.models.values()]
            assert all(same), "another model came back"
            return {name: moment - start for name, moment in (arrivals.get() for _ in to)}

        await lead(endpoint, lambda: rounds(broadcast))
        sender = endpoint.session.link.sender
        return sender.chunks_published, sender.chunks_repeated


def _receive(
    port: int,
    names: Sequence[str],
    layout: ModelLayout,
    transfer: TransferSettings,
    pause_s: float,
    arrivals: Arrivals,
) -> None:
    def made(name: str) -> ChildEndpoint:
        endpoint = child_of(local(port), name, parent=SENDER, transfer=transfer)
        receiver = endpoint.session.link.receiver
        receive = receiver.receive_chunk

        def slowly(*what: Any, **more: Any) -> bool:
            time.sleep(pause_s)
            return receive(*what, **more)

        if pause_s:
            receiver.receive_chunk = slowly  # type: ignore[method-assign]
        return endpoint

    run_all(returning(made(name), layout, arrivals) for name in names)


def beside(lab: Lab, *, repeats: int) -> None:
    """Time the fast alone and beside the slow, in turn, after one broadcast of each to warm up."""
    times: dict[str, list[float]] = {"alone": [], "beside": [], "slow": []}

    async def rounds(broadcast: Broadcast) -> None:
        for _ in range(repeats + 1):
            alone = await broadcast(lab.fast)
            both = await broadcast([*lab.fast, *lab.slow])
            times["alone"].append(max(alone.values()))
            times["beside"].append(max(both[name] for name in lab.fast))
            times["slow"].append(max(both[name] for name in lab.slow))

    published, again, peak = lab.play(rounds)
    alone_s, beside_s, slow_s = (median(each[1:]) for each in times.values())
    table = Table(
        "fast alone",
        "beside slow",
        "ratio",
        "the slow",
        "again",
        "broker's peak",
        "100 MB + a blob for each slow",
        title=f"{len(lab.fast)} fast, {len(lab.slow)} slow ({lab.slow_s * 1e3:g} ms for 1 MB), "
        f"{lab.model_bytes / MB:g} MB each",
    )
    table.add(
        f"{alone_s * 1e3:.0f} ms",
        f"{beside_s * 1e3:.0f} ms",
        f"{beside_s / alone_s:.2f}",
        f"{slow_s:.2f} s",
        f"{again} of {published}",
        f"{peak / MB:.0f} MB",
        f"{100 + len(lab.slow) * lab.model_bytes / MB:.0f} MB",
    )


def dropped(*, model_bytes: int, slow_s: float) -> None:
    """Let brokers drop what they queue for a slow receiver, and print what share is published
    again.
    """
    title = f"1 fast, 1 slow ({slow_s * 1e3:g} ms for 32 KB), {model_bytes / MB:g} MB each"
    table = Table(
        "broker", "fast", "slow", "chunks", "again", "share", "broker's peak", title=title
    )
    transfer = TransferSettings(idle_s=IDLE_S, chunk_bytes=32_768)
    chunks = -(-model_bytes // transfer.chunk_bytes)
    given = {"model_bytes": model_bytes, "slow_s": slow_s, "transfer": transfer}
    for name, settings, fast in BROKERS:
        times: dict[str, float] = {}

        async def rounds(
            broadcast: Broadcast, names: Any = (*fast, "slow"), to: Any = times
        ) -> None:
            to |= await broadcast(names)

        lab = Lab(fast=fast, slow=["slow"], settings=settings, **given)  # type: ignore[arg-type]
        _, again, peak = lab.play(rounds)
        seconds = [f"{times[who]:.2f} s" for who in (*fast, "slow")]
        table.add(
            name,
            *[""] * (1 - len(fast)),
            *seconds,
            chunks,
            again,
            f"{100 * again / chunks:.0f} %",
            f"{peak / MB:.0f} MB",
        )


def main(
    *,
    bytes_: int = 45_000_000,
    fast: int = 6,
    slow: int = 4,
    slow_ms: Annotated[float, "what a slow receiver needs for a chunk of 1 MB"] = 50.0,
    repeats: int = 5,
) -> None:
    """Measure both and print their tables."""
    lab = Lab(
        fast=[f"fast-{i}" for i in range(fast)],
        slow=[f"slow-{i}" for i in range(slow)],
        model_bytes=bytes_,
        slow_s=slow_ms / 1e3,
    )
    beside(lab, repeats=repeats)
    for model_bytes in (40_000_000, 100_000_000):
        dropped(model_bytes=model_bytes, slow_s=0.001)


if __name__ == "__main__":
    run(main)
