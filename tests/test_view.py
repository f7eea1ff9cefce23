"""The live view of `run` and `cloud`: from the cloud's events, from status records, and the choice
of rows.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import queue
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TextIO

import aiomqtt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.live import Live

from fedstrata.common.experiment.reading import parse
from fedstrata.common.host.processes import free_port
from fedstrata.common.host.surroundings import OwnSurroundings
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import (
    About,
    ChildCount,
    ChildStatus,
    Key,
    NodeState,
    PhaseSeconds,
    Question,
    RoundScore,
    RunStatus,
    Status,
    Step,
)
from fedstrata.common.protocol.serialization import from_facts
from fedstrata.common.text import json_text
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.console import logs
from fedstrata.deploy.simulation.simulated_broker import Routed
from fedstrata.deploy.watching import showing
from fedstrata.deploy.watching.formatting import missing, sparkline, traffic
from fedstrata.deploy.watching.lab_state import Event, WatchedLab
from fedstrata.deploy.watching.rows import HiddenNodes, rows_of
from fedstrata.deploy.watching.screens import Terminal
from fedstrata.deploy.watching.showing import CloudLog, EventLines, LiveView, show
from fedstrata.deploy.watching.view import View
from tests.helpers.commands import PATIENCE_S
from tests.helpers.status import child, record
from tests.simulation.lab import ScenarioLab

RUN: Final = {
    "run": "20260101T000000Z-abcdef",
    "folder": "runs/20260101T000000Z-small-abcdef",
    "experiment": "small",
    "global_rounds": 400,
    "done": 109,
    "nodes": {"institutions": 2, "devices": 4},
    "model": "cnn_digits",
    "model_bytes": 39_700,
}
FINISHED: Final = {"score": 0.5, "loss": 1.0, "global_round": 2, "elapsed_s": 1.0, "model": "m"}
ERASED: Final = "\x1b[1A\x1b[2K"  # a line of the terminal


def lab_of(institutions: int = 2, devices: int = 4) -> WatchedLab:
    topology = {"institutions": institutions, "devices": devices}
    experiment = parse({"name": "small", "rounds": 400, "topology": topology})
    return WatchedLab("run-1", experiment, brokers=["b:1883"], now=0.0)


def terminal() -> Console:
    return Console(force_terminal=True, file=io.StringIO(), width=80, height=24)


class Fed:
    """The live view of a lab that is known from its cloud's events alone."""

    def __init__(self, lab: WatchedLab | None = None) -> None:
        self.view = LiveView(terminal(), CloudLog((lab or lab_of()).experiment, "b:1883"))
        self.at_s = 0.0
        self.take("run", RUN)

    @property
    def lab(self) -> WatchedLab:
        return self.view.lab

    def take(self, event: str, facts: Mapping[str, Any]) -> None:
        self.view._take(event, json.loads(json_text(facts)))

    def status(self, *children: ChildStatus, **facts: Any) -> None:
        self.at_s += 0.5
        self.take("status", asdict(record(*children, at_s=self.at_s, **facts)))

    def lines(self, width: int = 80, height: int = 24) -> list[str]:
        self.view._screen.show(self.lab, self.lab.new_events(), self.view._now())
        lines = View(width, height).picture(self.lab, self.view._now(), self.view._screen.notes)
        return [line.plain.rstrip() for line in lines]


# Before the rounds


def test_a_waiting_cloud_shows_the_run_its_folder_its_broker_and_the_missing_nodes() -> None:
    fed = Fed()
    text = "device-0 gave up: no data; device-1 has not joined yet; no"
    fed.status(
        child("institution-0", state=NodeState.INIT, text=text), child("institution-1", state=None)
    )
    lines = fed.lines()
    assert lines[1] == RUN["run"] and lines[2] == f"{RUN['folder']}  broker b:1883"
    assert (
        lines[3]
        == "waiting for device-0 of institution-0; device-1 of institution-0; institution-1"
    )
    fed.status(child("institution-0"), child("institution-1", state=None))
    assert missing(fed.lab) == [("institution-1", 1)]
    fed.status(child("institution-0"), child("institution-1"))
    assert missing(fed.lab) == [] and not [line for line in fed.lines() if "waiting" in line]


