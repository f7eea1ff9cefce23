"""Parts of a model: frozen arrays, which no node sends, and personal ones, which each device keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional

from fedstrata.cloud.checkpoint import save_model
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import load, parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import datasets, models
from fedstrata.common.learning.evaluation import ModelTester
from fedstrata.common.model.layout import Section
from fedstrata.common.model.parts import ModelParts, Part, part_of_each
from fedstrata.common.settings.data import ModelSettings
from fedstrata.deploy.results.run import Run
from fedstrata.device.jobs import Order
from fedstrata.device.training import batches
from fedstrata.device.training.trainer import Trainer
from tests.helpers.commands import DEMO, table
from tests.helpers.direct import resumed_run, run_direct
from tests.helpers.examples import slow
from tests.helpers.own_page import FILES, PAGES
from tests.helpers.plain import train_plainly
from tests.helpers.real_workload import RealWorkload
from tests.helpers.scenarios import KilledLab

CPU = torch.device("cpu")
ODD = "tests.helpers.odd_models"
ROUNDS = 5
LAB: dict[str, Any] = {
    "name": "parts",
    "rounds": ROUNDS,
    "topology": {"institutions": 2, "devices": 6},
    "data": {"partition": "dirichlet", "concentration": 0.5},
    "model": {"name": "mlp_digits"},
    "training": {"batch_size": 50, "learning_rate": 0.05, "momentum": 0.5, "weight_decay": 0.01},
    "institution": {"participation": 0.67},
}
PERSONAL = {  # FedPer: the classifier; FedBN: batch norm, with its statistics
    "fedper": {"name": "mlp_digits", "personal": ["fc2.*"]},
    "fedbn": {"name": f"{ODD}:Normed", "personal": ["norm.*"]},
}


def experiment(model: Mapping[str, Any], **changes: Any) -> Experiment:
    """Return a lab with a model; with personal parts devices score."""
    scored = {"evaluation": {"at": "devices"}} if "personal" in model else {}
    return parse({**LAB, "model": model, **scored, **changes})


def plain(
    lab: Experiment, path: Path
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Return the shared arrays, and those of each device, after a plain loop over a run's recorded
    choices.
    """
    inputs = datasets.load(lab.data).inputs
    module = models.of(lab, inputs=inputs)
    personal = models.parts_of(module, lab.model).personal
    shared = {
        name: tensor.clone() for name, tensor in module.state_dict().items() if name not in personal
    }
    first = {
        name: tensor.clone() for name, tensor in module.state_dict().items() if name in personal
    }
    own = dict.fromkeys(lab.tree.devices, first)
    took = {(row.global_round, row.node) for row in Run(path).devices if row.samples}
    samples = {
        node: len(batches.load_local_dataset(lab, node, accelerator=CPU).samples)
        for node in lab.tree.devices
    }
    for r in range(lab.rounds):
        means, totals = [], []
        for institution in lab.tree.children["cloud"]:
            found, weights = [], []
            for node in lab.tree.children[institution]:
                if (r + 1, lab.tree.path(node)) not in took:
                    continue
                trained = one_round(lab, node, {**shared, **own[node]}, local_round=r)
                own = {**own, node: {name: trained[name] for name in personal}}
                found.append(trained)
                weights.append(samples[node])
            means.append(mean(found, weights, list(shared)))
            totals.append(sum(samples[node] for node in lab.tree.children[institution]))
        shared = mean(means, totals, list(shared))
    return shared, own


def one_round(
    lab: Experiment, node: str, state: dict[str, torch.Tensor], *, local_round: int
) -> dict[str, Any]:
    module = models.of(lab, inputs=datasets.load(lab.data).inputs)
    module.load_state_dict(state)
    train_plainly(
        module, lab, node, epochs=1, local_round=local_round, joins="Normed" in lab.model.name
    )
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def mean(
    states: list[dict[str, Any]], weights: list[int], names: list[str]
) -> dict[str, torch.Tensor]:
    def of(name: str) -> torch.Tensor:
        each = torch.stack([state[name].double() for state in states])
        shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
        return torch.tensordot(shares, each, 1).to(states[0][name].dtype)

    return {name: of(name) for name in names}


@pytest.mark.parametrize("name", slow(PERSONAL, but=["fedper"]))
def test_rounds_with_partial_participation_are_those_of_a_plain_loop(
    name: str, tmp_path: Path
) -> None:
    lab = experiment(PERSONAL[name])
    path = run_direct(tmp_path, lab)
    shared, own = plain(lab, path)
    final = load_file(path / "model.safetensors")
    assert final.keys() == shared.keys()
    rows = [row for row in Run(path).devices if row.samples]
    assert len(rows) == ROUNDS * 4 and len({row.node for row in rows}) == 6
    apart = {key: float((final[key].double() - shared[key].double()).abs().max()) for key in shared}
    assert max(apart.values()) < 2e-6, apart
    heads = [
        torch.cat([tensor.double().flatten() for tensor in each.values()]) for each in own.values()
    ]
    assert min(float((one - other).abs().max()) for one, other in pairwise(heads)) > 1e-2


