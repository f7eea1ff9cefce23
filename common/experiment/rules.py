"""What the settings of all aggregation rules share, and those of a rule of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from common.errors import InvalidExperiment
from common.experiment.own import OwnName, OwnSettings
from common.experiment.tables import SettingsTable, form

Weights = Literal["data", "uniform"]
Rounds = Annotated[int, Field(ge=0)]
ExtraName = Annotated[str, form(r"^[a-z][a-z0-9_]{0,31}$", "lower-case letters, digits and _, a letter first")]


class RuleSettings(SettingsTable):
    """The settings of a rule. `objective`: that of the devices below, which it needs.

    `selects`: the rule selects the children itself. `buffers`: a round closes with some results, and the others' tasks
    go on. `permutes`: it knows the layers of fedstrata's models. `reads_samples`: what it computes in its refiner's
    process, if it does, needs samples at the node. `step_models`: models that its state and its step take in memory.
    """

    selects: ClassVar[bool] = False
    buffers: ClassVar[bool] = False
    permutes: ClassVar[bool] = False
    reads_samples: ClassVar[bool] = True
    step_models: ClassVar[float] = 0.0
    objective: ClassVar[str | None] = None

    name: str  # the rule

    @property
    def sends(self) -> Sequence[str]:
        """The vectors behind the models that go down, float32; their shapes: `common/methods/extras.py`."""
        return ()

    @property
    def returns(self) -> Sequence[str]:
        """The vectors behind the models that come up, float32."""
        return ()

    @property
    def remembers(self) -> bool:
        """Whether the rule at an institution has state that persists between global rounds."""
        return False

    @property
    def packages(self) -> Sequence[str]:
        """The packages of an extra that the node needs."""
        return ()

    @property
    def refines(self) -> bool:
        """Whether the node computes in a process with torch."""
        return False

    def held_bytes(self, row_bytes: int, *, children: int, taking_part: int, resident_bytes: float) -> float:
        """Return the most that a node holds in memory beside a round's uploads, their mean and the model received.

        `row_bytes`: of a model. `resident_bytes`: of models in a file, what may stay in memory.
        """
        return self.step_models * row_bytes

    @property
    def uploads_least(self) -> int:
        """The uploads that protect a round from wrong ones; with fewer the node keeps its model."""
        return 1

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check the settings against the children that take part in a round, and the uploads that close it.

        Raises InvalidExperiment.
        """


class OwnRule(RuleSettings, OwnSettings):
    """A rule of the user's own; the other keys are its keywords."""

    name: OwnName  # the class, `package.module:Name`
    weights: Weights = "data"  # of the buffers, and of the loss that is reported: shares of the samples, or 1/K
    # Vectors of the rule that devices get with each model.
    extras_down: list[ExtraName] = Field(default_factory=list)
    # Vectors that the devices' objective returns with each model.
    extras_up: list[ExtraName] = Field(default_factory=list)

    @property
    def sends(self) -> Sequence[str]:
        """The vectors behind the models that go down."""
        return self.extras_down

    @property
    def returns(self) -> Sequence[str]:
        """The vectors behind the models that come up."""
        return self.extras_up

    def check(self, key: str, children: int, uploads: int) -> None:
        """Check that no vector is named twice. Raises InvalidExperiment."""
        for direction, names in (("extras_down", self.extras_down), ("extras_up", self.extras_up)):
            if len(set(names)) < len(names):
                raise InvalidExperiment(f"{key}.{direction}", names, "duplicate name", "Name each vector once.")

    @property
    def remembers(self) -> bool:
        """Whether its state persists: always, it may have some."""
        return True
