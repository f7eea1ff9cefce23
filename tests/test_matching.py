"""FedMA and GAMF: permuted copies of a model merge back, the cost is the paper's, and the null
setting is FedAvg.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.learning import models
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.readers.builtin import read_digits
from fedstrata.common.methods import aggregator
from fedstrata.common.methods.baselines import fedma
from fedstrata.common.methods.baselines.gamf import _solved
from fedstrata.common.methods.baselines.permutations import groups_of, permute
from fedstrata.common.methods.rule import Rule, Uploads
from fedstrata.common.model.layout import ModelLayout, Row, Section
from tests.helpers import rules
from tests.helpers.rules import Report
from tests.test_models import normed

COLOUR, TEXT = Inputs((3, 16, 16), 10), Inputs((12,), 20, tokens=20)
MODELS = {
    "mlp_digits": Inputs((1, 8, 8), 10), "cnn_digits": Inputs((1, 8, 8), 10), "resnet20_b": COLOUR,
    "resnet20": COLOUR, "resnet20_preact": COLOUR, "char_lstm": TEXT,
}  # fmt: skip


def rule_of(layout: ModelLayout, name: str = "fedma", **keys: Any) -> Rule:
    return rules.rule_of({"name": name, **keys}, layout=layout, children=4)


def random_row(name: str, seed: int) -> tuple[ModelLayout, Row]:
    module = normed(name, seed, MODELS[name])
    layout = models.layout_of(module)
    row = layout.empty()
    models.write_row(module, layout, row)
    return layout, row


def uploads_of(rows: list[Row]) -> Uploads:
    children = tuple("abcd"[: len(rows)])
    return Uploads(
        children,
        np.stack(rows),
        tuple(Report(10 * (k + 1), 0.5) for k in range(len(rows))),
        lambda: None,
    )


def outputs(name: str, layout: ModelLayout, row: Row) -> torch.Tensor:
    module = models.build(name, 1, inputs=MODELS[name]).eval()
    models.read_row(module, layout, row)
    with torch.no_grad():
        found: torch.Tensor = module(models.random_samples(MODELS[name], 4))
    return found


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        pytest.param(name, keys, marks=[pytest.mark.slow] if name == "char_lstm" or slow else [])
        for name in MODELS
        for keys, slow in (
            ({"sweeps": 0}, False),
            ({"sweeps": 5}, False),
            ({"name": "gamf"}, name.startswith("resnet20")),
        )
    ],
    ids=str,
)
def test_permuted_copies_merge_back_to_the_same_function(name: str, keys: dict[str, Any]) -> None:
    layout, row = random_row(name, 1)
    draw = np.random.default_rng(3)
    copies = []
    for _ in range(3):
        copy = row.copy()
        for group in groups_of(layout):
            permute(layout, copy, group, draw.permutation(group.size))
        copies.append(copy)
    wanted = outputs(name, layout, row)
    apart = {}
    for matches in (True, False):
        rule = rule_of(layout, matching=matches, **keys)
        rule.begin(random_row(name, 2)[1])
        uploads = uploads_of(copies)
        before = uploads.rows_K.copy()
        outcome = rule.aggregate(0, uploads)
        assert np.array_equal(uploads.rows_K, before)
        apart[matches] = float(
            (outputs(name, layout, rule.model) - wanted).abs().max() / wanted.abs().max()
        )
        if matches:
            assert (
                set(outcome.facts["moved"]) == {"a", "b", "c"}
                and max(outcome.distances.values()) < 0.05
            )
    assert apart[True] < 1e-4 and apart[False] > 0.02


@pytest.mark.parametrize("name", ["fedma", "gamf"])
def test_uploads_near_the_received_model_stay_as_they_are(name: str) -> None:
    layout, row = random_row("cnn_digits", 1)
    draw, rows = np.random.default_rng(1), []
    for _ in range(3):
        rows.append(row.copy())
        layout.floats(rows[-1])[:] += draw.normal(scale=1e-3, size=layout.columns).astype(
            np.float32
        )
    matched, plain = rule_of(layout, name), rule_of(layout, name, matching=False)
    for rule in (matched, plain):
        rule.begin(row)
        outcome = rule.aggregate(0, uploads_of(rows))
        assert outcome.facts.get("moved") in (None, {"a": 0, "b": 0, "c": 0})
    assert np.array_equal(matched.model, plain.model)


def test_the_permutation_of_a_temperature_is_doubly_stochastic() -> None:
    products = np.random.default_rng(1).normal(size=(12, 12)) + np.arange(12)[:, None]
    soft = _solved(products, 0.5)
    for axis in (0, 1):
        np.testing.assert_allclose(soft.sum(axis), np.ones(12), rtol=2e-3)


def test_the_order_of_the_children_does_not_matter_to_gamf() -> None:
    layout, start = random_row("mlp_digits", 9)
    rows = [random_row("mlp_digits", k)[1] for k in range(4)]
    merged = []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        rule = rule_of(layout, "gamf", weights="uniform")
        rule.begin(start)
        rule.aggregate(0, uploads_of([rows[k] for k in order]))
        merged.append(layout.floats(rule.model).copy())
    np.testing.assert_allclose(merged[0], merged[1], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_models_trained_from_their_own_starts_merge_with_little_loss() -> None:
    """Each ends at some 93 percent of the digits' test samples, their plain mean far below."""
    digits = read_digits()
    images, labels = (
        torch.tensor(digits.train / 16, dtype=torch.float32),
        torch.tensor(digits.train_labels),
    )
    tests, classes = (
        torch.tensor(digits.test / 16, dtype=torch.float32),
        torch.tensor(digits.test_labels),
    )
    layout, start = random_row("mlp_digits", 99)
    module = models.build("mlp_digits", 1, inputs=MODELS["mlp_digits"])

    def accuracy(row: Row) -> float:
        models.read_row(module, layout, row)
        with torch.no_grad():
            return float((module(tests).argmax(1) == classes).float().mean())

    rows = []
    for k in range(4):
        models.read_row(module, layout, random_row("mlp_digits", k)[1])
        optimiser, draw = (
            torch.optim.SGD(module.parameters(), 0.05, momentum=0.9),
            np.random.default_rng(k),
        )
        own = np.arange(k, len(labels), 4)
        for _ in range(60):
            for places in torch.as_tensor(draw.permutation(own)).split(25):
                optimiser.zero_grad()
                torch.nn.functional.cross_entropy(module(images[places]), labels[places]).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
        rows.append(layout.empty())
        models.write_row(module, layout, rows[-1])
    found = {}
    for name, matches in (("fedma", False), ("fedma", True), ("gamf", True)):
        rule = rule_of(layout, name, matching=matches)
        rule.begin(start)
        rule.aggregate(0, uploads_of(rows))
        found[name, matches] = accuracy(rule.model)
    least = min(accuracy(row) for row in rows)
    assert (
        found["fedma", False]
        < least - 0.05
        < least - 0.03
        < min(found["fedma", True], found["gamf", True])
    )


