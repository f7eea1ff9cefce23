"""Files of this machine: other users, torn checkpoints, a second cloud."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedstrata.cloud import checkpoint, run_folder
from fedstrata.cloud.checkpoint import RunState
from fedstrata.cloud.run_folder import RunFolder, held
from fedstrata.common.errors import InvalidExperiment, StorageFailed
from fedstrata.common.experiment.reading import parse
from fedstrata.common.host.files import replacing, writing
from fedstrata.common.learning import stored
from fedstrata.common.methods import aggregator
from fedstrata.common.methods.fedavg import FedAvg
from fedstrata.common.methods.rule import RuleContext
from fedstrata.common.model.layout import ModelLayout, Section
from fedstrata.common.storage.spool import Spool
from tests.helpers.commands import invoke
from tests.helpers.records import a_global_round
from tests.simulation.lab import ScenarioLab

NOBODY = 65_534
SMALL: Mapping[str, Any] = {
    "name": "files",
    "rounds": 3,
    "topology": {"institutions": 2, "devices": 4},
    "links": {"check": "off"},
    "transfer": {"idle_s": 30.0},
}
LAYOUT = ModelLayout.build([("weight", (100,), Section.PARAMETER), ("steps", (), Section.COUNTER)])

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may give folders away")


def rows_of_one(root: Path) -> Any:
    return Spool.open(root, run="r", node="n").rows("uploads", 1, 100)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def rule_of() -> Any:
    rows: Any = lambda name, count: np.empty((count, LAYOUT.row_bytes), np.uint8)  # noqa: E731
    return aggregator.build(
        FedAvg(), RuleContext(layout=LAYOUT, node="cloud", seed=1, measures=True, rows=rows)
    )


def save(folder: Path, global_round: int) -> Path:
    """Write a checkpoint whose model is full of its global round."""
    row = np.full(LAYOUT.row_bytes, global_round, np.uint8)
    state = RunState("run", "digest", global_round, 1.0, {})
    return checkpoint.save(folder, state, layout=LAYOUT, row=row, rule=rule_of())


def recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return the list to which each fsync, rename and removal will be added, with its path in the
    folder.
    """
    calls: list[tuple[str, str]] = []

    def noting(
        name: str, function: Callable[..., Any], path_of: Callable[..., str]
    ) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append((name, os.path.relpath(path_of(*arguments), folder)))
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(
        os, "fsync", noting("sync", os.fsync, lambda file: os.readlink(f"/proc/self/fd/{file}"))
    )
    monkeypatch.setattr(os, "replace", noting("name", os.replace, lambda source, target: target))
    monkeypatch.setattr(Path, "unlink", noting("remove", Path.unlink, lambda path: path))
    return calls


# Other users of the machine


def test_the_spool_is_its_users_alone(tmp_path: Path) -> None:
    rows_of_one(tmp_path / "spool").array[:] = 1
    folders = [tmp_path / "spool", tmp_path / "spool" / "r", tmp_path / "spool" / "r" / "n"]
    assert [mode(folder) for folder in folders] == [0o700] * 3
    assert mode(folders[-1] / "uploads") == 0o600


def test_a_symbolic_link_in_place_of_a_file_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("dear")
    Spool.open(tmp_path / "spool", run="r", node="n")
    (tmp_path / "spool" / "r" / "n" / "uploads").symlink_to(victim)
    rows_of_one(tmp_path / "spool").array[:] = 1  # in memory
    assert victim.read_text() == "dear" and "kept in memory" in caplog.text


@pytest.mark.parametrize("link", ["spool", "spool/r", "spool/r/n"])
def test_a_symbolic_link_in_place_of_a_folder_is_refused(link: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / link).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    (tmp_path / link).symlink_to(elsewhere)
    with pytest.raises(
        StorageFailed, match=r"--spool = .*: a symbolic link\. Name a folder of your own"
    ):
        rows_of_one(tmp_path / "spool")
    assert not list(elsewhere.iterdir())


