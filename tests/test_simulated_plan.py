"""`plan --simulate`: the agents on machines in virtual time, beside the quick prediction where both model the same."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidExperiment
from common.experiment.reading import parse, to_toml
from deploy.planning import calibration, constants, footprint, prediction, simulated, workload
from deploy.planning.constants import FittedCosts
from deploy.planning.fitting import NullRound, fit, measure_costs
from deploy.planning.prediction import MachineSpeeds
from deploy.simulation import machines
from deploy.simulation.loop import START_S, VirtualLoop
from deploy.simulation.machines import ProcessThread, SimulatedHost
from tests.helpers.commands import invoke

FREE = MachineSpeeds(0.0, 0.0, 0.0, message_s=0.0, round_s=0.0, byte_s=0.0, mix_byte_s=0.0, record_s=0.0, cores=2)
SPEEDS = MachineSpeeds(
    5e-3, 0.01, 0.1, message_s=4e-3, round_s=6e-3, byte_s=1.4e-9, mix_byte_s=3e-10, record_s=0.0, cores=2
)
IMAGES = {"dataset": "synthetic", "classes": 10, "samples": 240, "test_samples": 20, "image_shape": [3, 32, 32]}
SLOW = {"up_mbit": 4, "down_mbit": 6, "delay_ms": 20}


def free(begin: Callable[[], None]) -> float:
    begin()
    return 0.0


def planned(tree: dict[str, Any], speeds: MachineSpeeds = SPEEDS) -> workload.PlannedWorkload:
    base = {"rounds": 3, "data": IMAGES, "model": {"name": "resnet20"}}
    work = workload.workload(parse(base | tree))
    workload.rehearse(work, speeds)
    return work


def run(work: workload.PlannedWorkload, speeds: MachineSpeeds = SPEEDS, **options: Any) -> simulated.SimulatedRun:
    given = {"one_host": False, "interface_mbit": 1000.0, "work_s": free} | options
    return simulated.simulate(work, speeds, **given)


def quick(work: workload.PlannedWorkload, speeds: MachineSpeeds = SPEEDS, *, one_host: bool = False) -> float:
    lab = workload.lab(work, speeds, one_host=one_host, interface_mbit=1000)
    return sum(prediction.seconds(lab, speeds).values())


def simulated_s(found: simulated.SimulatedRun) -> float:
    return sum(found.seconds().values())


THREE_LAYERS = {"topology": {"institutions": 2, "devices": 6}, "institution": {"rounds": 2}}
TWO_LAYERS = {"topology": {"institutions": 0, "devices": 4}}


@pytest.mark.parametrize(
    ("tree", "one_host"),
    [
        ({**THREE_LAYERS, "links": {"wan": SLOW, "lan": {"up_mbit": 20, "down_mbit": 40}}}, True),
        ({**THREE_LAYERS, "links": {"wan": SLOW, "of": {"device-1": {"up_mbit": 1, "down_mbit": 2}}}}, False),
        ({**TWO_LAYERS, "links": {"wan": SLOW}}, False),
        ({**TWO_LAYERS, "links": {"wan": SLOW, "enforce": "kernel"}}, False),
        ({**TWO_LAYERS, "hardware": {"default": {"slowdown": 20}}}, False),
    ],
)
def test_both_predictions_agree_where_both_model_the_same(tree: dict[str, Any], one_host: bool) -> None:
    work = planned(tree)
    found = run(work, one_host=one_host)
    assert simulated_s(found) == pytest.approx(quick(work, one_host=one_host), rel=0.05)
    tiers = {name: count for name, count in found.tiers().items() if count}
    lab = workload.lab(work, SPEEDS, one_host=one_host, interface_mbit=1000)
    expected = {name: count for name, count in footprint.tiers_of(lab).items() if count}
    assert tiers == {name: pytest.approx(count, rel=0.02) for name, count in expected.items()}


def test_results_are_written_after_each_global_round_with_a_checkpoint() -> None:
    slow = replace(SPEEDS, record_s=3.0, evaluation_s=2.0)
    for every, records in ((1, [0.0, 3.0, 3.0, 3.0]), (2, [0.0, 0.0, 3.0, 0.0])):
        work = planned({**TWO_LAYERS, "rounds": 4, "cloud": {"checkpoint_every": every}}, slow)
        found = run(work, slow)
        assert [each.phases["record"] for each in found.rounds] == pytest.approx(records, abs=0.1)
    work = planned(TWO_LAYERS, slow)
    assert simulated_s(run(work, slow)) == pytest.approx(quick(work, slow), rel=0.05)
    lab = workload.lab(work, slow, one_host=False, interface_mbit=1000)
    assert prediction.seconds(lab, slow)["evaluate"] == 0.0  # meanwhile


def test_a_simulation_leaves_the_collection_of_garbage_on() -> None:
    run(planned(TWO_LAYERS))
    assert gc.isenabled()


def test_a_prediction_is_repeatable() -> None:
    work = planned(THREE_LAYERS)
    assert run(work).seconds() == run(work).seconds()


def test_a_quorum_does_not_wait_for_the_straggler() -> None:
    straggler = {**TWO_LAYERS, "hardware": {"of": {"device-3": {"overhead_s": 60}}}}
    closing = {"rule": "quorum", "quorum": 3, "deadline_s": 10.0}
    all_, quorum = (planned(straggler | cloud) for cloud in ({}, {"cloud": {"closing": closing}}))
    assert simulated_s(run(all_)) > 60
    first, *later = (each.seconds for each in run(quorum).rounds)
    assert 10 <= first < 11 and all(seconds < 11 for seconds in later)
    assert [each.missing for each in run(quorum).rounds] == [("device-3",)] * 3
    assert quick(quorum) > 60  # which the quick prediction does not know


def test_selection_is_that_of_the_run() -> None:
    work = planned({"topology": {"institutions": 0, "devices": 8}, "cloud": {"participation": 0.25}})
    found = run(work, rounds=3)
    assert len(found.rounds) == 3
    down = [count for goes, count in found.bytes_().items() if goes.startswith("cloud ")]
    assert sum(count > 500_000 for count in down) <= 6  # two devices in each of three rounds


def test_the_rest_of_the_rounds_take_the_mean() -> None:
    work = planned({"rounds": 20, **TWO_LAYERS})
    found = run(work, rounds=2)
    assert len(found.rounds) == 2
    assert found.total_s(20) == pytest.approx(found.rounds[0].seconds + 19 * found.rounds[1].seconds)
    assert len(run(planned({"rounds": 20, **TWO_LAYERS})).rounds) == simulated.ROUNDS_MOST


def test_a_round_has_these_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: Counter[bool] = Counter()
    calls = 0
    handle, costs = machines._handle, simulated.costs_of(SPEEDS)

    def count(thread: ProcessThread, cost: tuple[float, float], *rest: Any) -> None:
        counted[cost[0] == costs.agent_s] += 1
        handle(thread, cost, *rest)

    def work_s(begin: Callable[[], None]) -> float:
        nonlocal calls
        calls += 1
        return free(begin)

    monkeypatch.setattr(machines, "_handle", count)
    found = []
    for rounds in (3, 13):
        counted.clear()
        calls = 0
        small = planned({"rounds": rounds, "model": {"name": "mlp_digits"}, "data": {}, **TWO_LAYERS})
        run(small, rounds=rounds, one_host=True, work_s=work_s)
        found.append((counted[True], counted[False], calls))
    each = [(after - before) / 10 for before, after in zip(*found, strict=True)]
    assert each[:2] == [4 * simulated.AGENT_PACKETS, 4 * simulated.BROKER_PACKETS]
    assert each[2] == pytest.approx(simulated.WORK_CALLS, abs=0.2)  # links.csv is written every few seconds


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"topology": {"institutions": 1, "devices": 20_001}}, "too many"),
        ({"data": {**IMAGES, "node_samples": 9}, "institution": {"aggregation": {"name": "feddf"}}}, "not simulated"),
    ],
)
def test_what_cannot_be_simulated_is_refused(tree: dict[str, Any], problem: str) -> None:
    work = planned(tree)
    with pytest.raises(InvalidExperiment, match=problem):
        run(work)


# Machines


def test_computations_share_the_cores_of_a_host() -> None:
    loop = VirtualLoop()
    host = SimulatedHost(loop, 2)
    ended: list[tuple[float, float]] = []
    for seconds in (1.0, 2.0, 4.0):
        host.compute(seconds, lambda s=seconds: ended.append((round(loop.time() - START_S, 6), s)))  # type: ignore[misc]
    loop.call_at(START_S + 100, loop.stop)
    loop.run_forever()
    loop.discard()
    # Three at 2/3: the first ends at 1.5 s; then two with a core each: the second at 2.5 s, the third at 4.5 s.
    assert ended == [(1.5, 1.0), (2.5, 2.0), (4.5, 4.0)]


def test_a_process_handles_one_message_after_another() -> None:
    loop = VirtualLoop()
    one, other = (ProcessThread(host) for host in [SimulatedHost(loop, 4)] * 2)
    handled: list[tuple[float, str]] = []
    for thread, name in ((one, "a"), (one, "b"), (other, "c")):
        thread.handle(1.0, lambda n=name: handled.append((loop.time() - START_S, n)))  # type: ignore[misc]
    loop.call_at(START_S + 100, loop.stop)
    loop.run_forever()
    loop.discard()
    assert handled == [(1.0, "a"), (1.0, "c"), (2.0, "b")]


def test_broker_hosts_share_their_interface() -> None:
    few, many = ({"topology": {"institutions": 0, "devices": count}, "rounds": 2} for count in (2, 8))
    found = [simulated_s(run(planned(tree, FREE), FREE, interface_mbit=100.0)) for tree in (few, many)]
    model_s = 2 * planned(few, FREE).sizes.tiers[0].up / 12.5e6
    assert found == [pytest.approx(count * model_s, rel=0.01) for count in (2, 8)]


# Calibration


def test_three_rounds_determine_the_costs() -> None:
    message_s, round_s, byte_s, copy_s = 2e-3, 5e-3, 1e-9, 1e-10

    def null_round(devices: int, model_bytes: int) -> NullRound:
        mixing = devices * model_bytes * calibration.mixing_s(copy_s)
        cpu_s = round_s + devices * (message_s + 2 * model_bytes * byte_s) + mixing
        return NullRound(devices, model_bytes, cpu_s)

    found = fit([null_round(1, 0), null_round(8, 0), null_round(4, 10_000_000)], copy_s=copy_s)
    assert found == pytest.approx((message_s, round_s, byte_s))
    noisy = fit([NullRound(1, 0, 0.2), NullRound(8, 0, 0.1), NullRound(4, 1000, 0.0)], copy_s=copy_s)
    assert noisy == (0.0, 0.2, 0.0)


COSTS = FittedCosts(0.25, 0.5, 1e-9, host="rack-1", measured="2026-01-01T00:00:00+00:00", load=0.5)


def test_plans_use_the_costs_that_this_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert constants.read(None) is None
    assert constants.write(COSTS, None) == tmp_path / "fedstrata" / "calibration.json"
    assert constants.read(None) == COSTS
    monkeypatch.setattr(calibration, "TRAINING_S", 0.02)
    found = calibration.measure(planned({}), cores=1, together=False, fitted=COSTS)
    assert (found.message_s, found.round_s, found.byte_s) == (0.25, 0.5, 1e-9)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"message_s": 1}', json.dumps({"message_s": -1.0})])
def test_a_calibration_that_cannot_be_read_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "mine.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidExperiment, match=r"--calibration = .*mine\.json.*Measure with"):
        constants.read(file)


@pytest.mark.slow
def test_the_costs_of_this_machine_are_measured() -> None:
    found = measure_costs(rounds=4)
    assert 0 < found.message_s < 1 and 0 < found.byte_s < 1e-6 and found.host


def test_the_command_simulates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "TRAINING_S", 0.02)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    file, costs = tmp_path / "lab.toml", tmp_path / "costs.json"
    file.write_text(to_toml(parse({**TWO_LAYERS, "model": {"name": "mlp_digits"}})))
    constants.write(COSTS, costs)
    result = invoke("plan", file, "--simulate", "--rounds", "2", "--calibration", costs, "--format", "json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["simulated_rounds"]) == 2 and found["calibration"]["host"] == "rack-1"
    assert found["global_round_s"] == pytest.approx(sum(found["seconds"].values()))
    assert found["global_round_s"] > 4 * 0.25 * 0.4  # the messages of four devices at the cloud
    assert any("rack-1" in text and "load of 0.5" in text for text in found["assumed"])
    for options, problem in ((["--rounds", "2", file], "--simulate"), ([], "--calibrate")):
        refused = invoke("plan", *options)
        assert refused.exit_code == 2 and problem in refused.output
