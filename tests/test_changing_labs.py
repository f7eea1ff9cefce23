"""Labs that change while they run: nodes that are absent at the start, come later, and leave for
good.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import InvalidExperiment, RefusedModel
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.experiment.tiers import Minimum, Tier
from fedstrata.common.learning import splits
from fedstrata.common.methods.selection import ClientSelection
from fedstrata.common.protocol.attendance import Targets
from fedstrata.common.protocol.limits import ChildLimits, check_report, limits_below
from fedstrata.common.protocol.messages import (
    ChildStatus,
    Key,
    NodeState,
    Presence,
    Status,
    Step,
    Target,
    Task,
)
from fedstrata.common.protocol.serialization import decode
from fedstrata.common.protocol.topics import InboxTopic
from fedstrata.common.protocol.topics import parse as parse_topic
from fedstrata.common.runtime.exports import discovery
from fedstrata.common.settings.closing import Closing
from fedstrata.deploy.results.maps import changes
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.simulation.hardware import Durations
from fedstrata.deploy.simulation.simulated_broker import Routed
from fedstrata.deploy.watching.lab_state import WatchedLab
from tests.helpers.commands import tensors
from tests.helpers.coordinators import result_of
from tests.helpers.direct import run_direct
from tests.helpers.examples import slow
from tests.helpers.scenarios import Event, completed, later, played, restarted
from tests.simulation.lab import ScenarioLab
from tests.test_replay import plans, replay

LAB: Final[dict[str, Any]] = {
    "rounds": 6,
    "links": {"check": "off"},
    "topology": {"institutions": 2, "devices": 6},
    "transfer": {"idle_s": 20.0, "keepalive_s": 5},
    "cloud": {"min_available": 1, "start_wait_s": 10},
    "institution": {"rounds": 2, "min_available": 2, "start_wait_s": 5},
}
NAMES: Final = tuple(f"device-{number}" for number in range(6))
RULES: Final = ("fedavg", "fedcross", "fedmr", "fedcda", "scaffold")


def with_institution(**keys: Any) -> dict[str, Any]:
    return {**LAB, "institution": {**LAB["institution"], **keys}}


def absences(found: Sequence[Event], node: str) -> list[list[str]]:
    """Return the children that were absent in each round of a node."""
    return [event.get("absent", []) for event in found if event["node"] == node]


# The settings


@pytest.mark.parametrize(
    ("given", "children", "least"),
    [(1, 4, 1), (4, 4, 4), (0.5, 4, 2), (0.5, 5, 2), (0.1, 4, 1), (0.99, 4, 3)],
)
def test_the_minimum_is_a_number_or_a_share(given: float, children: int, least: int) -> None:
    tier = Tier(name="wan", min_available=given, start_wait_s=3.0)
    assert tier.minimum_of(children) == Minimum(least, 3.0)
    assert Tier(name="wan").minimum_of(children) is None


@pytest.mark.parametrize(
    ("given", "selected", "quorum"),
    [
        ({"min_available": 2}, 4, 2),
        ({"min_available": 4, "participation": 0.5}, 4, 2),
        ({"min_available": 3}, 2, 2),
    ],
)
def test_a_round_closes_without_lost_children(
    given: dict[str, Any], selected: int, quorum: int
) -> None:
    closing = Tier(name="wan", **given).closing_of(selected, among=8)
    assert (closing.rule, closing.quorum, closing.deadline_s) == ("quorum", quorum, float("inf"))
    asked = Closing(rule="quorum", quorum=3, deadline_s=7.0)
    assert Tier(name="wan", closing=asked, **given).closing_of(4, among=8) == asked
    assert Tier(name="wan").closing_of(4, among=8).rule == "all"


# Client selection


def selection(**keys: Any) -> ClientSelection:
    experiment: Experiment = parse({"topology": {"institutions": 0, "devices": 6}, "cloud": keys})
    return ClientSelection(experiment.tiers[0], seed=1, node="cloud")


@pytest.mark.parametrize("selector", ["fraction", "round_robin", "power_of_choice"])
def test_absent_children_are_not_selected(selector: str) -> None:
    one = selection(participation=0.5, selection={"name": selector})
    for r in range(20):
        chosen = one.select(NAMES, r, samples=dict.fromkeys(NAMES, 10), absent=NAMES[:2])
        assert len(chosen) == 3 and not set(chosen) & set(NAMES[:2])
    assert one.select(NAMES, 20, absent=NAMES[:4]) == list(NAMES[4:])


def test_a_rule_of_several_models_has_as_many_as_ever() -> None:
    """Its models are as many as the children that take part in a complete lab: absent ones fill up."""
    one = selection(participation=0.5, aggregation={"name": "fedcross"})
    assert one.select(NAMES, 0, absent=NAMES[:4]) == [NAMES[0], *NAMES[4:]]
    assert len(one.select(NAMES, 1, absent=NAMES[:3])) == 3


# Whole labs in virtual time


def test_a_lab_begins_without_a_device_that_comes_later() -> None:
    enter = later("device-4", at_s=14, then=lambda lab, node: lab.start(node))
    _, found, _ = completed(LAB, enter, absent=["device-4"])
    missed = absences(found, "institution-1")
    taken = missed.index([])
    assert 0 < taken < len(missed) - 1 and missed[:taken] == [["device-4"]] * taken
    assert missed[taken:] == [[]] * (len(missed) - taken)
    assert absences(found, "institution-0") == [[]] * 12 and absences(found, "cloud") == [[]] * 6


def test_a_complete_lab_has_the_bits_of_one_that_waits_for_all() -> None:
    closed = {**LAB, "cloud": {}, "institution": {"rounds": 2}}
    assert completed(LAB)[0].digest == completed(closed)[0].digest


@pytest.mark.parametrize("rule", slow([*RULES, "fedadam"], but=["fedcross", "scaffold"]))
@pytest.mark.parametrize("node", ["device-4", "institution-1"])
def test_a_lab_goes_on_without_a_node_that_is_gone_for_good(rule: str, node: str) -> None:
    tree = with_institution(
        aggregation={"name": rule} | ({"learning_rate": 0.1} if rule == "fedadam" else {})
    )
    tree |= {"training": {"objective": {"name": rule}}} if rule == "scaffold" else {}
    outcome, found, _ = played(tree, later(node, at_s=10))
    orphans = ["device-3", "device-4", "device-5"] if node == "institution-1" else []
    assert [name for name, error in outcome.ended.items() if error] == orphans, outcome.result
    assert not outcome.ended["cloud"]
    parent = "institution-1" if node == "device-4" else "cloud"
    assert absences(found, parent)[-1] == [node] and len(absences(found, "cloud")) == 6
    assert absences(found, "institution-0") == [[]] * 12


def test_too_few_children_end_the_run_with_their_names() -> None:
    kill = later("device-0", "device-1", at_s=10)
    outcome, *_ = played({**LAB, "cloud": {}}, kill)
    assert not outcome.ok
    assert all(name in outcome.result for name in ("device-0", "device-1", "NoProgress"))


def test_a_device_that_returns_is_waited_for_within_the_idle_time() -> None:
    async def disturb(lab: ScenarioLab) -> None:
        await asyncio.sleep(10)
        for name in ("device-0", "device-1"):
            lab.kill(name)
        await asyncio.sleep(5)
        lab.start("device-0")

    _, found, _ = completed({**LAB, "cloud": {}}, disturb)
    assert absences(found, "institution-0")[-1] == ["device-1"]


def test_a_run_with_absent_nodes_is_replayed(tmp_path: Path) -> None:
    """The recorded absences give the models of the run, whatever the node does in the replay."""
    small = {"model": {"name": "mlp_digits"}, "training": {"batch_size": 2000}, "rounds": 3}
    undisturbed = run_direct(tmp_path, LAB | small)
    assert tensors(replay(undisturbed)) == tensors(undisturbed)
    lines = []
    for line in (undisturbed / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "plan" and event["node"] == "institution-0":
            event["absent"] = ["device-1"]
        lines.append(json.dumps(event))
    (undisturbed / "events.jsonl").write_text("\n".join(lines) + "\n")
    disturbed = replay(undisturbed)
    assert tensors(disturbed) != tensors(undisturbed) and tensors(replay(disturbed)) == tensors(
        disturbed
    )
    assert absences(plans(disturbed), "institution-0") == [["device-1"]] * 6


# Devices that enter


OPEN: Final = with_institution(entering=2)


@pytest.mark.parametrize(
    "rule", slow([*RULES, "fedadp", "feddyn", "fedexp"], but=["fedcross", "fedcda", "scaffold"])
)
def test_a_new_device_takes_part_from_the_next_round_on(rule: str) -> None:
    enter = later(
        "device-9", at_s=12, then=lambda lab, name: lab.start(name, parent="institution-1")
    )
    tree = with_institution(entering=2, aggregation={"name": rule})
    tree |= {"training": {"objective": {"name": rule}}} if rule in ("scaffold", "feddyn") else {}
    _, _, tables = completed(tree, enter)
    homes = homes_of(tables["devices"], "device-9")
    assert set(map(tuple, homes.values())) == {("institution-1",)} and min(homes) > 1
    if rule not in ("fedcross", "fedmr"):  # of four devices three take part, for three models
        assert [*homes] == list(range(min(homes), 7))
    links = [row for row in tables["links"] if "device-9" in (row["from"], row["to"])]
    ways = [(row["from"], int(row["message_bytes"])) for row in links if row["kind"] == "all"]
    assert [sender for sender, _ in ways] == ["institution-1", "device-9"]
    assert min(count for _, count in ways) > 10_000


# Devices that move


def moving(moves: list[dict[str, Any]], **keys: Any) -> dict[str, Any]:
    return {
        **with_institution(**{"entering": 2, **keys}),
        "availability": {"moves": {"device-4": moves}},
    }


def homes_of(rows: Sequence[Mapping[str, str]], device: str) -> dict[int, list[str]]:
    """Return below whom a device worked, by global round."""
    found: dict[int, list[str]] = {}
    for row in rows:
        if row["node"].endswith(f"/{device}") and int(row["local_rounds"]):
            found.setdefault(int(row["global_round"]), []).append(row["node"].split("/")[1])
    return found


def test_a_device_moves_by_its_trace() -> None:
    there, back = {"at_s": 5, "parent": "institution-0"}, {"at_s": 14, "parent": "institution-1"}
    _, _, tables = completed(moving([there, back]))
    homes = homes_of(tables["devices"], "device-4")
    assert homes[1] == ["institution-1"] and homes[6] == ["institution-1"]
    assert ["institution-0"] in homes.values()
    links = {(row["from"], row["to"]) for row in tables["links"]}
    assert {("institution-0", "device-4"), ("institution-1", "device-4")} < links


def test_devices_of_an_institution_that_is_gone_move_to_another() -> None:
    tree = with_institution(entering=3, move_after_s=6.0)
    _, _, tables = completed(tree, later("institution-1", at_s=10))
    for device in ("device-3", "device-4", "device-5"):
        assert homes_of(tables["devices"], device)[6] == ["institution-0"]


@cache
def digest_of(*moves: float, victim: str = "", at_s: float = 0.0) -> str:
    """Return the digest of a lab with slow devices, in which one moves away and back, and a victim
    is restarted.
    """
    away = [{"at_s": at, "parent": f"institution-{place}"} for place, at in enumerate(moves)]
    tree = moving(away) if away else with_institution(entering=2)

    kill = restarted(victim, at_s, for_s=0.4) if victim else None
    outcome, *_ = completed({**tree, "rounds": 2}, kill, durations=Durations(train_s=6.0))
    return outcome.digest


@pytest.mark.parametrize("victim", ["device-4", "institution-0", "institution-1", "cloud"])
# it begins at 1.3
@pytest.mark.parametrize("at_s", slow([1.4, 1.7, 2.3, 2.6, 3.2], but=[1.7, 2.6]))
def test_a_kill_at_each_state_of_a_move_that_undoes_itself_changes_nothing(
    victim: str, at_s: float
) -> None:
    assert digest_of(0.2, 1.0, victim=victim, at_s=at_s) == digest_of(0.2, 1.0) == digest_of()


def tasks_of(device: str, tree: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Return the tasks that a device gets in a lab: their parents, their local rounds, and what
    they follow, from 1.
    """
    found: dict[tuple[str, int], int] = {}

    async def disturb(lab: ScenarioLab) -> None:
        lab.network.hooks.append(hook)

    def hook(message: Routed) -> None:
        topic = parse_topic(message.topic)
        if isinstance(topic, InboxTopic) and topic.node == device:
            task = decode(message.body)[1]
            if isinstance(task, Task):
                found[topic.sender, 2 * task.key.global_round + task.key.local_round + 1] = (
                    task.follows
                )

    completed(tree, disturb)
    return [(parent, number, follows) for (parent, number), follows in found.items()]


