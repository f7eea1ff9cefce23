"""The study's sweeps: which experiments they have."""

from __future__ import annotations

import pytest

from common.experiment.training import CrossEntropy
from deploy.console.shipped import shipped_sweeps
from deploy.sweeps.grid import load

STUDY = [name for name in shipped_sweeps() if name.startswith("study/")]
EQUAL_WORK = [
    name
    for name in STUDY
    if name not in ("study/tempo", "study/table1", "study/codecs", "study/motions", "study/images", "study/wan")
]


@pytest.mark.parametrize("name", STUDY)
def test_every_cell_is_an_experiment_of_its_own(name: str) -> None:
    large, small = (load(shipped_sweeps()[name], small=small, seeds=1) for small in (False, True))
    assert len({*large.experiments, *small.experiments}) == 2 * len(large.cells)


def test_the_study_has_the_parts_that_its_page_has() -> None:
    cells = {name: len(load(shipped_sweeps()[name], seeds=1).cells) for name in STUDY}
    assert cells == {
        "study/two": 40,
        "study/methods": 72,
        "study/three": 192,
        "study/tempo": 36,
        "study/table1": 4,
        "study/codecs": 76,
        "study/images": 8,
        "study/motions": 5,
        "study/wan": 21,
    }
    seen = load(shipped_sweeps()["study/two"]).figures
    assert {label for _, label in seen} == {"Δ 25", "round 300"} and len(seen) == 7


def test_all_rows_do_equal_local_work() -> None:
    work = set()
    for name in EQUAL_WORK:
        for one in load(shipped_sweeps()[name], seeds=1).experiments.values():
            drawn = float(len(one.tree.devices))
            for tier in one.tiers:
                drawn *= tier.participation
            training = one.training.model_copy(
                update={"objective": CrossEntropy()}
            )  # FedSAM's steps have two gradients
            work.add((one.rounds * one.device_rounds * round(drawn), training.model_dump_json()))
    assert len(work) == 1
