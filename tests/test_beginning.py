"""What is checked before a run begins, the lab of the nodes that are there, and what a run that
never began leaves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.errors import DuplicateName, InvalidExperiment, LeftOut, NoProgress
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.short_form import PresentNode, topology_of
from fedstrata.common.learning import datasets
from fedstrata.common.learning.readers import builtin, leaf
from fedstrata.common.learning.readers.builtin import check_files
from fedstrata.common.settings.data import FOLDERS, SHAPES, Data, ModelSettings, check_fits
from fedstrata.common.settings.topology import CLOUD, check_parent
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.cli.chosen import kept_once_begun
from fedstrata.deploy.console.login import Login
from fedstrata.deploy.local import beforehand
from tests.helpers.commands import invoke
from tests.helpers.records import a_global_round

pytestmark = pytest.mark.usefixtures("warm")


@pytest.mark.parametrize(("begun", "alone"), [(False, True), (False, False), (True, True)])
def test_a_run_that_fails_stays_once_it_has_begun_a_global_round(
    begun: bool, alone: bool, tmp_path: Path
) -> None:
    others = [] if alone else [RunFolder.create(tmp_path / "runs", parse({})).path]
    folder = RunFolder.create(tmp_path / "runs", parse({}))
    folder.event("failed", {"reason": "..."})
    folder.begun = begun
    with pytest.raises(KeyboardInterrupt), folder.removed_unless_begun():
        raise KeyboardInterrupt
    assert (tmp_path / "runs").exists() is (begun or not alone), "it made that one, too"
    assert [*tmp_path.glob("runs/*")] == others + [folder.path] * begun


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), NoProgress("idle"), OSError()],
    ids=lambda error: str(type(error)),
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
        after = "\n" if isinstance(error, KeyboardInterrupt) else ""
        line = f"{after}resume with: fedstrata {words} --resume {folder.path}\n" if shown else ""
        removed = f"no global round had begun: {folder.path} is removed\n"
        assert capsys.readouterr().err == (line if begun else removed)


def test_a_resumed_run_stays(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, parse({})).release()
    again = RunFolder.reopen(next(tmp_path.iterdir()))
    with pytest.raises(KeyboardInterrupt), again.removed_unless_begun():
        raise KeyboardInterrupt
    assert again.path.is_dir()


def test_a_model_that_cannot_be_built_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert (
        refused.exit_code == 4
        and "the run was started with a network. Omit --direct." in refused.stderr
    )
    folder.event("finished", {"global_round": 0})
    for command in ("run", "cloud"):
        done = invoke(command, "--resume", folder.path)
        assert (done.exit_code, done.stdout) == (0, "")
        assert (
            done.stderr
            == f"--resume = '{folder.path}': this run is finished, after 0 global rounds\n"
        )
    (fact,) = map(
        json.loads, invoke("run", "--resume", folder.path, "--format", "json").stdout.splitlines()
    )
    assert (fact["event"], fact["folder"], fact["run"]) == (
        "finished",
        str(folder.path),
        folder.run,
    )


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [0, 1])
def test_a_cloud_that_fails_after_its_first_round_shows_how_to_resume(
    rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_module_net.py").write_text("def build(*, shape, classes):\n    return 3\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    folder = RunFolder.create(tmp_path / "runs", parse({"model": {"name": "no_module_net:build"}}))
    folder.event("run", {})
    for number in range(rounds):
        folder.add_round(a_global_round(number + 1, None))
    folder.release()
    with broker.start(directory=tmp_path) as served:
        given = [
            "--broker",
            f"{served.host}:{served.port}",
            "--lab",
            "mine",
            "--metrics",
            "localhost:0",
        ]
        done = invoke("cloud", "--resume", folder.path, *given)
    assert done.exit_code == 4 and "returns int, not nn.Module" in done.stderr
    way = f"resume with: fedstrata cloud {' '.join(given)} --resume {folder.path}\n"
    assert (way in done.stderr) == ("resume with" in done.stderr) == (rounds > 0)


def test_a_run_of_another_process_is_refused_at_once(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, parse({}))
    done = invoke("cloud", "--resume", folder.path)
    assert (
        done.exit_code == 4
        and "another process runs this run. Wait for its end, or stop it." in done.stderr
    )


@pytest.mark.parametrize("target", ["90", "-1"])
def test_a_target_in_percent_is_refused(target: str, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, parse({}))
    refused = invoke("compare", folder.path, "--target", target)
    assert refused.exit_code == 4 and refused.stderr.count("\n") == 1
    assert "an accuracy is a fraction of 1. Write 0.9 for 90 %." in refused.stderr


# Files


READERS: dict[str, Callable[[Path], object]] = {
    "mnist": lambda root: builtin.read_mnist_like(root, "MNIST"),
    "cifar10": builtin.read_cifar10,
    "femnist": leaf.read_femnist,
    "shakespeare": leaf.read_shakespeare,
}


@pytest.mark.parametrize("name", FOLDERS)
def test_missing_files_have_the_readers_own_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidExperiment, match="To fetch them: ") as found:
        check_files(Data(dataset=name, root=str(tmp_path)))
    if name in READERS:
        with pytest.raises(InvalidExperiment) as wanted:
            READERS[name](tmp_path)
        assert str(found.value) == str(wanted.value)


def test_each_node_has_a_folder_of_its_own(tmp_path: Path) -> None:
    tree = {"dataset": "folder", "partition": "natural", "classes": ["a"], "image_shape": [1, 8, 8]}
    data = parse({"data": tree | {"root": str(tmp_path / "{node}")}}).data
    for node, part in (("cloud", "test"), ("device-0", "train")):
        with pytest.raises(
            InvalidExperiment, match=f"not found: .*{node}/{part}. Put this node's own images there"
        ):
            check_files(data, node=node)
        (tmp_path / node / part).mkdir(parents=True)
        check_files(data, node=node)


@pytest.mark.parametrize(
    "words", ["run demo", "run demo --direct", "cloud demo --broker localhost:1"]
)
def test_what_does_not_fit_is_refused_before_anything_is_started(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke(*words.split(), "--set", "topology.devices=3000")
    problem = "digits has 1,438 training samples, and each device needs 10"
    remedy = "Use at most 143 devices, or lower data.min_samples."
    assert (done.exit_code, done.stderr) == (
        4,
        f"fedstrata: topology.devices = 3000: {problem}. {remedy}\n",
    )
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
        (
            {
                "dataset": "folder",
                "partition": "private",
                "classes": ["a"],
                "image_shape": [1, 8, 8],
            },
            10**6,
        ),
    ],
)
def test_as_many_devices_as_the_data_suffice_for(data: dict[str, Any], most: int) -> None:
    chosen = Data.model_validate(data)
    check_fits(chosen, ModelSettings(), devices=most)
    if most < 10**6:
        with pytest.raises(InvalidExperiment, match=f"Use at most {most:,} devices"):
            check_fits(chosen, ModelSettings(), devices=most + 1)


def test_the_known_shape_of_digits_is_that_of_its_reader() -> None:
    assert datasets.load(Data()).inputs.shape == SHAPES["digits"]


def test_text_is_for_models_of_text() -> None:
    check_fits(Data(dataset="sent140"), ModelSettings(name="char_lstm"), devices=2)
    with pytest.raises(InvalidExperiment, match="does not accept text of the data set"):
        check_fits(Data(dataset="sent140"), ModelSettings(), devices=2)


def test_data_without_files_needs_none() -> None:
    for name in ("digits", "synthetic"):
        check_files(Data(dataset=name, root="no"))


# Packages


NEED_SCIPY = ("fedma", "gamf", "clusamp")


@pytest.mark.parametrize("rule", [*NEED_SCIPY, "fedcross", {"name": "fedma", "matching": False}])
def test_a_rules_packages_are_checked(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beforehand, "find_spec", lambda name: None if name == "scipy" else name)
    experiment = parse({"institution": {"rounds": 2, "aggregation": rule}})
    beforehand.check_cloud(experiment, None)  # another machine's matter
    problem = r"needs scipy, not installed here\. pip install 'fedstrata\[methods\]'\."
    refused = pytest.raises(
        InvalidExperiment, match=rf"institution\.aggregation\.name = '{rule}': {problem}"
    )
    with refused if rule in NEED_SCIPY else nullcontext():
        beforehand.check_lab(experiment, None, direct=True)


# The nodes that are there, `topology = "lab"`


def node_of(role: str, name: str, parent: str = CLOUD) -> PresentNode:
    return PresentNode(name, role, parent, f"host of {name}")


institution, device = partial(node_of, "institution"), partial(node_of, "device")


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_the_lab_that_is_there_is_the_lab_of_as_many_nodes(
    sizes: list[int], random: Random
) -> None:
    """Numbered nodes that answer in any order are those that an experiment gets by their members."""
    devices = [f"device-{k}" for k in range(sum(sizes))]
    ends = [0, *accumulate(sizes)]
    members = {f"institution-{i}": devices[ends[i] : ends[i + 1]] for i in range(len(sizes))}
    nodes = [
        *map(institution, members),
        *(device(each, name) for name, names in members.items() for each in names),
    ]
    random.shuffle(nodes)
    found, left_out = topology_of(nodes)
    assert parse({"topology": found}).tree.children == {CLOUD: [*members], **members}
    assert found["devices"] == devices and left_out == []


def test_names_are_in_the_order_of_their_numbers() -> None:
    names = ["pi-2", "pi-10", "gpu", "pi-2b", "pi-1-12", "pi-1-3"]
    found, _ = topology_of([device(name) for name in names])
    assert found == {
        "institutions": 0,
        "devices": ["gpu", "pi-1-3", "pi-1-12", "pi-2", "pi-2b", "pi-10"],
    }


def test_nodes_without_a_place_are_left_out_and_named() -> None:
    nodes = [
        institution("b"),
        institution("a"),
        institution("lost", "region"),
        device("x", "a"),
        device("y", "nobody"),
    ]
    found, left_out = topology_of(nodes)
    assert found == {"institutions": ["a"], "devices": ["x"], "members": {"a": ["x"]}}
    assert left_out == [
        "lost is left out: its parent 'region' is not there",
        "y is left out: its parent 'nobody' is not there",
        "b is left out: it has no device",
    ]


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([], "no device is there"),
        ([institution("a")], "no device is there"),
        ([institution("a"), device("x", "b")], "no device is there"),
        (
            [institution("a"), device("x", "a"), device("y"), device("z")],
            r"others below the cloud \(y, z\)",
        ),
        (
            [institution("r"), institution("a", "r"), device("x", "a")],
            r"a is below r.*\[\[tiers\]\]",
        ),
    ],
)
def test_labs_that_are_no_topology_are_refused(nodes: list[PresentNode], text: str) -> None:
    with pytest.raises(InvalidExperiment, match=text):
        topology_of(nodes)


def test_two_nodes_of_one_name_are_refused_with_their_hosts() -> None:
    twice = [device("x"), PresentNode("x", "device", CLOUD, "pi-7")]
    with pytest.raises(
        DuplicateName, match="2 nodes of the lab are called 'x', on host of x and pi-7"
    ):
        topology_of(twice)


def test_a_device_that_came_after_the_roll_is_left_out_and_one_of_another_parent_is_refused() -> (
    None
):
    there = [institution("i"), institution("j"), device("a", "i"), device("b", "j")]
    tree = parse({"topology": topology_of(there)[0]}).tree
    with pytest.raises(LeftOut, match="late is not there: no device of this experiment"):
        check_parent(tree, "late", "i", role="device", among=tree.devices)
    with pytest.raises(InvalidExperiment, match="b is not there: it belongs to j") as refused:
        check_parent(tree, "b", "i", role="device", among=tree.devices)
    assert not isinstance(refused.value, LeftOut)
