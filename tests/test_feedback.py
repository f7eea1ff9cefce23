"""Error feedback: what a codec leaves out of a result is added to the next one, whoever is killed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import RefusedModel, StateLost
from fedstrata.common.experiment.lint import warnings
from fedstrata.common.experiment.reading import parse
from fedstrata.common.model.layout import ModelLayout, Row, Section
from fedstrata.common.protocol.manifest import describe
from fedstrata.common.protocol.messages import Key, Task
from fedstrata.common.runtime.link_models import decode_row
from fedstrata.common.runtime.upload_encoder import UploadEncoder
from fedstrata.common.storage.spool import Spool
from fedstrata.deploy.sweeps.grid import merged
from fedstrata.device.jobs import LocalResult, Order, Prepared
from fedstrata.device.training.tasks import LocalWork
from tests.helpers.commands import tensors
from tests.helpers.direct import run_direct
from tests.helpers.examples import slow
from tests.helpers.real_workload import RealWorkload
from tests.helpers.scenarios import KilledLab
from tests.simulation.lab import ScenarioLab
from tests.simulation.outcome import model_digest
from tests.test_sent_models import LAB

LAYOUT: Final = ModelLayout.build(
    [
        ("weight", (3000,), Section.PARAMETER),
        ("mean", (3,), Section.BUFFER),
        ("steps", (), Section.COUNTER),
    ]
)
D: Final = LAYOUT.parameters
CODECS: Final[tuple[Mapping[str, Any], ...]] = (
    {"name": "topk", "share": 0.02},
    {"name": "sign"},
    {"name": "qsgd", "bits": 3},
    *({"name": name} for name in ("int8", "bf16", "fp16+zstd", "delta+int8")),
)

Floats = npt.NDArray[np.float32]


def ids(tree: Mapping[str, Any]) -> str:
    return str(tree["name"])


def experiment_of(up: Mapping[str, Any], **tables: Any) -> Any:
    return parse(
        {
            "topology": {"institutions": 0, "devices": 2},
            "transfer": {"wan": {"up": dict(up)}},
            **tables,
        }
    )


def drawn(seed: int, scale: float = 1.0) -> Row:
    row = np.zeros(LAYOUT.row_bytes, np.uint8)
    LAYOUT.floats(row)[:] = scale * np.random.default_rng(seed).standard_normal(LAYOUT.columns)
    return row


def columns(row: Row) -> Floats:
    found: Floats = LAYOUT.floats(row)[:D]
    return found


class Device:
    """A device's own code, whose training adds noise; its parent decodes what it sends."""

    def __init__(self, up: Mapping[str, Any], folder: Path, *, feedback: bool = True) -> None:
        self.experiment = experiment_of({**up, "feedback": feedback})
        self._folder = folder
        self._encoder = UploadEncoder.of(self.experiment, "device-0", LAYOUT)
        self.start()

    def start(self) -> None:
        """Start a process of it, which has its spool alone."""
        prepared = Prepared(LAYOUT, 10, "")
        self._work = LocalWork(self.experiment, "device-0", prepared, states=Spool(self._folder))

    def task(self, number: int, follows: int, change: Floats | None = None) -> tuple[bytes, Row]:
        """Do a task, counted from 1; return its blob, and the model as the parent decodes it."""
        received = drawn(number)
        manifest = describe(received.data, chunk_bytes=10**6, codec="fp32", layout=LAYOUT.digest)
        task = Task(Key(1, number - 1, 0), 1, manifest, None, follows)
        order = self._work.order(task, received, lambda done, of: None)
        assert isinstance(order, Order)
        order.out[: LAYOUT.row_bytes] = trained(number, received) if change is None else received
        if change is not None:
            columns(order.out)[:] += change
        result = self._work.result(LocalResult(Work(10, 0.5, steps=1, train_s=0.1, wait_s=0.0)))
        blob = bytes(self._work.encoded(task, result, received).blob)
        self._work.keep(task)
        got = LAYOUT.empty()
        decode_row(self._encoder.codec, LAYOUT, memoryview(blob), got, received)
        return blob, got


def trained(number: int, received: Row) -> Row:
    row = received.copy()
    columns(row)[:] += drawn(100 + number, 0.01)[: 4 * D].view(np.float32)
    return row


