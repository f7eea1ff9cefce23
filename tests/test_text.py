"""Text from the network is data: no terminal, log or file gets a control character of it."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fedstrata.common.errors import RunFailed
from fedstrata.common.experiment.reading import parse
from fedstrata.common.host.examination import Finding
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import (
    Acknowledgement,
    Alive,
    Declined,
    Here,
    Key,
    NodeState,
    Preparing,
    Presence,
)
from fedstrata.common.text import by_cause, escaped, json_text
from fedstrata.deploy.console import logs, reporting, tabular
from fedstrata.deploy.watching import formatting
from fedstrata.deploy.watching.lab_state import WatchedLab
from fedstrata.deploy.watching.screens import Lines
from fedstrata.deploy.watching.showing import CloudLog
from fedstrata.deploy.watching.view import View
from tests.helpers.status import child, record

# A title of the window, a colour, a cleared screen, a line of a log's own, a C1 control, a text
# that runs backwards.
HOSTILE = "\x1b]0;owned\x07\x1b[31m\x1b[2J\n2026-01-01 fedstrata ERROR forged\x9b1m\u202e\x7f"
SAFE = (
    r"\u001b]0;owned\u0007\u001b[31m\u001b[2J\n2026-01-01 fedstrata ERROR "
    r"forged\u009b1m\u202e\u007f"
)
NAME, SAFE_NAME = "\x1b[2J\n\x9b1m", r"\u001b[2J\n\u009b1m"  # of at most 64 characters, escaped
RUN = "20260101T000000Z-abcdef"


@given(text=st.text(max_size=20))
def test_escaped_text_is_one_printable_line(text: str) -> None:
    once = escaped(text)
    assert len(once.splitlines()) <= 1 and not any(
        letter < " " or "\x7f" <= letter < "\xa0" for letter in once
    )
    assert escaped(once) == once
    assert once == text or not text.isprintable()


@given(text=st.text(max_size=20))
def test_a_json_document_stays_the_same(text: str) -> None:
    document = json.dumps({"a": text}, ensure_ascii=False)
    assert json.loads(escaped(document)) == {"a": text}


def test_json_has_null_for_a_number_that_is_not_finite() -> None:
    nan, inf = float("nan"), float("inf")
    value = {
        "loss": nan,
        "rows": [1, 2.5, -inf, {"x": (inf, "NaN", None, True)}],
        "text": "Infinity",
    }
    wanted = {
        "loss": None,
        "rows": [1, 2.5, None, {"x": [None, "NaN", None, True]}],
        "text": "Infinity",
    }
    assert json.loads(json_text(value)) == wanted == json.loads(json_text(value, indent=1))
    finite = {"b": [1, 0.1], "a": "\u00e4"}
    assert json_text(finite) == json.dumps(finite) and json_text(finite, indent=2) == json.dumps(
        finite, indent=2
    )


def test_equal_causes_of_many_are_named_once() -> None:
    assert by_cause([]) == ""
    assert by_cause([("a", "fails"), ("b", "hangs"), ("c", "fails")]) == "a and c fails; b hangs"
    many = [
        (f"device-{i}", f"gave up: fails in training on {60 + i} samples with KeyError")
        for i in range(12)
    ]
    shared = "gave up: fails in training with KeyError"
    assert by_cause(many[:1]) == f"device-0 {many[0][1]}"
    assert by_cause(many[:3]) == f"device-0, device-1 and device-2 {shared}"
    assert by_cause(many) == f"device-0, device-1 and 10 others {shared}"


def test_text_without_control_characters_is_not_changed() -> None:
    for text in ("Zürich 北京", "1\u202f000\xa0m", r"C:\new\u001b"):
        assert escaped(text) == text
    assert escaped(HOSTILE) == SAFE and escaped("\U000e0001\ud800") == r"\udb40\udc01\ud800"


@pytest.mark.parametrize(
    "message",
    [
        Presence(NodeState.FAILED, NAME, reason=HOSTILE),
        Alive(NAME, Presence(NodeState.LOST, "device", reason=HOSTILE)),
        Preparing(1, HOSTILE),
        Declined(Key(1, 0, 0), HOSTILE),
        Acknowledgement(Key(1, 0, 0), HOSTILE),
        Here(*[NAME] * 5, *[HOSTILE] * 3, NAME, 1.5e9, (Finding(HOSTILE, True, True, HOSTILE),)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_every_text_of_a_message_is_escaped_where_it_enters(message: serialization.Message) -> None:
    _, received = serialization.decode(serialization.encode(message, "c0ffee"))
    safe = repr(message).replace(repr(HOSTILE), repr(SAFE)).replace(repr(NAME), repr(SAFE_NAME))
    assert repr(received) == safe


def test_a_session_is_escaped() -> None:
    session, _ = serialization.decode(serialization.encode(Preparing(1, ""), "\x1b[2J"))
    assert session == r"\u001b[2J"


def test_what_watch_shows_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    experiment = parse({"topology": {"institutions": 1, "devices": 1}})
    lab = WatchedLab(RUN, experiment, brokers=["localhost"], now=0.0)
    presence = Presence(NodeState.FAILED, "cloud", reason=HOSTILE)
    body = serialization.encode(presence, "cloud\x1b[2J")
    lab.receive(topics.StateTopic("lab", RUN, "cloud"), body, 0.0, retained=False)
    status = record(child("device-0", state=NodeState.FAILED, text=HOSTILE), at_s=1.0)
    lab.receive(
        topics.StatusTopic("lab", RUN, "institution-0"),
        serialization.encode(status, "x\x1b[2J"),
        0.0,
    )
    status = record(child("institution-0", state=NodeState.INIT, text=HOSTILE), at_s=1.0)
    lab.receive(
        topics.StatusTopic("lab", RUN, "cloud"), serialization.encode(status, "cloud\x1b[2J"), 0.0
    )
    events = lab.new_events()
    for screen in (Lines(json_lines=False), Lines(json_lines=True)):
        screen.show(lab, events, 0.0)
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    notes = [line for event, facts in events if (line := formatting.line(lab, event, facts))]
    console.print(*View(200, 40, devices=True).picture(lab, 0.0, notes), sep="\n")
    shown = capsys.readouterr().out + console.file.getvalue()  # type: ignore[attr-defined]
    assert SAFE in shown and "\x1b" not in shown and "\nforged" not in shown
    assert all(letter == "\n" or escaped(letter) == letter for letter in shown)


def test_what_the_cloud_shows_has_no_control_characters() -> None:
    _, received = serialization.decode(
        serialization.encode(Presence(NodeState.FAILED, "device", reason=HOSTILE), "s")
    )
    assert isinstance(received, Presence)
    facts = {"node": "device-0", "state": received.state, "reason": received.reason}
    assert CloudLog(parse({})).line("child", facts) == f"device-0: failed ({SAFE})"


# Text that does not come in a message: of documents within one, of exceptions, of other processes


def test_a_line_of_the_log_is_one_line() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        raised = sys.exc_info()
    record = logging.LogRecord(
        "fedstrata.x", logging.WARNING, "", 0, "device-0 failed: %s", (HOSTILE,), raised
    )
    first, *others = logs.PlainLines(logs.PLAIN).format(record).split("\n")
    assert first.endswith(f"fedstrata.x WARNING device-0 failed: {SAFE}")
    assert others[0] == "Traceback (most recent call last):" and all(
        escaped(line) == line for line in others
    )


def test_an_error_of_a_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    reporting.report(RunFailed(f"device-0: {HOSTILE}"))
    logs.write_line("\nresume with: it")
    assert capsys.readouterr().err == f"fedstrata: device-0: {SAFE}\n\nresume with: it\n"


def test_an_unforeseen_error_is_escaped() -> None:
    code = (
        "from fedstrata.deploy.console.logs import begin; begin('info', json_lines=False)\n"
        f"raise ValueError({HOSTILE!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1 and "ValueError: " in done.stderr
    assert all(escaped(line) == line for line in done.stderr.split("\n"))


def test_tables_and_pages_are_escaped() -> None:
    for write in (tabular.clean, tabular.tex):
        assert escaped(write(HOSTILE)) == write(HOSTILE)
