"""The vectors behind the models of a device's tasks, float32, and what an objective makes of them.

    row = [ model | sent by the parent | kept by the device | personal arrays ]
    out = [ model | returned to the parent | kept by the device | personal arrays ]

Those that are kept are the state of the device's objective, [D], zeros at first, D being the
model's trainable columns. The personal arrays (`common/model/parts.py`) are zeros before a device
has any. It trains on a row in which they are part of the model (`TaskVectors.inner`):

    row = [ model with personal arrays | sent by the parent | kept by the device ]

There each vector of length D has a number for each personal column, too: 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedstrata.common.errors import InvalidExperiment, RefusedModel
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.methods.fednova import gradient_weights
from fedstrata.common.methods.mixing import Floats
from fedstrata.common.methods.rule import link_layouts
from fedstrata.common.model.layout import LinkLayouts, ModelLayout, Row, Section
from fedstrata.common.model.parts import ModelParts
from fedstrata.common.runtime.upload_encoder import UploadEncoder
from fedstrata.common.settings import own
from fedstrata.device.jobs import Order
from fedstrata.device.training.batches import LocalDataset
from fedstrata.device.training.objectives.objective import LocalUpdate
from fedstrata.device.training.objectives.objectives_by_name import OBJECTIVE_KEY, objective_of


@dataclass(frozen=True)
class TaskVectors:
    """What an experiment's tasks have behind the model: what the links carry, and the names of what
    is kept.

    `parts`: of the model, if any is personal.
    """

    links: LinkLayouts
    kept: tuple[str, ...] = ()
    parts: ModelParts | None = None

    @property
    def layout(self) -> ModelLayout:
        """The layout of the model."""
        return self.links.model

    @cached_property
    def received(self) -> ModelLayout:
        """The layout of `row`."""
        return self.links.down.with_extras(dict.fromkeys(self.kept, (self.layout.parameters,)))

    @cached_property
    def returned(self) -> ModelLayout:
        """The layout of `out`."""
        return self.links.up.with_extras(dict.fromkeys(self.kept, (self.layout.parameters,)))

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the vectors of `row`, by name."""
        return self.received.extra_shapes

    @property
    def expected(self) -> tuple[str, ...]:
        """The names of the vectors of `out`."""
        return tuple(self.returned.extra_shapes)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the vectors and the personal arrays that are kept."""
        kept_bytes = 4 * self.layout.parameters * len(self.kept)
        if self.parts is not None:
            kept_bytes += self.parts.kept_bytes
        return kept_bytes

    @cached_property
    def inner(self) -> TaskVectors:
        """Those of training, whose model has the personal arrays; the same object without any."""
        if self.parts is None:
            return self
        whole = self.parts.whole

        def widened(layout: ModelLayout) -> ModelLayout:
            shapes = dict(layout.extra_shapes)
            for name, shape in shapes.items():
                if shape == (self.layout.parameters,):
                    shapes[name] = (whole.parameters,)
            return whole.with_extras(shapes)

        links = LinkLayouts(whole, widened(self.links.down), widened(self.links.up))
        return TaskVectors(links, self.kept)

    @property
    def personal(self) -> frozenset[str]:
        """The names of the personal arrays."""
        if self.parts is None:
            return frozenset()
        return frozenset(self.parts.personal)

    def begin(self, row: Row) -> Row:
        """Return a task's row as training has it, read-only."""
        if self.parts is None:
            return row
        inner = self.inner
        long = (self.layout.parameters,)
        found = np.zeros(inner.received.row_bytes, np.uint8)
        self.parts.join(
            row[: self.layout.model_bytes],
            row[-self.parts.kept_bytes :],
            found[: inner.layout.model_bytes],
        )
        given = self.read(row)
        for name, place in inner.read(found).items():
            if given[name].shape == long:
                place[self.parts.columns] = given[name]
            else:
                place[...] = given[name]
        return found

    def trained(self, out: Row) -> Row:
        """Return the model in a task's `out` as training has it."""
        if self.parts is None:
            return out
        found = np.zeros(self.inner.layout.model_bytes, np.uint8)
        self.parts.join(out[: self.layout.model_bytes], out[-self.parts.kept_bytes :], found)
        return found

    def end(self, model: Row, out: Row) -> None:
        """Write a trained model, as training has it: what is returned of it, and what is kept."""
        if self.parts is None:
            out[: model.size] = model
        else:
            self.parts.split(model, out[: self.layout.model_bytes], out[-self.parts.kept_bytes :])

    def read(self, row: Row) -> dict[str, Floats]:
        """Return the vectors of a row by name, as views."""
        return self.received.extras_of(row)

    def write(self, out: Row, found: Mapping[str, Floats]) -> None:
        """Write the vectors that are returned, and those that are kept. Raises KeyError,
        ValueError.
        """
        for name, place in self.returned.extras_of(out).items():
            place[...] = found[name]

    def split(self, name: str, vector: Floats) -> dict[str, Floats]:
        """Return a vector's parts: one of shape [D] has a part for each parameter, by its name and
        in its shape.

        The parts are in the order of the parameters in the row. Other vectors are one part. A
        vector may have more dimensions before its own.
        """
        if self.shapes[name] != (self.layout.parameters,):
            return {name: vector}
        found = {}
        for entry in self.layout.entries:
            if entry.section is Section.PARAMETER:
                part = vector[..., entry.start : entry.stop]
                found[entry.name] = part.reshape((*vector.shape[:-1], *entry.shape))
        return found