@pytest.mark.parametrize("name", PERSONAL)
def test_each_device_scores_the_received_model_with_its_personal_parts(
    name: str, tmp_path: Path
) -> None:
    lab = experiment(PERSONAL[name], rounds=2, institution={})
    path = run_direct(tmp_path, lab)
    shared, own = plain(lab, path)
    rows = {row.node: row for row in Run(path).devices if row.global_round == lab.rounds}
    module = models.of(lab, inputs=datasets.load(lab.data).inputs).eval()
    scores = set()
    for node in lab.tree.devices:
        module.load_state_dict({**shared, **own[node]})
        local = batches.load_local_dataset(lab, node, accelerator=CPU)
        assert local.tests is not None
        logits = module(local.normalise(local.tests.images[local.tests.samples]))
        loss = functional.cross_entropy(logits, local.tests.labels[local.tests.samples])
        row = rows[lab.tree.path(node)]
        assert row.test_samples == len(local.tests.samples)
        assert row.test_loss == pytest.approx(loss.item(), abs=2e-5)
        scores.add(row.test_loss)
    assert len(scores) == len(rows)


def test_a_run_with_personal_parts_that_is_interrupted_and_resumed_is_the_same(
    tmp_path: Path,
) -> None:
    institution = {"participation": 0.67, "rounds": 2}
    lab = experiment(PERSONAL["fedbn"], rounds=3, institution=institution)
    whole = run_direct(tmp_path / "whole", lab)
    again = resumed_run(run_direct(tmp_path / "broken", lab, until=2))
    found, wanted = load_file(again / "model.safetensors"), load_file(whole / "model.safetensors")
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


KILLED: Final = KilledLab(
    experiment(PERSONAL["fedper"], rounds=2, links={"check": "off"}, institution={"rounds": 2}),
    workload=RealWorkload,
)


@pytest.mark.parametrize("node", ["cloud", "device-0"])
def test_a_killed_node_continues_with_the_same_personal_parts(node: str) -> None:
    KILLED.assert_same_if_killed(node, 0.4, 0.4)


def test_a_device_that_lost_its_personal_parts_ends_the_run() -> None:
    assert (
        "what this device kept after its task" in KILLED.loses_files("device-0", share=0.7).result
    )


def test_only_parts_that_are_shared_travel_and_frozen_ones_once(tmp_path: Path) -> None:
    whole = ModelTester(experiment({"name": "cnn_digits"}, seed=9))
    save_model(
        initial := tmp_path / "pretrained.safetensors",
        layout=whole.layout,
        row=whole.first,
        facts={},
    )
    pairs = [
        "rounds=2",
        'model.frozen=["conv1.*"]',
        'model.personal=["fc.*"]',
        'evaluation.at="devices"',
    ]
    pairs.append(f'model.initial="{initial}"')
    run = run_direct(tmp_path, load(DEMO, pairs))
    found = load_file(run / "model.safetensors")
    assert found.keys() == {"conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"}
    # conv2 alone, up in each of 2 x 2 local rounds, and down once more to be scored
    rows = [row for row in table(run / "links.csv") if row["kind"] == "model"]
    below = [row for row in rows if row["tier"] == "lan"]
    for start, times in (("device", 4), ("institution", 5)):
        sizes = {int(row["payload_bytes"]) for row in below if row["from"].startswith(start)}
        assert sizes == {times * 4 * (32 * 16 * 9 + 32)}
    first = load_file(initial)
    assert all(torch.equal(found[key], first[key]) for key in ("conv1.weight", "conv1.bias"))


# Frozen


@pytest.mark.parametrize(
    "model", [{"name": f"{ODD}:FrozenPart"}, {"name": f"{ODD}:Net", "frozen": ["conv.*"]}]
)
def test_frozen_arrays_never_travel_nor_move_and_the_final_model_has_them(
    model: Mapping[str, Any], tmp_path: Path
) -> None:
    lab = experiment(model, rounds=3)
    module = models.of(lab, inputs=datasets.load(lab.data).inputs)
    path = run_direct(tmp_path, lab)
    final = load_file(path / "model.safetensors")
    assert all(
        torch.equal(final[key], module.state_dict()[key]) for key in ("conv.weight", "conv.bias")
    )
    assert not torch.equal(final["last.weight"], module.state_dict()["last.weight"])
    module.load_state_dict(final)
    shared, _ = plain(lab, path)
    assert max(float((final[key] - shared[key]).abs().max()) for key in shared) < 2e-5
    sent = 4 * (1440 + 10)
    assert Run(path).manifest["model_bytes"] == sent
    spent = Run(path).rounds[0].bytes_
    assert spent["lan_up_bytes"] == spent["lan_down_bytes"] == 4 * sent  # of four devices
    again = ModelTester(lab)
    row = again.layout.empty()
    again.layout.flatten({key: tensor.numpy() for key, tensor in final.items()}, row)
    assert again.evaluate(row).score == pytest.approx(Run(path).rounds[-1].score, abs=1e-6)


