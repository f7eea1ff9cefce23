"""The experiment file: what it states is what is run, and what cannot work is refused with a
remedy.
"""

from __future__ import annotations

import json
import tomllib
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from fedstrata.common.errors import MESSAGE_MOST, InvalidExperiment, bounded
from fedstrata.common.experiment.reading import load, parse, to_toml
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.experiment.short_form import ShortForm
from fedstrata.common.methods.fedcross import FedCross
from fedstrata.common.methods.own_rule import OwnRule
from fedstrata.common.methods.settings import RULES
from fedstrata.common.settings import links
from fedstrata.common.settings.links import LinkDirection, LinkSettings, shipped
from fedstrata.common.settings.tables import FORMS
from fedstrata.common.settings.topology import RESERVED, participants
from fedstrata.deploy.console.login import Login
from tests.helpers.rules import LEAST, WITH_OBJECTIVE, least_lab
from tests.refused import tree_of


def refusal(tree: dict[str, Any] | str) -> InvalidExperiment:
    with pytest.raises(InvalidExperiment) as caught:
        parse(tree)
    return caught.value


def load_text(tmp_path: Path, text: str, *overrides: str) -> Experiment:
    path = tmp_path / "experiment.toml"
    path.write_text(text, encoding="utf-8")
    return load(path, overrides)


# What is valid


def test_the_defaults_are_an_experiment() -> None:
    assert parse({}).tree.children == {"cloud": ["institution-0"], "institution-0": ["device-0"]}


