"""`run --simulate`: real training in virtual time, beside runs without a network."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from fedstrata.cloud.evaluator import Evaluator
from fedstrata.cloud.records import COSTS
from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.runtime.world import RealWorld
from fedstrata.common.settings.tables import write
from fedstrata.deploy.local.direct import run_in_process
from fedstrata.deploy.planning.simulated_run import machine_speeds, simulated_run
from fedstrata.deploy.results.page import compose
from fedstrata.deploy.results.run import Run, State, folders
from fedstrata.deploy.results.series import conditions
from fedstrata.deploy.results.trackers import series, time_of
from fedstrata.deploy.simulation import simulated_computing
from fedstrata.deploy.simulation.virtual_run import VirtualRun, check_simulated
from fedstrata.deploy.sweeps.grid import merged
from fedstrata.device.pool.executors import Thread
from fedstrata.device.pool.pool import Pool
from fedstrata.device.pool.trainers_by_kind import Trainers
from tests.helpers.commands import invoke, table
from tests.helpers.evaluation import HereEvaluator
from tests.simulation.drawn import draw_lab
from tests.simulation.outcome import TraceDigest, model_digest

pytestmark = pytest.mark.usefixtures("short_calibration")

LAB: dict[str, Any] = {
    "name": "virtual",
    "seed": 3,
    "rounds": 2,
    "topology": {"institutions": 3, "devices": 6},
    "data": {"partition": "dirichlet", "concentration": 0.5},
    "model": {"name": "mlp_digits"},
    "training": {"momentum": 0.5, "learning_rate": 0.05, "batch_size": 50},
    "institution": {"rounds": 2},
    "links": {"wan": {"up_mbit": 20, "down_mbit": 20, "delay_ms": 10}},
    "hardware": {"default": {"step_s": 0.05}},
}
TWO_LAYERS: dict[str, Any] = {
    "topology": {"institutions": 0, "devices": 4},
    "institution": {"rounds": 1},
}
OUTAGE = {"seconds": [0, 1, 4], "up_mbit": [20, 0, 10], "down_mbit": [20, 0, 10]}
CROSS = {"name": "fedcross", "alpha": 0.9, "on_new_model": "recentre"}


@pytest.fixture(autouse=True)
def _evaluator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the cloud evaluate in this process: others start slowly."""
    monkeypatch.setattr(simulated_computing, "Evaluator", HereEvaluator)


class FixedWorld(RealWorld):
    """A world in which all runs have the same id, which is in each topic."""

    def token(self, nbytes: int) -> str:
        return "ab" * nbytes

    def wall(self) -> float:
        return 1.8e9


def new(root: Path, tree: Mapping[str, Any], **options: Any) -> VirtualRun:
    experiment = parse(tree)
    facts = machine_speeds(experiment, of=None)
    folder = RunFolder.create(root, experiment, simulated=facts, world=FixedWorld())
    return simulated_run(folder, facts, **options)


def direct_digest(root: Path, tree: Mapping[str, Any]) -> str:
    folder = RunFolder.create(root, parse(tree), direct=True)
    run_in_process(folder, resume=False, accelerator="cpu", observe=lambda event, facts: None)
    return model_digest(root)


def model_of(root: Path) -> Mapping[str, npt.NDArray[np.float32]]:
    return load_file(next(root.glob("*/model.safetensors")))


def rows(root: Path, name: str = "rounds.csv") -> list[dict[str, str]]:
    return table(next(root.glob(f"*/{name}")))


