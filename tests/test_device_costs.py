"""What a device costs: shares of its host's energy, CPU time, memory and temperature, from the
sensor to the tables.
"""

from __future__ import annotations

import asyncio
import json
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.costs import (
    CPU_SECONDS_MOST,
    JOULES_MOST,
    MEMORY_MOST,
    UNKNOWN_COSTS,
    DeviceCosts,
)
from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.host.energy_meters import (
    GAP_MOST_S,
    PLUG_ROUNDING_J,
    REPORT_BYTES_MOST,
    UNKNOWN_S,
    EnergyMeter,
    EnergySource,
    HostCounter,
    PlugMeter,
    plug_report,
)
from fedstrata.common.host.machine import export_plug, hottest_celsius
from fedstrata.common.host.memory import peak_bytes
from fedstrata.common.host.nvidia import Gpus
from fedstrata.common.metrics import Metrics
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.protocol.limits import ChildLimits, check_report, with_plausible_costs
from fedstrata.common.runtime.energy_source import energy_counter
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.results.compare import costs_to
from fedstrata.deploy.results.device_costs import costs_until, table
from fedstrata.deploy.results.run import Run
from fedstrata.device.pool.energy_shares import EnergyShares
from fedstrata.device.pool.pool import Pool
from tests.helpers.energy import RANGE, zone
from tests.helpers.loops import in_loop
from tests.helpers.nodes import (
    assert_models,
    child_of,
    drawn,
    layout_of,
    living,
    lying,
    parent_of,
    play,
    together,
)
from tests.helpers.records import a_device, a_global_round, with_work
from tests.helpers.sites import SimulatedSite, virtual
from tests.test_hostile_members import result
from tests.test_metrics import Driver, Hand, scrape
from tests.test_pool import FakeLane, Notes, members_of, settle, trains

KNOWN = DeviceCosts(10.0, 6.0, 1.5, 2_000_000, 51.5, EnergySource.RAPL)
SHELLY = {
    "id": 0,
    "source": "MQTT",
    "output": True,
    "apower": 60.0,
    "aenergy": {"total": 100.0, "by_minute": [0.0]},
}


# Sources


def seconds_of(count: int, every_s: float) -> list[float]:
    return [every_s * number for number in range(count + 1)]


def watts(at_s: float) -> float:
    """A known curve: 40 W, and a wave of 25 W with a period of 97 seconds."""
    return 40 + 25 * math.sin(2 * math.pi * at_s / 97)


def watts_integral(until_s: float) -> float:
    return 40 * until_s + 25 * 97 / (2 * math.pi) * (1 - math.cos(2 * math.pi * until_s / 97))


@pytest.mark.skipif(broker.choose() != "mosquitto", reason="mosquitto is not installed")
@pytest.mark.parametrize("counter", [False, True], ids=["watts", "switch"])
def test_a_plug_on_a_broker_is_integrated_within_a_thousandth(
    counter: bool, tmp_path: Path
) -> None:
    clock, topic = Hand(), "shellies/plug-1/relay/0/power"
    clock.now = 0.0
    ends = seconds_of(300, 1.0)

    def reported(at_s: float) -> str:
        if not counter:
            return f"{watts(at_s):.2f}"
        total = round(500 + watts_integral(at_s) / 3600, 3)
        return json.dumps(SHELLY | {"apower": round(watts(at_s), 1), "aenergy": {"total": total}})

    async def play() -> float:
        publisher = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv311)
        publisher.connect(served.host, served.port)
        publisher.loop_start()
        try:
            async with energy_counter(
                f"plug:{topic}", BrokerAddress(served.host, served.port)
            ) as plug:
                assert (
                    isinstance(plug, PlugMeter)
                    and plug.source is EnergySource.PLUG
                    and plug.joules() is None
                )
                arrived, take = asyncio.Queue[bytes](), plug.report

                def report(body: bytes) -> None:
                    take(body)
                    arrived.put_nowait(body)

                plug.report = report  # type: ignore[method-assign]
                plug._now = lambda: clock.now
                publisher.publish(topic, b"3000", retain=True)  # of an unknown time: it is ignored
                while arrived.empty():  # until the subscription is there
                    publisher.publish(topic, reported(0.0))
                    await asyncio.sleep(0.02)
                publisher.publish(topic, b"the last one")
                while await arrived.get() != b"the last one":
                    pass
                for clock.now in ends:
                    publisher.publish(topic, reported(clock.now))
                    await arrived.get()
                found = plug.joules()
                assert found is not None
                return found
        finally:
            publisher.disconnect()
            publisher.loop_stop()

    with broker.start(directory=tmp_path, kind="mosquitto") as served:
        found = asyncio.run(play())
    assert found == pytest.approx(watts_integral(ends[-1]), rel=1e-3)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"12.5", (12.5, None)),
        (b"0", (0.0, None)),
        (json.dumps(SHELLY).encode(), (60.0, 100.0)),
        (b'{"apower": 3}', (3.0, None)),
    ],
)
def test_reports_of_both_generations_are_read(
    body: bytes, found: tuple[float, float | None]
) -> None:
    assert plug_report(body) == found


