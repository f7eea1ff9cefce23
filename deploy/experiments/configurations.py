"""Configurations of `study.py`: each part is a table, and each row has the keys that differ from the part's base.

The settings suit short runs on digits: an MLP 64-32-10, batch 10, momentum 0.5. Learning rate 0.05 and two epochs were
chosen in a few runs (`docs/study.md`): at 0.1 the multi-model rules lag far behind, with five epochs less so.

Three layers do the local work of two: 300 rounds of 6 devices; 30 global rounds of 4 rounds of 5 times 3 devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

Tree = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Seen:
    """A reference result: a rule's accuracy at a round in percent, or if `below`, its points below FedAvg."""

    rule: str
    round: int
    percent: tuple[float, float]  # from .. to
    below: bool = False


@dataclass(frozen=True, slots=True)
class StudyPart:
    """One table. `rows` has configurations by name; the others are compared with the first."""

    title: str
    base: Tree
    rows: Mapping[str, Tree]
    target: float
    early: int
    seen: tuple[Seen, ...] = field(default=())


def merged(base: Tree, *changes: Tree) -> dict[str, Any]:
    """Return a tree updated by others, table by table; a table with a `name` key replaces the existing one."""
    tree = dict(base)
    for change in changes:
        for key, value in change.items():
            deeper = isinstance(value, Mapping) and isinstance(tree.get(key), Mapping) and "name" not in value
            tree[key] = merged(tree[key], value) if deeper else value
    return tree


DIGITS: Final = {
    "name": "study",
    "model": {"name": "mlp_digits"},
    "training": {"epochs": 2, "batch_size": 10, "learning_rate": 0.05, "momentum": 0.5},
    "cloud": {"checkpoint_every": 10_000},
}
TWO_LAYERS: Final = merged(
    DIGITS, {"topology": {"institutions": 0, "devices": 30}, "cloud": {"participation": 0.2}, "rounds": 300}
)
THREE_LAYERS: Final = merged(
    DIGITS,
    {
        "topology": {"institutions": 5, "devices": 30},
        "institution": {"rounds": 4, "participation": 0.5},
        "rounds": 30,
    },
)
TEMPO: Final = merged(THREE_LAYERS, {"training": {"epochs": 4}})

UNIFORM: Final = {"name": "fedavg", "weights": "uniform"}
BY_DATA: Final = {"name": "fedavg", "weights": "data"}


