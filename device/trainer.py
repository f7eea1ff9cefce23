"""Local training on a device: SGD over the device's own samples, from one row into another.

On a CPU the result depends on the arguments alone, bit for bit: one thread per training, a fresh optimiser,
no process-global generator. Several trainers may live in one process and train at the same time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.sgd import sgd

from common import spec
from common.errors import InvalidExperiment, RunFailed
from common.layout import ModelLayout, Row
from common.learning import datasets, models, splits
from common.learning.nets.layers import reseed
from common.randomness import Purpose, generator, torch_seed
from device.slots import Cancelled, Slots

__all__ = ["Cancelled", "LocalResult", "Slots", "Trainer", "resolve_accelerator"]

PROGRESS_S = 0.5

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LocalResult:
    """What one local round gave: `loss` is the sample-weighted mean over its last epoch."""

    samples: int
    loss: float
    steps: int
    train_s: float
    wait_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """`samples` int64 [n] are this device's places in `images` and `labels`, on the accelerator."""

    module: nn.Module
    layout: ModelLayout
    images: Tensor
    labels: Tensor
    samples: Tensor
    normalise: datasets.Normalise


class Trainer:
    """Trains one device's model; `prepare` first, then `train` any number of times, one at a time.

    `partition`: once prepared, the digest of the whole split of the data, empty where nothing is split.
    """

    def __init__(self, experiment: spec.Experiment, *, node: str, accelerator: str, slots: Slots) -> None:
        """Check the node and the accelerator ('cpu', 'cuda', 'cuda:N', 'auto'). Raises InvalidExperiment."""
        names = experiment.topology.device_names()
        if node not in names:
            raise InvalidExperiment(
                "topology.devices", node, "the experiment has no device of this name", f"It has {', '.join(names)}."
            )
        self._experiment = experiment
        self._node = node
        self._place = names.index(node)
        self._accelerator = resolve_accelerator(accelerator)
        self._slots = slots
        self._made: _Prepared | None = None
        self.partition = ""

    def prepare(self) -> None:
        """Load the data, find this device's part and build the model. Takes seconds. Raises InvalidExperiment."""
        _use_one_thread(self._accelerator)
        experiment, accelerator = self._experiment, self._accelerator
        dataset = datasets.load(experiment.data, node=self._node)
        samples = torch.arange(len(dataset.train_labels))
        if experiment.data.dataset != "folder":  # whose images are the device's own, every one
            split = splits.split_of(experiment, node=self._node)
            samples, self.partition = torch.from_numpy(split.parts[self._place]), split.digest
        images, labels = dataset.train_images, dataset.train_labels
        if accelerator.type != "cpu":
            images, labels = images[samples].to(accelerator), labels[samples].to(accelerator)
            samples = torch.arange(len(samples), device=accelerator)
        module = models.build(experiment.model.name, experiment.seed, inputs=dataset.inputs)
        self._made = _Prepared(
            module.to(memory_format=torch.channels_last) if accelerator.type == "cpu" else module,
            models.layout_of(module),
            images,
            labels,
            samples,
            dataset.normaliser(accelerator),
        )

    @property
    def layout(self) -> ModelLayout:
        """The model's layout, once prepared."""
        return self._prepared.layout

    @property
    def samples(self) -> int:
        """The number of this device's training samples, once prepared."""
        return len(self._prepared.samples)

    def train(
        self, row: Row, out: Row, *, epochs: int, round_: int, progress: Progress, cancelled: threading.Event
    ) -> LocalResult:
        """Train the model in `row` for `epochs` and write it into `out`, both uint8 [row_bytes].

        `row` is only read. `progress(steps_done, steps_total)` is called from this thread every half second
        and at the end. Raises Cancelled, and RunFailed when the accelerator's memory does not suffice; the
        trainer can be used again after either.
        """
        made = self._prepared
        exhausted = False
        with self._slots.acquire(cancelled) as wait_s:
            start = time.monotonic()
            try:
                models.read_row(made.module, made.layout, row)
                self._move_to(self._accelerator)
                reseed(made.module, self._dropout_seed(round_), self._accelerator)
                order = self._batches(epochs, round_)
                loss, steps = self._descend(order, epochs=epochs, progress=progress, cancelled=cancelled)
                self._move_to("cpu")
                models.write_row(made.module, made.layout, out)
            except torch.OutOfMemoryError:
                exhausted = True  # raised below: this exception's traceback holds the tensors that must go
            finally:
                self._release()
            train_s = time.monotonic() - start
        if exhausted:
            raise RunFailed(
                f"{self._accelerator} has not enough free memory to train {self._experiment.model.name} with "
                f"training.batch_size = {self._experiment.training.batch_size}. Use a smaller batch size, fewer "
                "trainings at once on this accelerator, or --accelerator cpu."
            )
        return LocalResult(self.samples, loss, steps, train_s, wait_s)

    @property
    def _prepared(self) -> _Prepared:
        if self._made is None:
            raise RuntimeError("call Trainer.prepare first")
        return self._made

    def _dropout_seed(self, round_: int) -> int:
        return torch_seed(self._experiment.seed, Purpose.DROPOUT, self._node, round_)

    def _batches(self, epochs: int, round_: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (epoch, indices int64 [b] into the images): a new order each epoch, the last batch kept."""
        draw = generator(self._experiment.seed, Purpose.BATCHES, self._node, round_)
        samples = self._prepared.samples
        for epoch in range(epochs):
            order = torch.from_numpy(draw.permutation(len(samples))).to(samples.device)
            for batch in torch.split(samples[order], self._experiment.training.batch_size):
                yield epoch, batch

    def _descend(
        self, batches: Iterator[tuple[int, Tensor]], *, epochs: int, progress: Progress, cancelled: threading.Event
    ) -> tuple[float, int]:
        """Take one step of SGD for each batch; return the last epoch's mean loss and the number of steps."""
        _use_one_thread(self._accelerator)
        made, training = self._prepared, self._experiment.training
        module, images, labels = made.module.train(), made.images, made.labels
        weights: list[Tensor] = list(module.parameters())
        # The functional form, since building an Optimizer imports torch's compiler: 1.3 s and 150 MB.
        momenta = [torch.zeros_like(weight) if training.momentum else None for weight in weights]
        last_loss = torch.zeros((), dtype=torch.float64, device=self._accelerator)
        total = epochs * -(-self.samples // training.batch_size)
        steps = 0
        reported = time.monotonic()
        for epoch, batch in batches:
            if cancelled.is_set():
                raise Cancelled
            logits = module(made.normalise(images.index_select(0, batch)))
            loss = functional.cross_entropy(logits, labels.index_select(0, batch))
            torch.autograd.backward(loss)
            with torch.no_grad():
                # Fused SGD goes astray where a gradient's strides differ from its weight's; those that
                # autograd.backward leaves in .grad never do, those of torch.autograd.grad may.
                # A weight without gradient, as of a layer that is never called, stays as it is.
                used = [i for i, weight in enumerate(weights) if weight.grad is not None]
                sgd(
                    [weights[i] for i in used],
                    [grad for weight in weights if (grad := weight.grad) is not None],
                    [momenta[i] for i in used],
                    fused=True,
                    lr=training.learning_rate,
                    momentum=training.momentum,
                    weight_decay=training.weight_decay,
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                )
            for weight in weights:
                weight.grad = None
            if epoch == epochs - 1:
                last_loss.add_(loss.detach(), alpha=len(batch))
            steps += 1
            now = time.monotonic()
            if now - reported >= PROGRESS_S:
                self._synchronise()  # steps that are only queued are no progress
                progress(steps, total)
                reported = now
        mean_loss = float(last_loss) / self.samples
        progress(steps, total)
        return mean_loss, steps

    def _synchronise(self) -> None:
        if self._accelerator.type == "cuda":
            torch.cuda.synchronize(self._accelerator)

    def _move_to(self, where: torch.device | str) -> None:
        if self._accelerator.type != "cpu":  # torch would look at every tensor of the module
            self._prepared.module.to(where)

    def _release(self) -> None:
        """Drop gradients and give the accelerator's memory back, for other processes may train on it too."""
        for weight in self._prepared.module.parameters():
            weight.grad = None
        self._move_to("cpu")
        if self._accelerator.type == "cuda":
            torch.cuda.empty_cache()


def resolve_accelerator(name: str) -> torch.device:
    """Return the device that 'cpu', 'cuda', 'cuda:N' or 'auto' means here. Raises InvalidExperiment."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if gpus else "cpu"
    there = {"cpu": torch.device("cpu")}
    there.update({f"cuda:{i}": torch.device("cuda", i) for i in range(gpus)})
    chosen = there.get("cuda:0" if name == "cuda" else name)
    if chosen is None:
        raise InvalidExperiment(
            "--accelerator", name, "this machine has no such accelerator", f"It has {', '.join(there)}; or say auto."
        )
    return chosen


def _use_one_thread(accelerator: torch.device) -> None:
    """Make this thread compute alone: sums then never depend on how many cores there are.

    The setting is each thread's own once the thread has computed, so it is looked at before every training.
    """
    if accelerator.type == "cpu" and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
