"""Devices that come and leave by a trace: the pure times, the file, and whole labs in virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.errors import RunFailed
from fedstrata.common.experiment.reading import load, parse, to_toml
from fedstrata.common.metrics import Metrics
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import NodeState, Presence
from fedstrata.common.protocol.presence import TimeZero
from fedstrata.common.runtime.lifecycle import until_return
from fedstrata.common.runtime.world import Host, World
from fedstrata.common.settings.devices import OnlineTimes
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.simulation.hardware import Durations
from tests.helpers.commands import DEMO, null_model, run_lab, table
from tests.helpers.direct import events
from tests.helpers.scenarios import restarted
from tests.helpers.sites import SimulatedSite, virtual
from tests.simulation.lab import Scenario, ScenarioLab
from tests.simulation.outcome import LabOutcome, model_digest

pytestmark = pytest.mark.usefixtures("warm")


def presence(state: NodeState, elapsed_s: float = -1.0) -> bytes:
    return serialization.encode(
        Presence(state, "institution", reason="out of disk", elapsed_s=elapsed_s), "theirs"
    )


@pytest.mark.parametrize(
    ("run", "body", "retained", "returns", "at_s"),
    [
        ("run-1", b"", False, False, 15.0),  # the parent has left: the run is over
        ("run-1", presence(NodeState.FINISHED), True, False, 5.0),
        ("run-1", presence(NodeState.FAILED), False, None, 15.0),
        ("run-1", presence(NodeState.FAILED), True, None, 5.0),
        ("run-1", presence(NodeState.LOST), False, True, 50.0),  # it may come back
        # the run was resumed further on
        ("run-1", presence(NodeState.READY, 45.0), False, True, 15.0),
        ("run-1", presence(NodeState.READY, 45.0), True, True, 50.0),  # from an unknown time
        # it went on to another run, and so does the device
        ("run-2", presence(NodeState.INIT), False, True, 10.0),
        ("run-2", presence(NodeState.READY), True, True, 50.0),  # remains of a dead run
        ("run-1", b"noise", False, True, 50.0),
        # a stranger cleared it, and the parent lives
        ("run-1", (b"", presence(NodeState.READY)), False, True, 50.0),
        # a stranger ended it
        ("run-1", (presence(NodeState.FAILED), presence(NodeState.READY)), False, True, 50.0),
    ],
    ids=lambda value: "",
)
@virtual
async def test_a_device_that_is_away_reads_its_parents_state(
    site: SimulatedSite,
    run: str,
    body: bytes | tuple[bytes, ...],
    retained: bool,
    returns: bool | None,
    at_s: float,
) -> None:
    loop, topic = asyncio.get_running_loop(), topics.state("lab", run, "up")
    times, begun = OnlineTimes((50.0,)), loop.time()
    for second, each in enumerate(body if isinstance(body, tuple) else (body,), 10):
        inject = partial(site.inject, topic, each, retain=retained)
        loop.call_later(0 if retained else second, inject)

    def build(world: World) -> asyncio.Task[bool]:
        host = Host(site.address, 30.0, Metrics(), world=world)
        away = until_return(host, "device-0", "up", run="run-1", times=times, begun=begun)
        return asyncio.create_task(away)

    returning = site.make("device-0", build)
    if returns is None:  # as of devices that are there: a service starts it again
        with pytest.raises(RunFailed, match=r"^up gave up: out of disk$"):
            await returning
    else:
        assert await returning is returns
    assert loop.time() - begun == pytest.approx(at_s, abs=0.1)


CSV = "device,begin_s,end_s\ndevice-0,0,40\ndevice-1,10,20\ndevice-0,90,\ndevice-1,20,30\n"


@st.composite
def online_times(draw: st.DrawFn) -> OnlineTimes:
    lengths = draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=5))
    begin = draw(st.sampled_from([0.0, 2.0]))
    changes = tuple(begin + sum(lengths[:place]) for place in range(len(lengths)))
    return OnlineTimes(changes, draw(st.sampled_from([None, begin + sum(lengths)])))


def online_by_hand(times: OnlineTimes, t: float) -> bool:
    offset = t if times.repeat_s is None else t % times.repeat_s
    return sum(change <= offset for change in times.changes) % 2 == 1


@given(
    times=online_times(),
    t=st.integers(0, 80).map(lambda n: n / 4),
    seconds=st.integers(1, 20).map(lambda n: n / 4),
)
def test_times_come_and_leave_as_written(times: OnlineTimes, t: float, seconds: float) -> None:
    assert times.online(t) == online_by_hand(times, t)
    ahead = [t + step / 8 for step in range(1, 400)]
    back = times.returns(t)
    expected = next((at for at in [t, *ahead] if online_by_hand(times, at)), inf)
    assert back == (pytest.approx(expected) if expected < inf else inf)
    if times.repeat_s is None:
        assert times.next_change(t) == min((at for at in times.changes if at > t), default=inf)
    else:  # without a period the time after the last departure counts too
        counted = (
            sum(
                online_by_hand(times, at)
                for at in [t, *ahead]
                if at < times.after(t, seconds) - 1e-9
            )
            / 8
        )
        assert counted == pytest.approx(seconds)


def test_a_device_that_left_for_good_has_the_patience_of_one_that_is_lost() -> None:
    times = OnlineTimes((0.0, 10.0, 50.0, 60.0))
    # five seconds before it leaves, five after it has returned
    assert times.after(5.0, 10.0) == 55.0
    assert times.after(58.0, 30.0) == 88.0 and times.returns(60.0) == inf
    assert times.after(-3.0, 10.0) == 7.0  # progress before the run's begin


def test_time_zero_follows_presences_that_did_not_wait() -> None:
    zero = TimeZero()
    assert zero.note(-1.0, "a", 100.0, published=True) is None
    assert zero.note(float("nan"), "a", 100.0, published=True) is None
    assert zero.note(5.0, "a", 100.0, published=False) == 95.0
    assert zero.note(6.0, "a", 110.0, published=False) is None  # a reply that waited for its link
    # the same within a quarter of a second
    assert zero.note(15.1, "a", 110.0, published=True) is None
    assert zero.note(5.0, "b", 130.0, published=True) == 125.0  # the run was resumed


def test_a_trace_is_part_of_the_experiment_once_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "phones.csv").write_text(CSV)
    file = tmp_path / "lab.toml"
    file.write_text(
        '[topology]\ndevices = 3\n[availability]\ntrace = { file = "phones.csv", repeat_s = 100 }\n'
    )
    experiment = load(file)
    assert parse(experiment.to_json()) == experiment and "device-0 = [0.0, 40.0, 90.0]" in to_toml(
        experiment
    )
    assert (
        experiment.online("device-1") == OnlineTimes((10.0, 30.0), 100.0)
        and experiment.online("device-2") is None
    )
    assert load(file, ["availability.trace=phones.csv"]).online("device-0") == OnlineTimes(
        (0.0, 40.0, 90.0)
    )


LAB: dict[str, Any] = {
    "rounds": 3,
    "topology": {"institutions": 2, "devices": 4},
    "institution": {"rounds": 2},
    "links": {"check": "off"},
    "transfer": {"idle_s": 20.0, "keepalive_s": 5, "inline_bytes": 0},
}


def run(
    changes: dict[str, list[float]],
    *,
    repeat_s: float | None = None,
    scenario: Scenario | None = None,
    ok: bool = True,
    at_end: Callable[[ScenarioLab], None] = lambda lab: None,
    **settings: Any,
) -> LabOutcome:
    """Run a lab with a trace, which must end well if it is to be `ok`."""
    trace = {"availability": {"trace": {"changes": changes, "repeat_s": repeat_s}}}
    experiment = parse(LAB | settings | (trace if changes else {}))
    options = {"seed": 3, "model_bytes": 40_000, "durations": Durations(spread=0.0)}
    found = ScenarioLab(experiment, scenario=scenario, at_end=at_end, **options).run()
    assert not ok or found.ok, found
    return found


def test_a_lab_waits_for_the_return_of_all_and_its_model_is_the_same() -> None:
    plain = run({})
    # below institution-0, longer than idle_s
    away = run({"device-0": [0, 3, 43], "device-1": [0, 3.5, 45]})
    assert away.digest == plain.digest and 45 < away.virtual_s < plain.virtual_s + 50
    assert (
        "institution-0 waits for devices that are away by their traces: device-0 returns in 39 s"
        in away.warnings
    )


def test_a_repeated_trace_takes_a_device_away_again_and_again() -> None:
    plain, found = run({}, rounds=6), run({"device-0": [0, 4]}, rounds=6, repeat_s=10.0)
    assert found.digest == plain.digest
    waits = [warning for warning in found.warnings if "waits for devices" in warning]
    assert len(waits) >= 2 and found.virtual_s > plain.virtual_s + 10, found


CLOSING = {"rule": "quorum", "quorum": 1, "deadline_s": 5.0}
OF_ONE = {"rounds": 2, "closing": CLOSING}


def test_nobody_is_available_and_a_quorum_waits_for_the_next_return() -> None:
    away = {f"device-{number}": [0, 3, 60 + number] for number in range(4)}
    assert run(away, institution=OF_ONE).virtual_s > 60


def test_a_quorum_goes_on_without_devices_that_are_away() -> None:
    found = run({"device-0": [0, 3, 400]}, institution=OF_ONE)
    assert found.ended[CLOUD] == found.ended["device-0"] == "" and len(found.rounds) == 3


@pytest.mark.parametrize(
    ("leaves_s", "lost_s", "gone_s"), [(2.01, 4.5, 30.0), (2.01, 4.5, 1000.0), (3.26, 4.05, 1000.0)]
)
def test_a_round_of_a_lost_device_begins_again_with_one_that_its_trace_brings_back(
    leaves_s: float, lost_s: float, gone_s: float
) -> None:
    """The cloud has the same patience as the institution, which it must not give up meanwhile.

    The lost one may be back before the other one: this round does not count on it again.
    """
    least = {"rounds": 2, "min_available": 1, "start_wait_s": 1.0}
    lose = restarted("device-1", lost_s, for_s=gone_s)
    found = run({"device-0": [0, leaves_s, 60]}, institution=least, scenario=lose)
    assert 60 < found.virtual_s < 75 and len(found.rounds) == 3


def test_a_device_that_left_for_good_ends_a_round_of_all_with_the_reason() -> None:
    found = run({"device-0": [0, 3]}, ok=False)
    assert not found.ok
    assert (
        "device-0 made no progress for 20 s (its state is disconnected: away by its trace for good)"
        in str(found.ended)
    )


def test_the_cloud_waits_for_devices_directly_below_it() -> None:
    away, manifest = list[dict[str, Any]](), dict[str, Any]()

    def read(lab: ScenarioLab) -> None:
        (folder,) = lab.agents.runs.iterdir()
        away.extend(events(folder, "away"))
        manifest.update(json.loads((folder / "manifest.json").read_text()))

    two_tiers = {"topology": {"institutions": 0, "devices": 2}, "institution": {}, "rounds": 5}
    run({"device-0": [0, 3, 43]}, at_end=read, **two_tiers)
    assert away[0]["returns_s"].keys() == {"device-0"}
    recorded = manifest["availability"]
    assert recorded["devices"] == 1 and len(recorded["digest"]) == 16


@pytest.mark.parametrize("node", [CLOUD, "institution-0", "device-0"])
def test_a_killed_node_continues_at_its_place_of_the_trace(node: str) -> None:
    found = run({"device-0": [0, 4, 34]}, scenario=restarted(node, 6.0))
    assert found.digest == run({}).digest and 34 < found.virtual_s < 60


@pytest.mark.slow
def test_a_real_lab_waits_for_a_device_and_an_outage_and_its_model_is_the_same(
    tmp_path: Path,
) -> None:
    small = (
        "topology.institutions=1",
        "topology.devices=2",
        "rounds=3",
        "institution.rounds=2",
        "links.check=off",
    )
    changing = (
        "availability.trace.changes={ device-0 = [0, 0.2, 5] }",
        (
            "links.wan={ trace = { seconds = [0, 5.5, 7], up_mbit = [20, 0, 20], down_mbit = [20, "
            "0, "
            "20] } }"
        ),
        "links.lan={}",
    )
    folder = run_lab(DEMO, tmp_path, *small, *changing, null=True)
    assert model_digest(tmp_path) == null_model(load(DEMO, small))
    rows = table(folder / "rounds.csv")
    assert float(rows[-1]["elapsed_s"]) > 5
    logs = "".join(path.read_text() for path in (folder / "logs").glob("devices*.log"))
    assert "away by its trace for 5 s" in logs and "available again" in logs
