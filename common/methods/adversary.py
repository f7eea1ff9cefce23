"""Who attacks: the tables `[[adversaries]]`, and what one of them does at a node in a round.

Whether a node attacks in a round depends on the seed, its name and the round alone, and so does
every random number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf
from typing import Any, Final, Literal, Never

from pydantic import Field

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.lazy import np
from fedstrata.common.methods.attack import (
    ATTACK_KEY,
    Attack,
    AttackedUpload,
    AttackSettings,
    LabelledSamples,
)
from fedstrata.common.methods.mixing import Floats
from fedstrata.common.randomness import Purpose, generator
from fedstrata.common.settings import own
from fedstrata.common.settings.tables import Count, Fraction, Name, SettingsTable, proposal
from fedstrata.common.settings.topology import CLOUD, Tree

KEY: Final = "adversaries"
DATA: Final = ("poison",)  # methods that a device alone can replace,
DEVICES: Final = (*DATA, "delay_s")
PARENTS: Final = ("dispatch",)  # and an institution alone


class Adversaries(SettingsTable):
    """Nodes that attack, and how: those of `nodes`, or all devices `below` a node, or a share of
    these or of all.
    """

    attack: AttackSettings  # what they do, one of the attacks below; a name stands for its table
    nodes: list[Name] = Field(default_factory=list)  # devices and institutions by name
    below: Name | None = None  # all devices below this institution
    # of all devices, or of those `below`: drawn by the seed, at least one
    share: Fraction | None = None
    from_round: Count = 1  # the first global round in which they attack
    probability: Fraction = 1.0  # with which each of them attacks in a round
    # What an attack knows besides its own work: nothing, the honest work of all colluders, which
    # are the adversaries of this table below one parent, or the uploads of their honest siblings.
    # For the latter two the parent's process computes the attack, on the uploads as they came: no
    # other node has them.
    knows: Literal["itself", "colluders", "siblings"] = "itself"

    def placed(
        self, tree: Tree, *, seed: int, place: int, taken: Mapping[str, object]
    ) -> list[str]:
        """Return the nodes; drawn ones are others than those `taken`. Raises InvalidExperiment."""
        given = [name for name in ("nodes", "below", "share") if getattr(self, name)]
        if not given or ("nodes" in given and len(given) > 1):
            problem = "names no adversary" if not given else f"{given[1]} is given, too"
            refuse(
                "nodes",
                self.nodes,
                problem,
                "Give nodes, or below, or share, or both of the latter.",
            )
        for name in [*self.nodes, *([self.below] if self.below else [])]:
            if name not in tree or name == CLOUD:
                remedy = proposal(name, tree.nodes, what="There are")
                refuse(
                    "below" if self.below else "nodes",
                    name,
                    "no institution or device has this name",
                    remedy,
                )
        if self.nodes:
            return self.nodes
        devices = tree.devices
        if self.below is not None:
            inside = set(tree.below(self.below))
            devices = [name for name in devices if name in inside]
            if not devices:
                refuse("below", self.below, "no device is below it", "Name it in nodes.")
        if self.share is None:
            return devices
        free = [name for name in devices if name not in taken]
        order = generator(seed, Purpose.ADVERSARIES, str(place)).permutation(len(free))
        count = max(1, int(self.share * len(devices) + 1e-9))
        return sorted((free[i] for i in order[:count]), key=devices.index)

    def check(self) -> None:
        """Check that the attack has what it needs. Raises InvalidExperiment."""
        attack = self.attack
        alone = self.knows == "itself"
        if attack.resolved.colludes and alone:
            remedy = 'Set knows = "colluders" or "siblings".'
            refuse(
                "knows", self.knows, f"{attack.name} computes with the uploads of others", remedy
            )
        if not alone and not attack.does("upload"):
            refuse(
                "knows", self.knows, f"{attack.name} sends no upload of its own", 'Use "itself".'
            )

    def check_node(self, *, device: bool, learns_classes: bool, buffers: bool) -> None:
        """Check that a node can do it: a device, or an institution. Raises InvalidExperiment.

        `buffers`: its parent's rule has uploads of several rounds.
        """
        name = self.attack.name
        does = self.attack.does
        if buffers and self.knows != "itself":
            problem = "the parent's rule has uploads of several rounds at a time"
            refuse("knows", self.knows, problem, 'Use "itself", or another rule.')
        if any(map(does, PARENTS)) and device:
            refuse(
                "attack.name",
                name,
                "only an institution sends models to others",
                "Name institutions in nodes.",
            )
        if any(map(does, DEVICES)) and not device:
            refuse(
                "attack.name",
                name,
                "only a device can do that",
                "Name devices in nodes, or use below.",
            )
        if any(map(does, DATA)) and not learns_classes:
            problem = (
                "it changes labels, and training.trainer or data.targets has none of fedstrata's"
            )
            refuse("attack.name", name, problem, "Use an attack on uploads.")


@dataclass(frozen=True, slots=True)
class Adversary:
    """An adversary at its node, by the table `settings`. `rounds`: of it in each global round."""

    node: str
    settings: Adversaries
    seed: int
    rounds: int

    @property
    def attack(self) -> Attack:
        """What it does."""
        return self.settings.attack.resolved

    @property
    def hosted(self) -> bool:
        """Whether its parent's process computes what it sends."""
        return self.settings.knows != "itself"

    def acts(self, number: int) -> bool:
        """Return whether it attacks in its local round of this number, over the whole run from
        0.
        """
        settings = self.settings
        if number // self.rounds + 1 < settings.from_round:
            return False
        drawn = generator(self.seed, Purpose.ADVERSARIES, self.node, number)
        return settings.probability == 1 or bool(drawn.random() < settings.probability)

    def poisoned(self, samples: LabelledSamples) -> LabelledSamples:
        """Return the samples on which it trains, always the same ones. Raises InvalidExperiment."""
        with self.guarded():
            found = self.attack.poison(
                samples, generator(self.seed, Purpose.ATTACK, f"{self.node}/samples")
            )
        return self._checked(found, samples, fewer=False)

    def wanted(self, tests: LabelledSamples) -> LabelledSamples:
        """Return the attack's test samples, with the labels that it wants. Raises
        InvalidExperiment.
        """
        with self.guarded():
            found = self.attack.targets(tests)
        return self._checked(found, tests, fewer=True)

    def uploaded(self, number: int, trained_D: Floats, received_D: Floats) -> Floats:
        """Return what it sends in place of its work, float32 [D]. Raises InvalidExperiment."""
        return self.sent(AttackedUpload(trained_D, received_D, self.chance(number)))

    def sent(self, now: AttackedUpload) -> Floats:
        """Return what it sends, knowing more, float32 [D]. Raises InvalidExperiment."""
        return self._columns(lambda: self.attack.upload(now), len(now.trained_D))

    def dispatched(self, number: int, child: str, model_D: Floats) -> Floats:
        """Return the model that it sends to a child in its round of this number, float32 [D].

        Raises InvalidExperiment.
        """
        return self._columns(
            lambda: self.attack.dispatch(model_D, self.chance(number, child)), len(model_D)
        )

    def reported(self, samples: int, loss: float | None) -> tuple[int, float | None]:
        """Return the samples and the loss that it reports. Raises InvalidExperiment."""
        with self.guarded():
            count, value = self.attack.report(samples, loss)
            return int(count), None if value is None else float(value)

    def delay_s(self, number: int) -> float:
        """Return the seconds for which it holds a result back. Raises InvalidExperiment."""
        if not self.acts(number):
            return 0.0
        with self.guarded():
            return max(0.0, float(self.attack.delay_s()))

    def silent(self, number: int) -> bool:
        """Return whether it sends no result. Raises InvalidExperiment."""
        return self.delay_s(number) == inf

    def chance(self, number: int, child: str = "") -> np.random.Generator:
        """Return its random numbers of a local round, for one child if it sends several models."""
        return generator(self.seed, Purpose.ATTACK, self.node + (child and f"/{child}"), number)

    def guarded(self) -> AbstractContextManager[None]:
        """Let an error of a user's own attack be InvalidExperiment."""
        return own.guarded({ATTACK_KEY: self.settings.attack.name})

    def _columns(self, compute: Callable[[], Any], count: int) -> Floats:
        """Return columns as float32. Raises InvalidExperiment unless there are so many.

        They may be infinite, which a parent refuses, unless it has computed them itself.
        """
        with self.guarded(), np.errstate(over="ignore"):
            found = np.asarray(compute(), np.float32)
        if found.shape != (count,):
            name = self.settings.attack.name
            problem = f"returns {list(found.shape)} numbers for {count} columns"
            own.refuse(ATTACK_KEY, name, problem, "Return one number for each column.")
        if self.hosted and not np.isfinite(found).all():
            problem = "computes numbers that are not finite"
            own.refuse(
                ATTACK_KEY, self.settings.attack.name, problem, "Look for a division by zero."
            )
        return found

    def _checked(
        self, found: LabelledSamples, given: LabelledSamples, *, fewer: bool
    ) -> LabelledSamples:
        """Return samples that an attack has made. Raises InvalidExperiment unless they have the
        form of others.
        """
        count = len(found.labels)
        images = found.images
        alike = (
            images.shape == (count, *given.images.shape[1:]) and images.dtype == given.images.dtype
        )
        if not alike or not (fewer or count == len(given.labels)):
            problem = f"makes {count} labels and samples of {images.dtype} {list(images.shape)}"
            wanted = f"of {given.images.dtype} {list(given.images.shape)}"
            own.refuse(ATTACK_KEY, self.settings.attack.name, problem, f"Return samples {wanted}.")
        if count and not 0 <= int(found.labels.min()) <= int(found.labels.max()) < given.classes:
            problem = (
                f"makes labels {int(found.labels.min())} to {int(found.labels.max())} of "
                f"{given.classes} classes"
            )
            own.refuse(
                ATTACK_KEY, self.settings.attack.name, problem, f"Use 0 to {given.classes - 1}."
            )
        return found


@dataclass(frozen=True, slots=True)
class NearAdversaries:
    """Those near a parent: itself, if it is one, and its children by name. `rounds`: of it in each
    of its tasks.
    """

    node: Adversary | None
    children: Mapping[str, Adversary]
    rounds: int


def placed(tables: Sequence[Adversaries], tree: Tree, *, seed: int) -> dict[str, Adversaries]:
    """Return the table of each adversary, by its name. Raises InvalidExperiment if a node is in two
    of them.
    """
    found: dict[str, Adversaries] = {}
    # drawn ones last
    for place, each in sorted(enumerate(tables), key=lambda table: table[1].share is not None):
        for name in each.placed(tree, seed=seed, place=place, taken=found):
            if name in found:
                refuse(
                    "nodes", name, "is an adversary of another table, too", "Give it one attack."
                )
            found[name] = each
    return found


def refuse(key: str, value: object, problem: str, remedy: str) -> Never:
    """Refuse the value of a key below `adversaries`. Raises InvalidExperiment."""
    raise InvalidExperiment(f"{KEY}.{key}", value, problem, remedy)
