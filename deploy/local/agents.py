"""Several agents in one process: an error ends only the agent that raised it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextvars import copy_context
from typing import Any, TypeAlias

import typer

from fedstrata.common.errors import as_known
from fedstrata.deploy.console import logs
from fedstrata.deploy.console.reporting import report

Agent: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


async def run_agents(
    agents: Mapping[str, Agent],
    *,
    shared_failure: Callable[[], Exception | None],
    together: Callable[[], bool] = lambda: False,
) -> None:
    """Run agents, by their nodes' names, each to its end.

    An agent's error is reported at once, and the others continue. They end too if `shared_failure`
    returns the error of a shared resource, or if `together` returns true. Raises typer.Exit with
    the exit code of the first error.
    """
    errors: list[Exception] = []

    async def run(name: str, agent: Agent) -> None:
        try:
            await agent()
        except Exception as error:  # noqa: BLE001 - reported here; the other agents go on
            known = as_known(error, name)
            if known is not None and known not in errors:  # a shared failure may end several agents
                alone = len(agents) == 1 or known is shared_failure()
                named = "" if alone else name
                report(known, node=named)
            errors.append(known or error)

    tasks: set[asyncio.Task[None]] = set()
    for name, agent in agents.items():
        context = copy_context()
        context.run(logs.NODE.set, name)
        tasks.add(asyncio.create_task(run(name, agent), name=name, context=context))
    try:
        while tasks and not (errors and (shared_failure() is not None or together())):
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
    if errors:
        raise typer.Exit(getattr(errors[0], "exit_code", 1))