@pytest.mark.parametrize(
    "changes",
    [
        {"cloud": {"aggregation": CROSS, "epoch_control": {"name": "tempo"}}},
        TWO_LAYERS,
        {"evaluation": {"at": "both", "data": "test"}},
        {
            **TWO_LAYERS,
            "training": {"objective": {"name": "scaffold"}},
            "cloud": {"aggregation": {"name": "scaffold"}},
        },
        {"model": {"frozen": ["fc1.bias"], "personal": ["fc2.*"]}, "evaluation": {"at": "devices"}},
    ],
    ids=[
        "three layers, fedcross under Tempo",
        "two layers",
        "scored by devices",
        "two layers, scaffold",
        "personal parts",
    ],
)
def test_the_model_is_that_of_a_direct_run(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = merged(LAB, changes)
    if changes == TWO_LAYERS:  # whose evaluator is a process
        monkeypatch.setattr(simulated_computing, "Evaluator", Evaluator)
    path = new(tmp_path / "simulated", tree, workers=1).run()
    assert model_digest(tmp_path / "simulated") == direct_digest(tmp_path / "direct", tree) != ""
    own, theirs = (rows(tmp_path / kind) for kind in ("simulated", "direct"))
    for one, other in zip(own, theirs, strict=True):
        scores = [key for key in one if key.startswith("devices_")]
        for key in ("accuracy", "loss", "train_loss", "sgd_steps", "path_steps", *scores):
            assert one[key] == other[key], key
    run = Run(path.parent)
    assert run.state is State.FINISHED and run.simulated and not run.direct
    assert not (path.parent / "spool").exists()


def events(root: Path, tree: Mapping[str, Any], *, workers: int) -> tuple[int, str, str, list[str]]:
    """Return the messages of a run, the digest of its trace, that of its model, and its tables."""
    trace = TraceDigest(lambda: 0.0)
    run = new(root, tree, workers=workers, routed=trace)
    trace.now = run.now
    run.run()
    files = [(next(root.glob(f"*/{name}"))).read_text() for name in ("rounds.csv", "links.csv")]
    return trace.messages, trace.hexadecimal(), model_digest(root), files


OF_TRAINERS: Final = (820_004, 820_007, 820_016)  # drawn labs with a trainer of one's own


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers be threads."""
    monkeypatch.setattr(simulated_computing, "Pool", partial(Pool, worker=Thread))


@pytest.mark.usefixtures("threads")
def test_one_worker_and_two_give_the_same_events(tmp_path: Path) -> None:
    """A straggler misses the quorum, links have an outage, a device is away: results depend on
    virtual time.
    """
    late = {"of": {"device-0": {"step_s": 0.5}}}
    closing = {"rule": "quorum", "quorum": 1, "deadline_s": 1.5}
    away = {"trace": {"changes": {"device-3": [0, 2, 6]}}}
    tree = merged(
        LAB,
        {"hardware": late, "institution": {"closing": closing}, "availability": away, "rounds": 3},
    )
    tree["links"] = {"wan": {"trace": OUTAGE}}
    found = [events(tmp_path / str(workers), tree, workers=workers) for workers in (1, 2)]
    assert found[0] == found[1] and found[0][0] > 100


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    "seed", [seed for seed in range(820_000, 820_010) if seed not in OF_TRAINERS]
)
def test_one_worker_and_four_give_the_same_events_in_drawn_labs(seed: int, tmp_path: Path) -> None:
    """Rules, quorums, links and absences are those of the draw.

    A trainer of one's own draws from the process's generators, so several threads cannot train by
    one.
    """
    lab, rng = draw_lab(seed).experiment, random.Random(seed)
    tree = lab.model_dump(mode="json") | {
        "model": {"name": "mlp_digits"},
        "hardware": {
            "of": {
                device: {"step_s": rng.choice([0.002, 0.01, 0.05])} for device in lab.tree.devices
            }
        },
    }
    found = [events(tmp_path / str(workers), tree, workers=workers) for workers in (1, 4)]
    assert found[0] == found[1] and found[0][0] > 10


def test_devices_are_trained_vmapped_without_a_network_and_in_virtual_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vmapped_on_cpu: None
) -> None:
    """Those of a local round are given to their trainers in one call, as by the pool of a process,
    at no other time.
    """
    groups: dict[str, list[list[str]]] = {}
    train = Trainers.train

    def noted(trainers: Trainers, work: Any, *rest: Any) -> None:
        groups.setdefault(kind, []).append(sorted(device.node for device, _ in work))
        train(trainers, work, *rest)

    monkeypatch.setattr(Trainers, "train", noted)
    tree = {
        mode: merged(LAB, TWO_LAYERS, {"training": {"vmapped": mode}}) for mode in (False, None)
    }
    for mode, lab in tree.items():
        kind = f"direct {mode}"
        direct_digest(tmp_path / kind, lab)
        kind = f"simulated {mode}"
        new(tmp_path / kind, lab, workers=1).run()
    everybody = [f"device-{k}" for k in range(4)]
    for how in ("direct", "simulated"):
        assert groups[f"{how} None"] == [everybody] * 2
        assert len(groups[f"{how} False"]) == 8
        alone, together = (model_of(tmp_path / f"{how} {mode}") for mode in tree)
        for name, tensor in alone.items():
            np.testing.assert_allclose(together[name], tensor, rtol=0, atol=1e-5)
        for mode, path in {False: "in-process", None: "vmapped"}.items():
            assert {row["path"] for row in rows(tmp_path / f"{how} {mode}", "devices.csv")} == {
                path
            }
    assert model_digest(tmp_path / "simulated None") == model_digest(tmp_path / "direct None")
    tables = {kind: rows(tmp_path / kind, "devices.csv") for kind in groups}
    alone_s, together_s = (
        [[row[key] for key in ("node", "train_s", "wait_s")] for row in tables[f"simulated {mode}"]]
        for mode in tree
    )
    assert alone_s == together_s and len(alone_s) == 8
    # what this machine spends is no simulated device's; without a network it is the trainings'
    for mode in tree:
        assert {row[name] for row in tables[f"simulated {mode}"] for name in COSTS} == {""}
        for row in tables[f"direct {mode}"]:
            assert float(row["cpu_s"]) > 0 and int(row["memory_bytes"]) > 0 and row["joules"] == ""


def test_seconds_are_those_of_machines_and_links(tmp_path: Path) -> None:
    tree = merged(
        LAB, TWO_LAYERS, {"links": {"wan": {"up_mbit": 1, "down_mbit": 1, "delay_ms": 100}}}
    )
    new(tmp_path, tree, workers=1).run()
    slowest = [0.0] * 2
    for row in rows(tmp_path, "devices.csv"):
        place = int(row["global_round"]) - 1
        assert float(row["train_s"]) == pytest.approx(0.05 * int(row["sgd_steps"]))
        slowest[place] = max(slowest[place], float(row["train_s"]))
    model_s = 2 * Run(next(tmp_path.iterdir())).manifest["model_bytes"] * 8 / 1e6
    for row, train_s in zip(rows(tmp_path), slowest, strict=True):
        seconds = sum(
            float(row[f"{phase}_s"]) for phase in ("dispatch", "train", "wait", "collect")
        )
        assert seconds == pytest.approx(train_s + model_s + 2 * 0.1, rel=0.05)


def test_a_killed_run_is_resumed_with_its_speeds(tmp_path: Path) -> None:
    tree = merged(
        LAB, {"cloud": {"aggregation": CROSS}, "training": {"objective": {"name": "scaffold"}}}
    )
    tree["institution"] = {"rounds": 2, "aggregation": {"name": "scaffold"}}
    tree["hardware"] = {}

    def until_the_first(event: str, facts: Mapping[str, object]) -> None:
        if event == "global_round" and facts["global_round"] == 1:
            raise KeyboardInterrupt

    experiment = parse(tree)
    facts = machine_speeds(experiment, of=None)
    assert facts["speeds"]["step_s"] > 0 and "load" in facts
    folder = RunFolder.create(tmp_path / "killed", experiment, simulated=facts)
    with pytest.raises(KeyboardInterrupt):
        simulated_run(folder, facts, workers=1).run(until_the_first)
    folder.release()
    refused = invoke("run", "--resume", folder.path)
    assert refused.exit_code == 4 and "Add --simulate" in refused.output
    resumed = invoke("run", "--simulate", "--workers", "1", "--resume", folder.path)
    assert resumed.exit_code == 0, resumed.output
    assert "simulated time" in resumed.stdout
    killed = Run(folder.path)
    assert killed.manifest["simulated"] == facts and len(killed.rounds) == 2
    assert model_digest(tmp_path / "killed") == direct_digest(tmp_path / "direct", tree)
    for one, other in zip(rows(tmp_path / "killed"), rows(tmp_path / "direct"), strict=True):
        for key in ("accuracy", "train_loss", "sgd_steps"):
            assert one[key] == other[key], key
    assert machine_speeds(experiment, of=folder.path)["speeds"] == facts["speeds"]
    by_id = Path(folder.path.name.rpartition("-")[2])
    assert (
        machine_speeds(experiment, of=by_id, runs=folder.path.parent)["speeds"] == facts["speeds"]
    )
    for changes in ({"training": {"batch_size": 5}}, {"model": {"name": "cnn_digits"}}):
        with pytest.raises(
            InvalidExperiment, match=r"--speeds.*of mlp_digits on digits in batches of 50, not of"
        ):
            machine_speeds(parse(merged(tree, changes)), of=folder.path)


def test_the_error_of_a_node_ends_the_run(tmp_path: Path) -> None:
    tree = merged(LAB, {"data": {"dataset": "mnist", "root": str(tmp_path / "nothing")}})
    with pytest.raises(InvalidExperiment, match=r"data\.root"):
        new(tmp_path / "runs", tree, workers=1).run()


def test_an_accelerator_that_is_missing_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(InvalidExperiment, match="accelerator"):
        new(tmp_path, LAB, accelerator="cuda:99", workers=1).run()
    assert not [thread for thread in threading.enumerate() if thread.name == "computing"]


def test_what_is_not_simulated_is_refused() -> None:
    refined = {"data": {"node_samples": 9}, "institution": {"aggregation": {"name": "feddf"}}}
    with pytest.raises(InvalidExperiment, match="not simulated"):
        check_simulated(parse(merged(LAB, refined)))


@pytest.mark.parametrize(
    "options",
    [["--simulate", "--direct"], ["--workers", "2"], ["--speeds", "x"],
     ["--simulate", "--metrics", ":0"]],
)  # fmt: skip
def test_options_that_contradict_are_refused(options: list[str]) -> None:
    assert invoke("run", "nothing.toml", *options).exit_code == 2


@pytest.mark.slow
def test_the_runs_of_a_sweep_share_one_calibration(tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    words: list[str | Path] = ["--simulate", "--jobs", "2", "--runs", tmp_path, "--format", "csv"]
    axes = {
        "rule": {
            "FedAvg": {"training": {"epochs": 1}},
            "FedCross": {"cloud": {"aggregation": CROSS}},
        }
    }
    lab = merged(LAB, TWO_LAYERS) | {"hardware": {}, "rounds": 1}
    for key in ("name", "seed"):
        del lab[key]
    measure = [{"name": "seconds", "unit": "s", "until": "end"}]
    file.write_text(
        write(
            {
                "title": "Two",
                "columns": ["rule"],
                "measure": measure,
                "experiment": lab,
                "axes": axes,
            }
        )
    )
    done = invoke("sweep", file, *words)
    assert done.exit_code == 0, done.output
    runs = [Run(path) for path in folders(tmp_path / "two")]
    assert [run.simulated for run in runs] == [True, True]
    speeds = [run.manifest["simulated"]["speeds"] for run in runs]
    assert speeds[0] == speeds[1] and speeds[0]["step_s"] > 0
    more = invoke("sweep", file, *words, "--seeds", "1")
    assert more.exit_code == 0 and "2 of 2 runs are finished" in more.stderr
    other = invoke("sweep", file, "--direct", *words[3:])
    assert other.exit_code == 4 and "had a simulated network. Add --simulate" in other.stderr


# Names of the seconds


def as_simulated(path: Path, **speeds: float) -> Path:
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"simulated": {"speeds": speeds}}))
    return path


def test_every_table_and_export_names_simulated_seconds(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    path = as_simulated(make_run(tmp_path, {}), step_s=0.01)
    run = Run(path)
    page = compose([run])
    text = page.html()
    assert (
        "simulated s" in text
        and "These seconds are simulated" in text
        and "simulated, each node on a machine of its own" in text
    )
    for one in page.tables:
        for column in one.columns:
            assert column.unit != "s", (one.title, column.name)
    assert ">time, s<" not in text
    assert {
        name
        for name in series(run.rounds[0], time=time_of(run))
        if "seconds" in name.partition("/")[0]
    } == {
        f"simulated_seconds/{name}" for name in ("elapsed", "global_round", *run.rounds[0].phases)
    }
    listed = invoke("runs", "list", "--runs", tmp_path)
    assert "simulated" in listed.stdout
    assert (
        json.loads(invoke("runs", "list", "--runs", tmp_path, "--format", "json").stdout)[
            "simulated"
        ]
        is True
    )


def test_compare_names_simulated_seconds_beside_measured_ones(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    measured = make_run(tmp_path, {})
    one, other = (as_simulated(make_run(tmp_path, {}), step_s=step_s) for step_s in (0.01, 0.02))
    apart = [
        conditions(Run(first), Run(second))
        for first, second in ((measured, one), (one, other), (one, one))
    ]
    assert apart == [
        {"seconds": "seconds: measured and simulated"},
        {"seconds": "speeds.step_s: 0.01 and 0.02"},
        {},
    ]
    done = invoke("compare", measured, one, "--target", "0.9")
    assert done.exit_code == 0, done.output
    head, *rows = (line for line in done.stdout.splitlines() if line)
    assert "time, s, some simulated" in head and "also differs in" in head
    assert any("simulated seconds" in row and row.rstrip().endswith("seconds") for row in rows)
    assert "other seconds than measured seconds: seconds: measured and simulated" in done.stderr
    alone = invoke("compare", one, "--target", "0.9", "--format", "csv")
    assert "time_simulated_s" in alone.stdout
