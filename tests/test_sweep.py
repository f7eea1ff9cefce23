"""`fedstrata sweep`: what it runs and does not run again, one or several at once, killed or not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from docs.tools import keep
from fedstrata.common.errors import FedstrataError, RunFailed, StorageFailed
from fedstrata.common.experiment.reading import parse
from fedstrata.common.settings.tables import write
from fedstrata.deploy.results.kept_table import KeptRun, KeptTable, add
from fedstrata.deploy.results.run import Run, State, find_all, folders
from fedstrata.deploy.sweeps import execution
from fedstrata.deploy.sweeps.execution import (
    CellFailed,
    RunCommand,
    RunOrder,
    WorkerProcess,
    packed,
    unpack,
)
from fedstrata.deploy.sweeps.grid import load, merged
from fedstrata.deploy.sweeps.running import SweepProgress, Watch, fitting, run_jobs
from fedstrata.deploy.sweeps.sweep_folder import MissingRun, SweepFolder
from tests.helpers.commands import command, fedstrata, invoke, tensors
from tests.helpers.direct import HereProcess

pytestmark = pytest.mark.usefixtures("warm")

TREE: Final[Mapping[str, Any]] = {
    "title": "Two rules",
    "seeds": 2,
    "columns": ["method"],
    "measure": [{"name": "accuracy", "last": 2}],
    "experiment": {
        "rounds": 6,
        "topology": {"institutions": 0, "devices": 3},
        "data": {
            "dataset": "synthetic",
            "samples": 60,
            "test_samples": 40,
            "classes": 3,
            "image_shape": [1, 8, 8],
        },
        "model": {"name": "mlp_digits"},
        "training": {"epochs": 1, "batch_size": 10},
    },
    "axes": {
        "method": {
            "FedAvg": {"training": {"epochs": 1}},
            "FedCross": {"cloud": {"aggregation": {"name": "fedcross", "alpha": 0.9}}},
        }
    },
}


def sweep_file(folder: Path, *changes: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "two.toml"
    file.write_text(write(merged(TREE, *changes)))
    return file


@pytest.fixture(scope="module")
def here() -> Iterator[None]:
    """Run cells in the test's process; the processes of sweeps that are killed, and of slow tests,
    stay.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedstrata.deploy.sweeps.execution.WorkerProcess", HereProcess)
        # only the main thread is
        patch.setattr("fedstrata.deploy.local.direct.interruptible", nullcontext)
        yield


def models(runs: Path) -> dict[str, bytes]:
    """Return the final models by the digests of their experiments."""
    return {str(Run(path).manifest["experiment_digest"]): tensors(path) for path in folders(runs)}


@pytest.mark.slow
def test_two_at_once_give_the_same_bits_and_nothing_is_run_again(tmp_path: Path) -> None:
    file = sweep_file(tmp_path)
    found = {}
    for jobs in (1, 2):
        runs = tmp_path / str(jobs)
        done = invoke(
            "sweep", file, "--direct", "--jobs", str(jobs), "--runs", runs, "--format", "csv"
        )
        assert done.exit_code == 0, done.stderr
        found[jobs] = done.stdout, models(runs / "two")
        assert len(found[jobs][1]) == 4
    assert found[1] == found[2]
    before = {path: os.stat(path / "rounds.csv").st_mtime_ns for path in folders(runs / "two")}
    again = invoke("sweep", file, "--direct", "--runs", runs, "--format", "csv")
    assert again.stdout == done.stdout and "4 of 4 runs are finished" in again.stderr
    assert before == {
        path: os.stat(path / "rounds.csv").st_mtime_ns for path in folders(runs / "two")
    }
    alone = invoke(
        "run", folders(runs / "two")[0] / "experiment.toml", "--direct", "--runs", tmp_path
    )
    assert alone.exit_code == 0  # an ordinary run has the same model
    (other,) = models(tmp_path).items()
    assert other in found[1][1].items()
    refused = invoke("sweep", file, "--runs", runs, "--set", "rounds=6")
    assert (
        refused.exit_code == 4
        and "had no network. Add --direct, or name another folder." in refused.stderr
    )


