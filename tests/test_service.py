"""Notifications to systemd."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.console.service import StatusHandler, notify, watchdog_s, watched


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket of a systemd that has started this process as a service."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.settimeout(30)
        listening.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listening


def test_a_line_is_the_status_of_the_service(systemd: socket.socket) -> None:
    log = logging.getLogger("fedstrata.test_service")
    handler = StatusHandler()
    log.addHandler(handler)
    try:
        log.warning("%s waits for a run of %s", "device-0", "institution-0")
    finally:
        log.removeHandler(handler)
    assert systemd.recv(1000) == b"READY=1\nSTATUS=device-0 waits for a run of institution-0"


def test_an_abstract_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"fedstrata-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0{name}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        notify("READY=1")
        assert listening.recv(1000) == b"READY=1"


@pytest.mark.parametrize("path", ["", "vsock:2:1234", "/no/such/socket"])
def test_without_a_socket_nothing_is_sent_and_nothing_fails(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    notify("READY=1")


@pytest.mark.parametrize(
    ("usec", "pid", "seconds"),
    [("60000000", None, 60.0), ("60000000", "1", None), ("0", None, None), ("soon", None, None), (None, None, None)],
)
def test_the_watchdog_of_systemd(
    usec: str | None, pid: str | None, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WATCHDOG_USEC", usec), ("WATCHDOG_PID", pid)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert watchdog_s() == seconds


def test_signs_of_life_end_with_the_work(systemd: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "30000")

    async def work() -> None:
        async with watched():
            for _ in range(3):
                assert await asyncio.to_thread(systemd.recv, 1000) == b"WATCHDOG=1"
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(work())
