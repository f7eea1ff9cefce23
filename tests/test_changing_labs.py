"""Labs that change while they run: nodes that are absent at the start, come later, and leave for good."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from common.errors import InvalidExperiment
from common.experiment.reading import parse
from common.experiment.schema import Experiment
from common.experiment.tiers import Closing, Minimum, Tier
from common.methods.selection import ClientSelection
from deploy.simulation.lab import Scenario, SimulatedLab
from deploy.simulation.outcome import LabOutcome
from tests.helpers.commands import tensors
from tests.helpers.direct import run_direct
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
Event = dict[str, Any]


def with_institution(**keys: Any) -> dict[str, Any]:
    return {**LAB, "institution": {**LAB["institution"], **keys}}


def simulated(
    tree: Mapping[str, Any] = LAB, *, scenario: Scenario | None = None, absent: Sequence[str] = (), **options: Any
) -> tuple[LabOutcome, list[Event]]:
    """Run a lab, without `absent` nodes at first; return its outcome and its plans."""
    experiment, found = parse(tree), []

    def at_end(lab: SimulatedLab) -> None:
        (folder,) = lab.agents.runs.iterdir()
        found.extend(plans(folder))

    there = [name for name in ("cloud", *experiment.tree.nodes) if name not in absent]
    lab = SimulatedLab(
        experiment, seed=1, model_bytes=10_000, scenario=scenario, autostart=there, at_end=at_end, **options
    )
    return lab.run(), found


def later(*nodes: str, at_s: float, then: Callable[[SimulatedLab, str], object]) -> Scenario:
    """Do something with these nodes at a time."""

    async def disturb(lab: SimulatedLab) -> None:
        await asyncio.sleep(at_s)
        for node in nodes:
            then(lab, node)

    return disturb


def absences(found: Sequence[Event], node: str) -> list[list[str]]:
    """Return the children that were absent in each round of a node."""
    return [event.get("absent", []) for event in found if event["node"] == node]


# The settings


@pytest.mark.parametrize(
    ("given", "children", "least"), [(1, 4, 1), (4, 4, 4), (0.5, 4, 2), (0.5, 5, 2), (0.1, 4, 1), (0.99, 4, 3)]
)
def test_the_minimum_is_a_number_or_a_share(given: float, children: int, least: int) -> None:
    tier = Tier(name="wan", min_available=given, start_wait_s=3.0)
    assert tier.minimum_of(children) == Minimum(least, 3.0)
    assert Tier(name="wan").minimum_of(children) is None


@pytest.mark.parametrize(
    ("given", "selected", "quorum"),
    [({"min_available": 2}, 4, 2), ({"min_available": 4, "participation": 0.5}, 4, 2), ({"min_available": 3}, 2, 2)],
)
def test_a_round_closes_without_lost_children(given: dict[str, Any], selected: int, quorum: int) -> None:
    closing = Tier(name="wan", **given).closing_of(selected, among=8)
    assert (closing.rule, closing.quorum, closing.deadline_s) == ("quorum", quorum, float("inf"))
    asked = Closing(rule="quorum", quorum=3, deadline_s=7.0)
    assert Tier(name="wan", closing=asked, **given).closing_of(4, among=8) == asked
    assert Tier(name="wan").closing_of(4, among=8).rule == "all"


@pytest.mark.parametrize(
    ("table", "value", "expected"),
    [
        ("institution", 4, "institution.min_available = 4: more than the children of a parent (3). Use at most 3."),
        ("cloud", 3, "cloud.min_available = 3: more than the children of a parent (2)"),
        ("cloud", 0, "cloud.min_available = 0"),
        ("cloud", 1.5, "cloud.min_available = 1.5"),
        ("institution", "half", "institution.min_available = 'half'"),
    ],
)
def test_an_impossible_minimum_is_an_error_that_names_it(table: str, value: object, expected: str) -> None:
    with pytest.raises(InvalidExperiment) as error:
        parse({**LAB, table: {**LAB[table], "min_available": value}})
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"name": "clusamp"}, "the rule clusamp selects from all children"),
        ({"name": "krum", "wrong": 1}, "institution.aggregation"),
        ({"name": "fedbuff", "buffer": 3}, "more than the 2 children that train at once"),
    ],
)
def test_a_rule_that_needs_more_children_is_an_error(rule: dict[str, Any], expected: str) -> None:
    parse({**LAB, "institution": {"aggregation": rule}} if rule["name"] != "krum" else LAB)
    with pytest.raises(InvalidExperiment) as error:
        parse(with_institution(aggregation=rule))
    assert expected in str(error.value)


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


def test_a_selection_of_present_children_alone_is_that_of_a_complete_lab() -> None:
    complete, other = (selection(participation=0.5) for _ in range(2))
    assert [complete.select(NAMES, r) for r in range(9)] == [other.select(NAMES, r, absent=()) for r in range(9)]


def test_a_rule_of_several_models_has_as_many_as_ever() -> None:
    """Its models are as many as the children that take part in a complete lab: absent ones fill up."""
    one = selection(participation=0.5, aggregation={"name": "fedcross"})
    assert one.select(NAMES, 0, absent=NAMES[:4]) == [NAMES[0], *NAMES[4:]]
    assert len(one.select(NAMES, 1, absent=NAMES[:3])) == 3


# Whole labs in virtual time


def test_a_lab_begins_without_a_device_that_comes_later() -> None:
    outcome, found = simulated(
        absent=["device-4"], scenario=later("device-4", at_s=14, then=lambda lab, node: lab.start(node))
    )
    assert outcome.ok, outcome.result
    missed = absences(found, "institution-1")
    taken = missed.index([])
    assert 0 < taken < len(missed) - 1 and missed[:taken] == [["device-4"]] * taken
    assert missed[taken:] == [[]] * (len(missed) - taken)
    assert absences(found, "institution-0") == [[]] * 12 and absences(found, "cloud") == [[]] * 6


def test_a_complete_lab_has_the_bits_of_one_that_waits_for_all() -> None:
    closed = {**LAB, "cloud": {}, "institution": {"rounds": 2}}
    (outcome, _), (other, _) = simulated(), simulated(closed)
    assert outcome.ok and other.ok and outcome.digest == other.digest


@pytest.mark.parametrize("rule", ["fedavg", "fedcross", "fedmr", "fedcda", "fedadam", "scaffold"])
@pytest.mark.parametrize("node", ["device-4", "institution-1"])
def test_a_lab_goes_on_without_a_node_that_is_gone_for_good(rule: str, node: str) -> None:
    tree = with_institution(aggregation={"name": rule} | ({"learning_rate": 0.1} if rule == "fedadam" else {}))
    tree |= {"training": {"objective": {"name": rule}}} if rule == "scaffold" else {}
    outcome, found = simulated(tree, scenario=later(node, at_s=10, then=lambda lab, name: lab.kill(name)))
    orphans = ["device-3", "device-4", "device-5"] if node == "institution-1" else []
    assert [name for name, error in outcome.ended.items() if error] == orphans, outcome.result
    assert not outcome.ended["cloud"]
    parent = "institution-1" if node == "device-4" else "cloud"
    assert absences(found, parent)[-1] == [node] and len(absences(found, "cloud")) == 6
    assert absences(found, "institution-0") == [[]] * 12


def test_too_few_children_end_the_run_with_their_names() -> None:
    kill = later("device-0", "device-1", at_s=10, then=lambda lab, name: lab.kill(name))
    outcome, _ = simulated({**LAB, "cloud": {}}, scenario=kill)
    assert not outcome.ok
    assert "device-0" in outcome.result and "device-1" in outcome.result and "NoProgress" in outcome.result


def test_a_device_that_returns_is_waited_for_within_the_idle_time() -> None:
    async def disturb(lab: SimulatedLab) -> None:
        await asyncio.sleep(10)
        for name in ("device-0", "device-1"):
            lab.kill(name)
        await asyncio.sleep(5)
        lab.start("device-0")

    outcome, found = simulated({**LAB, "cloud": {}}, scenario=disturb)
    assert outcome.ok, outcome.result
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
    assert tensors(disturbed) != tensors(undisturbed) and tensors(replay(disturbed)) == tensors(disturbed)
    assert absences(plans(disturbed), "institution-0") == [["device-1"]] * 6