def test_the_missing_nodes_of_a_large_lab_are_counted() -> None:
    fed = Fed(lab_of(40, 80))
    fed.status(*(child(f"institution-{place}", state=None) for place in range(40)))
    lines = fed.lines(60, 24)
    assert " ".join(lines).count("institution-") >= 8 and "32 more" in " ".join(lines)
    assert len(lines) < 24 and max(map(len, lines)) <= 60


def test_in_a_watched_lab_the_missing_nodes_are_those_that_a_record_misses() -> None:
    lab = lab_of(2, 200)
    init, absent = NodeState.INIT, child("institution-1", state=None)
    lab.take(
        "cloud",
        record(
            child("institution-0", state=init, text=("device-0 has not joined yet; more")),
            absent,
            at_s=1.0,
        ),
        1.0,
    )
    assert missing(lab) == [("device-0 of institution-0", 1), ("institution-1", 1)]
    counted = ChildCount(None, Step.IDLE, 50), ChildCount(init, Step.IDLE, 49)
    lab.take("institution-0", record(child("device-0", state=None), others=counted, at_s=1.0), 1.0)
    assert missing(lab) == [
        ("device-0 of institution-0", 1), ("50 more of institution-0", 50), ("institution-1", 1)
    ]  # fmt: skip


# From the cloud's events alone


def test_the_clouds_status_shows_its_children() -> None:
    fed = Fed()
    first = child("institution-0", Step.FETCHING, done=1, total=4, epochs=2)
    fed.status(first, child("institution-1", Step.ASSIGNED), key=Key(0, 109, 0))
    assert fed.lab.global_round == 110
    lines = {line.split()[0]: line for line in fed.lines() if line}
    assert "110/400" in lines["cloud"] and lines["cloud"].endswith("0/2 results")
    assert lines["institution-0"].endswith("██░░░░░░ fetching 25 %")
    assert (
        lines["institution-1"].endswith("assigned") and lines["2"] == "    2 devices: not reported"
    )
    fed.status(
        child("institution-0", Step.TRAINING), child("institution-1", Step.DONE), key=Key(0, 109, 0)
    )
    lines = {line.split()[0]: line for line in fed.lines() if line}
    assert lines["institution-0"].endswith("training") and lines["institution-1"].endswith("done")
    assert lines["cloud"].endswith("1/2 results")


def test_accuracy_loss_time_left_and_notes() -> None:
    fed = Fed()
    fed.take("begun", {"elapsed_s": 1000.0})
    for done in range(110, 114):
        row = {
            "wan_up_bytes": 1,
            "wan_down_bytes": 2,
            "elapsed_s": 10.0 * (done - 9),
            "train_loss": 0.1,
        }
        fed.take("global_round", {"global_round": done, **row})
        fed.take(
            "evaluated", {"global_round": done, "score": (done - 100) / 100, "loss": 3 - done / 100}
        )
    fed.take("warning", {"reason": "models have collapsed"})
    fed.status(
        child("institution-0"),
        child("institution-1", state=NodeState.LOST),
        run=fed.view._progress.status,
    )
    first, scores, *_ = lines = fed.lines()
    assert first == "small  global round 113/400  about 47 min left"
    assert scores == "accuracy 0.1300 ▁▃▆█   loss 1.8700 ▃▂▂▁"
    assert lines[-2:] == ["warning: models have collapsed", "institution-1: lost"]
    styles = {
        line.plain.split()[0]: line.spans
        for line in View(80, 24).picture(fed.lab, 0.0, [])
        if line.plain
    }
    assert all("#d55e00" in str(span.style) for span in styles["institution-1"][:2])
    assert not any("#d55e00" in str(span.style) for span in styles["institution-0"])