def vectors_of(experiment: Experiment, node: str, parts: ModelParts) -> TaskVectors:
    """Return the vectors of a device's tasks. Raises InvalidExperiment."""
    rule = experiment.tier_above(node).aggregation
    objective = objective_of(experiment.training)
    name = experiment.training.objective.name
    for what, given, wanted in (
        ("receives", rule.sends, objective.receives),
        ("returns", rule.returns, objective.returns),
    ):
        if sorted(given) != sorted(wanted):
            has = ", ".join(given) or "nothing"
            needs = ", ".join(wanted) or "nothing"
            problem = f"it {what} {needs} with the model, and the rule {rule.name!r} has {has}"
            remedy = "Name the same vectors in extras_down and extras_up of the rule"
            remedy += ", and in the objective's class."
            raise InvalidExperiment(OBJECTIVE_KEY, name, problem, remedy)
    if own.is_own(name) and (objective.keeps or objective.returns):
        _check_feedback(experiment)
    links = link_layouts(rule, parts.exchanged)
    personal = parts if parts.personal else None
    return TaskVectors(links, tuple(objective.keeps), personal)


def _check_feedback(experiment: Experiment) -> None:
    """Check that the codec has no feedback: an objective of the user's own could not know what the
    parent decodes.
    """
    tier = experiment.tiers[-1]
    if tier.transfer.up.feedback:
        problem = (
            "the objective has vectors, and `finish` would get an uploaded_D without what "
            "was left out before"
        )
        remedy = "Omit it, or use an objective without vectors."
        raise InvalidExperiment(
            f"{experiment.key(tier, 'transfer')}.up.feedback", True, problem, remedy
        )


def finish(
    experiment: Experiment,
    vectors: TaskVectors,
    local: LocalDataset,
    order: Order,
    *,
    node: str,
    steps: int,
) -> None:
    """Write the vectors behind a trained model, which the objective makes of those that training
    began with.
    """
    if vectors.expected:
        row = order.row
        out = order.out
        local_round = order.local_round
        columns = slice(0, vectors.layout.parameters)
        rate = experiment.learning_rate_in(local_round)
        encoder = UploadEncoder.of(experiment, node, vectors.layout)
        uploaded = _uploaded(encoder, row, out, local_round=local_round)
        received_D, trained_D, uploaded_D = (
            vectors.layout.floats(each)[columns] for each in (row, out, uploaded)
        )
        by_sgd = experiment.training.by_sgd
        (weight,) = (
            gradient_weights(np.array([steps]), experiment.training, rate) if by_sgd else (np.nan,)
        )
        given = vectors.read(row)
        counts = local.label_counts()
        update = LocalUpdate(
            received_D, trained_D, uploaded_D, given, steps, rate, float(weight), counts
        )
        names = {OBJECTIVE_KEY: experiment.training.objective.name}
        with own.guarded(names, everything=True):
            found = dict(objective_of(experiment.training).finish(update))
        if absent := set(vectors.expected) - found.keys():
            problem = f"its finish returns no {', '.join(sorted(absent))}"
            remedy = "Return each vector that it keeps or returns."
            raise InvalidExperiment(
                OBJECTIVE_KEY, experiment.training.objective.name, problem, remedy
            )
        with own.guarded(
            names, problem="its finish returns vectors of another form ({})", everything=True
        ):
            vectors.write(out, found)


def _uploaded(encoder: UploadEncoder, row: Row, out: Row, *, local_round: int) -> Row:
    """Return the model in `out` as the parent decodes it."""
    received = row[: encoder.layout.row_bytes]
    trained = out[: encoder.layout.row_bytes]
    try:
        return encoder.decoded(trained, received=received, task=local_round)
    except RefusedModel:
        # it diverged: the parent refuses it, and what is kept of this training is not used
        return out