def test_the_assignment_minimises_the_papers_cost() -> None:
    """All 120 permutations of five neurons, with the whole cost; neither sigma nor the number of
    uploads matters.
    """
    draw = np.random.default_rng(1)
    for sigma, prior, shared in ((1.0, 1.0, 1), (0.5, 3.0, 4), (10.0, 0.1, 2)):
        others, own = draw.normal(size=(shared, 5, 7)), draw.normal(size=(5, 7))
        G, S = others.sum(0) / sigma**2, 1 / prior**2 + shared / sigma**2

        def cost(
            i: int, neuron: int, own: Any = own, G: Any = G, S: float = S, sigma: float = sigma
        ) -> float:
            joined = G[i] + own[neuron] / sigma**2
            return float(-(joined @ joined) / (S + 1 / sigma**2) + (G[i] @ G[i]) / S)

        best = min(
            permutations(range(5)),
            key=lambda order: sum(cost(i, neuron) for i, neuron in enumerate(order)),
        )
        assert tuple(fedma.assigned(others.sum(0) @ own.T)) == best


def test_matching_needs_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregator, "find_spec", lambda name: None)
    for name in ("fedma", "gamf", "clusamp"):
        with pytest.raises(
            InvalidExperiment, match=rf"'{name}': needs scipy.*pip install 'fedstrata\[methods\]'"
        ):
            rules.rule_of({"name": name})


def test_layers_of_another_form_stay_where_they_are() -> None:
    tensors = [
        ("a.weight", (6, 4)),
        ("b.scale", (6,)),
        ("c.weight", (8, 6)),
        ("d.weight", (9, 12)),
        ("e.weight", (3, 9)),
    ]
    layout = ModelLayout.build([(name, shape, Section.PARAMETER) for name, shape in tensors])
    assert [[place.entry.name for place in group.places] for group in groups_of(layout)] == [
        ["d.weight", "e.weight"]
    ]
