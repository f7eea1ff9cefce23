"""Extras: the vectors that a rule sends to its children behind the model, and those that they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from common.experiment.refined_rules import LABEL_COUNTS, FedGen
from common.experiment.rules import RuleSettings
from common.methods.mixing import Floats
from common.methods.rule import Aggregated, Dispatched, Rule, RuleContext, Uploads, WrappedRule
from common.methods.single_model import SingleModelRule
from common.model.generator import GeneratorLayout
from common.model.layout import LinkLayouts, ModelLayout


def _of_generator(rule: FedGen, model: ModelLayout) -> Mapping[str, Sequence[int]]:
    made = GeneratorLayout.of(model, noise=rule.noise, hidden=rule.hidden)
    return {**made.sent, LABEL_COUNTS: (made.classes,)}


SHAPES: Final[Mapping[type[RuleSettings], Callable[[Any, ModelLayout], Mapping[str, Sequence[int]]]]] = {
    FedGen: _of_generator,  # others: [D] each
}


def link_layouts(rule: RuleSettings, model: ModelLayout) -> LinkLayouts:
    """Return what goes down and up the links of a tier with this rule; vectors are float32, [D] by default."""
    given = SHAPES.get(type(rule))
    shapes = given(rule, model) if given is not None else {}
    down, up = (
        model.with_extras({name: shapes.get(name, (model.parameters,)) for name in names})
        for names in (rule.sends, rule.returns)
    )
    return LinkLayouts(model, down, up)


class ExtrasRule(WrappedRule):
    """A rule of one model whose children receive vectors behind the model, and return others.

    `sent`: the vectors by name, in the shapes of `links.down`, as they are at each dispatch.
    """

    def __init__(self, rule: SingleModelRule, links: LinkLayouts, *, sent: Mapping[str, Floats]) -> None:
        super().__init__(rule)
        self._links = links
        self._sent = sent
        self._row = links.down.empty()

    @property
    def reads_start(self) -> bool:
        """Always: the row that is dispatched is another one."""
        return True

    def dispatch(self, r: int, children: Sequence[str]) -> Dispatched:
        """Return the model and the vectors for all children."""
        ((model, _),) = self._rule.dispatch(r, children)
        own = self._row[: model.size]
        own[:] = model
        self._rule.begin(own)  # the rule goes on from the row that is dispatched
        for name, place in self._links.down.extras_of(self._row).items():
            place[...] = self._sent[name]
        return [(self._row, children)]

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Aggregate the models; the rule sees the extras beside them."""
        rows_K, up = uploads.rows_K, self._links.up
        models_K = rows_K[:, : up.model_bytes]
        return self._rule.aggregate(r, replace(uploads, rows_K=models_K, extras=up.extras_of(rows_K)))


def with_extras(settings: RuleSettings, context: RuleContext, rule: SingleModelRule) -> Rule:
    """Return a rule of one model, with the extras that its settings name; those sent are vectors of its state."""
    if not (settings.sends or settings.returns):
        return rule
    sent = {name: rule.vectors[name] for name in settings.sends}
    return ExtrasRule(rule, link_layouts(settings, context.layout), sent=sent)
