"""Frozen arrays that a device does not build: fetched from its parent once, and held from then on."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from fedstrata.cloud import checkpoint
from fedstrata.cloud.evaluator import InitialModel
from fedstrata.common.accounting.work import TrainingPath
from fedstrata.common.errors import InvalidExperiment, RefusedModel, RunFailed
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import datasets, models
from fedstrata.common.learning.evaluation import ModelTester
from fedstrata.common.learning.refiner import NodeRefiner
from fedstrata.common.learning.splits import split_of
from fedstrata.common.methods import aggregator
from fedstrata.common.methods.rule import RuleContext
from fedstrata.common.model import tensors
from fedstrata.common.model.layout import FrozenForm
from fedstrata.common.model.parts import read_frozen_file
from fedstrata.common.protocol.manifest import FROZEN_CODEC, describe
from fedstrata.common.protocol.messages import About, FrozenOffered, Question
from fedstrata.common.runtime.frozen import OwnFrozen
from fedstrata.common.runtime.refining import RefinerProcess
from fedstrata.common.settings.data import ModelSettings
from fedstrata.common.storage.spool import FROZEN_KEPT, FrozenFiles
from fedstrata.device import jobs
from fedstrata.device.jobs import HostedDevice, Order, most_together
from fedstrata.device.pool.trainers_by_kind import Trainers
from tests.helpers.direct import run_direct
from tests.helpers.examples import examples
from tests.helpers.nodes import child_of, layout_of, living, parent_of, together
from tests.helpers.own_page import FILES, PAGES
from tests.helpers.plain import ended_works
from tests.helpers.real_workload import RealWorkload
from tests.helpers.sites import SimulatedSite, until, virtual
from tests.simulation.frozen import FrozenWorkload, lacks
from tests.simulation.lab import ScenarioLab
from tests.simulation.outcome import LabOutcome

pytestmark = pytest.mark.usefixtures("warm")

MODEL: dict[str, Any] = {"name": "tests.test_frozen:Wide", "frozen": ["wide.*"]}
LAB: dict[str, Any] = {
    "name": "frozen",
    "rounds": 2,
    "topology": {"institutions": 2, "devices": 4},
    "training": {"batch_size": 50, "learning_rate": 0.05},
    "links": {"check": "off"},
    "transfer": {"inline_bytes": 0, "chunk_bytes": 32_768},
}


class Wide(nn.Module):
    """A frozen layer of several chunks, and a trained one."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.wide, self.last = nn.Linear(64, 800), nn.Linear(800, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.wide(x.flatten(1))))
        return out


ARRAYS = {
    "c.weight": np.random.default_rng(1).standard_normal((50, 40), np.float32),
    "c.mask": np.arange(7) > 3,
    "c.half": np.arange(9, dtype=np.float16),
    "c.double": np.arange(3.0),
    "c.short": np.arange(5, dtype=np.int16),
    "c.brain": np.arange(6, dtype=np.uint16).view(tensors.BFLOAT16),
}
FORM = FrozenForm(tensors.content(ARRAYS, {}), tensors.size(ARRAYS, {}))


def pretrained(folder: Path, model: Mapping[str, Any] = MODEL) -> Path:
    """Write the model of another seed, as a file of arrays alone."""
    other = parse({**LAB, "seed": 9, "model": {"name": model["name"]}})
    module = models.of(other, inputs=datasets.load(other.data).inputs)
    found = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    with (path := folder / "pretrained.safetensors").open("wb") as file:
        tensors.write(file, found, {})
    return path


def experiment(folder: Path, **changes: Any) -> Experiment:
    """Return a lab whose frozen arrays are those of a file of the cloud."""
    return parse({**LAB, "model": {**MODEL, "initial": str(pretrained(folder))}, **changes})


# A lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return experiment(
        tmp_path_factory.mktemp("frozen"), links={"check": "off", "lan": {"down_mbit": 1.0}}
    )


@pytest.fixture(scope="module")
def undisturbed(lab: Experiment) -> tuple[LabOutcome, dict[str, int], str]:
    return played(lab)


def played(lab: Experiment, **options: Any) -> tuple[LabOutcome, dict[str, int], str]:
    """Play a lab of real models; return the bytes of frozen arrays to each node, over all its
    processes, and up.
    """
    down: dict[str, int] = {}
    up: list[int] = []
    model: list[str] = []

    def look(played: ScenarioLab) -> None:
        for name, worlds in played.worlds.items():
            for endpoint in (
                connection.user for world in worlds for connection in world.connections
            ):
                cells = getattr(getattr(endpoint, "link", None), "counters", None)
                for (peer, direction, kind), tally in cells.cells.items() if cells else ():
                    if kind == "frozen" and direction == "received":
                        down[name] = down.get(name, 0) + tally.payload
                        up.append(tally.payload if peer in played.homes else 0)
        found = sorted(played.agents.runs.glob("*/model.safetensors"))
        model.append(tensors.content(tensors.read(found[-1])[0], {}) if found else "")

    options = {"workload": RealWorkload(lab), **options} if "workload" not in options else options
    outcome = ScenarioLab(lab, seed=1, at_end=look, **options).run()
    assert outcome.ok, outcome.result
    assert not sum(up)
    return outcome, down, model[-1]


