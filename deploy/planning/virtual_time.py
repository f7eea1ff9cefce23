"""A stage for processes on a virtual clock: generators that wait, compute on a host, or wait for others.

A process yields seconds to wait; a host and the seconds of one of its cores; or a list of processes, which go on beside
each other until all of them have ended.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator
from typing import TypeAlias, Union

Effect: TypeAlias = Union[float, tuple["Host", float], list["Process"]]  # noqa: UP007 - the names come later
Process: TypeAlias = Generator[Effect, None, None]


class Host:
    """Computes on so many cores, first come first served."""

    def __init__(self, cores: float) -> None:
        self.free = cores
        self.queue: deque[tuple[float, Callable[[], None]]] = deque()


class VirtualTime:
    """Plays processes; `now` is its clock, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def play(self, process: Process) -> None:
        """Play a process, and all that it starts, to the end."""
        self._go_on(process, lambda: None)
        while self._due:
            self.now, _, action = heapq.heappop(self._due)
            action()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._order), action))

    def _go_on(self, process: Process, ended: Callable[[], None]) -> None:
        effect = next(process, None)

        def go_on() -> None:
            self._go_on(process, ended)

        if effect is None:
            ended()
        elif isinstance(effect, list):
            self._all(effect, go_on)
        elif isinstance(effect, tuple):
            host, seconds = effect
            host.queue.append((seconds, go_on))
            self._compute(host)
        else:
            self._after(effect, go_on)

    def _all(self, processes: list[Process], go_on: Callable[[], None]) -> None:
        left = len(processes) + 1

        def one_ended() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                go_on()

        for process in processes:
            self._go_on(process, one_ended)
        one_ended()  # all have begun

    def _compute(self, host: Host) -> None:
        while host.queue and host.free > 0:
            seconds, go_on = host.queue.popleft()
            host.free -= 1
            self._after(seconds, lambda go_on=go_on: self._computed(host, go_on))  # type: ignore[misc]

    def _computed(self, host: Host, go_on: Callable[[], None]) -> None:
        host.free += 1
        go_on()
        self._compute(host)
