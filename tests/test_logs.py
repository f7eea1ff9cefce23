"""What roles report: their activity and errors on standard error, as text or JSON, and to systemd."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest

from fedstrata.common.errors import InvalidExperiment, RunFailed
from fedstrata.common.experiment.reading import parse
from fedstrata.common.host.offload import beside
from fedstrata.common.host.processes import free_port
from fedstrata.deploy.console import logs
from fedstrata.deploy.console.options import run_agent
from fedstrata.deploy.console.reporting import report
from fedstrata.deploy.console.service import StatusHandler, notify, watchdog_s, watched
from fedstrata.deploy.kits.authority import CERTIFICATE_DAYS, Authority
from tests.helpers.commands import DEMO, fedstrata
from tests.simulation.lab import ScenarioLab


@pytest.fixture
def as_json() -> Iterator[None]:
    """Give the root logger a handler of JSON lines."""
    handler = logs.StandardError()
    handler.setFormatter(logs.JsonLines())
    logging.getLogger().addHandler(handler)
    yield
    logging.getLogger().removeHandler(handler)


def record(words: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("fedstrata.x", logging.WARNING, "", 0, words, arguments, None)


def test_a_record_is_one_line_of_json_with_its_exception() -> None:
    line = logs.JsonLines().format(record('two\nlines, "%s"', "\ud800"))
    facts = json.loads(line)
    assert "\n" not in line and line.isascii()
    assert (facts["level"], facts["logger"], facts["message"]) == (
        "warning",
        "fedstrata.x",
        'two\nlines, "\ud800"',
    )
    assert facts["time"].endswith("+00:00") and "node" not in facts and "exception" not in facts
    reported = record("oh")
    reported.exc_info = (ValueError, ValueError("why"), None)
    assert "ValueError: why" in json.loads(logs.JsonLines().format(reported))["exception"]


def test_each_task_has_its_node() -> None:
    async def agent() -> str:
        await asyncio.sleep(0)
        return str(json.loads(logs.JsonLines().format(record("here")))["node"])

    async def process() -> list[str]:
        tasks = []
        for name in ("a", "b"):
            logs.NODE.set(name)
            tasks.append(asyncio.create_task(agent()))
        return await asyncio.gather(*tasks)

    assert asyncio.run(process()) == ["a", "b"]


def test_lines_outside_the_log_have_the_same_format(
    as_json: None, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.write_line("\ngo on", level=logging.ERROR)
    facts = json.loads(capsys.readouterr().err)
    assert (facts["message"], facts["level"]) == ("go on", "error")
    assert logs.options()[2:] == ["--log-format", "json"] and logs.as_json()


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        (["plain"], ["plain"]),
        (["first", "3"], ["3"]),
        (["fedstrata: device-1: the reason", "  mine.py:3, in f: 1 / 0", "later"], [0, 1]),
        (["fedstrata: one", "between", "fedstrata: the reason", "asyncio: a remark"], [2]),
        ([], []),
    ],
)
@pytest.mark.parametrize("json_lines", [False, True])
def test_the_last_error_of_a_log_has_its_frames_in_either_format(
    json_lines: bool, messages: list[str], found: list[int | str], tmp_path: Path
) -> None:
    lines = [
        logs.JsonLines().format(record(message)) if json_lines else message for message in messages
    ]
    (tmp_path / "a.log").write_text("".join(f"{line}\n" for line in lines) + "\n")
    assert logs.last_error(tmp_path / "a.log") == [
        messages[at] if isinstance(at, int) else at for at in found
    ]


def test_the_warnings_of_training_processes_are_found_in_either_format() -> None:
    lines = [
        "2026-01-01 fedstrata.training WARNING note: one: two",
        "note: three",
        "another",
        '{"message": "note: 4"}',
    ]
    assert logs.notes_in("\n".join(lines)) == ["note: one: two", "note: three", "note: 4"]


def test_the_frames_of_own_code_stand_below_its_error_at_the_level_info(
    capsys: pytest.CaptureFixture[str],
) -> None:
    frame = "mine.py:3, in f: 1 / 0"
    error = InvalidExperiment(
        "model.name", "mine:f", "fails with ZeroDivisionError", "Correct it.", [frame]
    )
    line = "fedstrata: device-1: model.name = 'mine:f': fails with ZeroDivisionError. Correct it.\n"
    for level, below in ((logging.WARNING, ""), (logging.INFO, f"  {frame}\n")):
        with logs.limited("", level):
            report(error, node="device-1")
        assert capsys.readouterr().err == line + below


@pytest.mark.parametrize(
    "role",
    [
        ["cloud", str(DEMO)],
        pytest.param(["institution", "--name", "institution-0"], marks=pytest.mark.slow),
        pytest.param(["device", "--name", "d", "--parent", "i"], marks=pytest.mark.slow),
    ],
    ids=lambda role: role[0],
)
def test_every_role_logs_as_json_that_no_broker_is_there_and_that_its_certificate_ends(
    role: list[str], tmp_path: Path
) -> None:
    runs = ["--runs", tmp_path] if role[0] == "cloud" else []
    authority, address = (
        Authority.open(tmp_path / "authority", name="north"),
        f"127.0.0.1:{free_port()}",
    )
    issued = authority.issue("n", now=datetime.now(UTC) - timedelta(days=CERTIFICATE_DAYS - 10))
    for name, content in (("n.crt", issued.certificate), ("n.key", issued.key)):
        (tmp_path / name).write_bytes(content)
    tls = [
        "--tls-ca",
        authority.folder / "ca.crt",
        "--tls-cert",
        tmp_path / "n.crt",
        "--tls-key",
        tmp_path / "n.key",
    ]
    where = ["--broker", address, "--connect-timeout", "0.3", *tls]
    done = fedstrata(
        "--log-level", "debug", "--log-format", "json", *role, *where, *runs, null=True
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert (
        done.returncode == 3 and lines[-1]["level"] == "error" and address in lines[-1]["message"]
    )
    assert any("n.crt ends in 10 days. Renew it" in line["message"] for line in lines)
    assert any(line["logger"] == "fedstrata.connection" for line in lines)
    names = {"cloud": "cloud", "institution": "institution-0", "device": "d"}
    assert all(
        line["node"] == names[role[0]] for line in lines if line["logger"] == "fedstrata.connection"
    )


def test_an_unexpected_error_of_an_agent_is_logged_under_its_nodes_name(
    as_json: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one from before it has connected: see `common.runtime.lifecycle` for those after that."""

    async def agent() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(lambda: 1 // 0))

    with pytest.raises(
        RunFailed, match=r"^unexpected ZeroDivisionError: integer division or modulo by zero$"
    ):
        asyncio.run(run_agent("device-3", agent()))
    facts = json.loads(capsys.readouterr().err)
    assert (facts["node"], facts["level"]) == ("device-3", "error")
    assert (
        facts["message"] == "device-3 ended by an unexpected error"
        and "1 // 0" in facts["exception"]
    )


@pytest.mark.parametrize(
    ("error", "lines"),
    [(KeyError("x"), ["report ended by an unexpected error"]), (RunFailed(), [])],
)
def test_an_unexpected_error_of_work_beside_other_work_is_logged(
    error: Exception, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def fails() -> None:
        raise error

    async def play() -> None:
        async with beside(fails(), name="report") as task:
            await asyncio.wait([task])

    asyncio.run(play())
    assert caplog.messages == lines


def test_an_unforeseen_error_is_a_line_too() -> None:
    code = (
        "from fedstrata.deploy.console import logs; logs.begin('info', json_lines=True); "
        "import warnings; warnings.warn('w'); 1 / 0"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    warning, error = map(json.loads, done.stderr.splitlines())
    assert warning["logger"] == "py.warnings" and "ZeroDivisionError" in error["exception"]


def test_a_line_goes_to_standard_error_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live view replaces standard error, and shows the lines above itself."""
    handler = logs.StandardError()
    for _ in range(2):
        monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
        handler.emit(record("the reason"))
        assert stream.getvalue() == "the reason\n"


# What nodes do

ONE: Final = {"rounds": 1, "topology": {"institutions": 1, "devices": 2}, "links": {"check": "off"}}


def test_agents_report_each_step_of_a_run_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(logs.ACTIVITY), "handlers", [caplog.handler])
    with caplog.at_level(logging.INFO, logs.ACTIVITY):
        assert ScenarioLab(parse(ONE), time_limit_s=900.0).run().ok
    lines = caplog.messages
    run = next(line for line in lines if "preparing" in line).split()[2].rstrip(":")
    for node, parent in (
        ("device-0", "institution-0"),
        ("device-1", "institution-0"),
        ("institution-0", "cloud"),
    ):
        waiting, preparing, taking_part, over = (
            line for line in lines if line.startswith(f"{node}: ")
        )
        assert (
            waiting.startswith(f"{node}: connected to broker ")
            and f"waiting for a run of {parent} " in waiting
        )
        assert preparing == f"{node}: run {run}: preparing"
        part = (
            "taking part with 2 of 2 devices, "
            if parent == "cloud"
            else "training cnn_digits with "
        )
        assert taking_part.startswith(f"{node}: run {run}: {part}") and taking_part.endswith(
            " samples"
        )
        assert over == f"{node}: run {run} finished"


ACTIVITY: Final = """
import logging
from fedstrata.deploy.console import logs
for level in ("debug", "warning", "error"):
    for json_lines in (False, True):
        logging.getLogger().handlers.clear()
        logging.getLogger().setLevel(logging.NOTSET)
        logs.begin(level, json_lines=json_lines)
        logging.getLogger(logs.ACTIVITY).info("device-0: %s", f"{level} {logs.shows_activity()}")
"""


def test_activity_is_shown_unless_only_errors_are() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ACTIVITY], capture_output=True, text=True, check=True, timeout=60
    )
    lines = done.stderr.splitlines()
    for level, plain, as_json in zip(("debug", "warning"), lines[::2], lines[1::2], strict=True):
        assert plain.endswith(f" device-0: {level} True") and "INFO" not in plain
        assert json.loads(as_json)["message"] == f"device-0: {level} True"


# Notifications to systemd


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket of a systemd that has started this process as a service."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.settimeout(30)
        listening.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listening


def test_a_line_is_the_status_of_the_service(systemd: socket.socket) -> None:
    StatusHandler().handle(record("%s waits for a run of %s", "device-0", "institution-0"))
    assert systemd.recv(1000) == b"READY=1\nSTATUS=device-0 waits for a run of institution-0"


def test_an_abstract_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"fedstrata-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0{name}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        notify("READY=1")
        assert listening.recv(1000) == b"READY=1"


@pytest.mark.parametrize("path", ["", "vsock:2:1234", "/no/such/socket"])
def test_without_a_socket_nothing_is_sent_and_nothing_fails(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    notify("READY=1")


@pytest.mark.parametrize(
    ("usec", "pid", "seconds"),
    [
        ("60000000", None, 60.0),
        ("60000000", "1", None),
        ("0", None, None),
        ("soon", None, None),
        (None, None, None),
    ],
)
def test_the_watchdog_of_systemd(
    usec: str | None, pid: str | None, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WATCHDOG_USEC", usec), ("WATCHDOG_PID", pid)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert watchdog_s() == seconds


def test_signs_of_life_end_with_the_work(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "30000")

    async def work() -> None:
        async with watched():
            for _ in range(3):
                assert await asyncio.to_thread(systemd.recv, 1000) == b"WATCHDOG=1"
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(work())
