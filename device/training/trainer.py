"""Local training on a device: SGD over the device's own samples, from one flat model into another.

On a CPU the result depends on the arguments alone, bit for bit: one thread per training, a fresh
optimiser, no process-global generator. Several trainers may live in one process and train at the
same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fedstrata.common.accounting.costs import DeviceCosts
from fedstrata.common.accounting.work import TrainingPath, Work
from fedstrata.common.errors import InvalidExperiment, RunFailed
from fedstrata.common.experiment import schema
from fedstrata.common.host.accelerators import out_of_memory
from fedstrata.common.learning import models
from fedstrata.common.learning.computing import (
    calls_own_code,
    own_code,
    resolve_accelerator,
    seeded,
    set_up,
    set_up_evaluation,
)
from fedstrata.common.learning.evaluation import BATCH, CPU_BATCH, evaluate
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.models import MODEL_KEY, random_samples, random_targets
from fedstrata.common.learning.nets import reseed
from fedstrata.common.methods.private import noise_of
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.model.parts import given_arrays
from fedstrata.common.randomness import Purpose, torch_seed
from fedstrata.common.settings import own
from fedstrata.common.settings.accountant import steps_in_epoch
from fedstrata.common.settings.own import is_own
from fedstrata.common.settings.own_values import changed, kept_in_files
from fedstrata.common.settings.privacy import PrivacySettings, check_delta
from fedstrata.common.text import named
from fedstrata.common.training.scores import CLASSES_MOST, R2, TARGETS_MOST, ScoreSums
from fedstrata.device.jobs import Cancelled, Examined, LocalResult, Order, Prepared
from fedstrata.device.training.batches import (
    LocalDataset,
    WrongSamples,
    blocks,
    dropout_seed,
    load_local_dataset,
    try_augmentation,
    uniform_numbers,
)
from fedstrata.device.training.objectives.table import objective_of
from fedstrata.device.training.private import (
    GradientNoise,
    PrivateSteps,
    check_module,
    poisson_batches,
)
from fedstrata.device.training.recording import Comparison, Program, ProgramDiffers
from fedstrata.device.training.sgd import NO_PROGRAMS, LocalSteps, Steps, run_sgd
from fedstrata.device.training.trained_network import (
    Network,
    NetworkSource,
    form_of,
    hidden_in,
    own_names,
    record,
    source_of,
    vector_tensors,
)
from fedstrata.device.training.vectors import TaskVectors, finish, vectors_of

PROGRESS_S = 0.5
TRIED_SAMPLES: Final = 8
EXAMINED_SAMPLES: Final = 10_000  # gathered at once
ROUNDING_MOST: Final = 0.1  # of a step; 0.02 was seen (batch norm)

Batches = Iterable[tuple[int, Tensor, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    source: NetworkSource
    vectors: TaskVectors
    local: LocalDataset
    draws: int


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
            raise InvalidExperiment(
                "topology.devices",
                node,
                "the experiment has no device of this name",
                f"It has {', '.join(names)}.",
            )
        self._experiment = experiment
        self._node = node
        self._accelerator = resolve_accelerator(accelerator)
        self._sources = {} if sources is None else sources
        self._frozen = frozen
        self._own = [key for key, name in experiment.code_at(node).items() if is_own(name)]
        self.wrong = WrongSamples(experiment.attackers.adversary(node))
        self._made: _Prepared | None = None

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
        if (source := known) is None:
            frozen = given_arrays(self._frozen)
            source = source_of(experiment, local.inputs, accelerator=accelerator, frozen=frozen)
        vectors = vectors_of(experiment, self._node, source.parts)
        made = _Prepared(
            source, vectors, local, objective.draws(vectors.shapes, local.inputs.classes)
        )
        if self._privacy.on_samples:
            self._check_private(source, samples=len(local.samples))
        if known is None and source.shared is None:
            source = self._formed(made)
        elif known is None and own_names(experiment):
            self._repeated(made, min(TRIED_SAMPLES, experiment.training.batch_size))
        self._check_scored(local.inputs)
        self._sources[local.inputs] = source
        self._made = made = replace(made, source=source, local=replace(local, joins=source.joins))
        if source.joins and len(local.samples) == 1:
            problem = f"cannot train on one sample, and {self._node} has no more"
            remedy = "See data.min_samples."
            raise InvalidExperiment(MODEL_KEY, experiment.model.name, problem, remedy)
        sizes = set(made.local.sizes(experiment.training.batch_size))
        for size in sizes - source.tried if self._own or self._privacy.on_samples else ():
            self._tried(made, size)
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
        network = made.source.network()
        total = epochs * self._steps_in_epoch(made.local)
        start = time.monotonic()
        cpu_start = time.thread_time()
        reported = start

        def watch(steps: int) -> None:
            nonlocal reported
            now = time.monotonic()
            if now - reported >= PROGRESS_S:
                self._synchronise()  # steps that are only queued are no progress
                order.progress(steps, total)
                reported = now
            if order.cancelled.is_set():
                raise Cancelled

        private = self._gradient_noise(made.local, order.noise, local_round)
        try:
            try:
                found = self._trained(
                    made, network, order, watch=watch, private=private, programs=True
                )
            except ProgramDiffers as error:
                self._drop_programs(made.source, error)
                self._release(network)
                network = made.source.network()
                found = self._trained(made, network, order, watch=watch, private=private)
            losses, steps = found
            order.progress(steps, total)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            # raised below: this exception's traceback references the tensors that must be freed
            exhausted = True
        finally:
            self._release(network)
        train_s = time.monotonic() - start
        cpu_s = time.thread_time() - cpu_start
        if exhausted:
            raise self._exhausted()
        path = TrainingPath.IN_PROCESS
        costs = DeviceCosts(cpu_s=cpu_s)
        loss = losses / self.samples
        return LocalResult(
            Work(self.samples, loss, order.epochs, steps, train_s, path=path, costs=costs)
        )

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
            parts = [
                (local.images[some], local.labels[some])
                for some in torch.split(local.samples, EXAMINED_SAMPLES)
            ]
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
        if (tests := self._prepared.local.tests) is None:
            return None
        return self._sums(
            model, [(tests.images[tests.samples], tests.labels[tests.samples])], order
        )

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
            if (now := time.monotonic()) - reported >= PROGRESS_S:
                order.progress(batches_done, total)
                reported = now
            if order.cancelled.is_set():
                raise Cancelled

        own_seed = torch_seed(experiment.seed, Purpose.OWN_CODE)
        try:
            with seeded(own_seed, self._accelerator) if self._own else nullcontext():
                network.tensors(made.source.parts).row.read(model)
                models.read_frozen(network.module, made.source.parts.frozen)
                self._move(network, self._accelerator)
                for samples, labels in parts:
                    result = evaluate(
                        network.module,
                        samples,
                        labels=labels,
                        normalise=made.local.normalise,
                        batch_size=batch,
                        loss=experiment.training.loss,
                        scores=experiment.score.names,
                        classes=made.local.inputs.classes if experiment.evaluation.per_class else 0,
                        watch=watch,
                    )
                    found.append(result.sums)
        finally:
            self._release(network)
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
    def _prepared(self) -> _Prepared:
        if self._made is None:
            raise RuntimeError("call Trainer.prepare first")
        return self._made

    def _trained(
        self,
        made: _Prepared,
        network: Network,
        order: Order,
        *,
        watch: Callable[[int], None],
        private: GradientNoise | None,
        some: Batches | None = None,
        programs: bool = False,
    ) -> tuple[float, int]:
        """Train as ordered; return the sum of the last epoch's losses, and the steps.

        `some`: on these batches instead. `programs`: with the recorded steps. Raises
        ProgramDiffers.
        """
        experiment = self._experiment
        module = network.module
        parts = made.source.parts
        vectors = made.vectors
        local_round = order.local_round
        out = order.out
        inner = vectors.begin(order.row)
        if some is None:
            some = self._batches(made.local, private, epochs=order.epochs, local_round=local_round)
        if self._own:
            own_seed = torch_seed(experiment.seed, Purpose.OWN_CODE, self._node, local_round)
        else:
            own_seed = 0
        with (
            seeded(own_seed, self._accelerator) if self._own else nullcontext(),
            self._deterministic(),
        ):
            network.tensors(parts).row.read(inner)
            models.read_frozen(module, parts.frozen)
            self._move(network, self._accelerator)
            if network.drops:
                reseed(
                    module,
                    dropout_seed(experiment, node=self._node, local_round=local_round),
                    self._accelerator,
                )
            given = {
                name: vector_tensors(vectors.inner, module, name, vector)
                for name, vector in vectors.inner.read(inner).items()
            }
            rate = experiment.learning_rate_in(local_round)
            steps: Steps
            recorded = NO_PROGRAMS
            comparison = None
            if private is None:
                steps = network.steps(experiment, parts, rate=rate, vectors=given)
                if programs:
                    recorded, comparison = self._recorded(made, network, steps, epochs=order.epochs)
            else:
                weights = models.weights_of(module, parts.whole)
                steps = PrivateSteps(
                    module, weights, experiment, learning_rate=rate, private=private
                )
            losses, taken = run_sgd(
                steps,
                some,
                last_epoch=order.epochs - 1,
                watch=watch,
                uniform=uniform_numbers(
                    experiment,
                    made.draws,
                    node=self._node,
                    local_round=local_round,
                    device=self._accelerator,
                ),
                programs=recorded,
                comparison=comparison,
            )
            self._move(network, "cpu")
            models.check_constant(module, parts)
            trained = parts.whole.empty() if vectors.personal else out
            network.tensors(parts).row.write(trained)
            if vectors.personal:
                vectors.end(trained, out)
            finish(experiment, vectors, made.local, order, node=self._node, steps=taken)
        return float(losses), taken

    def _recorded(
        self, made: _Prepared, network: Network, steps: LocalSteps, *, epochs: int
    ) -> tuple[Mapping[int, Program | None], Comparison | None]:
        """Return the recorded steps of a training, and what compares them if they run own code."""
        found = made.source.recorded
        if not any(found.programs.values()):
            return NO_PROGRAMS, None
        if found.form is not None:  # the module of another call may be another one
            same = form_of(self._experiment, network.module) == found.form
            return found.programs if same else NO_PROGRAMS, None
        count = epochs * self._steps_in_epoch(made.local)
        return found.programs, Comparison(
            count, hidden_in(self._experiment, network.module, steps.objective)
        )

    def _drop_programs(self, source: NetworkSource, error: ProgramDiffers) -> None:
        source.recorded.drop(str(error))
        problem = f"{self._experiment.model.name} is not recorded any more: {error}"
        source.note(f"training.recorded = true: {problem}. Its training is repeated step by step.")

    @property
    def _privacy(self) -> PrivacySettings:
        return self._experiment.tiers[-1].privacy

    def _steps_in_epoch(self, local: LocalDataset) -> int:
        if (rate := self._privacy.sampling_rate) is not None:
            return steps_in_epoch(rate)
        return len(local.sizes(self._experiment.training.batch_size))

    def _gradient_noise(
        self, local: LocalDataset, key: bytes, local_round: int
    ) -> GradientNoise | None:
        """Return the noise of DP-SGD, None without."""
        privacy = self._privacy
        experiment = self._experiment
        if not privacy.on_samples or privacy.clip_norm is None:
            return None
        noise = noise_of(key, seed=experiment.seed, node=self._node, number=local_round)
        if privacy.sampling_rate is None:
            expected = None
        else:
            expected = privacy.sampling_rate * len(local.samples)
        return GradientNoise(privacy.clip_norm, privacy.multiplier, noise, expected)

    def _batches(
        self, local: LocalDataset, private: GradientNoise | None, *, epochs: int, local_round: int
    ) -> Batches:
        """Return the batches of a training."""
        rate = self._privacy.sampling_rate
        if private is None or rate is None:
            return blocks(
                local, self._experiment, node=self._node, epochs=epochs, local_round=local_round
            )
        return poisson_batches(
            local,
            self._experiment,
            node=self._node,
            epochs=epochs,
            local_round=local_round,
            rate=rate,
            noise=private.noise,
        )

    def _check_private(self, source: NetworkSource, *, samples: int) -> None:
        """Check that a batch may expect a sample, and that no layer mixes samples. Raises
        InvalidExperiment.
        """
        table = f"{self._experiment.key(self._experiment.tiers[-1])}.privacy"
        check_delta(table, self._privacy, samples, f"samples of {self._node}")
        if (rate := self._privacy.sampling_rate) is not None and rate * samples < 1:
            problem = f"{self._node} has {samples} samples, so a batch would have less than one"
            raise InvalidExperiment(
                f"{table}.sampling_rate", rate, problem, f"Use at least {1 / samples:.2g}."
            )
        check_module(source.network().module, self._experiment)

    def _formed(self, made: _Prepared) -> NetworkSource:
        """Return the source in the form in which the user's own model trains as it is, and fastest.

        It depends on the experiment alone. Raises InvalidExperiment if the model fails in training,
        or if the same training twice gives other models.
        """
        source = made.source
        few = min(TRIED_SAMPLES, self._experiment.training.batch_size)
        try:
            self._tried(made, 1)
        except InvalidExperiment:
            if few == 1:
                raise
            source = replace(source, joins=True)
        once = self._repeated(replace(made, source=source), few)
        if self._accelerator.type == "cpu" and not self._privacy.on_samples:
            fast = replace(source, memory_format=torch.channels_last)
            with suppress(InvalidExperiment):  # for instance of a view that needs another order
                if self._near(
                    made, self._first(made), once, self._tried(replace(made, source=fast), few)
                ):
                    source = fast
        return source

    def _repeated(self, made: _Prepared, samples: int) -> Row:
        """Train the first model twice on the same random samples; return what that gives.

        Raises InvalidExperiment if both results differ. What the user's files keep of the second
        training, they keep of each, and pass it on from one device to the next: that is reported by
        its name.
        """
        names = [name for name in self._experiment.code_at(self._node).values() if is_own(name)]
        first = self._first(made)
        once = self._tried(made, samples, first)
        before = kept_in_files(names)
        again = self._tried(made, samples, first)
        if (augmentation := self._experiment.training.own_augmentation) is not None:
            try_augmentation(augmentation, made.local)
        shared = changed(before, kept_in_files(names))
        exact = self._accelerator.type == "cpu" or self._experiment.training.deterministic
        key, name = next(
            (key, name) for key, name in own_code(self._experiment).items() if is_own(name)
        )
        if not (np.array_equal(once, again) if exact else self._near(made, first, once, again)):
            problem = "the same training twice gives other models"
            if shared:
                problem += f", and changes {named(shared)}"
            remedy = (
                "Draw random numbers from torch's, numpy's or Python's own generator; keep "
                "nothing in its module."
            )
            own.refuse(key, name, problem, remedy)
        if shared:
            problem = f"each training changes {named(shared)}, which the devices of a process share"
            remedy = "Keep it in the model: each training makes a new one."
            made.source.note(f"{key} = {name!r}: {problem}. {remedy}")
        return once

    def _check_scored(self, inputs: Inputs) -> None:
        """Check that this device's sums are few enough to be sent. Raises InvalidExperiment."""
        experiment = self._experiment
        evaluation = self._experiment.evaluation
        if evaluation.on_devices and R2 in experiment.score.names and inputs.classes > TARGETS_MOST:
            problem = (
                f"{inputs.classes} numbers to predict, and devices send the sums of "
                f"{TARGETS_MOST} at most"
            )
            key = "score.name" if experiment.score.name == R2 else "score.also"
            raise InvalidExperiment(key, R2, problem, 'Use "mean_squared_error".')
        if evaluation.per_class and inputs.classes > CLASSES_MOST:
            problem = (
                f"the data set has {inputs.classes} classes, and devices count "
                f"{CLASSES_MOST} at most"
            )
            raise InvalidExperiment("evaluation.per_class", True, problem, "Omit it.")

    def _near(self, made: _Prepared, start: Row, once: Row, other: Row) -> bool:
        """Return whether two steps from one model differ by no more than rounding."""
        start_D, once_D, other_D = map(made.source.parts.exchanged.floats, (start, once, other))
        return bool(
            np.linalg.norm(other_D - once_D) <= ROUNDING_MOST * np.linalg.norm(once_D - start_D)
        )

    def _tried(self, made: _Prepared, samples: int, first: Row | None = None) -> Row:
        """Return a model, the first one, after a step of training on so many random samples. Raises
        InvalidExperiment.

        So own code fails before the run, and no round's seconds include the start of PyTorch's
        compiler or of vmap.
        """
        inputs = made.local.inputs
        given, labels = (
            each.to(self._accelerator)
            for each in (random_samples(inputs, samples), random_targets(inputs, samples))
        )
        row = self._first(made) if first is None else first
        network = made.source.network()
        out = np.zeros(made.vectors.links.up.row_bytes + made.vectors.kept_bytes, np.uint8)
        local = LocalDataset(
            inputs, given, labels, torch.arange(samples), lambda images: images, ""
        )
        by = " by DP-SGD" if self._privacy.on_samples else ""
        problem = f"fails in training{by} on {samples} samples with {{}}"
        try:
            with own.guarded(own_code(self._experiment), problem=problem, everything=True):
                try:
                    once = [(0, given[None], labels[None])]
                    private = self._gradient_noise(local, b"", 0)
                    order = Order(row, out, 1, 0)
                    tried = replace(made, local=local)
                    self._trained(
                        tried, network, order, watch=lambda _: None, private=private, some=once
                    )
                except RuntimeError as error:
                    self._explain(error, network)
                    raise
        finally:
            self._release(network)
        return out

    def _explain(self, error: RuntimeError, network: Network) -> None:
        """Raise the error of a trial in its place whose cause is known."""
        if out_of_memory(error):
            raise self._exhausted() from None
        for name, weight in network.module.named_parameters():
            if weight.grad is not None and weight.grad.is_sparse:
                problem = f"the gradient of its {name} is sparse"
                remedy = "Use sparse=False."
                own.refuse(MODEL_KEY, self._experiment.model.name, problem, remedy)

    def _first(self, made: _Prepared) -> Row:
        """Return the first model of a run, with zeros behind it."""
        row = np.zeros(made.vectors.links.down.row_bytes + made.vectors.kept_bytes, np.uint8)
        models.write_row(made.source.network().module, made.source.parts.exchanged, row)
        return row

    def _exhausted(self) -> RunFailed:
        return RunFailed(
            f"{self._accelerator} has not enough free memory to train "
            f"{self._experiment.model.name} with "
            f"training.batch_size = {self._experiment.training.batch_size}. Use a smaller batch "
            "size, fewer "
            "trainings at once on this accelerator, or --accelerator cpu."
        )

    def _synchronise(self) -> None:
        if self._accelerator.type == "cuda":
            torch.cuda.synchronize(self._accelerator)

    @contextmanager
    def _deterministic(self) -> Iterator[None]:
        """Name an operation without the deterministic form that is asked for. Raises
        InvalidExperiment.
        """
        try:
            yield
        except RuntimeError as error:
            if not (self._experiment.training.deterministic and "deterministic" in str(error)):
                raise
            operation = str(error).partition(" does not have")[0]
            problem = f"{operation} has no deterministic form on this accelerator"
            remedy = "Set it to false, use another model, or --accelerator cpu."
            raise InvalidExperiment("training.deterministic", True, problem, remedy) from None

    def _move(self, network: Network, where: torch.device | str) -> None:
        if self._accelerator.type != "cpu":  # torch would check every tensor of the module
            network.module.to(where)

    def _release(self, network: Network) -> None:
        """Drop gradients and release the accelerator's memory, because other processes may train on
        it too.
        """
        for weight in network.kept.weights if network.kept else network.module.parameters():
            weight.grad = None
        self._move(network, "cpu")
        if self._accelerator.type == "cuda":
            torch.cuda.empty_cache()
