"""The picture of a watched lab, and watching on a broker."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.errors import ConnectionFailed, WireError
from fedstrata.common.experiment.reading import parse
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import (
    About,
    Announcement,
    ChildCount,
    Key,
    NodeState,
    Presence,
    Question,
    RoundScore,
    RunStatus,
    Step,
)
from fedstrata.common.runtime.world import World
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.watching import formatting
from fedstrata.deploy.watching import runs as watched_runs
from fedstrata.deploy.watching.follower import Follower
from fedstrata.deploy.watching.lab_state import Event, WatchedLab
from fedstrata.deploy.watching.runs import SETTLE_S, Runs
from fedstrata.deploy.watching.screens import Lines, look
from tests.helpers.commands import DEMO, PATIENCE_S, command, invoke, sets
from tests.helpers.null_lab import MODEL_BYTES
from tests.helpers.sites import SimulatedSite, virtual
from tests.helpers.status import child, record
from tests.helpers.watched import BODIES, LAB, RUN, Watched, drawn, experiment_of

pytestmark = pytest.mark.usefixtures("warm")

# Which run


def announce(runs: Runs, run: str, *, node: str = "cloud", text: str | None = None) -> None:
    announcement = Announcement(experiment_of().to_json() if text is None else text, "[]")
    receive(runs, topics.SpecTopic(LAB, run, node), serialization.encode(announcement, "s"))


def live(runs: Runs, run: str, *, node: str = "cloud", state: NodeState = NodeState.READY) -> None:
    receive(
        runs, topics.StateTopic(LAB, run, node), serialization.encode(Presence(state, "cloud"), "s")
    )


def receive(runs: Runs, topic: topics.Topic, body: bytes) -> None:
    """Let a message be received, and ignored if it is none, as a client does."""
    with suppress(WireError):
        runs.receive(topic, body, 0.0)


def chosen(runs: Runs, now: float = 99.0) -> str | None:
    found = runs.choose(now)
    assert found is None or found[1] == experiment_of()
    return None if found is None else found[0]


def test_the_newest_living_run_is_watched() -> None:
    runs = Runs(None)
    for run, state in (
        ("r-1", NodeState.READY),
        ("r-2", NodeState.INIT),
        ("r-3", NodeState.FAILED),
    ):
        live(runs, run, state=state)
        assert chosen(runs) is None or run != "r-1"
        announce(runs, run)
    live(runs, "r-4")  # and nothing announced
    assert chosen(runs, SETTLE_S / 2) is None  # more may be kept there
    assert chosen(runs, SETTLE_S) == "r-2"
    for run in ("r-1", "r-2"):  # they end while they are looked for
        for topic in (topics.SpecTopic(LAB, run, "cloud"), topics.StateTopic(LAB, run, "cloud")):
            receive(runs, topic, b"")
    assert chosen(runs) is None and runs.names() == ["r-3"]
    runs = Runs(None, lab="north")
    live(runs, "r-9")
    announce(runs, "r-9")
    assert chosen(runs) is None and runs.names() == []


def test_a_run_may_be_chosen_dead_or_alive() -> None:
    runs = Runs("r-3")
    live(runs, "r-4")
    announce(runs, "r-4")
    assert chosen(runs) is None
    announce(runs, "r-3")
    assert chosen(runs) == "r-3"


def test_a_run_whose_experiment_cannot_be_read_is_passed_over() -> None:
    runs = Runs(None)
    huge = '{"topology": {"devices": 1000000000}}'
    for run, text in (("r-1", None), ("r-2", "{"), ("r-3", '{"seed": "x"}'), ("r-4", huge)):
        live(runs, run)
        announce(runs, run, text=text)
    assert chosen(runs, SETTLE_S) == "r-1"


def test_an_institutions_announcement_serves_where_the_cloud_is_not_received() -> None:
    runs = Runs(None)
    announce(runs, "r-1", node="institution-0")
    assert chosen(runs) is None
    live(runs, "r-1", node="institution-0")
    assert chosen(runs) == "r-1"


RUN_TOPICS = st.sampled_from(
    [
        topics.SpecTopic(LAB, "a-1", "n"),
        topics.StateTopic(LAB, "a-1", "n"),
        topics.SpecTopic(LAB, "b-1", "m"),
        topics.AskTopic(LAB, "a", "b"),
        topics.SpecTopic("x", "a-1", "n"),
    ]
)


@given(said=st.lists(st.tuples(RUN_TOPICS, BODIES)))
def test_no_announcement_is_fatal(said: list[tuple[topics.Topic, bytes]]) -> None:
    runs = Runs(None)
    for topic, body in said:
        receive(runs, topic, body)
    assert runs.choose(99.0) is None


def test_what_is_kept_of_announcements_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    most, text = 16_000, "x" * 900
    monkeypatch.setattr(watched_runs, "HELD_MOST", most)
    runs = Runs(None)
    for run in range(10, 30):
        announce(runs, f"r-{run}", text=text)
    kept = most // len(text)
    assert runs.names() == [f"r-{run}" for run in range(29, 29 - kept, -1)], "the newest"
    announce(runs, "r-10", text=text)
    assert "r-10" not in runs.names()
    announce(runs, "r-30", text="z" * (most + 1))
    assert runs.names() == [], "too large for any"
    announce(runs, "r-31", text="z" * most)
    assert runs.names() == ["r-31"], "to the last character"


def test_a_node_that_announces_any_number_of_runs_hides_none() -> None:
    runs = Runs(None)
    live(runs, "20261129T1")
    announce(runs, "20261129T1")
    for number in range(10_000):
        announce(runs, f"9999-{number}", node="device-0", text="x" * 10_000)
        live(runs, f"9999-{number}", node="device-0")
    assert len(runs.names()) == 1 + watched_runs.RUNS_MOST
    assert chosen(runs) == "20261129T1", "that of the cloud"


def test_a_run_that_is_asked_for_is_kept_whatever_its_age() -> None:
    runs = Runs("r-000")
    for number in range(100, 200):
        announce(runs, f"r-{number}")
    announce(runs, "r-000")
    for number in range(200, 300):
        announce(runs, f"r-{number}")
    assert chosen(runs) == "r-000"


@given(
    sent=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 300), st.booleans())
    )
)
def test_any_order_of_announcements_keeps_the_bounds(
    sent: list[tuple[str, int, int, bool]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watched_runs, "HELD_MOST", 2000)
        patch.setattr(watched_runs, "RUNS_MOST", 3)
        runs = Runs(None)
        for node, run, size, alive in sent:
            if alive:
                live(runs, f"r-{run}", node=node)
            announce(runs, f"r-{run}", node=node, text="x" * size)
            each = {name: list(held.values()) for name, held in runs._of.items()}
            assert all(1 <= len(held) <= 3 for held in each.values())
            assert (
                sum(len(one.text) for held in each.values() for one in held) == runs._held <= 2000
            )


# The picture


def scene() -> Watched:
    """Return two institutions of two devices in the third global round: one trains, one has been
    reported.
    """
    watched = Watched()
    watched.all_ready()
    scores = tuple(RoundScore(each, 1 / each, 0.3 * each, 1.2 / each) for each in (1, 2))
    run = RunStatus(2, 20.0, 10.0, (), scores)
    for second in (0, 2):
        watched.now = 18.0 + second
        watched.status(
            "cloud",
            child(
                "institution-0",
                Step.TRAINING,
                epochs=3,
                up=1_500_000 + 3000 * second,
                down=900_000,
                loss=0.4321,
                seconds=2.0,
            ),
            child("institution-1", Step.ASSIGNED, epochs=3),
            key=Key(0, 2, 0),
            tiers=((1_500_000 + 3000 * second, 930_000), (4_000_000, 3_000_000 + second)),
            run=run,
        )
        watched.status(
            "institution-0",
            child(
                "device-0", Step.TRAINING, done=30, total=120, epochs=3, up=50, down=60_000 * second
            ),
            child("device-1", Step.FETCHING, done=4, total=16, size=16_000, epochs=3),
            key=Key(0, 2, 1),
        )
        lost = child("device-2", state=NodeState.LOST, text="connection lost")
        watched.status("institution-1", lost, child("device-3"), key=Key(0, 1, 1))
    return watched


PICTURES = {
    80: """
