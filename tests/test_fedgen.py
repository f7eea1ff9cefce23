"""FedGen: its generator, its rule, its objective, and whole labs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import load, parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import datasets, models
from fedstrata.common.learning.models import head_places
from fedstrata.common.learning.refiner import NodeDraws, NodeRefiner
from fedstrata.common.methods.baselines.fedgen import (
    FEATURES,
    HIDDEN,
    LABEL_COUNTS,
    FedGen,
    GeneratorLayout,
)
from fedstrata.common.methods.baselines.generator import diversity, learn_generator
from fedstrata.common.methods.rule import Rule, link_layouts
from fedstrata.common.model.layout import ModelLayout, Row, Section
from fedstrata.common.model.refinement import Refiner, RoundModels
from fedstrata.common.randomness import Purpose, generator
from fedstrata.common.settings.training import TrainingSettings
from fedstrata.device.jobs import Order
from fedstrata.device.training.batches import uniform_numbers
from fedstrata.device.training.objectives.objective import Minibatch
from fedstrata.device.training.objectives.objectives_by_name import objective_of
from fedstrata.device.training.trainer import Trainer
from fedstrata.device.training.vectors import TaskVectors
from fedstrata.device.vmapped.schedule import Load
from fedstrata.device.vmapped.shared_steps import Turn, Visits
from fedstrata.device.vmapped.stacked_models import Recipe
from tests.helpers import rules
from tests.helpers.commands import DEMO, table
from tests.helpers.direct import run_direct
from tests.helpers.rules import AddingRefiner, Report
from tests.helpers.vmapped_steps import problem_of

CPU: Final = torch.device("cpu")
Z, H, F, C = 3, 5, 4, 3
SMALL: Final = GeneratorLayout(noise=Z, hidden=H, features=F, classes=C)
LAYOUT: Final = ModelLayout.build(
    [
        ("body.weight", (F, 2), Section.PARAMETER),
        ("head.weight", (C, F), Section.PARAMETER),
        ("head.bias", (C,), Section.PARAMETER),
        ("mean", (F,), Section.BUFFER),
    ]
)
CHILDREN: Final = ("a", "b", "c")
REPORTS: Final = (Report(10, 0.5), None, Report(30, 0.5))


class Twin(nn.Module):
    """The generator as a plain module."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.hidden, self.norm, self.output = (
            nn.Linear(Z + C, H),
            nn.BatchNorm1d(H),
            nn.Linear(H, F),
        )
        views = {
            name: torch.from_numpy(values.copy()) for name, values in SMALL.rows.views(row).items()
        }
        names = {
            "hidden.weight": "weight",
            "hidden.bias": "bias",
            "norm.weight": "scale",
            "norm.bias": "shift",
            "norm.running_mean": "mean",
            "norm.running_var": "variance",
            "output.weight": "output",
            "output.bias": "output_bias",
        }
        self.load_state_dict({mine: views[its] for mine, its in names.items()}, strict=False)

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        inputs = torch.cat([noise, functional.one_hot(labels, C).float()], 1)
        features: Tensor = self.output(torch.relu(self.norm(self.hidden(inputs))))
        return features


def random_row(seed: int) -> Row:
    row = np.zeros(SMALL.rows.row_bytes, np.uint8)
    SMALL.begin(row, np.random.default_rng(seed))
    tensors = SMALL.rows.views(row)
    tensors["head"][:] = np.random.default_rng(seed).normal(size=(C, F))
    tensors["mean"][:], tensors["variance"][:] = 0.3, 2.0
    tensors["scale"][:], tensors["shift"][:] = 1.5, -0.1
    return row


# The generator


def test_a_model_whose_head_is_not_its_last_matrix_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.scale = nn.Linear(2, 3), nn.Embedding(4, 5)

    with pytest.raises(
        InvalidExperiment,
        match=r"its last torch\.nn\.Linear is head, .* Define the linear layer last",
    ):
        head_places(Odd(), models.layout_of(Odd()))
    with pytest.raises(InvalidExperiment, match="no linear layer"):
        _ = ModelLayout.build([("w", (3,), Section.PARAMETER)]).head


