"""Lossy codecs: what nodes and devices remember of a model that they sent is what the other end
decoded.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import RunFailed
from fedstrata.common.experiment.reading import parse
from fedstrata.common.methods.aggregator import build
from fedstrata.common.methods.rule import Aggregated, Rule, RuleContext, Uploads, link_layouts
from fedstrata.common.methods.settings import RULES, NormBound
from fedstrata.common.model.codec_settings import DOWN, Codecs
from fedstrata.common.model.codecs import codec_of
from fedstrata.common.model.layout import LinkLayouts, ModelLayout, Row, Section
from fedstrata.common.protocol.messages import Task
from fedstrata.common.runtime.link_models import Arriving
from fedstrata.common.runtime.round import Dispatch, DoTask, Report, WorkResult
from fedstrata.common.settings.closing import Closing
from fedstrata.common.settings.training import TrainingSettings
from fedstrata.common.storage.spool import Spool
from fedstrata.deploy.local.calls import Calls, Clock
from fedstrata.deploy.sweeps.grid import merged
from tests.helpers.codecs import codecs_of
from tests.helpers.commands import tensors
from tests.helpers.direct import resumed_run, run_direct
from tests.helpers.examples import slow
from tests.helpers.real_workload import RealWorkload
from tests.helpers.rules import LEAST
from tests.helpers.rules import Report as Trained
from tests.helpers.scenarios import KilledLab
from tests.simulation.lab import ScenarioLab
from tests.simulation.outcome import model_digest
from tests.test_aggregators import label

LAYOUT: Final = ModelLayout.build(
    [
        ("weight", (40, 1000), Section.PARAMETER),
        ("mean", (3,), Section.BUFFER),
        ("steps", (), Section.COUNTER),
    ]
)
D: Final = LAYOUT.parameters
CHILDREN: Final = tuple("abcdefg")
LOSSY: Final = [name for name in DOWN if not codec_of(name).exact]
INT8: Final = {"up": "int8", "down": "int8"}


def decoded(
    name: str, row: Row, *, layout: ModelLayout = LAYOUT, reference: Row | None = None
) -> Row:
    """Return what the other end makes of a row."""
    codec, found = codec_of(name), row.copy()
    if not codec.is_row:
        codec.decode(
            layout, codec.encode(layout, row, reference=reference), found, reference=reference
        )
    return found


def drawn(seed: int) -> Row:
    row = np.zeros(LAYOUT.row_bytes, np.uint8)
    LAYOUT.floats(row)[:] = np.random.default_rng(seed).normal(size=LAYOUT.columns)
    return row


# The rules

BOUNDS: Final = {"plain": NormBound(), "bounded": NormBound(action="clip", factor=1.0)}


def rule_of(tree: Mapping[str, Any], folder: Path, bound: NormBound = BOUNDS["plain"]) -> Rule:
    settings = RULES[tree["name"]](**tree)
    folder.mkdir()
    return build(
        settings,
        RuleContext(
            layout=LAYOUT,
            node="cloud",
            seed=1,
            measures=True,
            children=len(CHILDREN),
            training=TrainingSettings.model_validate(
                {"objective": {"name": settings.objective or "cross_entropy"}}
            ),
            rows=lambda name, count: np.zeros((count, LAYOUT.row_bytes), np.uint8),
            folder=folder,
        ),
        bound=bound,
    )


def play(rule: Rule, links: LinkLayouts, r: int) -> tuple[list[bytes], Aggregated]:
    """Play a round over int8; return what the children received, and the outcome. One child does
    not answer.
    """
    dispatched = rule.dispatch(r, CHILDREN)
    for row, _ in dispatched:
        row[:] = decoded("int8", row, layout=links.down)
    sent = {child: row for row, those in dispatched for child in those}
    received = [row.tobytes() for row in sent.values()]
    rows_K = np.zeros((len(sent), links.up.row_bytes), np.uint8)
    rows_K[:, : LAYOUT.row_bytes] = [row[: LAYOUT.row_bytes] for row in sent.values()]
    draw = np.random.default_rng(r)
    LAYOUT.floats(rows_K)[:] += draw.normal(scale=0.1, size=(len(sent), LAYOUT.columns)).astype(
        np.float32
    )
    links.up.extra_columns(rows_K)[:] = draw.normal(size=(len(sent), links.up.extras))
    reports = tuple(
        None if child == "c" else Trained(10 * k + 9, 0.5, k + 1, k + 0.1)
        for k, child in enumerate(sent)
    )
    return received, rule.aggregate(r, Uploads(tuple(sent), rows_K, reports, lambda: None))


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(
    "tree", [*LEAST.values(), {"name": "scaffold", "learning_rate": 0.5}], ids=label
)
def test_a_rule_goes_on_from_what_its_children_decode(
    tree: dict[str, Any], bound: str, tmp_path: Path
) -> None:
    """Its models, decisions and state are those of a rule that had the decoded model from the
    beginning.
    """
    links = link_layouts(RULES[tree["name"]](**tree), LAYOUT)
    sent, had = (rule_of(tree, tmp_path / name, BOUNDS[bound]) for name in ("sent", "had"))
    sent.begin(drawn(1))
    had.begin(decoded("int8", drawn(1)))
    for r in range(3):
        assert play(sent, links, r) == play(had, links, r)
        assert sent.model.tobytes() == had.model.tobytes()
        states = [
            saved(rule, tmp_path / f"{name}{r}") for name, rule in (("sent", sent), ("had", had))
        ]
        assert states[0] == states[1]
        # a resumed node, whose model is decoded already
        had = rule_of(tree, tmp_path / f"resumed{r}", BOUNDS[bound])
        had.begin(decoded("int8", sent.model))
        had.restore(tmp_path / f"sent{r}", json.loads(states[0]["facts"]))


def saved(rule: Rule, folder: Path) -> dict[str, bytes]:
    """Return the files of a rule's state, and its facts."""
    folder.mkdir()
    facts = json.dumps(rule.save(folder)).encode()
    return {"facts": facts} | {path.name: path.read_bytes() for path in folder.iterdir()}


