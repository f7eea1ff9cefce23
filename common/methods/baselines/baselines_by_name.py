"""The baselines by name, and which of them may refine the result of another rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

BASELINES: Final[Mapping[str, str]] = {
    "fedma": "fedstrata.common.methods.baselines.fedma:FedMA",
    "gamf": "fedstrata.common.methods.baselines.gamf:GAMF",
    "feddf": "fedstrata.common.methods.baselines.refined:FedDF",
    "fedbe": "fedstrata.common.methods.baselines.refined:FedBE",
    "fedlaw": "fedstrata.common.methods.baselines.refined:FedLAW",
    "fltrust": "fedstrata.common.methods.baselines.fltrust:FLTrust",
    "fedgen": "fedstrata.common.methods.baselines.fedgen:FedGen",
}
REFINEMENTS: Final = ("feddf", "fedbe")
