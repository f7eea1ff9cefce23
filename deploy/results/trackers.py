"""Experiment trackers to which a run's folder is exported: TensorBoard, MLflow, Weights & Biases.

Each is an extra. A tracker reads nothing of a run but its folder, so one that is slow or away
delays no run.
"""

from __future__ import annotations

import logging
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
from fedstrata.common.settings.tables import flat
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


GROUP: Final = "fedstrata"  # MLflow's experiment and W&B's project
PARAMS_AT_ONCE: Final = 100  # of MLflow
VALUE_MOST: Final = 500  # characters of an MLflow parameter
REASON_MOST: Final = 200  # characters of a library's error


class Tracker(Protocol):
    """One run in a tracker. The calls raise InvalidExperiment, ConnectionFailed and
    StorageFailed.
    """

    place: str  # where it can be seen

    def begin(self) -> int:
        """Write the run's experiment; return the last global round that the tracker has already,
        counted from 1.
        """

    def write(self, global_round: int, elapsed_s: float, values: Mapping[str, float]) -> None:
        """Write the numbers of a global round."""

    def end(self, state: State) -> None:
        """Close the run; one that is still running stays open where the tracker knows such a
        state.
        """


class TensorBoardTracker:
    """Event files in `FOLDER/RUN`. Those of an earlier export are replaced."""

    def __init__(self, run: Run, where: str) -> None:
        from tensorboardX import SummaryWriter

        self._run = run
        self._folder = Path(where) / run.path.resolve().name
        self._made = SummaryWriter
        self._began = began_s(run)
        self.place = f"{self._folder}; tensorboard --logdir {where}"

    def begin(self) -> int:
        """Replace the folder."""
        with writing(self._folder):
            if self._folder.exists():
                strangers = [
                    path.name for path in self._folder.iterdir() if "tfevents" not in path.name
                ]
                if strangers:
                    problem = f"has {strangers[0]}, which is no event file"
                    raise InvalidExperiment(
                        "--tensorboard", str(self._folder), problem, "Name another folder."
                    )
                shutil.rmtree(self._folder)
            self._folder.mkdir(parents=True)
            self._writer = self._made(logdir=str(self._folder))
        self._writer.add_text(
            "experiment", f"```toml\n{self._run.text}\n```", 0, walltime=self._began
        )
        return 0

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


class MLflowTracker:
    """A run of the MLflow experiment `fedstrata`, at a tracking server or in a folder; exported
    again, it continues.
    """

    def __init__(self, run: Run, where: str) -> None:
        if "://" not in where:
            # else MLflow 3 refuses its own folders
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            where = Path(where).resolve().as_uri()
        # its default waits for minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        logging.getLogger("urllib3").setLevel(logging.ERROR)
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._run = run
        with _reached("--mlflow", where):
            self._client = MlflowClient(tracking_uri=where)
        self._metric = Metric
        self._param = Param
        self._began = began_s(run)
        self._id = ""
        self._at_ms = int(1000 * self._began)  # of what was written last
        self.place = f"{where}, experiment {GROUP}"

    def begin(self) -> int:
        """Create the run, or find it by its tag."""
        with _reached("--mlflow", self.place):
            client = self._client
            found = client.get_experiment_by_name(GROUP)
            group = client.create_experiment(GROUP) if found is None else found.experiment_id
            known = client.search_runs(
                [group], f"tags.fedstrata_run = '{self._run.id}'", max_results=1
            )
            if known:
                self._id = known[0].info.run_id
                elapsed = f"{time_of(self._run)}/elapsed"  # which each global round has
                points = client.get_metric_history(self._id, elapsed)
                self._at_ms = max((each.timestamp for each in points), default=self._at_ms)
                return max((each.step for each in points), default=0)
            tags = {
                "fedstrata_run": self._run.id,
                "fedstrata_folder": str(self._run.path.resolve()),
            }
            name = self._run.path.resolve().name
            made = client.create_run(group, start_time=self._at_ms, run_name=name, tags=tags)
            self._id = made.info.run_id
            params = [
                self._param(key, str(value)[:VALUE_MOST])
                for key, value in flat(self._run.tree).items()
            ]
            for start in range(0, len(params), PARAMS_AT_ONCE):
                client.log_batch(self._id, params=params[start : start + PARAMS_AT_ONCE])
        return 0

    def write(self, global_round: int, elapsed_s: float, values: Mapping[str, float]) -> None:
        """Write metrics at the time at which the global round ended."""
        self._at_ms = int(1000 * (self._began + elapsed_s))
        with _reached("--mlflow", self.place):
            found = [
                self._metric(name, value, self._at_ms, global_round)
                for name, value in values.items()
            ]
            self._client.log_batch(self._id, metrics=found)

    def end(self, state: State) -> None:
        """Set the run's status."""
        status = {
            State.FINISHED: "FINISHED",
            State.FAILED: "FAILED",
            State.INTERRUPTED: "KILLED",
        }.get(state)
        if status is not None:
            with _reached("--mlflow", self.place):
                self._client.set_terminated(self._id, status=status, end_time=self._at_ms)


class WandbTracker:
    """A run of the W&B project `fedstrata`; offline, below a folder, unless WANDB_MODE is set."""

    def __init__(self, run: Run, where: str) -> None:
        import wandb

        self._run = run
        self._wandb = wandb
        self._folder = Path(where)
        self._mode: Any = os.environ.get("WANDB_MODE", "offline")
        if self._mode == "offline":
            self.place = f"{where}; wandb sync {where}/wandb/offline-run-*"
        else:
            self.place = GROUP

    def begin(self) -> int:
        """Begin the run; W&B joins the exports of one run by its id."""
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        with _reached("--wandb", self.place):
            self._made = self._wandb.init(
                project=GROUP,
                dir=str(self._folder),
                id=self._run.id,
                name=self._run.path.resolve().name,
                config=dict(self._run.tree),
                resume="allow",
                mode=self._mode,
                save_code=False,
                settings=self._wandb.Settings(
                    silent=True, console="off", disable_git=True, x_disable_stats=True
                ),
            )
        return 0

    def write(self, global_round: int, elapsed_s: float, values: Mapping[str, float]) -> None:
        """Write one step."""
        with _reached("--wandb", self.place):
            self._made.log(dict(values), step=global_round)

    def end(self, state: State) -> None:
        """End the run, as failed if it did."""
        with _reached("--wandb", self.place):
            self._made.finish(exit_code=int(state in (State.FAILED, State.INTERRUPTED)))


TRACKERS: Final[Mapping[str, Callable[[Run, str], Tracker]]] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MLflowTracker,
    "wandb": WandbTracker,
}


def time_of(run: Run) -> str:
    """Return the group of a run's seconds."""
    if run.simulated:
        return "simulated_seconds"
    return "seconds"


def began_s(run: Run) -> float:
    """Return when a run was started, seconds since the epoch; 0 if that is unknown."""
    if (began := run.began) is None:
        return 0.0
    return began.timestamp()


@contextmanager
def _reached(key: str, place: str) -> Iterator[None]:
    """Turn whatever a tracker's library raises into one line; each has exceptions of its own."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        reason = shorten(str(error) or type(error).__name__, REASON_MOST, placeholder=" ...")
        raise ConnectionFailed(
            f"{key}: {place}: {reason}. Start it, or name another place; export again."
        ) from None