# A parent's children in one process


def adding(value: float, seen: list[bytes], up: str) -> DoTask:
    async def work(task: Task, model: Arriving, report: Report) -> WorkResult:
        row = (await model.whole()).copy()
        seen.append(row.tobytes())
        LAYOUT.floats(row)[:] += np.float32(value)
        return WorkResult(
            codec_of(up).encode(LAYOUT, row, reference=model.row),
            Work(5, 0.1, task.epochs, 1, 0.0, 0.0),
        )

    return work


def called(codecs: Codecs, row: Row) -> tuple[list[bytes], Mapping[str, Row]]:
    """Play a round of two children with a model; return what they received, and their uploads."""
    seen: list[bytes] = []
    children = {"a": adding(0.1, seen, codecs.up.name), "b": adding(0.2, seen, codecs.up.name)}
    calls = Calls(
        children, tests={},
        samples=dict.fromkeys(children, 5), layouts=LinkLayouts.plain(LAYOUT), codecs=codecs,
        spool=Spool(None), resident_mb=1.0, clock=Clock(),
    )  # fmt: skip
    dispatch = Dispatch(
        0, 0, models=[(row, ("a", "b"))], epochs={"a": 1, "b": 1}, closing=Closing()
    )
    return seen, asyncio.run(calls.round(dispatch)).models


@pytest.mark.parametrize("down", DOWN)
@pytest.mark.parametrize("up", ["fp32", "int8", "delta+fp16"])
def test_a_dispatched_model_becomes_what_the_children_decode(down: str, up: str) -> None:
    row, exact = drawn(1), drawn(1)
    seen, models = called(codecs_of(down=down, up=up), row)
    held = decoded(down, exact)
    assert {row.tobytes(), *seen} == {held.tobytes()}
    assert (row.tobytes() == exact.tobytes()) == (down not in LOSSY)
    for name, value in (("a", 0.1), ("b", 0.2)):
        answer = held.copy()
        LAYOUT.floats(answer)[:] += np.float32(value)
        assert models[name].tobytes() == decoded(up, answer, reference=held).tobytes()


@pytest.mark.parametrize("down", ["fp16", "int8"])
def test_a_model_that_a_form_cannot_hold_is_not_sent(down: str) -> None:
    row = drawn(1)
    LAYOUT.floats(row)[5] = 1e30 if down == "fp16" else np.inf
    with pytest.raises(RunFailed, match="the model cannot be sent: entry weight"):
        called(codecs_of(down=down), row)


# Labs