def test_off_a_terminal_long_names_and_reasons_are_whole() -> None:
    experiment = parse(
        {"name": "n", "tiers": [{"name": "wan", "children": "device", "fan_out": 2}]}
    )
    lab = WatchedLab("run-1", experiment, brokers=["b"], now=0.0)
    name, reason = next(iter(lab.cloud.children)), "the disk is full " * 20
    lab.take("cloud", record(child(name, state=NodeState.FAILED, text=reason), at_s=1.0), 1.0)
    assert reason.strip() in "\n".join(line.plain for line in View().picture(lab, 0.0, []))
    assert max(len(line.plain) for line in View(80, 24).picture(lab, 0.0, [])) <= 80


@given(values=st.lists(st.floats(), max_size=40), most=st.integers(2, 20))
def test_a_sparkline_has_a_bar_for_each_of_the_last_values(values: list[float], most: int) -> None:
    finite = [value for value in values if abs(value) < 1e300]
    bars = sparkline(finite, most=most)
    assert len(bars) == (min(most, len(finite)) if len(finite) > 1 else 0)
    assert sparkline(values, most=most) is not None


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ((0.940, 0.943, 0.941, 0.942), "▁▁▁▁"),  # 0.003 is no step
        ((0.94, 0.95, 0.96, 0.97), "▁▂▄▅"),
        ((0.1, 0.5, 0.9), "▁▅█"),
        ((-2.0, -2.01), "▂▁"),
        ((0.0, 0.0), "▁▁"),
    ],
)
def test_a_sparkline_shows_small_changes_as_small(values: tuple[float, ...], bars: str) -> None:
    assert sparkline(values, most=9) == bars


# The choice of rows


@given(
    institutions=st.integers(1, 8), each=st.integers(1, 12), room=st.integers(2, 120),
    lost=st.sets(st.integers(0, 95), max_size=5), devices=st.booleans(),
)  # fmt: skip
def test_rows_fit_and_count_every_node(
    institutions: int, each: int, room: int, lost: set[int], devices: bool
) -> None:
    lab = lab_of(institutions, institutions * each)
    gone = [lab.nodes[f"device-{place}"] for place in lost if place < institutions * each]
    for node in lab.nodes.values():
        node.state = "lost" if node in gone else "ready"
    rows = rows_of(lab.cloud, room=room, openable=lambda node: devices or node.role != "device")
    assert len(rows) <= room
    alone = [row for _, row in rows if not isinstance(row, HiddenNodes)]
    hidden = [child for _, row in rows if isinstance(row, HiddenNodes) for child in row.children]
    below = sum(len(node.children) for node in hidden)
    assert len(alone) + len(hidden) + below == len(lab.nodes) and alone[0] is lab.cloud
    assert all(node.parent in alone for node in alone[1:] + hidden)
    if devices and room >= 2 + 3 * len(gone):
        assert all(node in alone for node in gone)
    if devices and room >= len(lab.nodes):
        assert not hidden


def test_where_all_devices_are_lost_each_institution_has_rows_first() -> None:
    lab = lab_of(3, 36)
    for parent, children in lab.experiment.tree.children.items():
        state = NodeState.READY if parent == "cloud" else NodeState.LOST
        lab.take(parent, record(*(child(name, state=state) for name in children), at_s=1.0), 1.0)
    lines, few = (
        [line.plain for line in View(80, height).picture(lab, 0.0, [])] for height in (17, 8)
    )
    names = [line.split()[0] for line in lines if line]
    assert [names.count(f"institution-{place}") for place in range(3)] == [1, 1, 1] and len(
        lines
    ) < 17
    assert sum(name.startswith("device-") for name in names) >= 3
    assert few[-1] == "  3 institutions with 36 nodes below, 36 of them lost: 3 ready"


# Bytes


