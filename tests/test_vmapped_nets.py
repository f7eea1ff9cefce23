"""All nets that ship can be vmapped: their steps are those of a device alone; and the comparison
finds a difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from fedstrata.common.learning import nets
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.nets import ARCHITECTURES
from fedstrata.device.training.objectives.objective import Objective
from fedstrata.device.vmapped import stacked_models as vmapped_models
from fedstrata.device.vmapped.schedule import Load
from tests.helpers import vmapped_steps
from tests.helpers.examples import slow
from tests.helpers.vmapped import RAGGED, Case, mlp, of, settings_of, text_case
from tests.helpers.vmapped_steps import problem_of

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS: Final = ("char_lstm", "sent_lstm")
SHAPES: Final = {  # of nets that do not take images of 3 x 32 x 32
    **dict.fromkeys(("linear_digits", "mlp_digits", "cnn_digits"), (1, 8, 8)),
    **dict.fromkeys(
        ("lenet5", "cnn_fedavg", "cnn_fedavg_padded", "cnn_femnist", "vgg_femnist"), (1, 28, 28)
    ),
    "cnn_motions": (6, 1, 128),
}
SMALL: Final = (
    "linear_digits",
    "mlp_digits",
    "cnn_digits",
    "lenet5",
    "cnn_motions",
    "char_lstm",
    "sent_lstm",
)
LOADS: Final = (Load(2, 1), Load(2, 1))


@pytest.mark.parametrize("name", slow(ARCHITECTURES, but=SMALL))
def test_each_net_that_ships_takes_the_steps_of_a_device_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VGG-16 with narrow linear layers: of its own, 90 % of 134 million parameters, each step takes
    seconds.
    """
    monkeypatch.setattr(nets, "_VGG_HIDDEN", 64)
    shape = SHAPES.get(name, (3, 32, 32))
    if name in TEXTS:
        case = text_case(name, LOADS, torch.float32)
    else:
        case = Case(of(name, shape), shape, LOADS, dtype=torch.float32)
    assert problem_of(case.recipe, case.turns) == ""
    assert case.ended == [None] * 2 and not any(case.progress)


class _Centred(nn.Module):
    """Depends on the others of its batch, of which padding is one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        logits: Tensor = self.fc(flat - flat.mean(0))
        return logits


def plain_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vmapped_models, "objective_of", lambda _: Objective())


def no_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    made = vmapped_steps.LocalSteps

    def plain(*given: Any, training: Any, **settings: Any) -> Any:
        return made(*given, training=training.model_copy(update={"momentum": 0.0}), **settings)

    monkeypatch.setattr(vmapped_steps, "LocalSteps", plain)


@pytest.mark.parametrize(
    ("objective", "ignore"),
    [
        ({"name": "fedprox", "mu": 1e-3}, plain_objective),
        ({"name": "fedsam", "rho": 1e-3}, plain_objective),
        ({"name": "cross_entropy"}, no_momentum),
    ],
)
def test_a_term_that_one_path_lacks_is_found(
    objective: Any, ignore: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = settings_of(weight_decay=0.01, objective=objective)
    case = Case(mlp(Inputs((1, 8, 8), 10)), (1, 8, 8), RAGGED[:2], training, torch.float32)
    assert problem_of(case.recipe, case.turns) == ""
    ignore(monkeypatch)
    assert "vmapped steps in float64 that differ by" in problem_of(case.recipe, case.turns)


def test_samples_that_depend_on_others_are_found() -> None:
    case = Case(_Centred(), (1, 8, 8), dtype=torch.float32)
    assert "vmapped steps in float64 that differ by" in problem_of(case.recipe, case.turns)