@pytest.mark.parametrize("up", CODECS, ids=ids)
def test_a_device_sends_what_it_left_out_of_the_results_that_were_used(
    up: Mapping[str, Any], tmp_path: Path
) -> None:
    """Task 3's result is not used, so task 4 follows task 2: e is as after task 2."""
    device, plain = (
        Device(up, tmp_path / "with"),
        UploadEncoder.of(experiment_of(up), "device-0", LAYOUT),
    )
    left_out = {0: np.zeros(D, np.float32)}
    for number, follows in ((1, 0), (2, 1), (3, 2), (4, 2), (5, 4)):
        _, got = device.task(number, follows)
        received = drawn(number)
        wanted = trained(number, received)
        columns(wanted)[:] = [
            x + e for x, e in zip(columns(wanted), left_out[follows], strict=True)
        ]
        twin = plain.decoded(wanted, received=received, task=number - 1)
        assert got.tobytes() == twin.tobytes(), number
        left_out[number] = np.array(
            [x - y for x, y in zip(columns(wanted), columns(twin), strict=True)], np.float32
        )
        assert left_out[number].any() and left_out[number].dtype == np.float32
        if number == 4:
            device.start()  # killed after a task, with its spool


@pytest.mark.parametrize("up", CODECS, ids=ids)
def test_a_killed_device_sends_the_same_bytes(up: Mapping[str, Any], tmp_path: Path) -> None:
    through, killed = Device(up, tmp_path / "through"), Device(up, tmp_path / "killed")
    for number in range(1, 5):
        killed.start()
        wanted = through.task(number, number - 1)[0]
        assert killed.task(number, number - 1)[0] == wanted
        killed.start()
        assert killed.task(number, number - 1)[0] == wanted, "a task that is repeated"


def test_a_device_without_its_spool_cannot_go_on(tmp_path: Path) -> None:
    device = Device(CODECS[0], tmp_path / "a")
    device.task(1, 0)
    with pytest.raises(StateLost, match="--spool DIR"):
        Device(CODECS[0], tmp_path / "b").task(2, 1)


def test_with_feedback_all_of_a_constant_change_arrives(tmp_path: Path) -> None:
    """Each task changes all columns alike much; top-k alone sends the same columns again and again."""
    change = np.linspace(0.001, 0.002, D, dtype=np.float32)
    rounds, sums = 150, []
    for feedback in (True, False):
        device, total = Device(CODECS[0], tmp_path / str(feedback), feedback=feedback), np.zeros(D)
        for number in range(1, rounds + 1):
            total += columns(device.task(number, number - 1, change)[1]).astype(
                np.float64
            ) - columns(drawn(number))
        sums.append(total / (rounds * change))
    assert sums[0].min() > 0.5 and sums[0].mean() == pytest.approx(0.82, abs=0.05)
    assert (np.abs(sums[1]) < 1e-3).mean() == pytest.approx(0.98, abs=0.001)


@pytest.mark.parametrize("up", CODECS, ids=ids)
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_a_model_that_diverged_does_not_spoil_later_ones(
    up: Mapping[str, Any], value: float
) -> None:
    """The parent refuses it, and what was left out becomes zeros, not NaN."""
    encoder = UploadEncoder.of(experiment_of({**up, "feedback": True}), "device-0", LAYOUT)
    left_out = np.ones(D, np.float32)
    row, received = drawn(1), drawn(2)
    columns(row)[7], columns(received)[7] = value, -1e38
    blob = encoder.encode(row, received=received, task=0, left_out=left_out)
    assert np.isfinite(left_out).all()
    try:
        decode_row(encoder.codec, LAYOUT, blob, LAYOUT.empty(), received)
    except RefusedModel:
        assert not left_out.any()
    else:
        assert np.isfinite(value)


# Labs

UP: Final[Mapping[str, Mapping[str, Any]]] = {  # by tier
    "both": {
        "wan": {"name": "topk", "share": 0.1, "feedback": True},
        "lan": {"name": "qsgd", "feedback": True},
    },
    "devices": {"wan": {"name": "sign"}, "lan": {"name": "topk", "share": 0.05, "feedback": True}},
    "institutions": {
        "wan": {"name": "delta+int8", "feedback": True},
        "lan": {"name": "qsgd", "bits": 6},
    },
}


