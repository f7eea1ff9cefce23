"""`make bench NAME=convex`: FedCross's O(1/t) on a convex loss, by global rounds of `convex`.

    python -m tests.bench.convex [--seeds 3]

The loss is that of all devices, the mean cross-entropy over the training samples plus mu / 2
||w||^2. The least one is found by L-BFGS in float64 on all samples. The theorem of FedCross's paper
bounds the gap by a constant / (t + lambda): with r rounds and lambda = 50 of them, gap * (r + 50)
is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.experiment.reading import parse, read
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import datasets
from tests.bench.running import Table, folder, run
from tests.helpers.commands import EXPERIMENTS
from tests.helpers.direct import direct_run

ROUNDS: Final = (50, 100, 200, 400, 800)
LAMBDA: Final = 50
EXPERIMENT: Final = EXPERIMENTS / "convex.toml"


def convex(**keys: object) -> Experiment:
    """Return the experiment with other values of some keys."""
    return parse({**read(EXPERIMENT, ()), **keys})


def loss_on(experiment: Experiment) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of weights [10, 64] and biases [10] in float64."""
    data = datasets.load(experiment.data)
    inputs = data.normaliser()(data.train_images).flatten(1).double()

    def loss(weights: Tensor, biases: Tensor) -> Tensor:
        squares = weights.square().sum() + biases.square().sum()
        decay = experiment.training.weight_decay / 2 * squares
        return cross_entropy(inputs @ weights.T + biases, data.train_labels) + decay

    return loss


def least(loss: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Return the least loss."""
    found = [
        torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in ((10, 64), (10,))
    ]
    optimiser = torch.optim.LBFGS(
        found,
        max_iter=2000,
        tolerance_grad=1e-10,
        tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = loss(*found)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    return float(loss(*found).detach())


def gaps(
    root: Path, *, seed: int, constant: bool = False, rounds: Sequence[int] = ROUNDS
) -> list[float]:
    """Return the gap of the global model, the mean of the uploads, after `rounds`, which are
    checkpoints.

    `constant`: with a constant rate, a control.
    """
    training = convex().training.model_dump()
    if constant:
        training["schedule"] = {"name": "constant"}
    experiment = convex(seed=seed, training=training, rounds=rounds[-1])
    found: dict[int, float] = {}
    loss = loss_on(experiment)
    lowest = least(loss)
    made = RunFolder.create(root, experiment, direct=True)

    def look(*_: object) -> None:
        for path in made.checkpoints.glob("round-*.safetensors"):
            if (done := int(path.stem.partition("-")[2])) in rounds and done not in found:
                state = load_file(path)
                with torch.no_grad():
                    value = loss(state["fc.weight"].double(), state["fc.bias"].double())
                found[done] = float(value) - lowest

    look(direct_run(made, observe=look))
    return [found[each] for each in rounds]


def main(*, seeds: int = 3) -> None:
    """Print the table."""
    table = Table("global rounds r", "gap", "gap * (r + 50)", "with a constant rate")
    kinds = []
    with folder() as home:
        for constant in (False, True):
            each = [gaps(home, seed=seed + 1, constant=constant) for seed in range(seeds)]
            kinds.append(np.array(each))
    for place, count in enumerate(ROUNDS):
        cells = []
        for kind in kinds:
            scaled = kind[:, place] * (count + LAMBDA)
            cells.append(f"{scaled.mean():.2f} \u00b1 {scaled.std(ddof=1):.2f}")
        table.add(count, f"{kinds[0][:, place].mean():.1e}", *cells)


if __name__ == "__main__":
    run(main)
