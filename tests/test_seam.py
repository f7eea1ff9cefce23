"""Rules in a user's files: copies of fedstrata's own are equal bit for bit; a host imports only
what it allows.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

import fedstrata
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import announced, parse, to_toml
from fedstrata.common.settings.own import permit, without_imports
from fedstrata.deploy.checking.own_checks import checks
from fedstrata.deploy.results.run import Run
from tests.helpers.commands import invoke
from tests.helpers.direct import resumed_run, run_direct
from tests.simulation.outcome import model_digest

ROOT: Final = Path(__file__).parents[1]
BASELINES: Final = sorted((ROOT / "common" / "methods" / "baselines").glob("*.py"))
# The files of a rule, by the name of the user's: what the rule's own package has is beside it.
COPIES: Final[Mapping[str, Mapping[str, str]]] = {
    "fedcross": {"their_cross": "common/methods/fedcross.py"},
    "fedmr": {"their_mr": "common/methods/fedmr.py"},
    "fedcda": {"their_cda": "common/methods/fedcda.py"},
    "feddf": {
        "their_df": "common/methods/baselines/refined.py",
        "their_distillation": "common/methods/baselines/distillation.py",
    },
}
CLASSES: Final = {
    "fedcross": "their_cross:FedCross",
    "fedmr": "their_mr:FedMR",
    "fedcda": "their_cda:FedCDA",
    "feddf": "their_df:FedDF",
}
KEYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "fedcross": {"alpha": 0.8, "similarity": "pairwise", "propeller_rounds": 1},
    "fedmr": {"granularity": "key"},
    "fedcda": {"warmup_rounds": 1, "groups": 2, "depth": 2, "memory_mb": 0.0},
    "feddf": {"steps": 6},
}
BESIDE: Final[Mapping[str, Mapping[str, Any]]] = {
    "fedcross": {"on_new_model": "recentre"},
    "fedmr": {"on_new_model": "recentre"},
    "fedcda": {"history": "keep"},
    "feddf": {},
}
SMALL: Final[Mapping[str, Any]] = {
    "rounds": 3,
    "data": {"node_samples": 60},
    "training": {"batch_size": 60, "epochs": 1},
    "cloud": {"checkpoint_every": 1},
}
# What stands for an import of these modules in a user's file.
PLAIN: Final = {"fedstrata.common.lazy": "import numpy as np\nimport numpy.typing as npt"}


def users(source: str, modules: Mapping[str, str]) -> str:
    """Return a file of fedstrata's as a user has it: the public names from `fedstrata`, its own
    modules beside it.
    """
    for name, path in modules.items():
        module = "fedstrata." + path.removesuffix(".py").replace("/", ".")
        source = source.replace(module, name)
    for module, line in PLAIN.items():
        source = re.sub(rf"^from {re.escape(module)} import .*$", line, source, flags=re.MULTILINE)
    return re.sub(
        r"^from fedstrata\.\S+ import", "from fedstrata import", source, flags=re.MULTILINE
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, with the copies and the files of the tests."""
    for modules in COPIES.values():
        for name, path in modules.items():
            (tmp_path / f"{name}.py").write_text(
                users((ROOT / path).read_text(encoding="utf-8"), modules)
            )
    (tmp_path / "wrong.py").write_text(WRONG)
    monkeypatch.chdir(tmp_path)
    importlib.invalidate_caches()
    return tmp_path


def lab(rule: Mapping[str, Any], *, layers: int) -> dict[str, Any]:
    """Return a lab with a rule: of its two or three layers the last but one runs it."""
    if layers == 2:
        return {
            **SMALL,
            "topology": {"institutions": 0, "devices": 3},
            "cloud": {**SMALL["cloud"], "aggregation": rule},
        }
    return {
        **SMALL,
        "topology": {"institutions": 2, "devices": 4},
        "institution": {"rounds": 2, "aggregation": rule},
    }


# The built-in goes the stranger's way