@pytest.mark.usefixtures("here")
def test_a_killed_sweep_goes_on_and_ends_with_the_same_table(tmp_path: Path) -> None:
    file = sweep_file(tmp_path, {"axes": {"method": {"FedCross": {"rounds": 15}}}})
    words = ["sweep", file, "--direct", "--format", "csv"]
    killed = command(*words, "--jobs", "2", "--runs", tmp_path / "killed")
    process = subprocess.Popen(killed, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process, process.stderr as lines:
        # the short one; the long one still runs
        assert any(line.startswith("1/4: ") for line in lines)
        os.kill(process.pid, signal.SIGKILL)
        # to its end, which is that of the workers: they have it, too
        assert "Traceback" not in lines.read()
    grid, folder = load(file), SweepFolder(tmp_path / "killed" / "two")
    assert 0 < len(folder.finished(grid)) < 4
    partial = invoke("sweep", file, "--table", "--runs", tmp_path / "killed")
    assert partial.exit_code == 0 and "partial: " in partial.stdout
    went_on = invoke(*words, "--jobs", "1", "--runs", tmp_path / "killed")
    assert went_on.exit_code == 0, went_on.stderr
    undisturbed = invoke(*words, "--jobs", "1", "--runs", tmp_path / "undisturbed")
    assert went_on.stdout == undisturbed.stdout
    assert models(folder.path) == models(tmp_path / "undisturbed" / "two")
    # none was begun twice
    assert [Run(path).state for path in folders(folder.path)] == [State.FINISHED] * 4


@pytest.mark.usefixtures("here")
def test_runs_that_fail_or_lack_their_data_are_reported_and_tried_again_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    cifar = {
        "data": {"dataset": "cifar10", "root": str(tmp_path)},
        "model": {"name": "lenet_cifar"},
    }
    digits = {"data": {"dataset": "digits"}, "model": {"name": "mlp_digits"}}
    axes = {"data": {"C": cifar, "D": digits, "N": digits | {"model": {"name": "nowhere:build"}}}}
    file = tmp_path / "two.toml"
    file.write_text(write({"title": "Data", "seeds": 2, "experiment": {"rounds": 1}, "axes": axes}))
    words = ["sweep", file, "--direct", "--jobs", "1", "--runs", tmp_path]
    wrong = invoke(*words, "--only", "data=X")
    assert "--only = 'data=X': the axis has no such value. There are: C, D, N." in wrong.stderr, (
        wrong.stderr
    )
    refused = invoke(*words, "--only", "data=C")
    assert refused.exit_code == 4, refused.stderr
    _, line = refused.stderr.splitlines()
    assert (
        line.startswith("fedstrata: data.root = ")
        and "data_batch_1" in line
        and not folders(tmp_path / "two")
    )
    for done in ("0 of 6", "2 of 6"):
        found = invoke(*words)
        assert found.exit_code == 1
        first, left_out, *_, last, missing = found.stderr.strip().splitlines()
        assert f"{done} runs are finished" in first
        assert left_out.startswith("left out: 2 runs: data.root = ")
        assert missing.startswith("failed: C, seed 1 and 1 more: data.root = ")
        assert found.stderr.count("data_batch_1") == 2, (
            "once before anything runs, and once at the end"
        )
        assert "partial: 2 of 6 runs are finished; 2 of 3 cells lack some" in found.stdout
        assert last.startswith("failed: N, seed 1 and 1 more: model.name = 'nowhere:build': "), (
            found.stderr
        )
    assert sorted(Run(path).cell for path in folders(tmp_path / "two")) == ["D", "D", "N", "N"]


def test_two_sweeps_cannot_share_a_folder(tmp_path: Path) -> None:
    file = sweep_file(tmp_path)
    with SweepFolder(tmp_path / "two").held():
        refused = invoke("sweep", file, "--direct", "--runs", tmp_path)
    assert refused.exit_code == 4
    (line,) = refused.stderr.strip().splitlines()
    assert line.endswith(
        "another sweep uses this folder. Wait for its end, or name another folder."
    )


def test_the_runs_are_listed_without_being_run(tmp_path: Path) -> None:
    file = sweep_file(tmp_path)
    listed = invoke(
        "sweep", file, "--dry-run", "--only", "method=FedCross", "--seeds", "3", "--runs", tmp_path
    )
    *rows, last = listed.stdout.splitlines()[1:]
    digests = [
        one.digest for one in load(file, only=["method=FedCross"], seeds=3).experiments.values()
    ]
    assert [row.split() for row in rows] == [
        ["FedCross", str(s), "6", d, "missing"] for s, d in enumerate(digests, 1)
    ]
    assert last == "1 cell, 3 runs, 18 global rounds; 3 runs missing"
    facts = [
        json.loads(line)
        for line in invoke("sweep", file, "--dry-run", "--format", "json").stdout.splitlines()
    ]
    assert [fact["cell"] for fact in facts] == [{"method": "FedAvg"}] * 2 + [
        {"method": "FedCross"}
    ] * 2
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("form", ["table", "csv", "latex", "json"])
def test_each_form_of_a_table_is_there_before_anything_ran(tmp_path: Path, form: str) -> None:
    found = invoke("sweep", sweep_file(tmp_path), "--table", "--runs", tmp_path, "--format", form)
    assert found.exit_code == 0 and "FedCross" in found.stdout
    if form == "json":
        assert [
            cell["measures"]["accuracy"]["mean"] for cell in json.loads(found.stdout)["cells"]
        ] == [None, None]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--direct", "--broker", "localhost"], "--direct uses no network"),
        (["--accelerator", "cpu"], "valid only with --direct"),
        (["--lab", "rack", "--jobs", "2"], "a lab has one run at a time"),
        (["--cluster", "tcp://x:1"], "valid only with --direct or --simulate"),
        (
            ["--cluster", "tcp://x:1", "--direct", "--jobs", "2"],
            "a cluster has as many runs at once as its workers",
        ),
    ],
)
def test_options_that_exclude_each_other(tmp_path: Path, words: list[str], problem: str) -> None:
    refused = invoke("sweep", sweep_file(tmp_path), *words)
    assert refused.exit_code == 2 and problem in " ".join(refused.stderr.replace("│", " ").split())


