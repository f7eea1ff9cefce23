"""Extras: the vectors that a rule sends to its children behind the model, and those that they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from common.aggregation.mixing import Floats
from common.aggregation.single_model import SingleModelRule
from common.aggregation.uploads import Aggregated, Dispatched, RuleContext, Uploads
from common.experiment.rules import RuleSettings
from common.model.layout import LinkLayouts, ModelLayout, Row


def link_layouts(rule: RuleSettings, model: ModelLayout) -> LinkLayouts:
    """Return what goes down and up the links of a tier with this rule; each vector is float32 [D]."""
    shape = (model.parameters,)
    down, up = (model.with_extras(dict.fromkeys(names, shape)) for names in (rule.sends, rule.returns))
    return LinkLayouts(model, down, up)


def single_model(settings: RuleSettings, context: RuleContext) -> SingleModelRule | ExtrasRule:
    """Return a rule of one model, with the extras that its settings name; those sent are vectors of its state."""
    rule = SingleModelRule(settings, context)
    if not (settings.sends or settings.returns):
        return rule
    sent = [rule.vectors[name] for name in settings.sends]
    return ExtrasRule(rule, link_layouts(settings, context.layout), sent=sent, returns=settings.returns)


class ExtrasRule:
    """A rule of one model whose children receive vectors behind the model, and return others.

    `sent`: the vectors, float32 [D] each, as they are at each dispatch, in the order of `rule.sends`.
    """

    choose: Final = None
    reads_start = True  # the row that is dispatched is another one

    def __init__(self, rule: SingleModelRule, links: LinkLayouts, *, sent: Sequence[Floats], returns: Sequence[str]):
        self._rule = rule
        self._links = links
        self._sent = sent
        self._returns = returns
        self._row = links.down.empty()

    @property
    def model(self) -> Row:
        """The rule's."""
        return self._rule.model

    @property
    def mixed(self) -> Row | None:
        """The rule's."""
        return self._rule.mixed

    def begin(self, model: Row) -> None:
        """Dispatch this model next."""
        self._rule.begin(model)

    def dispatch(self, r: int, children: Sequence[str]) -> Dispatched:
        """Return the model and the vectors for all children."""
        ((model, _),) = self._rule.dispatch(r, children)
        self._row[: model.size] = model
        columns = self._links.down.extra_columns(self._row).reshape(len(self._sent), -1)
        for target, vector_D in zip(columns, self._sent, strict=True):
            target[:] = vector_D
        return [(self._row, children)]

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Aggregate the models; the rule sees the extras beside them."""
        rows_K, up = uploads.rows_K, self._links.up
        size = self._links.model.parameters
        behind_K = up.extra_columns(rows_K)
        extras = {name: behind_K[:, i * size : (i + 1) * size] for i, name in enumerate(self._returns)}
        return self._rule.aggregate(r, replace(uploads, rows_K=rows_K[:, : up.model_bytes], extras=extras))

    def save(self, folder: Path) -> dict[str, object]:
        """Write the rule's state."""
        return self._rule.save(folder)

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Restore the rule's state."""
        self._rule.restore(folder, facts)
