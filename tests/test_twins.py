"""Each rule of one model by the equations of its page, in whole labs: partial participation, unequal
samples, refused uploads, a kill.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tests.helpers.twins import Doubles, Round, Step, twin

# name: the rule's table, its step, and other tables
Case = tuple[dict[str, Any], Step, dict[str, Any]]


def mean(weights: str) -> Step:
    return lambda now: now.shares_K(weights) @ now.uploads_KD


def towards_mean(now: Round) -> Doubles:
    return now.shares_K("data") @ now.uploads_KD - now.z_D


def fedavgm(now: Round) -> Doubles:
    now.state["v"] = 0.5 * now.state.get("v", 0.0) + towards_mean(now)
    return now.z_D + 0.8 * now.state["v"]


def adaptive(second: Callable[[Doubles, Doubles], Doubles], *, b1: float) -> Step:
    """Reddi et al. 2021, Algorithm 2, with a tau of 0.01."""

    def step(now: Round) -> Doubles:
        d = towards_mean(now)
        m = now.state["m"] = b1 * now.state.get("m", 0.0) + (1 - b1) * d
        v = now.state["v2"] = second(now.state.get("v2", 0 * d + 0.01**2), d**2)
        return now.z_D + 0.05 * m / (np.sqrt(v) + 0.01)

    return step


def fedexp(now: Round) -> Doubles:
    d = towards_mean(now)
    squares = now.shares_K("data") @ (now.steps_KD**2).sum(axis=1)
    eta = max(1.0, squares / (2 * (d @ d + len(now.children) * 0.001)))
    return now.z_D + eta * d


def fednova(now: Round) -> Doubles:
    p_K = now.shares_K("data")
    a_K = np.array([float(report.path_steps) for report in now.reports])
    return now.z_D + (p_K @ a_K) * ((p_K / a_K) @ now.steps_KD)


def qfedavg(now: Round) -> Doubles:
    """q = 2, L = 1 / 0.05."""
    f_K = np.array([report.start_loss or 0.0 for report in now.reports])
    h_K = 2 * f_K * 20**2 * (now.steps_KD**2).sum(axis=1) + 20 * f_K**2
    return now.z_D + 20 * f_K**2 @ now.steps_KD / h_K.sum()


def fedadp(now: Round) -> Doubles:
    d = towards_mean(now)
    lengths_K = np.linalg.norm(now.steps_KD, axis=1) * np.linalg.norm(d)
    thetas_K = np.arccos(np.clip(now.steps_KD @ d / lengths_K, -1, 1))
    for child, theta in zip(now.children, thetas_K, strict=True):
        now.state.setdefault(child, []).append(theta)
    smooth_K = np.array([np.mean(now.state[child]) for child in now.children])
    w_K = now.samples_K * np.exp(4 * (1 - np.exp(-np.exp(-4 * (smooth_K - 1)))))
    return w_K / w_K.sum() @ now.uploads_KD


def scaffold(now: Round) -> Doubles:
    changes_D = now.extras["control_change"].sum(axis=0)
    now.state["control"] = now.state.get("control", 0.0) + changes_D / now.number
    return now.z_D + 0.5 * now.steps_KD.mean(axis=0)


def feddyn(now: Round) -> Doubles:
    alpha = 0.05
    h = now.state["h"] = now.state.get("h", 0.0) - alpha / now.number * now.steps_KD.sum(axis=0)
    return now.uploads_KD.mean(axis=0) - h / alpha


def fedbuff(now: Round) -> Doubles:
    w_K = 0.7 * now.shares_K("data") / (1 + now.ages_K) ** 0.5
    return now.z_D + w_K @ now.steps_KD


def clusamp(now: Round) -> Doubles:
    draws: Any = now.outcome.facts["draws"]
    times_K = np.array([float(draws[child]) for child in now.children])
    return times_K / times_K.sum() @ now.uploads_KD


def median(now: Round) -> Doubles:
    found: Doubles = np.median(now.uploads_KD, axis=0)
    return found


def trimmed_mean(now: Round) -> Doubles:
    count = len(now.children)
    out = int(Fraction("0.34") * count)
    found: Doubles = np.sort(now.uploads_KD, axis=0)[out : count - out].mean(axis=0)
    return found


def geometric_median(weights: str) -> Step:
    def step(now: Round) -> Doubles:
        shares_K = now.shares_K(weights)
        z = shares_K @ now.uploads_KD
        for _ in range(100):
            near_K = shares_K / np.maximum(np.linalg.norm(now.uploads_KD - z, axis=1), 1e-6)
            z = near_K @ now.uploads_KD / near_K.sum()
        return z

    return step


def centred_clipping(radius: float | None) -> Step:
    def step(now: Round) -> Doubles:
        tau = radius or float(np.median(np.linalg.norm(now.steps_KD, axis=1)))
        v = now.z_D
        for _ in range(3):
            far_K = np.linalg.norm(now.uploads_KD - v, axis=1)
            v = v + (np.minimum(1, tau / far_K)[:, None] * (now.uploads_KD - v)).mean(axis=0)
        return v

    return step


def foolsgold(now: Round) -> Doubles:
    """Algorithm 1 of Fung et al. 2020."""
    for child, step_D in zip(now.children, now.steps_KD, strict=True):
        now.state[child] = now.state.get(child, 0.0) + step_D
    sums = np.array([now.state[child] for child in now.children])
    sums /= np.linalg.norm(sums, axis=1)[:, None]
    cs = sums @ sums.T - 3 * np.eye(len(sums))
    v = cs.max(axis=1)
    for i, j in product(range(len(v)), range(len(v))):
        if i != j and v[j] > v[i]:
            cs[i, j] *= v[i] / v[j]
    alpha = np.clip(1 - cs.max(axis=1), 0, 1)
    alpha = np.minimum(alpha / alpha.max(), 0.99)
    with np.errstate(divide="ignore"):
        alpha = np.clip(np.log(alpha / (1 - alpha)) + 0.5, 0, 1)
    weights_K: Doubles = alpha / alpha.sum()
    return weights_K @ now.uploads_KD


def objective(name: str, **keys: Any) -> dict[str, Any]:
    return {"training": {"objective": {"name": name, **keys}}}


SERVER: Final = {"learning_rate": 0.05, "tau": 0.01}
UNIFORM: Final = mean("uniform")
CASES: Final[dict[str, Case]] = {
    "fedavg": ({}, mean("data"), {}),
    "fedavg uniform": ({"weights": "uniform"}, UNIFORM, {}),
    "fedavgm": ({"momentum": 0.5, "learning_rate": 0.8}, fedavgm, {}),
    "fedadagrad": (SERVER, adaptive(lambda v, d2: v + d2, b1=0), {}),
    "fedadam": (SERVER, adaptive(lambda v, d2: 0.99 * v + 0.01 * d2, b1=0.9), {}),
    "fedyogi": (SERVER, adaptive(lambda v, d2: v - 0.01 * d2 * np.sign(v - d2), b1=0.9), {}),
    "fedexp": ({}, fedexp, {}),
    "fednova": ({}, fednova, {"training": {"batch_size": 32}}),
    "qfedavg": ({"q": 2.0}, qfedavg, {}),
    "fedadp": ({"a": 4.0}, fedadp, {}),
    "scaffold": ({"learning_rate": 0.5}, scaffold, objective("scaffold")),
    "feddyn": ({}, feddyn, objective("feddyn", alpha=0.05)),
    "feddyn null": ({}, UNIFORM, objective("feddyn", alpha=0.0)),
    "fedbuff": ({"weights": "data", "learning_rate": 0.7, "buffer": 2}, fedbuff, {}),
    "clusamp": ({}, clusamp, {}),
    "clusamp l1": ({"distance": "l1"}, clusamp, {}),
    "median": ({}, median, {}),
    "trimmed_mean": ({"trim": 0.34}, trimmed_mean, {}),
    "geometric_median": ({}, geometric_median("uniform"), {}),
    "geometric_median data": ({"weights": "data"}, geometric_median("data"), {}),
    "centred_clipping": ({}, centred_clipping(None), {}),
    "centred_clipping radius": ({"radius": 0.01}, centred_clipping(0.01), {}),
    "foolsgold": ({}, foolsgold, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_its_equations(name: str, tmp_path: Path) -> None:
    tree, step, tables = CASES[name]
    twin({"name": name.split(maxsplit=1)[0], **tree}, step, tmp_path, **tables)