small  global round 3/10  about 78 s left
accuracy 0.6000 ▁█   loss 0.6000 █▁
20260101T000000Z-abcdef
WAN  up    1.5 MB    3.0 kB/s  down  930.0 kB       0 B/s
LAN  up    4.0 MB       0 B/s  down    3.0 MB       1 B/s

node               state     round
cloud              ready      3/10 ░░░░░░░░ 0/2 results
  institution-0    ready       2/2 ████░░░░ 0/2 devices
    device-0       ready       3.2 ██░░░░░░ training 25 %
    device-1       ready       3.2 ██░░░░░░ fetching 25 %  4.0 kB of 16.0 kB
  institution-1    ready           assigned
    device-2       lost            connection lost; last seen 20 s ago
    device-3       ready
device-2: lost
""",
    200: """
small  global round 3/10  about 78 s left
accuracy 0.6000 ▁█   loss 0.6000 █▁
20260101T000000Z-abcdef
WAN  up    1.5 MB    3.0 kB/s  down  930.0 kB       0 B/s
LAN  up    4.0 MB       0 B/s  down    3.0 MB       1 B/s

node               state     round          up        down     loss epochs
cloud              ready      3/10                                         ░░░░░░░░░░░░░░░░░░░░ 0/2 results
  institution-0    ready       2/2    3.0 kB/s       0 B/s   0.4321      3 ██████████░░░░░░░░░░ 0/2 devices
    device-0       ready       3.2       0 B/s   60.0 kB/s               3 █████░░░░░░░░░░░░░░░ training 25 %
    device-1       ready       3.2       0 B/s       0 B/s               3 █████░░░░░░░░░░░░░░░ fetching 25 %  4.0 kB of 16.0 kB
  institution-1    ready                 0 B/s       0 B/s               3 assigned
    device-2       lost                  0 B/s       0 B/s                 connection lost; last seen 20 s ago
    device-3       ready                 0 B/s       0 B/s
