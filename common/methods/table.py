"""The methods by name, each with its class, which is imported when it is needed, as a user's own `package.module:Name`.

A class in a file of this folder and a line here make a rule or a selector one of fedstrata's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

RULES: Final[Mapping[str, str]] = {
    "fedavg": "common.methods.fedavg:FedAvg",
    "independent": "common.methods.multi_model:Independent",
    "fedcross": "common.methods.fedcross:FedCross",
    "fedmr": "common.methods.fedmr:FedMR",
    "fedcda": "common.methods.fedcda:FedCDA",
    "fedadp": "common.methods.fedadp:FedAdp",
    "fedavgm": "common.methods.optimisers:FedAvgM",
    "fedadagrad": "common.methods.optimisers:FedAdagrad",
    "fedadam": "common.methods.optimisers:FedAdam",
    "fedyogi": "common.methods.optimisers:FedAdam",
    "fedexp": "common.methods.optimisers:FedExP",
    "fednova": "common.methods.fednova:FedNova",
    "qfedavg": "common.methods.qfedavg:QFedAvg",
    "scaffold": "common.methods.scaffold:Scaffold",
    "feddyn": "common.methods.feddyn:FedDyn",
    "clusamp": "common.methods.clusamp:CluSamp",
    "fedbuff": "common.methods.fedbuff:FedBuff",
    "fedma": "common.methods.fedma:FedMA",
    "gamf": "common.methods.gamf:GAMF",
    "feddf": "common.methods.refined:FedDF",
    "fedbe": "common.methods.refined:FedBE",
    "fedlaw": "common.methods.refined:FedLAW",
    "fedgen": "common.methods.fedgen:FedGen",
    "median": "common.methods.robust:Median",
    "trimmed_mean": "common.methods.robust:TrimmedMean",
    "krum": "common.methods.robust:Krum",
}
STEPS: Final = ("fedavgm", "fedadagrad", "fedadam", "fedyogi")  # whose step may follow another rule of one model
OWN_RULE: Final = "common.methods.single_model:OwnRule"
SELECTORS: Final[Mapping[str, str]] = {
    "fraction": "common.methods.selectors:FractionSelection",
    "round_robin": "common.methods.selectors:RoundRobin",
    "fedcluster": "common.methods.selectors:FedCluster",
    "power_of_choice": "common.methods.selectors:PowerOfChoice",
    "oort": "common.methods.selectors:Oort",
}
OWN_SELECTOR: Final = "common.methods.selection:OwnSelection"