def tiers(which: str, **keys: Any) -> dict[str, Any]:
    return {
        "transfer": {name: {"up": dict(up), "down": "fp16"} for name, up in UP[which].items()}
        | keys
    }


@pytest.mark.parametrize("which", slow(UP, but=["both"]))
def test_agents_over_a_network_compute_what_one_process_does(which: str, tmp_path: Path) -> None:
    experiment = parse(merged(LAB, tiers(which), {"rounds": 3}))
    outcome = ScenarioLab(experiment, workload=RealWorkload(experiment)).run()
    assert outcome.ok, outcome.result
    path = run_direct(tmp_path, experiment)
    assert outcome.digest == model_digest(tmp_path)
    plain = {name: {"up": {"feedback": False}} for name in UP[which]}
    without = parse(merged(LAB, tiers(which), {"rounds": 3, "transfer": plain}))
    other = run_direct(tmp_path / "other", without)
    assert tensors(other) != tensors(path), "feedback changes the model"


KILLED: Final = KilledLab(merged(LAB, tiers("both", inline_bytes=0)), model_bytes=40_000)


@pytest.mark.parametrize("node", ["cloud", "institution-0", "device-0"])
def test_a_killed_node_continues_with_what_it_left_out(node: str) -> None:
    KILLED.assert_same_if_killed(node, 0.6)


# Settings and their warnings


def test_senders_with_feedback_and_all_above_them_have_state() -> None:
    lab = {"topology": {"institutions": 2, "devices": 4}}
    feedback = {"up": {"name": "topk", "feedback": True}}
    neither, above, below = (
        parse(lab | {"transfer": each}) for each in ({}, {"wan": feedback}, {"lan": feedback})
    )
    assert [each.devices_remember for each in (neither, above, below)] == [False, False, True]
    assert [each.remembers("institution-0") for each in (neither, above, below)] == [
        False,
        True,
        True,
    ]


def test_feddyn_may_have_a_codec_without_feedback() -> None:
    methods = {"training": {"objective": "feddyn"}, "cloud": {"aggregation": "feddyn"}}
    assert experiment_of({"name": "topk"}, **methods)


@pytest.mark.parametrize(
    ("up", "tables", "start"),
    [
        (
            {"name": "topk"},
            {},
            "transfer.wan.up.name = 'topk': what it leaves out of a model is lost.",
        ),
        (
            {"name": "sign"},
            {},
            "transfer.wan.up.name = 'sign': what it leaves out of a model is lost.",
        ),
        (
            {"name": "sign", "feedback": True},
            {"cloud": {"aggregation": "fedmr"}},
            "transfer.wan.up.feedback = true: fedmr",
        ),
        (
            {"name": "sign", "feedback": True},
            {"cloud": {"norm_bound": {"action": "clip"}}},
            "transfer.wan.up.feedback = true: a child does not know",
        ),
        (
            {"name": "topk", "feedback": True},
            {"cloud": {"aggregation": "fedadp"}},
            "cloud.aggregation.name = 'fedadp'",
        ),
        (
            {"name": "topk", "feedback": True},
            {"cloud": {"aggregation": "median"}},
            "cloud.aggregation.name = 'median'",
        ),
        (
            {"name": "qsgd"},
            {"cloud": {"aggregation": "scaffold"}, "training": {"objective": "scaffold"}},
            "transfer.wan.up.name = 'qsgd': the vectors behind the models of scaffold",
        ),
    ],
)
def test_lint_names_what_a_codec_harms(
    up: dict[str, Any], tables: dict[str, Any], start: str
) -> None:
    lab = {"rounds": 30, "topology": {"institutions": 0, "devices": 4}, **tables}
    without = warnings(parse(lab))
    found = [
        line
        for line in warnings(parse(lab | {"transfer": {"wan": {"up": up}}}))
        if line not in without
    ]
    assert len(found) == 1 and found[0].startswith(start), found


def test_sound_codecs_have_no_warning() -> None:
    for up in (
        "qsgd",
        "delta+int8",
        {"name": "topk", "feedback": True},
        {"name": "int8", "feedback": True},
    ):
        assert warnings(parse({"rounds": 30, "transfer": {"lan": {"up": up}}})) == []
