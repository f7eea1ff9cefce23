"""Small apps of Flower's messages, with generated data: of numpy, scikit-learn and PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

PROJECT: Final = """\
[project]
name = "app"
version = "1.0.0"

[tool.flwr.app]
publisher = "nobody"

[tool.flwr.app.components]
serverapp = "{package}.server:app"
clientapp = "{package}.client:app"

[tool.flwr.app.config]
num-server-rounds = 2
local-epochs = 2
learning-rate = 0.1
model.features = 4
"""
SERVER: Final = """\
import time

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg, FedProx

from {package} import task

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    while len(list(grid.get_node_ids())) < 4:
        time.sleep(0.1)
    strategy = FedProx(proximal_mu=0.25, fraction_evaluate=0.5)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(task.first(config["model.features"])),
        train_config=ConfigRecord({{"lr": config["learning-rate"]}}),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=evaluate,
    )
    raise AssertionError("a strategy does not return")


def evaluate(server_round, arrays):
    loss, score = task.scores(arrays, *task.data(99))
    return MetricRecord({{"loss": loss, "accuracy": score}})
"""
CLIENT: Final = """\
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from {package} import task

app = ClientApp()
SEEN = []


@app.train()
def train(message, context):
    place, config = context.node_config["partition-id"], message.content["config"]
    SEEN.append((place, dict(config), dict(context.run_config), dict(context.node_config)))
    kept = context.state.setdefault("kept", ConfigRecord({{"rounds": []}}))
    kept["rounds"] = [*kept["rounds"], config["server-round"]]
    count = sum(kept["rounds"])  # a model that depends on the state
    x, y = task.data(place)
    epochs = context.run_config["local-epochs"]
    arrays, loss = task.trained(message.content["arrays"], x, y, config["lr"] / count, epochs)
    context.state["last"] = arrays
    metrics = MetricRecord({{"num-examples": len(y), "train_loss": loss, "count": count}})
    return Message(RecordDict({{"arrays": arrays, "metrics": metrics}}), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    x, y = task.data(context.node_config["partition-id"])
    loss, score = task.scores(message.content["arrays"], x, y)
    metrics = MetricRecord({{"num-examples": len(y), "eval_loss": loss, "eval_acc": score}})
    return Message(RecordDict({{"metrics": metrics}}), reply_to=message)
"""
DATA: Final = """\
import numpy as np
from flwr.app import ArrayRecord


def data(place):
    draw = np.random.default_rng(place)
    y = np.arange(30 + place) % 3
    return (draw.normal(size=(len(y), 4)) + y[:, None]).astype(np.float32), y


"""
TASKS: Final = {
    "numpy": """\
def first(features):
    return [np.zeros((features, 3), np.float32), np.array(0)]


def _p(w, x):
    e = np.exp(x @ w)
    return e / e.sum(1, keepdims=True)


def trained(record, x, y, lr, epochs):
    w, steps = record.to_numpy_ndarrays()
    assert w.dtype == np.float32 and steps.dtype == np.int64, (w.dtype, steps.dtype)
    for _ in range(epochs):
        w = w - np.float32(lr) * x.T @ (_p(w, x) - np.eye(3, dtype=np.float32)[y]) / len(y)
    noise = np.random.rand(*w.shape).astype(np.float32) * np.float32(1e-3)
    return ArrayRecord([w + noise, np.asarray(steps + epochs)]), scores(ArrayRecord([w, steps]), x, y)[0]


def scores(record, x, y):
    w, _ = record.to_numpy_ndarrays()
    p = _p(w, x)
    return float(-np.log(p[range(len(y)), y]).mean()), float((p.argmax(1) == y).mean())
""",
    "sklearn": """\
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss


def _model(arrays):
    found = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.1)
    found.classes_ = np.arange(3)
    found.coef_, found.intercept_ = arrays
    return found


def first(features):
    return [np.zeros((3, features)), np.zeros(3)]


def trained(record, x, y, lr, epochs):
    model = _model(record.to_numpy_ndarrays()).set_params(eta0=lr)
    for _ in range(epochs):
        model.partial_fit(x.astype(float), y, classes=np.arange(3))
    arrays = ArrayRecord([model.coef_, model.intercept_])
    return arrays, scores(arrays, x, y)[0]


def scores(record, x, y):
    model = _model(record.to_numpy_ndarrays())
    return log_loss(y, model.predict_proba(x.astype(float)), labels=[0, 1, 2]), model.score(x.astype(float), y)
""",
    "torch": """\
import torch
from torch import nn


def _net(features):
    return nn.Sequential(nn.Linear(features, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def first(features):
    return _net(features).state_dict()


def trained(record, x, y, lr, epochs):
    net = _net(4)
    net.load_state_dict(record.to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for _ in range(epochs):
        for some in torch.randperm(len(y)).chunk(3):
            loss = nn.functional.cross_entropy(net(torch.tensor(x)[some]), torch.tensor(y)[some])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return ArrayRecord(net.state_dict()), loss.item()


def scores(record, x, y):
    net = _net(4).eval()
    net.load_state_dict(record.to_torch_state_dict())
    with torch.no_grad():
        logits = net(torch.tensor(x))
    loss = nn.functional.cross_entropy(logits, torch.tensor(y))
    return loss.item(), float((logits.argmax(1) == torch.tensor(y)).float().mean())
""",
}


def write_app(folder: Path, kind: str) -> None:
    """Write an app into a folder, its package being `KIND_app`."""
    package = f"{kind}_app"
    (folder / package).mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT.format(package=package))
    texts = {
        "__init__": "",
        "server": SERVER.format(package=package),
        "client": CLIENT.format(package=package),
    }
    for name, text in {**texts, "task": DATA + TASKS[kind]}.items():
        (folder / package / f"{name}.py").write_text(text)
