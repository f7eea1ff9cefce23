"""Client selection: properties of every selector in the table, formulas, state that is kept, and
whole labs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from fedstrata.cloud import checkpoint
from fedstrata.cloud.checkpoint import RunState
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import load, parse
from fedstrata.common.experiment.tiers import Tier
from fedstrata.common.methods.selection import (
    ClientSelection,
    Participation,
    ResultFacts,
    Situation,
)
from fedstrata.common.methods.selectors import Oort, scores
from fedstrata.common.methods.settings import SELECTORS
from fedstrata.common.model.layout import ModelLayout, Section
from fedstrata.common.randomness import Purpose, generator
from tests.helpers.commands import DEMO, run_lab, tensors
from tests.helpers.direct import events, resumed_run, run_direct
from tests.helpers.examples import examples, slow
from tests.helpers.rules import rule_of
from tests.helpers.scenarios import KilledLab
from tests.simulation.lab import ScenarioLab

pytestmark = pytest.mark.usefixtures("warm")

NAMES: Final = [f"device-{i}" for i in range(10)]
SAMPLES: Final = {name: 10 + i for i, name in enumerate(NAMES)}


LAYOUT: Final = ModelLayout.build([("weight", (10,), Section.PARAMETER)])


def selection(name: str, share: float = 0.4, **keys: Any) -> ClientSelection:
    tier = {"name": "wan", "participation": share, "selection": {"name": name, **keys}}
    return ClientSelection(Tier.model_validate(tier), seed=3, node="a")


def result(k: int, *, loss: float = 1.0, seconds: float = 1.0) -> ResultFacts:
    return ResultFacts(10 + k, loss, seconds, 1000)


def play(
    one: ClientSelection,
    rounds: Sequence[int],
    *,
    quorum: bool = False,
    pace_s: Sequence[float] = range(10),
) -> list[list[str]]:
    """Play rounds, in which child k has loss 1 / (1 + k) and takes pace_s[k]; return who was
    selected in each.
    """
    found = []
    for r in rounds:
        chosen = one.select(NAMES, r, samples=SAMPLES)
        arrived = chosen[1:] if quorum and r % 2 else chosen
        facts = {
            name: result(k, loss=1 / (1 + k), seconds=pace_s[k])
            for k, name in enumerate(NAMES)
            if name in arrived
        }
        one.observe(r, chosen, facts)
        found.append(chosen)
    return found


@pytest.mark.parametrize("name", SELECTORS)
@given(share=st.floats(0.05, 1.0), rounds=st.integers(1, 12), quorum=st.booleans())
@examples(40)
def test_it_selects_k_different_children_in_their_order(
    name: str, share: float, rounds: int, quorum: bool
) -> None:
    count = max(1, int(share * len(NAMES) + 1e-9))
    for chosen in play(selection(name, share), range(rounds), quorum=quorum):
        assert len(chosen) == count and chosen == [child for child in NAMES if child in chosen]


@pytest.mark.parametrize("name", SELECTORS)
def test_a_plan_records_what_seed_and_round_do_not_determine(name: str) -> None:
    one = selection(name)
    recorded = {"taking_part": NAMES[:4]} if SELECTORS[name]().remembers else {}
    assert one.facts(NAMES[:4]) == recorded and (
        name in ("fraction", "round_robin", "fedcluster")
    ) == (recorded == {})


def test_a_round_that_is_repeated_counts_once() -> None:
    one = selection("power_of_choice")
    for r in (0, 1, 2, 1, 2):
        one.observe(r, NAMES[:2], {NAMES[0]: result(r)})
    assert [past["rounds"] for past in one.save()["history"].values()] == [3, 3]
    assert [past["missed"] for past in one.save()["history"].values()] == [0, 3]


def test_a_task_follows_the_last_one_whose_result_was_used() -> None:
    one = selection("fraction")
    one.observe(
        0, NAMES[:3], {name: result(k) for k, name in enumerate(NAMES[:3])}, unused=[NAMES[1]]
    )
    one.observe(1, NAMES[:3], {NAMES[0]: result(0)})
    assert one.follows(NAMES[:4], 2) == {NAMES[0]: 2, NAMES[1]: 0, NAMES[2]: 1, NAMES[3]: 0}
    resumed = selection("fraction")
    resumed.restore(json.loads(json.dumps(one.save())))
    assert resumed.follows(NAMES, 2) == one.follows(NAMES, 2)


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("quorum", [False, True])
def test_a_cloud_that_loads_its_checkpoint_goes_on_as_the_other(
    name: str, quorum: bool, tmp_path: Path
) -> None:
    whole = play(selection(name), range(12), quorum=quorum)
    killed, resumed = selection(name), selection(name)
    assert play(killed, range(6), quorum=quorum) == whole[:6]
    row, rule = LAYOUT.empty(), rule_of({"name": "fedavg"}, layout=LAYOUT)
    state = RunState("run", "digest", 6, 1.0, {}, killed.save())
    path = checkpoint.save(tmp_path, state, layout=LAYOUT, row=row, rule=rule)
    resumed.restore(checkpoint.load(path, layout=LAYOUT, row=row, rule=rule).selection)
    assert resumed.save() == killed.save()
    assert play(resumed, range(6, 12), quorum=quorum) == whole[6:]


@pytest.mark.parametrize("name", SELECTORS)
@given(pace_s=st.lists(st.floats(0.0, 1e6), min_size=10, max_size=10), quorum=st.booleans())
@examples(20)
def test_only_oort_depends_on_durations(name: str, pace_s: list[float], quorum: bool) -> None:
    keys = {"penalty": 0.0} if name == "oort" else {}  # its null setting: t / T to the power 0
    measured = play(selection(name, **keys), range(8), quorum=quorum, pace_s=pace_s)
    assert measured == play(selection(name, **keys), range(8), quorum=quorum)


def test_oort_depends_on_durations() -> None:
    slow_first = [100.0] * 3 + [1.0] * 7
    assert play(selection("oort"), range(12), pace_s=slow_first) != play(
        selection("oort"), range(12)
    )


def test_fraction_is_the_choice_of_earlier_releases() -> None:
    for r in range(20):
        places = generator(3, Purpose.SELECTION, "a", r).choice(10, 4, replace=False)
        assert selection("fraction").select(NAMES, r) == [NAMES[place] for place in sorted(places)]


def test_round_robin_selects_each_child_equally_often() -> None:
    found = play(selection("round_robin"), range(5))  # 4 of 10 in each
    assert set(Counter(name for chosen in found for name in chosen).values()) == {2}


def test_fedcluster_visits_each_cluster_once_a_cycle() -> None:
    one = selection("fedcluster", 0.2)
    cycles = [
        [tuple(one.select(NAMES, r)) for r in range(start, start + 5)] for start in range(0, 60, 5)
    ]
    for found in cycles:
        assert sorted(name for cluster in found for name in cluster) == NAMES
        assert set(found) == set(cycles[0])  # the clusters stay
    assert len({tuple(found) for found in cycles}) > 6  # their order is drawn anew in each cycle


def test_fedcluster_draws_within_clusters_that_are_larger_than_k() -> None:
    one = selection("fedcluster", 0.3, clusters=3)  # of 4, 3 and 3
    cycles = [
        [tuple(one.select(NAMES, r)) for r in range(start, start + 3)] for start in range(0, 60, 3)
    ]
    seen = {name for found in cycles for cluster in found for name in cluster}
    assert seen == set(NAMES)
    for found in cycles:
        assert len({name for cluster in found for name in cluster}) == 9
    twos = [frozenset(cluster) for found in cycles for cluster in found]
    assert len(set(twos)) == 2 + 4  # two clusters of 3, and one of 4 without one child


def test_fedcluster_of_one_cluster_is_fraction() -> None:
    one, other = selection("fedcluster", clusters=1), selection("fraction")
    assert [one.select(NAMES, r) for r in range(20)] == [other.select(NAMES, r) for r in range(20)]


def test_power_of_choice_selects_the_highest_losses_after_everybody_was_selected() -> None:
    one = selection("power_of_choice", candidates=10)
    found = play(one, range(4))
    # children without a loss come first
    assert {name for chosen in found[:3] for name in chosen} == set(NAMES)
    assert found[3] == NAMES[:4]


def test_power_of_choice_of_k_candidates_is_a_weighted_draw_whatever_the_losses() -> None:
    one = selection("power_of_choice", candidates=4)
    weights = np.array(list(SAMPLES.values()), np.float64)
    for r, chosen in enumerate(play(one, range(12))):
        chance = generator(3, Purpose.SELECTION, "a", r)
        places = chance.choice(10, 4, replace=False, p=weights / weights.sum())
        assert chosen == [NAMES[place] for place in sorted(places)]


def test_a_child_without_a_result_keeps_its_last_loss() -> None:
    one = selection("power_of_choice", candidates=10)
    one.observe(0, NAMES, {name: result(k, loss=10.0 - k) for k, name in enumerate(NAMES)})
    # the fourth is late
    one.observe(1, NAMES[:4], {name: result(k, loss=0.5) for k, name in enumerate(NAMES[:3])})
    assert one.select(NAMES, 2, samples=SAMPLES) == NAMES[3:7]
    history = one.save()["history"]
    assert [history[name]["missed"] for name in NAMES[2:5]] == [0, 1, 0]


def test_oort_explores_unseen_children_first_then_prefers_high_losses_and_short_times() -> None:
    one = selection("oort", exploration=0.0, exploration_least=0.0, staleness=1e-9, cut_off=1.0)
    facts = {
        name: result(0, loss=1 + k, seconds=100.0 if k == 9 else 1.0)
        for k, name in enumerate(NAMES)
    }
    one.observe(0, NAMES, facts)
    assert one.select(NAMES, 1) == NAMES[5:9]  # the last one has the highest loss, and is too slow
    unseen = selection("oort")
    unseen.observe(0, NAMES[:6], {name: facts[name] for name in NAMES[:6]})
    assert set(NAMES[6:]) == set(unseen.select(NAMES, 1))  # a share of 0.882 of four


def test_oorts_scores_are_those_of_a_plain_twin() -> None:
    settings = Oort(penalty=1.5, staleness=0.2, duration_share=0.5)
    results = [ResultFacts(10 * (k + 1), 1 / (k + 1) ** 2, 1.0 + k, 1) for k in range(5)]
    history = {NAMES[k]: Participation(1, 0, k, k, one) for k, one in enumerate(results)}
    now = Situation(NAMES[:5], 2, {}, history, 1, "a", 7)
    utilities = [one.samples * one.loss for one in results]
    top = float(np.quantile(utilities, 0.95))
    cut = [min(u, top) for u in utilities]
    for k, score in enumerate(scores(settings, now, NAMES[:5])):
        wanted = (cut[k] - min(cut)) / (max(cut) - min(cut)) + (0.2 * np.log(8) / (k + 1)) ** 0.5
        seconds = results[k].seconds
        wanted *= (3.0 / seconds) ** 1.5 if seconds > 3.0 else 1.0  # the median of 1 .. 5 is 3
        assert score == pytest.approx(wanted, rel=1e-12)


OWN: Final = """
from fedstrata.common.methods.selection import Selector

