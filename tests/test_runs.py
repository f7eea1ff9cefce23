"""A run's folder, read: whole, under way, cut, damaged; and the commands that list and show runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fedstrata.cloud.run_folder import RunFolder, held
from fedstrata.common.errors import InvalidExperiment
from fedstrata.deploy.console.tabular import age
from fedstrata.deploy.results.run import Run, State, find, find_all, folders
from tests.helpers.commands import invoke

MakeRun = Callable[..., Path]


def test_states(tmp_path: Path, make_run: MakeRun) -> None:
    assert Run(make_run(tmp_path, {}, last="finished")).state == State.FINISHED
    assert Run(make_run(tmp_path, {}, last="failed")).state == State.FAILED
    killed = make_run(tmp_path, {}, last="")
    assert Run(killed).state == State.INTERRUPTED
    folder = RunFolder.reopen(killed)
    assert held(killed) and Run(killed).state == State.RUNNING
    folder.release()
    assert not held(killed) and Run(killed).state == State.INTERRUPTED
    failed = make_run(tmp_path, {}, last="failed")
    folder = RunFolder.reopen(failed)
    assert Run(failed).state == State.RUNNING  # it waits for its nodes
    folder.event("run", {})
    folder.release()
    assert Run(failed).state == State.INTERRUPTED


def test_a_table_cut_anywhere_has_whole_rows(tmp_path: Path, make_run: MakeRun) -> None:
    path = make_run(tmp_path, {}, accuracies=(0.5, None))
    file = path / "rounds.csv"
    whole, text = Run(path).rounds, file.read_bytes()
    for end in range(len(text)):
        file.write_bytes(text[:end])
        assert Run(path).rounds == whole[: max(0, text[:end].count(b"\n") - 1)]


def test_a_resumed_run_forgets_a_row_that_was_cut(tmp_path: Path, make_run: MakeRun) -> None:
    path = make_run(tmp_path, {}, last="")
    whole = (path / "rounds.csv").read_bytes()
    (path / "rounds.csv").write_bytes(whole + b"1")  # of global round 10 or more
    assert [row.global_round for row in RunFolder.reopen(path).forget_after(3)] == [1, 2, 3]
    assert (path / "rounds.csv").read_bytes() == whole


def test_events_that_were_cut_are_left_out_also_in_the_middle(
    tmp_path: Path, make_run: MakeRun
) -> None:
    path = make_run(tmp_path, {}, last="")
    with (path / "events.jsonl").open("a") as file:
        file.write('{"time": "t", "event": "chi')  # killed here, resumed there
        file.write(
            '{"time": "t", "event": "run"}\n[1]\n{"event": "run"}\n{"time": "t", "event": '
            '"warning"}\n{"ti'
        )
    assert [event.name for event in Run(path).events] == ["run", "warning"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("rounds.csv", "global_round\n1\n2\n", "line 1: there is no column elapsed_s"),
        ("rounds.csv", "{garbage\n", "line 1: there is no column global_round"),
        ("rounds.csv", "\0garbage", "line 1: there is no column global_round"),
        ("rounds.csv", None, "line 2: .*'one'"),
        ("links.csv", "from,to\nwan,cloud\n", "line 1: there is no column tier"),
        ("manifest.json", "[]", "not an object"),
        ("manifest.json", "{", "manifest.json"),
        ("experiment.toml", "= 3", "experiment.toml"),
        ("partition.json", '{"devices": {"d": {}}}', "partition.json"),
        ("partition.json", '{"devices": {"d": {"by_class": [1]}}}', "parent"),
        ("experiment.toml", "rounds = 0", "rounds = 0"),
    ],
)
def test_what_is_damaged_is_named(
    tmp_path: Path, make_run: MakeRun, name: str, text: str | None, words: str
) -> None:
    path = make_run(tmp_path, {})
    (path / name).write_text(text or (path / name).read_text().replace("\n1,", "\none,", 1))
    done = invoke("report", path)
    assert done.exit_code == 4 and name in done.stderr and not (path / "report.html").exists()
    assert re.search(words, done.stderr)


def test_a_run_is_found_by_its_folder_or_the_beginning_of_its_id(
    tmp_path: Path, make_run: MakeRun
) -> None:
    paths = [make_run(tmp_path, {"name": name}) for name in ("a", "b-c")]
    for path in paths:
        run = Run(path)
        for text in (str(path), path.name, run.id, run.id.rpartition("-")[2]):
            assert find(text, tmp_path) == path
    with pytest.raises(InvalidExperiment, match="2 runs match"):
        find(paths[0].name[:6], tmp_path)
    for text, root in (("", tmp_path), ("nothing", tmp_path), ("nothing", tmp_path / "absent")):
        with pytest.raises(InvalidExperiment, match="not a run's folder"):
            find(text, root)
    with pytest.raises(InvalidExperiment, match="--runs"):
        folders(tmp_path / "absent")


def test_a_folder_of_runs_names_its_runs_and_other_files_are_skipped(
    tmp_path: Path, make_run: MakeRun
) -> None:
    root, sweep = tmp_path / "runs", tmp_path / "runs" / "study"
    alone = make_run(root, {"name": "alone"})
    paths = [make_run(sweep, {"name": "study", "seed": seed}) for seed in (1, 2)]
    for name in ("sweep.lock", "sweep.json.partial", "report.html"):
        (sweep / name).touch()
    (sweep / "figures").mkdir()
    others = ["figures", "report.html", "sweep.json.partial", "sweep.lock"]
    assert folders(root) == sorted([alone, *paths], key=lambda path: path.name)
    for path in paths:  # a sweep's runs have ids like all others
        assert find(path.name[-6:], root) == path
    everything = sorted(map(str, sweep.iterdir()))
    assert find_all(everything, root) == (sorted(paths), [str(sweep / name) for name in others])
    for texts in (
        [str(sweep)],
        ["study"],
        [paths[0].name[-6:], str(sweep)],
        [*map(str, paths), str(paths[0])],
    ):
        found, skipped = find_all(texts, root)
        assert sorted(found) == sorted(paths) and not skipped
    assert sorted(find_all([str(root)], root)[0]) == sorted([alone, *paths])
    with pytest.raises(InvalidExperiment, match="no run in it"):
        find_all([str(sweep / "figures"), str(sweep / "sweep.lock")], root)
    with pytest.raises(InvalidExperiment, match="not a run's folder"):
        find_all([str(paths[0]), str(sweep / "absent")], root)


@pytest.mark.usefixtures("undrawn")
def test_each_command_on_runs_takes_what_a_shell_makes_of_a_sweeps_folder(
    tmp_path: Path, make_run: MakeRun
) -> None:
    sweep = tmp_path / "study"
    paths = [make_run(sweep, {"name": "study", "seed": seed}) for seed in (1, 2)]
    (sweep / "sweep.lock").touch()
    for _ in range(2):  # the second time beside the report of the first
        done = invoke("report", *sorted(sweep.iterdir()))
        skipped = done.stderr.replace(f"{done.stdout.strip()}, ", "")
        assert done.exit_code == 0 and f"skipped, no runs: {sweep / 'sweep.lock'}" in skipped
    reached = json.loads(
        invoke("compare", *sorted(sweep.iterdir()), "--target", "0.7", "--format", "json").stdout
    )
    assert [group["reached"] for group in reached["groups"]] == [2]
    listed = invoke("runs", "list", "--runs", tmp_path, "--format", "json").stdout.splitlines()
    assert {json.loads(line)["folder"] for line in listed} == set(map(str, paths))
    asked = invoke("runs", "delete", sweep, answers="n\n")
    assert (
        asked.exit_code == 1
        and "Delete 2 runs?" in asked.output
        and all(path.exists() for path in paths)
    )


def test_the_age_of_a_run(tmp_path: Path, make_run: MakeRun) -> None:
    run = Run(make_run(tmp_path, {"name": "old"}))
    run.started = "20261120T120000Z"
    at = datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp()
    ages = {
        0: "0 s",
        59: "59 s",
        60: "1 min",
        7199: "1 h",
        86_400: "1 d",
        86_400 * 400: "400 d",
        -5: "0 s",
    }
    assert {passed: age(run.age_s(at + passed) or 0.0) for passed in ages} == ages
    run.started = "long ago"
    assert run.age_s(at) is None


def test_runs_are_deleted_after_a_question(tmp_path: Path, make_run: MakeRun) -> None:
    paths = [make_run(tmp_path, {"name": name}) for name in ("first", "second")]
    asked = invoke("runs", "delete", paths[0], answers="n\n")
    assert asked.exit_code == 1 and "Delete 1 run?" in asked.output and paths[0].exists()
    assert invoke("runs", "delete", paths[0], answers="y\n").exit_code == 0
    assert not paths[0].exists() and paths[1].exists()
    assert invoke("runs", "delete", paths[0], "--yes").exit_code == 4, "no such run any more"
    folder = RunFolder.reopen(paths[1])  # as the cloud does
    running = invoke("runs", "delete", paths[1], "--yes")
    folder.release()
    assert (
        running.exit_code == 4
        and "still running. Stop it first." in running.output
        and paths[1].exists()
    )


def test_a_damaged_run_is_reported_and_the_others_are_listed(
    tmp_path: Path, make_run: MakeRun
) -> None:
    bad, good = (make_run(tmp_path, {"name": name}) for name in ("bad", "good"))
    (bad / "manifest.json").write_text("{")
    done = invoke("runs", "list", "--runs", tmp_path)
    assert (
        done.exit_code == 0
        and "good" in done.stdout
        and str(bad) in done.stderr
        and good.name[:8] in done.stdout
    )


@pytest.mark.parametrize("number", [None, 0, 2])
def test_a_folder_of_another_format_is_refused(
    tmp_path: Path, make_run: MakeRun, number: int | None
) -> None:
    path = make_run(tmp_path, {}, last="")
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": number}))
    text = (
        f"{str(path)!r}: a run's folder of format {number}, this release has 1. Use the "
        "release that wrote it."
    )
    for command in (["report"], ["compare", "--target", "0.7"], ["replay"]):
        result = invoke(*command, path)
        assert result.exit_code == 4 and result.output.strip() == f"fedstrata: RUN = {text}"
    with pytest.raises(InvalidExperiment) as raised:
        RunFolder.reopen(path)
    assert str(raised.value) == f"--resume = {text}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "No such file or directory"),
        ("a =", "not TOML: "),
        ("rounds = -1", "rounds = -1: too small. Write 1"),
    ],
)
def test_an_experiment_that_cannot_be_read_is_named_with_its_file(
    tmp_path: Path, make_run: MakeRun, text: str | None, problem: str
) -> None:
    file = make_run(tmp_path, {}) / "experiment.toml"
    file.unlink()
    if text is not None:
        file.write_text(text)
    done = invoke("report", file.parent)
    assert done.exit_code == 4 and f"RUN = {str(file)!r}: {problem}" in done.stderr
