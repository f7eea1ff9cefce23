"""`fedstrata sweep`: what it runs and does not run again, one or several at once, killed or not."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import pytest

from common.errors import FedstrataError, StorageFailed
from common.experiment.reading import parse
from common.experiment.tables import write
from deploy.results.run import Run, State, folders
from deploy.sweeps import running
from deploy.sweeps.folder import MissingRun, SweepFolder
from deploy.sweeps.grid import load, merged
from deploy.sweeps.running import CellFailed, DirectSlot, SweepProgress, Watch, fitting, run_jobs
from tests.helpers.commands import command, fedstrata, invoke, tensors
from tests.helpers.direct import HereSlot

TREE: Final[Mapping[str, Any]] = {
    "title": "Two rules",
    "seeds": 2,
    "columns": ["method"],
    "measure": [{"name": "accuracy", "last": 2}],
    "experiment": {
        "rounds": 6,
        "topology": {"institutions": 0, "devices": 3},
        "data": {"dataset": "synthetic", "samples": 60, "test_samples": 40, "classes": 3, "image_shape": [1, 8, 8]},
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
    """Run cells in the test's process; the worker processes of sweeps that are killed, and of slow tests, stay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deploy.sweeps.running.DirectSlot", HereSlot)
        patch.setattr("deploy.local.direct.interruptible", nullcontext)  # only the main thread is
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
        done = invoke("sweep", file, "--direct", "--jobs", str(jobs), "--runs", runs, "--format", "csv")
        assert done.exit_code == 0, done.stderr
        found[jobs] = done.stdout, models(runs / "two")
        assert len(found[jobs][1]) == 4
    assert found[1] == found[2]
    before = {path: os.stat(path / "rounds.csv").st_mtime_ns for path in folders(runs / "two")}
    again = invoke("sweep", file, "--direct", "--runs", runs, "--format", "csv")
    assert again.stdout == done.stdout and "4 of 4 runs are finished" in again.stderr
    assert before == {path: os.stat(path / "rounds.csv").st_mtime_ns for path in folders(runs / "two")}
    alone = invoke("run", folders(runs / "two")[0] / "experiment.toml", "--direct", "--runs", tmp_path)
    assert alone.exit_code == 0  # an ordinary run has the same model
    (other,) = models(tmp_path).items()
    assert other in found[1][1].items()
    refused = invoke("sweep", file, "--runs", runs, "--set", "rounds=6")
    assert refused.exit_code == 4 and "had no network. Add --direct, or name another folder." in refused.stderr