class Latest(Selector):
    def __init__(self, *, start=0):
        self.start = start
    def select(self, now):
        at = self.numbers.get("at", self.start)
        self.numbers["at"] = at + 1
        return [now.children[(at + i) % len(now.children)] for i in range(now.count)]

class Twice(Selector):
    def select(self, now):
        return [now.children[0]] * now.count

class Few(Selector):
    def select(self, now):
        return now.children[:1]

class Failing(Selector):
    def select(self, now):
        return now.absent
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_selectors.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own")
def test_a_selector_of_ones_own_keeps_its_numbers() -> None:
    one, other = (selection("own_selectors:Latest", start=2) for _ in range(2))
    assert play(one, range(2)) == [NAMES[2:6], NAMES[3:7]]
    other.restore(json.loads(json.dumps(one.save())))
    assert play(other, [2]) == [NAMES[4:8]]


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Twice", "Return 4 different ones"),
        ("Few", "Return 4 different"),
        ("Failing", "fails with AttributeError"),
    ],
)
def test_a_selector_of_ones_own_that_is_wrong_ends_the_run(name: str, problem: str) -> None:
    with pytest.raises(InvalidExperiment, match=problem):
        selection(f"own_selectors:{name}").select(NAMES, 0)


# Labs in virtual time

MODEL_BYTES: Final = 10_000

