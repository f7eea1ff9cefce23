"""What a run or a sweep will cost: the workload, the measured speeds, the memory, and the command."""

from __future__ import annotations

import asyncio
import io
import json
import os
import tracemalloc
from collections.abc import Sequence
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from rich import progress as rich_progress
from rich.console import Console

from fedstrata.common.accounting.costs import DeviceCosts
from fedstrata.common.accounting.work import Work
from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.machine import LoadMeter, MachineLoad
from fedstrata.common.methods import aggregator
from fedstrata.common.methods.fedavg import FedAvg
from fedstrata.common.methods.rule import RuleContext, Uploads, link_layouts
from fedstrata.common.methods.settings import RULES, RuleSettings
from fedstrata.common.model.layout import ModelLayout, Section
from fedstrata.common.settings.training import TrainingSettings
from fedstrata.deploy.console.stages import Stages
from fedstrata.deploy.planning import footprint, predicting, simulated_run, trainings, workload
from fedstrata.deploy.planning import machine_speed as calibration
from fedstrata.deploy.planning.machine_speed import MachineSpeeds
from fedstrata.deploy.planning.predicting import Predictor
from fedstrata.deploy.planning.simulated import simulate
from fedstrata.deploy.planning.trainings import TrainingSpeed
from fedstrata.deploy.sweeps import planning
from fedstrata.deploy.sweeps.grid import expand
from fedstrata.device.jobs import LocalResult, Order, Prepared
from tests.helpers.commands import invoke
from tests.helpers.rules import LEAST, WITH_OBJECTIVE, Report, least_lab

MB = 1_000_000
SCORED = {"evaluation": {"at": "devices"}}
MADE = {"dataset": "synthetic", "classes": 10, "image_shape": [1, 8, 8]}
STEPS = MachineSpeeds(step_s=1.5, cores=2)  # the steps of devices alone take time


@pytest.mark.parametrize("name", WITH_OBJECTIVE)
def test_a_plan_trains_with_the_rule_that_the_objective_needs(name: str) -> None:
    work = workload.workload(parse({"model": {"name": "mlp_digits"}} | least_lab(name)))
    assert trainings.train(work.calibrated, first=work.first, training_s=0.01).step_s > 0


def test_one_device_is_calibrated_if_the_data_of_each_are_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hardware = {"of": {"device-3": {"slowdown": 4}}}
    experiment = parse(
        {"topology": {"devices": 4}, "hardware": hardware, "data": {**MADE, "samples": 120}}
    )
    assert workload.workload(experiment).calibrated is experiment
    monkeypatch.setattr(workload, "MOST_LISTED", 3)
    alone = workload.workload(experiment).calibrated
    assert len(alone.tree.devices) == 1 and alone.hardware.of == {} and alone.data.samples == 30


