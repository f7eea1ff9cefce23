"""Energy and disk of a host, read from files and outputs as Linux, the Raspberry Pi and NVIDIA's
driver have them.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstrata.cloud.cloud_agent import energy_noted
from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.experiment.reading import parse
from fedstrata.common.host import energy_meters
from fedstrata.common.host.energy_meters import (
    GAP_MOST_S,
    EnergyMeter,
    PowerIntegral,
    pmic,
    rails_watts,
)
from fedstrata.common.host.machine import REST_S, FolderUsage
from fedstrata.common.host.nvidia import Gpus
from tests.helpers.energy import RANGE, RECORDED, REPORTS, vcgencmd, zone
from tests.test_metrics import Driver, Hand


def test_packages_and_their_memory_are_counted_through_a_wrap(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", RANGE - 1_000_000)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 5_000_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 77)  # a part of the package
    zone(tmp_path, "intel-rapl:1", "psys", 99)  # contains the package
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 55)  # the same package by another way
    meter = EnergyMeter(tmp_path, None)
    assert dict(meter.read()) == {("rapl", "package-0"): 0.0, ("rapl", "dram-0"): 0.0}
    memory.write_text("6500000\n")
    package.write_text("2000000\n")
    assert dict(meter.read()) == {("rapl", "package-0"): 3.0, ("rapl", "dram-0"): 1.5}
    package.write_text("2250000\n")
    assert dict(meter.read())["rapl", "package-0"] == 3.25


@pytest.mark.skipif(os.getuid() == 0, reason="root reads every file")
def test_counters_of_root_alone_are_absent(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 1).chmod(0)
    assert dict(EnergyMeter(tmp_path, None).read()) == {}


@pytest.mark.parametrize("content", ["", "n/a", "-5"])
def test_counters_that_cannot_be_read_are_absent(content: str, tmp_path: Path) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "package-0", content)
    meter = EnergyMeter(tmp_path, None)
    assert dict(meter.read()) == {}
    counter.unlink()
    counter.mkdir()  # any OSError
    assert dict(meter.read()) == {}


def test_a_host_without_any_source_has_no_energy(tmp_path: Path) -> None:
    assert dict(EnergyMeter(tmp_path, None).read()) == {}


def test_gpus_have_the_counter_of_their_driver(tmp_path: Path) -> None:
    assert dict(EnergyMeter(tmp_path, Gpus(Driver())).read()) == {("nvml", "gpu-0"): 1234.5}


def test_the_rails_of_a_raspberry_pi_5_are_added() -> None:
    watts = 0.09174404 * 3.69432 + 0.07417228 * 3.309344 + 2.1312 * 0.7215592
    assert rails_watts(RECORDED) == pytest.approx(watts)
    assert rails_watts('error=1 error_msg="Command not registered"\n') is None  # a Raspberry Pi 4
    assert rails_watts("") is None


def test_power_is_integrated_between_readings_but_not_over_long_gaps() -> None:
    clock = Hand()
    watts: list[float | None] = [4.0, 8.0, None, 8.0, 100.0, 2.0]
    integral = PowerIntegral(lambda: watts.pop(0), clock)
    found = []
    for step_s in (0, 5, 5, 5, GAP_MOST_S + 1, 1):
        clock.now += step_s
        found.append(integral.joules())
    assert found == [0.0, 30.0, None, 110.0, 110.0, 161.0]


@pytest.mark.parametrize(
    ("text", "known"),
    [
        (REPORTS, True),
        ("echo 'error=1 error_msg=\"Command not registered\"'; exit 255", False),
        ("exec sleep 60", False),
    ],
)
def test_the_power_chip_is_asked_where_there_is_one(
    text: str, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vcgencmd(tmp_path, text)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(energy_meters, "PATIENCE_S", 0.3 if "sleep" in text else 10.0)
    power = pmic()
    assert (power is not None) is known
    if power is not None:
        assert set(dict(EnergyMeter(tmp_path, None, power=power).read())) == {("pmic", "rails")}


def test_the_energy_of_a_run_is_added_over_restarts(tmp_path: Path) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    folder = RunFolder.create(tmp_path / "runs", parse({}))

    async def take(microjoules: int, meter: EnergyMeter | None) -> None:
        async with energy_noted(folder, meter):
            counter.write_text(str(microjoules))

    def noted() -> Any:
        return json.loads((folder.path / "manifest.json").read_text()).get("energy")

    asyncio.run(take(6_000_000, None))
    asyncio.run(take(7_000_000, EnergyMeter(tmp_path / "elsewhere", None)))
    assert noted() is None, "not known is not zero"
    meter = EnergyMeter(tmp_path, None)
    counter.write_text("8000000")
    asyncio.run(take(9_000_000, meter))  # what was used before is not the run's
    asyncio.run(take(11_500_000, EnergyMeter(tmp_path, None)))
    (host,) = noted().values()
    assert host["joules"] == {"rapl package-0": 3.5} and host["seconds"] > 0


def test_a_machine_without_vcgencmd_has_no_power_chip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pmic() is None


def files(folder: Path, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)


def test_the_disk_of_a_folder_is_counted_now_and_then(tmp_path: Path) -> None:
    clock, folder = Hand(), tmp_path / "runs"
    usage = FolderUsage(folder, clock)
    assert usage.used_bytes() is None and usage.free_bytes() is None
    files(folder, {"a": 8192, "run/deep/b": 16384})
    (tmp_path / "elsewhere").write_bytes(bytes(1 << 20))
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "loop").symlink_to(folder)
    free = usage.free_bytes()
    assert free is not None and free > 0
    assert usage.used_bytes() == 8192 + 16384
    files(folder, {"c": 4096})
    assert usage.used_bytes() == 8192 + 16384, "counted again too early"
    clock.now += REST_S
    assert usage.used_bytes() == 8192 + 16384 + 4096


def test_a_folder_that_takes_long_to_count_is_counted_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, counts = Hand(), 0

    def count(_: Path) -> int:
        nonlocal counts
        counts += 1
        clock.now += 10
        return counts

    monkeypatch.setattr("fedstrata.common.host.machine._bytes_below", count)
    usage = FolderUsage(tmp_path, clock)
    reads: list[Callable[[], int | None]] = [usage.used_bytes] * 3
    found = []
    for read in reads:
        found.append(read())
        clock.now += 300
    assert found == [1, 1, 2]
