"""A node's lifecycle in a run: connected during its work, then a final state that reports how it ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from common.errors import (
    DuplicateName,
    FedstrataError,
    InvalidBelow,
    InvalidExperiment,
    NoProgress,
    StateLost,
    as_known,
    first_error,
)
from common.protocol.messages import Failure, NodeState
from common.runtime.absence import Away
from common.runtime.discovery import Moved
from common.runtime.endpoint import Endpoint

LAST_STATE_S: Final = 2.0
NAMESAKE_S: Final = 5.0  # within which the owner of a name answers a second process, over a slow link too

log = logging.getLogger("fedstrata.lifecycle")

_T = TypeVar("_T")


async def live(
    endpoints: Sequence[Endpoint],
    work: Coroutine[Any, Any, _T],
    *,
    connect_timeout_s: float,
    goodbye: Callable[[], Awaitable[None]],
    last_scrape: Callable[[], Awaitable[None]] | None = None,
) -> _T:
    """Keep the endpoints connected while `work` runs and return its result.

    At the end the state becomes FINISHED, `goodbye` runs, `last_scrape` waits for one more scrape of this process's
    metrics, and the node's retained messages are cleared. After an error the state is FAILED with the reason, after an
    interruption DISCONNECTED. If the name is already taken the state is LOST; only this process is affected. So a
    process without its node's state waits for another one of this name before it fails. Raises what `work` or an
    endpoint raised; of several errors the first FedstrataError, or RunFailed if there is none.
    """
    serving = [asyncio.create_task(endpoint.run(connect_timeout_s=connect_timeout_s)) for endpoint in endpoints]
    working = asyncio.create_task(work)
    try:
        await asyncio.wait((working, *serving), return_when=asyncio.FIRST_COMPLETED)
        for end in serving:
            if end.done():
                end.result()
        result = await working
        for endpoint in endpoints:
            endpoint.set_state(NodeState.FINISHED)
        await goodbye()
        if last_scrape is not None:
            await last_scrape()
        await _leave(endpoints)
        return result
    except asyncio.CancelledError:
        await _report(endpoints, NodeState.DISCONNECTED, "interrupted")
        raise
    except BaseException as error:
        known = as_known(error, endpoints[0].identity.name)
        if isinstance(known, StateLost):
            known = await _name_taken(serving) or known
        for endpoint, end in zip(endpoints, serving, strict=True):
            if not end.done():  # work may fail before the connection is made
                await endpoint.introduced(timeout_s=LAST_STATE_S)
        await _report(endpoints, _state(known), str(known or repr(error)), failure=_failure(known))
        if known is None:
            raise
        raise known from known.__cause__
    finally:
        await _end((working, *serving))


async def _name_taken(serving: Sequence[asyncio.Task[None]]) -> DuplicateName | None:
    """Return the error of an endpoint that learns within `NAMESAKE_S` that another process has the name."""
    done, _ = await asyncio.wait(serving, timeout=NAMESAKE_S, return_when=asyncio.FIRST_COMPLETED)
    ends = (first_error(error) for end in done if (error := end.exception()) is not None)
    return next((error for error in ends if isinstance(error, DuplicateName)), None)


async def _leave(endpoints: Sequence[Endpoint]) -> None:
    for endpoint in endpoints:
        await endpoint.flush(timeout_s=max(LAST_STATE_S, endpoint.patience_s()))
    for endpoint in endpoints:  # all of them first: an endpoint must not defend the name against another's clearing
        endpoint.release_name()
    keep_state = any(endpoint.someone_is_away() for endpoint in endpoints)  # they may share the broker and the topic
    for endpoint in endpoints:
        await endpoint.leave(keep_state=keep_state, timeout_s=LAST_STATE_S)


def _state(error: FedstrataError | None) -> NodeState:
    if isinstance(error, DuplicateName):
        return NodeState.LOST
    return NodeState.DISCONNECTED if isinstance(error, Moved | Away) else NodeState.FAILED


def _failure(error: FedstrataError | None) -> Failure:
    if isinstance(error, InvalidExperiment | InvalidBelow):
        return Failure.INVALID
    return Failure.STALLED if isinstance(error, NoProgress) else Failure.NONE


async def _report(
    endpoints: Sequence[Endpoint], state: NodeState, reason: str, *, failure: Failure = Failure.NONE
) -> None:
    for endpoint in endpoints:
        endpoint.set_state(state, reason=reason, failure=failure)
    for endpoint in endpoints:
        await endpoint.flush(timeout_s=LAST_STATE_S)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # only the first was raised; keeps asyncio from logging the others
