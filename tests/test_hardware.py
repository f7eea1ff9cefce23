"""Devices that emulate slower machines: what the experiment defines, and results that leave no
sooner than theirs.
"""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.accounting.work import Work
from fedstrata.common.experiment.reading import load, parse, to_toml
from fedstrata.common.protocol.messages import Phase
from fedstrata.common.runtime.round import WorkResult
from fedstrata.common.settings import devices
from fedstrata.common.settings.devices import Machine, Pace, shipped
from fedstrata.deploy.simulation.virtual_loop import VirtualLoop
from fedstrata.device import device_agent as agent

# What the experiment reports


def test_a_device_has_the_machine_that_is_said_for_it(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text(
        """
        topology = { devices = 5 }
        [hardware]
        default = "raspberry-pi-5"
        [hardware.of]
        device-1 = { slowdown = 4.0, overhead_s = 0.5 }
        device-2 = { profile = "raspberry-pi-4", overhead_s = 2 }
        device-3 = "mine"
        device-4 = {}
        [hardware.profiles.mine]
        slowdown = 30
        """
    )
    experiment = load(path)
    machines = [experiment.machine(f"device-{i}") for i in range(5)]
    assert machines == [
        Machine(profile="raspberry-pi-5", slowdown=shipped()["raspberry-pi-5"]["slowdown"]),
        Machine(slowdown=4.0, overhead_s=0.5),
        Machine(
            profile="raspberry-pi-4",
            slowdown=shipped()["raspberry-pi-4"]["slowdown"],
            overhead_s=2.0,
        ),
        Machine(profile="mine", slowdown=30.0),
        Machine(),
    ]
    assert parse(tomllib.loads(to_toml(experiment))) == experiment == parse(experiment.to_json())
    manifest = json.loads(
        (RunFolder.create(tmp_path / "runs", experiment).path / "manifest.json").read_text()
    )
    assert manifest["hardware"] == {
        f"device-{i}": machine.model_dump() for i, machine in enumerate(machines)
    }


def test_the_profiles_that_ship_are_paces() -> None:
    for name in shipped():
        assert Pace.model_validate(dict(shipped()[name])).slowdown > 1
        assert parse({"hardware": {"default": name}}).machine("device-0").profile == name
    slowdowns = [shipped()[f"raspberry-pi-{i}"]["slowdown"] for i in (5, 4, 3)]
    assert slowdowns == sorted(slowdowns)


def test_a_machine_keeps_its_numbers_when_a_later_release_changes_the_profile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = parse({"hardware": {"default": "raspberry-pi-4"}})
    monkeypatch.setattr(devices, "shipped", lambda: {"raspberry-pi-4": {"slowdown": 2.0}})
    assert (
        parse(experiment.to_json())
        == experiment
        != parse({"hardware": {"default": "raspberry-pi-4"}})
    )


def assert_spread(drawn: Iterable[float | None], middle: float) -> None:
    """Assert that values are log-normal around a median, with the spread 0.5."""
    logs = np.log([each or 0.0 for each in drawn])
    assert np.median(logs) == pytest.approx(
        np.log(middle), abs=0.1
    ) and logs.std() == pytest.approx(0.5, abs=0.05)


def test_a_spread_draws_each_devices_slowdown_or_step_from_the_seed() -> None:
    tree: dict[str, Any] = {
        "topology": {"devices": 400},
        "hardware": {
            "default": {"slowdown": 20.0, "overhead_s": 1.0},
            "spread": 0.5,
            "of": {"device-7": {"slowdown": 3.0}},
        },
    }
    experiment, other = parse(tree), parse(tree | {"seed": 2})
    machines = [experiment.machine(f"device-{i}") for i in range(400)]
    assert machines == [parse(experiment.to_json()).machine(f"device-{i}") for i in range(400)]
    assert machines[7] == Machine(slowdown=3.0) and {
        machine.overhead_s for machine in machines
    } == {0.0, 1.0}
    assert_spread((machine.slowdown for i, machine in enumerate(machines) if i != 7), 20.0)
    steps = parse(
        {"topology": {"devices": 400}, "hardware": {"default": {"step_s": 0.2}, "spread": 0.5}}
    )
    assert_spread((steps.machine(f"device-{i}").step_s for i in range(400)), 0.2)
    assert machines != [other.machine(f"device-{i}") for i in range(400)]
    low = parse({"hardware": {"spread": 3.0}, "topology": {"devices": 50}})
    slowdowns = [low.machine(f"device-{i}").slowdown for i in range(50)]
    assert min(slowdowns) == 1.0 and max(slowdowns) > 10


# Answers that leave in time


def at_a_pace(
    machine: Pace, *, train_s: float, since: float, cancel_after_s: float | None = None
) -> tuple[WorkResult | None, float, list[tuple[Phase, int, int]]]:
    """Return the answer, when it left after its training had ended, and what was reported
    meanwhile.
    """
    reported: list[tuple[Phase, int, int]] = []
    answer = WorkResult(memoryview(b""), Work(1, 0.0, 1, 1, train_s, 0.0))

    async def play() -> tuple[WorkResult | None, float]:
        loop = asyncio.get_running_loop()
        start = loop.time()
        keeping = asyncio.create_task(
            agent.emulate(
                machine, answer, since=start + since, report=lambda *words: reported.append(words)
            )
        )
        if cancel_after_s is not None:
            await asyncio.sleep(cancel_after_s)
            keeping.cancel()
        done, _ = await asyncio.wait((keeping,))
        assert done
        return None if keeping.cancelled() else keeping.result(), loop.time() - start

    loop = VirtualLoop()
    kept, left_s = loop.run_until_complete(play())
    loop.close()
    return kept, left_s, reported


@given(
    slowdown=st.floats(1, 50),
    overhead_s=st.floats(0, 20),
    train_s=st.floats(0, 30),
    queued_s=st.floats(0, 100),
)
def test_an_answer_leaves_no_sooner_than_the_slower_machines(
    slowdown: float, overhead_s: float, train_s: float, queued_s: float
) -> None:
    # The model came, waited in the queue for a slot, and was trained until now.
    machine = Pace(slowdown=slowdown, overhead_s=overhead_s)
    since = -(queued_s + train_s)
    answer, left_s, reported = at_a_pace(machine, train_s=train_s, since=since)
    wanted = max(0.0, slowdown * train_s + overhead_s + since)
    assert answer is not None and left_s == pytest.approx(wanted, abs=1e-6)
    assert answer.work.pause_s == pytest.approx(left_s, abs=1e-6) and answer.work.train_s == train_s
    # A growing count, at least once a second, so that nobody gives the device up.
    assert [phase for phase, _, _ in reported] == [Phase.WAITING] * len(reported)
    assert [done for _, done, _ in reported] == list(range(1, len(reported) + 1))
    assert len(reported) >= int(wanted - 1e-6)


def test_a_device_of_this_hosts_pace_reports_nothing_and_waits_for_nothing() -> None:
    answer, left_s, reported = at_a_pace(Machine(), train_s=3.0, since=-3.0)
    assert answer is not None and (answer.work.pause_s, left_s, reported) == (0.0, 0.0, [])


@pytest.mark.parametrize(("train_s", "pause_s"), [(1.0, 1.5), (3.0, 0.0)])
def test_a_machine_with_seconds_of_a_step_ignores_those_of_the_host(
    train_s: float, pause_s: float
) -> None:
    machine = Pace(slowdown=8.0, step_s=2.0, overhead_s=0.5)  # of an answer of one step
    answer, left_s, _ = at_a_pace(machine, train_s=train_s, since=-train_s)
    assert answer is not None and (answer.work.pause_s, left_s) == (
        pytest.approx(pause_s),
        pytest.approx(pause_s),
    )


def test_a_pause_ends_at_once_with_its_task() -> None:
    answer, left_s, _ = at_a_pace(
        Pace(overhead_s=3600.0), train_s=1.0, since=-1.0, cancel_after_s=0.25
    )
    assert answer is None and left_s == 0.25