def test_a_watched_run_is_the_same_run_and_its_records_are_counted_as_control(
    tmp_path: Path,
) -> None:
    """The models are the same bit for bit; nobody asks, nothing is sent; the bytes are those of
    links.csv.
    """
    experiment = parse(
        {
            "rounds": 3,
            "topology": {"institutions": 2, "devices": 4},
            "links": {"check": "off"},
            "transfer": {"inline_bytes": 0},
        }
    )

    def played(*, asks: bool) -> tuple[ScenarioLab, str, WatchedLab, Counter[str], int]:
        watches, found, sent = list[WatchedLab](), Counter[str](), Counter[str]()

        def observe(event: str, facts: dict[str, object]) -> None:
            if event == "run":
                watches.append(
                    WatchedLab(str(facts["run"]), experiment, brokers=["b"], now=lab.now())
                )

        def hook(message: Routed) -> None:
            topic = topics.parse(message.topic)
            sent[type(topic).__name__] += len(message.body)
            for watched in watches:
                watched.receive(topic, message.body, lab.now())

        def read(sim: ScenarioLab) -> None:
            (path,) = sim.agents.runs.glob("*/links.csv")
            rows = csv.DictReader(path.read_text().splitlines())
            for row in (row for row in rows if row["kind"] == "all"):
                up = row["to"] == "cloud" or row["from"].startswith("device")
                found[f"{row['tier']}_{'up' if up else 'down'}"] += int(row["message_bytes"])

        async def ask(sim: ScenarioLab) -> None:
            while asks and not sim.over:
                for watched in watches:
                    body = serialization.encode(
                        Question("nonce", About.STATUS, watched.run), "operator"
                    )
                    for parent in watched.experiment.tree.children:
                        sim.inject(topics.ask("lab", parent, "operator"), body, qos=0)
                await asyncio.sleep(2.0)

        lab = ScenarioLab(
            experiment, observe=observe, at_end=read, time_limit_s=900.0, scenario=ask
        )
        lab.network.hooks.append(hook)
        outcome = lab.run()
        assert outcome.ok, outcome
        return lab, outcome.digest, watches[0], found, sent["StatusTopic"]

    _, digest, _, plain, nothing = played(asks=False)
    lab, watched_digest, watched, links, status_bytes = played(asks=True)
    assert nothing == 0 and status_bytes > 3000 and digest == watched_digest
    counted = {name: flow.total for name, flow in watched.flows().items()}
    for name, total in links.items():
        # reports and repeats depend on the time
        assert abs(total - plain[name]) < 0.02 * total, name
        assert 0.95 * total <= counted[name] <= 1.05 * total + status_bytes, name
    assert [each.global_round for each in watched.progress.scores] == [1, 2, 3]
    assert watched.silent_s(watched.cloud, lab.now()) == 0.0
    assert {name for name, node in watched.nodes.items() if node.records} == {
        "cloud", "institution-0", "institution-1",
    }  # fmt: skip


# On standard error


def observed(capsys: pytest.CaptureFixture[str], *, json_lines: bool = False) -> tuple[str, str]:
    with show(lab_of().experiment, json_lines=json_lines, broker="b:1883") as observe:
        observe("run", RUN | {"folder": "f" * 300})
        observe("child", {"node": "institution-0", "state": "lost", "reason": "\x1b[2J"})
        observe("evaluated", {"global_round": 110, "score": 0.5, "loss": 1.0})
    done = capsys.readouterr()
    return done.out, done.err


def test_off_a_terminal_it_writes_whole_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = observed(capsys)
    first, second, third = err.splitlines()
    assert first.startswith(f"run {RUN['run']}: small, ") and first.endswith(
        f"in {'f' * 300}, broker b:1883"
    )
    assert second == r"institution-0: lost (\u001b[2J)" and third.startswith(
        "global round 110/400  accuracy 0.5000"
    )
    assert not out
    monkeypatch.setattr(logs, "shows_activity", lambda: False)
    monkeypatch.setattr("fedstrata.deploy.watching.showing.shows_activity", lambda: False)
    assert observed(capsys) == ("", "")
    out, err = observed(capsys, json_lines=True)
    assert [json.loads(line)["event"] for line in out.splitlines()] == [
        "run",
        "child",
        "evaluated",
    ] and not err