@st.composite
def experiments(draw: st.DrawFn) -> Experiment:
    """Draw numbers, texts and names; each rule and each table has a test of its own."""
    names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,12}", fullmatch=True).filter(
        lambda name: name not in RESERVED
    )
    rate = st.none() | st.floats(1e-6, 1e5)
    own = draw(st.lists(names, min_size=4, max_size=9, unique=True))
    institutions, devices = own[: len(own) // 3], own[len(own) // 3 :]
    topology: dict[str, Any] = {"institutions": institutions, "devices": devices}
    if draw(st.booleans()):
        topology["members"] = {
            name: devices[m :: len(institutions)] for m, name in enumerate(institutions)
        }
    link = st.sampled_from(
        ["lte", "mine", {"profile": "mine", "down_mbit": 3.0}, {"profile": "3g"}, {"delay_ms": 5.0}]
    )
    concentration = draw(st.floats(1e-300, 1e300))
    data = {
        "root": draw(st.text(min_size=1)),
        "partition": "dirichlet",
        "concentration": concentration,
    }
    closing = {"rule": "quorum", "quorum": 1, "deadline_s": draw(st.floats(1e-3, 1e6))}
    return parse(
        {
            "name": draw(names),
            "seed": draw(st.integers(0, 2**63 - 1)),
            "stop": {"target": draw(st.none() | st.floats(0.01, 1.0))},
            "topology": topology,
            "data": data,
            "training": {
                "learning_rate": draw(st.floats(1e-12, 1e6)),
                "momentum": draw(st.floats(0, 0.999)),
            },
            "institution": {"participation": draw(st.floats(1e-6, 1)), "closing": closing},
            "profiles": {"mine": {"up_mbit": draw(rate), "delay_ms": draw(st.floats(0, 1e4))}},
            "links": {
                "wan": {"up_mbit": draw(rate)},
                "lan": draw(link),
                "of": {devices[-1]: draw(link)},
            },
            "transfer": {"idle_s": draw(st.floats(30, 1e9))},  # beyond twice the delay
        }
    )


@given(experiment=experiments())
def test_toml_and_json_say_the_same(experiment: Experiment) -> None:
    from_toml = parse(tomllib.loads(to_toml(experiment)))
    from_json = parse(experiment.to_json())
    assert from_toml == from_json == parse(experiment.to_json().encode()) == experiment
    assert from_toml.digest == from_json.digest == experiment.digest
    assert from_toml.to_json() == experiment.to_json()


def test_every_key_is_written_out(tmp_path: Path) -> None:
    def keys(tree: dict[str, Any], path: str = "") -> set[str]:
        return {
            key
            for name, value in tree.items()
            for key in (
                keys(value, f"{path}{name}.") if isinstance(value, dict) else {f"{path}{name}"}
            )
        }

    trace = {"seconds": [0], "up_mbit": [1], "down_mbit": [1], "repeat_s": 9}
    private = {"clip_norm": 1, "noise_multiplier": 1, "delta": 0.1, "max_epsilon": 99}
    given_ = {
        "stop": {"target": 0.5, "patience": 3},
        "model": {"initial": "runs/it"},
        "data": {"dataset": "synthetic", "classes": 2},
        "training": {
            "clip_norm": 1,
            "vmapped": False,
            "schedule": {"every": 1, "factor": 0.5, "halving": 1},
        },
        "availability": {"trace": {"changes": {"device-0": [0, 1]}, "repeat_s": 9}},
        "links": {tier: {"profile": "lte", "trace": trace} for tier in ("wan", "lan")},
        "hardware": {"default": {"profile": "raspberry-pi-5", "step_s": 0.1}},
        "cloud": {
            "min_available": 1,
            "closing": {"quorum": 1, "deadline_s": 1},
            "privacy": {**private, "unit": "institution", "noise_by": "parent", "quantile": 0.5},
        },
        "institution": {
            "min_available": 1,
            "closing": {"quorum": 1, "deadline_s": 1},
            "privacy": {**private, "unit": "sample", "sampling_rate": 0.1},
        },
        "topology": {"members": {"institution-0": ["device-0"]}},
    }
    experiment = parse(given_)
    text = to_toml(experiment)
    without_effect = {"score.better"}  # of accuracy
    without_effect |= {"cloud.privacy.sampling_rate", "institution.privacy.quantile"}
    without_effect |= {"cloud.move_after_s", "institution.move_after_s"}  # with privacy
    assert (
        keys(tomllib.loads(text))
        == keys(ShortForm.model_validate(given_).model_dump(mode="json")) - without_effect
    )
    assert load_text(tmp_path, text) == experiment


@pytest.mark.parametrize(
    "root",
    ["dätä", "\U0001f600", "a\\b", 'a"b', "tab\there", "line\nline", "\x7f", "\x00", "'", "# no"],
)
def test_any_text_can_be_written(tmp_path: Path, root: str) -> None:
    experiment = parse({"data": {"root": root}})
    assert load_text(tmp_path, to_toml(experiment)) == experiment


def test_names_with_dots_are_one_key(tmp_path: Path) -> None:
    topology = {
        "institutions": ["site.a", "b"],
        "devices": ["d.1", "d.2"],
        "members": {"site.a": ["d.1"], "b": ["d.2"]},
    }
    experiment = parse({"topology": topology})
    assert load_text(tmp_path, to_toml(experiment)) == experiment


# Every key is written out: what could be lost are values of keys that have an effect only beside
# others.
CHANGES = """\
seed = 2
topology.devices = 2
topology.institutions = ['a']
topology.devices = ['a']
stop.best = true
model.initial = 'runs/it'
data.dataset = 'mnist'
data.dataset = 'cifar100'
data = {dataset = 'cifar100', labels = 'coarse'}
data = {dataset = 'folder', partition = 'natural', classes = ['a']}
data = {dataset = 'folder', partition = 'natural', classes = ['b']}
data = {dataset = 'synthetic', classes = 2}
data = {dataset = 'synthetic', classes = 3}
data = {dataset = 'synthetic', classes = 2, image_shape = [1, 8, 8]}
data = {dataset = 'synthetic', classes = 2, samples = 1}
data = {dataset = 'synthetic', classes = 2, test_samples = 1}
data.partition = 'dirichlet'
data = {partition = 'dirichlet', concentration = 0.1}
data = {partition = 'dirichlet', min_samples = 0}
data.partition = 'dirichlet_overlap'
data = {partition = 'dirichlet_overlap', partition_size = 601}
data.partition = 'shards'
data = {partition = 'shards', shards = 3}
data.partition = 'institution_shards'
data = {partition = 'institution_shards', within = 'shards'}
data = {partition = 'institution_shards', within = 'dirichlet', within_concentration = 1}
data = {partition = 'institution_shards', within = 'dirichlet', within_concentration = 2}
training.momentum = 0
training.weight_decay = 1e-9
evaluation.every = 2
cloud.aggregation.weights = 'uniform'
institution.aggregation.weights = 'uniform'
institution.rounds = 2
cloud.aggregation = {name = 'fedcross', alpha = 0.9}
links.wan.up_mbit = 1
links.lan.up_mbit = 1
links.lan = 'lte'
links.of.device-0 = 'lte'
links.of.institution-0 = 'lte'
hardware.of.device-0 = 'raspberry-pi-5'
hardware.profiles.mine = {}
adversaries = [{attack = 'scaled', share = 1.0}]
adversaries = [{attack = 'scaled', share = 1.0, probability = 0.5}]
institution.privacy = {unit = 'device', noise_multiplier = 1, clip_norm = 1, delta = 0.1}
institution.privacy = {unit = 'device', noise_multiplier = 1, clip_norm = 1, delta = 0.1, noise = 'seeded'}
institution.privacy = {unit = 'device', noise_multiplier = 1, clip_norm = 1, delta = 0.1, noise_by = 'parent'}
institution.privacy = {unit = 'device', noise_multiplier = 1, clip_norm = 1, delta = 0.2}
institution.privacy = {unit = 'device', noise_multiplier = 1, clip_norm = 1, delta = 0.1, max_epsilon = 9.0}
"""


def changes() -> list[dict[str, Any]]:
    """Return them, and each rule whose experiment needs no more children."""
    rules = [
        {tier: {"aggregation": table}}
        for tier in ("cloud", "institution")
        for table in list(LEAST.values())[1:]
        if table["name"] not in {*WITH_OBJECTIVE, "median", "geometric_median"}
    ]
    return [*map(tree_of, CHANGES.splitlines()), *rules]


def test_the_digest_changes_with_any_value() -> None:
    digests = [parse({}).digest, *(parse(change).digest for change in changes())]
    assert len(set(digests)) == len(digests) and all(len(digest) == 16 for digest in digests)
    assert parse({"seed": 1, "rounds": 10}).digest == parse({}).digest  # defaults, said or not
    # a number
    assert (
        parse({"training": {"momentum": 0}}).digest == parse({"training": {"momentum": 0.0}}).digest
    )


# Keys of the data that do nothing

USED = """\
dataset = 'cifar100'; labels = 'fine'
dataset = 'synthetic'; classes = 2
dataset = 'folder'; partition = 'natural'; classes = ['a']
dataset = 'synthetic'; classes = 2; image_shape = [3, 8, 8]
dataset = 'synthetic'; classes = 2; samples = 2
dataset = 'synthetic'; classes = 2; test_samples = 2
partition = 'dirichlet'; concentration = 1.0
partition = 'dirichlet_overlap'; concentration = 1.0
partition = 'institution_dirichlet'; concentration = 1.0
partition = 'shards'; shards = 2
partition = 'institution_shards'; shards = 2
partition = 'institution_dirichlet'; within = 'shards'; shards = 2
partition = 'institution_shards'; within = 'iid'
partition = 'institution_dirichlet'; within = 'iid'
partition = 'institution_shards'; within = 'dirichlet'; within_concentration = 1.0
partition = 'dirichlet'; min_samples = 2
partition = 'institution_dirichlet'; min_samples = 2
partition = 'institution_shards'; within = 'dirichlet'; min_samples = 2
partition = 'dirichlet_overlap'; partition_size = 2
"""  # each with its last key


@pytest.mark.parametrize("line", USED.splitlines())
def test_a_key_of_the_data_that_does_something_is_written_out(line: str) -> None:
    data = tree_of(line)
    experiment = parse({"data": data})
    assert list(data)[-1] in json.loads(experiment.to_json())["data"]
    assert parse(experiment.to_json()) == experiment


def test_keys_of_the_data_that_do_nothing_are_not_written_out() -> None:
    written = json.loads(parse({}).to_json())["data"]
    kept = {"dataset": "digits", "root": "data", "noise": 0.0, "partition": "iid"}
    assert written == kept | {"targets": "classes", "normalise": "published", "node_samples": 0}


# Keys and values that are wrong


def patterns(schema: Any, seen: set[int]) -> Iterator[str]:
    if id(schema) in seen:
        return
    seen.add(id(schema))
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        schema = list(schema.values())
    for each in schema if isinstance(schema, list | tuple) else ():
        yield from patterns(each, seen)


def test_each_form_of_a_text_has_words_for_its_error() -> None:
    found = set(patterns(Experiment.__pydantic_core_schema__, set()))
    assert len(found) > 5 and found <= FORMS.keys()


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_known_by_its_name(tmp_path: Path, name: str) -> None:
    experiment = parse(least_lab(name))
    assert type(experiment.tiers[0].aggregation) is RULES[name]
    assert experiment.tiers[0].aggregation == RULES[name](**LEAST[name])
    assert load_text(tmp_path, to_toml(experiment)) == experiment == parse(experiment.to_json())
    override = ", ".join(f"{key}={json.dumps(value)}" for key, value in LEAST[name].items())
    more = (
        [f"training.objective.name={json.dumps(WITH_OBJECTIVE[name])}"]
        if name in WITH_OBJECTIVE
        else []
    )
    three = ("topology.institutions=1", "topology.devices=3")
    lab = load_text(tmp_path, "", *three, f"institution.aggregation={{{override}}}", *more)
    assert lab.tiers[1].aggregation.name == name


def test_an_experiment_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse({}).seed = 3  # type: ignore[misc]


# Topology


def test_members_are_taken_as_they_are_said() -> None:
    members = {"b": ["device-2", "device-0"], "a": ["device-1"]}
    experiment = parse({"topology": {"institutions": ["a", "b"], "devices": 3, "members": members}})
    children = {"cloud": ["a", "b"], "a": ["device-1"], "b": ["device-2", "device-0"]}
    assert experiment.tree.children == children and experiment.sizes() == [[2], [1, 2]]


def test_millions_of_devices_need_no_names() -> None:
    tree = {
        "topology": {"institutions": 10_000, "devices": 10_000_000},
        "institution": {"participation": 0.5},
    }
    tracemalloc.start()
    sizes = parse(tree).sizes()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sizes == [[10_000], [1000] * 10_000] and peak < 10e6


# Links and profiles


def test_a_tier_or_a_node_has_the_link_that_is_said_for_it(tmp_path: Path) -> None:
    experiment = load_text(
        tmp_path,
        """
        topology = { institutions = 2, devices = 4 }
        [profiles.my-link]
        up_mbit = 3
        [profiles.dsl]  # in place of the one that ships
        down_mbit = 7
        [links]
        wan = "wan-10mbit"
        lan = { up_mbit = 40, delay_ms = 2 }
        [links.of]
        institution-1 = "my-link"
        device-1 = { profile = "lte", up_mbit = 2 }
        device-2 = "dsl"
        device-3 = { down_mbit = 5 }
        """,
    )
    assert experiment.link("institution-0") == LinkSettings(
        up_mbit=10.0,
        down_mbit=10.0,
        delay_ms=shipped()["wan-10mbit"]["delay_ms"],
        profile="wan-10mbit",
    )
    assert experiment.link("institution-1") == LinkSettings(up_mbit=3.0, profile="my-link")
    assert experiment.link("device-0") == LinkSettings(up_mbit=40.0, delay_ms=2.0)
    lte = shipped()["lte"]
    assert experiment.link("device-1") == LinkSettings(
        up_mbit=2.0, down_mbit=lte["down_mbit"], delay_ms=lte["delay_ms"], profile="lte"
    )
    assert experiment.link("device-2") == LinkSettings(down_mbit=7.0, profile="dsl")
    assert experiment.link("device-3") == LinkSettings(
        down_mbit=5.0
    )  # its table states all; the tier's link is another's
    assert load_text(tmp_path, to_toml(experiment)) == experiment == parse(experiment.to_json())


def test_a_link_keeps_its_numbers_when_a_later_release_changes_the_profile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = parse({"links": {"wan": "lte"}})
    monkeypatch.setattr(
        links, "shipped", lambda: {"lte": {"up_mbit": 1.0, "down_mbit": 1.0, "delay_ms": 1.0}}
    )
    assert parse(experiment.to_json()) == parse(tomllib.loads(to_toml(experiment))) == experiment
    assert parse({"links": {"wan": "lte"}}) != experiment


def test_a_link_of_nobody() -> None:
    with pytest.raises(
        InvalidExperiment,
        match=r"^topology = 'xyzzy': no institution or device has this .*, \.\.\.",
    ):
        parse({"topology": {"devices": 30}}).link("xyzzy")


def test_rates_and_delays_are_handed_on_in_bytes_and_seconds() -> None:
    link = LinkSettings(up_mbit=8.0, delay_ms=20.0)
    assert (link.up, link.down) == (LinkDirection(1e6, 0.02), LinkDirection(None, 0.02))


# Closing and participation


@pytest.mark.parametrize(
    ("children", "fraction", "expected"),
    [
        (10, 0.1, 1),
        (10, 0.3, 3),
        (10, 0.29, 2),
        (100, 0.29, 29),
        (3, 0.01, 1),
        (40, 1.0, 40),
        (7, 0.7, 4),
        (1, 1, 1),
    ],
)
def test_participants_are_counted_without_rounding_errors(
    children: int, fraction: float, expected: int
) -> None:
    assert participants(children, fraction) == expected


@given(children=st.integers(1, 1000), drawn=st.integers(1, 1000))
def test_a_fraction_gives_back_its_numerator(children: int, drawn: int) -> None:
    assert participants(children, min(drawn, children) / children) == min(drawn, children)


# Files and overrides


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidExperiment, match="Name a TOML file"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("seed=7", ("seed", 7)),
        (" seed = 7 ", ("seed", 7)),
        ("training.learning_rate=0.5", ("training.learning_rate", 0.5)),
        ("training.learning_rate=1e-3", ("training.learning_rate", 0.001)),
        ("training.momentum=0", ("training.momentum", 0.0)),
        ("model.name=lenet5", ("model.name", "lenet5")),
        ('model.name="lenet5"', ("model.name", "lenet5")),
        ("data.root=/some/where else", ("data.root", "/some/where else")),
        ("data.root=a=b", ("data.root", "a=b")),
        ('topology.institutions=["a"]', ("tree.aggregators", ["a"])),
        ("topology.devices=3", ("tree.devices", ["device-0", "device-1", "device-2"])),
        ("cloud.epoch_control.name=tempo", ("cloud.epoch_control.name", "tempo")),
        (
            "links.of.device-0=lte",
            ("links.of", {"device-0": parse({"links": {"lan": "lte"}}).tiers[-1].link}),
        ),
    ],
)
def test_an_override_is_read_like_the_file(
    tmp_path: Path, override: str, value: tuple[str, Any]
) -> None:
    experiment: Any = load_text(tmp_path, "seed = 3\n[training]\nepochs = 2\n", override)
    key, expected = value
    for part in key.split("."):
        experiment = getattr(experiment, part)
    assert experiment == expected and type(experiment) is type(expected)


