"""The synthetic trace of a Wi-Fi link: `python -m docs.tools.wifi_trace >
common/settings/traces/wifi-synthetic.csv`.

Nothing of it was measured. Rates are those of IEEE 802.11n for one stream of 20 MHz with a long
guard interval, the fastest that a board with one antenna has at 2.4 GHz, of which half is left to
the user. Each second the rate may move to a neighbour on that ladder, as rate adaptation does, and
rather upwards. How often it moves, the jitter, and the outages are assumptions.
"""

from __future__ import annotations

from typing import Final

import numpy as np

SECONDS: Final = 300
# Mbit/s on the air, MCS 0 to 7
LADDER: Final = (6.5, 13.0, 19.5, 26.0, 39.0, 52.0, 58.5, 65.0)
USABLE: Final = 0.5  # of the rate on the air
MOVES: Final = 0.3  # probability of a second
UPWARDS: Final = 0.55  # of the moves
DELAY_MS: Final = 1.0  # one way, half the round trip of Firefox's throttling profile "Wi-Fi"
JITTER_MS: Final = 2.0  # mean of an exponential distribution
OUTAGES: Final = ((83, 1), (171, 2), (254, 1))  # begin and length in seconds: roaming, interference
SEED: Final = 1


def trace() -> str:
    """Return the trace, CSV."""
    draw = np.random.default_rng(SEED)
    out = {begin + more for begin, length in OUTAGES for more in range(length)}
    place = len(LADDER) - 1
    lines = ["seconds,up_mbit,down_mbit,delay_ms"]
    for second in range(SECONDS):
        if draw.random() < MOVES:
            place += 1 if draw.random() < UPWARDS else -1
            place = min(max(place, 0), len(LADDER) - 1)
        delay_ms = DELAY_MS + draw.exponential(JITTER_MS)
        mbit = 0.0 if second in out else USABLE * LADDER[place]
        lines.append(f"{second},{mbit:g},{mbit:g},{delay_ms:.1f}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(trace(), end="")
