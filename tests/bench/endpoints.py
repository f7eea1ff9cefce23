"""Parents and children that exchange models without training: what benchmarks of transfers share.

Each runs in a process of its own, through the code that the roles run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from multiprocessing.queues import SimpleQueue
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

from fedstrata.common.accounting.work import Work
from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.host.memory import keep_large_buffers
from fedstrata.common.model.layout import LinkLayouts, ModelLayout, Row
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
from fedstrata.common.storage.spool import Spool

RUN: Final = "bench-1"
SESSION: Final = "5e55104e"  # each parent's; a child learns it when it finds the run
CONNECT_S: Final = 30.0

# names of children, and when (monotonic seconds, of one clock for all processes) each had a model
Arrivals: TypeAlias = "SimpleQueue[tuple[str, float]]"
_T = TypeVar("_T")


def local(port: int) -> BrokerAddress:
    """Return the address of a broker on this machine."""
    return BrokerAddress("127.0.0.1", port)


def parent_of(
    address: BrokerAddress,
    name: str,
    links: Mapping[str, LinkSettings] | Sequence[str],
    layout: ModelLayout,
    transfer: TransferSettings,
    *,
    role: str = "institution",
    own: str = SESSION,
    spool: Spool | None = None,
    **to: Any,
) -> ParentEndpoint:
    """Return the parent of children, whose links are not limited if only names are given."""
    if not isinstance(links, Mapping):
        links = dict.fromkeys(links, LinkSettings())
    identity = Identity(RUN, name, role, own)
    below = ToChildren(links=links, transfer=transfer, **to)
    endpoint = ParentEndpoint(address, identity, below, spool=spool)
    endpoint.set_layouts(LinkLayouts.plain(layout))
    return endpoint


async def lead(
    endpoint: ParentEndpoint, work: Callable[[], Awaitable[_T]], *, farewell_s: float = 5.0
) -> _T:
    """Connect a parent, do the work once all its children are ready, and return its result."""

    async def rounds() -> _T:
        endpoint.set_state(NodeState.READY)
        await endpoint.gather(Closing())
        return await work()

    return await live(
        (endpoint,),
        rounds(),
        connect_timeout_s=CONNECT_S,
        goodbye=lambda: endpoint.farewells(timeout_s=farewell_s),
    )


def dispatch(global_round: int, models: Sequence[tuple[Any, Sequence[str]]]) -> Dispatch:
    """Return a round in which the children that are named with it get each model."""
    epochs = {name: 1 for _, names in models for name in names}
    return Dispatch(global_round, 0, models=[*models], epochs=epochs, closing=Closing())


def child_of(
    address: BrokerAddress,
    name: str,
    *,
    parent: str,
    transfer: TransferSettings,
    role: str = "device",
    own: str = "",
    link: LinkSettings | None = None,
    session: str = SESSION,
    spool: Spool | None = None,
    **to: Any,
) -> ChildEndpoint:
    """Return a child, whose link is not limited if none is given. `own`: its own session, a new one
    if empty; `session`: its parent's.
    """
    above = ToParent(
        parent=parent, session=session, transfer=transfer, link=link or LinkSettings(), **to
    )
    identity = Identity(RUN, name, role, own or new_session())
    return ChildEndpoint(address, identity, above, spool=spool)


async def follow(
    endpoint: ChildEndpoint,
    layout: ModelLayout,
    *,
    arrived: Callable[[Row], object] = lambda _: None,
    answer: Callable[[Row, Row], object] = np.copyto,
    farewell_s: float = 2.0,
) -> None:
    """Answer each model to the end of the run: `answer(out, model)` in a thread once it has
    `arrived`.
    """
    out = layout.empty()
    out[:] = 0

    async def work(task: Task, model: Arriving, report: Report) -> WorkResult:
        row = await model.whole()
        arrived(row)
        await asyncio.to_thread(answer, out, row)
        return result(out)

    endpoint.set_state(NodeState.READY, samples=1)
    await live(
        (endpoint,),
        endpoint.serve(LinkLayouts.plain(layout), work),
        connect_timeout_s=CONNECT_S,
        goodbye=lambda: endpoint.farewell((), timeout_s=farewell_s),
    )


def result(row: Row) -> WorkResult:
    """Return what a child makes of a task: this model, of one sample."""
    return WorkResult(row.data, Work(1, 0.0, 1, 1, 0.0, 0.0))


def run_all(children: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run children beside one another in this process, to the end of the run."""
    keep_large_buffers()

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for child in children:
                group.create_task(child)

    asyncio.run(run())


def return_models(
    port: int, names: Sequence[str], layout: ModelLayout, arrivals: Arrivals, **to: Any
) -> None:
    """Run children that return what they get, and report when each has it."""
    run_all(returning(child_of(local(port), name, **to), layout, arrivals) for name in names)


async def returning(endpoint: ChildEndpoint, layout: ModelLayout, arrivals: Arrivals) -> None:
    """Return each model, and report when it has arrived."""
    name = endpoint.identity.name
    await follow(endpoint, layout, arrived=lambda _: arrivals.put((name, time.monotonic())))
