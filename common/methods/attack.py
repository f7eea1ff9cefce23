"""What an adversary does in place of honest work: the base of fedstrata's attacks and of a user's
own.

A shipped attack is one file of `attacks/` and a line of `methods_by_name.py`; a user's own is
`attack.name = "mine:Attack"`. The fields of its class are the experiment's keys, pydantic's. What
it does not replace is honest. Everything random comes from the generators that it gets, so a node
that was killed does the same again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final

from pydantic import ValidationError

from fedstrata.common.lazy import np, npt
from fedstrata.common.methods import methods_by_name
from fedstrata.common.methods.mixing import Floats
from fedstrata.common.methods.statistics import Doubles
from fedstrata.common.settings import own
from fedstrata.common.settings.own import OwnName, OwnSettings
from fedstrata.common.settings.tables import NamedTables, Selected, SettingsTable

ATTACK_KEY: Final = "adversaries.attack.name"


@dataclass(frozen=True, slots=True, eq=False)
class LabelledSamples:
    """`images` [n, ...], as the data set has them before normalisation, and `labels`, int64 [n],
    below `classes`.
    """

    images: npt.NDArray[Any]
    labels: npt.NDArray[np.int64]
    classes: int


@dataclass(frozen=True, slots=True, eq=False)
class AttackedUpload:
    """What an adversary knows when it sends a model; models are their trainable columns, float32
    [D].

    `trained_D`: what honest work has made of `received_D`. `known`: with `knows = "colluders"` the
    honest work of all `colluders`, with `knows = "siblings"` that of the honest children; without
    either none. `children`: how many uploads the parent has in this round, 0 if that is not known.
    """

    trained_D: Floats
    received_D: Floats
    chance: np.random.Generator
    known: Sequence[Floats] = ()
    colluders: int = 1
    children: int = 0


class Attack(SettingsTable):
    """Base of attacks. `colludes`: it needs what the experiment's `knows` gives, and all colluders
    send the same.
    """

    colludes: ClassVar[bool] = False

    name: str = ""

    def poison(self, samples: LabelledSamples, chance: np.random.Generator) -> LabelledSamples:
        """Return as many samples on which a device trains in place of its own, which must not be
        written.
        """
        return samples

    def targets(self, tests: LabelledSamples) -> LabelledSamples:
        """Return samples with the labels that the attack wants for them; those predicted so are its
        success.
        """
        return tests

    def upload(self, now: AttackedUpload) -> Floats | Doubles:
        """Return the columns that are sent in place of `now.trained_D`, [D]."""
        return now.trained_D

    def report(self, samples: int, loss: float | None) -> tuple[int, float | None]:
        """Return the samples and the training loss that are reported."""
        return samples, loss

    def dispatch(self, model_D: Floats, chance: np.random.Generator) -> Floats | Doubles:
        """Return the columns that an institution sends to one child in place of its model, [D]."""
        return model_D

    def delay_s(self) -> float:
        """Return the seconds for which a device holds its result back; infinite: it never sends
        one.
        """
        return 0.0

    @property
    def resolved(self) -> Attack:
        """This attack; of a user's own the object of its class, which is imported for that."""
        return self

    def does(self, method: str) -> bool:
        """Return whether it replaces a method."""
        return getattr(type(self.resolved), method) is not getattr(Attack, method)


class OwnAttack(Attack, OwnSettings):
    """An attack of the user's own; the other keys are the fields of its class."""

    name: OwnName  # the class, `package.module:Name`

    @cached_property
    def resolved(self) -> Attack:
        """The attack. Raises InvalidExperiment."""
        found = own.load(ATTACK_KEY, self.name)
        if not (isinstance(found, type) and issubclass(found, Attack)):
            own.refuse(
                ATTACK_KEY,
                self.name,
                "is not a class of Attack",
                "Let it inherit from fedstrata.Attack.",
            )
        with own.guarded({ATTACK_KEY: self.name}):
            try:
                made: Attack = found.model_validate({**self.keywords, "name": self.name})
            except ValidationError as error:
                wrong = error.errors(include_url=False)[0]
                key = ".".join(("adversaries.attack", *map(str, wrong["loc"])))
                own.refuse(key, wrong["input"], f"{self.name}: {wrong['msg']}", "Correct the key.")
        return made


ATTACKS: Final = NamedTables[Attack](methods_by_name.ATTACKS)
AttackSettings = Annotated[Attack, Selected(ATTACKS, methods_by_name.OWN_ATTACK)]


def moved(now: AttackedUpload, factor: float) -> Doubles:
    """Return the model received, and `factor` times the step from it, float64 [D]."""
    received_D = now.received_D.astype(np.float64)
    found: Doubles = received_D + factor * (now.trained_D - received_D)
    return found
