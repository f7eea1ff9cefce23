"""A run's global rounds as named series: what trackers draw."""

from __future__ import annotations

from collections.abc import Sequence

from cloud.records import GlobalRoundRecord
from deploy.runs.run import Run, State


def series(row: GlobalRoundRecord) -> dict[str, float]:
    """Return the numbers of a global round by series, `group/name`: base units, bytes by tier and direction."""
    found: dict[str, float | None] = {
        "model/accuracy": row.accuracy,
        "model/loss": row.loss,
        "model/mixed_accuracy": row.mixed_accuracy,
        "model/mixed_loss": row.mixed_loss,
        **{f"model/{name}": score for name, score in row.other_scores.items()},
        "model/train_loss": row.train_loss,
        "seconds/elapsed": row.elapsed_s,
        "seconds/global_round": row.seconds,
        **{f"seconds/{phase}": seconds for phase, seconds in row.phases.items()},
        **{f"bytes/{name.removesuffix('_bytes')}": count for name, count in row.bytes_.items()},
        "work/sgd_steps": row.sgd_steps,
        "work/path_steps": row.path_steps,
        "work/missing": len(row.missing),
        "work/refused": len(row.refused),
    }
    for name, values in (("epochs", row.epochs), ("omega", row.omega), ("spread", row.spread)):
        found |= {f"{name}/{node}": value for node, value in values.items()}
    return {name: value for name, value in found.items() if value is not None}


def complete(run: Run) -> Sequence[GlobalRoundRecord]:
    """Return the global rounds whose numbers are all there: models are evaluated beside the next global round."""
    if run.state is not State.RUNNING:
        return run.rounds
    evaluated = [place for place, row in enumerate(run.rounds) if row.score is not None]
    return run.rounds[: evaluated[-1] + 1] if evaluated else []
