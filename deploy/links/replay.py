"""Traces of links that the kernel enforces: the rates of `tc`'s buckets change at the traces' times."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Final

from common.experiment.links import RateTrace
from deploy.links.kernel import bucket

OUTAGE_MBIT: Final = 8e-6  # tbf has no rate of 0; at one byte per second a frame needs minutes
DISCARD_PORT: Final = 9


@dataclass(frozen=True, slots=True)
class TracedInterface:
    """An interface of a host whose root is a tbf, and the trace of what it sends; `peer`: the address behind it."""

    host: str
    interface: str
    peer: str
    trace: RateTrace

    def line(self, t: float) -> str:
        """Return the `tc` command that gives it the rate of its trace at t seconds."""
        return f"qdisc change dev {self.interface} root handle 1: {bucket(self._mbit(t))}"

    def wake(self) -> None:
        """Send a datagram that nobody receives: only then does the kernel look at what waited in an outage."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"", (self.peer, DISCARD_PORT))

    def _mbit(self, t: float) -> float:
        return self.trace.rate_at(t) * 8e-6 or OUTAGE_MBIT


class Replay:
    """The replay of interfaces, in a thread; `change` gives those of one host their rates at a time of the traces."""

    def __init__(
        self, traced: Sequence[TracedInterface], change: Callable[[str, Sequence[TracedInterface], float], None]
    ) -> None:
        self._traced = traced
        self._change = change
        self._begun: float | None = None
        self._ended = False
        self._news = threading.Condition()

    def begin(self, elapsed_s: float) -> None:
        """Begin the traces at this place, or move them there."""
        with self._news:
            self._begun = time.monotonic() - elapsed_s
            self._news.notify()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Replay meanwhile. Raises what `change` raised."""
        errors: list[Exception] = []
        thread = threading.Thread(target=self._run, args=(errors,), name="replay", daemon=True)
        thread.start()
        try:
            yield
        finally:
            with self._news:
                self._ended = True
                self._news.notify()
            thread.join()
        if errors:
            raise errors[0]

    def _run(self, errors: list[Exception]) -> None:
        due = dict.fromkeys(self._traced, 0.0)  # by interface: the place of its trace at which it changes next
        begun: float | None = None
        with self._news:
            while not self._ended:
                if begun != self._begun:
                    begun, due = self._begun, dict.fromkeys(self._traced, 0.0)
                if begun is None:
                    self._news.wait()
                    continue
                t = time.monotonic() - begun
                now_due = [each for each, at in due.items() if at <= t]
                try:
                    for host in dict.fromkeys(each.host for each in now_due):
                        self._change(host, [each for each in now_due if each.host == host], t)
                except Exception as error:  # noqa: BLE001 - raised when the lab ends
                    errors.append(error)
                    return
                due |= {each: each.trace.next_change(t) for each in now_due}
                left_s = min(due.values(), default=inf) - (time.monotonic() - begun)
                self._news.wait(max(0.0, left_s) if left_s < threading.TIMEOUT_MAX else None)
