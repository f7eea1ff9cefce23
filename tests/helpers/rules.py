"""The rules of aggregation, each with the least that its table needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from common.experiment.aggregation import RULES

_NEEDED: Final[Mapping[str, Mapping[str, Any]]] = {
    **{name: {"learning_rate": 0.1} for name in ("fedadagrad", "fedadam", "fedyogi")},
    "krum": {"wrong": 0},  # for any number of children
}
LEAST: Final[Mapping[str, dict[str, Any]]] = {name: {"name": name, **_NEEDED.get(name, {})} for name in RULES}