LAB: Final[dict[str, Any]] = {
    "name": "lossy",
    "seed": 3,
    "rounds": 3,
    "topology": {"institutions": 2, "devices": 6},
    "data": {"partition": "dirichlet", "concentration": 0.3},
    "model": {"name": "mlp_digits"},
    "training": {"momentum": 0.5, "learning_rate": 0.05, "batch_size": 100},
    "links": {"check": "off"},
    "institution": {"rounds": 2, "participation": 0.67},
}
TIERS: Final = {  # of codecs: equal ones are forwarded, others coded anew
    "equal": {"wan": INT8, "lan": INT8},
    "other": {
        "wan": {"up": "delta+int8", "down": "fp16"},
        "lan": {"up": "delta+fp16", "down": "int8"},
    },
    "exact above": {"lan": {"up": "int8", "down": "bf16+zstd"}},
}


def model_of(root: Path, *trees: Mapping[str, Any]) -> bytes:
    return tensors(run_direct(root, merged(*trees)))


def dynamic(alpha: float) -> dict[str, Any]:
    rule = {"aggregation": {"name": "feddyn"}}
    return {"training": {"objective": {"name": "feddyn", "alpha": alpha}}, "institution": rule}


@pytest.mark.parametrize("codecs", TIERS)
def test_feddyns_node_has_the_mean_of_what_its_devices_keep(codecs: str, tmp_path: Path) -> None:
    """h is the mean of the h_k, whoever takes part; the node keeps h / alpha."""
    alpha = 0.05
    experiment = parse(merged(LAB, dynamic(alpha), {"transfer": TIERS[codecs], "rounds": 4}))
    folder = run_direct(tmp_path, experiment, until=3)
    for name, devices in experiment.tree.children.items():
        if name == "cloud":
            continue
        offset = np.fromfile(newest(folder, name, "offset"), np.float32)
        kept = [
            np.fromfile(file, np.float32)
            for device in devices
            if (file := newest(folder, device, "vectors"))
        ]
        h = np.sum(kept, axis=0, dtype=np.float64) / len(devices)
        assert np.abs(h).max() > 1e-3
        np.testing.assert_allclose(alpha * offset, h, rtol=0, atol=2e-6 * np.abs(h).max())


def newest(folder: Path, node: str, name: str) -> Path | None:
    """Return the file of a node's state after its last task, None if it had none."""
    return max((folder / "spool" / node / "states").glob(f"after-*/{name}"), default=None)


@pytest.mark.parametrize(
    ("rule", "codecs"),
    slow(
        [("feddyn", "other"), ("scaffold", "equal"), ("fedavgm", "exact above")],
        but=[("feddyn", "other"), ("fedavgm", "exact above")],
    ),
)
def test_agents_over_a_network_compute_what_one_process_does(
    rule: str, codecs: str, tmp_path: Path
) -> None:
    objective = {} if rule == "fedavgm" else {"objective": {"name": rule}}
    methods = {
        "training": objective,
        "institution": {"aggregation": {"name": rule}},
        "transfer": TIERS[codecs],
    }
    cloud = {"cloud": {"aggregation": {"name": "fedavgm"}}}
    experiment = parse(merged(LAB, methods, cloud, {"rounds": 2}))
    outcome = ScenarioLab(experiment, workload=RealWorkload(experiment)).run()
    assert outcome.ok, outcome.result
    run_direct(tmp_path, experiment)
    assert outcome.digest == model_digest(tmp_path)


@pytest.mark.parametrize(
    ("rule", "codecs"),
    slow(
        [
            ({"name": "feddyn"}, "other"),
            ({"name": "fedcross", "alpha": 0.9, "on_new_model": "recentre"}, "equal"),
        ],
        but=[({"name": "feddyn"}, "other")],
    ),
    ids=str,
)
def test_a_resumed_run_gives_the_model_of_an_undisturbed_one(
    rule: Mapping[str, Any], codecs: str, tmp_path: Path
) -> None:
    objective = {"objective": {"name": "feddyn"}} if rule["name"] == "feddyn" else {}
    cloud = {"checkpoint_every": 2, "aggregation": {"name": "fedavgm"}}
    methods = {
        "training": objective,
        "institution": {"aggregation": rule},
        "transfer": TIERS[codecs],
        "cloud": cloud,
    }
    tree = merged(LAB, methods, {"rounds": 4})
    broken = run_direct(tmp_path, tree, until=3)
    assert tensors(resumed_run(broken)) == model_of(tmp_path, tree)


KILLED: Final = KilledLab(
    merged(LAB, dynamic(0.05), {"rounds": 2, "transfer": TIERS["other"] | {"inline_bytes": 0}}),
    model_bytes=40_000,
)


@pytest.mark.parametrize("node", ["cloud", "institution-0", "device-0"])
def test_a_killed_node_continues_with_what_was_decoded(node: str) -> None:
    KILLED.assert_same_if_killed(node, 0.6)