@pytest.mark.parametrize("keeps", ["scaffold", "feedback"])
def test_a_device_that_moves_keeps_its_vectors(keeps: str) -> None:
    """The first task below another parent follows the last one whose result the parent before has
    accepted.
    """
    tree = moving([{"at_s": 5, "parent": "institution-0"}, {"at_s": 12, "parent": "institution-1"}])
    if keeps == "scaffold":
        tree["institution"] |= {"aggregation": {"name": "scaffold"}}
        tree["training"] = {"objective": {"name": "scaffold"}}
    else:
        tree["transfer"] = {
            **LAB["transfer"],
            "lan": {"up": {"name": "topk", "share": 0.1, "feedback": True}},
        }
    tasks = tasks_of("device-4", tree)
    parents = [parent for parent, _, _ in tasks]
    assert parents.index("institution-0") > 0 and parents[-1] == "institution-1"
    for (_, number, _), (_, later_number, follows) in pairwise(tasks):
        # a task that it left behind has no result
        assert follows in (number, number - 1) and number < later_number
    assert tasks[0][2] == 0 and all(follows > 0 for _, _, follows in tasks[1:])


def test_a_device_whose_state_is_lost_ends_and_moves_nowhere() -> None:
    tree = with_institution(entering=3, move_after_s=6.0, aggregation={"name": "scaffold"})
    tree["training"] = {"objective": {"name": "scaffold"}}
    sought: list[str] = []

    async def disturb(lab: ScenarioLab) -> None:
        lab.network.hooks.append(lambda message: sought.append(message.topic))
        await asyncio.sleep(8)
        lab.kill("device-4")
        lab.start("device-4", keep_files=False)

    outcome, _, _ = played(tree, disturb)
    assert "is lost. Start devices with the same --spool DIR" in outcome.ended["device-4"]
    assert "fs1/lab/ask/institution-1/device-4" in sought
    assert "fs1/lab/ask/institution-0/device-4" not in sought