LAB: Final = {
    "rounds": 4,
    "links": {"check": "off"},
    "topology": {"institutions": 3, "devices": 12},
    "cloud": {"participation": 0.67, "selection": {"name": "power_of_choice", "candidates": 2}},
    "institution": {"rounds": 2, "participation": 0.5, "selection": {"name": "power_of_choice"}},
}


SELECTING: Final = KilledLab(LAB, model_bytes=MODEL_BYTES)


@pytest.mark.parametrize(("node", "share"), [("cloud", 0.8), ("institution-1", 0.4)])
def test_a_node_that_is_killed_selects_as_if_it_had_not_been(node: str, share: float) -> None:
    SELECTING.assert_same_if_killed(node, share)


def test_an_institution_that_loses_its_state_does_not_go_on_without() -> None:
    adam = {"aggregation": {"name": "fedadam", "learning_rate": 0.1}}
    lab = KilledLab(LAB | {"institution": LAB["institution"] | adam}, model_bytes=MODEL_BYTES)
    lab.assert_same_if_killed("institution-0", 0.8)
    lost = lab.loses_files("institution-0", share=0.8)
    assert not lost.ok and "the state of this institution's rule after its task" in lost.result


def test_the_selection_matters_and_is_recorded() -> None:
    found: list[Mapping[str, Any]] = []

    def at_end(lab: ScenarioLab) -> None:
        (folder,) = lab.agents.runs.iterdir()
        found.extend(events(folder, "plan", node="cloud"))

    assert SELECTING.run(at_end=at_end).digest == SELECTING.undisturbed.digest
    recorded = [set(event["taking_part"]) for event in found]
    assert len(recorded) == 4 and all(len(names) == 2 for names in recorded)
    assert recorded[0] | recorded[1] == {"institution-0", "institution-1", "institution-2"}
    plain = parse({**LAB, "cloud": {"participation": 0.67}})
    assert (
        ScenarioLab(plain, seed=1, model_bytes=MODEL_BYTES).run().digest
        != SELECTING.undisturbed.digest
    )