def test_overrides_change_nothing_else_and_the_last_one_wins(tmp_path: Path) -> None:
    experiment = load_text(
        tmp_path,
        "[training]\nepochs = 2\nbatch_size = 5\n",
        "training.epochs=3",
        "training.epochs=4",
    )
    assert experiment == parse({"training": {"epochs": 4, "batch_size": 5}})


NAMES: dict[str, str] = {  # by key of a table that its name stands for
    "score": "accuracy",
    "model": "mlp_digits",
    "training.objective": "fedprox",
    "training.augmentation": "images",
    "training.optimizer": "adam",
    "training.schedule": "cosine",
    "training.trainer": "mine:Trainer",
    "cloud.aggregation": "fedcross",
    "cloud.selection": "round_robin",
    "cloud.epoch_control": "tempo",
    "institution.aggregation": "fedmr",
    "institution.selection": "oort",
    "transfer.wan.up": "topk",
    "transfer.lan.up": "delta+int8",
}


ENCODINGS = ("utf-8-sig", "utf-16-le", "utf-16-be")  # of editors on Windows, with a byte order mark


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_files_of_other_editors_are_read(tmp_path: Path, encoding: str) -> None:
    text = "" if encoding.endswith("sig") else "\ufeff"
    (tmp_path / "it.toml").write_bytes(
        f"{text}seed = 3\r\nname = 'Zürich'\r\n".replace("ü", "u").encode(encoding)
    )
    assert load(tmp_path / "it.toml").seed == 3
    (tmp_path / "password").write_bytes(f"{text}sécret\r\n".encode(encoding))
    login = Login(username="me", password_file=str(tmp_path / "password"))
    assert login.address("localhost", node="device-0").password == "sécret"