def test_what_devices_receive_is_the_generator_at_its_running_statistics() -> None:
    row = random_row(1)
    sent = {name: torch.from_numpy(values) for name, values in SMALL.linear(row).items()}
    assert {name: tuple(values.shape) for name, values in sent.items()} == SMALL.sent
    noise, labels, one = torch.rand(7, Z), torch.arange(7) % C, torch.ones(7, 1)
    inputs = torch.cat([noise, functional.one_hot(labels, C).float(), one], 1)
    found = torch.cat([torch.relu(inputs @ sent[HIDDEN].mT), one], 1) @ sent[FEATURES].mT
    torch.testing.assert_close(found, Twin(row).eval()(noise, labels))


def test_a_first_generator_is_drawn_as_torch_draws_one() -> None:
    layout = GeneratorLayout(noise=50, hidden=200, features=80, classes=10)
    row = np.zeros(layout.rows.row_bytes, np.uint8)
    layout.begin(row, np.random.default_rng(1))
    views, linear = layout.rows.views(row), nn.Linear(60, 200)
    assert float(np.std(views["weight"])) == pytest.approx(
        float(linear.weight.detach().std()), rel=0.05
    )
    assert float(np.abs(views["output"]).max()) <= 200**-0.5
    assert views["variance"].min() == 1 and not views["mean"].any() and not views["head"].any()
    assert layout.columns == sum(int(np.prod(shape)) for shape in layout.generator.values())


def round_of(counts_KC: list[list[int]], r: int = 2) -> RoundModels:
    uploads = []
    for k, counts in enumerate(counts_KC):
        row = np.zeros(SMALL.rows.row_bytes, np.uint8)
        tensors, draw = SMALL.rows.views(row), np.random.default_rng(10 + k)
        tensors["head"][:], tensors["head_bias"][:] = draw.normal(size=(C, F)), draw.normal(size=C)
        tensors[LABEL_COUNTS][:] = counts
        uploads.append(row)
    row = random_row(1)
    return RoundModels(r, SMALL.rows, row, row, uploads, np.full(len(uploads), 1 / len(uploads)))


def test_the_generator_learns_as_a_plain_loop_of_the_authors_formula() -> None:
    counts_KC = [[8, 1, 0], [0, 4, 0]]  # nobody has label 2
    settings = FedGen(noise=Z, hidden=H, steps=25, batch_size=6, learning_rate=0.01)
    node, models_ = NodeDraws(parse({}), "institution-0"), round_of(counts_KC)
    twin = Twin(models_.mean).train()
    optimiser = torch.optim.Adam(twin.parameters(), 0.01, weight_decay=0.01)
    draw = generator(parse({}).seed, Purpose.GENERATOR, "institution-0", 3)
    taught = []
    for _ in range(25):
        labels = torch.from_numpy(draw.integers(0, 2, 6))
        noise = torch.from_numpy(draw.random((6, Z), np.float32))
        features = twin(noise, labels)
        loss = torch.zeros(())
        for counts, row in zip(counts_KC, models_.uploads, strict=True):
            views = {
                name: torch.from_numpy(values) for name, values in SMALL.rows.views(row).items()
            }
            logits = functional.linear(features, views["head"], views["head_bias"])
            shares = torch.tensor(
                [counts[y] / sum(each[y] for each in counts_KC) for y in labels.tolist()]
            )
            loss = (
                loss + (functional.cross_entropy(logits, labels, reduction="none") * shares).mean()
            )
        taught.append(float(loss.detach()))
        squares = (noise[:, None] - noise[None]).square().mean(2)
        absolute = (features[:, None] - features[None]).abs().mean(2)
        torch.testing.assert_close(
            diversity(noise, features), torch.exp((-squares * absolute).mean())
        )
        optimiser.zero_grad()
        (loss + torch.exp((-squares * absolute).mean())).backward()
        optimiser.step()
    facts = learn_generator(node, settings, models_)
    assert facts["steps"] == 25 and facts["loss_before"] == pytest.approx(taught[0], rel=1e-4)
    assert facts["loss_after"] == pytest.approx(taught[-1], rel=1e-3) and taught[-1] < taught[0]
    views = SMALL.rows.views(models_.mean)
    for mine, its in (
        ("weight", twin.hidden.weight),
        ("scale", twin.norm.weight),
        ("output", twin.output.weight),
    ):
        np.testing.assert_allclose(views[mine], its.detach().numpy(), rtol=0, atol=2e-4)
    assert twin.norm.running_mean is not None and twin.norm.running_var is not None
    np.testing.assert_allclose(views["mean"], twin.norm.running_mean.numpy(), rtol=0, atol=2e-4)
    np.testing.assert_allclose(views["variance"], twin.norm.running_var.numpy(), rtol=0, atol=2e-4)