@as_root
@pytest.mark.parametrize("theirs", ["spool", "spool/r", "spool/r/n"])
def test_a_folder_of_another_user_is_refused(theirs: str, tmp_path: Path) -> None:
    (tmp_path / theirs).mkdir(mode=0o700, parents=True)
    os.chown(tmp_path / theirs, NOBODY, NOBODY)
    problem = (
        rf"--spool = '{tmp_path / theirs}': it belongs to another user, uid {NOBODY}\. Name "
        r"a folder of your own"
    )
    with pytest.raises(StorageFailed, match=problem) as refused:
        rows_of_one(tmp_path / "spool")
    assert refused.value.exit_code == 6 and not list((tmp_path / theirs).iterdir())


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(
        StorageFailed, match=r"other users can write there, mode 1777\. Name a folder of your own"
    ):
        rows_of_one(tmp_path)


def test_the_cache_of_data_is_its_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stored.shared("d", lambda: stored.Stored({}, {}))
    assert mode(stored.folder()) == mode(stored.folder().parent) == 0o700
    assert {mode(path) for path in stored.folder().iterdir()} == {0o600}


@as_root
def test_a_cache_of_another_user_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stored.shared("d", lambda: stored.Stored({}, {"value": "theirs"}))
    os.chown(stored.folder(), NOBODY, NOBODY)
    assert stored.shared("d", lambda: stored.Stored({}, {"value": "mine"})).facts == {
        "value": "mine"
    }
    assert f"it belongs to another user, uid {NOBODY}" in caplog.text


