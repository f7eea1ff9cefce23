"""A node's rule among adversaries: what colluding children send in place of their work, different
models to them, and links on which models are changed.

Colluders compute with the uploads of others, which the parent's process alone has. So it computes
what they send: their honest work comes up the links, through the codecs, and is replaced before any
bound and rule reads it. What comes up a link that is attacked is replaced in the same place.
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
        hosted = {name: each for name, each in near.children.items() if each.hosted}
        self._up = {name: each for name, each in hosted.items() if each.attack.does("upload")}
        links = {name: each for name, each in hosted.items() if each.on_link}
        self._down = {name: each for name, each in links.items() if each.attack.does("dispatch")}
        self._rounds = near.rounds

    @property
    def reads_start(self) -> bool:
        """Whether the rule does, or changes the model for some children."""
        return self._node is not None or bool(self._down) or super().reads_start

    @property
    def hides_uploads(self) -> bool:
        return self._rule.hides_uploads

    def dispatch(self, r: int, children: Sequence[str]) -> Dispatched:
        """Return the rule's models, or what adversaries make of them: the node of that of each
        child, then those on links.
        """
        found = super().dispatch(r, children)
        changed: dict[str, Row] = {}
        if self._node is not None and self._node.acts(r // self._rounds):
            for child, row in self._received.items():
                changed[child] = self._changed(self._node, r, child, row)
        for child, adversary in self._down.items():
            if child in self._received and adversary.acts(r):
                row = changed.get(child, self._received[child])
                changed[child] = self._changed(adversary, r, child, row)
        self._received = {**self._received, **changed}
        models: list[tuple[Row, Sequence[str]]] = []
        for row, those in found:
            honest = [child for child in those if child not in changed]
            if honest:
                models.append((row, honest))
            models += [(changed[child], [child]) for child in those if child in changed]
        return models

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Replace the uploads of colluders, and those that are changed on links, then aggregate."""
        hosted = {k: self._up.get(uploads.children[k]) for k in uploads.answered}
        acting = {k: each for k, each in hosted.items() if each is not None and each.acts(r)}
        sent: dict[int, Floats] = {}
        for k, adversary in acting.items():
            trained_D = self._columns(uploads.rows_K[k])
            received_D = self._columns(self._received[uploads.children[k]])
            if adversary.settings.knows == "itself":
                sent[k] = adversary.uploaded(r, trained_D, received_D)
                continue
            group = [j for j, other in acting.items() if other.settings is adversary.settings]
            if adversary.attack.colludes and k != group[0]:
                sent[k] = sent[group[0]]
                continue
            honest = [j for j in uploads.answered if j not in acting]
            known = honest if adversary.settings.knows == "siblings" else group
            sent[k] = adversary.sent(
                AttackedUpload(
                    trained_D,
                    received_D,
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
