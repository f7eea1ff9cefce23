"""Local training on a device: SGD over the device's own samples, from one flat model into another.

On a CPU the result depends on the arguments alone, bit for bit: one thread per training, a fresh optimiser, no
process-global generator. Several trainers may live in one process and train at the same time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from common.aggregation.mixing import Floats
from common.errors import InvalidExperiment, RunFailed
from common.experiment import schema
from common.experiment.objectives import CrossEntropy
from common.learning import models
from common.learning.computing import first_line, out_of_memory, resolve_accelerator, set_up
from common.learning.inputs import Inputs
from common.learning.nets.layers import reseed
from common.model.layout import ModelLayout, Row
from device.jobs import Cancelled, LocalResult, Progress
from device.training.batches import LocalDataset, batches, dropout_seed, load_local_dataset, uniform_numbers
from device.training.network import Network, network_of
from device.training.objectives.table import objective_of
from device.training.sgd import run_sgd
from device.training.updates import finish, vectors_of
from device.vectors import TaskVectors

__all__ = ["Cancelled", "LocalResult", "Progress", "Trainer", "resolve_accelerator"]

PROGRESS_S = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    network: Network
    vectors: TaskVectors
    local: LocalDataset
    draws: int


class Trainer:
    """Trains one device's model; call `prepare` first, then `train` any number of times, one at a time."""

    def __init__(
        self,
        experiment: schema.Experiment,
        *,
        node: str,
        accelerator: str,
        networks: MutableMapping[Inputs, Network] | None = None,
    ) -> None:
        """Check the node and the accelerator ('cpu', 'cuda', 'cuda:N', 'auto'). Raises InvalidExperiment.

        `networks` are shared by trainers of one experiment and accelerator that train one after another.
        """
        names = experiment.tree.devices
        if node not in names:
            raise InvalidExperiment(
                "topology.devices", node, "the experiment has no device of this name", f"It has {', '.join(names)}."
            )
        self._experiment = experiment
        self._node = node
        self._accelerator = resolve_accelerator(accelerator)
        self._networks = {} if networks is None else networks
        self._made: _Prepared | None = None

    def prepare(self) -> None:
        """Load the data, select this device's samples and build the model. Takes seconds. Raises InvalidExperiment."""
        experiment, accelerator = self._experiment, self._accelerator
        set_up(accelerator, experiment.training)
        objective = objective_of(experiment.training)  # one's own that cannot be built ends here
        local = load_local_dataset(experiment, self._node, accelerator=accelerator)
        if local.inputs not in self._networks:
            self._networks[local.inputs] = network_of(experiment, local.inputs, accelerator=accelerator)
        network = self._networks[local.inputs]
        vectors = vectors_of(experiment, self._node, network.layout)
        self._made = _Prepared(network, vectors, local, objective.draws(vectors.shapes, local.inputs.classes))
        if experiment.training.compile:
            self._compile()

    @property
    def layout(self) -> ModelLayout:
        """The model's layout, once prepared."""
        return self._prepared.network.layout

    @property
    def vectors(self) -> TaskVectors:
        """The vectors behind the models of this device's tasks, once prepared."""
        return self._prepared.vectors

    @property
    def samples(self) -> int:
        """The number of this device's training samples, once prepared."""
        return len(self._prepared.local.samples)

    @property
    def partition(self) -> str:
        """The digest of the whole data split, once prepared; empty if nothing is split."""
        return self._prepared.local.partition

    def train(
        self, row: Row, out: Row, *, epochs: int, local_round: int, progress: Progress, cancelled: threading.Event
    ) -> LocalResult:
        """Train the model in `row` for `epochs` and write it into `out`; both have `vectors` behind the model.

        `row` is read-only. `local_round` counts local rounds over the whole run: global round * local rounds + i.
        `progress(steps_done, steps_total)` is called from this thread every half second and at the end. Raises
        Cancelled, RunFailed if the accelerator's memory does not suffice, and InvalidExperiment if training should be
        deterministic and cannot be. The trainer can be used again after any of these.
        """
        made = self._prepared
        module, layout = made.network.module, made.network.layout
        exhausted = False
        set_up(self._accelerator, self._experiment.training)
        start, cpu_start = time.monotonic(), time.thread_time()
        try:
            models.read_row(module, layout, row)
            self._move_to(self._accelerator)
            reseed(module, dropout_seed(self._experiment, node=self._node, local_round=local_round), self._accelerator)
            vectors = made.vectors.read(row)
            loss, steps = self._run_sgd(
                vectors, epochs=epochs, local_round=local_round, progress=progress, cancelled=cancelled
            )
            self._move_to("cpu")
            models.write_row(module, layout, out)
            finish(self._experiment, made.vectors, made.local, row, out, steps=steps, local_round=local_round)
        except RuntimeError as error:
            if self._experiment.training.deterministic and "deterministic" in str(error):
                raise _undetermined(error) from None
            if not out_of_memory(error):
                raise
            exhausted = True  # raised below: this exception's traceback references the tensors that must be freed
        finally:
            self._release()
        train_s, cpu_s = time.monotonic() - start, time.thread_time() - cpu_start
        if exhausted:
            raise self._exhausted()
        return LocalResult(self.samples, loss, steps, train_s, wait_s=0.0, cpu_s=cpu_s)

    @property
    def _prepared(self) -> _Prepared:
        if self._made is None:
            raise RuntimeError("call Trainer.prepare first")
        return self._made

    def _run_sgd(
        self,
        vectors: Mapping[str, Floats],
        *,
        epochs: int,
        local_round: int,
        progress: Progress,
        cancelled: threading.Event,
    ) -> tuple[float, int]:
        """Return the last epoch's mean loss and the number of steps."""
        made, network, experiment = self._prepared, self._prepared.network, self._experiment
        total = epochs * -(-self.samples // experiment.training.batch_size)
        reported = time.monotonic()

        def watch(steps: int) -> None:
            nonlocal reported
            now = time.monotonic()
            if now - reported >= PROGRESS_S:
                self._synchronise()  # steps that are only queued are no progress
                progress(steps, total)
                reported = now
            if cancelled.is_set():
                raise Cancelled

        losses, steps = run_sgd(
            network.forward,
            list(network.module.train().parameters()),
            batches(made.local, experiment, node=self._node, epochs=epochs, local_round=local_round),
            training=experiment.training,
            learning_rate=experiment.learning_rate_in(local_round),
            last_epoch=epochs - 1,
            watch=watch,
            buffers=list(network.module.buffers()),
            vectors={name: self._tensors(name, vector) for name, vector in vectors.items()},
            features=network.features,
            captured=network.captured,
            uniform=uniform_numbers(
                experiment, made.draws, node=self._node, local_round=local_round, device=self._accelerator
            ),
            head=network.head,
        )
        loss = float(losses) / self.samples
        progress(steps, total)
        return loss, steps

    def _tensors(self, name: str, vector: Floats) -> list[Tensor]:
        """Return a vector as tensors: one of length D like the parameters, in their order, another one as it is."""
        parts = self._prepared.vectors.split(name, vector)
        if name in parts:
            return [torch.from_numpy(vector.copy()).to(self._accelerator)]
        found = []
        for parameter, weight in self._prepared.network.module.named_parameters():
            part = torch.from_numpy(parts[parameter].copy())
            found.append(torch.empty_like(weight, requires_grad=False).copy_(part))
        return found

    def _compile(self) -> None:
        """Take a step with a batch of each size, so that no round's seconds include the compiler's.

        Each training begins with another model, so the steps have no effect. Only the model is compiled, and any
        objective calls it: cross-entropy needs no vectors.
        """
        made, size = self._prepared, self._experiment.training.batch_size
        training = self._experiment.training.model_copy(update={"objective": CrossEntropy()})
        try:
            self._move_to(self._accelerator)
            reseed(made.network.module, 0, self._accelerator)
            sizes: list[tuple[int, Tensor, Tensor]] = []
            for count in {min(size, self.samples), self.samples % size or size}:
                some = made.local.samples[:count]
                inputs = made.local.normalise(made.local.images.index_select(0, some))
                sizes.append((0, inputs, made.local.labels.index_select(0, some)))
            run_sgd(
                made.network.forward,
                list(made.network.module.parameters()),
                sizes,
                training=training,
                learning_rate=training.learning_rate,
                last_epoch=0,
                watch=lambda _: None,
                buffers=list(made.network.module.buffers()),
            )
        except RuntimeError as error:  # base of the compiler's errors
            if out_of_memory(error):
                raise self._exhausted() from None
            problem = f"torch.compile fails: {first_line(error)}"
            remedy = "Install a C++ compiler (apt install g++), on a GPU Triton too, or set it to false."
            raise InvalidExperiment("training.compile", True, problem, remedy) from None
        finally:
            self._release()

    def _exhausted(self) -> RunFailed:
        return RunFailed(
            f"{self._accelerator} has not enough free memory to train {self._experiment.model.name} with "
            f"training.batch_size = {self._experiment.training.batch_size}. Use a smaller batch size, fewer "
            "trainings at once on this accelerator, or --accelerator cpu."
        )

    def _synchronise(self) -> None:
        if self._accelerator.type == "cuda":
            torch.cuda.synchronize(self._accelerator)

    def _move_to(self, where: torch.device | str) -> None:
        if self._accelerator.type != "cpu":  # torch would check every tensor of the module
            self._prepared.network.module.to(where)

    def _release(self) -> None:
        """Drop gradients and release the accelerator's memory, because other processes may train on it too."""
        for weight in self._prepared.network.module.parameters():
            weight.grad = None
        self._move_to("cpu")
        if self._accelerator.type == "cuda":
            torch.cuda.empty_cache()


def _undetermined(error: RuntimeError) -> InvalidExperiment:
    operation = str(error).partition(" does not have")[0]
    return InvalidExperiment(
        "training.deterministic",
        True,
        f"{operation} has no deterministic form on this accelerator",
        "Set it to false, use another model, or --accelerator cpu.",
    )
