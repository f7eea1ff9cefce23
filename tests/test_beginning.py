"""What is checked before a run begins, and what a run that never began leaves: nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cloud.results import RunFolder
from common.errors import InvalidExperiment, NoProgress
from common.experiment.data import SHAPES, Data, Model, check_fits
from common.experiment.reading import parse
from common.learning import datasets
from common.learning.readers import builtin
from common.learning.readers.builtin import check_files
from deploy.cli.chosen import kept_once_begun
from deploy.console.login import Login
from deploy.local import beforehand
from tests.helpers.commands import invoke


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_that_fails_stays_once_it_has_begun_a_global_round(begun: bool, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs", parse({}))
    folder.event("failed", {"reason": "..."})
    folder.begun = begun
    with pytest.raises(KeyboardInterrupt), folder.removed_unless_begun():
        raise KeyboardInterrupt
    assert folder.path.exists() is begun
    assert (tmp_path / "runs").exists() is begun, "it made that one, too"


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), NoProgress("idle"), OSError()], ids=lambda error: str(type(error))
)
def test_a_run_that_has_begun_is_resumed_with_the_command_that_is_shown(
    error: BaseException, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    login = Login("me", "pass word", tls_ca="ca.crt")
    command = ["fedstrata", "cloud", "--broker", "b:1883", *login.options()]
    for begun, shown in ((True, command), (True, []), (False, command)):
        folder = RunFolder.create(tmp_path, parse({}))
        folder.begun = begun
        with pytest.raises(type(error)), kept_once_begun(folder, shown):
            raise error
        folder.release()
        words = "cloud --broker b:1883 --username me --password-file 'pass word' --tls-ca ca.crt"
        line = f"\nresume with: fedstrata {words} --resume {folder.path}\n" if shown else ""
        removed = f"no global round had begun: {folder.path} is removed\n"
        assert capsys.readouterr().err == (line if begun else removed)


def test_a_folder_of_runs_that_was_there_stays(tmp_path: Path) -> None:
    alone, other = (RunFolder.create(tmp_path, parse({})) for _ in range(2))
    with pytest.raises(OSError), alone.removed_unless_begun():  # noqa: PT011
        raise OSError
    assert list(tmp_path.iterdir()) == [other.path]


def test_a_resumed_run_stays(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path, parse({}))
    first.release()
    again = RunFolder.reopen(first.path)
    with pytest.raises(KeyboardInterrupt), again.removed_unless_begun():
        raise KeyboardInterrupt
    assert again.path.is_dir()


def test_a_model_that_cannot_be_built_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_module_net.py").write_text("def build(*, shape, classes):\n    return 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    done = invoke("run", "demo", "--direct", "--set", "model.name=no_module_net:build")
    assert done.exit_code == 4 and "returns int, not nn.Module" in done.stderr.splitlines()[-1]
    assert "no global round had begun: runs/" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_finished_run_needs_no_resuming(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, parse({}))
    folder.event("run", {})
    folder.release()
    refused = invoke("run", "--direct", "--resume", folder.path)
    assert refused.exit_code == 4 and "the run was started with a network. Omit --direct." in refused.stderr
    folder.event("finished", {"global_round": 0})
    for command in ("run", "cloud"):
        done = invoke(command, "--resume", folder.path)
        assert (done.exit_code, done.stdout) == (0, "")
        assert done.stderr == f"--resume = '{folder.path}': this run is finished, after 0 global rounds\n"
    (fact,) = map(json.loads, invoke("run", "--resume", folder.path, "--format", "json").stdout.splitlines())
    assert (fact["event"], fact["folder"], fact["run"]) == ("finished", str(folder.path), folder.run)


def test_a_run_of_another_process_is_refused_at_once(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, parse({}))
    done = invoke("cloud", "--resume", folder.path)
    assert done.exit_code == 4 and "another process runs this run. Wait for its end, or stop it." in done.stderr


@pytest.mark.parametrize("target", ["90", "-1"])
def test_a_target_in_percent_is_refused(target: str, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, parse({}))
    refused = invoke("compare", folder.path, "--target", target)
    assert refused.exit_code == 4 and refused.stderr.count("\n") == 1
    assert "an accuracy is a fraction of 1. Write 0.9 for 90 %." in refused.stderr


# Files


@pytest.mark.parametrize(
    "name", ["mnist", "fashionmnist", "cifar10", "cifar100", "femnist", "shakespeare", "sent140", "motions"]
)
def test_missing_files_have_the_readers_own_error(name: str, tmp_path: Path) -> None:
    readers = {
        "cifar10": builtin.read_cifar10,
        "femnist": builtin.read_femnist,
        "shakespeare": builtin.read_shakespeare,
    }
    with pytest.raises(InvalidExperiment, match="To fetch them: ") as found:
        check_files(Data(dataset=name, root=str(tmp_path)))
    if name == "mnist":
        readers[name] = lambda root: builtin.read_mnist_like(root, "MNIST")
    if name in readers:
        with pytest.raises(InvalidExperiment) as wanted:
            readers[name](tmp_path)
        assert str(found.value) == str(wanted.value)


def test_each_node_has_a_folder_of_its_own(tmp_path: Path) -> None:
    tree = {"dataset": "folder", "partition": "natural", "classes": ["a"], "image_shape": [1, 8, 8]}
    data = parse({"data": tree | {"root": str(tmp_path / "{node}")}}).data
    for node, part in (("cloud", "test"), ("device-0", "train")):
        with pytest.raises(InvalidExperiment, match=f"not found: .*{node}/{part}. Put this node's own images there"):
            check_files(data, node=node)
        (tmp_path / node / part).mkdir(parents=True)
        check_files(data, node=node)


@pytest.mark.parametrize("words", [["run"], ["run", "--direct"], ["cloud", "--broker", "localhost:1"]], ids=" ".join)
@pytest.mark.parametrize(
    ("pairs", "problem"),
    [
        (["topology.devices=3000"], "topology.devices = 3000: digits has 1,438 training samples, and each device needs "
         "10. Use at most 143 devices, or lower data.min_samples."),
        (["model=lenet5"], "model.name = 'lenet5': does not accept images of [1, 8, 8] of the data set. "
         "Use mlp_digits or cnn_digits, or another data.dataset."),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_is_started(
    words: list[str], pairs: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke(words[0], "demo", *words[1:], *(word for pair in pairs for word in ("--set", pair)))
    assert (done.exit_code, done.stderr) == (4, f"fedstrata: {problem}\n")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("data", "most"),
    [
        ({"dataset": "digits"}, 1438),
        ({"dataset": "digits", "node_samples": 438}, 1000),
        ({"dataset": "digits", "partition": "shards", "shards": 4}, 359),
        ({"dataset": "digits", "partition": "dirichlet", "min_samples": 0}, 1438),
        ({"dataset": "digits", "partition": "quantity"}, 143),
        ({"dataset": "digits", "partition": "institution_shards", "within": "shards"}, 719),
        ({"dataset": "digits", "partition": "dirichlet_overlap"}, 10**6),
        ({"dataset": "folder", "partition": "private", "classes": ["a"], "image_shape": [1, 8, 8]}, 10**6),
    ],
)
def test_as_many_devices_as_the_data_suffice_for(data: dict[str, Any], most: int) -> None:
    chosen = Data.model_validate(data)
    check_fits(chosen, Model(), devices=most)
    if most < 10**6:
        with pytest.raises(InvalidExperiment, match=f"Use at most {most:,} devices"):
            check_fits(chosen, Model(), devices=most + 1)


def test_the_known_shape_of_digits_is_that_of_its_reader() -> None:
    assert datasets.load(Data()).inputs.shape == SHAPES["digits"]


@pytest.mark.parametrize("dataset", ["shakespeare", "sent140"])
def test_text_is_for_models_of_text(dataset: str) -> None:
    check_fits(Data(dataset=dataset), Model(name="char_lstm"), devices=2)
    with pytest.raises(InvalidExperiment, match="does not accept text of the data set"):
        check_fits(Data(dataset=dataset), Model(), devices=2)


def test_data_without_files_needs_none() -> None:
    for name in ("digits", "synthetic"):
        check_files(Data(dataset=name, root="no"))


# Packages


@pytest.mark.parametrize(("rule", "needed"), [("fedma", True), ("gamf", True), ("clusamp", True), ("fedcross", False)])
def test_a_rules_packages_are_checked(rule: str, needed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beforehand, "find_spec", lambda name: None if name == "scipy" else name)
    experiment = parse({"institution": {"rounds": 2, "aggregation": {"name": rule}}})
    beforehand.check_cloud(experiment, None)  # another machine's matter
    if not needed:
        beforehand.check_lab(experiment, None, direct=True)
        return
    problem = r"needs scipy, not installed here\. pip install 'fedstrata\[methods\]'\."
    with pytest.raises(InvalidExperiment, match=rf"institution\.aggregation\.name = '{rule}': {problem}"):
        beforehand.check_lab(experiment, None, direct=True)


def test_matching_that_is_off_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beforehand, "find_spec", lambda name: None if name == "scipy" else name)
    rule = {"name": "fedma", "matching": False}
    beforehand.check_lab(parse({"cloud": {"aggregation": rule}}), None, direct=True)