@pytest.mark.parametrize("data", ["held_out", "test"])
def test_a_plan_counts_the_test_samples_of_each_device(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {**MADE, "samples": 100, "test_samples": 10}
    tree = {"topology": {"devices": 4}, "data": made, "evaluation": {"at": "devices", "data": data}}
    work = workload.workload(experiment := parse(tree))
    assert [*map(work.samples_of, experiment.tree.devices)] == (
        [25] * 4 if data == "test" else [23] * 4
    )
    assert [*map(work.tests_of, experiment.tree.devices)] == (
        [3, 3, 2, 2] if data == "test" else [2] * 4
    )
    monkeypatch.setattr(workload, "MOST_LISTED", 3)
    assert workload.workload(experiment).tests == 2  # 2.5, of devices that are assumed to be equal


def test_the_seconds_of_scoring_are_those_of_the_test_samples() -> None:
    made = {**MADE, "samples": 40, "test_samples": 400}
    for models in (1, 2):
        evaluation = {"at": "devices", "data": "test", "personalised": models == 2}
        tree = {
            "rounds": 3,
            "topology": {"institutions": 0, "devices": 2},
            "data": made,
            "evaluation": evaluation,
        }
        work = workload.workload(
            parse({"training": {"batch_size": 10}, "model": {"name": "mlp_digits"}} | tree)
        )
        found = simulate(work, STEPS)
        # 200 test samples are 20 batches, a forward pass is a third of a step
        forward_s = 1.5 * 20 / 3
        assert found.seconds()["train"] == pytest.approx(2 * 1.5 + models * forward_s, rel=0.01)


BIG = ModelLayout.build([("fc.weight", (2500, 1000), Section.PARAMETER)])  # 10 MB


def memory(tree: dict[str, Any], *, devices: int = 1) -> dict[str, int]:
    return footprint.memory_of(parse(tree), BIG, data_bytes=MB, devices=devices)


def test_memory_is_bound_by_what_may_stay_resident() -> None:
    many = memory({"topology": {"institutions": 1, "devices": 1000}}, devices=2)
    assert many["institution"] == footprint.AGENT_BYTES + 512 * MB + 20 * MB
    assert many["device"] == footprint.TORCH_BYTES + MB + 2 * 50 * MB
    assert many["device_broker"] == footprint.BROKER_BYTES + 5 * 8 * MB


def test_personal_arrays_are_in_a_devices_models_and_in_two_rows_of_its_training() -> None:
    work = workload.workload(
        parse({"model": {"name": "mlp_digits", "personal": ["fc1.*"]}} | SCORED)
    )
    assert work.kept_bytes == 4 + 4 * (64 * 32 + 32) and work.layout.row_bytes == 4 * (32 * 10 + 10)
    plain, kept = memory({}, devices=3)["device"], 2 * MB
    personal = footprint.memory_of(parse({}), BIG, data_bytes=MB, devices=3, kept_bytes=kept)[
        "device"
    ]
    assert personal == plain + 3 * 6 * kept + 2 * (10 * MB + kept)


def test_the_process_of_a_run_without_a_network_has_all_roles() -> None:
    tree = {"topology": {"institutions": 3, "devices": 12}}
    each = memory(tree, devices=12)
    found = footprint.direct_bytes(parse(tree), BIG, data_bytes=MB)
    assert found == each["device"] + each["cloud"] + 3 * each["institution"]
    assert "institution" not in memory({"topology": {"institutions": 0, "devices": 12}})


def peak_of(settings: RuleSettings, layout: ModelLayout, children: Sequence[str]) -> int:
    """Return the peak of a node's memory over three rounds, bytes, without the rows of its
    children.
    """
    links = link_layouts(settings, layout)
    rows_K, start = np.zeros((len(children), links.up.row_bytes), np.uint8), layout.empty()
    layout.floats(start)[:] = 0.1
    tracemalloc.start()
    rule = aggregator.build(
        settings,
        RuleContext(
            layout=layout,
            node="cloud",
            seed=1,
            measures=True,
            children=len(children),
            training=TrainingSettings(),
            rows=lambda name, count: np.zeros((count, layout.row_bytes), np.uint8),
        ),
    )
    rule.begin(start)
    for r in range(3):
        order = tuple(name for _, names in rule.dispatch(r, children) for name in names)
        layout.floats(rows_K)[:] = np.random.default_rng(r).random((len(children), 1), np.float32)
        rule.aggregate(
            r, Uploads(order, rows_K, tuple(Report(10, 0.5) for _ in order), lambda: None)
        )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


FOUR: Final = [f"device-{k}" for k in range(4)]
TWO_MB: Final = ModelLayout.build([("fc.weight", (500, 1000), Section.PARAMETER)])


@cache
def peak_of_fedavg() -> int:
    return peak_of(FedAvg(), TWO_MB, FOUR)


@pytest.mark.parametrize(
    "name", [name for name in RULES if name not in ("fedma", "gamf", "fedgen")]
)
def test_the_memory_of_a_rule_is_what_its_settings_have(name: str) -> None:
    settings, size = RULES[name](**LEAST[name]), TWO_MB.row_bytes
    held = settings.held_bytes(size, children=4, taking_part=4, resident_bytes=1e9) / size
    peak_of(settings, TWO_MB, FOUR)  # what is imported with the first call is no memory of the rule
    found = (peak_of(settings, TWO_MB, FOUR) - peak_of_fedavg()) / size
    in_flight = 4 if name == "fedbuff" else 0  # of other versions, which rounds on time do not have
    assert held - in_flight - 1.3 <= found <= held + 1.3


@pytest.mark.parametrize(("name", "held"), [("fedma", 1.2), ("gamf", 1.8)])
def test_a_plan_counts_the_memory_of_rules_that_match_neurons(name: str, held: float) -> None:
    """The matched uploads, at most what may stay resident, and what the matching takes for each
    upload.
    """
    for taking_part, resident_mb in ((4, 512), (2, 512), (4, 25)):
        tree = {
            "topology": {"institutions": 0, "devices": 4},
            "transfer": {"resident_mb": resident_mb},
        }
        plain, matched = (
            memory({**tree, "cloud": {"participation": taking_part / 4, "aggregation": rule}})[
                "cloud"
            ]
            for rule in ("fedavg", name)
        )
        kept = min(10 * taking_part, resident_mb)
        assert matched - plain == pytest.approx((kept + held * 10 * taking_part) * MB)


def test_a_plan_counts_what_rules_and_objectives_hold() -> None:
    ten = {"topology": {"institutions": 1, "devices": 10}}
    plain = memory(ten)
    scaffold = memory(
        ten | {"training": {"objective": "scaffold"}, "institution": {"aggregation": "scaffold"}}
    )
    feddf = memory(ten | {"data": {"node_samples": 9}, "institution": {"aggregation": "feddf"}})
    # Six models and the vectors of a scaffold: c goes down, and each update of c_i up, behind the
    # models.
    assert scaffold["institution"] - plain["institution"] == (5 + 10 + 1) * 10 * MB
    assert scaffold["device"] - plain["device"] == (3 + 3) * 10 * MB
    assert feddf["institution_refiner"] == footprint.TORCH_BYTES + MB + (2 + 10) * 10 * MB
    assert "cloud_refiner" not in feddf and scaffold["cloud"] == plain["cloud"]


def test_what_is_not_here_is_made_up() -> None:
    work = workload.workload(
        parse({"data": {"dataset": "mnist", "root": "/nowhere"}, "model": {"name": "lenet5"}})
    )
    assert work.samples == {"device-0": 60_000} and "mnist is not available" in work.assumed[0]
    assert work.calibrated.data.dataset == "synthetic" and work.layout.row_bytes == 4 * 61_706


def test_a_machine_is_measured_by_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "train", lambda *_, **__: TrainingSpeed(2.0, 0.2, 0.9))
    topology = {"institutions": 0, "devices": 12}
    work = workload.workload(parse({"model": {"name": "mlp_digits"}, "topology": topology}))
    found = calibration.measure(work, cores=2)
    assert (found.step_s, found.training_s, found.share, found.cores) == (2.0, 0.2, 0.9, 2)
    assert (
        min(found.evaluation_s, found.message_s, found.round_s, found.byte_s, found.mix_byte_s) > 0
    )


