"""A process that imports large libraries once and forks others, which share their memory and begin
in milliseconds.

The agent starts `python -m MODULE SOCKET` of this module. A request is one packet, {"run":
"module:function", "imports": [...]}, with the descriptors that the process gets. The reply is
{"pid"}, with a descriptor of the process, and one from which its exit code is read, 4 bytes; none
if this server is gone. The server imports, and does nothing else: threads, locks and accelerators
do not survive a fork. It ends when the agent's end of the socket closes.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Final

from fedstrata.common.host.memory import frozen_imports, keep_large_buffers
from fedstrata.common.host.processes import python

MODULE: Final = "fedstrata.common.processes.fork_server"
PACKET: Final = 1 << 16
CODE: Final = struct.Struct("i")


class ForkedProcess:
    """A process that the server has forked, with the methods of `subprocess.Popen` that a channel
    needs.
    """

    def __init__(self, pid: int, descriptor: int, code: int) -> None:
        self.pid = pid
        self._descriptor = descriptor
        self._code = code
        self._returncode: int | None = None

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self._returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit code; that of a kill if the server is gone. Raises
        TimeoutExpired.
        """
        if self._returncode is None:
            look = select.poll()
            look.register(self._descriptor, select.POLLIN)
            limit_ms = None if timeout is None else 1000 * timeout
            if not look.poll(limit_ms):
                raise subprocess.TimeoutExpired(MODULE, timeout or 0.0)
            found = os.read(self._code, CODE.size)
            self._returncode = CODE.unpack(found)[0] if found else -signal.SIGKILL
            os.close(self._code)
            os.close(self._descriptor)
        return self._returncode


class ForkServer:
    """The agent's end. The server starts with the first request, and again if it was ended. Close
    it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # requests come from threads
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def fork(
        self, run: str, descriptors: Sequence[int], *, imports: Sequence[str]
    ) -> ForkedProcess:
        """Run a function of a module in a new process with these descriptors, after the imports.

        Raises OSError if the server cannot.
        """
        request = json.dumps({"run": run, "imports": [*imports]}).encode()
        with self._lock:
            if self._socket is not None:
                with suppress(OSError):  # the server was ended
                    return self._fork(self._socket, request, descriptors)
            self._end()
            return self._fork(self._start(), request, descriptors)

    def close(self) -> None:
        """End the server; the processes that it has forked go on."""
        with self._lock:
            self._end()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        with theirs:
            self._process = subprocess.Popen(
                [*python(MODULE), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        return ours

    @staticmethod
    def _fork(server: socket.socket, request: bytes, descriptors: Sequence[int]) -> ForkedProcess:
        socket.send_fds(server, [request], descriptors)
        packet, received, _, _ = socket.recv_fds(server, PACKET, 2)
        if not packet:
            raise ConnectionResetError("the fork server was ended")
        for descriptor in received:
            os.set_inheritable(descriptor, False)
        return ForkedProcess(json.loads(packet)["pid"], *received)

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def main() -> None:
    """Serve one agent until it ends."""
    agent = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(agent.fileno(), False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children: dict[int, tuple[int, int]] = {}  # by descriptor: the id, and where the code goes
    look = select.poll()
    look.register(agent, select.POLLIN)
    while True:
        for ready, _ in look.poll():
            if ready in children:
                look.unregister(ready)
                _bury(ready, *children.pop(ready))
                continue
            packet, descriptors, _, _ = socket.recv_fds(agent, PACKET, 2)
            if not packet:
                return
            request = json.loads(packet)
            _import(request["imports"])
            (ours, theirs) = os.pipe()
            (waits, gate) = os.pipe()
            pid = os.fork()
            if pid == 0:
                codes = (code for _, code in children.values())
                for descriptor in (agent.fileno(), ours, theirs, gate, *children, *codes):
                    os.close(descriptor)
                # the agent knows nothing of this process, and may start another one
                if not os.read(waits, 1):
                    os._exit(1)
                os.close(waits)
                _run(request["run"], descriptors)
            child = os.pidfd_open(pid)
            children[child] = pid, theirs
            look.register(child, select.POLLIN)
            socket.send_fds(agent, [json.dumps({"pid": pid}).encode()], [child, ours])
            os.write(gate, b"b")
            for descriptor in (*descriptors, ours, waits, gate):
                os.close(descriptor)


def _import(names: Sequence[str]) -> None:
    """Import modules; what fails is said by the process that needs it."""
    if all(name in sys.modules for name in names):
        return
    with frozen_imports(), suppress(ImportError):
        for name in names:
            import_module(name)


def _run(place: str, descriptors: Sequence[int]) -> None:
    """Be the process, and end."""
    code = 1
    try:
        os.setsid()
        sys.argv = [place, *map(str, descriptors)]
        module, function = place.split(":")
        getattr(import_module(module), function)()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _bury(child: int, pid: int, code: int) -> None:
    """Pass the exit code of a process that has ended."""
    found = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(BrokenPipeError):  # nobody asks
        os.write(code, CODE.pack(found))
    os.close(code)
    os.close(child)


if __name__ == "__main__":
    keep_large_buffers()
    with suppress(OSError):  # the agent is gone
        main()