# In this process, and in processes

TINY: Final[dict[str, Any]] = {
    "seed": 3,
    "rounds": 5,
    "topology": {"institutions": 3, "devices": 9},
    "model": {"name": "mlp_digits"},
    "training": {"batch_size": 2000, "learning_rate": 0.2},
    "institution": {"rounds": 2, "participation": 0.67, "selection": {"name": "power_of_choice"}},
}


def taking_part(folder: Path) -> dict[int, list[str]]:
    """Return who took part in each global round, the last time that it was played."""
    plans = events(folder, "plan", node="cloud")
    return {plan["global_round"]: plan["taking_part"] for plan in plans}


def test_a_round_that_is_repeated_has_the_same_selection_by_durations(tmp_path: Path) -> None:
    """The run is broken off after its fourth global round, of which there is no checkpoint yet."""
    cloud = {"participation": 0.67, "selection": {"name": "oort", "cut_off": 0.01}}
    killed = run_direct(tmp_path, parse(TINY | {"cloud": cloud}), until=4)
    before = taking_part(killed)
    resumed = resumed_run(killed, until=4)
    repeated = [event["global_round"] for event in events(resumed, "plan", node="cloud")]
    assert repeated == [1, 2, 3, 4, 4] and taking_part(resumed) == before


def histories(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what the cloud knows of each child at the end, without the seconds."""
    last = checkpoint.newest_first(folder / "checkpoints")[0]
    with safe_open(last, framework="numpy") as file:
        history = json.loads(file.metadata()[checkpoint.FACTS])["selection"]["history"]
    return {
        name: past | ResultFacts(*past["result"])._replace(seconds=0.0)._asdict() | {"result": None}
        for name, past in history.items()
    }


def bytes_of(folder: Path) -> set[int]:
    return {past["bytes"] for past in histories(folder).values()}


@pytest.mark.slow
def test_processes_select_as_one_process_does_and_know_the_same(tmp_path: Path) -> None:
    """The codecs' blobs have other sizes than the models, and not all the same."""
    choice = 'selection={name="power_of_choice"}'
    pairs = (
        *("rounds=3", "topology.institutions=3", "topology.devices=6", "training.batch_size=200"),
        *(
            "cloud.participation=0.67",
            f"cloud.{choice}",
            "institution.participation=0.5",
            f"institution.{choice}",
        ),
        *(
            "transfer.wan.up=delta+fp32+zstd",
            "transfer.wan.down=fp32+zstd",
            "transfer.lan.up=delta+int8",
        ),
    )
    network = run_lab(DEMO, tmp_path / "network", *pairs)
    direct = run_direct(tmp_path / "direct", load(DEMO, pairs))
    assert tensors(direct) == tensors(network)
    assert taking_part(direct) == taking_part(network)
    known = histories(direct)
    assert known == histories(network) and len(known) == 3
    assert len(bytes_of(direct)) > 1


@pytest.mark.parametrize(
    ("up", "down", "share"),
    slow(
        [("fp32", "fp32", 2.0), ("fp32", "fp16", 1.5), ("fp16", "fp16", 1.0)],
        but=[("fp32", "fp16", 1.5)],
    ),
)
def test_the_bytes_of_a_result_are_those_of_both_models_as_they_travel(
    up: str, down: str, share: float, tmp_path: Path
) -> None:
    wan = {"transfer": {"wan": {"up": up, "down": down}}}
    cloud = {"participation": 0.67, "selection": {"name": "power_of_choice"}}
    direct = run_direct(tmp_path, parse(TINY | wan | {"rounds": 1, "cloud": cloud}))
    size = sum(entry.nbytes for entry in load_file(direct / "model.safetensors").values())
    assert bytes_of(direct) == {share * size}
    found: set[int] = set()

    def at_end(lab: ScenarioLab) -> None:
        (folder,) = lab.agents.runs.iterdir()
        found.update(bytes_of(folder))

    KilledLab(LAB | wan, model_bytes=MODEL_BYTES).run(at_end=at_end)
    assert found == {share * MODEL_BYTES}