device-2: lost
""",
}


def test_a_lab_of_four_layers_has_its_own_words_rounds_and_flows() -> None:
    tiers = [
        {"name": "wan", "children": "region", "fan_out": 2},
        {"name": "metro", "children": "institution", "rounds": 3},
        {"name": "lan", "fan_out": 2, "rounds": 2},
    ]
    watched = Watched(parse({"tiers": tiers}))
    watched.all_ready()
    region = "region-0"
    watched.status(
        "cloud",
        child(region, Step.TRAINING),
        key=Key(0, 0, 0),
        tiers=((7, 8), (41, 32), (1200, 1000)),
    )
    watched.status(region, child("institution-0", Step.TRAINING), key=Key(0, 0, 1))
    watched.status("institution-0", child("device-0", Step.TRAINING), key=Key(0, 0, 3))
    totals = {name: flow.total for name, flow in watched.lab.flows().items()}
    assert totals == {
        "wan_up": 7,
        "wan_down": 8,
        "metro_up": 41,
        "metro_down": 32,
        "lan_up": 1200,
        "lan_down": 1000,
    }
    for width in (80, 100, 200):
        lines = {
            line.split()[0]: line.split()
            for line in drawn(watched, width).splitlines()
            if line.strip()
        }
        assert lines["METRO"][1:4] == ["up", "41", "B"] and "2/3" in lines[region]
        assert (
            lines[region][-1] == "institutions"
            and "4/6" in lines["institution-0"]
            and "1.4" in lines["device-0"]
        )


def test_a_lab_of_two_layers_has_devices_below_its_cloud() -> None:
    watched = Watched(parse({"tiers": [{"name": "wan", "fan_out": 3}]}))
    watched.all_ready()
    steps = (Step.DONE, Step.TRAINING, Step.OFFERING)
    children = [child(f"device-{place}", step, done=1, total=2) for place, step in enumerate(steps)]
    watched.status("cloud", *children, key=Key(0, 4, 0), tiers=((10, 20),))
    for width in (80, 200):
        lines = {
            line.split()[0]: line for line in drawn(watched, width).splitlines() if line.strip()
        }
        assert lines["cloud"].endswith("1/3 results") and lines["device-0"].endswith("done")
        assert lines["device-1"].endswith("training 50 %") and "5.1" in lines["device-2"]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_picture(width: int) -> None:
    wide = PICTURES[max(width, 80)].strip("\n").splitlines()
    assert drawn(scene(), width).splitlines() == [
        line if len(line) <= width else f"{line[: width - 1]}…" for line in wide
    ]


def test_a_picture_in_ascii() -> None:
    assert drawn(scene(), 100, plain=True).isascii()


def test_a_large_lab_is_drawn_as_the_height_permits_lost_and_slow_devices_first() -> None:
    watched = Watched(experiment_of(5, 200))
    watched.all_ready()
    assert drawn(watched, 80, height=30, devices=False).count("40 devices: 40 ready") == 5
    assert len(drawn(watched, 80, height=30).splitlines()) <= 30
    entries = [
        child(f"device-{place}", Step.TRAINING, done=place, total=40)
        for place in range(1, 30)
        if place != 7
    ]
    watched.now = 1.0
    watched.status(
        "institution-0",
        child("device-0", Step.TRAINING, state=NodeState.LOST),
        *entries,
        key=Key(0, 0, 0),
        others=(
            ChildCount(NodeState.READY, Step.OFFERING, 1),
            ChildCount(NodeState.READY, Step.DONE, 10),
        ),
    )
    counts = formatting.counts(watched["institution-0"], watched["institution-0"].children.values())
    assert counts == "1 lost, 28 training, 1 offering, 10 done; slowest device-1, training 2 %"
    lines = drawn(watched, 80, height=20).splitlines()
    rows = [line.split()[0] for line in lines if line.startswith("    device-")]
    assert rows == [f"device-{device}" for device in range(len(rows))] and len(rows) >= 2
    hidden = next(
        line for line in lines if line.split()[:3] == [str(40 - len(rows)), "more", "devices:"]
    )
    assert hidden.startswith(
        f"    {40 - len(rows)} more devices: {29 - len(rows)} training, 1 offering, 10 done"
    )
    assert len(lines) <= 20
    assert drawn(watched, 80, height=300).count("device-") >= 189  # ten of them are only counted


# On a broker


class Seen:
    """A screen that keeps what it is shown."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.changed = asyncio.Event()

    def waiting(self, runs: Runs, brokers: str) -> None:
        pass

    def show(self, lab: WatchedLab, events: Sequence[Event], now: float) -> None:
        self.events += events
        self.changed.set()

    async def sees(self, event: str, **facts: object) -> None:
        while not any(
            name == event and facts.items() <= reported.items() for name, reported in self.events
        ):
            self.changed.clear()
            await self.changed.wait()


