"""FedGen (Zhu et al. 2021, Algorithm 1): the mean of the uploads, and a generator of features
learned from their heads.

Children receive the generator behind the model (`device/training/objectives/fedgen.py`) and return
the counts of their labels. After each round the generator learns for which features the children's
heads predict a label (`common/methods/baselines/generator.py`), in the node's refiner and without
samples. Its tensors are the rule's state.

    z = output relu(batch norm(weight [noise | one-hot label] + bias)) + output_bias

`noise` Z uniform numbers, `hidden` H, features F: the inputs of the model's head, a linear layer
[C, F] of C classes. Devices receive it at its running statistics, where batch norm is linear:
biases are the last columns of `generator_hidden` [H, Z + C + 1] and `generator_features` [F, H +
1]. Zeros: there is no generator yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from fedstrata import (
    Aggregated,
    ExtrasRule,
    MeanRule,
    ModelLayout,
    RoundModels,
    Rule,
    RuleContext,
    RuleSettings,
    SingleModelRule,
    Uploads,
)

Count = Annotated[int, Field(ge=1)]
Floats: TypeAlias = "npt.NDArray[np.float32]"
Row: TypeAlias = "npt.NDArray[np.uint8]"
Weights = Literal["data", "uniform"]

GENERATOR: Final = "generator"
HIDDEN: Final = "generator_hidden"  # the vectors that devices receive
FEATURES: Final = "generator_features"
LABEL_COUNTS: Final = "label_counts"  # the one that they return
BATCH_NORM_EPSILON: Final = 1e-5  # torch's


class FedGen(RuleSettings):
    """One model: the mean of the uploads; a generator of features, learned from their heads, goes
    down with it.
    """

    objective = "fedgen"
    sends: ClassVar[Sequence[str]] = (HIDDEN, FEATURES)  # the generator's two layers
    # how many samples of each label a device has
    returns: ClassVar[Sequence[str]] = (LABEL_COUNTS,)
    reads_samples: ClassVar[bool] = False  # it learns from the heads

    name: Literal["fedgen"] = "fedgen"  # the rule
    weights: Weights = "data"  # of the mean: shares of the samples, or 1/K
    noise: Count = 100  # uniform numbers that enter the generator, beside the label
    hidden: Count = 512  # units of its hidden layer
    steps: NonNegativeInt = 50  # of Adam after each round; 0: there is no generator
    batch_size: Annotated[int, Field(ge=2)] = 128  # labels in each step
    learning_rate: PositiveFloat = 0.0003  # of Adam
    weight_decay: NonNegativeFloat = 0.01  # of Adam

    @property
    def acts_from(self) -> int:
        """The first round with a generator."""
        return 2

    @property
    def remembers(self) -> bool:
        """Whether there is a generator."""
        return self.refines

    def shapes(self, model: ModelLayout) -> Mapping[str, Sequence[int]]:
        """Return those of the generator's layers, and of the counts."""
        made = GeneratorLayout.of(model, noise=self.noise, hidden=self.hidden)
        return {**made.sent, LABEL_COUNTS: (made.classes,)}

    @property
    def refiner(self) -> str | None:
        """Its computation, unless there is no step."""
        if self.steps:
            return "fedstrata.common.methods.baselines.generator:learn_generator"
        return None

    def build(self, context: RuleContext) -> Rule:
        return GeneratorRule(self, context)


