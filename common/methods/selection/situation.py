"""What a selector sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from common.lazy import np
from common.randomness import Purpose, generator


class ResultFacts(NamedTuple):
    """One result: its samples and mean training loss, its seconds, its bytes.

    `seconds`: from the round's opening to the announcement of the result, by the parent's monotonic clock. `bytes`: of
    the two encoded models, sent and returned, each counted once; so they are the same wherever the roles run.
    """

    samples: int
    loss: float
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Participation:
    """A child's earlier rounds. `rounds`: in how many it was selected; `missed`: those without its result.

    `last_round`: the last one in which it was selected; `used_round`: the last one whose aggregation used its result.
    Both are -1 if there is none. `result`: its last result; None if there is none yet.
    """

    rounds: int = 0
    missed: int = 0
    last_round: int = -1
    used_round: int = -1
    result: ResultFacts | None = None


@dataclass(frozen=True, slots=True)
class Situation:
    """A node before its round r, in which `count` of its children are to take part.

    `samples`: of each child that has reported them. `history`: of each child that was selected before.
    """

    children: Sequence[str]
    count: int
    samples: Mapping[str, int]
    history: Mapping[str, Participation]
    seed: int
    node: str
    r: int

    def chance(self) -> np.random.Generator:
        """Return a generator for this node and round."""
        return generator(self.seed, Purpose.SELECTION, self.node, self.r)

    def last_result(self, child: str) -> ResultFacts | None:
        """Return a child's last result, or None."""
        past = self.history.get(child)
        return None if past is None else past.result


Choose: TypeAlias = Callable[[Situation], Sequence[str]]
"""Returns `count` different children, in any order; a rule's own may return fewer."""
