"""Processes that a server forks: their exit codes, their descriptors, a server that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from fedstrata.common.processes import fork_server
from fedstrata.common.processes.fork_server import ForkedProcess, ForkServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forked workers are for Linux")
PATIENCE_S = 60.0


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


def forked(server: ForkServer, what: str) -> tuple[ForkedProcess, int]:
    """Fork a process of this module that does something, and return its pipe, too."""
    ours, theirs = os.pipe()
    process = server.fork(f"tests.test_fork_server:{what}", (theirs,), imports=("decimal",))
    os.close(theirs)
    return process, ours


def reports() -> None:
    """Write what the process is."""
    there = "decimal" in sys.modules, "torch" in sys.modules, os.getsid(0) == os.getpid()
    os.write(
        int(sys.argv[1]), repr((os.getppid(), there, len(os.listdir("/proc/self/fd")))).encode()
    )


def ends() -> None:
    sys.exit(7)


def fails() -> None:
    raise RuntimeError("a bug")


def waits() -> None:
    os.write(int(sys.argv[1]), b"r")
    signal.pause()


def test_a_forked_process_has_the_imports_and_its_own_descriptors(server: ForkServer) -> None:
    found = []
    for _ in range(2):
        process, pipe = forked(server, "reports")
        found.append(os.read(pipe, 100))
        assert process.wait(PATIENCE_S) == 0 and os.read(pipe, 1) == b""
        os.close(pipe)
    assert found[0] == found[1]
    parent, there, descriptors = eval(found[0])
    assert psutil.Process(parent).ppid() == os.getpid() and there == (True, False, True)
    # the three, the pipe, the folder that is listed, and the interpreter's script
    assert descriptors <= 6


@pytest.mark.parametrize(("what", "code"), [("ends", 7), ("fails", 1)])
def test_its_code_is_that_of_an_interpreter(server: ForkServer, what: str, code: int) -> None:
    process, pipe = forked(server, what)
    os.close(pipe)
    assert process.wait(PATIENCE_S) == process.wait() == code
    process.kill()  # too late, and no error


def test_a_killed_process_is_another_end_than_that_of_one_that_waits(server: ForkServer) -> None:
    process, pipe = forked(server, "waits")
    assert os.read(pipe, 1) == b"r"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    os.close(pipe)


def test_a_server_that_is_killed_is_started_again_and_its_processes_go_on(
    server: ForkServer,
) -> None:
    process, pipe = forked(server, "waits")
    assert os.read(pipe, 1) == b"r"
    (before,) = [
        child
        for child in psutil.Process().children()
        if "fedstrata.common.processes.fork_server" in child.cmdline()
    ]
    before.kill()
    before.wait(PATIENCE_S)
    other, more = forked(server, "ends")
    assert other.wait(PATIENCE_S) == 7 and psutil.pid_exists(process.pid)
    process.kill()
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    os.close(pipe)
    os.close(more)


def test_the_server_ends_with_its_agent() -> None:
    server = ForkServer()
    process, pipe = forked(server, "ends")
    assert process.wait(PATIENCE_S) == 7
    os.close(pipe)
    (before,) = [
        child
        for child in psutil.Process().children()
        if "fedstrata.common.processes.fork_server" in child.cmdline()
    ]
    server.close()
    assert not before.is_running()
    server.close()


NO_DESCRIPTOR = """
import os, sys
from fedstrata.common.processes import fork_server
def refused(pid):
    raise PermissionError(1, "Operation not permitted")
os.pidfd_open = refused
fork_server.main()
"""


def test_a_process_of_which_its_agent_cannot_know_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a sandbox without descriptors of processes: the agent gets an error, and starts a
    process another way.
    """
    monkeypatch.setattr(fork_server, "python", lambda module: [sys.executable, "-c", NO_DESCRIPTOR])
    server = ForkServer()
    ours, theirs = os.pipe()
    with pytest.raises(ConnectionError):
        server.fork("tests.test_fork_server:reports", (theirs,), imports=())
    os.close(theirs)
    assert os.read(ours, 1) == b""  # closed by all, and nothing was written
    os.close(ours)
    server.close()
