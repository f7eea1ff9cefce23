"""One model, one way: tensors in one process to tensors in another, through mosquitto; encode and
decode included.

The parent's announcement carries the task; the child pulls, checks, and has named arrays over the
row it assembled. Beside it, in turn, the same bytes by plain TCP between two processes and through
a bare relay process.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt

from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.host.memory import keep_large_buffers
from fedstrata.common.model.layout import ModelLayout, Row, Section
from fedstrata.deploy.brokers import broker
from tests.bench.endpoints import child_of, dispatch, follow, lead, local, parent_of
from tests.bench.running import SPAWN, folder, run, spawned
from tests.bench.tcp import Baseline

PARENT, CHILD = "parent", "child"
TENSORS: Final = 122  # as many as a ResNet-18's state_dict has
TRANSFER: Final = TransferSettings(idle_s=30.0)


@dataclass(frozen=True, slots=True)
class OneWay:
    """Medians of each way: seconds, and CPU seconds per GB over all its processes (of ours: also
    the broker's).
    """

    ours_s: float
    raw_s: float
    relay_s: float
    ours_cpu: float
    raw_cpu: float
    relay_cpu: float

    def __str__(self) -> str:
        return (
            f"{self.ours_s * 1e3:.1f} ms = {100 * self.raw_s / self.ours_s:.0f} % of raw TCP "
            f"({self.raw_s * 1e3:.1f} ms), {100 * self.relay_s / self.ours_s:.0f} % of the relay "
            f"({self.relay_s * 1e3:.1f} ms); CPU s per GB: {self.ours_cpu:.2f}, "
            f"raw TCP {self.raw_cpu:.2f}, relay {self.relay_cpu:.2f}"
        )


def play(model_bytes: int, *, repeats: int) -> OneWay:
    """Time one model, the three ways in turn, after a warm-up of each."""
    keep_large_buffers()
    layout = layout_of(model_bytes)
    arrivals: SimpleQueue[float] = SPAWN.SimpleQueue()
    with (
        folder() as home,
        broker.start(directory=home) as served,
        Baseline(model_bytes, down=1, up=0, relayed=False) as raw,
        Baseline(model_bytes, down=1, up=0, relayed=True) as relay,
        spawned(_child, served.port, layout, arrivals) as child,
    ):
        ours = (os.getpid(), served.process.pid, child.pid or 0)
        found = asyncio.run(_parent(served.port, layout, repeats, arrivals, ours, (raw, relay)))
    ways = zip(*found[1:], strict=True)
    seconds, cpu = ([*map(median, zip(*each, strict=True))] for each in ways)
    return OneWay(*seconds, *(cpu_s / (model_bytes / 1e9) for cpu_s in cpu))


def layout_of(model_bytes: int) -> ModelLayout:
    """Return a layout of so many bytes in a ResNet-18's number of tensors."""
    width = model_bytes // 4 // TENSORS
    widths = [width] * (TENSORS - 1) + [model_bytes // 4 - (TENSORS - 1) * width]
    return ModelLayout.build(
        [(f"layer{i}.weight", (w,), Section.PARAMETER) for i, w in enumerate(widths)]
    )


async def _parent(
    port: int,
    layout: ModelLayout,
    repeats: int,
    arrivals: SimpleQueue[float],
    ours: tuple[int, ...],
    baselines: Sequence[Baseline],
) -> list[tuple[list[float], list[float]]]:
    """Return the seconds and the CPU seconds of each way, once for each repeat and once before."""
    endpoint = parent_of(local(port), PARENT, [CHILD], layout, TRANSFER)
    row = layout.empty()
    draw = np.random.default_rng(1)
    state: dict[str, npt.NDArray[np.float32]] = {
        e.name: draw.standard_normal(e.shape, np.float32) for e in layout.entries
    }

    async def one(global_round: int) -> tuple[list[float], list[float]]:
        for tensor in state.values():
            # all of them: chunks that the child has would not travel
            np.add(tensor, 1.0, out=tensor)
        before = _cpu_s(ours)
        start = time.monotonic()
        layout.flatten(state, row)
        playing = asyncio.create_task(endpoint.round(dispatch(global_round, [(row, [CHILD])])))
        arrived = await asyncio.to_thread(arrivals.get)
        seconds = [arrived - start]
        cpu_s = [_cpu_s(ours) - before]
        await playing
        for baseline in baselines:
            processes = (os.getpid(), *baseline.pids)
            before = _cpu_s(processes)
            seconds.append(await asyncio.to_thread(baseline.seconds))
            cpu_s.append(_cpu_s(processes) - before)
        return seconds, cpu_s

    async def rounds() -> list[tuple[list[float], list[float]]]:
        return [await one(i) for i in range(repeats + 1)]

    return await lead(endpoint, rounds)


def _child(port: int, layout: ModelLayout, arrivals: SimpleQueue[float]) -> None:
    keep_large_buffers()

    def arrived(row: Row) -> None:
        complete = len(layout.views(row)) == TENSORS
        arrivals.put(time.monotonic() if complete else 0.0)

    async def serve() -> None:
        endpoint = child_of(local(port), CHILD, parent=PARENT, transfer=TRANSFER)
        await follow(endpoint, layout, arrived=arrived, answer=lambda out, row: None)

    asyncio.run(serve())


def _cpu_s(processes: tuple[int, ...]) -> float:
    """Return the CPU seconds that all threads of processes have used."""
    tasks = (path for pid in processes for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(path.read_text().split()[0]) for path in tasks) / 1e9


def main(*, bytes_: int = 45_000_000, repeats: int = 5) -> None:
    """Print the figures of one run."""
    print(f"one way, {bytes_ / 1e6:g} MB: {play(bytes_, repeats=repeats)}")


if __name__ == "__main__":
    run(main)
