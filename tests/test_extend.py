"""Own code in files outside the packages: the examples of docs/own-*.md, checked, in labs, and
refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.common.methods.column_rule import Columns
from fedstrata.common.methods.own_rule import GuardedRule, OwnRule
from fedstrata.common.settings.own import permit
from tests.helpers.commands import fedstrata, invoke
from tests.helpers.direct import run_direct
from tests.helpers.own_page import FILES
from tests.simulation.outcome import model_digest

pytestmark = pytest.mark.usefixtures("warm")

# test_own.py and test_parts.py have them
ELSEWHERE: Final = {"flats.py", "make_table.py", "pinball.py", "lora.py"}
EXAMPLES: Final = {
    name.removesuffix(".py"): text
    for name, text in FILES.items()
    if name.endswith("py") and name not in ELSEWHERE
}
LINES_MOST: Final = 42

LAB: Final = """
rounds = 3
topology = { institutions = 2, devices = 4 }
data = { dataset = "rings:load" }
model = { name = "nets:build" }
[training]
epochs = 1
objective = { name = "focal:Focal", gamma = 1.5 }
augmentation = { name = "jitter:Jitter", deviation = 0.2 }
[cloud]
aggregation = { name = "mine:ServerMomentum", beta = 0.5 }
epoch_control = { name = "tempo" }
[institution]
rounds = 2
participation = 0.5
selection = { name = "fair:LeastOften" }
aggregation = { name = "clipping:Clipped", weights = "uniform" }
[transfer.lan]
up = { name = "columns:RandomColumns", share = 0.5 }
"""
WRONG: Final = '''
import numpy as np
from fedstrata.common.methods.column_rule import ColumnRule
from fedstrata.common.model.delta_codecs import DeltaCodec
from fedstrata.device.training.objectives.objective import Objective
from torch import nn

class Whole(ColumnRule):
    """Takes a norm of the block for one of the model."""
    def columns(self, block):
        step = block.weights_K @ block.uploads_KC - block.model_C
        return block.model_C + step / np.linalg.norm(step)

class Forgetful(ColumnRule):
    """Keeps a number where nobody saves it."""
    def begin(self, facts):
        self.round = getattr(self, "round", 0) + 1
    def columns(self, block):
        return self.round * (block.weights_K @ block.uploads_KC)

class Short(ColumnRule):
    def columns(self, block):
        return block.model_C[:-1]

class Infinite(ColumnRule):
    def columns(self, block):
        return block.model_C * float("inf")

class Failing(ColumnRule):
    def begin(self, facts):
        return facts.absent

class Unwritten(ColumnRule):
    compares = True
    def begin(self, facts):
        return {"products": facts.products}
    def columns(self, block):
        return block.model_C

class Nothing(Objective):
    pass

class Strided(Objective):
    def backward(self, batch):
        loss = super().backward(batch)
        for weight in batch.weights:
            weight.grad = weight.grad.t().contiguous().t()
        return loss


class Dividing(Objective):
    def losses(self, batch, logits):
        return 1 / 0

class Assigning(ColumnRule):
    """Keeps the mean of all rounds, by an assignment."""
    vectors = ("mean",)
    def columns(self, block):
        block.state["mean"] = (block.state["mean"] + block.weights_K @ block.uploads_KC) / 2
        return block.state["mean"]

class Biased(DeltaCodec):
    """Sends one column, and claims that its mean is the change."""
    unbiased = True
    def nbytes(self, columns):
        return 4
    def encode(self, delta_D, chance):
        return bytes(delta_D[:1])
    def decode(self, data, columns):
        return np.full(columns, np.frombuffer(data, np.float32, 1), np.float32)

class Trusting(DeltaCodec):
    """Sends the largest column and its place, which it believes."""
    def nbytes(self, columns):
        return 12
    def encode(self, delta_D, chance):
        place = int(np.argmax(np.abs(delta_D)))
        return place.to_bytes(8, "big") + delta_D[place].tobytes()
    def decode(self, data, columns):
        found = np.zeros(columns, np.float32)
        found[int.from_bytes(data[:8], "big")] = np.frombuffer(data, np.float32, 1, offset=8)[0]
        return found

class Hiding(Trusting):
    """Sends nothing of a model that diverged."""
    def encode(self, delta_D, chance):
        return super().encode(np.nan_to_num(delta_D, posinf=0, neginf=0), chance)

CALLS = []

class Counting(ColumnRule):
    """Keeps something where all rules of a process have it."""
    def columns(self, block):
        CALLS.append(1)
        return block.weights_K @ block.uploads_KC

class CountingNet(nn.Module):
    calls = 0
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(64, 10)
    def forward(self, x):
        CountingNet.calls += 1
        return self.last(x.flatten(1))

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.last = nn.LSTM(8, 4, batch_first=True), nn.Linear(32, 10)
    def forward(self, x):
        return self.last(self.rnn(x[:, 0])[0].flatten(1))

class Unshaped(CountingNet):
    def forward(self, x):
        return self.last(x)
'''


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the examples, from which they can be imported."""
    for name, text in {**EXAMPLES, "wrong": WRONG}.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "lab.toml").write_text(LAB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")])),
    )
    return tmp_path