class GeneratorRule(ExtrasRule):
    """A rule of one model whose children receive a generator of features behind the model."""

    def __init__(self, settings: FedGen, context: RuleContext) -> None:
        layout = context.layout
        self._refiner = context.refiner_of(settings)
        self._model = layout
        self._weight, self._bias = layout.head
        self._made = GeneratorLayout.of(layout, noise=settings.noise, hidden=settings.hidden)
        self._generator = np.zeros(self._made.rows.row_bytes, np.uint8)
        self._made.begin(self._generator, context.chance(0, "generator"))
        self._learned = False
        sent = {name: np.zeros(shape, np.float32) for name, shape in self._made.sent.items()}
        rule = SingleModelRule(context, MeanRule(), weights=settings.weights)
        super().__init__(rule, settings, context, sent=sent)

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Aggregate the models, then teach the generator."""
        outcome = super().aggregate(r, uploads)
        if self._refiner is None:
            return outcome
        rows = [self._child(uploads, k) for k in uploads.answered]
        equal = np.full(len(rows), 1 / len(rows))
        facts = self._refiner.refine(
            RoundModels(r, self._made.rows, self._generator, self._generator, rows, equal)
        )
        self._learned = True
        self._publish()
        return replace(outcome, facts={**outcome.facts, **facts})

    def save(self, folder: Path) -> dict[str, object]:
        """Write the generator, and the state of the rule below."""
        (folder / GENERATOR).write_bytes(self._columns.data)
        return {**super().save(folder), "learned": self._learned}

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Restore both."""
        self._columns[:] = np.fromfile(folder / GENERATOR, np.float32)
        self._learned = facts["learned"]
        self._publish()
        super().restore(folder, facts)

    @property
    def _columns(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        return self._made.rows.floats(self._generator)[: self._made.columns]

    def _child(self, uploads: Uploads, k: int) -> Row:
        """Return a child's head and the counts of its labels, uint8 [row_bytes]."""
        row = np.zeros(self._made.rows.row_bytes, np.uint8)
        tensors = self._made.rows.views(row)
        upload = uploads.rows_K[k]
        model = self._model.floats(upload)
        tensors["head"].ravel()[:] = model[self._weight.start : self._weight.stop]
        if self._bias is not None:
            tensors["head_bias"][:] = model[self._bias.start : self._bias.stop]
        tensors[LABEL_COUNTS][:] = self._links.up.extras_of(upload)[LABEL_COUNTS]
        return row

    def _publish(self) -> None:
        """Send the generator from now on, or zeros until it has learned."""
        for name, values in self._made.linear(self._generator).items():
            self._sent[name][:] = values if self._learned else 0


@dataclass(frozen=True)
class GeneratorLayout:
    """The sizes of a generator, and the place of its tensors in a row that also has a child's head
    and labels.
    """

    noise: int
    hidden: int
    features: int
    classes: int

    @classmethod
    def of(cls, model: ModelLayout, *, noise: int, hidden: int) -> GeneratorLayout:
        """Return the layout for the head of a model. Raises InvalidExperiment."""
        classes, features = model.head[0].shape
        return cls(noise, hidden, features, classes)

    @cached_property
    def sent(self) -> Mapping[str, tuple[int, int]]:
        """The shapes of what devices receive."""
        return {
            HIDDEN: (self.hidden, self.noise + self.classes + 1),
            FEATURES: (self.features, self.hidden + 1),
        }

    @cached_property
    def generator(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the generator's tensors."""
        hidden = (self.hidden,)
        return {
            "weight": (self.hidden, self.noise + self.classes),
            "bias": hidden,
            "scale": hidden,
            "shift": hidden,
            "mean": hidden,
            "variance": hidden,
            "output": (self.features, self.hidden),
            "output_bias": (self.features,),
        }

    @cached_property
    def rows(self) -> ModelLayout:
        """The layout of a row: the generator, a child's head, and the counts of its samples'
        labels.
        """
        head = {
            "head": (self.classes, self.features),
            "head_bias": (self.classes,),
            LABEL_COUNTS: (self.classes,),
        }
        shapes = {**self.generator, **head}
        return ModelLayout.build([(name, shape, "parameter") for name, shape in shapes.items()])

    @cached_property
    def columns(self) -> int:
        """The columns of the generator, the first ones of a row."""
        (last,) = (entry for entry in self.rows.entries if entry.name == "output_bias")
        return last.stop

    def begin(self, row: Row, draw: np.random.Generator) -> None:
        """Write a first generator, drawn as torch draws linear layers and batch norm."""
        tensors = self.rows.views(row)
        for weight, bias in (("weight", "bias"), ("output", "output_bias")):
            most = tensors[weight].shape[1] ** -0.5
            for name in (weight, bias):
                tensors[name][:] = draw.uniform(-most, most, tensors[name].shape)
        for name, value in (("scale", 1), ("shift", 0), ("mean", 0), ("variance", 1)):
            tensors[name][:] = value

    def linear(self, row: Row) -> dict[str, Floats]:
        """Return what devices receive of a generator."""
        tensors = {name: values.astype(np.float64) for name, values in self.rows.views(row).items()}
        factor = tensors["scale"] / np.sqrt(tensors["variance"] + BATCH_NORM_EPSILON)
        offset = factor * (tensors["bias"] - tensors["mean"]) + tensors["shift"]
        return {
            HIDDEN: np.column_stack([factor[:, None] * tensors["weight"], offset]).astype(
                np.float32
            ),
            FEATURES: np.column_stack([tensors["output"], tensors["output_bias"]]).astype(
                np.float32
            ),
        }
