"""A run's last global round is the one that happened: whatever ends it, the model of that round has
a score.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.errors import RunFailed
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning.evaluation import ModelTester
from fedstrata.deploy.local.direct import run_in_process
from fedstrata.deploy.planning.simulated_run import machine_speeds, simulated_run
from fedstrata.deploy.simulation import simulated_computing
from tests.helpers.commands import table
from tests.helpers.evaluation import HereEvaluator
from tests.helpers.examples import examples

pytestmark = pytest.mark.usefixtures("short_calibration", "warm")

PRIVACY: dict[str, Any] = {
    "unit": "device", "noise_multiplier": 2.0, "clip_norm": 1.0, "delta": 1e-5, "noise": "seeded",
}  # fmt: skip


@dataclass(frozen=True)
class Interruption:
    """Where a run ends by chance: at the nth event of this name, by a signal or an error."""

    event: str
    nth: int
    error: type[BaseException]


INTERRUPTIONS = st.builds(
    Interruption,
    st.sampled_from(["global_round", "evaluated"]),
    st.integers(1, 6),
    st.sampled_from([KeyboardInterrupt, RunFailed]),
)


def experiment(
    *,
    rounds: int,
    every: int,
    at: str,
    stop: dict[str, Any],
    checkpoint_every: int = 1,
    affords: int | None = None,
) -> Experiment:
    """Return a lab; `affords`: the global rounds that its privacy budget permits."""
    tree: dict[str, Any] = {
        "rounds": rounds,
        "topology": {"institutions": 0, "devices": 2},
        "model": {"name": "mlp_digits"},
        "training": {"learning_rate": 0.5, "batch_size": 400},
        "stop": stop,
        "cloud": {"checkpoint_every": checkpoint_every},
        "evaluation": {"at": at, "every": every} | ({} if at == "cloud" else {"data": "test"}),
    }
    if affords is not None:
        tree["cloud"]["aggregation"] = {"name": "fedavg", "weights": "uniform"}
        tree["cloud"]["privacy"] = PRIVACY
        budget = parse(tree).tiers[0].privacy.epsilon(affords)
        tree["cloud"]["privacy"] = PRIVACY | {"max_epsilon": budget + 1e-6}
    return parse(tree)


def run(path: Path, lab: Experiment, interruption: Interruption | None = None) -> dict[str, Any]:
    """Run a lab, and again to its end if it is interrupted; return the facts of its end."""
    folder = RunFolder.create(path, lab, direct=True)
    seen: list[str] = []
    ends: list[dict[str, Any]] = []

    def observe(event: str, facts: dict[str, object]) -> None:
        seen.append(event)
        if event == "finished":
            ends.append(facts)
        if interruption and event == interruption.event and seen.count(event) == interruption.nth:
            raise interruption.error("by chance")

    try:
        run_in_process(folder, resume=False, accelerator="cpu", observe=observe)
    except (KeyboardInterrupt, RunFailed):
        folder.release()
        folder = RunFolder.reopen(folder.path, direct=True)
        interruption = None
        run_in_process(folder, resume=True, accelerator="cpu", observe=observe)
    folder.release()
    (end,) = ends
    return end | {"folder": folder.path}


def check(lab: Experiment, end: dict[str, Any]) -> list[dict[str, str]]:
    """Check a finished run's end, table and model against each other; return its rows without
    seconds and bytes.
    """
    folder = end["folder"]
    rows = table(folder / "rounds.csv")
    assert end["global_round"] == len(rows) == int(rows[-1]["global_round"])
    for row in rows:
        due = int(row["global_round"]) % lab.evaluation.every == 0 or row is rows[-1]
        assert bool(row["accuracy"]) == bool(row["loss"]) == due
    tester = ModelTester(lab)
    model = tester.layout.empty()
    for name, view in tester.layout.views(model).items():
        view[...] = load_file(folder / "model.safetensors")[name]
    found = tester.evaluate(model)
    assert end["score"] == end["accuracy"] == pytest.approx(found.score)
    assert float(rows[-1]["accuracy"]) == pytest.approx(found.score, abs=1e-6)
    assert end["loss"] == pytest.approx(found.loss, rel=1e-5)
    return [
        {key: cell for key, cell in each.items() if not key.endswith(("_s", "_bytes"))}
        for each in rows
    ]


def arrays(path: Path) -> dict[str, bytes]:
    return (
        {name: np.asarray(array).tobytes() for name, array in load_file(path).items()}
        if path.exists()
        else {}
    )


@settings(examples(30), phases=[Phase.generate])  # no smaller example: each takes seconds
@given(
    rounds=st.integers(1, 6),
    every=st.integers(1, 4),
    at=st.sampled_from(["cloud", "devices", "both"]),
    stop=st.fixed_dictionaries(
        {"best": st.booleans()},
        optional={
            "patience": st.integers(1, 2),
            "target": st.sampled_from([0.05, 0.6]),
            "min_delta": st.just(0.9),
        },
    ).filter(lambda stop: "min_delta" not in stop or "patience" in stop or stop["best"]),
    affords=st.none() | st.integers(1, 5),
    checkpoint_every=st.integers(1, 4),
    interruption=st.none() | INTERRUPTIONS,
)
def test_the_last_round_is_scored_whatever_ends_the_run(
    rounds: int,
    every: int,
    at: str,
    stop: dict[str, Any],
    affords: int | None,
    checkpoint_every: int,
    interruption: Interruption | None,
) -> None:
    lab = experiment(
        rounds=rounds,
        every=every,
        at=at,
        stop=stop,
        checkpoint_every=checkpoint_every,
        affords=affords,
    )
    with TemporaryDirectory() as root:
        whole = run(Path(root, "whole"), lab)
        rows = check(lab, whole)
        assert len(rows) <= min(rounds, rounds if affords is None else affords)
        if interruption is None:
            return
        again = run(Path(root, "again"), lab, interruption)
        assert check(lab, again) == rows
        for fact in ("global_round", "score", "loss", "stopped", "best_round"):
            expected = whole.get(fact)
            if isinstance(expected, float):  # rows have six digits
                expected = pytest.approx(expected, rel=1e-5)
            assert again.get(fact) == expected, fact
        for name in ("model.safetensors", "best.safetensors"):
            assert arrays(again["folder"] / name) == arrays(whole["folder"] / name)


def test_a_run_without_patience_shows_its_last_model(tmp_path: Path) -> None:
    """The first improvement is the last one, so the second evaluation ends the run, one round
    later.
    """
    stop = {"patience": 1, "min_delta": 0.9}
    lab = experiment(rounds=9, every=2, at="cloud", stop=stop)
    end = run(tmp_path, lab)
    rows = check(lab, end)
    assert end["stopped"] == "patience" and [bool(row["accuracy"]) for row in rows] == [
        False,
        True,
        False,
        True,
        True,
    ]
    scored = json.loads((end["folder"] / "events.jsonl").read_text().splitlines()[-1])
    assert scored["event"] == "finished" and scored["accuracy"] == pytest.approx(end["accuracy"])


@pytest.mark.parametrize("at", ["cloud", "devices"])
def test_agents_score_their_last_round_in_virtual_time(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--simulate`, whose agents are those of a lab."""
    monkeypatch.setattr(simulated_computing, "Evaluator", HereEvaluator)
    lab = experiment(rounds=9, every=2, at=at, stop={"patience": 1, "min_delta": 0.9})
    facts = machine_speeds(lab, of=None)
    folder = RunFolder.create(tmp_path, lab, simulated=facts)
    simulated_run(folder, facts, workers=1).run()
    events = map(
        json.loads, (folder.path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    )
    (end,) = (event for event in events if event["event"] == "finished")
    assert end["stopped"] == "patience"
    assert len(check(lab, end | {"folder": folder.path})) == 5
