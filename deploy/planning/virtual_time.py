"""Discrete-event simulation: processes are generators that wait, compute on a host, or wait for other processes.

A process yields seconds to wait, a host and the seconds of one of its cores, or a list of processes that run in
parallel until all of them have ended.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import TypeAlias, Union

Effect: TypeAlias = Union[float, tuple["PlannedHost", float], list["Process"]]  # noqa: UP007 - the names come later
Process: TypeAlias = Generator[Effect, None, None]


class PlannedHost:
    """A host with a number of cores that serve computations in order of arrival."""

    def __init__(self, cores: float) -> None:
        self.free = cores
        self.queue: deque[tuple[float, Callable[[], None]]] = deque()


class VirtualTime:
    """Scheduler of processes; `now` is the virtual time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def run(self, process: Process) -> None:
        """Run a process, and all processes that it starts, to the end."""
        self._resume(process, lambda: None)
        while self._due:
            self.now, _, action = heapq.heappop(self._due)
            action()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._order), action))

    def _resume(self, process: Process, ended: Callable[[], None]) -> None:
        effect = next(process, None)

        def resume() -> None:
            self._resume(process, ended)

        if effect is None:
            ended()
        elif isinstance(effect, list):
            self._all(effect, resume)
        elif isinstance(effect, tuple):
            host, seconds = effect
            host.queue.append((seconds, resume))
            self._compute(host)
        else:
            self._after(effect, resume)

    def _all(self, processes: list[Process], resume: Callable[[], None]) -> None:
        left = len(processes) + 1

        def one_ended() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                resume()

        for process in processes:
            self._resume(process, one_ended)
        one_ended()  # all are started

    def _compute(self, host: PlannedHost) -> None:
        while host.queue and host.free > 0:
            seconds, resume = host.queue.popleft()
            host.free -= 1
            self._after(seconds, partial(self._computed, host, resume))

    def _computed(self, host: PlannedHost, resume: Callable[[], None]) -> None:
        host.free += 1
        resume()
        self._compute(host)
