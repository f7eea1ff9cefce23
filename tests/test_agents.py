"""Several agents in one process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import pytest
import typer

from fedstrata.common.errors import DuplicateName, InvalidExperiment
from fedstrata.deploy.console import logs
from fedstrata.deploy.local.agents import Agent, run_agents
from tests.helpers.sites import PATIENCE_S, in_real_time


def failing(error: Exception, after: Callable[[], bool] = lambda: True) -> Agent:
    async def run() -> None:
        while not after():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)
        raise error

    return run


def code_of(
    agents: Mapping[str, Agent],
    shared_failure: Callable[[], Exception | None] = lambda: None,
    together: Callable[[], bool] = lambda: False,
) -> int:
    """Return the exit code of a process with these agents."""

    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await run_agents(agents, shared_failure=shared_failure, together=together)

    try:
        asyncio.run(bounded())
    except typer.Exit as end:
        return end.exit_code
    return 0


def test_an_agent_that_ends_with_an_error_leaves_the_others_to_their_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = ""

    async def good() -> None:
        nonlocal seen
        while not (seen := capsys.readouterr().err):  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)

    late = failing(InvalidExperiment("a", 1, "is bad", "Fix it."), after=lambda: bool(seen))
    assert code_of({"d0": good, "d1": failing(DuplicateName("taken")), "d2": late}) == 3
    assert seen == "fedstrata: d1: taken\n"
    assert capsys.readouterr().err == "fedstrata: d2: a = 1: is bad. Fix it.\n"


def test_agents_without_an_error_end_with_0() -> None:
    async def good() -> None:
        assert logs.NODE.get() == "d0"

    assert code_of({"d0": good}) == 0
    assert logs.NODE.get() == ""


def test_an_agent_alone_is_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of({"d0": failing(DuplicateName("taken"))}) == 3
    assert capsys.readouterr().err == "fedstrata: taken\n"


def test_an_unforeseen_error_is_logged_and_ends_one_agent(caplog: pytest.LogCaptureFixture) -> None:
    ended = []

    async def good() -> None:
        while not caplog.records:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)
        ended.append(True)

    assert code_of({"d0": good, "d1": failing(ZeroDivisionError("oh"))}) == 1
    (record,) = caplog.records
    assert (
        ended
        and record.levelno == logging.ERROR
        and record.getMessage() == "d1 ended by an unexpected error"
    )
    assert record.exc_info and record.exc_info[0] is ZeroDivisionError


def test_a_failure_of_what_they_share_ends_all_and_is_reported_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = InvalidExperiment("--accelerator", "cuda:9", "is not there", "Use cpu.")
    cancelled = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(logs.NODE.get())
            raise

    agents = {"d0": wait, "d1": failing(error), "d2": failing(error)}
    assert code_of(agents, shared_failure=lambda: error) == 4
    assert cancelled == ["d0"]
    assert capsys.readouterr().err == f"fedstrata: {error}\n"


@in_real_time
async def test_a_cancellation_ends_all() -> None:
    cancelled = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(logs.NODE.get())
            raise

    task = asyncio.create_task(run_agents({"d0": wait, "d1": wait}, shared_failure=lambda: None))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(cancelled) == ["d0", "d1"]


def test_agents_that_must_all_work_end_together() -> None:
    ended = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(logs.NODE.get())

    error = InvalidExperiment("data.root", "data/d1", "is not there", "Give it.")
    assert code_of({"d0": wait, "d1": failing(error)}, together=lambda: True) == 4
    assert ended == ["d0"]
