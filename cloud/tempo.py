"""Tempo's epoch control (Ying, Li, Li: "Tempo", eq. 9): institutions far from the global model train less.

Computed as a ratio, which is the paper's equation exactly at both ends of its range:

    u_m   = (ln max - ln omega_m) / (ln max - ln min)          in [0, 1]
    tau_m = ceil(round(c/2 * (1 + 3 u_m), 9))                  in [ceil(c/2), 2c]

Rounding before ceil is needed: eq. 9 taken literally in floats often lands just above an integer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from common.errors import RunFailed

FLOOR: Final = 1e-12
EQUAL: Final = 1e-12


def next_epochs(omegas: Mapping[str, float], c: int) -> dict[str, int]:
    """Return tau_c[m] for the next iteration from omega_m = ||w_m - w_c|| of each institution that reported.

    One institution, or omegas that are all equal or zero, give c everywhere; values below 1e-12 of the largest
    are raised to that. Raises RunFailed on a distance that is not finite.
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
    least, most = max(1, math.ceil(c / 2)), 2 * c
    epochs = {n: math.ceil(round(c / 2 * (1 + 3 * (high - log) / (high - low)), 9)) for n, log in logs.items()}
    return {name: min(max(tau, least), most) for name, tau in epochs.items()}
