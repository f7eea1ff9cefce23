"""Client selection at one node: selectors, what they see, and what is known of earlier rounds.

A selector is one of fedstrata's (`selectors.py`), or the user's own: `selection.name =
"package.module:Class"`, a class that inherits from `Selector`. Either is named by the tier's
settings, which build it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from fedstrata.common.lazy import np
from fedstrata.common.methods.settings import RuleSettings, SelectionSettings
from fedstrata.common.randomness import Purpose, generator
from fedstrata.common.settings import own
from fedstrata.common.settings.own import OwnName, OwnSettings
from fedstrata.common.settings.privacy import PrivacySettings
from fedstrata.common.settings.topology import participants

SELECTOR_KEY: Final = "selection.name"
TAKING_PART: Final = "taking_part"  # of a plan: the children selected
NOTHING: Final[Mapping[str, int]] = MappingProxyType({})


class ResultFacts(NamedTuple):
    """One result."""

    samples: int
    # The mean training loss; None if the child does not know it, unless the selector's settings
    # say that it compares losses.
    loss: float | None
    # From the round's opening to the announcement of the result, by the parent's monotonic clock.
    seconds: float
    # Of the two encoded models, sent and returned, each counted once; so they are the same wherever
    # the roles run.
    bytes: int


@dataclass(frozen=True, slots=True)
class Participation:
    """A child's earlier rounds."""

    rounds: int = 0  # in which it was selected
    missed: int = 0  # those without its result
    last_round: int = -1  # the last one in which it was selected; -1: none
    used_round: int = -1  # the last one whose aggregation used its result; -1: none
    result: ResultFacts | None = None  # the last one


@dataclass(frozen=True, slots=True)
class Situation:
    """A node before its round r."""

    children: Sequence[str]
    count: int  # of the children that are to take part
    samples: Mapping[str, int]  # of each child that has reported them
    history: Mapping[str, Participation]  # of each child that was selected before
    seed: int
    node: str
    r: int

    def chance(self) -> np.random.Generator:
        """Return a generator for this node and round."""
        return generator(self.seed, Purpose.SELECTION, self.node, self.r)

    def last_result(self, child: str) -> ResultFacts | None:
        """Return a child's last result, or None."""
        past = self.history.get(child)
        if past is None:
            return None
        return past.result


Choose: TypeAlias = Callable[[Situation], Sequence[str]]
"""Returns `count` different children, in any order; a rule's own may return fewer."""


class Selector(own.Kept):
    """A selector. Its keywords are the experiment's keys."""

    def select(self, now: Situation) -> Sequence[str]:
        """Return `now.count` different children. Random numbers come from `now.chance()`, so that a
        run repeats.
        """
        raise NotImplementedError


class OwnSelection(SelectionSettings, OwnSettings):
    """A selector of the user's own; the other keys are its keywords."""

    name: OwnName  # the class, `package.module:Name`

    def build(self) -> Selector:
        return GuardedSelector(self)


class GuardedSelector(Selector):
    """The user's selector. An error in it ends the run as InvalidExperiment."""

    def __init__(self, settings: OwnSelection) -> None:
        self._name = settings.name
        self._selector = own.build(SELECTOR_KEY, settings, Selector)
        with own.guarded({SELECTOR_KEY: self._name}):
            # those of a class would be shared by all nodes
            self.numbers = deepcopy(self._selector.numbers)

    def select(self, now: Situation) -> Sequence[str]:
        """Return its choice, checked, and keep its numbers. Raises InvalidExperiment."""
        with own.guarded({SELECTOR_KEY: self._name}):
            self._selector.numbers = self.numbers
            found: object = self._selector.select(now)
            chosen = list(found) if isinstance(found, Iterable) else [found]
        self.numbers = own.kept(SELECTOR_KEY, self._name, self._selector.numbers, "`numbers` are")
        named = [each for each in chosen if isinstance(each, str)]
        wanted = (now.count, now.count)
        if (len(chosen), len(set(named) & set(now.children))) != wanted:
            shown = chosen if isinstance(found, Iterable) else found
            at = own.place(self._selector.select)
            problem = f"selects {shown!r:.200} of {len(now.children)} children{at}"
            remedy = f"Return {now.count} different ones of `now.children`."
            own.refuse(SELECTOR_KEY, self._name, problem, remedy)
        return named


class SelectingTier(Protocol):
    """The settings of a tier that its parents' selection needs."""

    @property
    def participation(self) -> float: ...
    @property
    def selection(self) -> SelectionSettings: ...
    @property
    def aggregation(self) -> RuleSettings: ...
    @property
    def privacy(self) -> PrivacySettings: ...


