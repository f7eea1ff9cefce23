"""Notifications to systemd: a service is ready, what it does, and that its event loop still runs.

They go to the socket that systemd names in NOTIFY_SOCKET (`man sd_notify`); without one nothing is
sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fedstrata.common.text import escaped

# of a service's environment: the digest of its machine's part of the lab's file
KIT = "FEDSTRATA_KIT"


def notify(*assignments: str) -> None:
    """Send assignments such as `READY=1` or `STATUS=...` to systemd, if it has started this process
    as a service.
    """
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to_systemd, suppress(OSError):
        place = f"\0{path[1:]}" if path[0] == "@" else path
        to_systemd.sendto("\n".join(assignments).encode(), place)


def watchdog_s() -> float | None:
    """Return the seconds within which systemd expects each sign of life from this process; None: it
    expects none.
    """
    if os.environ.get("WATCHDOG_PID") not in (None, str(os.getpid())):
        return None
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if microseconds.isdecimal() and int(microseconds):
        return int(microseconds) / 1e6
    return None


class StatusHandler(logging.Handler):
    """Log handler that reports each line as the service's status; the first one also as the end of
    its start.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Report a line."""
        notify("READY=1", f"STATUS={escaped(record.getMessage())}")


@asynccontextmanager
async def watched() -> AsyncIterator[None]:
    """Send signs of life while the event loop runs, three in the time that systemd allows for
    one.
    """
    allowed_s = watchdog_s()
    if allowed_s is None:
        yield
        return

    async def live() -> None:
        while True:
            notify("WATCHDOG=1")
            await asyncio.sleep(allowed_s / 3)

    living = asyncio.create_task(live(), name="watchdog")
    try:
        yield
    finally:
        living.cancel()
        await asyncio.wait((living,))
