"""FedGen's generator of features: its tensors, and what devices receive of it.

    z = output relu(batch norm(weight [noise | one-hot label] + bias)) + output_bias

`noise` Z uniform numbers, `hidden` H, features F: the inputs of the model's head, a linear layer [C, F] of C classes.
Devices receive it at its running statistics, where batch norm is linear: biases are the last columns of
`generator_hidden` [H, Z + C + 1] and `generator_features` [F, H + 1]. Zeros: there is no generator yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

from common.errors import InvalidExperiment
from common.experiment.refined_rules import FEATURES, HIDDEN, LABEL_COUNTS
from common.lazy import np, npt
from common.model.layout import Entry, ModelLayout, Row, Section

BATCH_NORM_EPSILON: Final = 1e-5  # torch's

Floats: TypeAlias = "npt.NDArray[np.float32]"


def head_of(layout: ModelLayout) -> tuple[Entry, Entry | None]:
    """Return the weight [C, F] and the bias [C] of a model's last linear layer. Raises InvalidExperiment."""
    named = {entry.name: entry for entry in layout.entries if entry.section is Section.PARAMETER}
    weights = [entry for entry in named.values() if entry.name.endswith("weight") and len(entry.shape) == 2]
    if not weights:
        problem, remedy = "it has no linear layer, whose inputs are the features", "Use another model."
        raise InvalidExperiment("model.name", "", problem, remedy)
    return weights[-1], named.get(f"{weights[-1].name.removesuffix('weight')}bias")


@dataclass(frozen=True)
class GeneratorLayout:
    """The sizes of a generator, and the place of its tensors in a row that also has a child's head and labels."""

    noise: int
    hidden: int
    features: int
    classes: int

    @classmethod
    def of(cls, model: ModelLayout, *, noise: int, hidden: int) -> GeneratorLayout:
        """Return the layout for the head of a model. Raises InvalidExperiment."""
        classes, features = head_of(model)[0].shape
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
        """The layout of a row: the generator, a child's head, and the counts of its samples' labels."""
        head = {"head": (self.classes, self.features), "head_bias": (self.classes,), LABEL_COUNTS: (self.classes,)}
        shapes = {**self.generator, **head}
        return ModelLayout.build([(name, shape, Section.PARAMETER) for name, shape in shapes.items()])

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
            HIDDEN: np.column_stack([factor[:, None] * tensors["weight"], offset]).astype(np.float32),
            FEATURES: np.column_stack([tensors["output"], tensors["output_bias"]]).astype(np.float32),
        }
