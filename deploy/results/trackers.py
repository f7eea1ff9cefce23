"""Experiment trackers to which a run's folder is exported: TensorBoard, Weights & Biases.

Each is an extra. A tracker reads nothing of a run but its folder, so one that is slow or away
delays no run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any, Final, Protocol

from fedstrata.cloud.records import GlobalRoundRecord
from fedstrata.common.errors import ConnectionFailed, InvalidExperiment
from fedstrata.common.host.files import writing
from fedstrata.deploy.results.run import Run, State


def series(row: GlobalRoundRecord, *, time: str = "seconds") -> dict[str, float]:
    """Return the numbers of a global round by series, `group/name`: base units, bytes by tier and
    direction.

    `time`: the group of the seconds, `time_of` a run.
    """
    found: dict[str, float | None] = {
        "model/accuracy": row.accuracy,
        "model/loss": row.loss,
        "model/mixed_accuracy": row.mixed_accuracy,
        "model/mixed_loss": row.mixed_loss,
        **{f"model/{name}": score for name, score in row.other_scores.items()},
        "model/train_loss": row.train_loss,
        f"{time}/elapsed": row.elapsed_s,
        f"{time}/global_round": row.seconds,
        **{f"{time}/{phase}": seconds for phase, seconds in row.phases.items()},
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
    """Return the global rounds whose numbers are all there: models are evaluated beside the next
    global round.
    """
    if run.state is not State.RUNNING:
        return run.rounds
    evaluated = [place for place, row in enumerate(run.rounds) if row.score is not None]
    if evaluated:
        return run.rounds[: evaluated[-1] + 1]
    return []


PROJECT: Final = "fedstrata"  # of W&B
REASON_MOST: Final = 200  # characters of a library's error


class Tracker(Protocol):
    """One run in a tracker, with its experiment. The calls raise InvalidExperiment,
    ConnectionFailed and StorageFailed.
    """

    place: str  # where it can be seen

    def write(self, global_round: int, elapsed_s: float, values: Mapping[str, float]) -> None:
        """Write the numbers of a global round."""

    def end(self, state: State) -> None:
        """Close the run."""


class TensorBoardTracker:
    """Event files in `FOLDER/RUN`. Those of an earlier export are replaced."""

    def __init__(self, run: Run, where: str) -> None:
        from tensorboardX import SummaryWriter

        self._folder = folder = Path(where) / run.path.resolve().name
        self._began = began_s(run)
        self.place = f"{folder}; tensorboard --logdir {where}"
        with writing(folder):
            for path in folder.iterdir() if folder.exists() else ():
                if "tfevents" not in path.name:
                    problem = f"has {path.name}, which is no event file"
                    remedy = "Name another folder."
                    raise InvalidExperiment("--tensorboard", str(folder), problem, remedy)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            self._writer = SummaryWriter(logdir=str(folder))
        text = f"```toml\n{run.text}\n```"
        self._writer.add_text("experiment", text, 0, walltime=self._began)

    def write(self, global_round: int, elapsed_s: float, values: Mapping[str, float]) -> None:
        """Write scalars at the time at which the global round ended."""
        with writing(self._folder):
            for name, value in values.items():
                self._writer.add_scalar(name, value, global_round, walltime=self._began + elapsed_s)
            self._writer.flush()

    def end(self, state: State) -> None:
        """Close the file."""
        with writing(self._folder):
            self._writer.close()


class WandbTracker:
    """A run of the W&B project `fedstrata`; offline, below a folder, unless WANDB_MODE is set."""

    def __init__(self, run: Run, where: str) -> None:
        import wandb

        folder = Path(where)
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self.place = PROJECT
        if mode == "offline":
            self.place = f"{where}; wandb sync {where}/wandb/offline-run-*"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with self._reached():
            self._made = wandb.init(
                project=PROJECT,
                dir=str(folder),
                id=run.id,  # by which W&B joins the exports of one run
                name=run.path.resolve().name,
                config=dict(run.tree),
                resume="allow",
                mode=mode,
                save_code=False,
                settings=wandb.Settings(
                    silent=True, console="off", disable_git=True, x_disable_stats=True
                ),
            )

    def write(self, global_round: int, elapsed_s: float, values: Mapping[str, float]) -> None:
        """Write one step."""
        with self._reached():
            self._made.log(dict(values), step=global_round)

    def end(self, state: State) -> None:
        """End the run, as failed if it did."""
        with self._reached():
            self._made.finish(exit_code=int(state in (State.FAILED, State.INTERRUPTED)))

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Turn whatever W&B raises into one line."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            reason = shorten(str(error) or type(error).__name__, REASON_MOST, placeholder=" ...")
            remedy = "Start it, or name another place; export again."
            raise ConnectionFailed(f"--wandb: {self.place}: {reason}. {remedy}") from None


TRACKERS: Final[Mapping[str, Callable[[Run, str], Tracker]]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}


def time_of(run: Run) -> str:
    """Return the group of a run's seconds."""
    if run.simulated:
        return "simulated_seconds"
    return "seconds"


def began_s(run: Run) -> float:
    """Return when a run was started, seconds since the epoch; 0 if that is unknown."""
    if run.began is None:
        return 0.0
    return run.began.timestamp()