def test_devices_fetch_the_clouds_frozen_arrays_once_and_train_with_them(
    lab: Experiment, undisturbed: tuple[LabOutcome, dict[str, int], str], tmp_path: Path
) -> None:
    _, down, model = undisturbed
    tester = ModelTester(lab)
    assert tester.layout.frozen is not None
    nodes = {*lab.tree.devices, *lab.tree.children["cloud"]}
    assert set(down) == nodes
    assert all(
        tester.layout.frozen.nbytes <= found < 2 * tester.layout.frozen.nbytes
        for found in down.values()
    )
    path = run_direct(tmp_path, lab)
    final = load_file(path / "model.safetensors")
    assert tensors.content(tensors.read(path / "model.safetensors")[0], {}) == model
    given = load_file(str(lab.model.initial))
    assert all(final[name].equal(given[name]) for name in tester.frozen)
    assert not any(final[name].equal(given[name]) for name in final.keys() - tester.frozen.keys())
    assert not (path / "spool").exists() or not any((path / "spool").rglob("*"))


@pytest.mark.parametrize("node", ["cloud", "device-0"])
def test_a_node_killed_while_it_fetches_or_serves_goes_on(
    node: str, lab: Experiment, undisturbed: tuple[LabOutcome, dict[str, int], str]
) -> None:
    whole = ModelTester(lab).layout.frozen
    assert whole is not None
    interrupted: list[int] = []

    async def kill(played: ScenarioLab) -> None:
        begun = False
        while not begun:
            await asyncio.sleep(0.01)
            found = played.files("device-0").rglob(whole.digest)
            begun = any(np.fromfile(path, np.uint8).any() for path in found)
        interrupted.append(1)
        played.kill(node)
        await asyncio.sleep(1.0)
        played.start(node)

    outcome, down, model = played(lab, scenario=kill)
    assert interrupted
    assert (outcome.digest, model) == (undisturbed[0].digest, undisturbed[2])
    assert whole.nbytes <= down["device-0"] < 1.7 * whole.nbytes  # its chunks stayed in its file


def test_a_device_with_the_arrays_of_an_earlier_run_gets_nothing() -> None:
    lab, workload = parse({**LAB, "model": {"name": "mlp_digits"}}), FrozenWorkload(10_000, 100_000)
    _, twice, _ = played(lab, workload=workload, runs=2)
    lacking = {name for name in lab.tree.devices if lacks(name)}
    assert twice == dict.fromkeys(
        lacking | {lab.tree.parent(name) for name in lacking}, workload.form.nbytes
    )
    assert 0 < len(lacking) < len(lab.tree.devices)


def test_a_run_does_not_go_on_with_other_frozen_arrays(tmp_path: Path) -> None:
    lab = experiment(tmp_path, rounds=1)
    path = run_direct(tmp_path / "runs", lab)
    found = checkpoint.newest_first(path / "checkpoints")[0]
    tester, other = ModelTester(lab), ModelTester(parse({**LAB, "model": MODEL}))
    rule = aggregator.build(
        lab.tiers[0].aggregation,
        RuleContext(
            layout=tester.layout,
            node="cloud",
            seed=1,
            children=2,
            measures=False,
            rows=lambda _, count: np.empty((count, tester.layout.row_bytes), np.uint8),
        ),
    )
    assert (
        checkpoint.load(
            found, layout=tester.layout, row=tester.layout.empty(), rule=rule
        ).global_round
        == 1
    )
    with pytest.raises(
        InvalidExperiment, match="its frozen arrays are not those with which the cloud begins now"
    ):
        checkpoint.load(found, layout=other.layout, row=other.layout.empty(), rule=rule)


# Training


