"""The training of one task on a device: from one flat model into another, on given batches.

On a CPU the result depends on the arguments alone, bit for bit: one thread per training, a fresh
optimiser, no process-global generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from fedstrata.common.errors import InvalidExperiment, RunFailed
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import models
from fedstrata.common.learning.computing import seeded
from fedstrata.common.learning.gpu_memory import memory_of
from fedstrata.common.learning.nets import reseed
from fedstrata.common.methods.private import noise_of
from fedstrata.common.randomness import Purpose, torch_seed
from fedstrata.common.settings.accountant import steps_in_epoch
from fedstrata.common.settings.own import is_own
from fedstrata.common.settings.privacy import PrivacySettings
from fedstrata.device.jobs import Order
from fedstrata.device.training.batches import LocalDataset, blocks, dropout_seed, uniform_numbers
from fedstrata.device.training.dp_sgd import GradientNoise, PrivateSteps, poisson_batches
from fedstrata.device.training.recording import Comparison, Program
from fedstrata.device.training.sgd import NO_PROGRAMS, LocalSteps, Steps, run_sgd
from fedstrata.device.training.trained_network import (
    Network,
    NetworkSource,
    form_of,
    hidden_in,
    vector_tensors,
)
from fedstrata.device.training.vectors import TaskVectors, finish

Batches = Iterable[tuple[int, Tensor, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedTraining:
    """What a device's trainings need, once it is loaded and built."""

    source: NetworkSource
    vectors: TaskVectors
    local: LocalDataset
    draws: int  # random numbers of a sample that the objective reads


class LocalTraining:
    """The trainings of one device, one at a time."""

    def __init__(self, experiment: Experiment, *, node: str, accelerator: torch.device) -> None:
        self._experiment = experiment
        self._node = node
        self._accelerator = accelerator
        self.memory = memory_of(accelerator)
        self._own = [key for key, name in experiment.code_at(node).items() if is_own(name)]

    def trained(
        self,
        made: PreparedTraining,
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
        generators: AbstractContextManager[None] = nullcontext()
        if self._own:
            own_seed = torch_seed(experiment.seed, Purpose.OWN_CODE, self._node, local_round)
            generators = seeded(own_seed, self._accelerator)
        with generators, self._deterministic():
            network.tensors(parts).row.read(inner)
            models.read_frozen(module, parts.frozen)
            self.move(network)
            if network.drops:
                seed = dropout_seed(experiment, node=self._node, local_round=local_round)
                reseed(module, seed, self._accelerator)
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
                    module,
                    weights,
                    experiment,
                    learning_rate=rate,
                    private=private,
                    personal=network.tensors(parts).personal,
                )
            uniform = uniform_numbers(
                experiment,
                made.draws,
                node=self._node,
                local_round=local_round,
                device=self._accelerator,
            )
            losses, taken = run_sgd(
                steps,
                some,
                last_epoch=order.epochs - 1,
                watch=watch,
                uniform=uniform,
                programs=recorded,
                comparison=comparison,
            )
            models.check_constant(module, parts)
            trained = parts.whole.empty() if vectors.personal else out
            network.tensors(parts).row.write(trained)
            if vectors.personal:
                vectors.end(trained, out)
            finish(experiment, vectors, made.local, order, node=self._node, steps=taken)
        return float(losses), taken

    def _recorded(
        self, made: PreparedTraining, network: Network, steps: LocalSteps, *, epochs: int
    ) -> tuple[Mapping[int, Program | None], Comparison | None]:
        """Return the recorded steps of a training, and what compares them if they run own code."""
        found = made.source.recorded
        if not any(found.programs.values()):
            return NO_PROGRAMS, None
        if found.form is not None:  # the module of another call may be another one
            if form_of(self._experiment, network.module) != found.form:
                return NO_PROGRAMS, None
            return found.programs, None
        count = epochs * self.steps_in_epoch(made.local)
        hidden = hidden_in(self._experiment, network.module, steps.objective)
        return found.programs, Comparison(count, hidden)

    @property
    def privacy(self) -> PrivacySettings:
        return self._experiment.tiers[-1].privacy

    def steps_in_epoch(self, local: LocalDataset) -> int:
        rate = self.privacy.sampling_rate
        if rate is not None:
            return steps_in_epoch(rate)
        return len(local.sizes(self._experiment.training.batch_size))

    def gradient_noise(
        self, local: LocalDataset, key: bytes, local_round: int
    ) -> GradientNoise | None:
        """Return the noise of DP-SGD, None without."""
        privacy = self.privacy
        experiment = self._experiment
        if not privacy.on_samples or privacy.clip_norm is None:
            return None
        noise = noise_of(key, seed=experiment.seed, node=self._node, number=local_round)
        expected = None
        if privacy.sampling_rate is not None:
            expected = privacy.sampling_rate * len(local.samples)
        return GradientNoise(privacy.clip_norm, privacy.multiplier, noise, expected)

    def _batches(
        self, local: LocalDataset, private: GradientNoise | None, *, epochs: int, local_round: int
    ) -> Batches:
        """Return the batches of a training."""
        rate = self.privacy.sampling_rate
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

    def exhausted(self) -> RunFailed:
        """Return the error of a lack of memory, after giving back what can be."""
        if self.memory is not None:
            self.memory.give_back()
        experiment = self._experiment
        problem = f"{self._accelerator} has not enough free memory to train {experiment.model.name}"
        return RunFailed(
            f"{problem} with training.batch_size = {experiment.training.batch_size}. Use a smaller "
            "batch size, fewer trainings at once on this accelerator, or --accelerator cpu."
        )

    def synchronise(self) -> None:
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

    def move(self, network: Network) -> None:
        """Move a user's own module, which each training has anew, to the accelerator."""
        if network.kept is None and self._accelerator.type != "cpu":
            network.module.to(self._accelerator)

    def release(self, network: Network) -> None:
        """Drop gradients and what this process holds of the accelerator beyond its share."""
        weights = network.kept.weights if network.kept else network.module.parameters()
        for weight in weights:
            weight.grad = None
        if self.memory is not None:
            self.memory.end()
