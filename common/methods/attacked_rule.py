"""A node's rule among adversaries: what colluding children send in place of their work, and
different models to them.

Colluders compute with the uploads of others, which the parent's process alone has. So it computes
what they send: their honest work comes up the links, through the codecs, and is replaced before any
bound and rule reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from fedstrata.common.methods.adversary import Adversary, NearAdversaries
from fedstrata.common.methods.attack import AttackedUpload
from fedstrata.common.methods.mixing import Floats
from fedstrata.common.methods.rule import Aggregated, Dispatched, Rule, Uploads, WrappedRule
from fedstrata.common.model.layout import ModelLayout, Row

LEFT_OUT: Final = "left_out"  # of a plan: the children whose uploads the rule did not use


class AttackedRule(WrappedRule):
    """A rule with adversaries near its node."""

    def __init__(self, rule: Rule, layout: ModelLayout, near: NearAdversaries) -> None:
        super().__init__(rule)
        self._layout = layout
        self._node = None
        if near.node is not None and near.node.attack.does("dispatch"):
            self._node = near.node
        self._hosted = {name: each for name, each in near.children.items() if each.hosted}
        self._rounds = near.rounds

    @property
    def reads_start(self) -> bool:
        """Whether the rule does, or changes the model for some children."""
        return self._node is not None or super().reads_start

    @property
    def hides_uploads(self) -> bool:
        return self._rule.hides_uploads

    def dispatch(self, r: int, children: Sequence[str]) -> Dispatched:
        """Return the rule's models, or what an adversary makes of them for each child."""
        found = super().dispatch(r, children)
        if self._node is None or not self._node.acts(r // self._rounds):
            return found
        self._received = {
            child: self._changed(self._node, r, child, row) for child, row in self._received.items()
        }
        return [(self._received[child], [child]) for _, those in found for child in those]

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Replace the uploads of colluders, then aggregate."""
        acting = {
            k: self._hosted[name] for k, name in enumerate(uploads.children) if name in self._hosted
        }
        acting = {k: acting[k] for k in uploads.answered if k in acting and acting[k].acts(r)}
        sent: dict[int, Floats] = {}
        for k, adversary in acting.items():
            group = [j for j, other in acting.items() if other.settings is adversary.settings]
            if adversary.attack.colludes and k != group[0]:
                sent[k] = sent[group[0]]
                continue
            honest = [j for j in uploads.answered if j not in acting]
            known = honest if adversary.settings.knows == "siblings" else group
            sent[k] = adversary.sent(
                AttackedUpload(
                    self._columns(uploads.rows_K[k]),
                    self._columns(self._received[uploads.children[k]]),
                    adversary.chance(r),
                    [self._columns(uploads.rows_K[j]) for j in known],
                    colluders=len(group),
                    children=len(uploads.answered),
                )
            )
        for k, columns_D in sent.items():
            self._columns(uploads.rows_K[k])[:] = columns_D
        done = self._rule.aggregate(r, uploads)
        return replace(done, facts={**done.facts, LEFT_OUT: list(done.left_out)})

    def _changed(self, adversary: Adversary, r: int, child: str, row: Row) -> Row:
        changed = row.copy()
        columns_D = self._columns(changed)
        columns_D[:] = adversary.dispatched(r, child, columns_D)
        return changed

    def _columns(self, row: Row) -> Floats:
        return self._layout.floats(row)[: self._layout.parameters]


def refused_in(plan: Mapping[str, Any]) -> set[str]:
    """Return the children whose uploads a rule left out, or gave no weight, by the plan that it
    published.
    """
    weights = plan.get("weights")
    left_out = plan.get(LEFT_OUT)
    if isinstance(weights, Mapping):
        found = {child for child, weight in weights.items() if weight == 0}
    else:
        found = set()
    if isinstance(left_out, list):
        return found.union(map(str, left_out))
    return found