@pytest.mark.parametrize(
    "body",
    [
        b"", b"on", b"nan", b"NaN", b"Infinity", b"-3", b"1e7", b"1e999", b"[1]", b"null", b"{}",
        b"\xff\xfe",
        b'{"apower": -4}', b'{"apower": null}', b'{"apower": "x"}', b'{"apower": 1, "aenergy": 3}',
        b'{"apower": 1, "aenergy": {"total": -1}}', b'{"apower": 1, "aenergy": {"total": NaN}}',
        b'{"apower": 1, "aenergy": {}}', b"[" * 4000, b"1" * 4000, b" " * REPORT_BYTES_MOST + b"1",
    ],
    ids=repr,
)  # fmt: skip
def test_a_report_of_another_form_is_ignored(body: bytes) -> None:
    plug = PlugMeter(lambda: 0.0)
    plug.report(body)
    assert plug_report(body) is None and plug.joules() is None


def test_a_plug_that_is_silent_is_unknown_and_a_counter_that_was_reset_does_not_go_back() -> None:
    clock = Hand()
    clock.now = 0.0
    plug = PlugMeter(lambda: clock.now)
    plug.report(json.dumps(SHELLY).encode())
    clock.now = 60.0
    assert plug.joules() == 3600.0, "the last power until the next report"
    # reset: 60 W for a minute
    plug.report(json.dumps(SHELLY | {"aenergy": {"total": 0.5}}).encode())
    assert plug.joules() == 3600.0
    clock.now += 6.0
    plug.report(json.dumps(SHELLY | {"apower": 0, "aenergy": {"total": 0.6}}).encode())
    assert plug.joules() == pytest.approx(3960.0)
    clock.now += GAP_MOST_S + 1
    assert plug.joules() is None


def test_a_plugs_counter_is_bounded_by_its_watts_times_the_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Hand()
    clock.now = 0.0
    plug = PlugMeter(lambda: clock.now, topic="plug-1")

    def report(apower: float, total: float) -> float | None:
        clock.now += 60.0
        plug.report(json.dumps({"apower": apower, "aenergy": {"total": total}}).encode())
        return plug.joules()

    assert report(60.0, 100.0) == 0.0
    assert report(60.0, 101.0) == 3600.0
    assert report(60.0, 102.9) == pytest.approx(3600 + 6840), "more than 60 W for a moment"
    for jump in (1e306, 103.0, 104.0, 204.0):  # up, back down, on from there, up again
        known = report(60.0, jump)
        assert (known is None) is (jump in (1e306, 204.0)), jump
    clock.now += UNKNOWN_S
    joules = plug.joules()
    assert joules is not None and joules < 60.0 * 7 * 60.0 + 3600, "none of it is counted"
    (line,) = caplog.messages
    assert line.startswith(
        "plug plug-1: its counter moved by inf J in 60.0 s, at 60 W: the energy of that time"
    )


def test_a_burst_of_reports_cannot_pretend_power() -> None:
    clock = Hand()
    clock.now = 0.0
    plug = PlugMeter(lambda: clock.now)
    for number in range(1000):
        clock.now += 0.01
        plug.report(json.dumps({"apower": 0.0, "aenergy": {"total": 0.001 * number}}).encode())
    joules = plug.joules()
    assert joules is not None and joules <= 1000 * PLUG_ROUNDING_J


