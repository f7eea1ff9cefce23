"""A simulated process of the operating system: the effects of signals on a node and its sockets."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from deploy.simulation.callbacks import OWNER
from deploy.simulation.loop import VirtualLoop

DISCOVERY: Final = "discovery"  # the task's name


class Socket(Protocol):
    """A process's end of a connection, as the kernel sees it."""

    def process_killed(self) -> None:
        """Close the socket: the process was killed."""

    def process_paused(self) -> None:
        """React to the process being stopped or continued."""


class SimulatedProcess:
    """`main` and the tasks that it starts. `ended` is set when it returns or raises, or the process is killed.

    A killed task stays referenced until `discard`: if it were collected earlier, its `finally` blocks would run.
    """

    def __init__(self, loop: VirtualLoop, name: str, main: Callable[[], Awaitable[None]]) -> None:
        self.name = name
        self.killed = False
        self.stopped = False
        self.tasks: set[asyncio.Task[Any]] = set()
        self.kept: list[asyncio.Handle] = []
        self.sockets: dict[Socket, None] = {}
        self.ended = asyncio.Event()
        self._loop = loop
        self._main = main
        context = contextvars.copy_context()
        context.run(OWNER.set, self)
        self._running = context.run(lambda: loop.create_task(self._run(), name=name))

    @property
    def alive(self) -> bool:
        """Whether it is running or stopped."""
        return not self.killed and not self._running.done()

    @property
    def seeks(self) -> bool:
        """Whether it is searching for a run: a node without one waits for the next."""
        return any(task.get_name() == DISCOVERY for task in self.tasks)

    def kill(self) -> None:
        """Send SIGKILL: none of its callbacks run again, and the kernel closes its sockets."""
        if not self.alive:
            return
        self.killed = True
        self.kept.clear()
        for socket in list(self.sockets):
            socket.process_killed()
        self.ended.set()

    def stop(self) -> None:
        """Send SIGSTOP: its callbacks and timers wait, and its sockets are silent."""
        if self.alive and not self.stopped:
            self.stopped = True
            self._notify_sockets()

    def continue_(self) -> None:
        """Send SIGCONT: callbacks that became due meanwhile run now."""
        if self.stopped:
            self.stopped = False
            self._loop.resume(self.kept)
            self.kept = []
            self._notify_sockets()

    def terminate(self) -> None:
        """Send SIGTERM: the agent is cancelled and publishes its final state."""
        if self.alive:
            self._running.cancel()

    def discard(self) -> None:
        """Close the tasks of a killed process, after the simulation; the loop runs none of its callbacks any more."""
        self.killed = True
        for task in sorted(self.tasks, key=hash):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine: Any = task.get_coro()
            for _ in range(20):  # `close` fails once for each await in a finally block
                try:
                    coroutine.close()
                    break
                except Exception:  # noqa: BLE001 - handlers may raise anything without their loop
                    continue
        self.tasks.clear()
        self.sockets.clear()

    async def _run(self) -> None:
        try:
            await self._main()
        finally:  # like asyncio.run
            rest = self.tasks - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            if rest:
                await asyncio.wait(rest)
            self.ended.set()

    def _notify_sockets(self) -> None:
        for socket in list(self.sockets):
            socket.process_paused()
