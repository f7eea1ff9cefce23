"""The methods by name, each with its class, which is imported when it is needed, as a user's own
`package.module:Name`.

A class in a file of this folder and a line here make a rule, a selector or an attack one of
fedstrata's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fedstrata.common.methods.baselines.baselines_by_name import BASELINES

RULES: Final[Mapping[str, str]] = {
    "fedavg": "fedstrata.common.methods.fedavg:FedAvg",
    "independent": "fedstrata.common.methods.multi_model:Independent",
    "fedcross": "fedstrata.common.methods.fedcross:FedCross",
    "fedmr": "fedstrata.common.methods.fedmr:FedMR",
    "fedcda": "fedstrata.common.methods.fedcda:FedCDA",
    "fedadp": "fedstrata.common.methods.fedadp:FedAdp",
    "fedavgm": "fedstrata.common.methods.optimisers:FedAvgM",
    "fedadagrad": "fedstrata.common.methods.optimisers:FedAdagrad",
    "fedadam": "fedstrata.common.methods.optimisers:FedAdam",
    "fedyogi": "fedstrata.common.methods.optimisers:FedAdam",
    "fedexp": "fedstrata.common.methods.optimisers:FedExP",
    "fednova": "fedstrata.common.methods.fednova:FedNova",
    "qfedavg": "fedstrata.common.methods.qfedavg:QFedAvg",
    "scaffold": "fedstrata.common.methods.scaffold:Scaffold",
    "feddyn": "fedstrata.common.methods.feddyn:FedDyn",
    "clusamp": "fedstrata.common.methods.clusamp:CluSamp",
    "fedbuff": "fedstrata.common.methods.fedbuff:FedBuff",
    **BASELINES,
    "median": "fedstrata.common.methods.robust:Median",
    "trimmed_mean": "fedstrata.common.methods.robust:TrimmedMean",
    "krum": "fedstrata.common.methods.robust:Krum",
    "bulyan": "fedstrata.common.methods.bulyan:Bulyan",
    "geometric_median": "fedstrata.common.methods.geometric_median:GeometricMedian",
    "centred_clipping": "fedstrata.common.methods.clipping:CentredClipping",
    "foolsgold": "fedstrata.common.methods.foolsgold:FoolsGold",
}
# whose step may follow another rule of one model
STEPS: Final = ("fedavgm", "fedadagrad", "fedadam", "fedyogi")
OWN_RULE: Final = "fedstrata.common.methods.own_rule:settings_of"
SELECTORS: Final[Mapping[str, str]] = {
    "fraction": "fedstrata.common.methods.selectors:FractionSelection",
    "round_robin": "fedstrata.common.methods.selectors:RoundRobin",
    "fedcluster": "fedstrata.common.methods.selectors:FedCluster",
    "power_of_choice": "fedstrata.common.methods.selectors:PowerOfChoice",
    "oort": "fedstrata.common.methods.selectors:Oort",
}
OWN_SELECTOR: Final = "fedstrata.common.methods.selection:OwnSelection"
ATTACKS: Final[Mapping[str, str]] = {
    "label_flip": "fedstrata.common.methods.attacks.label_flip:LabelFlip",
    "backdoor": "fedstrata.common.methods.attacks.backdoor:Backdoor",
    "sign_flip": "fedstrata.common.methods.attacks.sign_flip:SignFlip",
    "scaled": "fedstrata.common.methods.attacks.scaled:ScaledUpdate",
    "gaussian": "fedstrata.common.methods.attacks.gaussian:GaussianNoise",
    "lie": "fedstrata.common.methods.attacks.lie:LittleIsEnough",
    "min_max": "fedstrata.common.methods.attacks.min_max:MinMax",
    "min_sum": "fedstrata.common.methods.attacks.min_max:MinSum",
    "free_rider": "fedstrata.common.methods.attacks.free_rider:FreeRider",
    "false_report": "fedstrata.common.methods.attacks.false_report:FalseReport",
    "equivocation": "fedstrata.common.methods.attacks.equivocation:Equivocation",
    "late": "fedstrata.common.methods.attacks.late:Late",
    "silent": "fedstrata.common.methods.attacks.late:Silent",
}
OWN_ATTACK: Final = "fedstrata.common.methods.attack:OwnAttack"
