"""Labs without a network: what two and three layers must have in common, and runs that are resumed.

`test_lab` compares them with labs over a network.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import InvalidExperiment, RunFailed
from fedstrata.common.experiment.reading import parse
from fedstrata.common.model.codec_settings import Codecs
from fedstrata.common.model.layout import LinkLayouts, ModelLayout, Section
from fedstrata.common.protocol.messages import Task
from fedstrata.common.runtime.link_models import Arriving
from fedstrata.common.runtime.round import Dispatch, DoTask, Report, WorkResult
from fedstrata.common.settings.closing import Closing
from fedstrata.common.storage.spool import Spool
from fedstrata.deploy.local.calls import Calls, Clock
from fedstrata.deploy.local.direct import run_in_process
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.sweeps.grid import merged
from fedstrata.deploy.watching.showing import show
from tests.helpers import commands
from tests.helpers.direct import resumed_run, run_direct
from tests.helpers.examples import slow

SMALL: dict[str, Any] = {
    "name": "direct",
    "seed": 3,
    "rounds": 3,
    "topology": {"institutions": 2, "devices": 4},
    "data": {"partition": "dirichlet", "concentration": 0.5},
    "model": {"name": "mlp_digits"},
    "training": {"momentum": 0.5, "learning_rate": 0.05, "batch_size": 50},
    "institution": {"rounds": 2},
}
# One step a round: many small steps of SGD enlarge the rounding of means a hundredfold within three
# global rounds.
ONE_STEP = {"batch_size": 2000, "momentum": 0.0, "learning_rate": 0.2}
CROSS = {"name": "fedcross", "alpha": 0.9, "on_new_model": "recentre"}

Model = Mapping[str, npt.NDArray[np.float32]]
Tree = Mapping[str, Any]


def run_small(root: Path, *changes: Tree) -> Path:
    return run_direct(root, merged(SMALL, *changes))


def test_a_run_that_diverges_reports_it_once_and_leaves_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steep = merged(
        SMALL,
        {"rounds": 3, "training": {"learning_rate": 1e25, "batch_size": 2000, "momentum": 0.0}},
    )
    steep["institution"] = {"rounds": 1}
    folder = RunFolder.create(tmp_path, parse(steep | {"rounds": 1}), direct=True)
    with show(folder.experiment, json_lines=False) as observe:
        run_in_process(folder, resume=False, accelerator="cpu", observe=observe)
    shown = capsys.readouterr()
    assert "loss nan" in shown.err and shown.err.count("is nan: training has diverged") == 1
    assert "test loss      not a finite number: training has diverged" in shown.out
    with show(folder.experiment, json_lines=True) as observe:
        for line in (folder.path / "events.jsonl").read_text().splitlines():
            facts = json.loads(line, parse_constant=pytest.fail)
            observe(facts.pop("event"), facts)
    events = [
        json.loads(line, parse_constant=pytest.fail)
        for line in capsys.readouterr().out.splitlines()
    ]
    losses = {event["event"]: event["loss"] for event in events if "loss" in event}
    assert losses["evaluated"] is losses["finished"] is None
    (warning,) = (
        event for event in events if event["event"] == "warning" and "diverged" in event["reason"]
    )
    assert warning["reason"] == "the test loss after global round 1 is nan: training has diverged"
    (row,) = Run(folder.path).rounds
    assert row.loss is None and row.accuracy is not None


def test_the_view_shows_a_loss_that_json_could_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    with show(parse(SMALL), json_lines=False) as observe:
        observe("evaluated", {"global_round": 1, "accuracy": None, "score": None, "loss": None})
    assert "global round 1/?  accuracy nan  loss nan" in capsys.readouterr().err


LINEAR = "from torch import nn\ndef build(*, shape, classes): return nn.Linear(shape[0], classes)\n"


def test_notes_on_split_data_are_reported_once_and_on_private_data_by_each_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "linearnet.py").write_text(LINEAR)
    rows = "".join(f"{i},{i % 5 or ''},{['None', 'Apnea'][i % 2]}\n" for i in range(100))
    (tmp_path / "t.csv").write_text(f"a,b,y\n{rows}")
    data = {"dataset": "t.csv", "root": str(tmp_path), "target_column": "y", "missing": "drop"}
    monkeypatch.setitem(SMALL, "data", {})
    split: Tree = {"data": data, "model": {"name": "linearnet:build"}, "rounds": 1}
    found = run_small(tmp_path / "runs", split)
    events = [json.loads(line) for line in (found / "events.jsonl").read_text().splitlines()]
    reasons = [
        event["reason"]
        for event in events
        if event["event"] == "warning" and "t.csv" in event["reason"]
    ]
    assert reasons == [
        f"{tmp_path}/t.csv: 20 of 100 rows lack a value and are left out (10 of 'None', 10 of "
        "'Apnea'), the first in"
        " line 2, column 'b'",
        f"{tmp_path}/t.csv: column 'y' has 'None' in 40 rows, which counts as a name: in a column "
        "of texts only empty"
        " cells are missing values",
    ]
    assert "t.csv" not in caplog.text
    for node in ("cloud", *(f"device-{i}" for i in range(4))):
        (tmp_path / node).mkdir()
        (tmp_path / node / "t.csv").write_text(
            f"a,b,y\n{rows if node != 'device-1' else '1,2,None'}"
        )
    private = data | {
        "root": f"{tmp_path}/{{node}}",
        "partition": "private",
        "classes": ["None", "Apnea"],
    }
    found = run_small(tmp_path / "runs", {**split, "data": private})
    assert (found / "events.jsonl").read_text().count("cloud/t.csv: 20 of 100 rows") == 1
    reported = [record.getMessage() for record in caplog.records if "t.csv" in record.getMessage()]
    assert [text.partition(": ")[0] for text in reported] == ["device-0", "device-2", "device-3"]
    assert all(f"{tmp_path}/device-" in text and "20 of 100 rows lack" in text for text in reported)


def model_of(folder: Path) -> Model:
    return load_file(folder / "model.safetensors")


def table(folder: Path, name: str = "rounds") -> list[dict[str, str]]:
    return commands.table(folder / f"{name}.csv")


def assert_same_bits(one: Path, other: Path) -> None:
    assert commands.tensors(one) == commands.tensors(other)


def assert_close(one: Path, other: Path) -> None:
    first, second = model_of(one), model_of(other)
    for name in first:
        np.testing.assert_allclose(first[name], second[name], rtol=0, atol=1e-6)


def test_a_run_leaves_its_folder(tmp_path: Path) -> None:
    # Of three models the two least alike choose each other, and one of them is chosen twice.
    folder = run_small(
        tmp_path, {"cloud": {"aggregation": CROSS}, "topology": {"institutions": 3, "devices": 6}}
    )
    assert {path.name for path in folder.iterdir()} == {
        "experiment.toml",
        "manifest.json",
        "rounds.csv",
        "links.csv",
        "devices.csv",
        "events.jsonl",
        "checkpoints",
        "model.safetensors",
        "ledger.json",
        "partition.npz",
        "partition.json",
    }
    assert (
        "nothing was sent" in json.loads((folder / "manifest.json").read_text())["direct"]["bytes"]
    )
    size = sum(entry.nbytes for entry in model_of(folder).values())
    for row in table(folder):
        assert [
            int(row[f"{way}_bytes"]) for way in ("wan_up", "wan_down", "lan_up", "lan_down")
        ] == [3 * size, 3 * size, 12 * size, 12 * size]
        assert 0 < float(row["accuracy"]) <= 1 and 0 < float(row["mixed_accuracy"]) <= 1
        assert float(row["spread_cloud"]) > 0 and float(row["omega_institution-0"]) > 0
        assert int(row["path_steps"]) < int(row["sgd_steps"])
    devices = table(folder, "devices")
    assert sum(int(d["sgd_steps"]) for d in devices) == sum(
        int(row["sgd_steps"]) for row in table(folder)
    )


# Two layers and three


def test_three_layers_with_one_local_round_are_two_layers(tmp_path: Path) -> None:
    changes = ({"training": ONE_STEP, "institution": {"rounds": 1}}, {"rounds": 4})
    three = run_small(tmp_path, *changes)
    two = run_small(tmp_path, *changes, {"topology": {"institutions": 1}})
    assert len({row["samples"] for row in table(two, "devices")}) == 4  # the weights matter
    assert_close(three, two)


SINGLE = [
    {"name": "fedavg"},
    {"name": "fedavg", "weights": "uniform"},
    {"name": "fedadp"},
    {"name": "fedcda", "warmup_rounds": 2, "history": "keep"},
]
SEVERAL = [
    {"name": "fedcross", "alpha": 0.9, "strategy": "in_order", "on_new_model": "recentre"},
    {"name": "fedmr", "on_new_model": "recentre"},
]


@pytest.mark.parametrize(
    "rule", [*SINGLE, *SEVERAL], ids=lambda rule: "-".join(map(str, rule.values()))
)
def test_one_institution_need_not_ask_the_cloud_between_its_rounds(
    rule: Tree, tmp_path: Path
) -> None:
    alone = {"topology": {"institutions": 1, "devices": 6}, "training": ONE_STEP}
    rounds = {"participation": 0.5, "aggregation": rule}
    together = run_small(tmp_path, alone, {"rounds": 1, "institution": {"rounds": 4, **rounds}})
    apart = run_small(tmp_path, alone, {"rounds": 4, "institution": {"rounds": 1, **rounds}})
    if rule in SINGLE:  # what comes down is what went up
        assert_same_bits(together, apart)
    else:
        assert_close(together, apart)


def test_reset_models_do_forget_where_recentred_ones_go_on(tmp_path: Path) -> None:
    found = [
        run_small(tmp_path, {"institution": {"aggregation": {**CROSS, "on_new_model": start}}})
        for start in ("reset", "recentre")
    ]
    with pytest.raises(AssertionError):
        assert_close(*found)


@pytest.mark.parametrize(
    "how", [{"alpha": 0.5}, {"first_stage_rounds": 99}], ids=["half", "first stage"]
)
def test_equal_models_are_recentred_as_they_are_reset(how: Tree, tmp_path: Path) -> None:
    found = [
        run_small(
            tmp_path,
            {"institution": {"aggregation": {"name": "fedcross", "on_new_model": start, **how}}},
        )
        for start in ("reset", "recentre")
    ]
    assert_same_bits(*found)


def test_tempo_with_equal_distances_is_fedavg_with_c_epochs(tmp_path: Path) -> None:
    # of two models, which are as far from their plain mean
    even = {"name": "fedavg", "weights": "uniform"}
    epochs = {"training": {"epochs": 3}}
    tempo = run_small(
        tmp_path, epochs, {"cloud": {"aggregation": even, "epoch_control": {"name": "tempo"}}}
    )
    assert {row[f"epochs_institution-{m}"] for row in table(tempo) for m in (0, 1)} == {"3"}
    assert_same_bits(tempo, run_small(tmp_path, epochs, {"cloud": {"aggregation": even}}))


# Interrupted and resumed

RULES = [
    {"name": "fedavg"},
    {"name": "fedadp"},
    {"name": "fedavgm"},
    {"name": "clusamp"},
    {"name": "fedadam", "learning_rate": 0.01},
    {"name": "fedcda", "warmup_rounds": 1, "history": "keep"},
    {"name": "independent", "on_new_model": "recentre"},
    {"name": "fedcross", "on_new_model": "recentre"},
    {
        "name": "fedcross",
        "strategy": "in_order",
        "dynamic_alpha_rounds": 6,
        "propeller_rounds": 2,
        "on_new_model": "recentre",
    },
    {"name": "fedmr", "on_new_model": "recentre", "first_stage_rounds": 1},
]


def test_tempos_controls_spend_the_same_epochs_on_other_institutions(tmp_path: Path) -> None:
    """The first global round is the same for all; what follows from it is reported beside it, and
    played next.
    """

    def second(name: str, **control: object) -> list[int]:
        tempo = {"cloud": {"epoch_control": {"name": "tempo", **control}}}
        lab = {
            "rounds": 2,
            "topology": {"institutions": 5, "devices": 5},
            "training": {"epochs": 4},
        }
        folder = run_small(tmp_path / name, lab, tempo)
        played = [int(table(folder)[1][f"epochs_institution-{m}"]) for m in range(5)]
        plans = [
            json.loads(line)
            for line in (folder / "events.jsonl").read_text().splitlines()
            if '"plan"' in line
        ]
        reported = next(
            plan for plan in plans if plan["node"] == "cloud" and plan["global_round"] == 1
        )
        assert list(reported["next_epochs"].values()) == played and len(reported["omegas"]) == 5
        return played

    paper = second("paper")
    shuffled, mean = second("shuffled", control="shuffled"), second("mean", control="fixed_mean")
    assert {2, 8} <= set(paper) <= set(range(2, 9))
    assert shuffled != paper and sorted(shuffled) == sorted(paper)
    assert sum(mean) == sum(paper) and max(mean) - min(mean) <= 1
    plato = second("plato", variant="plato")  # from half the number of institutions to twice that
    assert {3, 10} <= set(plato) <= set(range(3, 11))


SAVED = ("clusamp", "fedadam", "fedcda", "fedcross")  # each with another state


@pytest.mark.parametrize(
    ("rule", "tier", "every"),
    slow(
        [(rule, *each) for rule in RULES for each in (("cloud", 1), ("institution", 2))],
        but=[
            (rule, "institution", 2)
            for rule in RULES
            if rule["name"] in SAVED and "strategy" not in rule
        ],
    ),
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_a_resumed_run_gives_the_model_of_an_undisturbed_one(
    rule: Tree, tier: str, every: int, tmp_path: Path
) -> None:
    # three for each rule
    institutions, devices = (3, 3) if tier == "cloud" else (2, 6) if every == 1 else (3, 9)
    topology = {"institutions": institutions, "devices": devices}
    size: dict[str, Any] = {"rounds": 5, "topology": topology, "training": ONE_STEP}
    # not all may have a last one
    cloud = {"checkpoint_every": every, "participation": 0.67 if every > 1 else 1.0}
    tree = merged(SMALL, size, {"cloud": cloud}, {tier: {"aggregation": rule}})
    path = run_direct(tmp_path, tree, until=3)
    assert len(table(path)) == 3
    resumed_run(path)
    undisturbed = run_small(tmp_path, tree)
    assert_same_bits(path, undisturbed)
    for one, other in zip(table(path), table(undisturbed), strict=True):
        kept = [key for key in one if not key.endswith("_s") and not key.endswith("_bytes")]
        assert {key: one[key] for key in kept} == {key: other[key] for key in kept}
    assert not (path / "spool").exists()


def test_a_run_is_resumed_in_the_way_it_was_begun(tmp_path: Path) -> None:
    folder = run_small(tmp_path)
    with pytest.raises(InvalidExperiment, match="Add --direct"):
        RunFolder.reopen(folder)
    other = RunFolder.create(tmp_path, parse(SMALL))
    with pytest.raises(InvalidExperiment, match="Omit --direct"):
        RunFolder.reopen(other.path, direct=True)


# What makes no sense, and models that cannot be used


@pytest.mark.parametrize("flags", [["--direct", "--metrics", ":0"], ["--accelerator", "cpu"]])
def test_flags_that_contradict_are_refused(flags: list[str]) -> None:
    assert commands.invoke("run", "nothing.toml", *flags).exit_code == 2


LAYOUT = ModelLayout.build([("weight", (3,), Section.PARAMETER)])


def child(value: float) -> DoTask:
    async def work(task: Task, model: Arriving, report: Report) -> WorkResult:
        row = (await model.whole()).copy()
        LAYOUT.floats(row)[:] += value
        return WorkResult(row.data, Work(5, 0.1, task.epochs, 1, 0.0, 0.0))

    return work


def called(
    children: Mapping[str, float], closing: Closing
) -> tuple[dict[str, list[float]], Mapping[str, str]]:
    async def run() -> tuple[dict[str, list[float]], Mapping[str, str]]:
        calls = Calls(
            {name: child(value) for name, value in children.items()},
            samples=dict.fromkeys(children, 5),
            tests={},
            layouts=LinkLayouts.plain(LAYOUT),
            codecs=Codecs(),
            spool=Spool(None),
            resident_mb=1.0,
            clock=Clock(),
        )
        row = LAYOUT.empty()
        LAYOUT.floats(row)[:] = 1
        played = await calls.round(
            Dispatch(
                0,
                0,
                models=[(row, tuple(children))],
                epochs=dict.fromkeys(children, 1),
                closing=closing,
            )
        )
        assert LAYOUT.floats(row).tolist() == [1, 1, 1]
        return {
            name: LAYOUT.floats(upload).tolist() for name, upload in played.models.items()
        }, played.refused

    return asyncio.run(run())


def test_a_model_that_is_not_finite_is_refused_and_the_round_goes_on() -> None:
    models, refused = called({"a": 1.0, "b": np.nan, "c": 2.0}, Closing())
    assert models == {"a": [2, 2, 2], "c": [3, 3, 3]}
    assert "NaN" in refused["b"]


@pytest.mark.parametrize("closing", [Closing(), Closing(rule="quorum", quorum=2, deadline_s=1.0)])
def test_a_round_that_cannot_close_ends_the_run(closing: Closing) -> None:
    values = {"a": np.nan, "b": np.inf} | ({"c": 1.0} if closing.quorum else {})
    with pytest.raises(RunFailed, match="a and b sent a model that was refused"):
        called(values, closing)
