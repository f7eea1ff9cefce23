"""`make bench NAME=plain_cifar`: FedAvg and FedCross on CIFAR-10 against a plain PyTorch loop.

Cells of FedCross's Table II (CNN, beta 0.1, two layers: 100 devices, ten in a round), for some
global rounds. The loop is written from the papers alone: its own reader of CIFAR's pickles, its own
net, torch.optim.SGD, the means of the uploads in float64. What is random comes from the run: the
initial model, the split, which devices take part, who gets which model, the order of the samples.
Printed: how far the final models are apart, and how far they moved.

Training enlarges the last bit: two plain loops that differ only in how they round the pixels, x /
255 or x * (1 / 255), are 1e-6 apart after the 155 steps of one device, and 1e-3 after two global
rounds. So the loop rounds as fedstrata does: pixels as x * factor + offset, convolutions in
channels_last, PyTorch's fused SGD, mixtures of two in float32.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import datasets, models
from fedstrata.common.randomness import Purpose, generator
from fedstrata.deploy.sweeps.grid import load
from tests.bench.running import Clock, folder, run
from tests.helpers.commands import EXPERIMENTS, table
from tests.helpers.direct import run_direct

State: TypeAlias = dict[str, Tensor]

MOST: Final = 1e-6  # that two models may be apart
METHODS: Final = ("FedAvg", "FedCross")


def net() -> nn.Module:
    """Return the CNN of FedCross's code for CIFAR, its two convolutions with pooling and three
    linear layers.
    """
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(3, 6, 5),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(6, 16, 5),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(2),
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(400, 120),
        "relu3": nn.ReLU(),
        "fc2": nn.Linear(120, 84),
        "relu4": nn.ReLU(),
        "fc3": nn.Linear(84, 10),
    }
    found = nn.Sequential()
    for name, layer in layers.items():
        found.add_module(name, layer)
    return found


def read(root: Path) -> tuple[Tensor, Tensor]:
    """Return CIFAR-10's training images, float32 in -1 to 1, and labels."""
    images, labels = [], []
    for number in range(1, 6):
        batch: Any = pickle.loads(
            (root / "cifar-10-batches-py" / f"data_batch_{number}").read_bytes()
        )
        images.append(np.asarray(batch["data"]).reshape(-1, 3, 32, 32))
        labels.append(np.asarray(batch["labels"], np.int64))
    pixels = torch.from_numpy(np.concatenate(images)).float()
    factor, offset = np.float32(1 / 255 / 0.5), np.float32(-0.5 / 0.5)
    return pixels.mul_(float(factor)).add_(float(offset)), torch.from_numpy(np.concatenate(labels))


def trained(
    start: State, data: tuple[Tensor, Tensor], mine: Any, lab: Experiment, node: str, r: int
) -> State:
    """Return what a device makes of a model in round r."""
    module = net().to(memory_format=torch.channels_last)
    module.load_state_dict(start)
    settings = lab.training
    optimiser = torch.optim.SGD(
        module.parameters(), settings.learning_rate, settings.momentum, fused=True
    )
    loss = nn.CrossEntropyLoss()
    order = generator(lab.seed, Purpose.BATCHES, node, r)
    for _ in range(settings.epochs):
        places = torch.from_numpy(mine[order.permutation(len(mine))])
        for some in places.split(settings.batch_size):  # type: ignore[no-untyped-call]
            optimiser.zero_grad()
            loss(
                module(data[0][some].contiguous(memory_format=torch.channels_last)), data[1][some]
            ).backward()
            optimiser.step()
    return {name: value.detach() for name, value in module.state_dict().items()}


def mean(states: list[State], weights: list[float]) -> State:
    """Return the weighted mean of models, summed in float64."""
    found = {}
    for name in states[0]:
        parts = [
            weight * state[name].double() for weight, state in zip(weights, states, strict=True)
        ]
        found[name] = torch.stack(parts).sum(0).float()
    return found


def crossed(states: list[State], alpha: float) -> list[State]:
    """Return FedCross's next models: each with the upload that is the least similar to it, by the
    cosine.
    """
    flat = torch.stack(
        [torch.cat([value.flatten() for value in state.values()]) for state in states]
    ).double()
    unit = flat / flat.norm(dim=1, keepdim=True)
    cosines = unit @ unit.T
    cosines.fill_diagonal_(torch.inf)
    partners = cosines.argmin(1).tolist()
    return [mixed(states, {k: alpha, partner: 1 - alpha}) for k, partner in enumerate(partners)]


def mixed(states: list[State], weights: dict[int, float]) -> State:
    """Return the weighted sum of two models, in float32, in the order of the models."""
    first, second = sorted(weights)
    one, other = torch.tensor(weights[first]), torch.tensor(weights[second])
    return {
        name: value * one + states[second][name] * other for name, value in states[first].items()
    }


def plain(lab: Experiment, run: Path, data: tuple[Tensor, Tensor]) -> tuple[State, State]:
    """Return the model of a plain loop over the rounds of a run, and the initial one."""
    parts = np.load(run / "partition.npz")
    made = models.of(lab, inputs=datasets.load(lab.data).inputs)
    first = {name: value.clone() for name, value in made.state_dict().items()}
    rule = lab.tiers[0].aggregation
    crosses = rule.name == "fedcross"
    copies = [first]
    for r, row in enumerate(table(run / "rounds.csv")):
        chosen = [name for name in lab.tree.devices if row[f"epochs_{name}"]]
        order = generator(lab.seed, Purpose.DISPATCH, "cloud", r).permutation(len(chosen))
        nodes = [chosen[place] for place in order] if crosses else chosen
        starts = copies if len(copies) > 1 else copies * len(nodes)
        uploads = [
            trained(start, data, parts[name], lab, name, r)
            for start, name in zip(starts, nodes, strict=True)
        ]
        if crosses:
            copies = crossed(uploads, rule.model_dump()["alpha"])
            result = mean(uploads, [1 / len(uploads)] * len(uploads))
        else:
            samples = [len(parts[name]) for name in nodes]
            result = mean(uploads, [count / sum(samples) for count in samples])
            copies = [result]
    return result, first


def apart(one: State, other: State) -> float:
    """Return the largest difference of two models."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def main(
    *, root: Annotated[Path, "the folder of data sets"] = Path("data"), rounds: int = 20
) -> bool:
    """Compare both methods; return whether a model is not the loop's."""
    torch.set_num_threads(1)
    data = read(root)
    grid = load(EXPERIMENTS / "papers" / "fedcross-table2.toml")
    differences = []
    for method in METHODS:
        values = {"model": "CNN", "data": "CIFAR-10", "split": "beta 0.1", "method": method}
        lab = next(each for each in grid.cells if each.values == values).experiments[1]
        images = lab.data.model_copy(update={"root": str(root)})
        lab = lab.model_copy(update={"rounds": rounds, "data": images})
        with folder() as home:
            with Clock() as ours:
                path = run_direct(home, lab)
            with Clock() as loop:
                expected, first = plain(lab, path, data)
            found = load_file(path / "model.safetensors")
        differences.append(apart(found, expected))
        print(
            f"{method}, {rounds} rounds: largest difference {differences[-1]:.2g}, moved by "
            f"{apart(found, first):.2g}; CPU seconds {ours.cpu_s:.0f}, plain {loop.cpu_s:.0f}",
            flush=True,
        )
    return max(differences) > MOST


if __name__ == "__main__":
    run(main)
