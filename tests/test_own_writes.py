"""Own code may write into what it is given: that changes no data set, no other score, and no other
pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import datasets, models
from fedstrata.common.learning.evaluation import ModelTester
from fedstrata.common.learning.landscape import Surroundings
from fedstrata.common.learning.refiner import NodeSamples
from fedstrata.device.jobs import Order
from tests.helpers.direct import run_direct
from tests.helpers.plain import first_model, row_of, trained, trainer_of

HERE = "tests.helpers.writing"
PLAIN = {"model": "Adder", "loss": "loss", "score": "score", "data": "numbers"}
WRITING = {  # what writes, beside the plain rest
    "tokens": {"model": "WritingReader", "data": "words"},
    "numbers": {"model": "WritingAdder"},
    "loss": {"loss": "writing_loss"},
    "score": {"score": "writing_score"},
    "all": {
        "model": "WritingReader",
        "data": "words",
        "loss": "writing_loss",
        "score": "writing_score",
    },
}


def lab(writing: dict[str, str], **more: Any) -> Experiment:
    own = {kind: f"{HERE}:{name}" for kind, name in (PLAIN | writing).items()}
    training = {"loss": own["loss"], "batch_size": 8, "learning_rate": 0.1}
    return parse(
        {
            "topology": {"institutions": 0, "devices": 2},
            "rounds": 1,
            "data": {"dataset": own["data"]},
            "model": {"name": own["model"]},
            "score": {"name": own["score"], "better": "higher", "also": ["accuracy"]},
            "training": training | more.pop("training", {}),
            **more,
        }
    )


def twin(writing: dict[str, str]) -> dict[str, str]:
    """Return the names of the code that does the same without writing."""
    plain = {
        "WritingReader": "Reader",
        "WritingAdder": "Adder",
        "writing_loss": "loss",
        "writing_score": "score",
    }
    return {kind: plain.get(name, name) for kind, name in writing.items()}


def tensors(experiment: Experiment) -> list[torch.Tensor]:
    data = datasets.load(experiment.data)
    return [
        each.clone()
        for each in (data.train_images, data.train_labels, data.test_images, data.test_labels)
    ]


@pytest.fixture(params=WRITING)
def writing(request: pytest.FixtureRequest) -> dict[str, str]:
    """What writes; its data set is as it was in the end."""
    chosen: dict[str, str] = WRITING[request.param]
    return chosen


@pytest.fixture(autouse=True)
def _unchanged(request: pytest.FixtureRequest) -> Any:
    experiments = [lab({"data": data}) for data in ("words", "numbers")]
    before = [tensors(each) for each in experiments]
    yield
    for experiment, tensors_then in zip(experiments, before, strict=True):
        for now, then in zip(tensors(experiment), tensors_then, strict=True):
            assert torch.equal(now, then)


def test_one_model_has_one_loss_at_the_cloud(writing: dict[str, str]) -> None:
    experiment, plain = lab(writing), lab(twin(writing))
    tester, row = ModelTester(experiment), first_model(experiment)
    found = [tester.evaluate(row) for _ in range(3)]
    wanted = ModelTester(plain).evaluate(row)
    assert found == [wanted] * 3


def test_one_model_has_one_loss_on_a_device(writing: dict[str, str]) -> None:
    more = {"evaluation": {"at": "devices", "data": "test"}}
    found = []
    for experiment in (lab(writing, **more), lab(twin(writing), **more)):
        trainer, row = trainer_of(experiment), first_model(experiment)
        for _ in range(2):
            sums = trainer.examine(Order(row, row.copy(), 0, 0, scores=True)).tests
            assert sums is not None
            found.append((sums.samples, sums.loss, sums.scores))
    assert found == [found[-1]] * 4


@pytest.mark.parametrize(
    "objective", [None, {"name": "fedsam"}, {"name": "moon"}, {"name": f"{HERE}:Twice"}], ids=str
)
def test_each_pass_of_a_step_has_the_same_batch(
    writing: dict[str, str], objective: dict[str, Any] | None
) -> None:
    chosen = {} if objective is None else {"objective": objective}
    results = []
    for names in (writing, twin(writing)):
        experiment = lab(names, training=chosen)
        trainer = trainer_of(experiment)
        out, result = trained(trainer, first_model(experiment), epochs=2)
        results.append((out.tobytes(), result.loss))
    assert results[0] == results[1]


def test_a_model_has_the_same_surroundings(writing: dict[str, str], tmp_path: Path) -> None:
    found = []
    for place, names in enumerate((writing, twin(writing))):
        tree = lab(names).model_dump(mode="json")
        run = run_direct(tmp_path / str(place), tree)
        initial = lab(names, model={"name": tree["model"]["name"], "initial": str(run)})
        found.append(Surroundings(initial, samples=30).at(0.3, directions=2))
    assert found[0] == found[1]


def test_a_refiner_reads_the_same_samples_each_time(writing: dict[str, str]) -> None:
    names = {kind: name for kind, name in writing.items() if kind in ("model", "data")}
    data = {"dataset": f"{HERE}:{(PLAIN | names)['data']}", "node_samples": 20}
    more = {"data": data, "cloud": {"aggregation": {"name": "feddf"}}}
    found = []
    for chosen in (names, twin(names)):
        experiment = lab({"loss": "loss"} | chosen, **more)
        node = NodeSamples(experiment, "cloud")
        row = row_of(models.anew(experiment, inputs=datasets.load(experiment.data).inputs))
        for _ in range(2):
            node.load(row)
            found.append(node.all_logits())
    assert all(torch.equal(each, found[-1]) for each in found)
