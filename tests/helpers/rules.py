"""The rules of aggregation, each with the least that its table needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from common.experiment.aggregation import RULES

LEAST: Final[Mapping[str, dict[str, Any]]] = {
    name: {"name": name} | ({"learning_rate": 0.1} if name in ("fedadagrad", "fedadam", "fedyogi") else {})
    for name in RULES
}
