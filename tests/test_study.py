"""The study's bookkeeping: which runs there are, what is kept of them, and what its tables say."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.experiment.objectives import CrossEntropy
from deploy.experiments import study
from deploy.experiments.configurations import PARTS, Seen, StudyPart
from deploy.experiments.study import StudyCache, StudyRun

PART = StudyPart("Two rules", {}, {"FedAvg": {}, "other": {}}, 0.5, 1, (Seen("other", 1, (2.0, 4.0), below=True),))


def made(*accuracies: float) -> StudyRun:
    count = len(accuracies)
    return StudyRun(
        list(accuracies), [2.0 * (i + 1) for i in range(count)], [10 * (i + 1) for i in range(count)],
        [5 * (i + 1) for i in range(count)], [1_000_000 * (i + 1) for i in range(count)], 60.0,
    )  # fmt: skip


def test_every_configuration_is_an_experiment_of_its_own() -> None:
    for name, part in PARTS.items():
        digests = {study.experiment(part, row, 1, quick=quick).digest for row in part.rows for quick in (False, True)}
        assert len(digests) == 2 * len(part.rows), name
        assert {seen.rule for seen in part.seen} <= part.rows.keys()


def test_all_rows_of_a_part_do_equal_local_work() -> None:
    work = set()
    for name, part in PARTS.items():
        if name.startswith("tempo"):
            continue
        for row in part.rows:
            one = study.experiment(part, row, 1, quick=False)
            drawn = float(len(one.tree.devices))
            for tier in one.every_tier:
                drawn *= tier.participation
            training = one.training.model_copy(
                update={"objective": CrossEntropy()}
            )  # FedSAM's steps have two gradients
            work.add((one.rounds * one.device_rounds * round(drawn), training))
    assert len(work) == 1


def test_a_table_has_paired_differences_and_costs_to_the_target() -> None:
    found = {"FedAvg": [made(0.2, 0.4), made(0.4, 0.6)], "other": [made(0.1, 0.5), made(0.4, 0.7)]}
    *_, first, second = study.table(PART, found)
    assert first == "| FedAvg | 30.0 ± 14.1 | 0.0 ± 0.0 | 40.0 ± 14.1 | 0.0 ± 0.0 | 1/2 | 2 | 20 | 10 | 2.0 | 4.0 |"
    assert second == "| other | 25.0 ± 21.2 | -5.0 ± 7.1 | 42.5 ± 17.7 | 2.5 ± 3.5 | 2/2 | 2 | 20 | 10 | 2.0 | 4.0 |"


@pytest.mark.parametrize(("percent", "verdict"), [((2.0, 4.0), "within"), ((30.0, 31.0), "not within")])
def test_what_was_seen_elsewhere_is_compared(percent: tuple[float, float], verdict: str) -> None:
    found = {"FedAvg": [made(0.2), made(0.4)], "other": [made(0.1), made(0.4)]}
    line = study.compared(Seen("other", 1, percent, below=True), PART, found)
    assert "5.0 ± 7.1 points below FedAvg" in line and line.endswith(f": {verdict} two deviations")
    alone = {name: runs[:1] for name, runs in found.items()}
    assert study.compared(Seen("other", 1, percent, below=True), PART, alone).endswith(": no verdict of one seed")


def test_finished_runs_are_kept_and_parts_reported_when_all_are_there(tmp_path: Path) -> None:
    cache, (name, part) = StudyCache(tmp_path / "done"), next(iter(PARTS.items()))
    *most, last = [study.experiment(part, row, 1, quick=True) for row in part.rows]
    for one in most:
        cache.put(one, made(0.5))
    study.report(tmp_path, cache, 1, quick=True)
    assert (tmp_path / "study.md").read_text() == ""
    cache.put(last, made(0.5))
    assert cache.get(last) == made(0.5)
    study.report(tmp_path, cache, 1, quick=True)
    assert name in (tmp_path / "study.md").read_text()
    assert len((tmp_path / "study.csv").read_text().splitlines()) == 1 + len(part.rows)


def test_a_run_is_read_from_the_folder_that_it_leaves() -> None:
    part = PARTS["two-clean-dirichlet-0.1"]
    run = study.run_experiment(study.experiment(part, "FedCross 0.9", 1, quick=True).to_json())
    assert len(run.accuracies) == 15 and run.steps == sorted(run.steps)
    assert run.nbytes[-1] == 15 * 6 * 2 * 4 * 2410  # models of 2,410 float32, each down and up