def test_without_any_label_nothing_is_learned_and_the_same_round_gives_the_same_bits() -> None:
    settings, node = (
        FedGen(noise=Z, hidden=H, steps=5, batch_size=4),
        NodeDraws(parse({}), "institution-0"),
    )
    empty = round_of([[0, 0, 0]])
    before = empty.mean.copy()
    assert learn_generator(node, settings, empty) == {"steps": 0} and np.array_equal(
        empty.mean, before
    )
    one, same, other = round_of([[1, 2, 3]]), round_of([[1, 2, 3]]), round_of([[1, 2, 3]], r=3)
    for each in (one, same, other):
        learn_generator(node, settings, each)
    assert np.array_equal(one.mean, same.mean) and not np.array_equal(one.mean, other.mean)


# The rule at a node


def rule_of(refiner: Refiner | None, **settings: Any) -> Rule:
    return rules.rule_of(
        {"name": "fedgen", "noise": Z, "hidden": H, **settings}, layout=LAYOUT, refiner=refiner
    )


LINKS: Final = link_layouts(FedGen(noise=Z, hidden=H), LAYOUT)


def play(rule: Rule, r: int = 0) -> tuple[Row, npt.NDArray[np.uint8]]:
    """Return what children received, and what they sent."""
    ((row, _),) = rule.dispatch(r, CHILDREN)
    received = row.copy()
    rows_K = np.zeros((3, LINKS.up.row_bytes), np.uint8)
    LAYOUT.floats(rows_K)[:] = np.random.default_rng(r).normal(size=(3, LAYOUT.columns))
    LINKS.up.extras_of(rows_K)[LABEL_COUNTS][:] = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    rules.aggregate(rule, r, CHILDREN, rows_K, REPORTS)
    return received, rows_K


def test_the_refiner_gets_heads_and_labels_and_the_children_its_generator() -> None:
    refiner = AddingRefiner()
    rule = rule_of(refiner)
    received, rows_K = play(rule)
    # no generator yet
    assert all(not vector.any() for vector in LINKS.down.extras_of(received).values())
    (asked,) = refiner.asked
    assert asked.r == 0 and len(asked.uploads) == 2
    begun = np.zeros_like(asked.mean)
    SMALL.begin(begun, generator(1, Purpose.GENERATOR, "cloud", 0))
    SMALL.rows.floats(begun)[: SMALL.rows.parameters] += 1  # as the refiner does
    assert np.array_equal(asked.mean, begun)
    for row, k in zip(asked.uploads, (0, 2), strict=True):
        views, upload = SMALL.rows.views(row), LAYOUT.views(rows_K[k])
        assert np.array_equal(views["head"], upload["head.weight"])
        assert np.array_equal(views["head_bias"], upload["head.bias"])
        assert views[LABEL_COUNTS].tolist() == [3 * k + 1, 3 * k + 2, 3 * k + 3]
    made = SMALL.linear(asked.mean)
    received, _ = play(rule, 1)
    sent = LINKS.down.extras_of(received)
    for name, wanted in made.items():
        assert np.array_equal(sent[name], wanted) and wanted.any()


def test_a_generator_outlives_a_restart(tmp_path: Path) -> None:
    rule, again = rule_of(AddingRefiner()), rule_of(AddingRefiner())
    play(rule)
    facts = json.loads(json.dumps(rule.save(tmp_path)))
    again.begin(rule.model.copy())
    again.restore(tmp_path, facts)
    (one, _), (other, _) = play(rule, 1), play(again, 1)
    assert np.array_equal(one, other)
    first = rule_of(AddingRefiner())
    facts = json.loads(json.dumps(first.save(tmp_path)))
    again.begin(np.zeros(LAYOUT.row_bytes, np.uint8))
    again.restore(tmp_path, facts)  # from before it has learned
    (received, _) = play(again)
    assert all(not vector.any() for vector in LINKS.down.extras_of(received).values())


def test_without_a_step_it_is_fedavg_bit_for_bit_and_without_a_refiner_it_cannot_be() -> None:
    null = rule_of(None, steps=0)
    play(null)
    plain = rules.rule_of({"name": "fedavg"}, layout=LAYOUT)
    rows_K = np.zeros((3, LAYOUT.row_bytes), np.uint8)
    LAYOUT.floats(rows_K)[:] = np.random.default_rng(0).normal(size=(3, LAYOUT.columns))
    rules.aggregate(plain, 0, CHILDREN, rows_K, REPORTS)
    assert np.array_equal(null.model, plain.model)
    with pytest.raises(RuntimeError, match="fedgen needs a refiner"):
        rule_of(None)