TWO_TIERS: Final[dict[str, Any]] = {
    "rounds": 8,
    "links": {"check": "off"},
    "topology": {"institutions": 0, "devices": 3},
    "transfer": {"idle_s": 20.0, "keepalive_s": 5},
    "cloud": {"min_available": 1, "start_wait_s": 5, "entering": 1},
}


@pytest.mark.parametrize("node", [None, "cloud", "device-7", "device-0"])
def test_a_device_enters_below_the_cloud_and_returns_after_a_kill(node: str | None) -> None:
    async def enter(lab: ScenarioLab) -> None:
        await asyncio.sleep(4)
        lab.start("device-7", parent="cloud")
        await asyncio.sleep(3)
        if node is not None:
            lab.kill(node)
            await asyncio.sleep(0.4)
            lab.start(node, parent="cloud" if node == "device-7" else None)

    _, _, tables = completed(TWO_TIERS, enter)
    rounds = homes_of(tables["devices"], "device-7")
    assert 8 in rounds and 1 not in rounds
    sent = [row for row in tables["links"] if row["from"] == "device-7" and row["kind"] == "model"]
    assert len(sent) == 1 and int(sent[0]["payload_bytes"]) >= 10_000 * len(rounds)


def test_a_device_without_a_place_waits() -> None:
    enter = later(
        "device-7", "device-8", at_s=4, then=lambda lab, name: lab.start(name, parent="cloud")
    )
    outcome, _, tables = played(TWO_TIERS, enter)
    entered = {row["node"] for row in tables["devices"]} & {"cloud/device-7", "cloud/device-8"}
    assert len(entered) == 1 and not outcome.ended["cloud"]
    assert any("all places are taken: 4 children" in warning for warning in outcome.warnings), (
        outcome.warnings
    )


