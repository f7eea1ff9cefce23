"""The commands of `tc` and `ip` that give an interface the rate and the delay of a link's direction.

Rates count Ethernet frames without preamble and checksum: a full frame has 1514 bytes, 1448 of them TCP payload.
"""

from __future__ import annotations

from typing import Final

from deploy.links.kernel import batch

FRAME_BYTES: Final = 1514
BURST_S: Final = 0.02
QUEUE_S: Final = 0.1
QUEUE_FRAMES_LEAST: Final = 32
SINGLE_FRAMES_MOST_MBIT: Final = 200.0
NETEM_PACKETS_LEAST: Final = 1000
NETEM_MBIT: Final = 1000.0  # rate by which netem's queue is sized if the link is unlimited


def single_frames(interface: str, mbit: float | None) -> list[str]:
    """Return the `ip` commands by which senders on a slow shaped interface pass single frames (gso_max_segs 1).

    With segmentation offload they would pass packets of 64 KB, of which the shaper drops a part, to be sent again; the
    interface's counters would miss their headers, and the bucket would have to hold whole packets. On fast links single
    frames would need more than a core.
    """
    if mbit is None or mbit > SINGLE_FRAMES_MOST_MBIT:
        return []
    return [f"link set dev {interface} gso_max_segs 1"]


def bucket(mbit: float, *, frame_bytes: int = FRAME_BYTES) -> str:
    """Return the tbf of a rate, as `tc` takes it."""
    rate = mbit * 1e6 / 8
    burst = int(max(2 * frame_bytes, rate * BURST_S))
    limit = burst + int(max(QUEUE_FRAMES_LEAST * frame_bytes, rate * QUEUE_S))
    return f"tbf rate {round(8 * rate)}bit burst {burst} limit {limit}"


def shaping(interface: str, *, mbit: float | None, delay_ms: float, frame_bytes: int = FRAME_BYTES) -> list[str]:
    """Return the `tc` commands that shape an interface's outgoing traffic: tbf for the rate, netem for the delay.

    The bucket holds 20 ms of the rate, which compensates for late timers on a busy machine, and at least two frames.
    The queue holds 0.1 s, and at least 32 frames, like that of a home router.
    """
    lines = []
    device = f"dev {interface}"
    if mbit is not None:
        lines.append(f"qdisc add {device} root handle 1: {bucket(mbit, frame_bytes=frame_bytes)}")
    if delay_ms:
        in_flight = (mbit or NETEM_MBIT) * 1e3 * delay_ms / 8 / frame_bytes
        place = "root" if mbit is None else "parent 1:1"
        packets = NETEM_PACKETS_LEAST + int(in_flight)
        lines.append(f"qdisc add {device} {place} netem delay {delay_ms:g}ms limit {packets}")
    return lines


def check_delays(interface: str) -> None:
    """Check on an unshaped interface that the kernel can emulate delays. Raises CommandRefused."""
    batch("tc", shaping(interface, mbit=None, delay_ms=1.0))
    batch("tc", [f"qdisc del dev {interface} root"])
