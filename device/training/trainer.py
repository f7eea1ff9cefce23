"""Local training on a device: SGD over the device's own samples, from one flat model into another.

On a CPU the result depends on the arguments alone, bit for bit: one thread per training, a fresh
optimiser, no process-global generator. Several trainers may live in one process and train at the
same time.
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from fedstrata.common.accounting.costs import DeviceCosts
from fedstrata.common.accounting.work import TrainingPath, Work
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment import schema
from fedstrata.common.host.accelerators import out_of_memory
from fedstrata.common.learning import models
from fedstrata.common.learning.computing import (
    calls_own_code,
    resolve_accelerator,
    seeded,
    set_up,
    set_up_evaluation,
)
from fedstrata.common.learning.evaluation import BATCH, CPU_BATCH, evaluate
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.models import MODEL_KEY
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.model.parts import given_arrays
from fedstrata.common.randomness import Purpose, torch_seed
from fedstrata.common.settings.own import is_own
from fedstrata.common.training.scores import CLASSES_MOST, R2, TARGETS_MOST, ScoreSums
from fedstrata.device.jobs import Cancelled, Examined, LocalResult, Order, Prepared
from fedstrata.device.training.batches import WrongSamples, load_local_dataset
from fedstrata.device.training.local_training import PreparedTraining
from fedstrata.device.training.objectives.objectives_by_name import objective_of
from fedstrata.device.training.recording import ProgramDiffers
from fedstrata.device.training.trained_network import NetworkSource, own_names, record, source_of
from fedstrata.device.training.trials import TRIED_SAMPLES, TriedTraining
from fedstrata.device.training.vectors import TaskVectors, vectors_of

PROGRESS_S = 0.5
EXAMINED_SAMPLES: Final = 10_000  # gathered at once


class Trainer:
    """Trains one device's model; call `prepare` first, then `train` any number of times, one at a
    time.
    """

    def __init__(
        self,
        experiment: schema.Experiment,
        *,
        node: str,
        accelerator: str,
        sources: MutableMapping[Inputs, NetworkSource] | None = None,
        frozen: Path | None = None,
    ) -> None:
        """Check the node and the accelerator ('cpu', 'cuda', 'cuda:N', 'auto'). Raises
        InvalidExperiment.

        `sources` are shared by trainers of one experiment, accelerator and content of `frozen` that
        train one after another. `frozen`: a file of the cloud's frozen arrays, named by their
        digest, if this node builds others.
        """
        names = experiment.tree.devices
        if node not in names and not experiment.enters(node):
            problem = "the experiment has no device of this name"
            remedy = f"It has {', '.join(names)}."
            raise InvalidExperiment("topology.devices", node, problem, remedy)
        self._experiment = experiment
        self._node = node
        self._accelerator = resolve_accelerator(accelerator)
        self._sources = {} if sources is None else sources
        self._frozen = frozen
        self._own = [key for key, name in experiment.code_at(node).items() if is_own(name)]
        self._training = TriedTraining(experiment, node=node, accelerator=self._accelerator)
        self.wrong = WrongSamples(experiment.attackers.adversary(node))
        self._made: PreparedTraining | None = None

    @calls_own_code
    def prepare(self) -> None:
        """Load the data, select this device's samples, build the model and try own code.

        Raises InvalidExperiment, RefusedModel if the file of frozen arrays is damaged.
        """
        experiment = self._experiment
        accelerator = self._accelerator
        set_up(accelerator, experiment.training)
        objective = objective_of(experiment.training)  # one's own that cannot be built ends here
        local = load_local_dataset(experiment, self._node, accelerator=accelerator)
        known = self._sources.get(local.inputs)
        source = known
        if source is None:
            frozen = given_arrays(self._frozen)
            source = source_of(experiment, local.inputs, accelerator=accelerator, frozen=frozen)
        vectors = vectors_of(experiment, self._node, source.parts)
        draws = objective.draws(vectors.shapes, local.inputs.classes)
        made = PreparedTraining(source, vectors, local, draws)
        if self._training.privacy.on_samples:
            self._training.check_private(source, samples=len(local.samples))
        if known is None and source.shared is None:
            source = self._training.formed(made)
        elif known is None and own_names(experiment):
            self._training.repeated(made, min(TRIED_SAMPLES, experiment.training.batch_size))
        self._check_scored(local.inputs)
        self._sources[local.inputs] = source
        self._made = made = replace(made, source=source, local=replace(local, joins=source.joins))
        if source.joins and len(local.samples) == 1:
            problem = f"cannot train on one sample, and {self._node} has no more"
            remedy = "See data.min_samples."
            raise InvalidExperiment(MODEL_KEY, experiment.model.name, problem, remedy)
        sizes = set(made.local.sizes(experiment.training.batch_size))
        if self._own or self._training.privacy.on_samples:
            for size in sizes - source.tried:
                self._training.tried(made, size)
                source.tried.add(size)
        if accelerator.type == "cpu" and experiment.training.recorded:
            record(source, vectors.inner, draws=made.draws, sizes=sizes)

    @property
    def layout(self) -> ModelLayout:
        """The model's layout, once prepared."""
        return self._prepared.source.parts.exchanged

    @property
    def vectors(self) -> TaskVectors:
        """The vectors behind the models of this device's tasks, once prepared."""
        return self._prepared.vectors

    @property
    def samples(self) -> int:
        """The number of this device's training samples, once prepared."""
        return len(self._prepared.local.samples)

    @property
    def notes(self) -> Sequence[str]:
        """The warnings about the experiment's own code, a line each, once prepared."""
        return self._prepared.source.notes

    @property
    def recorded(self) -> bool:
        """Whether some of the steps are recorded, once prepared."""
        return any(self._prepared.source.recorded.programs.values())

    @property
    def facts(self) -> Prepared:
        """The device's facts, once prepared."""
        local = self._prepared.local
        vectors = self._prepared.vectors
        tests = 0 if local.tests is None else len(local.tests.samples)
        return Prepared(self.layout, self.samples, local.partition, vectors.kept_bytes, tests)

    @calls_own_code
    def start(self, order: Order) -> Order:
        """Return the order with which a training begins: `order`, or with this device's own initial
        model in its row.

        The latter in the first local round of a run without `model.same_initial`. The vectors
        behind the model, and the personal arrays, are those of the order. Raises InvalidExperiment.
        """
        if self._experiment.model.same_initial or order.local_round:
            return order
        made = self._prepared
        row = order.row.copy()
        module = models.anew(self._experiment, inputs=made.local.inputs, node=self._node)
        models.write_row(module, made.source.parts.exchanged, row)
        return replace(order, row=row)

    @calls_own_code
    def train(self, order: Order) -> LocalResult:
        """Train as ordered; `row` and `out` have `vectors` behind the model.

        `row` is read-only. `local_round` counts local rounds over the whole run: global round *
        local rounds + i. Raises Cancelled, RunFailed if the accelerator's memory does not suffice,
        and InvalidExperiment if training should be deterministic and cannot be. The trainer can be
        used again after any of these.
        """
        made = self._prepared
        epochs = order.epochs
        local_round = order.local_round
        if self.wrong.used_in(local_round):
            made = replace(made, local=self.wrong.of(made.local))
        exhausted = False
        set_up(self._accelerator, self._experiment.training)
        if self._training.memory is not None:
            self._training.memory.begin()
        network = made.source.network()
        total = epochs * self._training.steps_in_epoch(made.local)
        start = time.monotonic()
        cpu_start = time.thread_time()
        reported = start

        def watch(steps: int) -> None:
            nonlocal reported
            now = time.monotonic()
            if now - reported >= PROGRESS_S:
                self._training.synchronise()  # steps that are only queued are no progress
                order.progress(steps, total)
                reported = now
            if order.cancelled.is_set():
                raise Cancelled

        private = self._training.gradient_noise(made.local, order.noise, local_round)
        try:
            try:
                found = self._training.trained(
                    made, network, order, watch=watch, private=private, programs=True
                )
            except ProgramDiffers as error:
                self._drop_programs(made.source, error)
                self._training.release(network)
                network = made.source.network()
                found = self._training.trained(made, network, order, watch=watch, private=private)
            losses, steps = found
            order.progress(steps, total)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            # raised below: this exception's traceback references the tensors that must be freed
            exhausted = True
        finally:
            self._training.release(network)
        train_s = time.monotonic() - start
        cpu_s = time.thread_time() - cpu_start
        if exhausted:
            raise self._training.exhausted()
        path = TrainingPath.IN_PROCESS
        costs = DeviceCosts(cpu_s=cpu_s)
        loss = losses / self.samples
        work = Work(self.samples, loss, order.epochs, steps, train_s, path=path, costs=costs)
        return LocalResult(work)

    @calls_own_code
    def examine(self, order: Order) -> Examined:
        """Return the sums of the model in `row` over this device's test samples, if it scores and
        has some.

        If it trains and its parent's rule reads that, also those over its training samples. In
        fp32, with the module in eval mode, as the cloud evaluates. Progress is reported in batches.
        Raises what `train` raises.
        """
        local = self._prepared.local
        rule = self._experiment.tier_above(self._node).aggregation
        reads_losses = order.epochs > 0 and rule.reads_losses
        start = None
        if not (order.scores or reads_losses):
            return Examined()
        model = self._prepared.vectors.begin(order.row)
        tests = self._tested(model, order) if order.scores else None
        if reads_losses:
            gathered = torch.split(local.samples, EXAMINED_SAMPLES)
            parts = [(local.images[some], local.labels[some]) for some in gathered]
            start = self._sums(model, parts, order)
        return Examined(tests, start)

    @calls_own_code
    def examine_trained(self, order: Order) -> ScoreSums | None:
        """Return the sums of the model that `train` has written into `out`, like `examine`, if that
        is ordered.
        """
        if order.scores_trained:
            return self._tested(self._prepared.vectors.trained(order.out), order)
        return None

    def _tested(self, model: Row, order: Order) -> ScoreSums | None:
        """Return the sums of a model, as training has it, over the test samples, None without
        any.
        """
        tests = self._prepared.local.tests
        if tests is None:
            return None
        part = (tests.images[tests.samples], tests.labels[tests.samples])
        return self._sums(model, [part], order)

    def _sums(self, model: Row, parts: Sequence[tuple[Tensor, Tensor]], order: Order) -> ScoreSums:
        """Return the sums of a model, as training has it, over some samples and labels, and their
        seconds.
        """
        made = self._prepared
        experiment = self._experiment
        begun = time.monotonic()
        set_up(self._accelerator, experiment.training)
        set_up_evaluation(self._accelerator)
        network = made.source.network()
        batch = CPU_BATCH if self._accelerator.type == "cpu" else BATCH
        batches_done = 0
        reported = begun
        total = sum(-(-len(labels) // batch) for _, labels in parts)
        found: list[ScoreSums] = []

        def watch() -> None:
            nonlocal batches_done, reported
            batches_done += 1
            now = time.monotonic()
            if now - reported >= PROGRESS_S:
                order.progress(batches_done, total)
                reported = now
            if order.cancelled.is_set():
                raise Cancelled

        generators: AbstractContextManager[None] = nullcontext()
        if self._own:
            own_seed = torch_seed(experiment.seed, Purpose.OWN_CODE)
            generators = seeded(own_seed, self._accelerator)
        classes = made.local.inputs.classes if experiment.evaluation.per_class else 0
        try:
            with generators:
                network.tensors(made.source.parts).row.read(model)
                models.read_frozen(network.module, made.source.parts.frozen)
                self._training.move(network)
                for samples, labels in parts:
                    result = evaluate(
                        network.module,
                        samples,
                        labels=labels,
                        normalise=made.local.normalise,
                        batch_size=batch,
                        loss=experiment.training.loss,
                        scores=experiment.score.names,
                        classes=classes,
                        watch=watch,
                    )
                    found.append(result.sums)
        finally:
            self._training.release(network)
        return replace(reduce(add, found), seconds=time.monotonic() - begun)

    @property
    def joins(self) -> bool:
        """Whether a batch has one sample more than the others, as the model cannot train on one
        alone.
        """
        local = self._prepared.local
        size = self._experiment.training.batch_size
        return max(local.sizes(size)) > size

    @property
    def _prepared(self) -> PreparedTraining:
        if self._made is None:
            raise RuntimeError("call Trainer.prepare first")
        return self._made

    def _drop_programs(self, source: NetworkSource, error: ProgramDiffers) -> None:
        source.recorded.drop(str(error))
        problem = f"{self._experiment.model.name} is not recorded any more: {error}"
        source.note(f"training.recorded = true: {problem}. Its training is repeated step by step.")

    def _check_scored(self, inputs: Inputs) -> None:
        """Check that this device's sums are few enough to be sent. Raises InvalidExperiment."""
        evaluation = self._experiment.evaluation
        score = self._experiment.score
        count = inputs.classes
        if evaluation.on_devices and R2 in score.names and count > TARGETS_MOST:
            problem = f"{count} numbers to predict, and devices send the sums of {TARGETS_MOST}"
            key = "score.name" if score.name == R2 else "score.also"
            raise InvalidExperiment(key, R2, f"{problem} at most", 'Use "mean_squared_error".')
        if evaluation.per_class and count > CLASSES_MOST:
            problem = f"the data set has {count} classes, and devices count {CLASSES_MOST} at most"
            raise InvalidExperiment("evaluation.per_class", True, problem, "Omit it.")
