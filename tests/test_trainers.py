"""Trainers of a user's own: docs/own-trainers.md, Flower's clients, what they may not return,
without PyTorch.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgpack
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import InvalidExperiment, RefusedModel
from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.protocol.limits import check_report, limits_below
from fedstrata.common.protocol.messages import Key, Manifest, Result
from fedstrata.common.settings.topology import CLOUD
from fedstrata.common.training import flower, flower_state
from fedstrata.common.training.array_trainer import LocalTask, TrainingSite, seed_generators
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.planning import workload
from fedstrata.deploy.planning.footprint import memory_of
from fedstrata.device.training.arrays import ArrayTraining
from tests.helpers.commands import (
    PATIENCE_S,
    command,
    fedstrata,
    folder_in,
    invoke,
    run_lab,
    table,
    tensors,
)
from tests.helpers.direct import resumed_run, run_direct
from tests.helpers.examples import slow
from tests.test_bare import SITE, bare
from tests.test_extend import EXAMPLES

pytestmark = pytest.mark.usefixtures("warm")

FEATURES, CLASSES = 8, 3
LAB: Final[dict[str, Any]] = {
    "rounds": 4,
    "topology": {"institutions": 2, "devices": 4},
    "data": {"root": "data/{node}"},
    "institution": {"rounds": 2, "participation": 0.5},
    "training": {"epochs": 2, "learning_rate": 0.1},
}
SOFTMAX: Final = {"name": "softmax:Softmax", "features": FEATURES, "classes": CLASSES}
# A client in the shape of Flower's quick start, with what `flwr` has of it.
APP: Final = """
import random

import numpy as np

MADE, ROUNDS = [], []


class NumPyClient:
    def get_parameters(self, config):
        return []
    def to_client(self):
        return Wrapper(self)


class Wrapper:
    def __init__(self, client):
        self.numpy_client = client


class FlowerClient(NumPyClient):
    def __init__(self, partition, partitions, state):
        self.data = np.random.default_rng(partition).normal(size=(10 + partition, 4)).astype(np.float32)
        self.partitions = partitions
        self.state = state
    def get_parameters(self, config):
        return [np.zeros((4,), np.float32), np.array(0)]
    def fit(self, parameters, config):
        w, count = parameters
        assert config["server_round"] >= 1 and config["learning_rate"] > 0, config
        velocity = self.state.get("velocity", np.zeros(4, np.float32))
        for _ in range(config["local_epochs"]):
            velocity = np.float32(0.5) * velocity + (w - self.data.mean(0))
            w = w - np.float32(config["learning_rate"]) * velocity
        self.state["velocity"], self.state["rounds"] = velocity, [*self.state.get("rounds", []), config["server_round"]]
        w = w + np.float32(1e-3 * random.random()) + np.random.rand(4).astype(np.float32) * np.float32(1e-3)
        loss = {} if config.get("silent") else {"train_loss": float(np.square(w).mean())}
        return [w, count + 1], len(self.data), {**loss, "partitions": self.partitions}
    def evaluate(self, parameters, config):
        assert config["server_round"] >= 1 and config["learning_rate"] > 0, config
        loss = float(np.square(parameters[0] - self.data[:3].mean(0)).mean())
        return loss, 3, {"accuracy": 0.1 * len(self.state.get("rounds", []))}


def client_fn(context):
    MADE.append(context)
    config = context.node_config
    return FlowerClient(config["partition-id"], config["num-partitions"], context.state).to_client()


def evaluate(server_round, parameters, config):
    ROUNDS.append(server_round)
    return float(np.square(parameters[0]).sum()), {"accuracy": 1 / (1 + float(np.abs(parameters[0]).sum()))}
"""
# The same client with the methods of Flower's `Client`, and its records.
PLAIN: Final = """
import io
from types import SimpleNamespace

import numpy as np

import app


def arrays_of(parameters):
    assert parameters.tensor_type == "numpy.ndarray"
    return [np.load(io.BytesIO(tensor)) for tensor in parameters.tensors]


def parameters_of(arrays):
    files = [io.BytesIO() for _ in arrays]
    for file, array in zip(files, arrays):
        np.save(file, array)
    return SimpleNamespace(tensors=[file.getvalue() for file in files], tensor_type="numpy.ndarray")