@pytest.mark.slow
def test_labs_on_this_machine_are_runs_of_a_sweep(tmp_path: Path) -> None:
    file = sweep_file(tmp_path, {"experiment": {"rounds": 2}})
    words = ["--only", "method=FedAvg", "--seeds", "1", "--runs", tmp_path, "--format", "json"]
    done = fedstrata("sweep", file, *words, null=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["finished"] == 1
    assert [Run(path).direct for path in folders(tmp_path / "two")] == [False]


@pytest.mark.parametrize(("each", "jobs"), [(1, 8), (200, 4), (500, 1), (2000, 1)])
def test_as_many_at_once_as_memory_permits(each: int, jobs: int) -> None:
    assert fitting(8, 1000.0, each) == jobs


class ScriptedExecutor:
    """Does one run after another, in the thread that waits for it, which fail as given by their
    labels.
    """

    def __init__(self, failures: Mapping[str, Exception]) -> None:
        self.ran: list[str] = []
        self._failures = failures
        self._thread = ThreadPoolExecutor(1)

    def submit(self, job: MissingRun, watch: Watch) -> Future[bytes]:
        def run() -> bytes:
            self.ran.append(job.label)
            watch(job, {"event": "started"})
            if job.label in self._failures:
                raise self._failures[job.label]
            time.sleep(0.05)  # the next one is cancelled meanwhile
            return b""

        return self._thread.submit(run)

    def close(self) -> None:
        self._thread.shutdown()


@pytest.mark.parametrize(
    "error",
    [
        CellFailed("no broker", 3),
        StorageFailed("file", "x", "full", "Make room."),
        CancelledError(),  # of a cluster that is lost
    ],
)
def test_an_error_of_the_broker_the_disk_or_the_cluster_ends_the_sweep(
    tmp_path: Path, error: Exception
) -> None:
    grid = load(sweep_file(tmp_path))
    jobs = [MissingRun(f"run {i}", one, None) for i, one in enumerate(grid.experiments.values())]
    failures = {"run 0": CellFailed("no model", 1), "run 1": error}
    executor, progress = ScriptedExecutor(failures), SweepProgress(4, {}, jobs=1)
    with progress.shown(jobs), pytest.raises(FedstrataError) as caught:
        run_jobs(jobs, executor, progress)
    known = str(error) or "the cluster was lost. Repeat the command to go on."
    assert str(caught.value) == known and caught.value.exit_code in (3, 6)
    assert progress.failed == {"run 0": "no model", "run 1": known} and "run 3" not in executor.ran


def test_what_a_worker_of_a_cluster_raises_fails_its_run_alone(tmp_path: Path) -> None:
    grid = load(sweep_file(tmp_path))
    jobs = [MissingRun(f"run {i}", one, None) for i, one in enumerate(grid.experiments.values())]
    executor, progress = (
        ScriptedExecutor({"run 1": ModuleNotFoundError("no fedstrata")}),
        SweepProgress(4, {}, jobs=1),
    )
    taken: list[bytes] = []
    with progress.shown(jobs):
        run_jobs(jobs, executor, progress, take=taken.append)
    assert progress.failed == {"run 1": "ModuleNotFoundError: no fedstrata"} and taken == [b""] * 3


def test_the_time_left_is_that_of_runs_of_the_same_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("fedstrata.deploy.sweeps.running.time.monotonic", lambda: now)
    grid = load(sweep_file(tmp_path))
    jobs = [
        MissingRun(label, grid.experiments[digest], None) for digest, label in grid.labels().items()
    ]
    by_label = {job.label: job for job in jobs}
    progress = SweepProgress(4, {}, jobs=1)
    with progress.shown(jobs):
        assert progress.left_s() is None
        for label, seconds in (("FedAvg, seed 1", 10.0), ("FedCross, seed 1", 30.0)):
            progress.take(by_label[label], {"event": "started"})
            now += seconds
            progress.finish(by_label[label])
        assert progress.left_s() == pytest.approx(10 + 30)
        progress.take(by_label["FedCross, seed 2"], {"event": "started"})
        progress.take(by_label["FedCross, seed 2"], {"event": "global_round", "global_round": 3})
        assert progress.left_s() == pytest.approx(10 + 15)  # half of its rounds are done
        assert "2/4 runs, about 25 s left  FedCross, seed 2 3/6" in progress.picture().plain


def test_what_a_lab_waits_for_is_written_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (first, *_) = load(sweep_file(tmp_path)).experiments.values()
    run, progress = MissingRun("FedAvg, seed 1", first, None), SweepProgress(4, {}, jobs=1)
    with progress.shown([run]):
        progress.take(run, {"event": "started"})
        for reason in ("device-0", "device-0", "device-1"):
            progress.take(run, {"event": "waiting", "for": reason})
            progress.remind()
        progress.take(run, {"event": "waiting", "for": "device-2"})
        progress.take(run, {"event": "global_round", "global_round": 1})  # it waits no more
        progress.remind()
    assert capsys.readouterr().err.splitlines() == [
        "FedAvg, seed 1 waits for device-0", "FedAvg, seed 1 waits for device-1"
    ]  # fmt: skip


@pytest.fixture(scope="module")
def monday(tmp_path_factory: pytest.TempPathFactory, here: None) -> Path:
    """Return a folder with the file of a sweep, the runs of one of its two cells, and what is kept
    of them.
    """
    home = tmp_path_factory.mktemp("monday")
    words = ["--only", "method=FedAvg", "--runs", home / "monday", "--kept", home / "kept"]
    one = invoke("sweep", sweep_file(home, {"seeds": 1}), "--direct", "--jobs", "1", *words)
    assert one.exit_code == 0, one.stderr
    return home


def test_kept_runs_are_finished_runs_on_another_day_and_machine(
    monday: Path, tmp_path: Path
) -> None:
    shutil.copytree(monday, tmp_path, dirs_exist_ok=True)
    file, kept = tmp_path / "two.toml", tmp_path / "kept"
    words = ["sweep", file, "--direct", "--jobs", "1", "--kept", kept, "--format", "csv"]
    (original,) = folders(tmp_path / "monday" / "two")
    assert {each.name for each in (kept / "two").iterdir()} == {"sweep.json", "rounds.csv"}
    assert sum(each.stat().st_size for each in (kept / "two").iterdir()) < 5_000
    (path,) = folders(kept / "two")
    assert path == kept / "two" / Run(original).id and not path.exists()
    both = invoke(*words, "--runs", tmp_path / "tuesday")
    assert both.exit_code == 0 and "1 of 2 runs are finished" in both.stderr
    (other,) = map(Run, folders(tmp_path / "tuesday" / "two"))
    assert other.experiment.tiers[0].aggregation.name == "fedcross"
    # each run anew
    alone = invoke(*words[:-4], "--format", "csv", "--runs", tmp_path / "wednesday")
    assert alone.exit_code == 0 and alone.stdout == both.stdout
    shown = invoke(
        "sweep", file, "--table", "--runs", tmp_path / "nowhere", "--kept", kept, "--format", "csv"
    )
    assert shown.stdout == both.stdout
    run, whole = Run(path), Run(original)
    assert (
        run.experiment == whole.experiment and run.cell == "FedAvg" and run.state is State.FINISHED
    )
    nodes = {"epochs": {}, "omega": {}, "spread": {}}  # columns of single nodes are not kept
    assert list(run.rounds) == [replace(row, **nodes) for row in whole.rounds]
    assert run.manifest["model"] and run.manifest["cpu_s"] > 0 and "host" not in run.manifest
    refused = invoke("sweep", file, "--simulate", "--runs", tmp_path / "thursday", "--kept", kept)
    assert refused.exit_code == 4 and "had no network" in refused.stderr


def test_a_kept_run_is_found_by_its_experiment_as_it_is_read_today(
    monday: Path, tmp_path: Path
) -> None:
    shutil.copytree(monday / "kept", tmp_path / "kept")
    file, kept = monday / "two.toml", tmp_path / "kept"
    file_of_kept = kept / "two" / "sweep.json"
    tree = json.loads(file_of_kept.read_text())
    tree["shared"]["experiment_digest"] = "0" * 16  # of another release
    file_of_kept.write_text(json.dumps(tree))
    table = ["sweep", file, "--table", "--runs", tmp_path / "nowhere", "--kept", kept]
    assert "partial: 1 of 2" in invoke(*table).stdout
    tree["shared"]["experiment"]["lost"] = {"key": 1}
    file_of_kept.write_text(json.dumps(tree))
    lost = invoke(*table)
    assert lost.exit_code == 4 and "experiment.toml" in lost.stderr and "lost" in lost.stderr
    del tree["shared"]
    file_of_kept.write_text(json.dumps(tree))
    damaged = invoke(*table)
    assert damaged.exit_code == 4 and "no table of kept runs: KeyError('shared')" in damaged.stderr


@pytest.mark.usefixtures("here")
def test_runs_of_another_place_are_added_to_the_table(monday: Path, tmp_path: Path) -> None:
    shutil.copytree(monday / "kept", tmp_path / "kept")
    kept = tmp_path / "kept" / "two"
    words = ["--runs", tmp_path / "runs", "--set", "rounds=1", "--only", "method=FedCross"]
    done = invoke("sweep", monday / "two.toml", "--direct", "--jobs", "1", *words)
    assert done.exit_code == 0, done.stderr
    before = {path.name: Run(path) for path in folders(kept)}
    earlier = {
        name: (run.experiment, run.manifest, list(run.rounds)) for name, run in before.items()
    }
    for _ in range(2):  # the second time nothing changes
        assert [run.cell for run in keep.add(tmp_path / "runs" / "two", kept)] == ["FedCross"]
        after = {path.name: Run(path) for path in folders(kept)}
        assert len(after) == 2
    for name, facts in earlier.items():
        run = after[name]
        assert (run.experiment, run.manifest, list(run.rounds)) == facts
    (other,) = after.keys() - before.keys()
    assert after[other].experiment.rounds == len(after[other].rounds) == 1
    assert [run.cell for run in map(Run, find_all([str(kept)], tmp_path)[0])] == [
        "FedAvg",
        "FedCross",
    ]
    report = invoke("report", kept / other)
    assert report.exit_code == 0 and report.stdout.strip() == str(
        kept / f"report-{after[other].ending}.html"
    )
    replay = invoke("replay", kept / other)
    assert replay.exit_code == 4 and "a kept run has no record" in replay.stderr
    deleted = invoke("runs", "delete", "--yes", kept / other)
    assert deleted.exit_code == 4 and "Edit the table" in deleted.stderr and len(folders(kept)) == 2


def test_kept_runs_are_the_same_in_whatever_order_they_are_added(tmp_path: Path) -> None:
    trees = [
        {},
        {"a": {}},
        {"a": {"b": 1, "c": {"d": [1]}}},
        {"a": {"b": 1, "c": {}}},
        {"a": 1, "e.f": 2},
    ]
    order = {"order": {"axes": {"x": ["1", "2"]}, "ranked": "x", "baseline": "1"}}
    runs = [
        KeptRun(
            {
                "run": f"r-{i}",
                "cell": str(1 + i % 2),
                "experiment": tree,
                "finished": {"event": "finished"},
            },
            [
                {
                    "run": f"r-{i}",
                    "cell": str(1 + i % 2),
                    "seed": "1",
                    "global_round": "1",
                    f"of_{i}": str(i),
                }
            ],
        )
        for i, tree in enumerate(trees)
    ]
    for way in (runs, runs[::-1]):
        folder = tmp_path / way[0].id
        for run in way:
            add([run], folder, order)
        table = KeptTable.read(folder)
        assert table is not None and list(table.runs) == ["r-0", "r-2", "r-4", "r-1", "r-3"]
        assert all(table.runs[run.id].facts == run.facts for run in runs)
        assert [run.files()["rounds.csv"].split()[1][-1] for run in table.runs.values()] == [
            "0",
            "2",
            "4",
            "1",
            "3",
        ]


@pytest.mark.usefixtures("here")
def test_cells_that_the_command_changed_are_not_compared_with_the_paper(tmp_path: Path) -> None:
    paper = {"cite": "They", "figures": [["FedAvg", "FedCross"], [90.0, 91.0]]}
    file = sweep_file(tmp_path, {"seeds": 1, "paper": paper})
    words = ["sweep", file, "--direct", "--jobs", "1", "--runs", tmp_path, "--set", "rounds=1"]
    line = "changed by --set: rounds=1"
    found = {
        form: invoke(*words, "--format", form).stdout for form in ("table", "latex", "json", "csv")
    }
    assert line in found["table"] and f"% {line}" in found["latex"]
    apart = "what --set has changed is another experiment: it is not compared with paper"
    assert apart in found["table"] and "90" not in found["table"]
    assert "Two rules (changed by --set)" in found["table"] and json.loads(found["json"])[
        "changed"
    ] == ["rounds=1"]
    assert {row.rpartition(",")[2] for row in found["csv"].splitlines()} == {"changed", "rounds=1"}
    assert "changed" not in invoke(*words[:-2], "--table").stdout


def test_a_lost_process_is_named_with_where_its_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (first, *_) = load(sweep_file(tmp_path)).experiments.values()
    run, progress = MissingRun("FedAvg, seed 1", first, None), SweepProgress(4, {}, jobs=1)
    with progress.shown([run]):
        for facts in (
            {"event": "started"},
            {"event": "run", "done": 0},
            {"event": "global_round", "global_round": 4},
        ):
            progress.take(run, facts)
        progress.take(run, {"event": "run", "done": 4})  # of another process of this host
        progress.take(run, {"event": "started"})  # on another host
        progress.take(run, {"event": "run", "done": 0})
        progress.finish(run)
        progress.take(run, {"event": "global_round", "global_round": 5})  # it was late
    assert capsys.readouterr().err.splitlines()[:-1] == [
        "FedAvg, seed 1: its process was lost; resumed behind global round 4",
        "FedAvg, seed 1: its process was lost; run again from its start",
    ]


DYING: Final = """
import os, signal
from pathlib import Path
from fedstrata.common.processes.subprocess_channel import AgentChannel

channel = AgentChannel()
while True:
    request = channel.receive()
    Path("requests").open("a").write(f"{request.get('resume', 'new')}\\n")
    channel.send(event="run", done=0, folder="begun")
    if len(Path("requests").read_text().split()) == DIES_AT:
        HOW
    channel.send(ended=True)
"""


@pytest.mark.parametrize(
    ("how", "requests"),
    [
        # the first run is resumed
        ("os.kill(os.getpid(), signal.SIGKILL)", ["new", "begun", "new"]),
        ("raise SystemExit(7)", ["new", "new"]),  # it fails; the next one has a new process
    ],
)
def test_a_worker_that_ends_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, requests: list[str]
) -> None:
    (tmp_path / "dying.py").write_text(DYING.replace("DIES_AT", "1").replace("HOW", how))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join((str(Path(__file__).parents[1]), str(tmp_path)))
    )
    monkeypatch.setattr(execution, "WORKER", "dying")
    worker = WorkerProcess()
    order, reported = RunOrder("{}", ["run", "--direct"], tmp_path), list[Mapping[str, Any]]()

    def run() -> None:
        worker.run(order, tmp_path, None, report=reported.append, stopped=lambda: False)

    with pytest.raises(RunFailed, match="code 7") if "7" in how else nullcontext():
        run()
    run()
    worker.close()
    assert (tmp_path / "requests").read_text().split() == requests and len(reported) == len(
        requests
    )