@pytest.mark.parametrize("path", BASELINES, ids=lambda path: path.stem)
def test_the_baselines_import_the_public_names_alone(path: Path) -> None:
    found = re.findall(
        r"^\s*(?:from|import) (fedstrata\S*)", path.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [each for each in found if each != "fedstrata" and ".baselines." not in each] == []


def test_no_line_of_the_methods_names_a_baseline() -> None:
    named = re.compile(r"\b(?:fedma|gamf|feddf|fedbe|fedlaw|fedgen)\b")
    files = [
        *BASELINES[0].parents[1].glob("*.py"),
        *(ROOT / "common" / "experiment").glob("methods.py"),
    ]
    assert [
        path.name
        for path in files
        if named.search(re.sub("#.*", "", path.read_text(encoding="utf-8")))
    ] == []


@pytest.mark.parametrize(
    ("name", "layers"), [("fedcross", 2), ("fedmr", 3), ("fedcda", 2), ("feddf", 3)]
)
def test_a_copy_of_a_rule_in_a_users_file_is_equal_bit_for_bit(
    name: str, layers: int, here: Path
) -> None:
    source = "".join((here / f"{module}.py").read_text() for module in COPIES[name])
    assert set(re.findall(r"^(?:from|import) (fedstrata\S*)", source, re.MULTILINE)) == {
        "fedstrata"
    }
    keys = {**KEYS[name], **(BESIDE[name] if layers == 3 else {})}
    ours = run_direct(here / "ours", lab({"name": name, **keys}, layers=layers))
    theirs = lab({"name": CLASSES[name], **keys}, layers=layers)
    whole = run_direct(here / "theirs", theirs)
    killed = run_direct(here / "killed", theirs, until=2)
    resumed_run(killed)
    assert model_digest(ours) == model_digest(whole) == model_digest(killed)
    assert decisions(ours) == decisions(whole)


def decisions(path: Path) -> list[dict[str, Any]]:
    """Return the published plans of a run, without times."""
    found = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    keys = (
        "stage",
        "partners",
        "permutations",
        "selected",
        "groups",
        "kept_step",
        "spread",
        "loss",
    )
    return [
        {key: each[key] for key in keys if key in each}
        for each in found
        if each.get("event", "").endswith("plan")
    ]


@pytest.mark.parametrize("name", ["fedcross", "fedmr", "fedcda", "feddf"])
def test_check_finds_nothing_wrong_with_them(name: str, here: Path) -> None:
    kind, steps = checks(CLASSES[name], KEYS[name], data=here)
    assert kind == "rule"
    assert [(one.item, one.note) for one in steps if not one.there] == []


# Permission


def test_a_node_without_permission_reads_the_experiment_and_imports_nothing(here: Path) -> None:
    experiment = parse(lab({"name": "their_cross:FedCross", "alpha": 0.8}, layers=2))
    text = experiment.to_json()
    for module in list(sys.modules):
        if module.startswith("their_"):
            del sys.modules[module]
    announced.cache_clear()
    read = announced(text)
    assert "their_cross" not in sys.modules
    assert read == experiment and read.tiers[0].aggregation.several and read.several_models
    assert read.tiers[0].aggregation.name == "their_cross:FedCross"
    assert parse(text) == experiment  # as a worker process does
    assert "their_cross" not in sys.modules
    tree = json.loads(text)
    del tree["tiers"][0]["aggregation"]["declared"]  # from a cloud that lies
    announced(json.dumps(tree))
    assert "their_cross" not in sys.modules
    with without_imports(), pytest.raises(InvalidExperiment, match="without its user's permission"):
        _ = read.tiers[0].aggregation.resolved
    assert "their_cross" not in sys.modules


def test_a_run_that_is_read_elsewhere_needs_no_file_of_its_rule(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_direct(here / "runs", {**lab({"name": "their_mr:FedMR"}, layers=2), "rounds": 1})
    (here / "their_mr.py").unlink()
    monkeypatch.delitem(sys.modules, "their_mr")
    assert Run(path).experiment.tiers[0].aggregation.several


def test_the_effective_experiment_has_all_keys_of_the_class(here: Path) -> None:
    experiment = parse(lab({"name": "their_cross:FedCross"}, layers=2))
    written = to_toml(experiment)
    assert "alpha = 0.99" in written and "several = true" in written
    assert parse(experiment.to_json()) == experiment


# Installed packages


@pytest.fixture
def package(here: Path) -> Path:
    """A package that brings a rule, an objective, a codec and a trainer by entry points; `fedavg`
    is fedstrata's.
    """
    (here / "nearby.py").write_text(PACKAGE)
    info = here / "nearby-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nearby\nVersion: 1.0\n")
    names = {"rules": "Nearby", "objectives": "Near", "codecs": "Halved", "trainers": "Idle"}
    groups = [
        f"[fedstrata.{group}]\nnear_{group} = nearby:{name}\n" for group, name in names.items()
    ]
    (info / "entry_points.txt").write_text("".join(groups))
    sys.path.append(str(here))
    return here


PACKAGE: Final = """
from fedstrata import ArrayTrainer, DeltaCodec, MixingRule, Objective

class Nearby(MixingRule):
    share: float = 0.5
    def plan(self, now):
        return None

class Near(Objective):
    pass

class Halved(DeltaCodec):
    pass

class Idle(ArrayTrainer):
    pass
"""


def test_an_installed_package_brings_names(package: Path) -> None:
    tree = {
        "cloud": {"aggregation": "near_rules"},
        "training": {"objective": {"name": "near_objectives"}},
        "transfer": {"wan": {"up": "near_codecs"}},
    }
    experiment = parse(tree)
    assert (
        experiment.tiers[0].aggregation.name == "nearby:Nearby"
        and experiment.tiers[0].aggregation.several
    )
    assert experiment.training.objective.name == "nearby:Near"
    assert experiment.tiers[0].transfer.up.name == "nearby:Halved"
    trained = parse({"training": {"trainer": {"name": "near_trainers", "features": 3}}})
    assert trained.training.trainer.name == "nearby:Idle" and trained.data.dataset == "nearby:Idle"
    named = {
        key: name
        for key, name in experiment.code_at("cloud").items()
        if key == "cloud.aggregation.name"
    }
    with pytest.raises(
        InvalidExperiment, match=r"'nearby:Nearby': this host does not import.*--allow nearby"
    ):
        permit(named, ["mine"])
    permit(named, ["nearby"])
    shown = invoke("check", "--list", "--format", "json")
    listed = [json.loads(line) for line in shown.stdout.splitlines()]
    assert {"kind": "rule", "name": "near_rules", "class": "nearby:Nearby"} in listed
    assert {"kind": "rule", "name": "fedcross", "class": "fedstrata"} in listed
    with pytest.raises(
        InvalidExperiment, match=r"cloud\.aggregation\.name = 'near_codecs': no rule has this name"
    ):
        parse({"cloud": {"aggregation": "near_codecs"}})


# Errors

WRONG: Final = """
from typing import ClassVar

import numpy as np
from pydantic import Field

from fedstrata import Aggregated, MixingRule, Rule, RuleSettings, SingleModelRule, MeanRule


class Mix(MixingRule):
    what: str
    share: float = Field(default=0.5, gt=0)

    def plan(self, now):
        count = now.count
        return {
            "shape": np.eye(count + 1),
            "sum": 2 * np.eye(count),
            "nan": np.eye(count) * np.nan,
            "number": np.full(count, count),
            "kind": "no array",
            "half": [(now.context.layout.entries[:1], np.arange(count))],
            "facts": (np.eye(count), {"a": np.ones(2)}),
            "right": (np.full((count, count), 1 / count), {"weight": 1 / count}),
        }.get(self.what) if self.what != "raises" else {}["key"]


class Own(RuleSettings):
    what: str

    def build(self, context):
        if self.what == "raises":
            return {}["key"]
        return 5 if self.what == "number" else Node(self.what, context)


class Node(SingleModelRule):
    def __init__(self, what, context):
        super().__init__(context, MeanRule(), weights="data")
        self.what = what

    def dispatch(self, r, children):
        return [(self.current, children[1:])] if self.what == "child" else super().dispatch(r, children)

    def aggregate(self, r, uploads):
        done = super().aggregate(r, uploads)
        if self.what == "nan":
            self.context.layout.floats(self.model)[:] = np.nan
        if self.what == "facts":
            return Aggregated(None, {}, None, {"a": np.ones(2)})
        return None if self.what == "nothing" else done

    def save(self, folder):
        return {"a": np.ones(2)} if self.what == "save" else {}


class Answers(RuleSettings):
    several: ClassVar[int] = 5


class Reserved(RuleSettings):
    declared: int = 1
"""


@pytest.mark.parametrize(
    ("name", "keys", "problem"),
    [
        ("Mix", {}, r"cloud\.aggregation\.what: missing\. Add this key\."),
        ("Mix", {"what": "right", "share": 0.0}, (r"cloud\.aggregation\.share = 0\.0: too small\. "
r"Write a number")),
        ("Mix", {"what": "right", "shares": 1}, (r"aggregation\.shares = 1: wrong:Mix takes "
r".*share, .*Correct")),
        ("Mix", {"what": "shape"}, (r"plan returns \[4, 4\] for \[3, 3\] weights, in Mix\.plan "
r"\(wrong\.py:\d+\)\.")),
        ("Mix", {"what": "sum"}, r"plan returns weights of sum 2 for model 0, in Mix\.plan"),
        ("Mix", {"what": "nan"}, r"plan computes weights that are not finite, in Mix\.plan"),
        ("Mix", {"what": "number"}, (r"plan returns \[3, 3, 3\] for 3 numbers of uploads, in "
r"Mix\.plan")),
        ("Mix", {"what": "kind"}, r"plan returns str, not an array, in Mix\.plan"),
        ("Mix", {"what": "half"}, r"plan mixes \S+ 0 times, in Mix\.plan"),
        ("Mix", {"what": "facts"}, (r"the facts of `plan` are what JSON cannot hold .*, in "
r"Mix\.plan")),
        ("Mix", {"what": "raises"}, r"fails with KeyError: 'key', in Mix\.plan \(wrong\.py:\d+\)"),
        ("Own", {"what": "raises"}, r"fails with KeyError: 'key', in Own\.build"),
        ("Own", {"what": "number"}, r"builds int, not Rule"),
        ("Own", {"what": "child"}, r"dispatch gives models to \[.*\], in Node\.dispatch"),
        ("Own", {"what": "nan"}, (r"aggregate computes a model whose entry \S+ holds NaN or Inf, "
r"in Node\.aggregate")),
        ("Own", {"what": "facts"}, r"`facts` are what JSON cannot hold .*, in Node\.aggregate"),
        ("Own", {"what": "nothing"}, r"aggregate returns NoneType, in Node\.aggregate"),
        ("Own", {"what": "save"}, r"`save` returns what JSON cannot hold .*, in Node\.save"),
        ("Answers", {}, r"answers 5 for several"),
        ("Reserved", {}, r"has a key `declared`, which is fedstrata's"),
    ],
)  # fmt: skip
def test_an_error_in_own_code_is_one_line(
    name: str, keys: dict[str, Any], problem: str, here: Path
) -> None:
    with pytest.raises(InvalidExperiment, match=problem) as reported:
        run_direct(here / "runs", {**lab({"name": f"wrong:{name}", **keys}, layers=2), "rounds": 2})
    assert "\n" not in str(reported.value) and reported.value.exit_code == 4


def test_a_file_that_declares_something_else_is_refused(here: Path) -> None:
    tree = json.loads(parse(lab({"name": "their_cross:FedCross"}, layers=2)).to_json())
    tree["tiers"][0]["aggregation"]["declared"]["acts_from"] = 7
    with pytest.raises(
        InvalidExperiment, match=r"their_cross:FedCross.*declares something else.*Use one file"
    ):
        run_direct(here / "runs", parse(tree))


def test_the_mean_of_all_models_is_fedavg(here: Path) -> None:
    """A plan of one's own, whose facts are published."""
    path = run_direct(here / "runs", lab({"name": "wrong:Mix", "what": "right"}, layers=2))
    assert '"weight": 0.333' in (path / "events.jsonl").read_text()
    assert fedstrata.MixingRule.__name__ == "MixingRule"