@pytest.mark.parametrize(("key", "name"), NAMES.items())
def test_a_name_stands_for_its_table(tmp_path: Path, key: str, name: str) -> None:
    text = "[topology]\ndevices = 4\ninstitutions = 2\n"
    expected = load_text(tmp_path, text, f"{key}.name={name}")
    assert load_text(tmp_path, text, f"{key}={name}") == expected
    assert load_text(tmp_path, f'{key} = "{name}"\n{text}') == expected


def test_a_name_stands_for_its_table_in_tiers() -> None:
    tiers = [
        {"name": "wan", "fan_out": 2, "aggregation": "fedcross", "selection": "oort", "link": "lte"}
    ]
    found = parse({"tiers": tiers}).tiers[0]
    assert (found.aggregation.name, found.selection.name, found.link.profile) == (
        "fedcross",
        "oort",
        "lte",
    )


def test_all_tables_that_are_chosen_by_a_name_are_known() -> None:
    found: set[str] = set()

    def collect(table: type[BaseModel], path: str) -> None:
        for key, field in table.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found.update([f"{path}{key}"] if "name" in kind.model_fields else [])
                collect(kind, f"{path}{key}.")

    collect(ShortForm, "")
    assert found == NAMES.keys()


def test_a_key_is_set_below_a_name_that_stands_for_its_table(tmp_path: Path) -> None:
    text = (
        '[cloud]\naggregation = "fedcross"\n[links]\nwan = "lte"\n[topology]\ndevices = '
        "4\ninstitutions = 2\n"
    )
    found = load_text(tmp_path, text, "cloud.aggregation.alpha=0.8", "links.wan.delay_ms=3")
    assert (
        isinstance(found.tiers[0].aggregation, FedCross) and found.tiers[0].aggregation.alpha == 0.8
    )
    assert (found.tiers[0].link.profile, found.tiers[0].link.delay_ms) == ("lte", 3)


def test_a_keyword_of_own_code_keeps_its_text() -> None:
    rule = (
        parse({"cloud": {"aggregation": {"name": "mine:Rule", "model": "small"}}})
        .tiers[0]
        .aggregation
    )
    assert isinstance(rule, OwnRule) and rule.keywords == {"model": "small"}


def test_a_refusal_is_no_longer_than_some_lines() -> None:
    long = {"seconds": [*range(5000)], "up_mbit": [0], "down_mbit": [1]}
    message = str(refusal({"links": {"wan": {"trace": long}}}))
    assert len(message) <= MESSAGE_MOST and message.endswith(".")
    names = [f"institution-{i}" for i in range(5000)]
    message = str(
        refusal({"topology": {"institutions": names, "devices": ["a"], "members": {"b": ["a"]}}})
    )
    assert len(message) <= MESSAGE_MOST and "topology.members.b = ['a']" in message
    assert str(InvalidExperiment("k", "x" * 250, "p", "R.")) == f"k = {'x' * 250!r}: p. R."
    assert (
        bounded("ab" * 500, 100) == bounded(bounded("ab" * 500, 100), 100)
        and len(bounded("ab" * 500, 100)) == 100
    )