class Client:
    def __init__(self, context):
        self.inner = app.client_fn(context).numpy_client
    def get_parameters(self, ins):
        return SimpleNamespace(parameters=parameters_of(self.inner.get_parameters(ins.config)))
    def fit(self, ins):
        arrays, samples, metrics = self.inner.fit(arrays_of(ins.parameters), ins.config)
        return SimpleNamespace(parameters=parameters_of(arrays), num_examples=samples, metrics=metrics)
    def evaluate(self, ins):
        loss, samples, metrics = self.inner.evaluate(arrays_of(ins.parameters), ins.config)
        status = SimpleNamespace(code=0, message="")
        return SimpleNamespace(status=status, loss=loss, num_examples=samples, metrics=metrics)


class Failing(Client):
    def fit(self, ins):
        return SimpleNamespace(status=SimpleNamespace(code=4, message="no data"))


class Unkept(Client):
    def fit(self, ins):
        self.inner.state["lock"] = object()
        return super().fit(ins)


client_fn, failing_fn, unkept_fn = Client, Failing, Unkept
"""
# What Flower's records look like.
RECORDS: Final = """
from dataclasses import dataclass
__name__ = "flwr.common"


class RecordDict(dict):
    pass


class ArrayRecord(dict):
    pass


@dataclass
class Array:
    dtype: str
    shape: tuple
    stype: str
    data: bytes
"""
TORCHED: Final = """
import torch


class Client:
    def __init__(self, context):
        self.trainloader = torch.utils.data.DataLoader(torch.randn(12, 3), batch_size=4, shuffle=True)
    def fit(self, parameters, config):
        (w,) = map(torch.tensor, parameters)
        for batch in self.trainloader:
            w = w + 0.1 * batch.mean(0) * torch.rand(3)
        return [w.numpy()], len(self.trainloader.dataset), {"loss": 0.5}


client_fn = Client


def initial():
    return [torch.randn(3).numpy()]
"""
OTHERS: Final = '''
import sys

import numpy as np

from fedstrata.common.training.array_trainer import ArrayTrainer, Trained


class Counting(ArrayTrainer):
    """A model that depends on its state, and on a draw of numpy's generator."""
    buffers = ("mean",)
    def initial(self, seed):
        return {"w": np.full(5, seed, np.float32), "mean": np.zeros((), np.float32), "count": np.zeros((), np.int64)}
    def prepare(self, site):
        self.site = site
        return 1 + site.place
    def train(self, arrays, task):
        file = task.state / "sum"
        total = (float(file.read_text()) if file.exists() else 0.0) + task.global_round
        file.write_text(str(total))
        w = arrays["w"] + np.float32(total) + np.random.rand(5).astype(np.float32)
        made = {"w": w, "mean": np.float32(w.mean()), "count": arrays["count"] + 1}
        return self.returned(made, task)
    def returned(self, made, task):
        return Trained(made, 0.5, task.epochs, numbers={"mu": task.settings.get("mu", -1.0)})


class Forgetful(Counting):
    def train(self, arrays, task):
        self.total = getattr(self, "total", 0) + 1
        return self.returned({**arrays, "w": arrays["w"] + np.float32(self.total)}, task)


class Drawing(Counting):
    draw = np.random.default_rng()
    def train(self, arrays, task):
        return self.returned({**arrays, "w": arrays["w"] + self.draw.random(5).astype(np.float32)}, task)


class Wrong(Counting):
    def __init__(self, *, how):
        self.how = how
    def returned(self, made, task):
        return eval(self.how)
