"""How many trainings run at once in this process."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

WAKE_S = 0.1


class Cancelled(Exception):
    """The training was called off: its result is no longer wanted."""


class Slots:
    """Lets at most `count` trainings run, first come first served.

    On a GPU one slot keeps trainings from sharing its memory and its time. Agents queue in `device.pool` instead.
    """

    def __init__(self, count: int = 1) -> None:
        self._free = count
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def acquire(self, cancelled: threading.Event) -> Iterator[float]:
        """Hold a slot; the value is the seconds waited for it. Raises Cancelled while waiting."""
        asked = time.monotonic()
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                while self._free <= 0 or self._waiting[0] is not ticket:
                    if cancelled.is_set():
                        raise Cancelled
                    self._changed.wait(WAKE_S)  # an Event cannot wake a Condition, so look now and then
                self._free -= 1
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield time.monotonic() - asked
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()