class FakePool:
    """A pool, and its members, whose trainings take 0.125 s a step, and 0.25 s from one to the
    next.
    """

    def __init__(self, **_: object) -> None:
        self.running, self.node = list[str](), ""

    async def __aenter__(self) -> FakePool:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def member(self, node: str) -> FakePool:
        made = copy(self)
        made.node = node
        return made

    async def prepare(self, experiment: Experiment, *, frozen: Path | None = None) -> Prepared:
        return Prepared(ModelLayout.build([("w", (2,), Section.PARAMETER)]), 1, "")

    async def train(self, order: Order) -> LocalResult:
        self.running.append(self.node)  # of all members
        await asyncio.sleep(0)
        assert self.running == [self.node]
        self.running.remove(self.node)
        steps = order.epochs * (8 if self.node == "device-0" else 24)
        return LocalResult(
            Work(
                1,
                0.5,
                steps=steps,
                train_s=0.125 * steps,
                wait_s=0.25,
                costs=DeviceCosts(cpu_s=0.1 * steps),
            )
        )


def test_devices_train_in_turn_and_a_training_without_steps_has_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainings, "Pool", FakePool)
    experiment = parse({"topology": {"institutions": 0, "devices": 3}, "training": {"epochs": 2}})
    found = trainings.train(experiment, first=np.zeros(8, np.uint8), training_s=0.0)
    assert (found.step_s, found.training_s, found.share) == pytest.approx((0.125, 0.25, 0.8))


def test_the_command_reports_seconds_bytes_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "TRAINING_S", 0.05)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # one process that trains
    file = tmp_path / "lab.toml"
    sizes = {"topology": {"institutions": 2, "devices": 4}, "model": {"name": "mlp_digits"}}
    file.write_text(to_toml(parse({**sizes, "cloud": {"epoch_control": {"name": "tempo"}}})))
    result = invoke("plan", file, "--format", "json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (
        found["global_round_s"] == pytest.approx(sum(found["seconds"].values()))
        and found["speeds"]["step_s"] > 0
    )
    assert (
        set(found["epochs"]) == {"institution-0", "institution-1"}
        and "Tempo" in found["assumed"][0]
    )
    assert found["load"]["cores"] == os.cpu_count() and 0 < found["speeds"]["share"] <= 1
    assert [line.split()[0] for line in result.stderr.splitlines()] == [
        "reads",
        "measures",
        "simulates",
    ]
    refused = invoke("plan", file, "--set", "topology.devices=1")
    assert refused.exit_code == 4 and "no device" in refused.output