def keep(site: SimulatedSite, *messages: Announcement | Presence | None) -> None:
    """Leave retained messages of the cloud's; None clears its presence."""
    for message in messages:
        body = b"" if message is None else serialization.encode(message, "cloud-1")
        topic = topics.spec if isinstance(message, Announcement) else topics.state
        site.inject(topic(LAB, RUN, "cloud"), body, qos=1, retain=True)


def begin(site: SimulatedSite) -> None:
    keep(site, Announcement(experiment_of().to_json(), "[]"), Presence(NodeState.READY, "cloud"))


def finish(site: SimulatedSite) -> None:
    keep(site, Presence(NodeState.FINISHED, "cloud"), None)


def follower(
    site: SimulatedSite, follow: Callable[[Follower], Coroutine[Any, Any, None]]
) -> asyncio.Task[None]:
    """Start a watch in a process of its own."""

    def build(world: World) -> asyncio.Task[None]:
        address = replace(site.address, username="guest")
        return asyncio.create_task(
            follow(Follower([address], run=None, connect_timeout_s=9.0, world=world))
        )

    return site.make("operator", build)


@virtual
async def test_a_watch_survives_its_brokers_restart(site: SimulatedSite) -> None:
    seen = Seen()
    begin(site)
    following = follower(site, lambda watch: watch.follow(seen))
    await seen.sees("state", node="cloud", state="ready")
    site.broker.kill()
    await seen.sees("broker", state="away")
    site.broker.start("empty")
    await seen.sees("broker", state="connected")
    begin(site)
    finish(site)
    await following
    assert seen.events[-1] == ("end", {"state": "finished"})


@virtual
async def test_a_watch_asks_for_the_status_and_receives_no_models(site: SimulatedSite) -> None:
    seen = Seen()
    begin(site)
    following = follower(site, lambda watch: watch.follow(seen))
    await seen.sees("state", node="cloud", state="ready")
    await asyncio.sleep(1.0)
    (session,) = site.broker.sessions.values()
    assert {type(topics.parse(each.replace("+", "x-1"))) for each in session.filters} == {
        topics.SpecTopic, topics.StateTopic, topics.StatusTopic
    }  # fmt: skip
    asked = next(
        message for message in site.routed if message.topic == topics.ask(LAB, "cloud", "operator")
    )
    _, question = serialization.decode(asked.body)
    assert isinstance(question, Question) and (question.about, question.run) == (About.STATUS, RUN)
    status = record(
        child("institution-0"),
        at_s=1.0,
        run=RunStatus(1, 1.0, 1.0, (), (RoundScore(1, 0.5, 0.25, 1.0),)),
    )
    site.inject(topics.status(LAB, RUN, "cloud"), serialization.encode(status, "cloud-1"), qos=1)
    await seen.sees("evaluated", global_round=1, score=0.25)
    finish(site)
    await following


@virtual
async def test_a_login_that_may_not_read_learns_it(site: SimulatedSite) -> None:
    site.broker.refused = [topics.spec(LAB, "+", "+")]
    with pytest.raises(
        ConnectionFailed, match=r"does not let login 'guest' read fs1/lab/\+/\+/spec"
    ):
        await follower(site, lambda watch: watch.follow(Seen()))