# What may enter, and what it may report


INSIDE = [("device-0", "institution-0")]
INSIDE += [(name, "institution-1") for name in ("device-0", "device-99")]
INSIDE += [("anything", "institution-0")]
OUTSIDE = [("device-0", "cloud"), ("device-0", "institution-7")]
OUTSIDE += [(name, "institution-0") for name in ("cloud", "institution-1", "all")]


@pytest.mark.parametrize(("device", "parent"), INSIDE + OUTSIDE)
def test_devices_alone_enter_and_below_parents_of_devices(device: str, parent: str) -> None:
    assert parse(OPEN).takes(device, parent) is ((device, parent) in INSIDE)
    assert parse(LAB).takes(device, parent) is ((device, parent) == INSIDE[0])


def below_institution(tree: Mapping[str, Any]) -> ChildLimits:
    digits = {**tree, "data": {"dataset": "digits"}}
    return limits_below(parse(digits), "cloud")["institution-0"]


@pytest.mark.parametrize(
    ("name", "parent", "most"),
    [
        ("device-0", "", 1),
        ("device-9", "institution-0", 1),
        ("device-3", "institution-0", 1),
        ("device-9", "", None),
        ("device-9", "institution-1", None),
        ("device-9", "cloud", None),
        ("a/b", "institution-0", None),
        ("cloud", "institution-0", None),
        ("x\n", "institution-0", None),
    ],
)
def test_a_report_on_a_device_that_cannot_be_there_is_refused(
    name: str, parent: str, most: int | None
) -> None:
    report = ChildReport(name, parent=parent)
    found = below_institution(OPEN).most_samples(report)
    assert found is None if most is None else found is not None and found >= most
    within = below_institution(LAB).most_samples(report) is not None
    assert within is ((name, parent) == ("device-0", ""))