def test_a_machine_is_measured_once_for_runs_that_train_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[str] = []

    def measure(work: workload.PlannedWorkload, **_: object) -> MachineSpeeds:
        measured.append(work.experiment.model.name)
        return MachineSpeeds(step_s=0.01, cores=2)

    monkeypatch.setattr(simulated_run, "measure", measure)
    predictor = Predictor(rounds=1)
    lab = {"topology": {"institutions": 0, "devices": 3}}
    median = {"cloud": {"aggregation": {"name": "median"}}}
    trees = [
        lab,
        lab | median | {"data": {"partition": "dirichlet"}},
        lab | {"model": {"name": "mlp_digits"}},
    ]
    found = [predictor.predict(parse({"model": {"name": "cnn_digits"}} | tree)) for tree in trees]
    assert measured == ["cnn_digits", "mlp_digits"]
    assert all(each["global_round_s"] > 3 * 0.01 for each in found)


def test_devices_of_one_user_each_have_their_own_samples_alone() -> None:
    own = (1_000, 5_000, 3_000)

    def held(devices: int, own_bytes: tuple[int, ...]) -> int:
        sizes = {"data_bytes": MB, "devices": devices, "own_bytes": own_bytes}
        return footprint.memory_of(parse({}), BIG, **sizes)["device"]

    assert held(1, ()) - held(1, own) == MB - 5_000
    assert held(2, ()) - held(2, own) == MB - 8_000
    direct = [
        footprint.direct_bytes(parse({}), BIG, data_bytes=MB, own_bytes=each) for each in ((), own)
    ]
    assert direct[1] - direct[0] == 9_000


def test_the_table_has_a_global_round_its_phases_and_the_memory() -> None:
    found = {
        "global_round_s": 1.75,
        "total_s": 17.5,
        "global_rounds": 10,
        "seconds": {"train": 1.5, "wait": 0.25},
    }
    found |= {
        "tiers": {"wan_up": 2_000_000},
        "memory": {"cloud": 60_000_000},
        "speeds": {"share": 0.99},
    }
    found |= {"own_bytes": {"device-0": 3_000, "device-1": 9_000_000, "device-2": 1_200_000}}
    load = {"others_cores": 0.04, "cores": 2, "load_average": 0.3, "busy": False}
    table = predicting.text_of({**found, "assumed": ["each device has 10 samples"], "load": load})
    assert table.splitlines()[0].split() == ["a", "global", "round", "1.75", "s"]
    assert table.splitlines()[3] == "10 global rounds 17.50 s"
    assert "\n  own samples    3.0 kB to 9.0 MB by user, 1.2 MB in the middle\n" in table
    assert (
        "2.0 MB" in table
        and "60.0 MB" in table
        and "\nassumed: each device has 10 samples\n" in table
    )
    measured = (
        "measured while other processes used 0.0 of 2 cores (load average 0.3); training "
        "had 99% of a core"
    )
    assert table.splitlines()[-1] == measured


def test_a_bar_shows_the_share_of_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with rich_progress.Progress(console=Console(file=io.StringIO())) as bar:
        show = Stages(2, bar)
        show("measures")
        show("simulates")
        assert (bar.tasks[0].description, bar.tasks[0].completed) == ("simulates", 1)
        show.reach(0.5)
        assert bar.tasks[0].completed == 1.5
    lines = Stages(1, None)
    lines("simulates")
    lines.reach(0.5)
    assert capsys.readouterr().err == "simulates\n"


@pytest.mark.parametrize(
    ("others", "share", "busy"),
    [(0.1, 0.99, False), (0.5, 0.99, True), (0.0, 0.6, True), (None, 0.95, False)],
)
def test_a_busy_machine_is_noticed(others: float | None, share: float, busy: bool) -> None:
    load = MachineLoad(others, 2, 1.5)
    assert calibration.is_busy(load, share) is busy
    line = calibration.load_line(
        {"others_cores": others, "cores": 2, "load_average": 1.5, "busy": busy}, share
    )
    assert line.count("\n") == 1 and ("Measure again when it is idle." in line) is busy


