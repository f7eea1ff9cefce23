"""The adversaries of an experiment in its tree: which nodes or links, their parents, and what they
can do.

The tree is asked for only where there are adversaries: a plan may have more nodes than have names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import inf, prod
from typing import Final

from fedstrata.common.experiment.tiers import Tier
from fedstrata.common.methods.adversary import (
    Adversaries,
    Adversary,
    NearAdversaries,
    placed,
    refuse,
)
from fedstrata.common.settings.own import is_own
from fedstrata.common.settings.topology import CLOUD, Tree, participants

SILENT: Final = "silent"
SUCCESS: Final = "attack_success"  # column; with several such attacks `attack_success_2` and so on


class Attackers:
    """The adversaries of an experiment; `learns_classes`: devices train on fedstrata's labels."""

    def __init__(
        self,
        tables: Sequence[Adversaries],
        tree: Callable[[], Tree],
        tiers: Sequence[Tier],
        *,
        seed: int,
        learns_classes: bool,
    ) -> None:
        self._tables = tables
        self._tree = tree
        self._tiers = tiers
        self._seed = seed
        self._learns_classes = learns_classes

    def __bool__(self) -> bool:
        return bool(self._tables)

    @cached_property
    def at(self) -> Mapping[str, Adversary]:
        """Each adversary by its name, or by that of the node whose link it is on. Raises
        InvalidExperiment.
        """
        if not self._tables:
            return {}
        tree = self._tree()
        found = {}
        for name, settings in placed(self._tables, tree, seed=self._seed).items():
            rounds = prod(tier.rounds for tier in self._tiers[1 : tree.depth(name)])
            found[name] = Adversary(name, settings, self._seed, rounds)
        return found

    def lies(self, node: str) -> bool:
        """Return whether a node is an adversary itself."""
        return node in self.at and not self.at[node].on_link

    def adversary(self, node: str) -> Adversary | None:
        """Return the adversary that a node is, or that is on its link, checked; None without one.
        Raises InvalidExperiment.
        """
        found = self.at.get(node)
        if found is not None:
            self._check(found)
        return found

    def near(self, parent: str) -> NearAdversaries | None:
        """Return those near a parent, None in an experiment without any. Raises
        InvalidExperiment.
        """
        if not self._tables:
            return None
        tree = self._tree()
        for name in tree.children[parent]:
            if name in self.at and self.at[name].hosted:
                self._check(self.at[name])
        # a device that has moved here has another link
        children = {
            name: each
            for name, each in self.at.items()
            if not each.on_link or tree.parent(name) == parent
        }
        node = self.at[parent] if self.lies(parent) else None
        return NearAdversaries(node, children, self._tiers[tree.depth(parent)].rounds)

    @cached_property
    def targeted(self) -> Mapping[str, Adversary]:
        """An adversary of each attack with tests of its own, by its column of rounds.csv."""
        tables = {
            id(each.settings): each for each in self.at.values() if each.attack.does("targets")
        }
        found = [tables[id(table)] for table in self._tables if id(table) in tables]
        columns = [SUCCESS, *(f"{SUCCESS}_{place}" for place in range(2, len(found) + 1))]
        return dict(zip(columns, found, strict=False))

    def code_at(self, node: str) -> dict[str, str]:
        """Return the users' own attacks that a node computes, by key: the cloud evaluates all."""
        if not self._tables:
            return {}
        children = self._tree().children.get(node, ())
        here = [self.at[name] for name in children if name in self.at and self.at[name].hosted]
        here += [each for name, each in self.at.items() if node in (name, CLOUD)]
        found = {}
        for settings in (each.settings for each in here):
            if is_own(settings.attack.name):
                place = self._tables.index(settings)
                found[f"adversaries[{place}].attack.name"] = settings.attack.name
        return found

    def check(self) -> None:
        """Check what is known without a user's own code, whose nodes check it. Raises
        InvalidExperiment.
        """
        shipped = [each for each in self.at.values() if not is_own(each.settings.attack.name)]
        for each in shipped:
            self._check(each)
        silent: dict[str, list[str]] = {}
        for each in shipped:
            if each.attack.delay_s() == inf:
                silent.setdefault(self._tree().parent(each.node), []).append(each.node)
        for parent, children in silent.items():
            self._check_quorum(parent, children)

    def _check(self, adversary: Adversary) -> None:
        tree = self._tree()
        adversary.settings.check()
        above = self._tiers[tree.depth(adversary.node) - 1]
        unseen = ""
        if above.aggregation.buffers:
            unseen = "the parent's rule has uploads of several rounds at a time"
        elif above.secure is not None:
            unseen = "the parent learns the sum of uploads alone"
        adversary.settings.check_node(
            device=adversary.node not in tree.children,
            learns_classes=self._learns_classes,
            unseen=unseen,
        )

    def _check_quorum(self, parent: str, silent: Sequence[str]) -> None:
        """Check that a parent's rounds close without silent children. Raises InvalidExperiment."""
        tree = self._tree()
        tier = self._tiers[tree.depth(parent)]
        children = tree.children[parent]
        selected = participants(len(children), tier.participation)
        answer = selected - min(len(silent), selected)
        if tier.closing.rule != "quorum" or tier.closing.uploads_of(selected) > answer:
            problem = f"rounds of {parent} would wait for {', '.join(silent)} for ever"
            remedy = "Keep one honest."
            if answer:
                remedy = f'Use closing.rule = "quorum" with a quorum of {answer} or less.'
            refuse("attack.name", SILENT, problem, remedy)