@pytest.mark.parametrize(
    "name",
    slow(
        ["bool_buffer", "half_buffer", "brain_buffer", "double_buffer", "short_counter"],
        but=["bool_buffer", "brain_buffer"],
    ),
)
def test_constant_buffers_of_any_type_may_be_frozen(name: str, tmp_path: Path) -> None:
    lab = experiment({"name": f"{ODD}:{name}", "frozen": ["mask"]}, rounds=1)
    final = load_file(run_direct(tmp_path, lab) / "model.safetensors")
    module = models.anew(lab, inputs=datasets.load(lab.data).inputs)
    module.load_state_dict(final)
    assert module.state_dict()["mask"].dtype == final["mask"].dtype != torch.float32


def test_frozen_statistics_of_a_norm_begin_each_training_as_they_were_built() -> None:
    lab = experiment(
        {"name": f"{ODD}:Normed", "frozen": ["norm.running*", "norm.num_batches_tracked"]}
    )
    trainer = Trainer(lab, node="device-0", accelerator="cpu")
    trainer.prepare()
    row, outs = ModelTester(lab).first, [trainer.layout.empty() for _ in range(2)]
    for out in outs:
        trainer.train(Order(row, out, 1, 0))
    assert np.array_equal(*outs)
    assert not trainer.layout.counters


def test_a_parameter_without_gradients_that_training_changes_is_refused() -> None:
    trainer = Trainer(
        experiment({"name": "tests.test_parts:Teacher"}), node="device-0", accelerator="cpu"
    )
    with pytest.raises(
        InvalidExperiment, match=r"training changes its parameter teacher.*Keep.*in a buffer"
    ):
        trainer.prepare()