COMMAND: Final = """
import json, os, signal, sys
from pathlib import Path

begun = Path("begun")
print(json.dumps({"event": "run", "done": 3 * begun.exists(), "folder": "begun"}), flush=True)
if not begun.exists():
    begun.touch()
    os.kill(os.getpid(), signal.SIGKILL)
assert sys.argv[1:3] == ["run", "--simulate"] and sys.argv[-2:] == ["--resume", "begun"], sys.argv
assert Path(sys.argv[sys.argv.index("--speeds") + 1]).read_text() == "speeds"
print("{", end="")
"""


def test_a_command_that_a_signal_ends_resumes_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(COMMAND)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(execution, "ROLE", (sys.executable, "own.py"))
    order = RunOrder(parse({}).to_json(), ["run", "--simulate"], tmp_path, speeds="speeds")
    reported = list[Mapping[str, Any]]()
    RunCommand().run(order, tmp_path, None, report=reported.append, stopped=lambda: False)
    assert [facts["done"] for facts in reported] == [0, 3]
    (tmp_path / "own.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(CellFailed, match="was killed by SIGKILL, and so were 3 replacements"):
        RunCommand().run(order, tmp_path, None, report=reported.append, stopped=lambda: False)


def test_a_folder_is_packed_whole_or_finished_and_replaces_its_former_self(tmp_path: Path) -> None:
    files = ("manifest.json", "rounds.csv", "checkpoints/7.bin", "spool/cloud/a")
    for name in files:
        (tmp_path / "there" / "run-1" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "there" / "run-1" / name).write_text(name)
    here = tmp_path / "here"
    here.mkdir()
    for finished, count in ((False, 4), (True, 2)):
        folder = unpack(packed(tmp_path / "there" / "run-1", finished=finished), here)
        found = [
            path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
        ]
        assert (
            folder == here / "run-1"
            and sorted(found) == sorted(files[:count])
            and list(here.iterdir()) == [folder]
        )