'''
WRONG: Final = {  # what `train` returns, and a text of the error
    "Trained({**made, 'x': made['w']}, 0.5, 1)": r"train returns x, which `initial` does not",
    "Trained({'w': made['w'], 'mean': made['mean']}, 0.5, 1)": "train returns no count",
    "Trained({**made, 'w': made['w'][1:]}, 0.5, 1)": (
        r"train returns w as float32 \[4\], the "
        r"model has \[5\]"
    ),
    "Trained({**made, 'w': made['w'].astype(complex)}, 0.5, 1)": "train returns w as complex128",
    "Trained({**made, 'w': made['w'].astype(float) * 1e99}, 0.5, 1)": "entry w holds NaN or Inf",
    "Trained({**made, 'w': made['w'] * np.nan}, 0.5, 1)": "entry w holds NaN or Inf",
    "Trained({**made, 'count': made['w']}, 0.5, 1)": r"count as float32 \[5\], the model has \[\]",
    "Trained({**made, 'count': made['mean']}, 0.5, 1)": "count as float32, the model has int64",
    "Trained([made['w']], 0.5, 1)": "train returns arrays as a list of 1",
    "Trained(made, 0.5, 1, samples=-1)": r"train returns samples = -1 \(device-\d\)",
    "Trained(made, 0.5, 1, samples='many')": "train returns samples = the text 'many'",
    "Trained(made, 0.5, 1.5)": "train returns steps = 1.5",
    "Trained(made, 0.5, 10**6)": "train returns steps = 1000000, more than",
    "made": "train returns a dict of 3, not Trained",
    "1 / 0": r"fails on device-\d with ZeroDivisionError: division by zero",
    "sys.exit(3)": r"fails on device-\d with SystemExit: 3",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with trainers, and the data of a lab, as the current one."""
    texts = {
        "softmax": EXAMPLES["softmax"],
        "app": APP,
        "plain": PLAIN,
        "others": OTHERS,
        "torched": TORCHED,
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    draw = np.random.default_rng(1)
    w = draw.normal(size=(FEATURES, CLASSES))
    for place, node in enumerate((CLOUD, *(f"device-{i}" for i in range(4)))):
        (tmp_path / "data" / node).mkdir(parents=True)
        for name, count in (
            ("samples", 40 + 5 * place),
            ("tests", 20 if node == CLOUD else 3 + 2 * place),
        ):
            x = draw.normal(size=(count, FEATURES))
            np.savez(tmp_path / "data" / node / f"{name}.npz", x=x, y=(x @ w).argmax(1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")])),
    )
    return tmp_path


def lab(trainer: Mapping[str, Any] | str, **tables: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {**LAB, "training": {**LAB["training"], "trainer": trainer}}
    for key, value in tables.items():
        tree[key] = {**tree[key], **value} if isinstance(tree.get(key), dict) else value
    return tree


def written(home: Path, trainer: Mapping[str, Any] | str, **tables: Any) -> Path:
    path = home / "lab.toml"
    path.write_text(to_toml(parse(lab(trainer, **tables))))
    return path


def direct(folder: Path, experiment: Experiment, *, stop_after: int = 0) -> Path:
    """Run a lab in this process; `stop_after`: the global round after which it is killed, and then
    resumed.
    """

    path = run_direct(folder, experiment, until=stop_after)
    return resumed_run(path) if stop_after else path


FLOWER: Final = {"name": "flower", "client_fn": "app:client_fn", "evaluate_fn": "app:evaluate"}
DRAWS: Final = {"name": "flower", "client_fn": "torched:client_fn", "initial": "torched:initial"}
KINDS: Final[dict[str, Any]] = {
    "numpy": SOFTMAX,
    "state": "others:Counting",
    "flower": FLOWER,
    "torch": DRAWS,
}


@pytest.mark.parametrize("kind", slow(KINDS, but=["flower", "state"]))
def test_a_killed_run_in_one_process_gives_the_same_model(kind: str, home: Path) -> None:
    experiment = parse(lab(KINDS[kind], cloud={"checkpoint_every": 2}))
    whole = direct(home / "whole", experiment)
    killed = direct(home / "killed", experiment, stop_after=3)
    assert tensors(whole) == tensors(killed)
    rows = table(whole / "rounds.csv")
    assert len(rows) == LAB["rounds"] and all(float(row["train_loss"]) > 0 for row in rows)
    assert [bool(row["accuracy"]) for row in rows] == [kind in ("numpy", "flower")] * LAB["rounds"]
    events = [json.loads(line) for line in (whole / "events.jsonl").read_text().splitlines()]
    trained = [event for event in events if event["event"] == "trained"]
    assert len(trained) == 4 * 2 * 2 and all(event["numbers"] for event in trained)
    assert invoke("report", whole).exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flower", "state"])
def test_labs_of_processes_and_of_virtual_time_give_the_model_of_one_process(
    kind: str, home: Path
) -> None:
    scored = {"evaluation": {"at": "devices"}} if kind in ("numpy", "flower") else {}
    path = written(home, KINDS[kind], **scored)
    alone = direct(home / "direct", parse(lab(KINDS[kind], **scored)))
    real = run_lab(path, home / "real")
    simulated = run_lab(path, home / "simulated", flags=["--simulate"])
    assert tensors(real) == tensors(alone) == tensors(simulated)
    assert scores_of(real) == scores_of(alone) == scores_of(simulated)
    replayed = fedstrata("replay", real, "--runs", home / "replayed")
    assert replayed.returncode == 0 and replayed.stdout.endswith("the same model, bit for bit\n"), (
        replayed.stderr
    )


def test_pytorch_in_an_own_trainer_computes_on_one_core() -> None:
    torch.set_num_threads(2)
    seed_generators(1)
    assert torch.get_num_threads() == 1


@pytest.mark.slow
def test_a_lab_of_killed_processes_gives_the_model_of_one_process(home: Path) -> None:
    tree = {
        **lab(KINDS["torch"], topology={"institutions": 0}),
        "rounds": 12,
        "cloud": {"participation": 0.5},
    }
    del tree["institution"]
    path = home / "lab.toml"
    path.write_text(to_toml(parse(tree)))
    alone = direct(home / "direct", parse(tree))
    with broker.start(directory=home) as served, ExitStack() as stack:

        def start(*words: str | Path) -> subprocess.Popen[str]:
            line = command(*words, "--broker", f"{served.host}:{served.port}")
            process = subprocess.Popen(
                line, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        names = [word for i in range(4) for word in ("--name", f"device-{i}")]
        allowed = ["--allow", "torched", "--accelerator", "cpu", "--slots", "1"]
        devices = ["device", *names, *allowed, "--spool", home / "spool"]
        device, cloud = (
            start(*devices),
            start("cloud", path, "--runs", home / "runs", "--format", "json"),
        )
        assert cloud.stdout is not None
        events = map(json.loads, cloud.stdout)
        assert any(
            event.get("global_round") == 3 for event in events if event["event"] == "global_round"
        )
        for process in (device, cloud):
            process.kill()
            process.wait()
        (folder,) = (home / "runs").iterdir()
        start(*devices)
        again = start("cloud", "--resume", folder, "--format", "json")
        again.communicate(timeout=PATIENCE_S)
        assert again.returncode == 0
        assert tensors(folder) == tensors(alone)


def scores_of(run: Path) -> list[dict[str, str]]:
    return [
        {
            key: row[key]
            for key in ("global_round", "node", "test_samples", "test_loss", "test_score")
        }
        for row in table(run / "devices.csv")
    ]


@pytest.mark.parametrize("kind", slow(["numpy", "flower"], but=["flower"]))
def test_devices_score_by_their_trainer(kind: str, home: Path) -> None:
    experiment = parse(lab(KINDS[kind], evaluation={"at": "both"}, cloud={"checkpoint_every": 2}))
    assert (
        parse(experiment.to_json()).digest == experiment.digest
        and experiment.evaluation.data == "own"
    )
    run, killed = (
        direct(home / "whole", experiment),
        direct(home / "killed", experiment, stop_after=3),
    )
    assert (
        tensors(run) == tensors(killed) == tensors(direct(home / "cloud", parse(lab(KINDS[kind]))))
    )
    assert scores_of(run) == scores_of(killed)
    scored = [row for row in table(run / "devices.csv") if row["test_samples"]]
    rows = table(run / "rounds.csv")
    assert len(scored) == 2 * len(rows) and all(
        row["accuracy"] and row["devices_scored"] == "2" for row in rows
    )
    for row in rows:
        each = [one for one in scored if one["global_round"] == row["global_round"]]
        n, score = (
            np.array([float(one[key]) for one in each]) for key in ("test_samples", "test_score")
        )
        assert float(row["devices_score"]) == pytest.approx(score @ n / n.sum(), abs=1e-5)
    model = load_file(run / "model.safetensors")
    for row in scored[-2:]:
        device, found = (
            row["node"].rpartition("/")[2],
            (float(row["test_loss"]), float(row["test_score"])),
        )
        if kind == "flower":
            data = (
                np.random.default_rng(int(device[-1]))
                .normal(size=(10 + int(device[-1]), 4))
                .astype(np.float32)
            )
            took_part = [
                one
                for one in table(run / "devices.csv")
                if device in one["node"] and one["local_rounds"]
            ]
            fits = sum(int(one["local_rounds"]) for one in took_part)
            # its state has these
            wanted = float(np.square(model["0"] - data[:3].mean(0)).mean()), 0.1 * fits
        else:
            tests = np.load(home / "data" / device / "tests.npz")
            logits = tests["x"] @ model["w"] + model["b"]
            losses = np.log(np.exp(logits).sum(1)) - logits[range(len(logits)), tests["y"]]
            wanted = losses.mean(), (logits.argmax(1) == tests["y"]).mean()
        assert found == pytest.approx(wanted, abs=1e-5)
    assert invoke("report", run).exit_code == 0


def test_a_device_scores_its_own_model_after_its_training(home: Path) -> None:
    evaluation = {"at": "devices", "personalised": True}
    run = direct(
        home / "runs", parse(lab(FLOWER, evaluation=evaluation, institution={"participation": 1.0}))
    )
    fits: dict[str, int] = {}
    for row in table(run / "devices.csv"):
        # its state has these
        fits[row["node"]] = fits.get(row["node"], 0) + int(row["local_rounds"])
        assert float(row["personalised_score"]) == pytest.approx(0.1 * fits[row["node"]])
        # with the next task, before it
        assert float(row["test_score"]) == pytest.approx(0.1 * fits[row["node"]])
    assert set(fits.values()) == {8}


def test_a_run_goes_by_the_scores_of_trainers_on_devices(home: Path) -> None:
    trainer = {**FLOWER, "evaluate_fn": None}
    run = direct(
        home / "runs", parse(lab(trainer, evaluation={"at": "devices"}, stop={"target": 0.15}))
    )
    rows = table(run / "rounds.csv")
    assert [row["accuracy"] for row in rows] == [row["devices_score"] for row in rows] and len(
        rows
    ) < LAB["rounds"]


@pytest.mark.parametrize(
    ("trainer", "at", "problem"),
    [
        ("others:Counting", "devices", r"it has no evaluate \(device-0\). Write one"),
        ("others:Counting", "both", "the cloud cannot evaluate with it"),
        (
            {"name": "flower", "client_fn": "app:client_fn"},
            "both",
            "the cloud cannot evaluate with it",
        ),
        (
            {"name": "flower", "client_fn": "torched:client_fn", "initial": "torched:initial"},
            "devices",
            "no evaluate",
        ),
    ],
)
def test_a_trainer_without_evaluate_is_named(
    trainer: Any, at: str, problem: str, home: Path
) -> None:
    with pytest.raises(InvalidExperiment, match=f"^training.trainer.*{problem}"):
        direct(home / "runs", parse(lab(trainer, evaluation={"at": at})))


@pytest.mark.parametrize("at", slow(["cloud", "devices"], but=["devices"]))
def test_a_trainer_begins_with_the_model_of_another_run(at: str, home: Path) -> None:
    whole = direct(home / "whole", parse(lab(SOFTMAX)))
    tables = {"evaluation": {"at": at}, "model": {"initial": str(whole)}}
    run = direct(home / "more", parse(lab(SOFTMAX, **tables)))
    assert json.loads((run / "manifest.json").read_text())["initial"]["model"] == str(whole)
    losses = [float(table(each / "rounds.csv")[0]["loss"]) for each in (whole, run)]
    assert losses[1] < losses[0]
    save_file(
        {"w": np.zeros((8, 3), np.float32), "c": np.zeros(3, np.float32)},
        home / "other.safetensors",
    )
    with pytest.raises(
        InvalidExperiment, match=r"^model\.initial = .*softmax:Softmax: b is missing; c is unknown"
    ):
        direct(
            home / "other", parse(lab(SOFTMAX, model={"initial": str(home / "other.safetensors")}))
        )


def test_a_plain_flower_client_is_a_trainer(home: Path) -> None:
    plain = {**FLOWER, "client_fn": "plain:client_fn"}
    runs = [
        direct(home / name, parse(lab(each, evaluation={"at": "both"})))
        for name, each in (("numpy", FLOWER), ("plain", plain))
    ]
    assert tensors(runs[0]) == tensors(runs[1]) and scores_of(runs[0]) == scores_of(runs[1])
    for client, problem in (
        ("failing_fn", "fit fails: no data"),
        ("unkept_fn", r"context.state\['lock'\] is object"),
    ):
        with pytest.raises(InvalidExperiment, match=f"^training.trainer.client_fn = .*{problem}"):
            direct(home / client, parse(lab({**FLOWER, "client_fn": f"plain:{client}"})))


def test_the_state_of_a_flower_client_is_read_as_it_was_written() -> None:
    draw = np.random.default_rng(1)
    state = {
        "numbers": [1, 2**60, 0.1, -0.0, 1e-310, True, None, "text", b"bytes", (1, [2.5])],
        "array": draw.normal(size=(2, 3)).astype(np.float32),
        "empty": np.zeros((0, 2), np.int8),
        "scalars": {"one": np.float32(0.1), 2: np.float64(0.1), "int": np.int64(7)},
    }
    packed = msgpack.packb(flower_state.packed(state, "state"))
    found = flower_state.unpacked(msgpack.unpackb(packed, strict_map_key=False))
    assert repr(found) == repr(state) and found["array"].tobytes() == state["array"].tobytes()
    assert [type(each) for each in found["scalars"].values()] == [np.float32, np.float64, np.int64]


def test_flowers_records_persist(monkeypatch: pytest.MonkeyPatch) -> None:
    library, records = ModuleType("flwr"), ModuleType("flwr.common")
    monkeypatch.setitem(sys.modules, "flwr", library)
    monkeypatch.setitem(sys.modules, "flwr.common", records)
    exec(RECORDS, records.__dict__)
    given = records.RecordDict(
        model=records.ArrayRecord(w=records.Array("float32", (2,), "numpy.ndarray", b"12345678")),
        counts=records.RecordDict(rounds=[1, 2], share=0.1),
    )
    packed = msgpack.packb(flower_state.packed(dict(given), "context.state"))
    found = records.RecordDict(flower_state.unpacked(msgpack.unpackb(packed)))
    assert (
        found == given
        and type(found["model"]) is records.ArrayRecord
        and found["model"]["w"].shape == (2,)
    )


@pytest.mark.parametrize(
    "packed",
    [
        ["os:system", [["touch called", None]]],
        ["builtins:exec", {"source": "called = 1"}],
        ["subprocess:Popen", {"args": ["touch", "called"]}],
        ["collections:OrderedDict", [["a", 1]]],
        ["flwr.common:Grid", []],  # a class that is no record
        ["flwr.common:run_simulation", {"server_app": None}],  # a function
        ["flwr.common:os", []],
        ["flwr.common:absent", []],
        ["flwr.common:dict", []],  # of another module
        ["list"],
        ["array", b"no file of numpy's"],
        [1, 2],
    ],
)
def test_the_file_of_a_flower_client_calls_nothing_but_flowers_records(
    packed: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, records = ModuleType("flwr"), ModuleType("flwr.common")
    monkeypatch.setitem(sys.modules, "flwr", library)
    monkeypatch.setitem(sys.modules, "flwr.common", records)
    called: list[object] = []
    vars(records).update(
        run_simulation=called.append, os=os, Context=dict, called=called, dict=dict
    )
    exec(
        RECORDS + "class Grid:\n    def __init__(self):\n        called.append(self)\n",
        records.__dict__,
    )
    file = home / "context.state"
    file.write_bytes(msgpack.packb(["dict", [["a", packed]]]))
    trainer = flower.ClientTrainer(parse(lab(FLOWER)))
    trainer.prepare(site(home))
    with pytest.raises(
        InvalidExperiment, match=r"^training.trainer.client_fn = .*context.state cannot be read"
    ):
        trainer.train({"0": np.zeros(4, np.float32), "1": np.array(0)}, task(home))
    assert not called and not (home / "called").exists()


def site(home: Path) -> TrainingSite:
    training = parse(lab(FLOWER)).settings_in(0)
    return TrainingSite(
        node="device-0", place=0, places=4, data=home, seed=1, epochs=2, settings=training
    )


def task(home: Path) -> LocalTask:
    settings = parse(lab(FLOWER)).settings_in(0)
    return LocalTask(
        node="device-0",
        data=home,
        seed=1,
        epochs=2,
        global_round=1,
        local_round=1,
        settings=settings,
        deadline_s=None,
        state=home,
        progress=lambda done, of: None,
    )


def test_a_flower_client_is_made_anew_for_each_task(home: Path) -> None:
    import app

    app.MADE.clear()
    app.ROUNDS.clear()
    rate = {"schedule": {"name": "exponential", "factor": 0.5}}
    run = direct(home / "runs", parse(lab({**FLOWER, "run_config": {"depth": 3}}, training=rate)))
    run_configs = [context.run_config for context in app.MADE]
    assert all((config["depth"], config["local-epochs"]) == (3, 2) for config in run_configs)
    assert {config["learning-rate"] for config in run_configs} == {0.1, 0.05, 0.025, 0.0125}
    configs = [context.node_config for context in app.MADE]
    assert {config["num-partitions"] for config in configs[1:]} >= {4}
    assert {config["partition-id"] for config in configs} == {0, 1, 2, 3}
    assert set(load_file(run / "model.safetensors")) == {"0", "1"} and app.ROUNDS == [1, 2, 3, 4]
    rows = table(run / "devices.csv")
    assert {int(row["samples"]) for row in rows} == {0, 10, 11, 12, 13}  # 0: it did not take part


@pytest.mark.parametrize(("node", "place"), [("device-2", 2), ("device-7", 4 + 7), ("visitor", 4)])
def test_a_device_that_enters_has_a_place_behind_those_of_the_experiment(
    node: str, place: int, home: Path
) -> None:
    training = ArrayTraining(parse(lab("others:Counting")), node=node, accelerator="cpu")
    assert training.prepare().samples == 1 + place


LOSSES: Final = {  # of `Wrong`, where device-0 or every device knows no loss
    "some": "Trained(made, None if self.site.place == 0 else 0.5 + self.site.place, 1)",
    "none": "Trained(made, None, 1)",
}


@pytest.mark.parametrize("known", slow(LOSSES, but=["some"]))
def test_an_unknown_loss_stays_unknown(known: str, home: Path) -> None:
    tables = {"topology": {"institutions": 2, "devices": 4}, "institution": {"participation": 1.0}}
    run = direct(
        home / "runs", parse(lab({"name": "others:Wrong", "how": LOSSES[known]}, **tables))
    )
    counts = np.array([1, 2, 3, 4])  # samples of the devices
    for row in table(run / "devices.csv"):
        place = int(row["node"][-1])
        assert row["loss"] == ("" if known == "none" or place == 0 else str(0.5 + place))
    above = np.array([1.5, (2.5 * 3 + 3.5 * 4) / 7])  # institution-0 knows that of device-1
    wanted = (
        ""
        if known == "none"
        else f"{above @ [counts[:2].sum(), counts[2:].sum()] / counts.sum():.6g}"
    )
    assert [row["train_loss"] for row in table(run / "rounds.csv")] == [wanted] * LAB["rounds"]
    assert invoke("report", run).exit_code == 0


def test_a_flower_client_may_know_no_loss(home: Path) -> None:
    run = direct(home / "runs", parse(lab(FLOWER, training={"by_round": {"silent": {"3": 1.0}}})))
    assert [bool(row["train_loss"]) for row in table(run / "rounds.csv")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"cloud": {"aggregation": "fedcda"}}, "cloud.aggregation.name = 'fedcda'"),
        ({"institution": {"selection": "oort"}}, "institution.selection.name = 'oort'"),
        (
            {"cloud": {"selection": "power_of_choice", "participation": 0.5}},
            "cloud.selection.name = 'power_of_choice'",
        ),
    ],
)
def test_what_compares_losses_needs_them(tables: dict[str, Any], key: str, home: Path) -> None:
    trainer = {"name": "others:Wrong", "how": LOSSES["none"]}
    with pytest.raises(
        InvalidExperiment,
        match=(
            rf"train returns no loss \(device-\d\), in .*others.py:\d+\). Return one: {key} "
            r"compares losses"
        ),
    ):
        direct(home / "runs", parse(lab(trainer, **tables)))


def test_a_result_without_a_loss_is_refused_where_losses_are_compared() -> None:
    manifest = Manifest("0123456789abcdef", 1024, 1024, b"d" * 8, "fp32", "layout")
    result = Result(Key(0, 0, 0), manifest, None, Work(5, None, 1, 1, 1.0, 0.0, 0.0), 1, (), "")
    for selection in ("fraction", "oort"):
        limits = limits_below(
            parse(lab("m:T", institution={"selection": selection})), "institution-0"
        )["device-0"]
        with (
            pytest.raises(RefusedModel, match="no training loss")
            if selection == "oort"
            else nullcontext()
        ):
            check_report(result, limits=limits)


def test_the_settings_of_a_round_reach_the_trainer(home: Path) -> None:
    by_round = {"mu": {"2": 0.25, "4": 0.5}}
    run = direct(home / "runs", parse(lab("others:Counting", training={"by_round": by_round})))
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    found = {
        event["global_round"]: event["numbers"]["mu"]
        for event in events
        if event["event"] == "trained"
    }
    assert found == {1: -1.0, 2: 0.25, 3: 0.25, 4: 0.5}


def test_stop_needs_evaluations(home: Path) -> None:
    with pytest.raises(
        InvalidExperiment, match=r"stop\.patience = 2: the trainer has no `evaluate`"
    ):
        direct(home / "runs", parse(lab("others:Counting", stop={"patience": 2})))


@pytest.mark.parametrize("how", WRONG)
def test_what_a_trainer_must_not_return_is_named(how: str, home: Path) -> None:
    with pytest.raises(
        InvalidExperiment, match=f"^training.trainer.name = 'others:Wrong': .*({WRONG[how]})"
    ):
        direct(home / "runs", parse(lab({"name": "others:Wrong", "how": how})))


@pytest.mark.slow
def test_a_lab_of_processes_ends_with_the_error_of_a_trainer(home: Path) -> None:
    path = written(home, {"name": "others:Wrong", "how": "sys.exit(3)"})
    done = fedstrata("run", path, "--runs", home / "runs")
    assert done.returncode == 4 and re.search(
        r"training.trainer.name = 'others:Wrong': fails on device-\d with SystemExit: 3",
        done.stderr,
    )


def test_without_a_trainer_its_keys_are_absent() -> None:
    assert not {"trainer", "by_round"} & json.loads(parse({}).to_json())["training"].keys()


@pytest.mark.parametrize("trainer", [SOFTMAX, FLOWER])
def test_an_experiment_with_a_trainer_is_read_again(trainer: Mapping[str, Any]) -> None:
    experiment = parse(lab(trainer))
    assert parse(experiment.to_json()).digest == experiment.digest and experiment.data.private
    assert experiment.code_at("device-0") == dict(experiment.training.trainer.code)


@pytest.mark.parametrize(
    ("name", "keywords", "wrong"),
    [
        ("softmax:Softmax", [f"features={FEATURES}", f"classes={CLASSES}"], None),
        ("others:Counting", [], None),
        ("others:Forgetful", [], "killed and resumed"),
        ("others:Drawing", [], "the same twice"),
        ("others:Wrong", ["how=\"made['w'] * np.nan\""], "runs"),
    ],
)
def test_check_examines_a_trainer(
    name: str, keywords: list[str], wrong: str | None, home: Path
) -> None:
    words = [word for each in keywords for word in ("--set", each)]
    done = invoke("check", name, *words, "--data", "data/device-0", "--format", "json")
    found = {one["item"]: one["right"] for one in map(json.loads, done.stdout.splitlines())}
    assert done.exit_code == (0 if wrong is None else 4 if wrong == "runs" else 1), done.output
    assert (
        wrong is None
        and all(found.values())
        and len(found) == 7 + ("the same score twice" in found)
    ) or (wrong is not None and not found[wrong])


def test_a_plan_counts_the_samples_of_devices(home: Path) -> None:
    work = workload.workload(parse(lab(SOFTMAX)))
    assert work.samples == {f"device-{i}": 45 + 5 * i for i in range(4)}
    memory = memory_of(work.experiment, work.layout, data_bytes=0, devices=4)
    assert memory["device"] < 100e6 and memory["evaluator"] < 100e6


# Without PyTorch

BOTH: Final = ["torch", "torchvision", "scipy"]


@pytest.mark.usefixtures("cold")
@pytest.mark.slow
def test_labs_without_pytorch(home: Path) -> None:
    (home / "site").mkdir()
    (home / "site" / "sitecustomize.py").write_text(SITE)
    written(home, SOFTMAX)
    found = []
    for flags in ("--direct", "", "--simulate"):
        done = bare(home, "run", "lab.toml", "--format", "json", *flags.split(), lacks=BOTH)
        assert done.returncode == 0, done.stderr
        found.append(tensors(folder_in(done.stdout)))
    assert len(set(found)) == 1
    assert bare(home, "plan", "lab.toml", lacks=BOTH).returncode == 0
    other = bare(home, "run", "demo", lacks=BOTH)
    assert other.returncode == 4 and "package = 'torch'" in other.stderr


def test_a_pool_asks_no_library_before_an_experiment_needs_it(home: Path) -> None:
    program = """
import asyncio, sys, tomllib
from pathlib import Path
from fedstrata.common.experiment.reading import parse
from fedstrata.device.pool.pool import Pool
async def main():
    async with Pool(accelerator="cpu", slots=1, devices=1) as pool:
        member = pool.member("device-0")
        prepared = await member.prepare(parse(tomllib.loads(Path("lab.toml").read_text())))
        print(prepared.samples, pool.hardware, "torch" in sys.modules)
asyncio.run(main())
"""
    written(home, SOFTMAX)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.split("\n")[0] == "45 1 x cpu False", done.stderr