class ClientSelection:
    """One node's client selection. Its state is the history of the children.

    `choose`: in place of the tier's selector, from a rule that selects the children itself, or as
    recorded. `named`: the children that the experiment names, None: all; a rule of K models has K
    of them, whoever enters.
    """

    def __init__(
        self,
        tier: SelectingTier,
        *,
        seed: int,
        node: str,
        choose: Choose | None = None,
        named: int | None = None,
    ) -> None:
        self._named = named
        self._tier = tier
        self._seed = seed
        self._node = node
        self._selector: Selector | None = None
        if choose is None:
            self._selector = tier.selection.build()
            choose = self._selector.select
        self._choose = choose
        self._history: dict[str, Participation] = {}
        self._in_flight: dict[str, int] = {}  # the round of each child's task that goes on

    @property
    def in_flight(self) -> list[str] | None:
        """The children whose tasks of earlier rounds go on, None if tasks end with their rounds."""
        if self._tier.aggregation.buffers:
            return list(self._in_flight)
        return None

    def begin(self) -> None:
        """Begin rounds in which no child has a task of an earlier one."""
        self._in_flight = {}

    def select(
        self,
        children: Sequence[str],
        r: int,
        *,
        samples: Mapping[str, int] = NOTHING,
        absent: Collection[str] = (),
    ) -> list[str]:
        """Return K = max(1, floor(participation * children)) of the children, in their order, for
        the node's round r.

        A rule may select fewer. Where tasks go on, K children train at once, and so many are
        selected as those in flight leave. `samples`: of each child that has reported them. `absent`
        ones are not selected, but as the last of K children that get a model each: a rule of K
        models has K of them. Raises InvalidExperiment if own code fails.
        """
        several = self._tier.aggregation.several
        among = len(children)
        if several and self._named is not None:
            among = self._named
        count = participants(among, self._tier.participation) - len(self._in_flight)
        present = [
            child for child in children if child not in self._in_flight and child not in absent
        ]
        if count < len(present) or self._selector is None:
            count = min(count, len(present))
            now = Situation(present, count, samples, self._history, self._seed, self._node, r)
            chosen = set(self._choose(now))
        else:
            chosen = set(present)
            if several:
                missing = [child for child in children if child in absent]
                chosen.update(missing[: count - len(present)])
        return [child for child in children if child in chosen]

    def observe(
        self,
        r: int,
        selected: Sequence[str],
        results: Mapping[str, ResultFacts],
        *,
        unused: Collection[str] = (),
        refused: Collection[str] = (),
    ) -> None:
        """Take note of a closed round; one that is repeated counts once. Children without a result
        keep their last.

        `unused`: whose results the aggregation left out; `refused`: whose models were refused.
        """
        if self._tier.aggregation.buffers:
            self._in_flight |= dict.fromkeys(selected, r)
            for name, since in list(self._in_flight.items()):
                if name in results or name in refused:
                    del self._in_flight[name]
                    self._note(since, [name], results, unused)
        else:
            self._note(r, selected, results, unused)

    def _note(
        self,
        r: int,
        selected: Sequence[str],
        results: Mapping[str, ResultFacts],
        unused: Collection[str],
    ) -> None:
        for name in selected:
            past = self._history.get(name, Participation())
            is_new = r > past.last_round
            used_round = past.used_round
            if name in results and name not in unused:
                used_round = max(r, used_round)
            self._history[name] = Participation(
                rounds=past.rounds + is_new,
                missed=past.missed + (is_new and name not in results),
                last_round=max(r, past.last_round),
                used_round=used_round,
                result=results.get(name, past.result),
            )

    def follows(self, selected: Sequence[str], r: int) -> dict[str, int]:
        """Return for each of these children the number of its last round before r whose result was
        used, from 1.

        0 for those without one. A node that repeats rounds knows it only if its state was restored.
        """
        found = dict.fromkeys(selected, 0)
        for name in selected:
            past = self._history.get(name)
            if past is not None and past.used_round < r:
                found[name] = past.used_round + 1
        return found

    def facts(self, selected: Sequence[str]) -> dict[str, object]:
        """Return what a round's plan records: who was selected, unless seed and round alone
        determine it.
        """
        tier = self._tier
        remembers = self._selector is None or tier.selection.remembers or tier.aggregation.buffers
        if remembers or tier.privacy.accounted:
            return {TAKING_PART: list(selected)}
        return {}

    def save(self) -> dict[str, Any]:
        """Return the state, in a form that JSON can hold."""
        history: dict[str, Any] = {}
        for name, past in self._history.items():
            history[name] = {key: getattr(past, key) for key in Participation.__slots__}
        found: dict[str, Any] = {"history": history}
        if self._selector is not None and self._selector.numbers:
            found["numbers"] = self._selector.numbers
        return found

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Restore what `save` returned; {}, before the first checkpoint, is no state."""
        self._history = {}
        for name, past in facts.get("history", {}).items():
            result = past["result"] and ResultFacts(*past["result"])
            self._history[name] = Participation(**{**past, "result": result})
        if self._selector is not None:
            self._selector.numbers = facts.get("numbers", {})