def test_more_reports_than_places_are_refused() -> None:
    limits, work = below_institution(OPEN), Work(1, 0.5, 1, 1, 1.0)
    reports = [ChildReport(f"device-{90 + k}", Work(1), parent="institution-0") for k in range(6)]
    for count, refused in ((5, False), (6, True)):
        children = tuple(reports[:count])
        result = replace(result_of(Key(1, 0, 0)), work=work, path_steps=1, children=children)
        with pytest.raises(RefusedModel) if refused else nullcontext():
            check_report(result, limits=limits, epochs=1)


def test_a_run_in_which_a_device_has_moved_is_not_replayed(tmp_path: Path) -> None:
    run = run_direct(
        tmp_path,
        LAB | {"model": {"name": "mlp_digits"}, "training": {"batch_size": 2000}, "rounds": 1},
    )
    rows = (run / "devices.csv").read_text()
    (run / "devices.csv").write_text(
        rows.replace("institution-1/device-4", "institution-0/device-4")
    )
    with pytest.raises(InvalidExperiment) as error:
        replay(run)
    assert "cloud/institution-0/device-4 has entered or moved" in str(error.value)


# The data of a device that enters


OVERLAP = {"partition": "dirichlet_overlap", "partition_size": 50}


@pytest.mark.parametrize(
    ("data", "node", "expected"),
    [
        (OVERLAP, "device-9", 50),
        (OVERLAP, "pi-6", 50),
        (OVERLAP, "device-3", "a number from 6 on"),
        (OVERLAP, "zero", "a number from 6 on"),
        ({"partition": "iid"}, "device-9", "data.partition = 'iid' divides the samples"),
        ({"partition": "dirichlet"}, "device-9", "divides the samples among the devices"),
    ],
)
def test_the_share_of_a_new_device_is_by_its_number(
    data: dict[str, Any], node: str, expected: int | str
) -> None:
    tree = {**OPEN, "data": {"dataset": "digits", **data}}
    if node == "device-3":
        tree["topology"] = {"institutions": 2, "devices": [f"pi-{number}" for number in range(6)]}
    experiment = parse(tree)
    split = splits.split_of(experiment)
    if isinstance(expected, str):
        with pytest.raises(InvalidExperiment) as error:
            splits.samples_of(experiment, split, node=node)
        assert expected in str(error.value)
        return
    found = splits.samples_of(experiment, split, node=node)
    assert len(np.unique(found)) == expected and not any(
        np.array_equal(found, part) for part in split.partitions
    )
    larger = parse({**tree, "topology": {"institutions": 2, "devices": 12}})
    place = int(node.split("-")[1])
    # as if it had been there from the start
    assert np.array_equal(found, splits.split_of(larger).partitions[place])