def test_a_line_has_the_bytes_of_each_tier_in_both_directions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    moved = {
        "wan_up_bytes": 1_000_000,
        "wan_down_bytes": 3_000_000,
        "lan_up_bytes": 20_000,
        "lan_down_bytes": 50_000,
    }
    with show(lab_of().experiment, json_lines=False) as observe:
        observe("run", RUN)
        observe("global_round", {"elapsed_s": 12.5, **moved})
        observe("evaluated", {"global_round": 110, "score": 0.5, "loss": 1.0})
    line = capsys.readouterr().err.splitlines()[-1]
    assert (
        line
        == "global round 110/400  accuracy 0.5000  loss 1.0000  12.5 s  wan 4.0 MB, lan 70.0 kB"
    )
    fed = Fed()
    fed.status(
        child("institution-0", up=1_000_000, down=2_500_000),
        tiers=((1_000_000, 2_500_000), (300, 4_000)),
    )
    assert traffic(fed.lab) == "wan 3.5 MB, lan 4.3 kB"


@pytest.mark.parametrize("finished", [False, True])
def test_on_a_terminal_the_view_stays_unless_the_run_has_finished(
    finished: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = terminal()
    monkeypatch.setattr(showing, "Console", lambda *, stderr: console)
    with show(lab_of().experiment, json_lines=False, broker="b:1883") as observe:
        observe("run", RUN)
        lost = child("institution-0", state=NodeState.LOST, text="gone")
        observe("status", asdict(record(lost, at_s=1.0)))
        if finished:
            observe("finished", FINISHED)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert str(RUN["run"]) in text and "institution-0: lost (gone)" in text
    assert text.endswith(ERASED) is finished
    assert ("test accuracy" in capsys.readouterr().out) is finished


@pytest.mark.parametrize(
    ("folder", "runs", "named"),
    [
        ("runs/20260101T000000Z-small-abcdef", "", "abcdef"),
        ("mine/20260101T000000Z-small-abcdef", "", "mine/20260101T000000Z-small-abcdef"),
        ("mine/20260101T000000Z-small-abcdef", "mine", "abcdef"),
        ("my runs/20260101T000000Z-small-abcdef", "", "'my runs/20260101T000000Z-small-abcdef'"),
    ],
)
def test_a_finished_run_is_reported_with_a_command_that_finds_it(
    folder: str,
    runs: str,
    named: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FEDSTRATA_RUNS", runs)
    with show(lab_of().experiment, json_lines=False) as observe:
        observe("run", RUN | {"folder": folder})
        observe("finished", FINISHED)
    assert capsys.readouterr().err.endswith(f"report it with: fedstrata report {named}\n")


@contextmanager
def standard_output(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    """Let standard output be a pipe; yield its other end."""
    read, write = os.pipe()
    with os.fdopen(read) as reader, os.fdopen(write, "w") as writer:
        monkeypatch.setattr("sys.stdout", writer)
        with suppress(BrokenPipeError):
            yield reader
            writer.close()


def test_a_reader_that_stops_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    large = "x" * 50_000  # a pipe has room for one
    with standard_output(monkeypatch) as reader, EventLines().writing() as lines:
        for i in range(20):
            lines.write("status", {"i": i, "large": large})
            lines.write("global_round", {"i": i, "large": large})
        found: list[dict[str, Any]] = []
        while len(found) < 20 or found[-1]["i"] < 19 or found[-1]["event"] != "global_round":
            found.append(json.loads(reader.readline()))
    status = [each["i"] for each in found if each["event"] == "status"]
    assert [each["i"] for each in found if each["event"] == "global_round"] == list(range(20))
    assert status[0] == 0 and len(status) <= 3, "those that would wait are left out"


def test_events_stay_on_standard_output_while_own_code_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whose prints go to standard error, in a thread of this process."""
    lines = EventLines()
    with OwnSurroundings().entered(), lines.writing():
        print("own")
        lines.write("run", {"folder": "here"})
    found = capsys.readouterr()
    assert json.loads(found.out) == {"event": "run", "folder": "here"} and found.err == "own\n"


def test_the_run_ends_when_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    with standard_output(monkeypatch) as reader:
        reader.close()
        with pytest.raises(BrokenPipeError), EventLines().writing() as lines:
            lines.write("run", {})


class Drawn(Terminal):
    """A screen that keeps what it draws."""

    def __init__(self, live: Live) -> None:
        super().__init__(live)
        self.pictures = queue.Queue[str]()

    def show(self, lab: WatchedLab, events: Sequence[Event], now: float) -> None:
        super().show(lab, events, now)
        self.pictures.put("\n".join(map(str, View(80, 24).picture(lab, now, self.notes))))

    def shows(self, *texts: str) -> None:
        """Wait until a picture has these texts."""
        while not all(
            text in picture for picture in [self.pictures.get(timeout=PATIENCE_S)] for text in texts
        ):
            pass


def drawn_view(follow: BrokerAddress) -> tuple[LiveView, Drawn]:
    view = LiveView(terminal(), CloudLog(lab_of().experiment, "b:1883"), follow=follow)
    view._screen = screen = Drawn(view._live)
    return view, screen


def test_the_view_of_a_lab_on_this_machine_asks_the_institutions_on_its_broker(
    tmp_path: Path,
) -> None:
    async def publish() -> None:
        async with aiomqtt.Client(served.host, served.port) as client:
            await client.subscribe(topics.ask("lab", "institution-1", "+"))
            with view.shown():
                view.observe("run", RUN)
                view.observe(
                    "status", asdict(record(child("institution-1"), at_s=1.0, key=Key(0, 109, 0)))
                )
                await anext(client.messages)  # it asks
                training = child("device-2", Step.TRAINING, done=1, total=2)
                lost = child("device-3", state=NodeState.LOST, text="gone")
                status = serialization.encode(
                    record(training, lost, at_s=7.0, key=Key(0, 109, 0)), "s"
                )
                await client.publish(
                    topics.status("lab", str(RUN["run"]), "institution-1"), status, qos=1
                )
                await asyncio.to_thread(
                    screen.shows, "training 50 %", "device-3: lost (gone)", "110.1"
                )

    with broker.start(directory=tmp_path) as served:
        view, screen = drawn_view(BrokerAddress(served.host, served.port))
        asyncio.run(publish())


def test_a_view_whose_broker_is_not_there_has_the_clouds_events() -> None:
    view, screen = drawn_view(BrokerAddress("127.0.0.1", free_port()))
    with view.shown():
        view.observe("run", RUN)
        view.observe(
            "status",
            asdict(record(child("institution-0", Step.TRAINING), at_s=1.0, key=Key(0, 109, 0))),
        )
        screen.shows("institution-0    ready")


def test_a_record_survives_its_way_as_an_event() -> None:
    others = (ChildCount(None, Step.IDLE, 3), ChildCount(NodeState.READY, Step.DONE, 4))
    scores = (RoundScore(1, None, 0.5, 0.25), RoundScore(2, 0.5, None, None))
    run = RunStatus(1, 2.0, 3.0, (PhaseSeconds("train", 0.5),), scores)
    full = record(
        child("a", Step.FETCHING, state=None, done=1, total=2, loss=0.5),
        child("b", text="why"),
        at_s=1.0,
        key=Key(0, 1, 2),
        tiers=((1, 2),),
        others=others,
        run=run,
    )
    for status in (full, record(at_s=2.0)):
        assert (
            from_facts(Status, json.loads(json_text(asdict(status))))
            == from_facts(Status, asdict(status))
            == status
        )
