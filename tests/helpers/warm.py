"""Processes of fedstrata as forks of one that has imported what they need, which takes a fork 0.1
CPU seconds and a new interpreter 1, with torch 2.

A fork is what its command would be: `python -m` a module of fedstrata, or `null_lab.py`, with its
own descriptors, environment, folder, `sys.path` and command line, and without own code. What it
cannot be is started as ever: other programs, or an environment or a namespace that is read once.

Each process has a server, a fork of its own from before it did anything, without threads. It forks
what the process starts, by a process in between that ends, so that the process adopts the new one
(PR_SET_CHILD_SUBREAPER): it is a child like others of `subprocess`.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from fedstrata.common.host import processes
from fedstrata.common.host.memory import frozen_imports

IMPORTED: Final = (
    "fedstrata.cloud.cloud_agent",
    "fedstrata.cloud.evaluator_process",
    "fedstrata.common.learning.refiner_process",
    "fedstrata.common.processes.fork_server",
    "fedstrata.deploy.cli.main",
    "fedstrata.deploy.local.process_lab",
    "fedstrata.device.device_agent",
    "fedstrata.device.pool.worker_process",
    "fedstrata.institution.institution_agent",
    "torch",
)
NULL_LAB: Final = str(Path(__file__).with_name("null_lab.py"))
STARTING: Final = ("fedstrata", NULL_LAB)  # which start processes of fedstrata
# what an interpreter or a library reads once; the release, that all modules know it
READ_ONCE: Final = ("PYTHON", "OMP_", "OPENBLAS_", "LD_", "NULL_LAB_RELEASE")
BOUND: Final = [sys.executable, "-I", "-S", "-c", processes._BOUND]  # how `bound` begins
REQUEST_BYTES: Final = 1 << 17
DESCRIPTORS_MOST: Final = 16
OWN: Final = 500  # from this on descriptors are not the command's
LINE_BYTES: Final = 8192  # of a command line
PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def _namespaces() -> list[str]:
    return [os.readlink(f"/proc/thread-self/ns/{kind}") for kind in ("mnt", "net", "user")]


class WarmServer:
    """This process's end of its server."""

    def __init__(
        self, connection: socket.socket, process: subprocess.Popen[Any] | None = None
    ) -> None:
        self._connection = connection
        self._process = process  # or Python reports that it was not awaited
        self._lock = threading.Lock()
        self.namespaces = _namespaces()

    @classmethod
    def start(cls) -> WarmServer:
        """Start a new interpreter as the server of this process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno()), " " * LINE_BYTES],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return cls(ours, process)

    def fork(self, request: Mapping[str, Any], descriptors: list[int]) -> int:
        """Return the id of a new process."""
        packet = json.dumps(request).encode()
        with self._lock:
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._connection, [packet], descriptors)
                return int(self._connection.recv(REQUEST_BYTES))
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0)


class WarmProcess(subprocess.Popen[Any]):
    """A process, by this one's server if that can."""

    server: WarmServer | None = None

    def _execute_child(self, args: Any, *given: Any) -> None:
        _, before, close, passed, folder, environment, _, _, _, *more = given
        request = None
        if before is None and close:
            request = _request_of(args, dict(environment or os.environ))
        if request is not None and WarmProcess.server is None:
            WarmProcess.server = WarmServer.start()
        server = WarmProcess.server
        if request is None or server is None or server.namespaces != _namespaces():
            super()._execute_child(args, *given)  # type: ignore[misc]
            return
        pipes, new_session = more[:6], more[11]
        request["folder"] = os.path.abspath(folder or ".")
        request["session"] = new_session
        request["places"] = [0, 1, 2, *passed]
        ends = (pipes[0], pipes[3], pipes[5])
        streams = [end if end >= 0 else number for number, end in enumerate(ends)]
        self.pid = server.fork(request, [*streams, *passed])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _request_of(args: Any, environment: dict[str, str]) -> dict[str, Any] | None:
    """Return what a fork needs to be a command, None if it cannot be."""
    # the lines that a process executes are noted for the test of its environment
    if sys.platform != "linux" or "COVERAGE_PROCESS_START" in environment:
        return None
    if _read_once(environment) != _read_once(os.environ) or not isinstance(args, list | tuple):
        return None
    words = [os.fspath(word) for word in args]
    bound = words[: len(BOUND)] == BOUND
    if bound:
        words = words[len(BOUND) + 2 :]  # without this process and the program
    if words[:1] != [sys.executable]:
        return None
    flags = []
    command = words[1:]
    while command[:1] in (["-P"], ["-m"]):
        flags.append(command.pop(0))
    program = command[0] if command else ""
    if program != NULL_LAB and ("-m" not in flags or program.partition(".")[0] != "fedstrata"):
        return None
    return {
        "line": words,
        "command": command,
        "safe_path": "-P" in flags,
        "bound": bound,
        "environment": environment,
    }


