"""Extras: the vectors that a rule sends to its children behind the model, and those that they return."""

from __future__ import annotations

from common.experiment.aggregation import RuleSettings
from common.model.layout import LinkLayouts, ModelLayout


def link_layouts(rule: RuleSettings, model: ModelLayout) -> LinkLayouts:
    """Return what goes down and up the links of a tier with this rule; each vector is float32 [D]."""
    shape = (model.parameters,)
    down, up = (model.with_extras(dict.fromkeys(names, shape)) for names in (rule.sends, rule.returns))
    return LinkLayouts(model, down, up)
