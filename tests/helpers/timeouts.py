"""What is left of a test that takes too long."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def ended_by_timeout() -> Iterator[None]:
    """Kill the processes that this thread has started in the `with` block if the block ends by
    pytest-timeout.
    """
    before = _children()
    try:
        yield
    except BaseException as error:
        if str(error).startswith("Timeout (>"):
            for pid in _children() - before:
                os.kill(pid, signal.SIGKILL)
        raise


def _children() -> set[int]:
    """Return the processes of the main thread; none where the kernel does not list them."""
    with suppress(OSError):
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    return set()