def test_all_files_of_a_run_have_the_umasks_mode(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        folder = RunFolder.create(tmp_path, parse({}))
        folder.add_round(a_global_round(1, None))
        folder.event("run", {})
        folder.sync()
        save(folder.checkpoints, 1)
        checkpoint.save_model(
            folder.path / "model.safetensors", layout=LAYOUT, row=LAYOUT.empty(), facts={}
        )
    finally:
        os.umask(before)
    found = {path: mode(path) for path in folder.path.rglob("*")}
    assert {found[path] for path in found if path.is_dir()} == {0o750}
    assert {found[path] for path in found if path.is_file()} == {0o640}


# Power loss, and checkpoints that are torn


def test_a_checkpoint_is_on_the_disk_before_it_replaces_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unsynced writes may be lost, so content, then name, then the folder's names, and only then
    older ones go.
    """
    for number in (1, 2):
        save(tmp_path, number)
    calls = recorded(tmp_path, monkeypatch)
    save(tmp_path, 3)
    assert calls == [
        ("sync", "round-000003.partial/facts.json"),
        ("sync", "round-000003.partial"),
        ("name", "round-000003"),
        ("sync", "."),
        ("sync", "round-000003.safetensors.partial"),
        ("name", "round-000003.safetensors"),
        ("sync", "."),
        ("remove", "round-000001.safetensors"),
    ]


def test_the_rows_of_a_checkpoint_are_on_the_disk_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = ScenarioLab(parse(SMALL))
    calls = recorded(lab.agents.runs, monkeypatch)
    assert lab.run().ok
    made = [
        place
        for place, (name, path) in enumerate(calls)
        if name == "name" and path.endswith(".safetensors")
    ]
    assert len(made) == 3 + 1  # and the final model
    for before, place in zip([0, *made], made[:3], strict=False):
        synced = {Path(path).name for name, path in calls[before:place] if name == "sync"}
        assert {"rounds.csv", "devices.csv", "events.jsonl", "ledger.json.partial"} <= synced


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    def write() -> None:
        with replacing(tmp_path / "file") as file:
            file.write(b"ne")
            raise OSError(5, "cable")

    (tmp_path / "file").write_text("old")
    with pytest.raises(StorageFailed, match="cable"):
        write()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_process_without_descriptors_is_sent_to_no_disk(tmp_path: Path, number: int) -> None:
    remedy = r"Too many open files.*\. Let this process have more .* ulimit -n"
    with pytest.raises(StorageFailed, match=remedy), writing(tmp_path / "file"):
        raise OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    "tear",
    [
        lambda data: b"",
        lambda data: data[:-1],
        # as long as it was, but its last pages were not written
        lambda data: data[:-100] + bytes(100),
        lambda data: data.replace(b'"content":', b'"_ontent":'),  # without a digest
    ],
)
def test_a_torn_checkpoint_is_refused(tear: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path, row = save(tmp_path, 1), LAYOUT.empty()
    assert (
        checkpoint.load(path, layout=LAYOUT, row=row, rule=rule_of()).global_round == 1
        and (row == 1).all()
    )
    path.write_bytes(tear(path.read_bytes()))
    with pytest.raises(InvalidExperiment, match="not a checkpoint of this run"):
        checkpoint.load(path, layout=LAYOUT, row=row, rule=rule_of())


def test_other_tools_read_a_checkpoint(tmp_path: Path) -> None:
    row = np.random.default_rng(1).integers(0, 255, LAYOUT.row_bytes, np.uint8)
    checkpoint.save_model(tmp_path / "model.safetensors", layout=LAYOUT, row=row, facts={})
    found = load_file(tmp_path / "model.safetensors")
    assert {name: (tensor.shape, tensor.tobytes()) for name, tensor in found.items()} == {
        name: (tensor.shape, tensor.tobytes()) for name, tensor in LAYOUT.views(row).items()
    }


@pytest.mark.parametrize(
    ("rule", "torn"),
    [
        ({}, "round-000003.safetensors"),
        ({"name": "fedcross", "alpha": 0.9}, "round-000003/models.bin"),
        ({"name": "fedcda", "warmup_rounds": 1, "memory_mb": 0.0}, "round-000003/institution-1@2"),
        ({"name": "fedcda", "warmup_rounds": 1}, "round-000003/sum"),
    ],
    ids=["model", "models", "uploads", "sum"],
)
def test_a_run_passes_over_a_torn_checkpoint(rule: Mapping[str, Any], torn: str) -> None:
    """The newest one lost the end of a file; the model is that of an undisturbed run."""
    warnings: list[str] = []
    third = asyncio.Event()

    def observe(event: str, facts: Mapping[str, object]) -> None:
        if event == "warning":
            warnings.append(str(facts["reason"]))
        elif event == "global_round" and facts["global_round"] == 3:
            third.set()

    async def tear(lab: ScenarioLab) -> None:
        await third.wait()
        lab.kill("cloud")
        (file,) = lab.agents.runs.glob(f"*/checkpoints/{torn}")
        data = file.read_bytes()
        file.unlink()  # it may be a link of a file that is whole
        file.write_bytes(data[:100])
        lab.start("cloud")

    longer = parse(SMALL | {"rounds": 4, "cloud": {"aggregation": rule}})
    outcome = ScenarioLab(longer, scenario=tear, observe=observe).run()
    assert outcome.ok and outcome.digest == ScenarioLab(longer).run().digest, outcome
    assert [row["global_round"] for row in outcome.rounds] == ["1", "2", "3", "4"]
    (warning,) = warnings
    assert (
        "round-000003.safetensors" in warning
        and "continues from the checkpoint before it" in warning
    )


# A second cloud


def test_a_second_cloud_is_refused_before_it_writes(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path, parse({}))
    first.event("run", {})
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in first.path.iterdir()}
    assert held(first.path)
    with pytest.raises(
        InvalidExperiment, match=r"another process runs this run\. Wait for its end, or stop it"
    ):
        RunFolder.reopen(first.path)
    done = invoke("run", "--direct", "--resume", first.path)
    assert done.exit_code == 4
    assert before == {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in first.path.iterdir()
    }
    first.release()
    assert not held(first.path)
    again = RunFolder.reopen(first.path)
    assert held(again.path)


def test_a_reader_does_not_keep_a_cloud_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks `held` has a shared lock for a moment."""
    folder = RunFolder.create(tmp_path, parse({}))
    folder.release()
    reader = os.open(folder.path / run_folder.HELD, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    try_lock, tried = run_folder._try_lock, []

    def tries(file: int, kind: int) -> bool:
        tried.append(try_lock(file, kind))
        if len(tried) == 2:
            os.close(reader)
        return tried[-1]

    monkeypatch.setattr(run_folder, "_try_lock", tries)
    again = RunFolder.reopen(folder.path)
    assert again.run == folder.run and tried == [False, True, True]
