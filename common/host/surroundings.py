"""The process around own code: what that changes of it is put back, so that nothing else depends on
it.

Own code finds its current folder as it left it, and no running event loop, so that it may call
`asyncio.run`. If it ends the process by `os._exit`, that is an error of it. A child that it forks
ends with its call.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from asyncio import events
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, Never

STANDARD: Final = (0, 1, 2)  # descriptors

_inside: dict[int, int] = {}  # the threads that are in own code, and their process
_exit = os._exit


class ProcessExit(BaseException):
    """Own code called `os._exit`."""


def _exit_or_raise(status: int) -> Never:
    """Exit, as `os._exit` does; raise ProcessExit in own code."""
    if _inside.get(threading.get_ident()) == os.getpid():
        raise ProcessExit(f"os._exit({status})")
    _exit(status)


os._exit = _exit_or_raise  # it would end the agent, or a whole run, without a word


class OwnSurroundings:
    """The process around one object of own code."""

    def __init__(self) -> None:
        self._folder = ""  # its current folder, if it is not that of the process

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run own code in the `with` block."""
        thread = threading.get_ident()
        process = os.getpid()
        loop = events._get_running_loop()
        here = _folder()
        streams = (sys.stdout, sys.stderr)
        limit = sys.getrecursionlimit()
        timeout = socket.getdefaulttimeout()
        mask = os.umask(0o077)
        os.umask(mask)
        if self._folder:
            with suppress(OSError):  # it has removed it
                os.chdir(self._folder)
        events._set_running_loop(None)
        sys.stdout = sys.stderr  # standard output is this process's data
        outer = _inside.get(thread)
        _inside[thread] = process
        try:
            with _descriptors_kept():
                yield
        finally:
            if os.getpid() != process:
                _exit(0)
            if outer is None:
                del _inside[thread]
            events._set_running_loop(loop)
            left = _folder()
            self._folder = "" if left == here else left
            with suppress(OSError):
                os.chdir(here)
            sys.stdout, sys.stderr = streams
            sys.setrecursionlimit(limit)
            socket.setdefaulttimeout(timeout)
            os.umask(mask)


@contextmanager
def _descriptors_kept() -> Iterator[None]:
    """Open the standard descriptors again if the `with` block closes them: other files would take
    their numbers.
    """
    copies = {}
    for number in STANDARD:
        with suppress(OSError):  # a service may have none
            copies[number] = os.dup(number)
    try:
        yield
    finally:
        for number, copy in copies.items():
            with suppress(OSError):  # both are closed
                if not _is_same(number, copy):
                    os.dup2(copy, number)
                os.close(copy)


def _is_same(one: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:
        return False


def _folder() -> str:
    """Return the current folder, "" if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""
