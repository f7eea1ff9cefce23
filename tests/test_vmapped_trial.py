"""A model that would be vmapped wrongly is found out before it is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedstrata.common.experiment.training import TrainingSettings
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.nets import Dropout
from fedstrata.device.training.objectives.objective import Minibatch, Objective
from fedstrata.device.training.sgd import LocalSteps
from fedstrata.device.vmapped import calibration
from fedstrata.device.vmapped import models as vmapped_models
from fedstrata.device.vmapped.calibration import problem_of
from fedstrata.device.vmapped.models import VmappedModels
from tests.helpers.examples import slow
from tests.helpers.vmapped import CASES, RAGGED, Case, mlp, objective_trial, quick, settings_of, text_case

pytestmark = pytest.mark.usefixtures("one_thread")


def test_layers_that_draw_from_torchs_own_generator_cannot_be_vmapped() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 10))
    with pytest.raises(RuntimeError, match="random"):
        Case(module, (1, 8, 8), dtype=torch.float32).train()


class _Centred(nn.Module):
    """Depends on the others of its batch in a way that no layer's type reports."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        logits: Tensor = self.fc(flat - flat.mean(0))
        return logits


class _SharedMask(nn.Module):
    """Drops the same values for all its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)
        self.drop = Dropout()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x.flatten(1) * self.drop(torch.ones(1, 64, dtype=x.dtype)))
        return logits


class _Single(nn.Module):
    """Computes as it should in float64, and otherwise if batched in float32."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x.flatten(1))
        if logits.dtype == torch.float64 or not torch._C._functorch.is_batchedtensor(logits):
            return logits
        if self.fault == "raise":
            raise RuntimeError("not here\nand so on")
        return 2 * logits


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        (mlp(Inputs((1, 8, 8), 10)), ""),
        (nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 10)), "random"),
        (nn.Sequential(nn.Flatten(), Dropout(), nn.Linear(64, 10)), ""),
        (_SharedMask(), "dropout of values that all devices share"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10, momentum=None)), "RuntimeError"),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 10)), ""),
        (_Centred(), "vmapped steps in float64 that differ by"),
        (_Single("raise"), "RuntimeError in fp32: not here"),
        (_Single("double"), "vmapped steps in fp32 that differ by"),
    ],
)
def test_a_model_that_would_be_vmapped_wrongly_is_found_out(module: nn.Module, problem: str) -> None:
    case = Case(module, (1, 8, 8), dtype=torch.float32)
    found = problem_of(case.recipe, case.turns)
    assert problem in found and bool(problem) == bool(found)
    assert case.ended == [None] * 5 and not any(case.progress)


def test_the_precision_that_will_run_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs_of, seen = VmappedModels._outputs, []

    def noted(state: VmappedModels, *rest: Any) -> Any:
        mixed = torch.is_autocast_enabled("cpu")
        (logits,), moved = outputs_of(state, *rest)
        seen.append((logits.dtype, state._recipe.training.precision, mixed))
        return (logits,), moved

    monkeypatch.setattr(VmappedModels, "_outputs", noted)
    training = TrainingSettings(batch_size=32, learning_rate=0.05, precision="bf16")
    case = Case(mlp(Inputs((1, 8, 8), 10)), (1, 8, 8), training=training, dtype=torch.float32)
    assert problem_of(case.recipe, case.turns) == ""
    steps = calibration.TRIAL_STEPS
    assert seen == [(torch.float64, "fp32", False)] * steps + [(torch.float32, "bf16", False)] * steps


def with_proximal_term(weights: Sequence[Tensor], mu: float) -> list[Any]:
    """Add the gradient of mu / 2 |w - w0|^2 to that of each weight, w0 its present value; return the hooks."""

    def add(weight: Tensor) -> Any:
        received = weight.detach().clone()
        return weight.register_hook(lambda gradient: gradient + mu * (weight.detach() - received))

    return [add(weight) for weight in weights]


