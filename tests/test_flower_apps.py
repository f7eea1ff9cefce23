"""Apps of Flower's messages: what an experiment takes of them, and, with the marker `flower`, runs
with flwr itself.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgpack
import numpy as np
import pytest

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.common.training.flower_state import FILE, packed, read_state, unpacked, write_state
from tests.helpers.commands import run_lab, table, tensors
from tests.helpers.direct import resumed_run, run_direct
from tests.helpers.flower_apps import TASKS, write_app
from tests.test_docs import files_of, page

TRAINER: Final = {"name": "flower", "app": "flowers"}
LAB: Final[dict[str, Any]] = {"topology": {"institutions": 2, "devices": 4}}
REALLY: Final = pytest.mark.flower


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, as the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", "")]))
    )
    return tmp_path


def lab(trainer: Mapping[str, Any] = TRAINER, **tables: Any) -> dict[str, Any]:
    training = {**tables.pop("training", {}), "trainer": trainer}
    return {**LAB, **tables, "training": training}


def test_an_app_gives_what_an_experiment_does_not_set(home: Path) -> None:
    write_app(home / "flowers", "numpy")
    found = parse(lab())
    assert (found.rounds, found.training.epochs, found.training.learning_rate) == (2, 2, 0.1)
    trainer = found.training.trainer
    assert trainer.code == {
        "training.trainer.clientapp": "numpy_app.client:app",
        "training.trainer.serverapp": "numpy_app.server:app",
    }
    assert trainer.run_config == {"model.features": 4}  # type: ignore[attr-defined]
    given = parse(
        lab({**TRAINER, "run_config": {"model.features": 5}}, rounds=7, training={"epochs": 1})
    )
    assert (given.rounds, given.training.epochs, given.training.learning_rate) == (7, 1, 0.1)
    assert given.training.trainer.run_config == {"model.features": 5}  # type: ignore[attr-defined]


def test_the_experiment_of_a_run_needs_no_file_of_the_app(home: Path) -> None:
    write_app(home / "flowers", "numpy")
    found = parse(lab())
    (home / "flowers" / "pyproject.toml").unlink()
    assert parse(tomllib.loads(to_toml(found))) == found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, r"there is no flowers/pyproject.toml"),
        ("[tool", r"flowers/pyproject.toml cannot be read \(.*\)"),
        ("", r"has no \[tool.flwr.app.components\] with serverapp and clientapp"),
        ("[tool]\nflwr = 1", r"has no \[tool.flwr.app.components\]"),
        ("[tool.flwr.app.components]\nserverapp = 'a:b'", r"has no \[tool.flwr.app.components\]"),
    ],
)
def test_a_folder_without_an_app_is_named(text: str | None, problem: str, home: Path) -> None:
    (home / "flowers").mkdir()
    if text is not None:
        (home / "flowers" / "pyproject.toml").write_text(text)
    with pytest.raises(InvalidExperiment, match=rf"^training.trainer.app = 'flowers': .*{problem}"):
        parse(lab())


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"client_fn": "a:b"}, "client_fn = 'a:b': has no effect beside app"),
        ({"run_config": {"local-epochs": 3}}, "run_config.local-epochs = 3: "),
        ({"run_config": {"num-server-rounds": 3}}, "run_config.num-server-rounds = 3: "),
    ],
)
def test_keys_that_do_not_fit_beside_an_app_are_named(
    keys: Mapping[str, Any], problem: str, home: Path
) -> None:
    write_app(home / "flowers", "numpy")
    with pytest.raises(InvalidExperiment) as caught:
        parse(lab({"name": "flower", "app": "flowers", **keys}))
    assert str(caught.value).startswith(f"training.trainer.{problem}")


def modules(package: str) -> Any:
    return sys.modules[f"{package}.client"]


@REALLY
@pytest.mark.parametrize("kind", TASKS)
def test_an_app_learns_and_gives_the_same_model_after_a_kill(kind: str, home: Path) -> None:
    write_app(home / "flowers", kind)
    tree = lab(rounds=3, evaluation={"at": "both"})
    whole = run_direct(home / "whole", tree)
    assert tensors(resumed_run(run_direct(home / "killed", tree, until=2))) == tensors(whole)
    rows = table(whole / "rounds.csv")
    losses = [float(row["loss"]) for row in rows]
    assert losses == sorted(losses, reverse=True) and all(
        float(row["train_loss"]) > 0 for row in rows
    )
    assert {int(row["samples"]) for row in table(whole / "devices.csv")} == {30, 31, 32, 33}


@REALLY
@pytest.mark.parametrize(("kind", "flags"), [("numpy", []), ("torch", ["--simulate"])])
def test_labs_of_processes_and_of_virtual_time_give_the_model_of_one_process(
    kind: str, flags: list[str], home: Path
) -> None:
    write_app(home / "flowers", kind)
    (home / "lab.toml").write_text(to_toml(parse(lab())))
    assert tensors(run_lab(home / "lab.toml", home / "runs", flags=flags)) == tensors(
        run_direct(home / "alone", lab())
    )


@REALLY
def test_a_client_app_gets_the_messages_of_its_strategy(home: Path) -> None:
    write_app(home / "flowers", "numpy")
    package = home / "flowers" / "numpy_app"
    package.rename(home / "flowers" / "seen_app")
    for path in [
        home / "flowers" / "pyproject.toml",
        *(home / "flowers" / "seen_app").glob("*.py"),
    ]:
        path.write_text(path.read_text().replace("numpy_app", "seen_app"))
    schedule = {"name": "exponential", "factor": 0.5}
    run_direct(home / "runs", lab(rounds=2, training={"schedule": schedule, "batch_size": 8}))
    places, configs, run_configs, nodes = zip(*modules("seen_app").SEEN, strict=True)
    assert sorted(places) == sorted([0, 1, 2, 3] * 3)  # the first training counts the samples
    assert {config["proximal-mu"] for config in configs} == {0.25}
    assert {(config["server-round"], config["lr"]) for config in configs} == {(1, 0.1), (2, 0.05)}
    assert {node["num-partitions"] for node in nodes} == {4}
    assert [config["local-epochs"] for config in run_configs] == [1] * 4 + [2] * 8
    assert {
        (config["batch-size"], config["model.features"], config["num-server-rounds"])
        for config in run_configs
    } == {(8, 4, 2)}


@REALLY
def test_the_state_of_an_app_is_flowers_records_and_nothing_else(tmp_path: Path) -> None:
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

    draw = np.random.default_rng(1).normal(size=(2, 3))
    state = RecordDict(
        {
            "arrays": ArrayRecord({"w": Array(draw), "count": Array(np.array(3))}),
            "config": ConfigRecord(
                {"a": 1, "b": [0.5, 0.25], "c": "text", "d": b"bytes", "e": True}
            ),
            "metrics": MetricRecord({"loss": 0.1, "all": [1, 2]}),
        }
    )
    write_state(state, tmp_path)
    found = RecordDict()
    read_state(found, tmp_path)
    assert found == state and type(found["arrays"]) is ArrayRecord
    assert found["arrays"]["w"].numpy().tobytes() == draw.tobytes()
    for name in (
        "flwr.simulation:run_simulation",
        "flwr.app.message:Message",
        "flwr.serverapp:ServerApp",
        "os:system",
    ):
        (tmp_path / FILE).write_bytes(msgpack.packb(["dict", [["a", [name, []]]]]))
        with pytest.raises(ValueError, match="is not one of Flower's records"):
            read_state(RecordDict(), tmp_path)
    assert unpacked(msgpack.unpackb(msgpack.packb(packed({}, FILE)))) == {}


REPLY: Final = "return Message(RecordDict({"
WRONG: Final = {  # replacements in the app's files, and a text of the error
    "a grid": (
        "server",
        "strategy.start(",
        "grid.push_messages([])\n    strategy.start(",
        "calls grid.push_messages",
    ),
    "no strategy": (
        "server",
        "    strategy.start(",
        "    return\n    strategy.start(",
        "starts no strategy",
    ),
    "no arrays": (
        "server",
        "initial_arrays=ArrayRecord(",
        "initial_arrays=list(",
        "a list of 2 as initial_arrays",
    ),
    "no fraction": (
        "server",
        "fraction_evaluate=0.5",
        "fraction_evaluate=0.0",
        "Let its fraction_evaluate be above 0",
    ),
    "a server_fn": (
        "server",
        "@app.main()",
        "app = ServerApp(server_fn=lambda context: 1)\n",
        "starts no strategy",
    ),
    "no ClientApp": (
        "server",
        "def evaluate(",
        "app = 3\n\n\ndef evaluate(",
        "it is 3. Name Flower's",
    ),
    "no evaluate": ("client", "@app.evaluate()", "", "it has no evaluate"),
    "no examples": (
        "client",
        '"num-examples": len(y), "train',
        '"train',
        "train replies with num-examples = None",
    ),
    "no score": (
        "client",
        "eval_acc",
        "other",
        r"returns no score among num-examples, eval_loss, other",
    ),
    "two arrays": (
        "client",
        '{"arrays": arrays,',
        '{"arrays": arrays, "b": arrays,',
        "replies with 2 ArrayRecords",
    ),
    "no metrics": (
        "client",
        f'{REPLY}"arrays": arrays, "metrics": metrics',
        f'{REPLY}"arrays": arrays',
        "0 MetricRecords",
    ),
    "no message": (
        "client",
        f'{REPLY}"arrays',
        f'return RecordDict()\n    {REPLY}"arrays',
        "train returns RecordDict",
    ),
    "an error": (
        "client",
        "    x, y = task.data(place)",
        "    1 / 0",
        r"ZeroDivisionError.*, in train \(.*client.py:\d+",
    ),
    "a lock": (
        "client",
        'context.state["last"] = arrays',
        "context.state = {1: object()}",
        "which does not persist",
    ),
}


@REALLY
@pytest.mark.parametrize("kind", WRONG)
def test_an_app_that_cannot_be_used_is_one_line(kind: str, home: Path) -> None:
    write_app(home / "flowers", "numpy")
    name, old, new, problem = WRONG[kind]
    package = f"wrong{list(WRONG).index(kind)}_app"
    (home / "flowers" / "numpy_app").rename(home / "flowers" / package)
    for path in [home / "flowers" / "pyproject.toml", *(home / "flowers" / package).glob("*.py")]:
        text = path.read_text().replace("numpy_app", package)
        if path.stem == name:
            assert old in text
            text = text.replace(old, new)
        path.write_text(text)
    with pytest.raises(
        InvalidExperiment, match=rf"^training.trainer.(client|server)app = .*{problem}"
    ):
        run_direct(home / "runs", lab(evaluation={"at": "devices"}))


@REALLY
def test_a_score_may_be_named(home: Path) -> None:
    write_app(home / "flowers", "numpy")
    run = run_direct(
        home / "runs", lab({**TRAINER, "score": "eval_loss"}, evaluation={"at": "devices"})
    )
    assert all(row["accuracy"] == row["loss"] for row in table(run / "rounds.csv"))


@REALLY
def test_the_page_on_flower_shows_what_its_commands_print(home: Path) -> None:
    for name, text in files_of("docs/flower.md").items():
        (home / name).write_text(text)
    rows = table(run_lab(home / "lab.toml", home / "runs", flags=["--direct"]) / "rounds.csv")
    for row in (rows[0], rows[-1]):
        assert f"accuracy {float(row['accuracy']):.4f}  loss {float(row['loss']):.4f}" in page(
            "docs/flower.md"
        )