# The objective at a device


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, F), nn.Tanh(), nn.Linear(F, C)).double()


def training(**objective: Any) -> TrainingSettings:
    return TrainingSettings.model_validate(
        {"momentum": 0.0, "objective": {"name": "fedgen", **objective}}
    )


def batch_of(module: nn.Module, sent: Mapping[str, Tensor], size: int = 5) -> Minibatch:
    draw = torch.Generator().manual_seed(2)
    inputs = torch.randn(size, 6, generator=draw, dtype=torch.float64)
    labels = torch.randint(C, (size,), generator=draw)
    uniform = torch.rand(size, 2 * Z + 1, generator=draw, dtype=torch.float64)
    vectors = {name: [values.double()] for name, values in sent.items()}
    return Minibatch(
        lambda: module(inputs),
        labels,
        list(module.parameters()),
        [],
        vectors=vectors,
        uniform=uniform,
        head=(2, 3),
    )


def sent_of(seed: int) -> dict[str, Tensor]:
    return {
        name: torch.from_numpy(values) for name, values in SMALL.linear(random_row(seed)).items()
    }


def gradients(module: nn.Module) -> list[Tensor]:
    found = [weight.grad for weight in module.parameters()]
    assert all(grad is not None for grad in found)
    return [grad for grad in found if grad is not None]


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (0.0, 1.0), (0.5, 2.0)])
def test_gradients_are_those_of_the_written_out_loss(alpha: float, beta: float) -> None:
    ours, theirs = net(), net()
    loss = objective_of(training(alpha=alpha, beta=beta)).backward(batch_of(ours, sent_of(1)))
    batch, twin = batch_of(theirs, sent_of(1)), Twin(random_row(1)).eval().double()
    assert batch.uniform is not None
    head, logits = theirs[2], batch.forward()
    random = (batch.uniform[:, -1] * C).long()
    with torch.no_grad():
        made = twin.float()(batch.uniform[:, :Z].float(), random).double()
        target = torch.softmax(
            head(twin(batch.uniform[:, Z : 2 * Z].float(), batch.labels).double()), 1
        )
    plain = functional.cross_entropy(logits, batch.labels)
    divergence = (target * (target.log() - torch.log_softmax(logits, 1))).sum(1).mean()
    (plain + alpha * functional.cross_entropy(head(made), random) + beta * divergence).backward()
    assert float(loss) == pytest.approx(plain.item(), rel=1e-12)
    for mine, its in zip(gradients(ours), gradients(theirs), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("settings", [{"alpha": 0.0, "beta": 0.0}, {"alpha": 3.0, "beta": 2.0}])
def test_without_weights_or_without_a_generator_it_is_cross_entropy(
    settings: dict[str, float],
) -> None:
    sent = (
        sent_of(1)
        if not settings["alpha"]
        else {name: torch.zeros(shape) for name, shape in SMALL.sent.items()}
    )
    ours, theirs = net(), net()
    objective_of(training(**settings)).backward(batch_of(ours, sent))
    batch = batch_of(theirs, sent)
    functional.cross_entropy(batch.forward(), batch.labels).backward()  # type: ignore[no-untyped-call]
    for mine, its in zip(gradients(ours), gradients(theirs), strict=True):
        assert torch.equal(mine, its)


def test_vmapped_steps_are_those_in_process() -> None:
    settings = training(alpha=1.0, beta=1.0)
    module = net().float()
    layout = models.layout_of(module)
    vectors = TaskVectors(link_layouts(FedGen(noise=Z, hidden=H), layout))
    images, labels = torch.randn(40, 6), torch.randint(C, (40,))
    row = np.zeros(
        layout.row_bytes + 4 * sum(int(np.prod(s)) for s in vectors.shapes.values()), np.uint8
    )
    models.write_row(module, layout, row)
    recipe = Recipe(module, vectors, images, labels, lambda each: each, settings, 0.05)
    draws = objective_of(settings).draws(vectors.shapes, C)
    assert draws == 2 * Z + 1
    turns = [
        Turn(
            row,
            Load(n, 1),
            Visits(places, None, torch.rand(n, draws)),
            print,
            threading.Event(),
            print,
        )
        for places, n in ((torch.arange(23), 23), (torch.arange(23, 40), 17))
    ]
    assert problem_of(recipe, turns) == ""


def test_batches_of_any_size_get_the_same_numbers() -> None:
    lab = parse({})

    def source() -> Callable[[int], Tensor]:
        found = uniform_numbers(lab, 7, node="device-0-0", local_round=3, device=CPU)
        assert found is not None
        return found

    whole, parts = source()(50), source()
    assert torch.equal(whole, torch.cat([parts(n) for n in (1, 10, 3, 36)]))
    assert float(whole.min()) >= 0 and float(whole.max()) < 1
    assert uniform_numbers(lab, 0, node="device-0-0", local_round=3, device=CPU) is None


# Whole labs

LAB: Final = (
    "topology.institutions=2",
    "topology.devices=4",
    "rounds=2",
    "institution.rounds=2",
    "training.batch_size=100",
    "model.name='mlp_digits'",
    "training.objective.name='fedgen'",
    "institution.aggregation={name='fedgen', noise=8, hidden=16, steps=5, batch_size=16}",
)


def lab(**tree: Any) -> Experiment:
    small = {
        "topology": {"institutions": 1, "devices": 2}, "model": {"name": "mlp_digits"},
        "training": {"batch_size": 100, "objective": {"name": "fedgen"}},
        "institution": {"aggregation": {"name": "fedgen", "noise": 8, "hidden": 16}},
    }  # fmt: skip
    return parse(small | tree)


def test_a_device_returns_how_many_samples_of_each_label_it_has() -> None:
    experiment = lab(data={"partition": "dirichlet", "concentration": 0.1})
    found = []
    for node in experiment.tree.devices:
        trainer = Trainer(experiment, node=node, accelerator="cpu")
        trainer.prepare()
        links = trainer.vectors.links
        row, out = np.zeros(links.down.row_bytes, np.uint8), np.zeros(links.up.row_bytes, np.uint8)
        trainer.train(Order(row, out, 1, 0))
        found.append(links.up.extras_of(out)[LABEL_COUNTS])
        assert found[-1].sum() == trainer.samples
    labels = datasets.load(experiment.data, node="cloud").train_labels
    assert np.array_equal(np.sum(found, axis=0), torch.bincount(labels).numpy())


def test_a_refiner_of_a_generator_needs_no_data(tmp_path: Path) -> None:
    experiment = lab(
        data={"dataset": "cifar10", "root": str(tmp_path)}, model={"name": "lenet_cifar"}
    )
    refiner = NodeRefiner(experiment, "institution-0", partition="of another split")
    made = GeneratorLayout(noise=8, hidden=16, features=6, classes=10)
    row = np.zeros(made.rows.row_bytes, np.uint8)
    made.begin(row, np.random.default_rng(1))
    views = made.rows.views(row)
    views[LABEL_COUNTS][:] = 1
    before = row.copy()
    facts = refiner.refine(RoundModels(0, made.rows, row, row, [before], np.ones(1)))
    assert facts["steps"] == 50 and refiner.moves == 50 and not np.array_equal(row, before)
    assert "data.dataset" not in experiment.code_at("institution-0")


@given(seed=st.integers(0, 9))
def test_a_row_of_any_generator_has_its_tensors_apart(seed: int) -> None:
    noise, hidden, features, classes = np.random.default_rng(seed).integers(1, 9, 4).tolist()
    layout = GeneratorLayout(noise=noise, hidden=hidden, features=features, classes=classes)
    row = np.zeros(layout.rows.row_bytes, np.uint8)
    for i, view in enumerate(layout.rows.views(row).values(), 1):
        view[...] = i
    assert set(layout.rows.floats(row).tolist()) == set(range(1, 12))
    assert layout.rows.floats(row)[layout.columns] == 9  # the head is behind the generator


def test_the_generator_travels_down_and_counts_of_labels_up(tmp_path: Path) -> None:
    run = run_direct(tmp_path, load(DEMO, LAB))
    made = GeneratorLayout(noise=8, hidden=16, features=32, classes=10)
    down = 4 * sum(int(np.prod(shape)) for shape in made.sent.values())
    extras = {"up": 0, "down": 0}
    for each in table(run / "links.csv"):
        if each["kind"] == "extras":
            extras["up" if "device" in each["from"] else "down"] += int(each["payload_bytes"])
    assert extras == {"up": 2 * 2 * 4 * 40, "down": 2 * 2 * 4 * down}