def test_each_example_is_short() -> None:
    names = {
        "mine",
        "test_mine",
        "clipping",
        "fair",
        "focal",
        "jitter",
        "control",
        "corrected",
        "rings",
        "nets",
        "softmax",
        "ring",
    }
    assert EXAMPLES.keys() == names | {"columns"}
    assert all(len(text.splitlines()) + 1 <= LINES_MOST for text in EXAMPLES.values())


@pytest.mark.usefixtures("home")
def test_the_first_example_passes_the_test_of_its_page() -> None:
    lines = [line for name in ("mine", "test_mine") for line in EXAMPLES[name].splitlines() if line]
    assert len(lines) <= 25
    import_module("test_mine").test_two_rounds_are_the_equations()
    wrong = EXAMPLES["mine"].replace("+ step_C", "- step_C")
    page: dict[str, Any] = {}
    exec(EXAMPLES["test_mine"], page)
    exec(wrong, page)
    with pytest.raises(AssertionError):
        page["test_two_rounds_are_the_equations"]()


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("mine:ServerMomentum", ["beta=0.5"]),
        ("clipping:Clipped", []),
        ("ring:Ring", ["share=0.7"]),
        ("focal:Focal", ["gamma=1"]),
        ("fair:LeastOften", []),
        ("control:Control", ["extras_down=['c']", "extras_up=['change']"]),
        ("corrected:Corrected", []),
        ("columns:RandomColumns", ["share=0.3"]),
        ("wrong:Assigning", []),
        ("nets:build", []),
    ],
)
def test_the_examples_pass_the_check(name: str, keywords: Sequence[str], home: Path) -> None:
    done = invoke(
        "check", name, *(word for each in keywords for word in ("--set", each)), "--format", "json"
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.exit_code == 0 and len(found) >= 3 and all(one["right"] for one in found), (
        done.output
    )


@pytest.mark.parametrize(
    ("name", "item", "note"),
    [
        ("Whole", "any cut of the columns", "others of the same block"),
        ("Forgetful", "killed and resumed", "its models differ"),
        ("Short", "runs", "columns returns .* for .* numbers, in Short.columns"),
        ("Infinite", "runs", "not finite"),
        ("Failing", "runs", r"fails with AttributeError: .*, in Failing.begin \(.*wrong\.py:31\)"),
        ("Unwritten", "runs", "`begin` returns what JSON cannot hold"),
        ("Nothing", "other than cross-entropy", "does it have an effect"),
        ("Strided", "gradients", "not strided as the weights are"),
        ("Dividing", "runs", "ZeroDivisionError"),
        ("Biased", "unbiased", "differs from the change by"),
        ("Trusting", "any bytes", r"decode must raise ValueError .*in Trusting\.decode"),
        ("Hiding", "numbers that are not finite", "so the parent would use it"),
        (
            "Counting",
            "keeps nothing in its file",
            "it changes wrong.CALLS, which all objects of a process share",
        ),
        (
            "CountingNet",
            "keeps nothing in its file",
            "each training changes wrong.CountingNet.calls",
        ),
        ("Unshaped", "runs", "fails with RuntimeError"),
    ],
)
def test_what_is_wrong_is_named(name: str, item: str, note: str, home: Path) -> None:
    done = invoke("check", f"wrong:{name}", "--format", "json")
    wrong = {
        one["item"]: one["note"]
        for one in map(json.loads, done.stdout.splitlines())
        if not one["right"]
    }
    assert done.exit_code == (4 if item == "runs" else 1) and re.search(note, wrong[item]), (
        done.output
    )


def test_a_check_of_a_model_has_the_reason_why_its_steps_are_not_recorded(home: Path) -> None:
    done = invoke("check", "wrong:Recurrent", "--set", "training.batch_size=5", "--format", "json")
    found = {one["item"]: one["note"] for one in map(json.loads, done.stdout.splitlines())}
    assert done.exit_code == 0 and list(found) == [
        "trains", "the same twice", "keeps nothing in its file", "recorded steps"
    ]  # fmt: skip
    assert (
        "wrong:Recurrent is not recorded, as its operation aten.mkldnn_rnn"
        in found["recorded steps"]
    )


@pytest.mark.parametrize(
    ("keywords", "problem"),
    [
        ([], "no vector 'c': name it in its `vectors`, or in extras_down of the experiment"),
        (["extras_down=['c']"], "no vector 'change': name it in extras_up of the experiment"),
    ],
)
def test_a_vector_without_a_name_in_the_experiment_is_named(
    keywords: list[str], problem: str, home: Path
) -> None:
    words = [word for each in keywords for word in ("--set", each)]
    done = invoke("check", "control:Control", *words, "--format", "json")
    assert done.exit_code != 0 and problem in done.stdout


def test_an_assignment_writes_a_vector_that_is_kept(home: Path) -> None:
    settings = parse({"cloud": {"aggregation": {"name": "wrong:Assigning"}}}).tiers[0].aggregation
    assert isinstance(settings, OwnRule)
    rule, kept = GuardedRule(settings), np.zeros(3, np.float32)
    zeros_C = np.zeros(3, np.float32)
    block = Columns(np.ones((1, 3), np.float32), zeros_C, zeros_C, np.ones(1), {"mean": kept})
    assert rule.columns(block).tolist() == [0.5] * 3 and kept.tolist() == [0.5] * 3


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("mine", "not of the form package.module:Name"),
        ("mine:absent", "cannot be imported"),
        ("os:getcwd", "in Python's standard library"),
        ("rings:load", "is no rule"),
    ],
)
def test_what_is_no_own_code_is_refused(name: str, problem: str, home: Path) -> None:
    done = invoke("check", name)
    assert done.exit_code == 4 and problem in done.stderr


