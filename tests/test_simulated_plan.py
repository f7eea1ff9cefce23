"""The prediction of a run: the agents on machines in virtual time, against sums by hand; and
samples of large labs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.deploy.planning import sample, simulated, workload
from fedstrata.deploy.planning import simulated_run as runs
from fedstrata.deploy.planning.machine_speed import REFERENCE, MachineSpeeds
from fedstrata.deploy.planning.simulated_run import machine_speeds, simulated_run, speeds_in
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.simulation import simulated_machines
from fedstrata.deploy.simulation.simulated_machines import Machines, ProcessThread, SimulatedHost
from fedstrata.deploy.simulation.virtual_loop import START_S, VirtualLoop
from tests.helpers.commands import invoke

pytestmark = pytest.mark.usefixtures("short_calibration")

FREE = MachineSpeeds(cores=2)
SPEEDS = replace(REFERENCE, step_s=5e-3, training_s=0.01, evaluation_s=0.1)
IMAGES = {
    "dataset": "synthetic",
    "classes": 10,
    "samples": 240,
    "test_samples": 20,
    "image_shape": [3, 32, 32],
}
SLOW = {"up_mbit": 4, "down_mbit": 6, "delay_ms": 20}
MANY: dict[str, Any] = {"model": {"name": "mlp_digits"}, "data": {}}
MODEL_BYTES = 1_085_000  # about a resnet20, and its messages


def planned(tree: dict[str, Any]) -> workload.PlannedWorkload:
    base = {"rounds": 3, "data": IMAGES, "model": {"name": "resnet20"}}
    return workload.workload(parse(base | tree))


def run(
    work: workload.PlannedWorkload, speeds: MachineSpeeds = SPEEDS, **options: Any
) -> simulated.SimulatedRun:
    return simulated.simulate(work, speeds, **options)


def simulated_s(found: simulated.SimulatedRun) -> float:
    return sum(found.seconds().values())


def phases(tree: dict[str, Any], speeds: MachineSpeeds = FREE, **options: Any) -> dict[str, float]:
    return run(planned(tree), speeds, rounds=2, **options).seconds()


def link(up_s: float, down_s: float) -> dict[str, float]:
    """Return a link that a model takes so many seconds to cross."""
    return {"up_mbit": 8e-6 * MODEL_BYTES / up_s, "down_mbit": 8e-6 * MODEL_BYTES / down_s}


THREE_LAYERS = {"topology": {"institutions": 2, "devices": 6}, "institution": {"rounds": 2}}
TWO_LAYERS = {"topology": {"institutions": 0, "devices": 4}}


def test_devices_below_the_cloud_cross_one_link_and_train() -> None:
    slow = replace(FREE, training_s=2.0, step_s=0.5)
    found = phases({**TWO_LAYERS, "links": {"wan": link(up_s=3.0, down_s=1.5)}}, slow)
    assert found["dispatch"] == pytest.approx(1.5, rel=0.02)
    assert found["collect"] == pytest.approx(3.0, rel=0.02)
    assert sum(found.values()) == pytest.approx(1.5 + 2.0 + 6 * 0.5 + 3.0, rel=0.02)


def test_links_pass_a_model_on_as_it_comes() -> None:
    links = {"wan": link(up_s=2.0, down_s=8.0), "lan": link(up_s=1.0, down_s=4.0)}
    found = phases({**THREE_LAYERS, "links": links})
    # The first local round is over a chunk after the model's arrival; the second one needs no WAN.
    assert found["dispatch"] == pytest.approx(8.0, rel=0.02)
    assert sum(found.values()) == pytest.approx(8.0 + 1.0 + 4.0 + 1.0 + 2.0, rel=0.06)


def test_links_of_the_kernel_carry_headers_too() -> None:
    tree = {**TWO_LAYERS, "links": {"wan": link(up_s=3.0, down_s=3.0), "enforce": "kernel"}}
    assert sum(phases(tree).values()) == pytest.approx(6.0 / runs.PAYLOAD, rel=0.02)


def test_what_a_host_emulates_takes_its_seconds() -> None:
    slow = replace(FREE, training_s=2.0)
    tree = {**TWO_LAYERS, "hardware": {"default": {"slowdown": 20}}}
    assert sum(phases(tree, slow).values()) == pytest.approx(40.0, rel=0.01)


def test_a_long_evaluation_holds_the_global_round_up() -> None:
    assert phases(TWO_LAYERS, replace(FREE, evaluation_s=3.0))["evaluate"] == pytest.approx(
        3.0, rel=0.05
    )


def test_rules_that_learn_at_a_node_are_predicted_without_it() -> None:
    data = {**IMAGES, "node_samples": 9}
    feddf, fedavg = (
        run(planned({**TWO_LAYERS, "data": data, "cloud": {"aggregation": {"name": name}}}))
        for name in ("feddf", "fedavg")
    )
    assert feddf.tiers() == fedavg.tiers() and simulated_s(feddf) == pytest.approx(
        simulated_s(fedavg), rel=0.01
    )


def test_progress_is_the_share_of_the_global_rounds() -> None:
    reached: list[float] = []
    run(planned(THREE_LAYERS), reach=reached.append)
    assert reached == [pytest.approx(share) for share in (1 / 3, 2 / 3, 1.0)]


# Samples

LAN = {"up_mbit": 20, "down_mbit": 40}


@pytest.mark.parametrize(
    ("tree", "options"),
    [
        (
            {**MANY, "topology": {"institutions": 0, "devices": 40}, "links": {"wan": SLOW}},
            {"interface_mbit": 5.0},
        ),
        pytest.param(
            {"topology": {"institutions": 0, "devices": 40}, "links": {"wan": SLOW}},
            {"interface_mbit": 50.0},
            marks=pytest.mark.slow,
        ),
        (
            {
                **MANY,
                "topology": {"institutions": 3, "devices": 60},
                "links": {"wan": SLOW, "lan": LAN},
            },
            {},
        ),
    ],
)
def test_a_sample_of_the_branches_stands_for_the_lab(
    tree: dict[str, Any], options: dict[str, Any]
) -> None:
    work = planned(tree)
    whole, some = run(work, rounds=2, **options), run(work, rounds=2, nodes=18, **options)
    assert some.sample.nodes == 18 and whole.sample.nodes >= 40
    # A child's report is longer with more devices below it: 2.7 % in the first of these labs, whose
    # model has 20 kB.
    assert simulated_s(some) == pytest.approx(simulated_s(whole), rel=0.03)
    expected = {name: count for name, count in whole.tiers().items() if count}
    assert some.tiers() == {name: pytest.approx(count, rel=0.1) for name, count in expected.items()}


def test_a_sample_has_the_fastest_branches_the_slowest_and_some_between() -> None:
    of = {f"device-{number}": {"up_mbit": 1 + number} for number in range(40)}
    closing = {"rule": "quorum", "quorum": 30, "deadline_s": 60.0}
    hardware = {"of": {"device-0": {"slowdown": 2}, "device-17": {"slowdown": 3}}}
    tree = {
        "topology": {"institutions": 0, "devices": 40},
        "links": {"of": of},
        "hardware": hardware,
    }
    found = sample.sample_of(planned(tree | {"cloud": {"closing": closing}}), SPEEDS, nodes=4)
    assert found.experiment.tree.devices == ["device-30", "device-20", "device-10", "device-0"]
    assert found.loads == {"cloud": 10.0} and found.multiples == [10.0]
    assert found.experiment.links.of.keys() == set(found.experiment.tree.devices)
    assert found.experiment.hardware.of.keys() == {"device-0"}
    assert found.experiment.tiers[0].closing.quorum == 3


def test_a_sample_is_of_the_children_that_take_part() -> None:
    tree = {
        "topology": {"institutions": 10, "devices": 1000},
        "institution": {"participation": 0.25},
    }
    found = sample.sample_of(planned({**MANY, **tree}), SPEEDS, nodes=110)
    assert found.nodes == 10 + 10 * 10 and found.multiples == [1.0, 2.5]
    assert all(found.loads[f"institution-{number}"] == 2.5 for number in range(10))
    assert all(tier.participation == 1.0 for tier in found.experiment.tiers)


def test_large_models_are_sampled_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    work = planned(TWO_LAYERS)
    monkeypatch.setattr(sample, "BYTES_MOST", 2 * sample.MODELS_HELD * work.layout.row_bytes)
    assert sample.sample_of(work, SPEEDS).nodes == 2


def test_ten_million_devices_are_a_sample() -> None:
    tree = {
        "topology": {"institutions": 10_000, "devices": 10_000_000},
        "links": {"wan": "wan-50mbit"},
        "institution": {"rounds": 2, "participation": 0.1},
    }
    work = planned({**MANY, **tree})
    found = run(work, FREE, nodes=30, rounds=2, interface_mbit=10_000.0)
    assert found.sample.nodes == 30 and found.sample.multiples == [2000.0, 40_000.0]
    assert "equal" in work.assumed[0]
    tiers, row = found.tiers(), work.layout.row_bytes
    assert tiers["lan_up"] == pytest.approx(2 * 1_000_000 * row, rel=0.1)
    assert simulated_s(found) > 2 * 10_000 * row / 1.25e9


def test_a_lab_that_cannot_be_sampled_is_refused() -> None:
    work = planned({**TWO_LAYERS, "cloud": {"aggregation": {"name": "fedbuff", "buffer": 2}}})
    assert sample.sample_of(work, SPEEDS, nodes=2).nodes == 4  # asynchronous: all are simulated
    work.samples = 60  # as if the devices were too many for a list
    with pytest.raises(InvalidExperiment, match=r"fedbuff.*cannot be sampled"):
        sample.sample_of(work, SPEEDS, nodes=2)
    krum = {
        "topology": {"institutions": 0, "devices": 9},
        "cloud": {"aggregation": {"name": "krum", "wrong": 3}},
    }
    with pytest.raises(InvalidExperiment, match=r"--nodes = 4: no lab: .*Simulate more nodes"):
        run(planned(krum), nodes=4)


# Rounds


def test_a_plan_has_the_seconds_and_bytes_of_a_simulated_run(tmp_path: Path) -> None:
    tree = {
        "rounds": 3,
        "links": {"check": "off", "wan": SLOW},
        "hardware": {"default": {"step_s": 0.01}},
    }
    tree |= {"model": {"name": "mlp_digits"}, "institution": {"rounds": 2}}
    experiment = parse({"topology": {"institutions": 2, "devices": 4}} | tree)
    facts = machine_speeds(experiment, of=None)
    folder = RunFolder.create(tmp_path, experiment, simulated=facts)
    simulated_run(folder, facts, workers=1).run()
    plan = simulated.simulate(workload.workload(experiment), speeds_in(facts))
    for planned_round, simulated_round in zip(plan.rounds, Run(folder.path).rounds, strict=True):
        assert planned_round.phases == pytest.approx(simulated_round.phases, abs=1e-3)
        assert planned_round.bytes_ == pytest.approx(simulated_round.bytes_, rel=0.01)


def test_devices_train_where_tempo_decides_by_it_and_it_takes_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = {
        "model": {"name": "mlp_digits"},
        "data": {},
        "topology": {"institutions": 2, "devices": 4},
    }
    work = planned({**small, "rounds": 9, "cloud": {"epoch_control": {"name": "tempo"}}})
    found = run(work)
    assert found.trained and simulated.TRAINED_LEAST <= len(found.rounds) <= simulated.TRAINED_MOST
    assert found.epochs().keys() == {"institution-0", "institution-1"}
    monkeypatch.setattr(simulated, "TRAINED_S", 1e-3)
    found = run(work)
    assert not found.trained and set(found.epochs().values()) == {work.experiment.training.epochs}


def test_a_prediction_is_repeatable() -> None:
    work = planned(THREE_LAYERS)
    assert run(work, rounds=2).seconds() == run(work, rounds=2).seconds()


def test_a_quorum_does_not_wait_for_the_straggler() -> None:
    straggler = {**TWO_LAYERS, "hardware": {"of": {"device-3": {"overhead_s": 60}}}}
    closing = {"rule": "quorum", "quorum": 3, "deadline_s": 10.0}
    all_, quorum = (planned(straggler | cloud) for cloud in ({}, {"cloud": {"closing": closing}}))
    assert simulated_s(run(all_)) > 60
    rounds = run(quorum).rounds
    assert 10 <= rounds[0].seconds < 11 and all(each.seconds < 11 for each in rounds)
    assert [each.missing for each in rounds] == [("device-3",)] * 3


@pytest.mark.parametrize("rounds", [None, 2])
def test_what_changes_late_in_a_run_is_predicted(rounds: int | None) -> None:
    """Global rounds take some 4 s, so an outage from second 20 on is in the fifth or sixth of them."""
    outage = {"seconds": [0, 20, 50], "up_mbit": [4, 0, 4], "down_mbit": [6, 0, 6]}
    slow = replace(FREE, training_s=1.0)
    lab = {**TWO_LAYERS, "rounds": 8, "links": {"wan": {"trace": outage}}}
    found = run(planned(lab), slow, rounds=rounds)
    seconds = [each.seconds for each in found.rounds]
    if rounds is None:
        assert len(seconds) == 8 and max(seconds) > 30 and sum(each > 10 for each in seconds) == 1
        assert found.total_s(8) == pytest.approx(sum(seconds))
    else:
        assert len(seconds) == 2 and max(seconds) < 10


def test_selection_is_that_of_the_run() -> None:
    work = planned(
        {"topology": {"institutions": 0, "devices": 8}, "cloud": {"participation": 0.25}}
    )
    found = run(work, rounds=3)
    assert len(found.rounds) == 3
    down = [count for goes, count in found.bytes_().items() if goes.startswith("cloud ")]
    assert sum(count > 500_000 for count in down) <= 6  # two devices in each of three rounds


def test_the_rest_of_the_rounds_take_the_mean() -> None:
    work = planned({"rounds": 20, **TWO_LAYERS})
    found = run(work, rounds=2)
    assert len(found.rounds) == 2
    assert found.total_s(20) == pytest.approx(
        found.rounds[0].seconds + 19 * found.rounds[1].seconds
    )
    assert len(run(work).rounds) == simulated.ROUNDS


def test_a_round_has_these_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: Counter[object] = Counter()
    handle, costs = simulated_machines._handle, runs._costs(SPEEDS)

    def count(thread: ProcessThread, cost: tuple[float, float], *rest: Any) -> None:
        counted[cost[0] == costs.agent_s] += 1
        handle(thread, cost, *rest)

    def beside(self: Machines, begin: Callable[[], None], end: Callable[[], None]) -> None:
        counted["calls"] += 1
        called(self, begin, end)

    called = Machines._beside
    monkeypatch.setattr(simulated_machines, "_handle", count)
    monkeypatch.setattr(Machines, "_beside", beside)
    found = []
    for rounds in (3, 13):
        counted.clear()
        small = planned(
            {**MANY, **TWO_LAYERS, "rounds": rounds, "cloud": {"checkpoint_every": rounds}}
        )
        run(small, rounds=rounds)
        found.append((counted[True], counted[False], counted["calls"]))
    each = [(after - before) / 10 for before, after in zip(*found, strict=True)]
    assert each[:2] == [4 * runs.AGENT_PACKETS, 4 * runs.BROKER_PACKETS]
    # links.csv is written every few seconds
    assert each[2] == pytest.approx(runs.WORK_CALLS, abs=0.2)


# Machines


def test_computations_share_the_cores_of_a_host() -> None:
    loop = VirtualLoop()
    host, ended = SimulatedHost(loop, 2), list[tuple[float, float]]()
    for seconds in (1.0, 2.0, 4.0):
        host.compute(seconds, lambda s=seconds: ended.append((round(loop.time() - START_S, 6), s)))  # type: ignore[misc]
    played(loop)
    # Three at 2/3: the first ends at 1.5 s; then two with a core each: the second at 2.5 s, the
    # third at 4.5 s.
    assert ended == [(1.5, 1.0), (2.5, 2.0), (4.5, 4.0)]


def test_a_process_handles_one_message_after_another() -> None:
    loop = VirtualLoop()
    one, other = (ProcessThread(host) for host in [SimulatedHost(loop, 4)] * 2)
    handled: list[tuple[float, str]] = []
    for thread, name in ((one, "a"), (one, "b"), (other, "c")):
        thread.handle(1.0, lambda n=name: handled.append((loop.time() - START_S, n)))  # type: ignore[misc]
    played(loop)
    assert handled == [(1.0, "a"), (1.0, "c"), (2.0, "b")]


def played(loop: VirtualLoop) -> None:
    """Run a loop for 100 virtual seconds."""
    loop.call_at(START_S + 100, loop.stop)
    loop.run_forever()
    loop.discard()


def test_broker_hosts_share_their_interface() -> None:
    few, many = (
        {"topology": {"institutions": 0, "devices": count}, "rounds": 2} for count in (2, 8)
    )
    found = [simulated_s(run(planned(tree), FREE, interface_mbit=100.0)) for tree in (few, many)]
    model_s = 2 * planned(few).layout.row_bytes / 12.5e6
    assert found == [pytest.approx(count * model_s, rel=0.01) for count in (2, 8)]


# The command


def test_the_command_has_what_was_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, speeds = tmp_path / "lab.toml", tmp_path / "speeds.json"
    experiment = parse({**TWO_LAYERS, "model": {"name": "mlp_digits"}})
    file.write_text(to_toml(experiment))
    monkeypatch.setattr(runs, "measure", lambda work, **_: replace(SPEEDS, message_s=0.25))
    runs.keep_speeds(speeds, [experiment], lambda stage: None)
    monkeypatch.setattr(runs, "measure", None)
    result = invoke("plan", file, "--rounds", "2", "--speeds", speeds, "--format", "json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["simulated_rounds"]) == 2 and found["speeds"]["message_s"] == 0.25
    assert found["global_round_s"] == pytest.approx(sum(found["seconds"].values()))
    assert found["global_round_s"] > 4 * 0.25 * 0.4  # the messages of four devices at the cloud
    assert found["simulated_nodes"] == found["nodes"] == 4
    some = invoke("plan", file, "--rounds", "2", "--nodes", "2", "--speeds", speeds)
    assert "\nassumed: a sample of 2 of the 4 nodes is simulated, and multiplied\n" in some.stdout
