"""What roles say on standard error, as JSON: an object a line, whoever reports it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from common.errors import InvalidExperiment, RunFailed
from common.host.processes import free_port
from deploy.console import logs
from deploy.console.options import run_agent
from deploy.console.reporting import report
from deploy.kits.authority import CERTIFICATE_DAYS, Authority
from tests.helpers.commands import DEMO, fedstrata


@pytest.fixture
def as_json() -> Iterator[None]:
    """Give the root logger a handler of JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logs.JsonLines())
    logging.getLogger().addHandler(handler)
    yield
    logging.getLogger().removeHandler(handler)


def record(words: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("fedstrata.x", logging.WARNING, "", 0, words, arguments, None)


def test_a_record_is_one_line_of_json() -> None:
    line = logs.JsonLines().format(record('two\nlines, "%s"', "\ud800"))
    facts = json.loads(line)
    assert "\n" not in line and line.isascii()
    assert (facts["level"], facts["logger"], facts["message"]) == ("warning", "fedstrata.x", 'two\nlines, "\ud800"')
    assert facts["time"].endswith("+00:00") and "node" not in facts and "exception" not in facts


def test_an_exception_is_reported() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        reported = logging.LogRecord("x", logging.ERROR, "", 0, "oh", (), sys.exc_info())
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


def test_lines_outside_the_log_have_the_same_format(as_json: None, capsys: pytest.CaptureFixture[str]) -> None:
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
    lines = [logs.JsonLines().format(record(message)) if json_lines else message for message in messages]
    (tmp_path / "a.log").write_text("".join(f"{line}\n" for line in lines) + "\n")
    assert logs.last_error(tmp_path / "a.log") == [messages[at] if isinstance(at, int) else at for at in found]


def test_the_frames_of_own_code_stand_below_its_error_at_the_level_info(capsys: pytest.CaptureFixture[str]) -> None:
    frame = "mine.py:3, in f: 1 / 0"
    error = InvalidExperiment("model.name", "mine:f", "fails with ZeroDivisionError", "Correct it.", [frame])
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
    authority, address = Authority.open(tmp_path / "authority", name="north"), f"127.0.0.1:{free_port()}"
    issued = authority.issue("n", now=datetime.now(UTC) - timedelta(days=CERTIFICATE_DAYS - 10))
    for name, content in (("n.crt", issued.certificate), ("n.key", issued.key)):
        (tmp_path / name).write_bytes(content)
    tls = ["--tls-ca", authority.folder / "ca.crt", "--tls-cert", tmp_path / "n.crt", "--tls-key", tmp_path / "n.key"]
    where = ["--broker", address, "--connect-timeout", "0.3", *tls]
    done = fedstrata("--log-level", "debug", "--log-format", "json", *role, *where, *runs, null=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 3 and lines[-1]["level"] == "error" and address in lines[-1]["message"]
    assert any("n.crt ends in 10 days. Renew it" in line["message"] for line in lines)
    assert any(line["logger"] == "fedstrata.connection" for line in lines)
    names = {"cloud": "cloud", "institution": "institution-0", "device": "d"}
    assert all(line["node"] == names[role[0]] for line in lines if line["logger"] == "fedstrata.connection")


def test_an_unexpected_error_of_an_agent_is_logged_under_its_nodes_name() -> None:
    """Also one from before it has connected: see `common.runtime.lifecycle` for those after that."""
    handler = logging.StreamHandler(stream := io.StringIO())
    handler.setFormatter(logs.JsonLines())
    logger = logging.getLogger("fedstrata.lifecycle")

    async def agent() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(lambda: 1 // 0))

    logger.addHandler(handler)
    with pytest.raises(RunFailed, match=r"^unexpected ZeroDivisionError: integer division or modulo by zero$"):
        asyncio.run(run_agent("device-3", agent()))
    logger.removeHandler(handler)
    facts = json.loads(stream.getvalue())
    assert (facts["node"], facts["level"]) == ("device-3", "error")
    assert facts["message"] == "device-3 ended by an unexpected error" and "1 // 0" in facts["exception"]


def test_an_unforeseen_error_is_a_line_too() -> None:
    code = (
        "from deploy.console import logs; logs.begin('info', json_lines=True); "
        "import warnings; warnings.warn('w'); 1 / 0"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    warning, error = map(json.loads, done.stderr.splitlines())
    assert warning["logger"] == "py.warnings" and "ZeroDivisionError" in error["exception"]


def test_a_line_goes_to_standard_error_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live view replaces standard error, and shows the lines above itself."""
    handler = logs.StandardError()
    for _ in range(2):
        monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
        handler.emit(record("the reason"))
        assert stream.getvalue() == "the reason\n"