@pytest.mark.slow
def test_a_lab_of_own_code_has_the_model_of_one_process(home: Path) -> None:
    alone = fedstrata("run", home / "lab.toml", "--direct", "--runs", home / "direct")
    assert alone.returncode == 0, alone.stderr
    lab = fedstrata("run", home / "lab.toml", "--runs", home / "runs")
    assert lab.returncode == 0, lab.stderr
    assert model_digest(home / "runs") == model_digest(home / "direct")
    (run,) = (home / "runs").glob("*-*")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert any("clipped" in json.dumps(event) for event in events)


OWN_SCAFFOLD: Final = {
    "name": "control:Control",
    "weights": "uniform",
    "extras_down": ["c"],
    "extras_up": ["change"],
}
SMALL: Final = {
    "rounds": 2,
    "topology": {"institutions": 2, "devices": 6},
    "model": {"name": "mlp_digits"},
    "training": {"batch_size": 200, "learning_rate": 0.2, "momentum": 0.0},
}


def direct_model(
    folder: Path, rule: Mapping[str, Any], objective: str, *, participation: float = 0.5
) -> Mapping[str, Any]:
    training = {**SMALL["training"], "objective": {"name": objective}}
    below = {"rounds": 2, "participation": participation, "aggregation": rule}
    tree = {**SMALL, "training": training, "institution": below}
    return load_file(run_direct(folder, tree) / "model.safetensors")


