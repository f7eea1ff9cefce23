"""Who attacks: the tables `[[adversaries]]`, and what one of them does at a node, or on its link,
in a round.

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
from fedstrata.common.settings.tables import (
    Count,
    Fraction,
    Name,
    Refused,
    SettingsTable,
    check_table,
    proposal,
)
from fedstrata.common.settings.topology import CLOUD, Tree

KEY: Final = "adversaries"
DATA: Final = ("poison",)  # methods that a device alone can replace,
DEVICES: Final = (*DATA, "delay_s")
PARENTS: Final = ("dispatch",)  # and an institution alone


class Adversaries(SettingsTable):
    """Nodes that attack, and how: those of `nodes`, or all devices `below` a node, or a share of
    these or of all. Or `links`, on which models of honest nodes are changed.
    """

    attack: AttackSettings  # what they do, one of the attacks below; a name stands for its table
    nodes: list[Name] = Field(default_factory=list)  # devices and institutions by name
    # the links of these devices and institutions to their parents: a third party changes what
    # passes there, and the nodes are honest
    links: list[Name] = Field(default_factory=list)
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
        """Return the nodes, or those whose links these are; drawn ones are others than those
        `taken`. Raises InvalidExperiment.
        """
        check_table(KEY, self, self._refused())
        named = self.nodes or self.links
        for name in named or filter(None, [self.below]):
            if name not in tree or name == CLOUD:
                remedy = proposal(name, tree.nodes, what="There are")
                refuse(self._given()[0], name, "no institution or device has this name", remedy)
        if named:
            return named
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

    def _given(self) -> list[str]:
        """Return the keys that name adversaries."""
        return [key for key in ("nodes", "links", "below", "share") if getattr(self, key)]

    def _refused(self) -> Refused:
        """Yield why the keys name no adversaries, or name them twice."""
        remedy = "Give nodes, or links, or below, or share, or both of the latter."
        given = self._given()
        if not given:
            yield "nodes", "names no adversary", remedy
        elif len(given) > 1 and given != ["below", "share"]:
            yield given[0], f"{given[1]} is given, too", remedy

    @property
    def hosted(self) -> bool:
        """Whether a parent's process computes what its children, or their links, send."""
        return self.knows != "itself" or bool(self.links)

    def check(self) -> None:
        """Check that the attack has what it needs. Raises InvalidExperiment."""
        check_table(KEY, self, self._refused_knowledge())

    def _refused_knowledge(self) -> Refused:
        attack = self.attack
        alone = self.knows == "itself"
        if attack.resolved.colludes and alone:
            problem = f"{attack.name} computes with the uploads of others"
            yield "knows", problem, 'Set knows = "colluders" or "siblings".'
        if not alone and not attack.does("upload"):
            yield "knows", f"{attack.name} sends no upload of its own", 'Use "itself".'

    def check_node(self, *, device: bool, learns_classes: bool, unseen: str) -> None:
        """Check that it can be done at a device, or an institution, or on its link. Raises
        InvalidExperiment.

        `unseen`: why its parent does not see the uploads of one round, empty if it does.
        """
        check_table(KEY, self, self._refused_at(device, learns_classes, unseen))

    def _refused_at(self, device: bool, learns_classes: bool, unseen: str) -> Refused:
        does = self.attack.does
        if unseen and self.hosted and does("upload"):
            if self.links:
                yield "links", unseen, "Use another tier or rule, or nodes in place of links."
            else:
                yield "knows", unseen, 'Use "itself", or another tier or rule.'
        if any(map(does, DATA)) and self.links:
            yield "attack.name", "no samples pass a link", "Name devices in nodes."
        if any(map(does, PARENTS)) and device and not self.links:
            problem = "only an institution sends models to others"
            yield "attack.name", problem, "Name institutions in nodes, or the device in links."
        if any(map(does, DEVICES)) and not device:
            yield "attack.name", "only a device can do that", "Name devices, or use below."
        if any(map(does, DATA)) and not learns_classes:
            none = "training.trainer or data.targets has none of fedstrata's"
            yield "attack.name", f"it changes labels, and {none}", "Use an attack on uploads."


@dataclass(frozen=True, slots=True)
class Adversary:
    """An adversary at its node, or on the link from it to its parent, by the table `settings`.
    `rounds`: of the node in each global round.
    """

    node: str
    settings: Adversaries
    seed: int
    rounds: int

    @property
    def attack(self) -> Attack:
        """What it does."""
        return self.settings.attack.resolved

    @property
    def on_link(self) -> bool:
        """Whether it is on the node's link, and the node is honest."""
        return bool(self.settings.links)

    @property
    def hosted(self) -> bool:
        """Whether the parent's process computes what is sent."""
        return self.settings.hosted

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
        draw = generator(self.seed, Purpose.ATTACK, f"{self.node}/samples")
        with self.guarded():
            found = self.attack.poison(samples, draw)
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
        draw = self.chance(number, child)
        return self._columns(lambda: self.attack.dispatch(model_D, draw), len(model_D))

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
            problem = f"returns {list(found.shape)} numbers for {count} columns"
            self._refuse(problem, "Return one number for each column.")
        if self.hosted and not np.isfinite(found).all():
            remedy = "Look for a division by zero, or an overflow."
            self._refuse("computes numbers that are not finite", remedy)
        return found

    def _refuse(self, problem: str, remedy: str) -> Never:
        own.refuse(ATTACK_KEY, self.settings.attack.name, problem, remedy)

    def _checked(
        self, found: LabelledSamples, given: LabelledSamples, *, fewer: bool
    ) -> LabelledSamples:
        """Return samples that an attack has made. Raises InvalidExperiment unless they have the
        form of others.
        """
        count = len(found.labels)
        images = found.images
        shape = (count, *given.images.shape[1:])
        alike = images.shape == shape and images.dtype == given.images.dtype
        if not alike or not (fewer or count == len(given.labels)):
            problem = f"makes {count} labels and samples of {images.dtype} {list(images.shape)}"
            wanted = f"of {given.images.dtype} {list(given.images.shape)}"
            self._refuse(problem, f"Return samples {wanted}.")
        if not count:
            return found
        lowest = int(found.labels.min())
        highest = int(found.labels.max())
        if lowest < 0 or highest >= given.classes:
            problem = f"makes labels {lowest} to {highest} of {given.classes} classes"
            self._refuse(problem, f"Use 0 to {given.classes - 1}.")
        return found


@dataclass(frozen=True, slots=True)
class NearAdversaries:
    """Those near a parent: itself, if it is one, and its children, or their links, by name.
    `rounds`: of it in each of its tasks.
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
                problem = "is an adversary of another table, too"
                refuse("nodes", name, problem, "Give it one attack.")
            found[name] = each
    return found


def refuse(key: str, value: object, problem: str, remedy: str) -> Never:
    """Refuse the value of a key below `adversaries`. Raises InvalidExperiment."""
    raise InvalidExperiment(f"{KEY}.{key}", value, problem, remedy)
