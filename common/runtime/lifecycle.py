"""The life of a node in a run: connected while it works, and a last word that says how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from common.errors import DuplicateName, FedstrataError, InvalidBelow, InvalidExperiment
from common.protocol.messages import NodeState
from common.runtime.endpoint import Endpoint

LAST_WORD_S: Final = 2.0

_T = TypeVar("_T")


async def live(
    endpoints: Sequence[Endpoint],
    work: Coroutine[Any, Any, _T],
    *,
    connect_timeout_s: float,
    goodbye: Callable[[], Awaitable[None]],
    last_look: Callable[[], Awaitable[None]] | None = None,
) -> _T:
    """Keep the endpoints connected while `work` runs and return what it made.

    At its end the state is FINISHED, `goodbye` runs, `last_look` gives others the time to read what they want of this
    process, and what the node kept on the brokers is cleared. An error
    leaves the state FAILED with its reason, an interruption DISCONNECTED; under a name that is another's it is LOST,
    which concerns this process alone. Raises what `work` or an endpoint raised; of several errors the first of ours.
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
        if last_look is not None:
            await last_look()
        for endpoint in endpoints:
            endpoint.release_name()
        for endpoint in endpoints:
            await endpoint.leave(timeout_s=LAST_WORD_S)
        return result
    except asyncio.CancelledError:
        await _say(endpoints, NodeState.DISCONNECTED, "interrupted")
        raise
    except BaseException as error:
        known = first_error(error)
        for endpoint, end in zip(endpoints, serving, strict=True):
            if not end.done():  # work may fail before anybody could hear of it
                await endpoint.introduced(timeout_s=LAST_WORD_S)
        state = NodeState.LOST if isinstance(known, DuplicateName) else NodeState.FAILED
        invalid = isinstance(known, InvalidExperiment | InvalidBelow)
        await _say(endpoints, state, str(known or repr(error)), invalid=invalid)
        if known is None:
            raise
        raise known from None
    finally:
        await _end((working, *serving))


def first_error(error: BaseException) -> FedstrataError | None:
    """Return the first error of ours in an exception or a group of them."""
    if isinstance(error, FedstrataError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := first_error(inner))), None)
    return None


async def _say(endpoints: Sequence[Endpoint], state: NodeState, reason: str, *, invalid: bool = False) -> None:
    for endpoint in endpoints:
        endpoint.set_state(state, reason=reason, invalid=invalid)
    for endpoint in endpoints:
        await endpoint.flush(timeout_s=LAST_WORD_S)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # the first was raised; asyncio need not complain of the others
