"""Tempo's epoch control (Ying, Li, Li: "Tempo", eq. 9): institutions far from the global model
train fewer epochs.

Computed as a ratio, which equals the paper's equation exactly at both ends of its range:

    u_m   = (ln max - ln omega_m) / (ln max - ln min)          in [0, 1]
    tau_m = ceil(round(c/2 * (1 + 3 u_m), 9))                  in [ceil(c/2), 2c]

The rounding before ceil is necessary: computed literally in floats, eq. 9 often lands just above an
integer.

Options besides the paper's rule, for comparison (`EpochControl`): the variant of the authors'
public code, with the number of institutions in place of c; two controls that spend the same epochs
regardless of the distances; and distances divided by the epochs that led to them. The latter
counters an oscillation: an institution that trains long is far away and then trains little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from fedstrata.common.errors import RunFailed
from fedstrata.common.settings.cloud import EpochControl

FLOOR: Final = 1e-12
# more than a float32 mean changes the logarithm of a distance, see docs/algorithms/tempo.md
EQUAL: Final = 1e-5


def decide(
    control: EpochControl,
    omegas: Mapping[str, float],
    *,
    c: int,
    ran: Mapping[str, int],
    samples: Mapping[str, int],
    draw: np.random.Generator,
) -> dict[str, int]:
    """Return tau_c[m] of each reporting institution for the next global round, following the
    experiment's control.

    `omegas`: ||w_m - w_c||; for the variant `plato` the sums over the tensors
    (`statistics.tensor_distances`), here weighted by `samples`. `ran`: the epochs that led to the
    distances. `draw` is the generator of the controls.
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


def next_epochs(
    omegas: Mapping[str, float], c: int, *, centre: int | None = None
) -> dict[str, int]:
    """Return tau_c[m] of each reporting institution for the next global round, from omega_m = ||w_m
    - w_c||.

    The farthest gets ceil(centre / 2), the nearest 2 * centre; the default centre is the paper's,
    c. A single institution, or omegas that are all equal or zero, give c everywhere. Values below
    1e-12 of the largest are raised to that. Raises RunFailed on a distance that is not finite.
    """
    for name, omega in omegas.items():
        if not math.isfinite(omega) or omega < 0:
            raise RunFailed(
                f"Tempo: the model of {name} is at distance {omega} from the global model: it "
                "diverged"
            )
    largest = max(omegas.values(), default=0.0)
    if len(omegas) < 2 or largest == 0.0:
        return dict.fromkeys(omegas, c)
    logs = {name: math.log(max(omega / largest, FLOOR)) for name, omega in omegas.items()}
    low = min(logs.values())
    high = max(logs.values())
    if high - low < EQUAL:
        return dict.fromkeys(omegas, c)
    centre = c if centre is None else centre
    least = max(1, math.ceil(centre / 2))
    most = 2 * centre
    epochs = {
        n: math.ceil(round(centre / 2 * (1 + 3 * (high - log) / (high - low)), 9))
        for n, log in logs.items()
    }
    return {name: min(max(tau, least), most) for name, tau in epochs.items()}


def dealt(epochs: Mapping[str, int], *, even: bool, draw: np.random.Generator) -> dict[str, int]:
    """Return the same total of epochs, distributed over the institutions at random.

    The amounts are permuted (*shuffled*), or each is the mean (*fixed mean*): its floor, plus one
    for some institutions if the mean is not an integer.
    """
    amounts = list(epochs.values())
    if even and amounts:
        share, left = divmod(sum(amounts), len(amounts))
        amounts = [share + (place < left) for place in range(len(amounts))]
    return {
        name: amounts[place]
        for name, place in zip(epochs, draw.permutation(len(amounts)), strict=True)
    }