class Teacher(torch.nn.Module):
    """A moving average that is no buffer."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.last = torch.nn.Linear(64, 10)
        self.teacher = torch.nn.Parameter(torch.zeros(10), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(x.flatten(1))
        if self.training:
            self.teacher.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        return out


def test_a_run_begins_with_the_frozen_arrays_of_a_file(tmp_path: Path) -> None:
    path = run_direct(tmp_path, experiment({"name": f"{ODD}:Net"}, rounds=1))
    model = {"name": f"{ODD}:Net", "initial": str(path)}
    whole, parts = (
        ModelTester(experiment(model)),
        ModelTester(experiment({**model, "frozen": ["conv.*"]})),
    )
    assert parts.frozen.keys() == {"conv.weight", "conv.bias"}
    given = load_file(path / "model.safetensors")
    assert all(np.array_equal(array, given[name].numpy()) for name, array in parts.frozen.items())
    found, same = parts.evaluate(parts.first), whole.evaluate(whole.first)
    assert (found.score, found.loss) == (same.score, same.loss)
    personal = ModelTester(experiment({**model, "personal": ["last.*"]}))
    assert personal.notes[-1].startswith("model.initial: last.weight is personal")


# The page's examples

LINES_MOST = 30


def test_of_lora_its_factors_alone_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = FILES["lora.py"]
    assert len(code.splitlines()) + 1 <= LINES_MOST
    (tmp_path / "lora.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    lab = experiment({"name": "lora:build"}, rounds=2)
    path = run_direct(tmp_path / "runs", lab)
    factors = {"1.down", "1.up", "3.down", "3.up"}
    final, first = load_file(path / "model.safetensors"), ModelTester(lab)
    sent = 4 * sum(final[name].numel() for name in factors)
    assert sent == 3232 == Run(path).manifest["model_bytes"]
    assert (
        Run(path).rounds[0].bytes_["lan_up_bytes"]
        == Run(path).rounds[0].bytes_["lan_down_bytes"]
        == 4 * sent
    )
    assert {entry.name for entry in first.layout.entries} == factors
    assert final.keys() - factors == first.parts.frozen.keys()
    assert all(
        torch.equal(final[name], torch.from_numpy(array))
        for name, array in first.parts.frozen.items()
    )
    assert (
        sum(tensor.numel() for name, tensor in final.items() if name not in factors) == 19_240 // 4
    )
    assert f"{sent:,} bytes" in PAGES


# What is refused

CLASSIFIER = {"personal": ["fc2.*"]}
FEDDF = {"institution": {"aggregation": "feddf"}, "data": {"node_samples": 100}}


@pytest.mark.parametrize(
    ("model", "changes", "problem"),
    [
        (
            CLASSIFIER,
            {"evaluation": {"at": "both"}},
            r"evaluation\.at = 'both': the cloud has no whole model",
        ),
        (
            {"frozen": ["conv.*"]},
            {},
            r"model\.frozen = 'conv\.\*': mlp_digits has no array of such .*It has: fc1",
        ),
        ({"personal": ["head"]}, {}, r"model\.personal = 'head': mlp_digits has no array"),
        (
            {"frozen": ["*"]},
            {},
            r"model\.frozen = '\*': they leave no parameter that devices exchange",
        ),
        (
            {"personal": ["*"]},
            {},
            r"model\.personal = '\*': they leave no parameter that devices exchange",
        ),
        (
            {"frozen": ["fc2.*"], "personal": ["fc2.bias"]},
            {},
            r"model\.personal = 'fc2.bias': fc2.bias is frozen, too",
        ),
        (
            CLASSIFIER,
            {"training": {"objective": "moon"}},
            r"model\.personal.*'moon' needs the whole model",
        ),
        (
            CLASSIFIER,
            FEDDF,
            r"model\.personal.*institution\.aggregation\.name = 'feddf' needs the whole model",
        ),
        (
            {"frozen": ["fc1.*"]},
            {"cloud": {"aggregation": "fedma"}},
            r"'fedma': it permutes the neurons of all layers",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(
    model: Mapping[str, Any], changes: Mapping[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidExperiment, match=problem):
        ModelTester(experiment({"name": "mlp_digits", **model}, **changes))


def test_an_experiment_without_parts_has_the_keys_of_before() -> None:
    assert json.loads(experiment({"name": "mlp_digits"}).to_json())["model"].keys() == {
        "name",
        "projection",
        "initial",
    }
    assert json.loads(experiment(PERSONAL["fedper"]).to_json())["model"]["personal"] == ["fc2.*"]


NAMES = [
    f"{layer}.{kind}" for layer in ("a", "b", "c") for kind in ("weight", "bias", "mean", "count")
]
SECTIONS = {
    "weight": Section.PARAMETER,
    "bias": Section.PARAMETER,
    "mean": Section.BUFFER,
    "count": Section.COUNTER,
}


@given(
    st.lists(st.sampled_from(list(Part)), min_size=12, max_size=12),
    st.randoms(use_true_random=False),
)
def test_parts_join_and_split_any_arrays(chosen: list[Part], random: Any) -> None:
    parts = {**dict(zip(NAMES, chosen, strict=True)), "a.weight": Part.EXCHANGED}
    arrays = [(name, (random.randint(0, 3), 2), SECTIONS[name.partition(".")[2]]) for name in NAMES]
    draw = np.random.default_rng(random.randint(0, 1000))
    values = {
        name: draw.normal(size=shape).astype(np.float32) if section is not Section.COUNTER
        else draw.integers(0, 9, shape)
        for name, shape, section in arrays
    }  # fmt: skip
    made = ModelParts.of(
        arrays, parts, {name: values[name] for name in NAMES if parts[name] is not Part.EXCHANGED}
    )
    assert set(made.personal) == {name for name in NAMES if parts[name] is Part.PERSONAL}
    assert made.frozen.keys() == {name for name in NAMES if parts[name] is Part.FROZEN}
    assert (made.whole is made.exchanged) == (not made.personal)
    if not made.personal:
        return
    model, kept, whole = (
        made.exchanged.empty(),
        np.zeros(made.kept_bytes, np.uint8),
        made.whole.empty(),
    )
    made.exchanged.flatten(values, model)
    made.join(model, kept, whole)  # a device that has none yet begins with those of the model
    assert all(np.array_equal(view, values[name]) for name, view in made.whole.views(whole).items())
    made.whole.floats(whole)[:] += 1
    made.split(whole, model, kept)
    again = made.whole.empty()
    made.join(model, kept, again)
    assert np.array_equal(whole, again)
    assert np.array_equal(
        made.whole.floats(whole)[made.columns], made.exchanged.floats(model)[: len(made.columns)]
    )


def test_patterns_match_any_name_of_an_array() -> None:
    arrays = {"first.weight": ["first.weight", "second.weight"], "last.weight": ["last.weight"]}
    found = part_of_each(ModelSettings(frozen=["second.*"]), arrays, constant=())
    assert found == {"first.weight": Part.FROZEN, "last.weight": Part.EXCHANGED}
    assert (
        part_of_each(ModelSettings(personal=["*"]), arrays, constant={"last.weight"})["last.weight"]
        is Part.FROZEN
    )