def rules(rounds: int) -> dict[str, dict[str, Any]]:
    """Return the rules by name, with warm-up rounds that suit a node of `rounds` rounds."""
    return {
        "FedAvg by data": BY_DATA,
        "independent": {"name": "independent"},
        "FedCross 0.9": {"name": "fedcross", "alpha": 0.9},
        "FedCross 0.99": {"name": "fedcross", "alpha": 0.99},
        "FedCross 0.99, dynamic": {"name": "fedcross", "alpha": 0.99, "dynamic_alpha_rounds": rounds // 4},
        "FedMR": {"name": "fedmr"},
        "FedMR, first stage": {"name": "fedmr", "first_stage_rounds": rounds // 6},
        "FedCDA": {"name": "fedcda", "warmup_rounds": rounds // 2},
        "FedAdp": {"name": "fedadp"},
    }


def two_layers() -> dict[str, Tree]:
    """Return each rule at the cloud."""
    found = {name: {"cloud": {"aggregation": rule}} for name, rule in rules(300).items()}
    return {"FedAvg": {"cloud": {"aggregation": UNIFORM}}, **found}


def methods() -> dict[str, Tree]:
    """Return the methods that are not in `rules`: of devices, of the cloud, of selection; each with uniform weights."""
    cloud: dict[str, Tree] = {
        "FedAvgM 0.5": {"name": "fedavgm", "momentum": 0.5},
        **{
            f"{title} {rate}": {"name": title.lower(), "learning_rate": rate}
            for title in ("FedAdagrad", "FedAdam", "FedYogi")
            for rate in (0.01, 0.03, 0.1)
        },
        "FedExP": {"name": "fedexp"},
        "FedNova": {"name": "fednova"},
        "median": {"name": "median"},
        "trimmed mean 0.2": {"name": "trimmed_mean", "trim": 0.2},
        "multi-Krum 1 of 6": {"name": "krum", "wrong": 1, "keep": 5},
    }
    weighted = ("fedavgm", "fedadagrad", "fedadam", "fedyogi", "fedexp", "fednova")
    found: dict[str, Tree] = {"FedAvg": {}}
    for name, mu in (("FedProx 0.01", 0.01), ("FedProx 0.1", 0.1)):
        found[name] = {"training": {"objective": {"name": "fedprox", "mu": mu}}}
    for name, mu in (("MOON 0.1", 0.1), ("MOON 1", 1.0)):
        found[name] = {"training": {"objective": {"name": "moon", "mu": mu}}}
    found["FedSAM 0.05"] = {"training": {"objective": {"name": "fedsam", "rho": 0.05}}}
    for name, rule in cloud.items():
        weights = {"weights": "uniform"} if rule["name"] in weighted else {}
        found[name] = {"cloud": {"aggregation": {**rule, **weights}}}
    found["norm bound 1.5, clipped"] = {"cloud": {"norm_bound": {"action": "clip", "factor": 1.5}}}
    found["round robin"] = {"cloud": {"selection": {"name": "round_robin"}}}
    found["FedCluster of 5"] = {"cloud": {"selection": {"name": "fedcluster"}}}
    found["CluSamp"] = {"cloud": {"aggregation": {"name": "clusamp"}}}
    for name in ("FedMA", "GAMF"):
        found[name] = {"cloud": {"aggregation": {"name": name.lower(), "weights": "uniform"}}}
    held_out: dict[str, Tree] = {
        "FedAvg": UNIFORM,
        "FedDF 100 steps": {"name": "feddf", "weights": "uniform", "steps": 100},
        "FedBE": {"name": "fedbe", "weights": "uniform"},
        "FedLAW": {"name": "fedlaw", "weights": "uniform"},
    }
    for name, rule in held_out.items():  # 2 % of digits' training samples
        found[f"{name}, 29 held out"] = {"data": {"node_samples": 29}, "cloud": {"aggregation": rule}}
    for name, objective in (("SCAFFOLD", {"name": "scaffold"}), ("FedDyn 0.1", {"name": "feddyn", "alpha": 0.1})):
        found[name] = {"training": {"objective": objective}, "cloud": {"aggregation": {"name": objective["name"]}}}
    for weight in (0.2, 1.0):
        found[f"FedGen {weight:g}"] = {
            "training": {"objective": {"name": "fedgen", "alpha": weight, "beta": weight}},
            "cloud": {"aggregation": {"name": "fedgen", "weights": "uniform"}},
        }
    found["power-of-choice 12"] = {"cloud": {"selection": {"name": "power_of_choice", "candidates": 12}}}
    return {name: merged({"cloud": {"aggregation": UNIFORM}}, tree) for name, tree in found.items()}


def three_layers() -> dict[str, Tree]:
    """Return each rule at the cloud, at the institutions (with uniform FedAvg at the other level) and at both."""
    found: dict[str, Tree] = {
        "FedAvg": {"cloud": {"aggregation": UNIFORM}, "institution": {"aggregation": UNIFORM}},
        "FedAvg by data": {"cloud": {"aggregation": BY_DATA}, "institution": {"aggregation": BY_DATA}},
    }
    below = rules(120)
    for name, rule in rules(30).items():
        if rule is BY_DATA:
            continue
        found[f"{name}, cloud"] = {"cloud": {"aggregation": rule}, "institution": {"aggregation": UNIFORM}}
        found[f"{name}, institutions"] = {
            "cloud": {"aggregation": UNIFORM},
            "institution": {"aggregation": below[name]},
        }
        found[f"{name}, both"] = {"cloud": {"aggregation": rule}, "institution": {"aggregation": below[name]}}
        if rule["name"] in ("fedcross", "fedmr", "independent"):
            carried = {**below[name], "on_new_model": "recentre"}
            found[f"{name}, institutions, recentre"] = merged(
                found[f"{name}, institutions"], {"institution": {"aggregation": carried}}
            )
    return found


def tempo() -> dict[str, Tree]:
    """Return fixed epochs, Tempo, its variants and its controls, with data-weighted FedAvg as in the paper."""
    tempo = {"name": "tempo"}
    controls: dict[str, Tree] = {
        "fixed epochs": {"name": "fixed"},
        "Tempo": tempo,
        "Tempo, omega per epoch": {**tempo, "per_epoch": True},
        "Tempo, its public code's form": {**tempo, "variant": "plato"},
        "shuffled": {**tempo, "control": "shuffled"},
        "fixed mean": {**tempo, "control": "fixed_mean"},
    }
    return {name: {"cloud": {"epoch_control": control}} for name, control in controls.items()}


def _data(partition: str, concentration: float, noise: float) -> Tree:
    return {"data": {"partition": partition, "concentration": concentration, "noise": noise}}


_SPLITS: Final = {
    "dirichlet-0.1": ("Dirichlet 0.1", "dirichlet", 0.1),
    "dirichlet-0.5": ("Dirichlet 0.5", "dirichlet", 0.5),
    "institutions-0.1": ("institutions by Dirichlet 0.1, their devices IID", "institution_dirichlet", 0.1),
}
_NOISES: Final = {"clean": ("clean images", 0.0, 0.9), "noisy": ("noise 0.4", 0.4, 0.72)}
_KINDS: Final = {
    "two": ("Two layers, 30 devices, 6 selected", TWO_LAYERS, two_layers, 25),
    "methods": ("Two layers, 30 devices, 6 selected; other methods", TWO_LAYERS, methods, 25),
    "three": ("Three layers, 5 institutions of 6 devices, 3 selected", THREE_LAYERS, three_layers, 10),
    "tempo": ("Tempo, 5 institutions of 6 devices, 3 selected, c = 4", TEMPO, tempo, 10),
}
_SEEN: Final = {
    "two-clean-dirichlet-0.1": (
        Seen("FedCross 0.99", 25, (5.6, 5.6), below=True),
        Seen("FedMR", 25, (7.0, 9.0), below=True),
    ),
    "two-noisy-dirichlet-0.5": (
        Seen("FedAvg", 300, (73.7, 73.7)),
        Seen("FedCross 0.9", 300, (75.2, 75.2)),
        Seen("FedCross 0.99", 300, (76.7, 76.7)),
        Seen("FedMR", 300, (76.5, 76.5)),
        Seen("independent", 300, (76.5, 76.5)),
    ),
}


def _parts() -> dict[str, StudyPart]:
    parts = {}
    for kind, (what, base, rows, early) in _KINDS.items():
        for noisy, (images, noise, target) in _NOISES.items():
            for split, (devices, partition, concentration) in _SPLITS.items():
                if kind in ("two", "methods") and partition == "institution_dirichlet":
                    continue  # there is no institution
                if kind == "methods" and noise:
                    continue  # its rows are twice as many
                name = f"{kind}-{noisy}-{split}"
                tree = merged(base, _data(partition, concentration, noise))
                parts[name] = StudyPart(
                    f"{what}; {images}; {devices}", tree, rows(), target, early, _SEEN.get(name, ())
                )
    return parts


PARTS: Final = MappingProxyType(_parts())