def _read_once(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_ONCE) and name != "PYTHONPATH"
    }


def serve(connection: socket.socket) -> None:
    """Fork what this process's parent asks for, until that one ends."""
    parent = os.getppid()
    while True:
        packet, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, DESCRIPTORS_MOST)
        if not packet:
            os._exit(0)
        between = os.fork()
        if between == 0:
            if os.fork() == 0:
                _begin(parent, json.loads(packet), [connection.fileno(), *descriptors])
            os._exit(0)
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _begin(parent: int, request: Mapping[str, Any], descriptors: list[int]) -> NoReturn:
    """Be the process that a request describes, as soon as the parent has adopted it."""
    code = 1
    try:
        while os.getppid() != parent:
            time.sleep(0.0001)
        if request["session"]:
            os.setsid()
        if request["bound"]:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        reply, *given = [_moved(descriptor) for descriptor in descriptors]
        os.closerange(3, OWN)
        if request["command"][0] in STARTING:
            WarmProcess.server = _beside([reply, *given])
        for place, descriptor in zip(request["places"], given, strict=True):
            os.dup2(descriptor, place)
            os.close(descriptor)
        _become(request)
        os.write(reply, str(os.getpid()).encode())
        os.close(reply)
        code = _run(request["command"])
    except BaseException:  # noqa: BLE001 - of this module
        traceback.print_exc()
    finally:
        os._exit(code)


def _moved(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, OWN)


def _beside(descriptors: list[int]) -> WarmServer:
    """Fork a server of this process, which uses none of these descriptors."""
    parent = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for descriptor in (ours.detach(), *descriptors):
            os.close(descriptor)
        if os.getppid() == parent:
            serve(theirs)
        os._exit(1)
    theirs.close()
    mine = _moved(ours.fileno())
    ours.close()
    return WarmServer(socket.socket(fileno=mine))


def _become(request: Mapping[str, Any]) -> None:
    """Take the environment, folder, paths, command line and streams of a request."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if not request["safe_path"]:
        paths.insert(0, request["folder"])
    sys.path[:0] = paths
    sys.argv = list(request["command"])
    _show("\0".join(request["line"]))
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        stream = os.fdopen(number, mode, buffering=1)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    setattr(subprocess, "Popen", WarmProcess)  # noqa: B010


def _show(line: str) -> None:
    """Write a command line over that of the first server, where others read it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    ctypes.memmove(start, line.encode()[: LINE_BYTES - 1].ljust(end - start, b"\0"), end - start)


def _run(command: list[str]) -> int:
    """Run a command to its end, as an interpreter does, and return its exit code."""
    code: object = 0
    try:
        if command[0] == NULL_LAB:
            sys.path.insert(0, str(Path(NULL_LAB).parent))
            runpy.run_path(NULL_LAB, run_name="__main__")
        else:
            sys.modules.pop(command[0], None)  # it was imported by another name
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    with frozen_imports():
        for each in IMPORTED:
            import_module(each)
    serve(socket.socket(fileno=int(sys.argv[1])))
