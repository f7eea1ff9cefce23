"""What a board's owner should know: power, speed, temperature, swap. The kernel's files are the
test's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from fedstrata.common.host.board import POWER, SPEED, SWAP, TEMPERATURE, board_problems
from fedstrata.common.host.examination import examine_host
from tests.helpers.energy import vcgencmd

FIRMWARE: Final = "sys/devices/platform/soc/soc:firmware/get_throttled"
MODEL: Final = "sys/firmware/devicetree/base/model"
ZONE: Final = "sys/class/thermal/thermal_zone0"
SWAPS: Final = "Filename\tType\tSize\tUsed\tPriority\n"
HWMON: Final = "sys/class/hwmon/hwmon2"


def host(folder: Path, files: Mapping[str, str]) -> dict[str, str]:
    """Write a host's files; return the problems found there, by item."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return dict(board_problems(folder / "proc", folder / "sys"))


@pytest.fixture(autouse=True)
def _no_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize(
    ("bits", "power", "speed"),
    [
        ("0", "", ""),
        ("50005", "under-voltage now", "slowed now (throttled)"),
        ("0x50000", "under-voltage since", "slowed since the board started (throttled)"),
        ("80008", "", "slowed now (hot)"),
        ("e0006", "", "slowed now (its frequency is capped, throttled)"),
        ("20000", "", "slowed since the board started (its frequency is capped)"),
    ],
)
@pytest.mark.parametrize("by", ["file", "program"])
def test_the_bits_of_a_raspberry_pi(
    bits: str, power: str, speed: str, by: str, tmp_path: Path
) -> None:
    files = {FIRMWARE: f"{bits}\n"} if by == "file" else {}
    if by == "program":
        text = f"0x{bits.removeprefix('0x')}"
        vcgencmd(tmp_path, f"test $1 = get_throttled || exit 1\necho throttled={text}")
    found = host(tmp_path, files)
    assert found.keys() == {POWER, SPEED}
    for text, wanted in ((found[POWER], power), (found[SPEED], speed)):
        assert text.startswith(wanted) and bool(text) is bool(wanted)


def test_a_mainline_kernel_knows_the_under_voltage_alone(tmp_path: Path) -> None:
    files = {f"{HWMON}/name": "rpi_volt\n", f"{HWMON}/in0_lcrit_alarm": "1\n"}
    assert "under-voltage since" in host(tmp_path, files)[POWER]
    assert host(tmp_path, {f"{HWMON}/in0_lcrit_alarm": "0\n"})[POWER] == ""
    assert POWER not in host(tmp_path, {f"{HWMON}/name": "nvme\n"})


@pytest.mark.parametrize(
    "script", ["exit 1", "echo nonsense", "echo throttled=", "echo VCHI initialization failed"]
)
def test_a_program_without_an_answer_is_no_finding(script: str, tmp_path: Path) -> None:
    vcgencmd(tmp_path, script)
    assert host(tmp_path, {}) == {}


@pytest.mark.parametrize(
    ("celsius", "files", "problem"),
    [
        (79, {MODEL: "Raspberry Pi 5"}, ""),
        (81, {MODEL: "Raspberry Pi 5"}, "81 °C, and it slows itself from 80 °C on: cool it"),
        (71, {f"{ZONE}/trip_point_0_type": "passive", f"{ZONE}/trip_point_0_temp": "70000"}, "71"),
        (95, {f"{ZONE}/trip_point_0_type": "critical", f"{ZONE}/trip_point_0_temp": "90000"}, ""),
        (95, {}, ""),
    ],
)
def test_a_host_that_slows_itself_is_named(
    celsius: int, files: dict[str, str], problem: str, tmp_path: Path
) -> None:
    found = host(tmp_path, {f"{ZONE}/temp": f"{celsius}000\n", **files})
    assert found[TEMPERATURE].startswith(problem) and bool(found[TEMPERATURE]) is bool(problem)


def test_swap_on_a_card_is_named(tmp_path: Path) -> None:
    found = host(tmp_path, {"proc/swaps": SWAPS + "/dev/mmcblk0p3 partition 102396 0 -2\n"})
    assert found[SWAP].startswith("/dev/mmcblk0p3 is on the card mmcblk0")
    assert host(tmp_path, {"proc/swaps": SWAPS + "/dev/zram0 partition 1 0 100\n"})[SWAP] == ""
    assert SWAP not in host(tmp_path, {"proc/swaps": SWAPS})


def test_a_swap_file_on_a_card_is_named(tmp_path: Path) -> None:
    file = tmp_path / "swap file"
    file.touch()
    device = file.stat().st_dev
    link = tmp_path / "sys" / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}"
    text = SWAPS + f"{tmp_path}/swap\\040file file 102396 0 -2\n"
    assert host(tmp_path, {"proc/swaps": text})[SWAP] == ""
    link.parent.mkdir(parents=True)
    link.symlink_to("../../devices/platform/emmc2bus/mmc_host/mmc0/block/mmcblk0/mmcblk0p2")
    assert "is on the card mmcblk0" in host(tmp_path, {})[SWAP]


def test_a_finding_of_a_board_is_useful_and_not_needed(tmp_path: Path) -> None:
    host(tmp_path, {FIRMWARE: "1"})
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    found = {one.item: one for one in examine_host({}, learns=False, proc=proc, sys=sys)}
    assert not found[POWER].there and "under-voltage now" in found[POWER].note
    assert found[SPEED].there and not (found[POWER].needed or found[SPEED].needed)
