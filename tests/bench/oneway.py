"""One model, one way: tensors in one process to tensors in another, through mosquitto; encode and
decode included.

The parent's announcement carries the task; the child pulls, checks, and has named arrays over the
row it assembled. Beside it, in turn, the same bytes by plain TCP between two processes and through
a bare relay process.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics as stats
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parent))

import tcp

from fedstrata.common.accounting.work import Work
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.host.memory import keep_large_buffers
from fedstrata.common.model.layout import LinkLayouts, ModelLayout, Section
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.protocol.messages import NodeState, Task
from fedstrata.common.protocol.peers import ToChildren, ToParent
from fedstrata.common.protocol.presence import Identity
from fedstrata.common.runtime.child_endpoint import ChildEndpoint
from fedstrata.common.runtime.lifecycle import live
from fedstrata.common.runtime.link_models import Arriving
from fedstrata.common.runtime.parent_endpoint import ParentEndpoint
from fedstrata.common.runtime.round import Dispatch, Report, WorkResult
from fedstrata.common.runtime.world import new_session
from fedstrata.common.settings.closing import Closing
from fedstrata.common.settings.links import LinkSettings
from fedstrata.deploy.brokers import broker

RUN, PARENT, CHILD = "oneway-1", "parent", "child"
SESSION = "5e55104e"  # the parent's; a node learns it when it finds the run
TENSORS = 122  # as many as a ResNet-18's state_dict has
TRANSFER = TransferSettings(idle_s=30.0)


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
    context = multiprocessing.get_context("spawn")
    arrivals: SimpleQueue[float] = context.SimpleQueue()
    with (
        tempfile.TemporaryDirectory() as home,
        broker.start(directory=Path(home)) as served,
        tcp.Baseline(model_bytes, down=1, up=0, relayed=False) as raw,
        tcp.Baseline(model_bytes, down=1, up=0, relayed=True) as relay,
    ):
        child = context.Process(target=_child, args=(served.port, model_bytes, arrivals))
        child.start()
        processes = (os.getpid(), served.process.pid, child.pid or 0)
        try:
            found = asyncio.run(
                _parent(served.port, model_bytes, repeats, arrivals, processes, (raw, relay))
            )
        finally:
            child.join(5)
            child.kill()
    ways = zip(*found[1:], strict=True)
    seconds, cpu = ([stats.median(each) for each in zip(*column, strict=True)] for column in ways)
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
    model_bytes: int,
    repeats: int,
    arrivals: SimpleQueue[float],
    processes: tuple[int, ...],
    baselines: Sequence[tcp.Baseline],
) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Return the seconds and the CPU seconds of each way, once for each repeat and once before."""
    layout = layout_of(model_bytes)
    endpoint = ParentEndpoint(
        BrokerAddress("127.0.0.1", port),
        Identity(RUN, PARENT, "institution", SESSION),
        ToChildren(links={CHILD: LinkSettings()}, transfer=TRANSFER),
    )
    endpoint.set_layouts(LinkLayouts.plain(layout))
    row = layout.empty()
    draw = np.random.default_rng(1)
    state: dict[str, npt.NDArray[np.float32]] = {
        e.name: draw.standard_normal(e.shape, np.float32) for e in layout.entries
    }

    async def one(global_round: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        for tensor in state.values():
            # all of them: chunks that the child has would not travel
            np.add(tensor, 1.0, out=tensor)
        before, start = _cpu_s(processes), time.monotonic()
        layout.flatten(state, row)
        playing = asyncio.create_task(
            endpoint.round(
                Dispatch(
                    global_round, 0, models=[(row, [CHILD])], epochs={CHILD: 1}, closing=Closing()
                )
            )
        )
        arrived = await asyncio.to_thread(arrivals.get)
        seconds, cpu_s = [arrived - start], [_cpu_s(processes) - before]
        await playing
        for baseline in baselines:
            before = _cpu_s((os.getpid(), *baseline.pids))
            seconds.append(await asyncio.to_thread(baseline.seconds))
            cpu_s.append(_cpu_s((os.getpid(), *baseline.pids)) - before)
        return tuple(seconds), tuple(cpu_s)

    async def rounds() -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
        endpoint.set_state(NodeState.READY)
        await endpoint.gather(Closing())
        return [await one(i) for i in range(repeats + 1)]

    async def goodbye() -> None:
        await endpoint.farewells(timeout_s=5)

    return await live((endpoint,), rounds(), connect_timeout_s=10, goodbye=goodbye)


def _child(port: int, model_bytes: int, arrivals: SimpleQueue[float]) -> None:
    keep_large_buffers()
    layout = layout_of(model_bytes)

    async def run() -> None:
        endpoint = ChildEndpoint(
            BrokerAddress("127.0.0.1", port),
            Identity(RUN, CHILD, "device", new_session()),
            ToParent(parent=PARENT, session=SESSION, transfer=TRANSFER, link=LinkSettings()),
        )
        out = layout.empty()
        layout.floats(out)[:] = 0

        async def work(task: Task, model: Arriving, report: Report) -> WorkResult:
            tensors = layout.views(await model.whole())
            arrivals.put(time.monotonic() if len(tensors) == TENSORS else 0.0)
            return WorkResult(out.data, Work(1, 0.0, 1, 1, 0.0, 0.0))

        async def goodbye() -> None:
            await endpoint.farewell((), timeout_s=2)

        endpoint.set_state(NodeState.READY, samples=1)
        await live(
            (endpoint,),
            endpoint.serve(LinkLayouts.plain(layout), work),
            connect_timeout_s=10,
            goodbye=goodbye,
        )

    asyncio.run(run())


def _cpu_s(processes: tuple[int, ...]) -> float:
    """Return the CPU seconds that all threads of processes have used."""
    tasks = (path for pid in processes for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(path.read_text().split()[0]) for path in tasks) / 1e9


def main() -> None:
    """Print the figures of one run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, default=45_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"one way, {options.bytes / 1e6:g} MB: {play(options.bytes, repeats=options.repeats)}")


if __name__ == "__main__":
    main()
