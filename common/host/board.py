"""What slows or wears down a board: its power supply, its temperature, and swap on its card.

The firmware of a Raspberry Pi reports its state as bits (the page of `vcgencmd get_throttled`):

    0  under-voltage             16  under-voltage has occurred since the board started
    1  frequency is capped       17  the frequency was capped
    2  throttled                 18  it was throttled
    3  soft temperature limit    19  the soft temperature limit was reached

Its kernels have them as a file, and mainline kernels the under-voltage alone (`rpi_volt`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fedstrata.common.host.energy_meters import PATIENCE_S, VCGENCMD, text_of

POWER: Final = "power supply"
SPEED: Final = "full speed"
TEMPERATURE: Final = "temperature"
SWAP: Final = "swap"
BOARD_ITEMS: Final = frozenset({POWER, SPEED, TEMPERATURE, SWAP})
HOT_C: Final = 80.0  # from which a Raspberry Pi throttles
SINCE_START: Final = 16  # the bits that remember those now
UNDER_VOLTAGE: Final = 1 << 0
SLOWED: Final = {1 << 1: "its frequency is capped", 1 << 2: "throttled", 1 << 3: "hot"}
_BITS: Final = re.compile(r"^(?:throttled=)?(?:0x)?([0-9a-fA-F]+)$")
_CARD: Final = re.compile(r"mmcblk\d+")


def board_problems(
    proc: Path = Path("/proc"), sys: Path = Path("/sys")
) -> Iterator[tuple[str, str]]:
    """Yield each item for which this host can be examined, and its problem with the remedy; "":
    none.
    """
    bits = _firmware_bits(sys)
    if bits is not None:
        yield POWER, _power(bits)
        yield SPEED, _speed(bits)
    if (celsius := _hottest(sys)) is not None:
        yield TEMPERATURE, _warmth(celsius, _limit(sys))
    if (swaps := text_of(proc / "swaps")).count("\n"):
        yield SWAP, _swap(swaps, sys)


def _firmware_bits(sys: Path) -> int | None:
    """Return the bits of a Raspberry Pi's firmware, None for other hosts."""
    for file in sorted((sys / "devices" / "platform").glob("*/*firmware*/get_throttled")):
        if (found := _BITS.match(text_of(file))) is not None:
            return int(found[1], 16)
    for file in sorted((sys / "class" / "hwmon").glob("hwmon*/in0_lcrit_alarm")):
        if text_of(file.parent / "name") == "rpi_volt":
            # the driver remembers it until it is read
            return UNDER_VOLTAGE << SINCE_START if text_of(file) == "1" else 0
    return _asked_bits()


def _asked_bits() -> int | None:
    program = shutil.which(VCGENCMD)
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "get_throttled"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = _BITS.match(done.stdout.strip())
    if found is None:
        return None
    return int(found[1], 16)


def _power(bits: int) -> str:
    remedy = "Use the board's own power supply and a short cable."
    if bits & UNDER_VOLTAGE:
        return f"under-voltage now: the board is slowed, and may stop. {remedy}"
    if bits & UNDER_VOLTAGE << SINCE_START:
        return f"under-voltage since the board started. {remedy}"
    return ""


def _speed(bits: int) -> str:
    now = [text for bit, text in SLOWED.items() if bits & bit]
    if now:
        return f"slowed now ({', '.join(now)}): cool it, and see its power supply"
    before = [text for bit, text in SLOWED.items() if bits & bit << SINCE_START]
    if before:
        return f"slowed since the board started ({', '.join(before)}): cool it"
    return ""


def _hottest(sys: Path) -> float | None:
    """Return the temperature of the hottest zone, None without zones."""
    found = []
    for zone in (sys / "class" / "thermal").glob("thermal_zone*"):
        millidegrees = text_of(zone / "temp")
        if millidegrees.lstrip("-").isdecimal():
            found.append(int(millidegrees) / 1000)
    return max(found, default=None)


def _limit(sys: Path) -> float | None:
    """Return the temperature from which the host slows itself, None where it is not known."""
    found = []
    for kind in (sys / "class" / "thermal").glob("thermal_zone*/trip_point_*_type"):
        millidegrees = text_of(kind.with_name(kind.name.replace("_type", "_temp")))
        if text_of(kind) == "passive" and millidegrees.isdecimal() and int(millidegrees):
            found.append(int(millidegrees) / 1000)
    if not found and (sys / "firmware" / "devicetree" / "base" / "model").exists():
        return HOT_C
    return min(found, default=None)


def _warmth(celsius: float, limit: float | None) -> str:
    if limit is None or celsius < limit:
        return ""
    return f"{celsius:.0f} °C, and it slows itself from {limit:.0f} °C on: cool it"


def _swap(swaps: str, sys: Path) -> str:
    """Return the problem of swap on a card, from the text of /proc/swaps."""
    for line in swaps.splitlines()[1:]:
        place = line.split()[0].replace("\\040", " ")
        if card := _card_of(place, sys):
            return f"{place} is on the card {card}, which it wears and waits for. Use zram instead."
    return ""


def _card_of(place: str, sys: Path) -> str:
    """Return the card, an SD card or eMMC, that has a partition or a file; "" if none has it."""
    name = Path(place).name
    if not place.startswith("/dev/"):
        try:
            device = os.stat(place).st_dev
        except OSError:
            return ""
        link = sys / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}"
        name = link.resolve().name
    found = _CARD.match(name)
    if found is None:
        return ""
    return found[0]