@pytest.mark.parametrize("model", [MODEL, {"name": "cnn_digits", "frozen": ["conv*"]}])
def test_given_arrays_train_as_those_that_the_model_has(
    model: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two devices, in-process and in common steps."""
    lab = parse({**LAB, "model": {**model, "initial": str(pretrained(tmp_path, model))}})
    tester = ModelTester(lab)
    assert tester.layout.frozen is not None
    path = tmp_path / tester.layout.frozen.digest
    with path.open("wb") as file:
        tensors.write(file, tester.frozen, {})
    assert path.stat().st_size == tester.layout.frozen.nbytes
    found = {}
    devices = [
        HostedDevice(lab, lab.digest, node, frozen=path) for node in ("device-0", "device-1")
    ]
    for alone_on in (jobs.ALONE_ON, frozenset[str]()):
        monkeypatch.setattr(jobs, "ALONE_ON", alone_on)
        vmapped = most_together(lab, "cpu") > 1
        trainers = Trainers()
        own = [trainers.prepare(replace(device, frozen=None), "cpu").layout for device in devices]
        assert all(layout.differs_in_frozen(tester.layout) for layout in own)
        assert [trainers.prepare(device, "cpu").layout for device in devices] == [tester.layout] * 2
        outs = [tester.layout.empty() for _ in devices]
        works = ended_works(trainers, devices, [Order(tester.first, out, 1, 0) for out in outs])
        wanted = TrainingPath.VMAPPED if vmapped else TrainingPath.IN_PROCESS
        assert [work.path for work in works] == [wanted] * 2
        found[vmapped] = outs
    assert len(found) == 1 + (model is not MODEL)  # own nets are not vmapped
    for one, other in zip(found[False], found.get(True, found[False]), strict=True):
        np.testing.assert_allclose(one.view(np.float32), other.view(np.float32), atol=1e-4)
    out = tester.layout.empty()
    ended_works(Trainers(), [replace(devices[0], frozen=None)], [Order(tester.first, out, 1, 0)])
    assert not np.allclose(out.view(np.float32), found[False][0].view(np.float32), atol=1e-4)


@pytest.mark.slow
def test_a_refiner_gets_the_arrays_that_it_does_not_build(tmp_path: Path) -> None:
    lab = experiment(
        tmp_path,
        institution={"aggregation": {"name": "feddf", "steps": 2}},
        data={"node_samples": 20},
    )
    tester, partition = ModelTester(lab), split_of(lab).digest
    assert tester.layout.frozen is not None
    files = FrozenFiles(tmp_path / "spool", "institution-0")

    async def play() -> None:
        own = OwnFrozen(tester.frozen, tester.layout.frozen, files)
        refiner = RefinerProcess(lab, "institution-0", partition=partition)
        try:
            await refiner.prepare(tester.layout, own.file)
            assert refiner._layout == tester.layout
        finally:
            refiner.close()

    asyncio.run(play())
    path = files.path(tester.layout.frozen.digest)
    assert (
        NodeRefiner(lab, "institution-0", partition=partition, frozen=path).layout == tester.layout
    )
    alone = NodeRefiner(lab, "institution-0", partition=partition).layout
    assert alone is not None and alone.differs_in_frozen(tester.layout)


def test_a_cloud_without_pytorch_divides_a_runs_model_by_the_patterns(tmp_path: Path) -> None:
    path = run_direct(tmp_path, parse({**LAB, "rounds": 1, "model": {"name": MODEL["name"]}}))
    lab = parse({**LAB, "evaluation": {"at": "devices"}, "model": {**MODEL, "initial": str(path)}})
    found, tester = asyncio.run(InitialModel(lab).start()), ModelTester(lab)
    assert found.layout == tester.layout
    assert np.array_equal(found.row, tester.first)
    assert found.frozen.keys() == tester.frozen.keys()
    with pytest.raises(
        InvalidExperiment, match=r"model\.frozen = 'none\.\*': .*:Wide has no array"
    ):
        checkpoint.load_initial(
            ModelSettings(name=MODEL["name"], initial=str(path), frozen=["none.*"])
        )


def test_arrays_of_another_model_are_refused(tmp_path: Path) -> None:
    lab = parse({**LAB, "model": MODEL})
    inputs = datasets.load(lab.data).inputs
    own = dict(models.parts_of(models.of(lab, inputs=inputs), lab.model).frozen)
    for wrong, problem in (
        ({**own, "other": np.zeros(3)}, "other is unknown"),
        (
            {name: array for name, array in own.items() if name != "wide.bias"},
            "wide.bias is missing",
        ),
        ({**own, "wide.bias": own["wide.bias"][1:]}, r"wide.bias is float32 \[\d+\], not float32"),
        ({**own, "wide.bias": own["wide.bias"].astype(np.float16)}, "wide.bias is float16"),
    ):
        with pytest.raises(
            InvalidExperiment, match=f"frozen arrays are not those of this model: {problem}"
        ):
            models.of(lab, inputs=inputs, frozen=wrong)


def test_the_pages_bytes_are_those_of_its_example() -> None:
    lab = parse(tomllib.loads(FILES["finetune.toml"]))
    inputs, whole = datasets.load(lab.data).inputs, lab.model.model_copy(update={"frozen": []})
    module = models.of(lab, inputs=inputs)
    parts, all_of_it = (
        models.parts_of(module, lab.model).exchanged,
        models.parts_of(module.requires_grad_(), whole),
    )
    assert parts.frozen is not None
    assert all(
        f"{size:,}" in PAGES
        for size in (parts.row_bytes, parts.frozen.nbytes, all_of_it.exchanged.row_bytes)
    )


# Files


@given(st.data())
@examples(100)
def test_any_other_bytes_are_refused(data: st.DataObject) -> None:
    """Whatever a parent sends: a file with one other byte, with fewer or more, or any bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "frozen"
        with path.open("wb") as file:
            tensors.write(file, ARRAYS, {})
        good = path.read_bytes()
        assert len(good) == FORM.nbytes
        assert tensors.content(read_frozen_file(path, FORM.digest), {}) == FORM.digest
        place, bit = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(0, 7))
        flipped = bytearray(good)
        flipped[place] ^= 1 << bit
        bad = data.draw(
            st.sampled_from(
                [bytes(flipped), good[:place], good + b"x", bytes(len(good)), good[place:]]
            )
            | st.binary(max_size=200)
        )
        path.write_bytes(bad)
        try:
            found = read_frozen_file(path, FORM.digest)
        except RefusedModel:
            return
        # The digest is that of names, shapes, types and content; the rest of the header may differ.
        assert tensors.content(found, {}) == FORM.digest
        assert all(np.array_equal(found[name], array) for name, array in ARRAYS.items())


