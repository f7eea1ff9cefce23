"""Where and when to connect next, and which failures to log. No clock, no I/O, no logger."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fedstrata.common.errors import ConnectionFailed
from fedstrata.common.net.address import BrokerAddress

BACKOFF_S: Final = 0.1
BACKOFF_MOST_S: Final = 5.0
HINT: Final = "Is it running there, and are the login and --broker right?"
HINT_FINAL: Final = "Are the login and its files right?"
# MQTT 3.1.1 ends a connection without a reason when another one has its client id
THROWN_OUT: Final = (
    "Another client has its id, or the broker makes ids of logins, or refuses what was sent last. "
    "`fedstrata doctor` "
    "examines it."
)
# in a row; a broker that is restarted, or a bad link, refuses or times out in between
THROWN_LEAST: Final = 8
REPEAT_S: Final = 60.0
KINDS_MOST: Final = 32  # a broker may have several addresses


def pause_s(attempt: int, draw: Callable[[float, float], float] = random.uniform) -> float:
    """Return the seconds to wait before another attempt to connect: doubling each time, minus a
    random part up to half.

    Nodes that lost the same broker wait for different times, so that they do not reconnect all at
    once.
    """
    most = min(BACKOFF_MOST_S, BACKOFF_S * 2 ** min(attempt, 16))
    return draw(most / 2, most)


class Attempts:
    """The attempts to connect to the addresses of one broker.

    An address is kept until it fails; then the next one is tried at once, after the last one the
    first. There is a pause when as many attempts have failed as there are addresses. The pauses
    grow until a connection has lasted: two clients of one id are each accepted, and throw each
    other out.
    """

    def __init__(
        self, broker: BrokerAddress, *, draw: Callable[[float, float], float] = random.uniform
    ) -> None:
        self._each = broker.each
        self._draw = draw
        self._place = 0
        self._failed = 0  # since the last pause
        self._pauses = 0  # since a connection has lasted
        self._timeout_s = math.inf
        self._give_up = math.inf  # until a connection is accepted
        self._thrown = 0  # connections in a row that the broker has accepted, and ended soon
        self._thrown_since = math.inf
        self._reasons: dict[BrokerAddress, str] = {}
        self._final: dict[BrokerAddress, bool] = {}
        self._explained: dict[BrokerAddress, bool] = {}

    @property
    def address(self) -> BrokerAddress:
        """The address that is connected, or tried."""
        return self._each[self._place]

    @property
    def place(self) -> int:
        """The place of `address` among the broker's addresses, from 0."""
        return self._place

    def begin(self, now: float, *, timeout_s: float) -> None:
        """Begin to connect; the attempts end after `timeout_s` without success, but try each
        address once.
        """
        self._timeout_s = timeout_s
        self._give_up = now + timeout_s
        self._failed = self._pauses = self._thrown = 0

    def failed(
        self,
        reason: str,
        *,
        now: float,
        accepted: bool = False,
        lasted: bool = False,
        thrown_out: bool = False,
        final: bool = False,
        explained: bool = False,
    ) -> float:
        """Note the end of a connection or attempt; return the pause before the next attempt, in
        seconds.

        `accepted`: the broker had acknowledged its subscriptions; `lasted`: it was no short one;
        `thrown_out`: the broker ended it soon after its CONNACK; `final`: another attempt at this
        address would fail, too; `explained`: the reason has its remedy.

        Raises ConnectionFailed with all reasons: after the time limit if no connection was accepted
        or each is thrown out, and at once if none was accepted and all addresses fail for good.
        """
        if accepted or lasted:
            self._give_up = math.inf
            self._reasons.clear()
            self._final.clear()
        if lasted:
            self._pauses = self._thrown = 0
        if thrown_out and not lasted:
            if self._thrown == 0:
                self._thrown_since = now
            self._thrown += 1
        else:
            self._thrown = 0
        self._reasons[self.address] = reason
        self._final[self.address] = final
        self._explained[self.address] = explained
        self._place = (self._place + 1) % len(self._each)
        self._failed += 1
        if self._failed < len(self._each):
            return 0.0
        if self._thrown >= THROWN_LEAST and now >= self._thrown_since + self._timeout_s:
            raise self._ended(THROWN_OUT)
        hopeless = self._give_up < math.inf and all(self._final.values())
        if hopeless:
            raise self._ended(HINT_FINAL)
        if now >= self._give_up:
            hint = THROWN_OUT if self._thrown else HINT
            raise self._ended(hint)
        pause = min(pause_s(self._pauses, self._draw), max(0.0, self._give_up - now))
        self._failed = 0
        self._pauses = self._pauses + 1
        return pause

    @property
    def thrown_out(self) -> bool:
        """Whether the broker has ended several connections in a row soon after it had accepted
        them.
        """
        return self._thrown > 1

    def _ended(self, hint: str) -> ConnectionFailed:
        text = f"broker {self.reasons().rstrip('.')}."
        if not all(self._explained[address] for address in self._reasons):
            text += f" {hint}"
        return ConnectionFailed(text)

    def reasons(self) -> str:
        """Return why each address failed, since a connection was accepted."""
        return "; ".join(
            f"{address}: {self._reasons[address]}"
            for address in self._each
            if address in self._reasons
        )


class FailureLog:
    """A connection's failures as few log lines; `recovered` forgets them.

    A broker that drops a client immediately causes some hundred equal failures an hour, and one
    that is away as many as a process has devices. A failure is reported when its kind is new, and
    then at most once a minute, with the number of equal ones.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}
        self._total = 0
        self._since = 0.0

    def failed(self, kind: str, text: str, now: float) -> str | None:
        """Count a failure. Return the line to log, `text` with the number of equal failures, or
        None.

        `kind` defines which failures are equal; their `text` may differ.
        """
        if self._total == 0:
            self._since = now
        self._total += 1
        known = self._kinds.get(kind)
        if known is None:
            if len(self._kinds) == KINDS_MOST:
                del self._kinds[next(iter(self._kinds))]
            self._kinds[kind] = _Kind(now)
            return text
        known.unreported += 1
        elapsed_s = now - known.reported_at
        if elapsed_s < REPEAT_S:
            return None
        count = known.unreported
        known.unreported = 0
        known.reported_at = now
        return f"{text} ({count} times in {elapsed_s:.0f} s)"

    def recovered(self, now: float) -> str | None:
        """Forget all failures. Return their number and duration, or None without failures."""
        total = self._total
        elapsed_s = now - self._since
        self._kinds.clear()
        self._total = 0
        if total:
            return f"{total} failure{'s' * (total > 1)} in {elapsed_s:.0f} s"
        return None


@dataclass(slots=True)
class _Kind:
    """When a kind of failure was last reported, and the number of failures since then."""

    reported_at: float
    unreported: int = 0