def test_a_watcher_shows_who_has_entered_and_no_more_than_may() -> None:
    lab = WatchedLab("run", parse(OPEN), brokers=["broker"], now=0.0)
    entries = tuple(
        ChildStatus(f"device-{k}", NodeState.READY, Step.TRAINING, 0, 0, 0, 1, 0, 0, None, 0.0, "")
        for k in (0, 1, 4, 9, 8)
    )
    lab.take("institution-0", Status(1.0, None, True, False, (), entries, (), None), 1.0)
    below = lab.nodes["institution-0"].children  # three children and two places
    assert list(below) == ["device-0", "device-1", "device-2", "device-4", "device-9"]
    assert below["device-9"].step is Step.TRAINING and lab.nodes["device-9"] is below["device-9"]
    assert lab.nodes["device-4"] is below["device-4"]  # it has moved
    assert list(lab.nodes["institution-1"].children) == ["device-3", "device-5"]


def test_prometheus_finds_devices_that_have_entered() -> None:
    targets = Targets({"institution-0": ["device-0"]}, {"institution-0": 1})
    names = ("device-0", "a/b", "device-9", "device-8")
    reported = tuple(Target(name, f"10.0.0.{k}:9100") for k, name in enumerate(names))
    presence = Presence(NodeState.READY, "institution", metrics="10.0.0.9:9100", targets=reported)
    targets.receive("institution-0", presence, now=0.0)
    found = discovery(targets.addresses(), parse(OPEN).tree, cloud="10.0.0.8:9100", run="run")
    assert {each["labels"]["node"] for each in found} == {
        "cloud",
        "institution-0",
        "device-0",
        "device-9",
    }


def test_the_report_shows_who_worked_below_whom(tmp_path: Path) -> None:
    tree = moving([{"at_s": 5, "parent": "institution-0"}])
    completed(
        tree, at_end=lambda lab: shutil.copytree(lab.agents.runs, tmp_path, dirs_exist_ok=True)
    )
    (path,) = tmp_path.iterdir()
    figure = changes(Run(path))
    assert figure is not None and figure.table is not None
    found = [(row[0], row[2]) for row in figure.table.rows]
    expected = {
        "below institution-0": [3, 3, 4, 4, 4, 4],
        "below institution-1": [3, 3, 2, 2, 2, 2],
    }
    assert found == [(parent, count) for parent, counts in expected.items() for count in counts]


def test_a_round_whose_children_all_leave_begins_again_with_others() -> None:
    """Half of four devices take part in a round; both are killed within it, and the other two do
    it.
    """
    tree = {
        **TWO_TIERS,
        "rounds": 3,
        "topology": {"institutions": 0, "devices": 4},
        "cloud": {"participation": 0.5, "min_available": 1, "start_wait_s": 5},
    }
    lost: list[str] = []

    async def kill(lab: ScenarioLab) -> None:
        tasks: dict[str, int] = {}
        reached = asyncio.Event()

        def hook(message: Routed) -> None:
            topic = parse_topic(message.topic)
            if isinstance(topic, InboxTopic) and topic.sender == "cloud" and message.body:
                task = decode(message.body)[1]
                if isinstance(task, Task) and task.key.global_round == 1:
                    tasks[topic.node] = 1
                    if len(tasks) == 2:
                        reached.set()

        lab.network.hooks.append(hook)
        await reached.wait()
        for name in tasks:
            lost.append(name)
            lab.kill(name)

    outcome, _, tables = played(tree, kill)
    assert outcome.ok or not outcome.ended["cloud"], outcome.result
    worked = {
        row["node"].split("/")[1]
        for row in tables["devices"]
        if row["global_round"] == "2" and int(row["local_rounds"])
    }
    assert len(lost) == 2 and worked == {f"device-{k}" for k in range(4)} - set(lost)