def test_a_node_keeps_the_last_files_alone(tmp_path: Path) -> None:
    files, other, now = (
        FrozenFiles(tmp_path, "device-0"),
        FrozenFiles(tmp_path, "device-1"),
        time.time(),
    )
    other.row("f" * 16, 100)
    for number in range(FROZEN_KEPT + 2):
        digest = f"{number:016x}"
        files.row(digest, 100).array[:] = number
        os.utime(files.path(digest), (now - 100 + number,) * 2)
    files.used("0" * 16)
    kept = {path.name for path in (tmp_path / "frozen" / "device-0").iterdir()}
    assert kept == {"0" * 16, f"{FROZEN_KEPT + 1:016x}"}
    assert other.path("f" * 16).stat().st_size == 100
    once = FrozenFiles(tmp_path, "device-0", run="20260101T000000Z-abcdef")
    once.row("e" * 16, 100)
    assert once.path("e" * 16).stat().st_size == 100
    once.close()
    assert not once.path("e" * 16).exists()
    os.utime(other.path("f" * 16), (1, 1))
    files.used("0" * 16)
    assert not other.path("f" * 16).exists()


# Messages


@virtual
async def test_what_is_not_wanted_or_not_offered_as_announced_changes_nothing(
    site: SimulatedSite,
) -> None:
    layout = replace(layout_of(4000), frozen=FORM)
    parent = parent_of(site, ["device-0"], layout=layout)
    child = child_of(site, "device-0", ready=False, frozen=FORM)
    async with together(living(site, parent), living(site, child)):
        await until(lambda: bool(child.session._parent_session))
        child.link.outbox.send(parent.identity.name, Question("n", About.ENTRY), child.now())
        child.wake()
        await until(lambda: parent.link.refusals.total > 0)
        fetched = asyncio.create_task(child.frozen.file())
        await until(lambda: child.session._want_at < float("inf"))
        data = memoryview(bytes(FORM.nbytes))
        good = describe(data, chunk_bytes=32_768, codec=FROZEN_CODEC, layout=FORM.digest)
        for wrong in (
            replace(good, layout="0" * 16),
            replace(good, codec="fp32"),
            describe(data[:-1], chunk_bytes=32_768, codec=FROZEN_CODEC, layout=FORM.digest),
        ):
            before = child.link.refusals.total
            parent.link.outbox.send("device-0", FrozenOffered(wrong), parent.now())
            parent.wake()
            await until(lambda before=before: child.link.refusals.total > before)  # type: ignore[misc]
        parent.frozen.source = OwnFrozen(ARRAYS, FORM, FrozenFiles(None, "cloud"))
        path = await fetched
        assert read_frozen_file(path, FORM.digest).keys() == ARRAYS.keys()
        down = child.link.counters.traffic(parent.identity.name)
        assert down.received_frozen_payload == FORM.nbytes


@virtual
async def test_arrays_that_are_not_the_announced_ones_end_the_device_and_leave_no_file(
    site: SimulatedSite,
) -> None:
    other = {**ARRAYS, "c.double": np.arange(1.0, 4.0)}
    parent = parent_of(site, ["device-0"], layout=replace(layout_of(4000), frozen=FORM))
    parent.frozen.source = OwnFrozen(other, FORM, FrozenFiles(None, "cloud"))
    child = child_of(site, "device-0", ready=False, frozen=FORM)
    async with together(living(site, parent), living(site, child)):
        with pytest.raises(
            RunFailed, match=r"institution-0's frozen arrays cannot be used: their content is not"
        ):
            await child.frozen.file()
        assert await child.frozen.held() is None