def test_the_load_is_what_others_used_meanwhile(tmp_path: Path) -> None:
    """In 4 s all cores work for 6.5 s, 0.5 s of it for this process; idle time and waits for disks
    do not count.
    """
    ticks, now, own = os.sysconf("SC_CLK_TCK"), [10.0], [2.0]
    (tmp_path / "stat").write_text("cpu 100 0 100 900 50 0 0 0\ncpu0 1 1 1 1\n")
    meter = LoadMeter(tmp_path, own=lambda: own[0], clock=lambda: now[0])
    (tmp_path / "stat").write_text(
        f"cpu {100 + 4 * ticks} 0 {100 + 2 * ticks} 9000 700 0 0 {ticks // 2}\n"
    )
    now[0], own[0] = 14.0, 2.5
    assert meter.read().others_cores == pytest.approx((6.0 + 0.5 - 0.5) / 4.0)


def test_without_proc_the_others_are_unknown(tmp_path: Path) -> None:
    assert LoadMeter(tmp_path).read().others_cores is None
    assert LoadMeter().read().others_cores is not None


# Sweeps

SWEEP: dict[str, Any] = {
    "title": "Two models on two splits",
    "seeds": 3,
    "experiment": {"rounds": 10, "data": {"dataset": "digits"}},
    "axes": {"model.name": ["mlp_digits", "cnn_digits"], "data.partition": ["iid", "dirichlet"]},
    "where": [{"model.name": "cnn_digits", "data.partition": "iid", "experiment": {"rounds": 5}}],
}
SECONDS = {"mlp_digits": 1.0, "cnn_digits": 4.0}


def predicted(experiment: Experiment, **_: Any) -> dict[str, Any]:
    second = SECONDS[experiment.model.name]
    memory = {"device": int(second * 1e8), "cloud": 1000}
    return {
        "global_round_s": second,
        "tiers": {"wan_up": 100.0 * second},
        "memory": memory,
        "assumed": ["as ever"],
    }


def test_runs_of_equal_cost_are_predicted_once_and_all_are_summed() -> None:
    seen: list[Experiment] = []

    def predict(experiment: Experiment) -> dict[str, Any]:
        seen.append(experiment)
        return predicted(experiment)

    grid = expand(SWEEP, Path("t.toml"))
    begun: list[str] = []
    planned = planning.plan_of(planning.groups_of(grid), predict, begun.append)
    assert begun == [
        f"predicts 6 runs like {model}, iid, seed 1" for model in ("mlp_digits", "cnn_digits")
    ]
    assert [one.model.name for one in seen] == ["mlp_digits", "cnn_digits"]
    found = planning.to_json(grid, planned)
    rounds = {"mlp_digits": 3 * 2 * 10, "cnn_digits": 3 * (10 + 5)}
    assert found["total_s"] == pytest.approx(
        sum(SECONDS[name] * count for name, count in rounds.items())
    )
    assert found["bytes"] == {"wan_up": pytest.approx(100 * found["total_s"])}
    assert found["memory"] == {"device": 400_000_000, "cloud": 1000} and found["assumed"] == [
        "as ever"
    ]
    assert [(group["runs"], group["global_rounds"]) for group in found["groups"]] == [
        (6, 60),
        (6, 45),
    ]


def test_plan_takes_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Predictor, "predict", lambda self, experiment, **_: predicted(experiment))
    found = invoke(
        "plan", "study/two", "--only", "method=FedAvg", "--seeds", "2", "--format", "json"
    )
    assert found.exit_code == 0, found.stderr
    assert found.stderr.startswith("predicts 8 runs like ") and found.stderr.count("\n") == 1
    plan = json.loads(found.stdout)
    assert plan["runs"] == 2 * 2 * 2 and plan["total_s"] == pytest.approx(8 * 300 * 1.0)
    text = invoke("plan", "study/two", "--only", "method=FedAvg")
    assert "20 runs   1.67 h" in text.stdout and "  wan up         600.0 kB" in text.stdout


def test_an_experiment_has_no_cells() -> None:
    refused = invoke("plan", "demo", "--seeds", "2")
    assert refused.exit_code == 2 and "valid only for a sweep" in refused.stderr
    refused = invoke("run", "study/two")
    assert (
        refused.exit_code == 4
        and "a sweep of several runs. Use `fedstrata sweep`." in refused.stderr
    )