@pytest.mark.parametrize("name", slow(["mlp", "lenet5", "resnet20"], but=["mlp", "lenet5"]))
def test_a_term_that_only_one_path_has_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FedProx's term is zero at the received parameters, so a first step does not show it."""
    case = CASES[name]()
    case = Case(case.module.float(), case.shape, case.loads[:2], case.training, torch.float32)
    made = calibration.LocalSteps
    hooks: list[Any] = []

    def proximal(forward: Any, weights: Sequence[Tensor], **settings: Any) -> LocalSteps:
        while hooks:
            hooks.pop().remove()
        hooks.extend(with_proximal_term(weights, 1e-3))
        return made(forward, weights, **settings)

    assert problem_of(case.recipe, case.turns) == ""
    with monkeypatch.context() as patch:
        patch.setattr(calibration, "LocalSteps", proximal)
        assert "vmapped steps in float64 that differ by" in problem_of(case.recipe, case.turns)
        patch.setattr(calibration, "TRIAL_STEPS", 1)
        assert problem_of(case.recipe, case.turns) == ""


def plain_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vmapped_models, "objective_of", lambda _: Objective())


def received_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the objective the present weights as the received ones: its term is zero, without an error."""
    start = VmappedModels.__init__

    def moving(state: VmappedModels, *given: Any) -> None:
        start(state, *given)
        state._received = state._weights

    monkeypatch.setattr(VmappedModels, "__init__", moving)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("objective", "ignore"),
    [
        ({"name": "fedprox", "mu": 1e-3}, plain_objective),
        ({"name": "fedprox", "mu": 1e-3}, received_that_moves),
        ({"name": "fedsam", "rho": 1e-3}, plain_objective),
    ],
)
def test_an_objective_that_vmapped_steps_ignore_is_found_out(
    objective: dict[str, Any],
    ignore: Callable[[pytest.MonkeyPatch], None],
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = settings_of(weight_decay=0.01, objective=objective, precision=precision)
    case = Case(mlp(Inputs((1, 8, 8), 10)), (1, 8, 8), RAGGED[:2], training, torch.float32)
    assert problem_of(case.recipe, case.turns) == ""
    ignore(monkeypatch)
    assert "vmapped steps in float64 that differ by" in problem_of(case.recipe, case.turns)


class Mixed(Objective):
    """One loss for all models of a vmapped step."""

    def losses(self, batch: Minibatch, logits: Tensor) -> Tensor:
        return 2 * super().losses(batch, logits).mean()


def test_an_objective_that_mixes_the_models_of_a_step_is_found_out() -> None:
    settings = settings_of(objective={"name": f"{__name__}:Mixed"})
    assert "vmapped steps in float64 that differ by" in problem_of(*objective_trial(settings))


def test_momentum_that_only_one_path_has_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    case, made = quick(), calibration.LocalSteps

    def plain(*given: Any, training: TrainingSettings, **settings: Any) -> LocalSteps:
        return made(*given, training=training.model_copy(update={"momentum": 0.0}), **settings)

    monkeypatch.setattr(calibration, "LocalSteps", plain)
    assert "vmapped steps in float64 that differ by" in problem_of(case.recipe, case.turns)


def test_both_paths_take_the_objective_of_one_step_function(monkeypatch: pytest.MonkeyPatch) -> None:
    losses_of = Objective.losses
    case, plain = CASES["nesterov, clipped"](), CASES["nesterov, clipped"]()
    monkeypatch.setattr(Objective, "losses", lambda *batch: 0.1 * losses_of(*batch))
    states = case.states(monkeypatch)
    own = [case.alone(k)[0] for k in range(len(states))]
    monkeypatch.setattr(Objective, "losses", losses_of)
    for k, state in enumerate(states):
        for entry, tensor in state.items():
            torch.testing.assert_close(tensor, own[k][entry], rtol=0, atol=1e-10)
        assert not torch.allclose(state["1.weight"], plain.alone(k)[0]["1.weight"], rtol=0, atol=1e-3)


def test_what_vmap_lacks_is_found_out_and_an_lstm_is_not_among_it() -> None:
    lstm = text_case("char_lstm", RAGGED[:2], torch.float32)
    assert problem_of(lstm.recipe, lstm.turns) == ""
    lstm.module.lstm = nn.LSTM(8, 128, num_layers=2, batch_first=True, bidirectional=True)
    both = Case(lstm.module, (6,), RAGGED[:2], dtype=torch.float32, tokens=20)
    assert "lstm" in problem_of(both.recipe, both.turns)


def test_trying_leaves_the_turns_as_they_were() -> None:
    case = quick()
    assert problem_of(case.recipe, case.turns) == ""
    for k, how in enumerate(case.train()):
        wanted = case.alone(k)[0]
        for entry, view in case.layout.views(how.row).items():
            np.testing.assert_allclose(view, wanted[entry], rtol=0, atol=1e-5)
