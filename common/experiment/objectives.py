"""The `training.objective` tables of an experiment: one per objective, selected by `name`.

The formulas and their sources are in `device/training/objectives/`, one file per objective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from common.experiment.own import OwnName, OwnSettings
from common.experiment.tables import Positive, Selected, SettingsTable


class ObjectiveTable(SettingsTable):
    """The settings of an objective. `keeps`: the vectors, float32 [D] each, that a device keeps from task to task.

    `rule`: that of the devices' tier which it needs.
    """

    keeps: ClassVar[Sequence[str]] = ()
    rule: ClassVar[str | None] = None

    name: str  # the objective

    @property
    def remembers(self) -> bool:
        """Whether a device has state that persists between its tasks."""
        return bool(self.keeps)

    @property
    def proximal(self) -> float:
        """The weight of a proximal term, 0 without."""
        return 0.0


class CrossEntropy(ObjectiveTable):
    """The mean loss of a batch, and nothing else. The name is that of the default loss; omit it for another."""

    name: Literal["cross_entropy"] = "cross_entropy"  # the objective


class FedProx(ObjectiveTable):
    """The loss and a proximal term: mu / 2 times the squared distance to the parameters received."""

    name: Literal["fedprox"] = "fedprox"  # the objective
    mu: Annotated[float, Field(ge=0)] = 0.01  # weight of the term; 0 is the loss alone

    @property
    def proximal(self) -> float:
        """The weight of the term."""
        return self.mu


class FedSAM(ObjectiveTable):
    """The loss with sharpness-aware minimisation: each gradient is taken at parameters moved up the slope."""

    name: Literal["fedsam"] = "fedsam"  # the objective
    rho: Annotated[float, Field(ge=0)] = 0.1  # L2 norm of that move, over all parameters; 0 is the loss alone


class ScaffoldCorrection(ObjectiveTable):
    """The loss, each gradient corrected by the difference of the devices' control variate and one's own."""

    keeps = ("own_control",)
    rule = "scaffold"

    name: Literal["scaffold"] = "scaffold"  # the objective


class DynamicRegulariser(ObjectiveTable):
    """The loss with a dynamic regulariser, by which the devices' optima become those of the whole."""

    keeps = ("own_gradient",)
    rule = "feddyn"

    name: Literal["feddyn"] = "feddyn"  # the objective
    alpha: Annotated[float, Field(ge=0)] = 0.01  # weight of the regulariser; 0 is the loss alone


class ModelContrast(ObjectiveTable):
    """The loss and a contrast of features: near the received model's, far from the device's previous ones."""

    keeps = ("previous",)

    name: Literal["moon"] = "moon"  # the objective
    mu: Annotated[float, Field(ge=0)] = 1.0  # weight of the term; 0 is the loss alone
    temperature: Positive = 0.5  # by which the differences of cosines are divided


class GeneratedFeatures(ObjectiveTable):
    """The loss of classes, and two terms for features that the parent's generator made of labels."""

    rule = "fedgen"

    name: Literal["fedgen"] = "fedgen"  # the objective
    alpha: Annotated[float, Field(ge=0)] = 0.2  # weight of the cross-entropy of generated features of random labels
    beta: Annotated[float, Field(ge=0)] = 0.2  # weight of the divergence from the prediction for generated features


class OwnObjective(ObjectiveTable, OwnSettings):
    """An objective of the user's own; the other keys are its keywords."""

    name: OwnName  # the class, `package.module:Name`

    @property
    def remembers(self) -> bool:
        """Whether a device has state that persists: always, it may have some."""
        return True


OBJECTIVES: Final[Mapping[str, type[ObjectiveTable]]] = MappingProxyType(
    {
        table.model_fields["name"].default: table
        for table in (
            *(CrossEntropy, FedProx, FedSAM, ScaffoldCorrection, DynamicRegulariser),
            *(ModelContrast, GeneratedFeatures),
        )
    }
)


ObjectiveSettings = Annotated[ObjectiveTable, Selected(OBJECTIVES, "common.experiment.objectives:OwnObjective")]