def test_a_plug_is_in_the_panels_of_its_host() -> None:
    clock = Hand()
    plug = PlugMeter(lambda: clock.now)
    registry = Metrics()
    export_plug(registry, plug)
    assert not any(line.startswith("fedstrata_energy_joules_total{") for line in scrape(registry))
    plug.report(b"40")
    clock.now += 10.0
    line = (
        f'fedstrata_energy_joules_total{{host="{platform.node()}",part="wall",source="plug"}} 400.0'
    )
    assert line in scrape(registry)


def test_a_reset_by_suspend_is_not_taken_for_a_wrap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine that was suspended begins at 0 J: as a wrap that was 257 kJ within seconds."""
    clock = Hand()
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000_000)
    host = HostCounter(EnergyMeter(tmp_path, None, now=lambda: clock.now))
    for microjoules, known in ((5_300_000_000, 300.0), (1_000_000, None), (101_000_000, 400.0)):
        clock.now += 10.0
        counter.write_text(str(microjoules))
        assert host.joules() == known
    counter.write_text(str(RANGE - 1))
    assert host.joules() is None, "more than a package draws"
    clock.now += 60.0
    counter.write_text("29999999")
    assert host.joules() == pytest.approx(430.0), "a wrap is one"
    (line,) = caplog.messages
    assert line.startswith("package-0 of ") and "from 5300 to 1 J in 10.0 s" in line


def test_a_gpus_counter_that_is_reset_with_its_driver_is_unknown_for_a_reading(
    tmp_path: Path,
) -> None:
    clock, driver = Hand(), Driver()
    meter = EnergyMeter(tmp_path, Gpus(driver), now=lambda: clock.now)
    steps = meter._of_gpu
    readings = (1234.5, 1300.0, 3.0, 5.0, 5e9)
    assert [steps("gpu-0", joules) for joules in readings] == [1234.5, 1300.0, None, 1302.0, None]


def test_a_counter_that_loses_a_part_is_unknown(tmp_path: Path) -> None:
    package, memory = (
        zone(tmp_path, "intel-rapl:0", "package-0", 0),
        zone(tmp_path, "intel-rapl:0:1", "dram", 0),
    )
    counter = HostCounter(EnergyMeter(tmp_path, Gpus(Driver())))
    assert counter.source is EnergySource.NVML_RAPL and counter.joules() == 1234.5
    rapl = HostCounter(EnergyMeter(tmp_path, Gpus(Driver())), EnergySource.RAPL)
    assert rapl.source is EnergySource.RAPL and rapl.joules() == 0.0
    package.write_text("3000000")
    assert rapl.joules() == 3.0
    memory.unlink()
    assert rapl.joules() is None and counter.joules() is None


def opened(source: str, tmp_path: Path) -> EnergySource | None:
    async def play() -> EnergySource | None:
        async with energy_counter(
            source, BrokerAddress("localhost", 1), meter=lambda: EnergyMeter(tmp_path, None)
        ) as counter:
            return None if counter is None else counter.source

    return asyncio.run(play())


def test_the_user_of_a_host_names_its_source(tmp_path: Path) -> None:
    assert opened("auto", tmp_path) is None and opened("none", tmp_path) is None
    with pytest.raises(InvalidExperiment, match="no such counter that can be read"):
        opened("rapl", tmp_path)
    zone(tmp_path, "intel-rapl:0", "package-0", 0)
    assert opened("auto", tmp_path) is opened("rapl", tmp_path) is EnergySource.RAPL
    assert opened("none", tmp_path) is None


@pytest.mark.parametrize(
    "source", ["", "watts", "plug", "plug:", "plug:shellies/#", "plug:a/+/b", "csv:/etc/hosts"]
)
def test_a_source_that_does_not_exist_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidExperiment, match="--energy"):
        opened(source, tmp_path)


@in_loop
async def test_a_share_that_is_no_number_is_not_known() -> None:
    counter = Counted()
    shares = shares_of(counter)
    await shares.open("a")
    for value in (-5.0, math.inf, math.nan):
        await shares.begin(["a"])
        counter.value = value
        found = await shares.end("a", UNKNOWN_COSTS)
        assert (found.joules, found.energy_source) == (None, EnergySource.NONE)
        counter.value = 0.0
        await shares.end("a", UNKNOWN_COSTS)


# Temperature and memory


def test_the_hottest_sensor_of_a_host_counts(tmp_path: Path) -> None:
    assert hottest_celsius(None, tmp_path) is None
    for number, millidegrees in enumerate(("48500", "61250", "n/a")):
        folder = tmp_path / "class" / "thermal" / f"thermal_zone{number}"
        folder.mkdir(parents=True)
        (folder / "temp").write_text(millidegrees)
    assert hottest_celsius(None, tmp_path) == 61.25


def test_the_peak_of_this_process_is_what_its_kernel_has_seen(tmp_path: Path) -> None:
    assert peak_bytes(tmp_path) is None
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text(
        "VmPeak:\t  999 kB\nVmHWM:\t   123 kB\nVmRSS:\t   100 kB\n"
    )
    assert peak_bytes(tmp_path) == 123 * 1024


# Shares


class Counted:
    """A counter that a test sets."""

    source = EnergySource.RAPL

    def __init__(self) -> None:
        self.value: float | None = 0.0

    def joules(self) -> float | None:
        return self.value


def shares_of(counter: Counted) -> EnergyShares:
    return EnergyShares(counter, lambda: 50.0)


@in_loop
async def test_power_belongs_to_the_trainings_in_progress_else_to_all() -> None:
    counter = Counted()
    counter.value = 1000.0  # before the run
    shares = shares_of(counter)
    for name in "ab":
        await shares.open(name)
    counter.value = 1010.0  # nobody trains: 5 each
    await shares.begin(["a"])
    counter.value = 1030.0  # 20 for a
    await shares.begin(["b"])
    counter.value = 1050.0  # 10 each
    a = await shares.end("a", KNOWN)
    assert (a.joules, a.train_joules, a.energy_source) == (35.0, 30.0, EnergySource.RAPL)
    assert (a.cpu_s, a.memory_bytes, a.celsius) == (1.5, 2_000_000, 50.0)
    counter.value = 1057.0
    b = await shares.end("b", UNKNOWN_COSTS)
    assert (b.joules, b.train_joules) == (22.0, 17.0)
    counter.value = 1060.0
    await shares.begin(["a"])
    counter.value = 1061.0
    assert (await shares.end("a", UNKNOWN_COSTS)).joules == 1.5 + 1.0
    shares.leave("a")
    counter.value = 2000.0
    await shares.begin(["b"])
    assert (await shares.end("b", UNKNOWN_COSTS)).joules == 1.5 + 939.0


@in_loop
async def test_what_was_not_known_for_a_moment_leaves_the_cells_empty_and_no_others() -> None:
    counter = Counted()
    shares = shares_of(counter)
    await shares.open("a")
    await shares.begin(["a"])
    counter.value = None
    await shares.open("b")  # any reading
    counter.value = 500.0
    found = await shares.end("a", UNKNOWN_COSTS)
    assert (found.joules, found.train_joules, found.energy_source) == (
        None,
        None,
        EnergySource.NONE,
    )
    assert (await shares.end("b", UNKNOWN_COSTS)).joules == 0.0, "all of it was of a's training"
    await shares.begin(["a"])
    counter.value = 503.0
    assert (await shares.end("a", UNKNOWN_COSTS)).joules == 3.0


@in_loop
async def test_a_training_without_a_result_leaves_its_energy_to_the_others() -> None:
    counter = Counted()
    shares = shares_of(counter)
    for name in "ab":
        await shares.open(name)
    await shares.begin(["a", "b"])
    shares.stop("a")
    shares.stop("a")
    counter.value = 8.0
    assert (await shares.end("b", UNKNOWN_COSTS)).joules == 8.0
    counter.value = 10.0
    await shares.begin(["a"])
    assert (await shares.end("a", UNKNOWN_COSTS)).joules == 1.0


@pytest.mark.parametrize("slots", [1, 2])
def test_the_rows_of_a_run_add_up_to_the_counter_through_a_wrap(slots: int, tmp_path: Path) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "package-0", RANGE - 40_000_000)
    used = 0

    def use(microjoules: int) -> None:
        nonlocal used
        used += microjoules
        counter.write_text(str((RANGE - 40_000_000 + used) % RANGE))

    class Lane(FakeLane):
        async def train(self, jobs: Sequence[Any]) -> None:
            use(7_000_000)
            await settle()
            await super().train(jobs)

    async def play() -> list[DeviceCosts]:
        notes = Notes(["cpu"])
        notes.gate.set()
        energy, found = EnergyShares(HostCounter(EnergyMeter(tmp_path, None))), list[DeviceCosts]()
        make: Callable[[], Any] = lambda: Lane(notes)  # noqa: E731
        async with Pool(
            accelerator="cpu", slots=slots, devices=3, energy=energy, thread=make, worker=make
        ) as pool:
            members = await members_of(pool, ["a", "b", "c"])
            use(500_000_000)  # before the first training it is not the run's
            first = used
            for _ in range(4):
                found += [each.work.costs for each in await asyncio.gather(*map(trains, members))]
                use(3_000_000)  # idle
            total = used - 3_000_000 - first
        joules = [each.joules for each in found]
        assert all(each.energy_source is EnergySource.RAPL for each in found) and None not in joules
        assert math.fsum(filter(None, joules)) == pytest.approx(total / 1e6, rel=1e-12)
        assert used > 40_000_000, "it wraps"
        return found

    found = asyncio.run(play())
    assert math.fsum(each.train_joules or 0.0 for each in found) == pytest.approx(12 * 7.0)


@in_loop
async def test_a_host_without_a_source_has_empty_cells() -> None:
    notes = Notes(["cpu"])
    notes.gate.set()
    async with Pool(
        accelerator="cpu", slots=1, devices=1, thread=notes.lane, worker=notes.lane
    ) as pool:
        (member,) = await members_of(pool, ["a"])
        assert (await trains(member)).work.costs == UNKNOWN_COSTS


# Messages


@pytest.mark.parametrize(
    "lie",
    [
        {"joules": nan}, {"joules": -1.0}, {"joules": math.inf}, {"joules": 3 * JOULES_MOST},
        {"train_joules": nan},
        {"train_joules": -0.5}, {"joules": None}, {"train_joules": None},
        {"energy_source": EnergySource.NONE},
        {"cpu_s": nan}, {"cpu_s": -1.0}, {"cpu_s": 3 * CPU_SECONDS_MOST},
        {"memory_bytes": MEMORY_MOST + 1},
        {"celsius": nan}, {"celsius": math.inf}, {"celsius": -2000.0},
    ],
    ids=repr,
)  # fmt: skip
def test_costs_that_cannot_be_are_not_known_and_cost_no_model(lie: dict[str, Any]) -> None:
    limits = ChildLimits(samples=300, rounds=2, below={"d": 100})
    work = ChildReport("d", Work(100, costs=KNOWN), 2)
    for honest in (
        with_work(result(children=(work,)), costs=KNOWN),
        with_work(result(), costs=replace(UNKNOWN_COSTS, celsius=-20.0)),
        with_work(result(), costs=replace(KNOWN, joules=2 * JOULES_MOST, train_joules=0.0)),
    ):
        assert with_plausible_costs(honest, child="c", limits=limits) == (honest, ())
    (name,) = lie
    without = replace(KNOWN, **{name: None})
    if "joules" in name or name == "energy_source":
        without = replace(KNOWN, joules=None, train_joules=None, energy_source=EnergySource.NONE)
    bad = replace(KNOWN, **lie)
    for message, liar in (
        (with_work(result(), costs=bad), "c"),
        (result(children=(with_work(work, costs=bad),)), "d"),
    ):
        found, liars = with_plausible_costs(message, child="c", limits=limits)
        check_report(found, limits=limits, epochs=4)
        assert liars == (liar,) and without in (
            found.work.costs,
            *(each.work.costs for each in found.children),
        )


@virtual
async def test_a_child_whose_costs_cannot_be_keeps_its_model_and_is_named_once(
    site: SimulatedSite, caplog: pytest.LogCaptureFixture
) -> None:
    """One report of 1e306 Wh ended a run, and threw the models of two devices away."""
    layout = layout_of(4000)
    parent, child = parent_of(site, ["device-0"], layout=layout), child_of(site, "device-0")
    lie = replace(KNOWN, joules=math.inf)
    async with together(
        living(site, parent), lying(site, child, layout, lambda sent: with_work(sent, costs=lie))
    ):
        for global_round in (0, 1):
            row = drawn(layout, global_round)
            models = await play(parent, row, global_round=global_round)
            assert_models(models, row, layout=layout, places={"device-0": 0})
    lines = [line for line in caplog.messages if "costs that cannot be" in line]
    assert lines == [
        "institution-0: device-0 reports costs that cannot be: they are not known, its models count"
    ]


def test_the_costs_of_local_rounds_are_summed_and_an_unknown_part_leaves_the_sum_unknown() -> None:
    both = KNOWN.after(DeviceCosts(1.0, 0.5, 0.5, 3_000_000, 40.0, EnergySource.RAPL))
    assert both == DeviceCosts(11.0, 6.5, 2.0, 3_000_000, 51.5, EnergySource.RAPL)
    for other in (UNKNOWN_COSTS, replace(KNOWN, energy_source=EnergySource.PLUG)):
        found = KNOWN.after(other)
        assert (found.joules, found.train_joules, found.energy_source) == (
            None,
            None,
            EnergySource.NONE,
        )
    begun, scored = ChildReport("d", Work(epochs=1, costs=KNOWN), 1), ChildReport("d")
    assert (
        begun.with_work_of(ChildReport("d")).work.costs
        == KNOWN
        == scored.with_work_of(begun).work.costs
    )
    assert begun.with_work_of(begun).work.costs.joules == 20.0


# Tables


def run_with(tmp_path: Path, *costs: DeviceCosts, rounds: int = 2) -> Run:
    folder = RunFolder.create(
        tmp_path, parse({"topology": {"institutions": 1, "devices": len(costs)}})
    )
    for number in range(1, rounds + 1):
        folder.add_round(a_global_round(number, 0.25 * number, names=["institution-0"]))
        reports = [
            ChildReport(f"device-{i}", Work(10, 0.5, 1, 5, 1.0, costs=each), 1)
            for i, each in enumerate(costs)
        ]
        folder.add_devices(number, reports)
    return Run(folder.path)


def test_devices_csv_has_the_costs_and_empty_cells_where_they_are_unknown(tmp_path: Path) -> None:
    run = run_with(tmp_path, KNOWN, UNKNOWN_COSTS, rounds=1)
    header, known, unknown = (run.path / "devices.csv").read_text().split()
    assert header.endswith(",joules,train_joules,energy_source,cpu_s,memory_bytes,celsius")
    assert known.endswith(",10,6,rapl,1.5,2000000,51.5") and unknown.endswith(",,,,,,")
    one, other = run.devices
    assert (one.joules, one.energy_source, one.memory_bytes) == (10.0, EnergySource.RAPL, 2_000_000)
    assert (other.joules, other.energy_source, other.cpu_s) == (None, EnergySource.NONE, None)


def test_joules_are_compared_by_points_of_the_score_and_by_bytes(tmp_path: Path) -> None:
    run = run_with(tmp_path, KNOWN, KNOWN)
    megabytes = sum(sum(row.bytes_.values()) for row in run.rounds) / 1e6
    found = costs_to(run, 0.5)
    assert found is not None and found["joules"] == 40.0 and found["cpu_s"] == 6.0
    assert found["joules_per_point"] == 40.0 / 50 and found["joules_per_mb"] == pytest.approx(
        40.0 / megabytes
    )
    first = costs_to(run, 0.25)
    assert first is not None and first["joules"] == 20.0 and first["joules_per_point"] == 20.0 / 25


def test_a_sum_with_an_unknown_part_is_not_shown(tmp_path: Path) -> None:
    run = run_with(tmp_path, KNOWN, replace(UNKNOWN_COSTS, cpu_s=1.0))
    assert costs_until(run, 2) == {"cpu_s": 5.0}
    shown = table(run, each_most=9)
    assert shown is not None and [column.name for column in shown.columns][1:3] == [
        "energy",
        "of it in training",
    ]
    assert [row[1] for row in shown.rows] == [None, 20.0, None] and "by rapl" in shown.title
    assert table(run_with(tmp_path, UNKNOWN_COSTS), each_most=9) is None


def test_a_device_that_only_scored_has_no_part_in_the_sums() -> None:
    row = a_device(1, "cloud/d", local_rounds=0, epochs=0, sgd_steps=0)
    from fedstrata.deploy.results.device_costs import total

    assert total([row], "joules") is None
    assert total([row, replace(row, local_rounds=1, joules=2.0)], "joules") == 2.0
