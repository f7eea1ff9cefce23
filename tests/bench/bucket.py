"""`make bench NAME=bucket`: how exactly the token bucket keeps its rate on the real event loop.

Each rate sends chunks of the size that its link would have for `--seconds`, paced as an endpoint
does it: the next one is reserved when the link is ready, and leaves when its time has come. What
leaves goes nowhere: the broker is not measured. The delay is what a control message needs that is
sent on an idle link of 25 ms.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from math import inf
from statistics import median

from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.protocol.manifest import chunk_bytes_for
from fedstrata.common.protocol.outbox import EARLY_S, Shaper
from fedstrata.common.settings.links import LinkDirection
from tests.bench.running import Table, run

RATES_MBIT = (0.25, 1, 10, 100, 1000)
PEER = "peer"
DELAY_S = 0.025
CHUNKS_LEAST = 8


async def measure_rate(rate: float, chunk_bytes: int, *, seconds: float) -> tuple[int, float]:
    """Send chunks for about so long; return how many followed the first, and in how many seconds."""
    loop = asyncio.get_running_loop()
    shaper = Shaper({PEER: LinkDirection(rate)})
    left: list[float] = []
    chunks = max(CHUNKS_LEAST, int(seconds * rate / chunk_bytes)) + 1
    leaving: deque[float] = deque()
    while len(left) < chunks:
        now = loop.time()
        while leaving and leaving[0] <= now + EARLY_S:
            leaving.popleft()
            left.append(now)
        shaper.passed()
        while len(left) + len(leaving) < chunks and shaper.ready((PEER,), now):
            leaving.append(shaper.reserve((PEER,), chunk_bytes, now))
        ready_at = shaper.next_ready(now)
        at = min([ready_at, *itertools.islice(leaving, 1)])
        if at < inf:
            await asyncio.sleep(max(0.0, at - loop.time()))
    return chunks - 1, left[-1] - left[0]


async def measure_delay(*, repeats: int = 20) -> list[float]:
    """Return the seconds that each of some small messages took to leave."""
    loop = asyncio.get_running_loop()
    shaper = Shaper({PEER: LinkDirection(None, DELAY_S)})
    took = []
    for _ in range(repeats):
        begun = loop.time()
        due = shaper.reserve((PEER,), 100, begun)
        await asyncio.sleep(max(0.0, due - EARLY_S - loop.time()))
        took.append(loop.time() - begun)
    return took


def main(*, seconds: float = 5.0) -> None:
    """Measure each rate and print a row for it."""
    table = Table("rate", "chunk", "chunks", "seconds", "measured", "error")
    for mbit in RATES_MBIT:
        rate = mbit * 1e6 / 8
        chunk_bytes = chunk_bytes_for(rate, TransferSettings().chunk_bytes)
        chunks, took_s = asyncio.run(measure_rate(rate, chunk_bytes, seconds=seconds))
        measured = 8e-6 * chunks * chunk_bytes / took_s
        table.add(
            f"{mbit:g} Mbit/s",
            f"{chunk_bytes} B",
            chunks,
            f"{took_s:.2f}",
            f"{measured:.4g} Mbit/s",
            f"{100 * (measured / mbit - 1):+.2f} %",
        )
    took_ms = [1e3 * each for each in asyncio.run(measure_delay())]
    print(
        f"delay of {1e3 * DELAY_S:g} ms: median {median(took_ms):.2f} ms, "
        f"from {min(took_ms):.2f} to {max(took_ms):.2f} ms"
    )


if __name__ == "__main__":
    run(main)
