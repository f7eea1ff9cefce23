"""Client selection in whole labs: in virtual time, in one process and in many, killed and resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from cloud import checkpoint
from common.experiment.reading import load, parse
from common.methods.selection import ResultFacts
from deploy.simulation.lab import SimulatedLab
from tests.helpers.commands import DEMO, run_lab, tensors
from tests.helpers.direct import resumed_run, run_direct
from tests.helpers.examples import slow
from tests.helpers.scenarios import KilledLab

MODEL_BYTES: Final = 10_000

LAB: Final = {
    "rounds": 4,
    "links": {"check": "off"},
    "topology": {"institutions": 3, "devices": 12},
    "cloud": {"participation": 0.67, "selection": {"name": "power_of_choice", "candidates": 2}},
    "institution": {"rounds": 2, "participation": 0.5, "selection": {"name": "power_of_choice"}},
}


SELECTING: Final = KilledLab(LAB, model_bytes=MODEL_BYTES)
NODES: Final = ("cloud", "institution-0", "institution-1", "device-3")
KILLS: Final = (("cloud", 0.4), ("cloud", 0.8), ("institution-1", 0.4), ("device-3", 0.8))


@pytest.mark.parametrize(("node", "share"), slow(product(NODES, (0.4, 0.8)), but=KILLS))
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

    def at_end(lab: SimulatedLab) -> None:
        (folder,) = lab.agents.runs.iterdir()
        lines = (folder / "events.jsonl").read_text().splitlines()
        found.extend(event for event in map(json.loads, lines) if event["event"] == "plan")

    assert SELECTING.run(at_end=at_end).digest == SELECTING.undisturbed.digest
    recorded = [set(event["taking_part"]) for event in found if event["node"] == "cloud"]
    assert len(recorded) == 4 and all(len(names) == 2 for names in recorded)
    assert recorded[0] | recorded[1] == {"institution-0", "institution-1", "institution-2"}
    plain = parse({**LAB, "cloud": {"participation": 0.67}})
    assert SimulatedLab(plain, seed=1, model_bytes=MODEL_BYTES).run().digest != SELECTING.undisturbed.digest


# In this process, and in processes

TINY: Final[dict[str, Any]] = {
    "seed": 3,
    "rounds": 5,
    "topology": {"institutions": 3, "devices": 9},
    "model": {"name": "mlp_digits"},
    "training": {"batch_size": 2000, "learning_rate": 0.2},
    "institution": {"rounds": 2, "participation": 0.67, "selection": {"name": "power_of_choice"}},
}


def plans(folder: Path) -> list[dict[str, Any]]:
    """Return the cloud's plans, also those of global rounds that were repeated."""
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == "plan" and event["node"] == "cloud"]


def taking_part(folder: Path) -> dict[int, list[str]]:
    """Return who took part in each global round, the last time that it was played."""
    return {plan["global_round"]: plan["taking_part"] for plan in plans(folder)}


@pytest.mark.parametrize("every", slow([1, 2], but=[2]))
def test_a_resumed_run_selects_as_an_undisturbed_one(every: int, tmp_path: Path) -> None:
    cloud = {"participation": 0.67, "checkpoint_every": every, "selection": {"name": "power_of_choice"}}
    experiment = parse(TINY | {"cloud": cloud})
    undisturbed = run_direct(tmp_path, experiment)
    killed = run_direct(tmp_path, experiment, until=3)
    resumed = resumed_run(killed)
    assert tensors(resumed) == tensors(undisturbed)
    assert taking_part(resumed) == taking_part(undisturbed) and len(taking_part(resumed)) == 5


def test_a_round_that_is_repeated_has_the_same_selection_by_durations(tmp_path: Path) -> None:
    """The run is broken off after its fourth global round, of which there is no checkpoint yet."""
    cloud = {"participation": 0.67, "selection": {"name": "oort", "cut_off": 0.01}}
    killed = run_direct(tmp_path, parse(TINY | {"cloud": cloud}), until=4)
    before = taking_part(killed)
    resumed = resumed_run(killed, until=4)
    repeated = [event["global_round"] for event in plans(resumed)]
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
        *("cloud.participation=0.67", f"cloud.{choice}", "institution.participation=0.5", f"institution.{choice}"),
        *("transfer.wan.up=delta+fp32+zstd", "transfer.wan.down=fp32+zstd", "transfer.lan.up=delta+int8"),
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
    slow([("fp32", "fp32", 2.0), ("fp32", "fp16", 1.5), ("fp16", "fp16", 1.0)], but=[("fp32", "fp16", 1.5)]),
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

    def at_end(lab: SimulatedLab) -> None:
        (folder,) = lab.agents.runs.iterdir()
        found.update(bytes_of(folder))

    KilledLab(LAB | wan, model_bytes=MODEL_BYTES).run(at_end=at_end)
    assert found == {share * MODEL_BYTES}