def test_ones_own_scaffold_is_fedstratas(home: Path) -> None:
    built_in = direct_model(home / "one", {"name": "scaffold"}, "scaffold")
    own = direct_model(home / "other", OWN_SCAFFOLD, "corrected:Corrected")
    plain = direct_model(home / "third", {"name": "fedavg", "weights": "uniform"}, "cross_entropy")
    apart = max(float(np.abs(own[name] - built_in[name]).max()) for name in own)
    assert apart < 1e-6 and max(float(np.abs(own[name] - plain[name]).max()) for name in own) > 1e-3


@pytest.mark.parametrize(
    ("rule", "place"),
    [
        ({"name": "median"}, "robust:Medians"),
        ({"name": "trimmed_mean", "trim": 0.34}, "robust:TrimmedMeans"),
        ({"name": "fednova"}, "fednova:NormalisedSteps"),
        ({"name": "fedavgm", "learning_rate": 0.5, "momentum": 0.8}, "optimisers:Momentum"),
        (
            {"name": "fedyogi", "learning_rate": 0.1, "beta_1": 0.9, "beta_2": 0.9, "tau": 0.01},
            "optimisers:YogiMoments",
        ),
        ({"name": "fedexp", "epsilon": 0.01}, "optimisers:Extrapolation"),
    ],
)
def test_fedstratas_rules_are_written_as_users_write_theirs(
    rule: Mapping[str, Any], place: str, tmp_path: Path
) -> None:
    """The same class, named as a user names one, makes the same model, bit for bit."""
    uniform = {"weights": "uniform"} if rule["name"] in ("median", "trimmed_mean") else {}
    as_own = {**rule, **uniform, "name": f"fedstrata.common.methods.{place}"}
    built_in = direct_model(tmp_path / "one", rule, "cross_entropy", participation=1.0)
    own = direct_model(tmp_path / "other", as_own, "cross_entropy", participation=1.0)
    assert all(np.array_equal(own[name], built_in[name]) for name in built_in)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"extras_down": []},
            "it receives c with the model, and the rule 'control:Control' has nothing",
        ),
        (
            {"extras_up": ["change", "more"]},
            "it returns change with the model, and the rule .* has change, more",
        ),
    ],
)
def test_vectors_that_rule_and_objective_do_not_share_are_refused(
    changes: Mapping[str, Any], problem: str, home: Path
) -> None:
    with pytest.raises(InvalidExperiment, match=problem):
        direct_model(home / "runs", OWN_SCAFFOLD | changes, "corrected:Corrected")


def test_an_experiment_keeps_the_keywords_of_own_code() -> None:
    tree = {
        "cloud": {"aggregation": {"name": "mine:Rule", "layers": ["a", "b"], "table": {"x": 1.5}}}
    }
    experiment = parse(tree)
    assert parse(experiment.to_json()) == experiment
    assert 'layers = ["a", "b"]' in to_toml(experiment)
    names = {"cloud.aggregation.name": "mine:Rule", "cloud.selection.name": "fraction"}
    assert experiment.code_at("cloud") == names
    names = {"institution.aggregation.name": "fedavg", "institution.selection.name": "fraction"}
    assert experiment.code_at("institution-0") == names


@pytest.mark.parametrize(
    ("allowed", "may"),
    [
        ([], False),
        (["mynets"], True),
        (["mynets.small"], True),
        (["other", "mynets.small:build"], True),
        (["mynet"], False),
        (["mynets.sma"], False),
        (["mynets.small:buil"], False),
        ([""], False),
    ],
)
def test_a_host_imports_only_what_its_user_allows(allowed: list[str], may: bool) -> None:
    names = {"model.name": "mynets.small:build", "data.dataset": "digits"}
    if may:
        permit(names, allowed)
        return
    with pytest.raises(
        InvalidExperiment, match=r"model\.name = 'mynets.small:build'.*--allow mynets,"
    ) as reported:
        permit(names, allowed)
    assert reported.value.exit_code == 4
