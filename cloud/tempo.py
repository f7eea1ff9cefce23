"""Tempo's epoch control (Ying, Li, Li: "Tempo", eq. 9): institutions far from the global model train less.

Computed as a ratio, which is the paper's equation exactly at both ends of its range:

    u_m   = (ln max - ln omega_m) / (ln max - ln min)          in [0, 1]
    tau_m = ceil(round(c/2 * (1 + 3 u_m), 9))                  in [ceil(c/2), 2c]

Rounding before ceil is needed: eq. 9 taken literally in floats often lands just above an integer.

Options beside the paper's rule, for comparison (`EpochControl`): the variant of its authors' public code, which has the
number of institutions in place of c; two controls that spend the same epochs without regard to the distances; and
distances divided by the epochs that led to them, against the oscillation that one who trained long is far and then
trains little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from common.errors import RunFailed
from common.experiment.rounds import EpochControl

FLOOR: Final = 1e-12
EQUAL: Final = 1e-12


def decide(
    control: EpochControl,
    omegas: Mapping[str, float],
    *,
    c: int,
    ran: Mapping[str, int],
    samples: Mapping[str, int],
    draw: np.random.Generator,
) -> dict[str, int]:
    """Return tau_c[m] for the next global round of each institution that reported, as the experiment says.

    `omegas`: ||w_m - w_c||, or for the variant `plato` the sums over the tensors (`statistics.tensor_distances`), here
    weighed by `samples`. `ran`: the epochs of the global round that led to them. `draw` deals out the controls' epochs.
    """
    if control.per_epoch:
        omegas = {name: omega / ran[name] for name, omega in omegas.items()}
    if control.variant == "plato":
        omegas = {name: omega * samples[name] for name, omega in omegas.items()}
        epochs = next_epochs(omegas, c, centre=len(omegas))
    else:
        epochs = next_epochs(omegas, c)
    if control.control == "none":
        return epochs
    return dealt(epochs, even=control.control == "fixed_mean", draw=draw)


def next_epochs(omegas: Mapping[str, float], c: int, *, centre: int | None = None) -> dict[str, int]:
    """Return tau_c[m] for the next global round from omega_m = ||w_m - w_c|| of each institution that reported.

    The farthest gets ceil(centre / 2), the nearest 2 * centre; the paper's centre is c, the default. One institution,
    or omegas that are all equal or zero, give c everywhere; values below 1e-12 of the largest are raised to that.
    Raises RunFailed on a distance that is not finite.
    """
    for name, omega in omegas.items():
        if not math.isfinite(omega) or omega < 0:
            raise RunFailed(f"Tempo: the model of {name} is at distance {omega} from the global model: it diverged")
    largest = max(omegas.values(), default=0.0)
    if len(omegas) < 2 or largest == 0.0:
        return dict.fromkeys(omegas, c)
    logs = {name: math.log(max(omega / largest, FLOOR)) for name, omega in omegas.items()}
    low, high = min(logs.values()), max(logs.values())
    if high - low < EQUAL:
        return dict.fromkeys(omegas, c)
    centre = c if centre is None else centre
    least, most = max(1, math.ceil(centre / 2)), 2 * centre
    epochs = {n: math.ceil(round(centre / 2 * (1 + 3 * (high - log) / (high - low)), 9)) for n, log in logs.items()}
    return {name: min(max(tau, least), most) for name, tau in epochs.items()}


def dealt(epochs: Mapping[str, int], *, even: bool, draw: np.random.Generator) -> dict[str, int]:
    """Return the same number of epochs in all, dealt to the institutions by chance.

    As they are (*shuffled*), or each the mean (*fixed mean*): its floor, and one more for some where it is no integer.
    """
    amounts = list(epochs.values())
    if even and amounts:
        share, left = divmod(sum(amounts), len(amounts))
        amounts = [share + (place < left) for place in range(len(amounts))]
    return {name: amounts[place] for name, place in zip(epochs, draw.permutation(len(amounts)), strict=True)}
