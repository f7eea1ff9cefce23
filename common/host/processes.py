"""Start child processes that never outlive this process, and stop them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

# Run by a bare interpreter that then becomes the child. A preexec_fn would do the same, but may
# deadlock in a process with threads. The parent may die before prctl is called, hence the second
# check of getppid.
_BOUND = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[3:])
"""


def python(module: str) -> list[str]:
    """Return the command that runs one of fedstrata's modules as the main one.

    A file of the user's in the current folder never replaces a module, whatever its name.
    """
    home = Path(__file__).resolve().parents[2]
    inside = os.path.samefile(home, ".")
    return [sys.executable, *([] if inside else ["-P"]), "-m", module]


def bound(argv: Sequence[str]) -> list[str]:
    """Return the command that runs `argv`, whose program is a path, until the calling *thread*
    ends, on Linux.
    """
    if sys.platform != "linux":
        return [*argv]
    return [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), argv[0], *argv]


def spawn(
    argv: Sequence[str],
    *,
    log: Path | None = None,
    read_output: bool = False,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start `argv` in its own session with standard input closed, and return the process.

    Both outputs are appended to the file `log`; without one, or with `read_output`, read standard
    output from `process.stdout`. `env` extends this process's environment. On Linux the kernel
    kills the child when the calling *thread* ends, however it ends: call from a thread that lives
    as long as the child should. Raises
    FileNotFoundError if there is no such program.
    """
    program = shutil.which(argv[0])
    if program is None:
        raise FileNotFoundError(f"no program {argv[0]!r} on PATH")
    output = errors = subprocess.STDOUT
    if log is not None:
        output = errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if log is None or read_output:
        output = subprocess.PIPE
    try:
        return subprocess.Popen(
            bound([program, *argv[1:]]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            start_new_session=True,
        )
    finally:
        if log is not None:
            os.close(errors)


def stop(process: subprocess.Popen[bytes], *, grace_s: float = 5.0) -> int:
    """Terminate a spawned process, kill its whole session after `grace_s` seconds, and return its
    exit code.
    """
    stop_all((process,), grace_s=grace_s)
    return process.returncode


def stop_all(processes: Collection[subprocess.Popen[bytes]], *, grace_s: float = 5.0) -> None:
    """Terminate spawned processes, all at once, and kill the sessions of those that remain after
    `grace_s` seconds.
    """
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def ending_signals() -> list[signal.Signals]:
    """Return the signals that interrupt a command: SIGHUP, of a closed terminal, unless nohup has
    it ignored.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


@contextmanager
def interruptible() -> Iterator[None]:
    """Make the ending signals raise KeyboardInterrupt immediately in the main thread."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port() -> int:
    """Return a TCP port that is free on loopback; another process may still take it before the
    caller does.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
