"""Start an MQTT broker and wait until it is ready: mosquitto if it is installed, else the embedded
broker.

The embedded broker (NATS) needs only pip. mosquitto costs less of a machine that trains as well.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from fedstrata.common.errors import ConnectionFailed, installing
from fedstrata.common.host.files import write_private
from fedstrata.common.host.processes import free_port, interruptible, spawn, stop
from fedstrata.common.net.address import host_port
from fedstrata.deploy.brokers import nats
from fedstrata.deploy.brokers.guard import OPEN, PACKET_MOST, Guard
from fedstrata.deploy.console.logs import write_line
from fedstrata.deploy.console.service import notify, watchdog_s

Kind = Literal["mosquitto", "embedded"]

_READY_S = 10.0
_POLL_S = 0.02
_RENEW_S = 5.0  # between two looks at the files of certificates
_SBIN = (Path("/usr/sbin/mosquitto"), Path("/usr/local/sbin/mosquitto"))  # on root's PATH only
# MQTT 3.1.1, clean session, no client id
_CONNECT = bytes.fromhex("10 0c 0004 4d515454 04 02 000a 0000")
_DISCONNECT = bytes.fromhex("e000")

# No message is dropped and no packet of a lab refused (some 2.0.x drop at `max_queued_messages 0`).
# Valid for 2.0 and for 2.1, which deprecates password_file; its replacement does not exist in 2.0.
_MOSQUITTO: Mapping[str, str | int] = {
    "persistence": "false",
    "max_queued_messages": 1_000_000,
    "max_inflight_messages": 16,
    "max_packet_size": PACKET_MOST,
    "set_tcp_nodelay": "true",
}
_LOGGED = ("log_dest stderr", "log_type error", "log_type warning", "log_type notice")
# Keep large payloads on the heap: with mmap, each message would cause page faults again.
_MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(16 << 20),
}


class _PortTaken(ConnectionFailed):
    """Another process listens on the port."""


@dataclass(frozen=True, slots=True)
class BrokerProcess:
    """A running broker at `host`:`port`."""

    host: str
    port: int
    kind: Kind
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> None:
        """Stop the broker; harmless if it has ended."""
        stop(self.process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def choose(kind: Literal["auto", "mosquitto", "embedded"] = "auto") -> Kind:
    """Return the kind of broker to start; FEDSTRATA_BROKER_KIND takes precedence over `kind`.

    Raises ConnectionFailed for an unknown name, and if the chosen kind is not installed.
    """
    wanted = os.environ.get("FEDSTRATA_BROKER_KIND") or kind
    match wanted:
        case "auto" if _mosquitto() is not None:
            return "mosquitto"
        case "auto" | "embedded":
            if nats.server() is None:
                raise ConnectionFailed(
                    f"no broker: apt install mosquitto, or {installing('embedded')}"
                )
            return "embedded"
        case "mosquitto" if _mosquitto() is not None:
            return "mosquitto"
        case "mosquitto":
            raise ConnectionFailed(
                "mosquitto is not installed: apt install mosquitto, or "
                "FEDSTRATA_BROKER_KIND=embedded"
            )
    raise ConnectionFailed(f"FEDSTRATA_BROKER_KIND = {wanted!r}: use auto, mosquitto or embedded")


def start(
    *,
    directory: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    kind: Literal["auto", "mosquitto", "embedded"] = "auto",
    guard: Guard = OPEN,
    settings: Mapping[str, str | int] | None = None,
) -> BrokerProcess:
    """Start a broker and return it once it answers an MQTT CONNECT; port 0 picks a free one.

    Its configuration and log go into `directory`. `settings` override the default settings of
    mosquitto's configuration, by name, so that tests can emulate brokers with other configurations.
    Raises ConnectionFailed, with the port and the broker's last log lines.
    """
    chosen = choose(kind)
    more = 0 if port else 4
    for attempts_left in range(more, -1, -1):
        try:
            return _start_on(
                port or free_port(),
                host=host,
                kind=chosen,
                directory=directory,
                guard=guard,
                settings=settings or {},
            )
        except _PortTaken:
            if not attempts_left:
                raise
    raise AssertionError("unreachable")


def run_foreground(
    *,
    host: str = "127.0.0.1",
    port: int = 1883,
    kind: Literal["auto", "mosquitto", "embedded"] = "auto",
    guard: Guard = OPEN,
) -> None:
    """Run a broker until a signal ends it; print its kind and address on standard error.

    Call from the main thread. Raises ConnectionFailed if the broker cannot start or ends by itself.
    """
    read = None if guard.tls is None else guard.tls.stamp()
    try:
        with (
            interruptible(),
            tempfile.TemporaryDirectory(prefix="fedstrata-broker-") as directory,
            start(
                directory=Path(directory), host=host, port=port, kind=kind, guard=guard
            ) as broker,
        ):
            hint = " (for measurements: apt install mosquitto)" if broker.kind == "embedded" else ""
            where = f"{broker.kind} listens on {host_port(host, broker.port)}"
            write_line(f"broker: {where}{hint}")
            notify("READY=1", f"STATUS={where}")
            code = _watch(broker, guard, read=read)
            raise ConnectionFailed(
                f"{broker.kind} ended with code {code}:{_last_lines(broker.log)}"
            )
    except KeyboardInterrupt:
        return


def _watch(broker: BrokerProcess, guard: Guard, *, read: tuple[int, ...] | None) -> int:
    """Return the exit code of a broker that ends; `read`: the stamp of its certificates before it
    started.

    Meanwhile report to systemd that it answers, and let mosquitto read its certificates and the
    list of revoked ones again when they have changed and are complete.
    """
    allowed_s = watchdog_s()
    tls = guard.tls if broker.kind == "mosquitto" else None
    seen = read
    every_s = _RENEW_S if allowed_s is None else min(_RENEW_S, allowed_s / 3)
    while True:
        try:
            return broker.process.wait(every_s)
        except subprocess.TimeoutExpired:
            before = seen
            seen = None if tls is None else tls.stamp()
            if seen == before and seen not in (read, None):
                read = seen
                broker.process.send_signal(signal.SIGHUP)
            if allowed_s is not None and _answers(broker.host, broker.port, guard):
                notify("WATCHDOG=1")


def _start_on(
    port: int,
    *,
    host: str,
    kind: Kind,
    directory: Path,
    guard: Guard,
    settings: Mapping[str, str | int],
) -> BrokerProcess:
    try:
        # Another broker on this port would answer in place of the new one, so check first.
        socket.create_server((host, port), family=_family(host)).close()
    except OSError as error:
        failure = _PortTaken if error.errno == errno.EADDRINUSE else ConnectionFailed
        raise failure(
            f"the broker cannot listen on {host_port(host, port)}: {error.strerror}"
        ) from error
    log = directory / f"broker-{port}.log"
    argv, env = _command(kind, directory, host=host, port=port, guard=guard, settings=settings)
    process = spawn(argv, log=log, env=env)
    try:
        _await_ready(process, log, host=host, port=port, guard=guard)
    except BaseException:
        stop(process)
        raise
    return BrokerProcess(host=host, port=port, kind=kind, process=process, log=log)


def _command(
    kind: Kind,
    directory: Path,
    *,
    host: str,
    port: int,
    guard: Guard,
    settings: Mapping[str, str | int],
) -> tuple[Sequence[str], Mapping[str, str]]:
    config = directory / f"broker-{port}.conf"
    if kind == "embedded":
        text = nats.configuration(directory, host=host, port=port, guard=guard)
        write_private(config, text.encode())  # it may have a password
        return [str(nats.server()), "--config", str(config)], {}
    lines = [
        f"listener {port} {host}",
        *(f"{name} {value}" for name, value in {**_MOSQUITTO, **settings}.items()),
    ]
    lines += _LOGGED
    lines += guard.in_folder(directory).mosquitto()
    if os.geteuid() == 0:
        lines.append("user root")  # the mosquitto user could not read `directory`
    config.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [str(_mosquitto()), "-c", str(config)], _MALLOC


def _await_ready(
    process: subprocess.Popen[bytes], log: Path, *, host: str, port: int, guard: Guard
) -> None:
    deadline = time.monotonic() + _READY_S
    while not _answers(host, port, guard):
        if process.poll() is not None:
            lines = _last_lines(log)
            failure = ConnectionFailed
            if os.strerror(errno.EADDRINUSE).lower() in lines.lower():
                failure = _PortTaken
            raise failure(
                f"the broker on {host_port(host, port)} ended with code "
                f"{process.returncode}:{lines}"
            )
        if time.monotonic() > deadline:
            raise ConnectionFailed(
                f"the broker on {host_port(host, port)} did not answer within {_READY_S:.0f} "
                f"s:{_last_lines(log)}"
            )
        time.sleep(_POLL_S)


def _answers(host: str, port: int, guard: Guard) -> bool:
    """Return whether the broker answers: with a CONNACK, even a refusal, or with a TLS
    handshake.
    """
    target = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        with socket.create_connection((target, port), timeout=1.0) as connection:
            if (probe := guard.probe()) is not None:
                probe.wrap_socket(connection).close()
                return True
            connection.sendall(_CONNECT)
            answer = connection.recv(4)
            connection.sendall(_DISCONNECT)
            return answer.startswith(b"\x20\x02")
    except OSError:
        return False


def _last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-5:]
    return "".join(f"\n  {line}" for line in lines)


def _mosquitto() -> Path | None:
    found = shutil.which("mosquitto")
    if found:
        return Path(found)
    return next((path for path in _SBIN if os.access(path, os.X_OK)), None)


def _family(host: str) -> socket.AddressFamily:
    if ":" in host:
        return socket.AF_INET6
    return socket.AF_INET
