"""Comparisons count the global rounds in which a method acted, and name those that had no part in
their costs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstrata.common.experiment.reading import parse
from fedstrata.deploy.results.acting import late_parts
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.sweeps.grid import expand, merged
from fedstrata.deploy.sweeps.measures import SweepResults
from fedstrata.deploy.sweeps.output import idle
from tests.helpers.commands import invoke
from tests.helpers.direct import run_direct

MakeRun = Callable[..., Path]
TEMPO = {"cloud": {"epoch_control": {"name": "tempo"}}}
LAB: dict[str, Any] = {
    "rounds": 4,
    "topology": {"institutions": 0, "devices": 4},
    "data": {"partition": "dirichlet", "concentration": 0.5},
    "model": {"name": "mlp_digits"},
    "training": {"learning_rate": 0.1, "batch_size": 64},
}
THREE = {"topology": {"institutions": 2, "devices": 4}, "institution": {"rounds": 2}}


def rule(name: str, tier: str = "cloud", **keys: Any) -> dict[str, Any]:
    return {tier: {"aggregation": {"name": name, **keys}}}


def objective(name: str) -> dict[str, Any]:
    return {"training": {"objective": {"name": name}}}


UNIFORM = rule("fedavg", weights="uniform")
# a method, the mean that it begins as, and when it acts
LATE: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    (merged(THREE, TEMPO), THREE, 2),
    (rule("fedcda", warmup_rounds=2, smoothness=0.01), {}, 3),
    (rule("fedcda", warmup_rounds=0, choice="random"), UNIFORM, 2),
    (rule("fedmr"), UNIFORM, 2),
    (rule("fedmr", first_stage_rounds=1), UNIFORM, 3),
    (rule("fedcross", alpha=0.6), UNIFORM, 2),
    (rule("fedcross", alpha=0.6, first_stage_rounds=2), UNIFORM, 4),
    (merged(rule("scaffold"), objective("scaffold")), UNIFORM, 2),
    (merged(rule("fedgen", learning_rate=0.01), objective("fedgen")), {}, 2),
    (
        merged(THREE, rule("fedmr", "institution", first_stage_rounds=3)),
        merged(THREE, rule("fedavg", "institution", weights="uniform")),
        3,
    ),
]


@pytest.mark.parametrize(
    ("method", "plain", "begins"), LATE, ids=[f"{method}"[:60] for method, *_ in LATE]
)
def test_a_method_acts_from_the_round_that_it_names(
    method: dict[str, Any], plain: dict[str, Any], begins: int, tmp_path: Path
) -> None:
    one, other = (parse(merged(LAB, each)) for each in (method, plain))
    (part,) = late_parts(one, [one, other])
    assert part.begins == begins
    mine, theirs = (Run(run_direct(tmp_path, each)).rounds for each in (one, other))
    same = [
        row.loss == pytest.approx(their.loss, rel=1e-4)
        for row, their in zip(mine, theirs, strict=True)
    ]
    assert same == [True] * (begins - 1) + [False] * (len(same) - begins + 1)


def test_a_rule_that_is_no_mean_acts_at_once(tmp_path: Path) -> None:
    plain = parse(LAB)
    for name in ("fedavg", "fedadp", "median", "fedavgm"):
        assert late_parts(parse(merged(LAB, rule(name))), [plain]) == []
    tempo = parse(merged(LAB, THREE, TEMPO))
    assert late_parts(tempo, [tempo]) == [], "all have it"


def test_a_target_before_the_first_decision_shows_nothing_of_it(
    tmp_path: Path, make_run: MakeRun
) -> None:
    accuracies = {1: (0.9,), 2: (0.5, 0.8, 0.9), 3: (0.5,)}
    paths = [
        make_run(tmp_path, {"seed": seed, **tree}, accuracies=each)
        for tree in ({}, TEMPO)
        for seed, each in accuracies.items()
    ]
    done = invoke("compare", *paths, "--target", "0.9", "--format", "json")
    fixed, tempo = json.loads(done.stdout)["groups"]
    assert (fixed["acts_from"], fixed["rounds_acted"]) == ({}, None)
    assert (tempo["acts_from"], tempo["rounds_acted"]["mean"]) == ({"cloud.epoch_control": 2}, 1.0)
    line = (
        "cloud.epoch_control = tempo acts from global round 2 on; it did not act in 1 of 2 "
        "runs before the target"
    )
    assert f"tempo: {line}\n" in done.stderr and done.stderr.count("did not act") == 1
    head, *rows = invoke("compare", *paths, "--target", "0.9").stdout.splitlines()
    assert "rounds it acted in" in head and len(rows) == 2
    late = invoke("compare", paths[1], paths[4], "--target", "0.9")
    assert "did not act" not in late.stderr


def test_a_sweep_names_the_cells_whose_method_did_not_act(
    tmp_path: Path, make_run: MakeRun
) -> None:
    tree = {
        "title": "T",
        "seeds": 2,
        "target": 0.9,
        "measure": {"name": "seconds"},
        "experiment": {"rounds": 3},
        "axes": {"method": {"FedAvg": {}, "Tempo": TEMPO}},
    }
    grid = expand(tree, Path("two.toml"))
    runs = {}
    for cell in grid.cells:
        for seed, one in cell.experiments.items():
            whole = one.model_dump(mode="json", exclude_none=True)
            runs[one.digest] = Run(make_run(tmp_path, whole, accuracies=[0.1] * (seed - 1) + [0.9]))
    (line,) = idle(SweepResults(grid, runs))
    assert (
        line.startswith("Tempo: cloud.epoch_control = tempo acts from") and "in 1 of 2 runs" in line
    )
    whole_runs = expand({**tree, "measure": {"name": "seconds", "until": "end"}}, Path("two.toml"))
    assert list(idle(SweepResults(whole_runs, runs))) == []


def test_kept_seconds_name_their_commit(tmp_path: Path, make_run: MakeRun) -> None:
    paths = [make_run(tmp_path, {"seed": seed}) for seed in (1, 2, 3)]
    assert "commit" not in invoke("compare", *paths, "--target", "0.9").stderr
    for path, commit in zip(paths, ("aaa", "aaa", None), strict=True):
        facts = json.loads((path / "manifest.json").read_text()) | {"cell": "A", "commit": commit}
        (path / "manifest.json").write_text(json.dumps(facts))
    lines = invoke("compare", *paths, "--target", "0.9").stderr.splitlines()
    assert "the seconds of kept runs are those of commit aaa (2 runs), unknown (1 run)" in lines
    assert any("other versions than" in line and "commit: aaa and none" in line for line in lines)
