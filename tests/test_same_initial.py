"""Devices that begin with initial models of their own: a plain loop, common steps, kills, and what
it is for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedstrata.common.accounting.work import TrainingPath
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import datasets, models
from fedstrata.common.learning.evaluation import ModelTester
from fedstrata.common.learning.nets import draw_default
from fedstrata.common.randomness import Purpose, torch_seed
from fedstrata.deploy.local.replay import replayed
from fedstrata.deploy.results.run import Run
from fedstrata.device.training import batches
from tests.helpers.commands import tensors
from tests.helpers.plain import trained_together
from tests.helpers.real_workload import RealWorkload
from tests.helpers.scenarios import KilledLab
from tests.test_parts import CPU, mean, one_round, run_direct

LAB: Final[dict[str, Any]] = {
    "rounds": 2,
    "topology": {"institutions": 0, "devices": 6},
    "data": {"partition": "dirichlet", "concentration": 0.5},
    "model": {"name": "mlp_digits", "same_initial": False},
    "training": {"batch_size": 50, "learning_rate": 0.05, "momentum": 0.5},
    "cloud": {"participation": 0.67},
    "links": {"check": "off"},
}


def lab_of(rule: str = "fedavg", **changes: Any) -> Experiment:
    return parse({**LAB, "cloud": {**LAB["cloud"], "aggregation": {"name": rule}}, **changes})


def own_initial(lab: Experiment, node: str) -> dict[str, torch.Tensor]:
    module = models.of(lab, inputs=datasets.load(lab.data).inputs)
    draw_default(module, torch.Generator().manual_seed(torch_seed(lab.seed, Purpose.INIT, node)))
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def plain(lab: Experiment, path: Path) -> dict[str, torch.Tensor]:
    """Return the final model of a plain loop: own initial models in the first round, the mean in
    the others.
    """
    shared: dict[str, torch.Tensor] = {}
    for r in range(lab.rounds):
        rows = Run(path).devices
        took = {row.node for row in rows if row.global_round == r + 1 and row.samples}
        nodes = [node for node in lab.tree.devices if lab.tree.path(node) in took]
        sizes = [
            len(batches.load_local_dataset(lab, node, accelerator=CPU).samples) for node in nodes
        ]
        starts = [shared if r else own_initial(lab, node) for node in nodes]
        found = [
            one_round(lab, node, start, local_round=r)
            for node, start in zip(nodes, starts, strict=True)
        ]
        shared = mean(found, sizes, list(found[0]))
    return shared


def test_a_run_is_that_of_a_plain_loop_and_of_its_replay(tmp_path: Path) -> None:
    lab = lab_of()
    path = run_direct(tmp_path, lab)
    wanted, final = plain(lab, path), load_file(path / "model.safetensors")
    assert max(float((final[key] - wanted[key]).abs().max()) for key in wanted) < 2e-6
    again = replayed(Run(path), path.parent, accelerator="cpu", observe=lambda event, facts: None)
    assert tensors(again) == tensors(path)


def test_in_common_steps_devices_begin_as_alone(request: pytest.FixtureRequest) -> None:
    lab, nodes = lab_of(), ["device-0", "device-1"]
    tester = ModelTester(lab)

    def trained(path: TrainingPath) -> list[Any]:
        (found,) = trained_together(lab, nodes, tester.first)
        assert [result.path for _, result in found] == [path] * 2
        return [tester.layout.floats(row) for row, _ in found]

    alone = trained(TrainingPath.IN_PROCESS)
    request.getfixturevalue("vmapped_on_cpu")
    together = trained(TrainingPath.VMAPPED)
    for one, other in zip(alone, together, strict=True):
        assert np.abs(one - other).max() < 1e-5
    assert np.abs(alone[0] - alone[1]).max() > 0.1


def test_a_killed_device_begins_with_the_same_model() -> None:
    lab = lab_of(topology={"institutions": 2, "devices": 6}, cloud={})
    KilledLab(lab, workload=RealWorkload).assert_same_if_killed("device-0", 0.2, 0.2)


@pytest.mark.parametrize("own", [False, True])
def test_matching_finds_the_order_of_own_initial_models_and_keeps_that_of_the_same(
    own: bool, tmp_path: Path
) -> None:
    """With the same initial model the rules are FedAvg bit for bit; with own ones their first means
    are better.
    """
    alike = {"topology": {"institutions": 0, "devices": 4}, "data": {}, "rounds": 1}
    training, model = (
        {"epochs": 20 if own else 1, "momentum": 0.9},
        {"name": "mlp_digits", "same_initial": not own},
    )
    found, scores = {}, {}
    for rule in ("fedavg", "fedma", "gamf"):
        lab = parse(
            {
                **alike,
                "model": model,
                "training": training,
                "cloud": {"aggregation": {"name": rule}},
            }
        )
        path = run_direct(tmp_path, lab)
        found[rule], scores[rule] = tensors(path), Run(path).rounds[0].score or 0.0
    assert [found[rule] == found["fedavg"] for rule in ("fedma", "gamf")] == [not own] * 2
    assert (scores["fedavg"] + 0.05 < min(scores["fedma"], scores["gamf"])) is own, scores


def test_an_experiment_with_the_same_initial_model_has_the_keys_of_before() -> None:
    assert "same_initial" not in parse({}).to_json()
    assert parse({"model": {"same_initial": True}}).digest == parse({}).digest != lab_of().digest