@pytest.mark.usefixtures("here")
def test_a_killed_sweep_goes_on_and_ends_with_the_same_table(tmp_path: Path) -> None:
    file = sweep_file(tmp_path, {"axes": {"method": {"FedCross": {"rounds": 15}}}})
    words = ["sweep", file, "--direct", "--format", "csv"]
    killed = command(*words, "--jobs", "2", "--runs", tmp_path / "killed")
    process = subprocess.Popen(killed, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process, process.stderr as lines:
        assert any(line.startswith("1/4: ") for line in lines)  # the short one; the long one still runs
        os.kill(process.pid, signal.SIGKILL)
        assert "Traceback" not in lines.read()  # to its end, which is that of the workers: they have it, too
    grid, folder = load(file), SweepFolder(tmp_path / "killed" / "two")
    assert 0 < len(folder.finished(grid)) < 4
    partial = invoke("sweep", file, "--table", "--runs", tmp_path / "killed")
    assert partial.exit_code == 0 and "partial: " in partial.stdout
    went_on = invoke(*words, "--jobs", "1", "--runs", tmp_path / "killed")
    assert went_on.exit_code == 0, went_on.stderr
    undisturbed = invoke(*words, "--jobs", "1", "--runs", tmp_path / "undisturbed")
    assert went_on.stdout == undisturbed.stdout
    assert models(folder.path) == models(tmp_path / "undisturbed" / "two")
    assert [Run(path).state for path in folders(folder.path)] == [State.FINISHED] * 4  # none was begun twice


@pytest.mark.usefixtures("here")
def test_runs_that_fail_or_lack_their_data_are_reported_and_tried_again_and_the_others_go_on(tmp_path: Path) -> None:
    cifar = {"data": {"dataset": "cifar10", "root": str(tmp_path)}, "model": {"name": "lenet_cifar"}}
    digits = {"data": {"dataset": "digits"}, "model": {"name": "mlp_digits"}}
    axes = {"data": {"C": cifar, "D": digits, "N": digits | {"model": {"name": "nowhere:build"}}}}
    file = tmp_path / "two.toml"
    file.write_text(write({"title": "Data", "seeds": 2, "experiment": {"rounds": 1}, "axes": axes}))
    words = ["sweep", file, "--direct", "--jobs", "1", "--runs", tmp_path]
    refused = invoke(*words, "--only", "data=C")
    assert refused.exit_code == 4, refused.stderr
    _, line = refused.stderr.splitlines()
    assert line.startswith("fedstrata: data.root = ") and "data_batch_1" in line and not folders(tmp_path / "two")
    for done in ("0 of 6", "2 of 6"):
        found = invoke(*words)
        assert found.exit_code == 1
        first, left_out, *_, last, missing = found.stderr.strip().splitlines()
        assert f"{done} runs are finished" in first
        assert left_out.startswith("left out: 2 runs: data.root = ")
        assert missing.startswith("failed: C, seed 1 and 1 more: data.root = ")
        assert found.stderr.count("data_batch_1") == 2, "once before anything runs, and once at the end"
        assert "partial: 2 of 6 runs are finished; 2 of 3 cells lack some" in found.stdout
        assert last.startswith("failed: N, seed 1 and 1 more: model.name = 'nowhere:build': "), found.stderr
    assert sorted(Run(path).cell for path in folders(tmp_path / "two")) == ["D", "D", "N", "N"]


def test_two_sweeps_cannot_share_a_folder(tmp_path: Path) -> None:
    file = sweep_file(tmp_path)
    with SweepFolder(tmp_path / "two").held():
        refused = invoke("sweep", file, "--direct", "--runs", tmp_path)
    assert refused.exit_code == 4
    (line,) = refused.stderr.strip().splitlines()
    assert line.endswith("another sweep uses this folder. Wait for its end, or name another folder.")


def test_the_runs_are_listed_without_being_run(tmp_path: Path) -> None:
    file = sweep_file(tmp_path)
    listed = invoke("sweep", file, "--dry-run", "--only", "method=FedCross", "--seeds", "3", "--runs", tmp_path)
    *rows, last = listed.stdout.splitlines()[1:]
    digests = [one.digest for one in load(file, only=["method=FedCross"], seeds=3).experiments.values()]
    assert [row.split() for row in rows] == [["FedCross", str(s), "6", d, "missing"] for s, d in enumerate(digests, 1)]
    assert last == "1 cells, 3 runs, 18 global rounds; 3 runs missing"
    facts = [json.loads(line) for line in invoke("sweep", file, "--dry-run", "--format", "json").stdout.splitlines()]
    assert [fact["cell"] for fact in facts] == [{"method": "FedAvg"}] * 2 + [{"method": "FedCross"}] * 2
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("form", ["table", "csv", "latex", "markdown", "json"])
def test_each_form_of_a_table_is_there_before_anything_ran(tmp_path: Path, form: str) -> None:
    found = invoke("sweep", sweep_file(tmp_path), "--table", "--runs", tmp_path, "--format", form)
    assert found.exit_code == 0 and "FedCross" in found.stdout
    if form == "json":
        assert [cell["measures"]["accuracy"]["mean"] for cell in json.loads(found.stdout)["cells"]] == [None, None]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--direct", "--broker", "localhost"], "--direct uses no network"),
        (["--accelerator", "cpu"], "valid only with --direct"),
        (["--lab", "rack", "--jobs", "2"], "a lab has one run at a time"),
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


class ScriptedSlot:
    """A slot whose runs fail as given, by their label."""

    def __init__(self, failures: Mapping[str, FedstrataError]) -> None:
        self.ran: list[str] = []
        self._failures = failures

    async def run(self, job: MissingRun, watch: Watch) -> None:
        self.ran.append(job.label)
        await asyncio.sleep(0)
        watch("global_round", {"global_round": 1})
        if job.label in self._failures:
            raise self._failures[job.label]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("error", [CellFailed("no broker", 3), StorageFailed("file", "x", "full", "Make room.")])
def test_an_error_of_the_broker_or_the_disk_ends_the_sweep(tmp_path: Path, error: CellFailed | StorageFailed) -> None:
    grid = load(sweep_file(tmp_path))
    jobs = [MissingRun(f"run {i}", one, None) for i, one in enumerate(grid.experiments.values())]
    slot, progress = ScriptedSlot({"run 0": CellFailed("no model", 1), "run 1": error}), SweepProgress(4, {}, jobs=1)
    with progress.shown(jobs), pytest.raises(type(error), match=str(error).split(":")[0]):
        asyncio.run(run_jobs(jobs, [slot], progress))
    assert slot.ran == ["run 0", "run 1"] and progress.failed == {"run 0": "no model", "run 1": str(error)}


def test_the_time_left_is_that_of_runs_of_the_same_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("deploy.sweeps.running.time.monotonic", lambda: now)
    grid = load(sweep_file(tmp_path))
    jobs = [MissingRun(label, grid.experiments[digest], None) for digest, label in grid.labels().items()]
    by_label = {job.label: job for job in jobs}
    progress = SweepProgress(4, {}, jobs=1)
    with progress.shown(jobs):
        assert progress.left_s() is None
        for label, seconds in (("FedAvg, seed 1", 10.0), ("FedCross, seed 1", 30.0)):
            progress.begin(by_label[label])
            now += seconds
            progress.finish(by_label[label])
        assert progress.left_s() == pytest.approx(10 + 30)
        progress.begin(by_label["FedCross, seed 2"])
        progress.take(by_label["FedCross, seed 2"], "global_round", {"global_round": 3})
        assert progress.left_s() == pytest.approx(10 + 15)  # half of its rounds are done
        assert "2/4 runs, about 25 s left  FedCross, seed 2 3/6" in progress.picture().plain


def test_what_a_lab_waits_for_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (first, *_) = load(sweep_file(tmp_path)).experiments.values()
    run, progress = MissingRun("FedAvg, seed 1", first, None), SweepProgress(4, {}, jobs=1)
    with progress.shown([run]):
        progress.begin(run)
        for reason in ("device-0", "device-0", "device-1"):
            progress.take(run, "waiting", {"for": reason})
            progress.remind()
        progress.take(run, "waiting", {"for": "device-2"})
        progress.take(run, "global_round", {"global_round": 1})  # it waits no more
        progress.remind()
    assert capsys.readouterr().err.splitlines() == [
        "FedAvg, seed 1 waits for device-0", "FedAvg, seed 1 waits for device-1"
    ]  # fmt: skip


@pytest.fixture(scope="module")
def monday(tmp_path_factory: pytest.TempPathFactory, here: None) -> Path:
    """Return a folder with the file of a sweep, the runs of one of its two cells, and what is kept of them."""
    home = tmp_path_factory.mktemp("monday")
    words = ["--only", "method=FedAvg", "--runs", home / "monday", "--kept", home / "kept"]
    one = invoke("sweep", sweep_file(home, {"seeds": 1}), "--direct", "--jobs", "1", *words)
    assert one.exit_code == 0, one.stderr
    return home


def test_kept_runs_are_finished_runs_on_another_day_and_machine(monday: Path, tmp_path: Path) -> None:
    shutil.copytree(monday, tmp_path, dirs_exist_ok=True)
    file, kept = tmp_path / "two.toml", tmp_path / "kept"
    words = ["sweep", file, "--direct", "--jobs", "1", "--kept", kept, "--format", "csv"]
    (original,) = folders(tmp_path / "monday" / "two")
    (path,) = folders(kept / "two")
    assert path.name.startswith("fedavg-seed-1-")
    assert {each.name for each in path.iterdir()} == {"experiment.toml", "rounds.csv", "events.jsonl", "manifest.json"}
    assert sum(each.stat().st_size for each in path.iterdir()) < 10_000
    both = invoke(*words, "--runs", tmp_path / "tuesday")
    assert both.exit_code == 0 and "1 of 2 runs are finished" in both.stderr
    (other,) = map(Run, folders(tmp_path / "tuesday" / "two"))
    assert other.experiment.tiers[0].aggregation.name == "fedcross"
    alone = invoke(*words[:-4], "--format", "csv", "--runs", tmp_path / "wednesday")  # each run anew
    assert alone.exit_code == 0 and alone.stdout == both.stdout
    shown = invoke("sweep", file, "--table", "--runs", tmp_path / "nowhere", "--kept", kept, "--format", "csv")
    assert shown.stdout == both.stdout
    run, whole = Run(path), Run(original)
    assert run.experiment == whole.experiment and run.cell == "FedAvg" and run.state is State.FINISHED
    assert [row.cells() for row in run.rounds] == [row.cells() for row in whole.rounds]
    assert run.manifest["model"] and run.manifest["cpu_s"] > 0 and "host" not in run.manifest
    refused = invoke("sweep", file, "--simulate", "--runs", tmp_path / "thursday", "--kept", kept)
    assert refused.exit_code == 4 and "had no network" in refused.stderr


def test_a_kept_run_is_found_by_its_experiment_as_it_is_read_today(monday: Path, tmp_path: Path) -> None:
    shutil.copytree(monday / "kept", tmp_path / "kept")
    file, kept = monday / "two.toml", tmp_path / "kept"
    (path,) = folders(kept / "two")
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"experiment_digest": "0" * 16}))  # of another release
    table = ["sweep", file, "--table", "--runs", tmp_path / "nowhere", "--kept", kept]
    assert "partial: 1 of 2" in invoke(*table).stdout
    (path / "experiment.toml").write_text((path / "experiment.toml").read_text() + "\n[lost]\nkey = 1\n")
    lost = invoke(*table)
    assert lost.exit_code == 4 and "experiment.toml" in lost.stderr and "lost" in lost.stderr


