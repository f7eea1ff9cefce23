"""A run from the cloud's side, over a network or in one process: from the first model or a checkpoint to the last."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cloud import checkpoint
from cloud.global_rounds import Evaluate, GlobalRounds, evaluated
from cloud.records import tier_bytes
from cloud.results import RunFolder
from common.errors import InvalidExperiment
from common.experiment import lint
from common.experiment.topology import CLOUD
from common.host.offload import offload
from common.methods import aggregator
from common.methods.selection import Choose
from common.metrics import Metrics
from common.model.layout import ModelLayout, Row
from common.model.refinement import Refiner
from common.runtime.children import Children, Observe
from common.storage.spool import Spool


class CloudRun:
    """One run; `row` is its initial model, `partition` the digest of its data split.

    `choose`: a client selection, as recorded. `notes`: on its data.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        layout: ModelLayout,
        row: Row,
        partition: str,
        spool: Spool,
        down: Children,
        evaluate: Evaluate,
        metrics: Metrics,
        observe: Observe,
        choose: Choose | None = None,
        refiner: Refiner | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._notes = notes
        self._experiment = experiment = folder.experiment
        self._layout = layout
        self._partition = partition
        self._down = down
        self._observe = observe
        self._rule = aggregator.build(
            experiment.tier_below(CLOUD).aggregation,
            layout=layout,
            node=CLOUD,
            seed=experiment.seed,
            measures=True,
            rows=partial(spool.memory, row_bytes=layout.row_bytes, resident_mb=experiment.transfer.resident_mb),
            folder=folder.path / "cache",
            children=len(down.peers),
            training=experiment.training,
            learning_rate=experiment.learning_rate_in,
            rounds_below=experiment.rounds_below(CLOUD),
            refiner=refiner,
            bound=experiment.tier_below(CLOUD).norm_bound,
        )
        self._global_rounds = GlobalRounds(
            folder,
            layout=layout,
            row=row,
            rule=self._rule,
            down=down,
            evaluate=evaluate,
            metrics=metrics,
            observe=observe,
            choose=choose,
            refiner=refiner,
        )

    def resume(self) -> None:
        """Continue from the last checkpoint that can be read, with a warning for each other one.

        Raises InvalidExperiment if that is impossible.
        """
        folder, state = self._folder, self._global_rounds.state
        for path in (found := checkpoint.newest_first(folder.checkpoints)):
            try:
                state = checkpoint.load(path, layout=self._layout, row=self._global_rounds.row, rule=self._rule)
                break
            except InvalidExperiment as error:
                if path == found[-1]:
                    raise
                self._observe("warning", {"reason": f"{error} The run continues from the checkpoint before it."})
        if state.digest != self._experiment.digest:
            raise InvalidExperiment("--resume", str(folder.path), "its experiment was changed", "Restore the file.")
        self._global_rounds.resume(state)

    def introduce(self, *, metrics_address: str = "") -> None:
        """Record the run's facts, and report them and the warnings about its experiment and data."""
        experiment = self._experiment
        # The size of a model as fp32; together with links.csv it shows the savings of the codecs.
        self._folder.note(model_bytes=self._layout.row_bytes, partition=self._partition)
        self._observe(
            "run",
            {
                "run": self._folder.run,
                "folder": str(self._folder.path),
                "experiment": experiment.name,
                "global_rounds": experiment.rounds,
                "done": self._global_rounds.state.global_round,
                "nodes": experiment.count_by_kind(),
                "model": experiment.model.name,
                "model_bytes": self._layout.row_bytes,
                "score": experiment.score.name,
                "metrics": metrics_address,
            },
        )
        for reason in (*lint.warnings(experiment), *self._notes):
            self._observe("warning", {"reason": reason})

    @property
    def complete(self) -> bool:
        """Whether no global round remains."""
        return self._global_rounds.complete

    @property
    def elapsed_s(self) -> float:
        """The seconds of the global rounds so far."""
        return self._global_rounds.state.elapsed_s

    async def run(self) -> Path:
        """Run the remaining global rounds, write the final model, and return its path."""
        global_rounds, folder, experiment = self._global_rounds, self._folder, self._experiment
        folder.begun = True
        await global_rounds.run()
        path = folder.path / "model.safetensors"
        facts = {"run": folder.run, "experiment": experiment.name, "digest": experiment.digest}
        save = partial(checkpoint.save_model, path, layout=self._layout, row=global_rounds.row, facts=facts)
        await global_rounds.written(lambda: offload(save))
        self._observe(
            "finished",
            {
                "global_round": global_rounds.state.global_round,
                "elapsed_s": global_rounds.state.elapsed_s,
                **evaluated(experiment.score.name, global_rounds.last),
                "model": str(path),
                "model_bytes": self._layout.row_bytes,
                **tier_bytes(self._down.ledger, experiment.tier_names),
            },
        )
        return path