@virtual
async def test_a_look_shows_the_present_state(
    site: SimulatedSite, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(site)
    for json_lines in (False, True):
        show = partial(look, json_lines=json_lines, devices=None)
        await follower(site, lambda watch, show=show: watch.look(show, timeout_s=9.0))  # type: ignore[misc]
    *picture, tree = capsys.readouterr().out.splitlines()
    assert picture[0] == "small  global round 0/10"
    assert any(line.split() == ["cloud", "ready?", "0/10"] for line in picture)
    cloud = json.loads(tree)["nodes"]["cloud"]
    # nobody has sent anything: it may be a dead run's
    assert (cloud["state"], cloud["proven"]) == ("ready", False)
    assert cloud["children"]["institution-1"]["children"]["device-3"]["state"] == "unknown"


def test_off_a_terminal_it_is_reported_once_that_there_is_no_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = Lines(json_lines=False)
    for _ in range(2):
        lines.waiting(Runs(None), "b:1883")
    assert capsys.readouterr().err == "waiting for a run of lab lab on broker b:1883\n"


def test_a_look_at_a_broker_that_is_not_there_ends_with_3() -> None:
    done = invoke(
        "watch", "--broker", "127.0.0.1:1", "--once", "--timeout", "0.1", "--connect-timeout", "0.3"
    )
    assert done.exit_code == 3 and "connection refused" in done.stderr


@pytest.mark.timeout(300)  # its devices are started twice
@pytest.mark.slow
def test_a_lab_of_processes_is_watched_to_its_end(tmp_path: Path) -> None:
    """Its devices are killed in the second global round, and started again."""
    # a global round: else a record every second may miss some
    slow = "hardware.default.overhead_s=1.5"
    pairs = (
        "topology.institutions=1",
        "topology.devices=2",
        "rounds=3",
        "institution.rounds=1",
        slow,
    )
    names = ("device-0", "device-1")
    with ExitStack() as stack:
        served = stack.enter_context(broker.start(directory=tmp_path))

        def start(
            *arguments: str | Path, output: int = subprocess.DEVNULL
        ) -> subprocess.Popen[str]:
            words = command(*arguments, "--broker", f"{served.host}:{served.port}", null=True)
            process = subprocess.Popen(words, stdout=output, stderr=subprocess.DEVNULL, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        def start_devices() -> subprocess.Popen[str]:
            return start(
                "device",
                "--parent",
                "institution-0",
                *(w for name in names for w in ("--name", name)),
            )

        watch = start("watch", "--format", "json", output=subprocess.PIPE)
        start("cloud", DEMO, "--runs", tmp_path, *sets(*pairs))
        start("institution", "--name", "institution-0", "--spool", "none")
        devices = start_devices()
        reported: list[dict[str, Any]] = []
        lost: set[str] = set()
        assert watch.stdout is not None
        for line in watch.stdout:
            reported.append(json.loads(line))
            if reported[-1]["event"] == "global_round" and reported[-1]["global_round"] == 1:
                devices.kill()
            if reported[-1].get("state") == "lost" and lost != {*names}:
                lost.add(reported[-1]["node"])
                if lost == {*names}:  # sooner, and the record of this second would miss it
                    start_devices()
        assert watch.wait(PATIENCE_S) == 0
    states = {
        name: [
            line["state"] for line in reported if line["event"] == "state" and line["node"] == name
        ]
        for name in ("cloud", "institution-0", *names)
    }
    for name in names:  # whose last state is that of a record after which its parent has left
        seen = [state for state in states[name] if state in ("ready", "lost")]
        assert seen[-3:] == ["ready", "lost", "ready"]
    assert states["cloud"] == ["ready", "finished", "left"]
    assert [line["node"] for line in reported if line["event"] == "restarted"] in (
        [*names],
        [*reversed(names)],
    )
    assert [line["global_round"] for line in reported if line["event"] == "global_round"] == [
        1,
        2,
        3,
    ]
    scores = {
        line["global_round"]: line["score"] for line in reported if line["event"] == "evaluated"
    }
    assert list(scores) == [1, 2, 3]
    last = reported[-1]
    assert (last["event"], last["state"]) == ("end", "finished")
    assert last["train_loss"] > 0 and last["score"] == scores[3]
    assert (
        min(last[f"{tier}_{way}_bytes"] for tier in ("wan", "lan") for way in ("up", "down"))
        > 3 * MODEL_BYTES
    )