@pytest.mark.usefixtures("here")
def test_cells_that_the_command_changed_are_compared_with_the_papers_order_alone(tmp_path: Path) -> None:
    paper = {"cite": "They", "figures": [["FedAvg", "FedCross"], [90.0, 91.0]]}
    file = sweep_file(tmp_path, {"seeds": 1, "paper": paper})
    words = ["sweep", file, "--direct", "--jobs", "1", "--runs", tmp_path, "--set", "rounds=1"]
    line = "changed by --set: rounds=1"
    found = {form: invoke(*words, "--format", form).stdout for form in ("table", "markdown", "latex", "json", "csv")}
    assert line in found["table"] and line in found["markdown"] and f"% {line}" in found["latex"]
    order = "what --set has changed is another experiment: only its order is compared with paper, not its figures"
    assert order in found["table"] and "90" not in found["table"] and "the order of paper in one" in found["table"]
    assert "Two rules (changed by --set)" in found["table"] and json.loads(found["json"])["changed"] == ["rounds=1"]
    assert {row.rpartition(",")[2] for row in found["csv"].splitlines()} == {"changed", "rounds=1"}
    assert "changed" not in invoke(*words[:-2], "--table").stdout


DYING: Final = """
from pathlib import Path
from common.host.subprocess_channel import AgentChannel

channel = AgentChannel()
channel.receive()
if not Path("died").exists():
    Path("died").touch()
    raise SystemExit(7)
channel.send(ended=True)
"""


def test_a_worker_that_ends_fails_its_run_and_the_next_one_has_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(Path(__file__).parents[1]), str(tmp_path))))
    monkeypatch.setattr(running, "WORKER", "dying")

    async def play() -> None:
        slot, job = DirectSlot(tmp_path, "cpu"), MissingRun("first", parse({}), None)
        with pytest.raises(CellFailed, match="code 7"):
            await slot.run(job, lambda event, facts: None)
        await slot.run(job, lambda event, facts: None)
        slot.close()

    asyncio.run(play())
