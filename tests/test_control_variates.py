"""SCAFFOLD and FedDyn: vectors that devices keep, extras behind the models; against plain twins,
and through labs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from fedstrata.common.errors import RunFailed
from fedstrata.common.experiment.reading import load, parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.methods.rule import link_layouts
from fedstrata.common.methods.settings import RULES
from fedstrata.common.model.codecs import BUILT_IN
from fedstrata.common.model.layout import LinkLayouts, ModelLayout, Section
from fedstrata.common.model.parts import ModelParts
from fedstrata.common.protocol.manifest import describe
from fedstrata.common.protocol.messages import Key, Task
from fedstrata.common.settings.training import TrainingSettings
from fedstrata.common.storage.spool import Spool
from fedstrata.deploy.checking import objective_checks
from fedstrata.device.jobs import Order
from fedstrata.device.training.batches import load_local_dataset
from fedstrata.device.training.tasks import DeviceMemory
from fedstrata.device.training.vectors import finish, vectors_of
from tests.helpers.commands import DEMO, table, tensors
from tests.helpers.direct import resumed_run, run_direct
from tests.helpers.examples import examples, slow
from tests.helpers.rules import LAYOUT
from tests.helpers.scenarios import KilledLab
from tests.helpers.vmapped import objective_trial
from tests.helpers.vmapped_steps import problem_of

D: Final = LAYOUT.parameters
METHODS: Final = ("scaffold", "feddyn")
OBJECTIVES: Final = (*METHODS, "moon")  # whose devices keep vectors; moon has no rule of its own

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


def training(name: str, **keys: Any) -> TrainingSettings:
    return TrainingSettings.model_validate({"objective": {"name": name, **keys}})


# The device


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("up", ["fp32", "int8"])
def test_a_constant_gradient_is_found_whatever_the_momentum(
    momentum: float, nesterov: bool, decay: float, up: str
) -> None:
    """With S steps of one gradient g, corrected by c - c_k, the new c_k is g and the weight decay's
    at the start.
    """
    settings = {"momentum": momentum, "nesterov": nesterov and momentum > 0, "weight_decay": decay}
    experiment = experiment_of("scaffold", up=up, **settings)
    start, g, c, own = (np.random.default_rng(i).normal(size=D) for i in range(4))
    weight, moving = start.copy(), np.zeros(D)
    for _ in range(7):
        each = g + c - own + decay * weight
        moving = momentum * moving + each
        weight -= 0.1 * (each + momentum * moving if nesterov else moving)
    found = finished(experiment, start, weight, {"control": c, "own_control": own}, steps=7)
    wanted = g + decay * start
    np.testing.assert_allclose(found["own_control"], wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found["control_change"], wanted - own, rtol=0, atol=1e-5)


@pytest.mark.parametrize("up", ["fp16", "int8", "delta+bf16"])
def test_a_training_that_diverged_is_left_to_the_parent(up: str) -> None:
    finished(
        experiment_of("feddyn", up=up),
        np.zeros(D),
        np.full(D, np.inf),
        {"own_gradient": np.zeros(D)},
        steps=1,
    )


def experiment_of(name: str, *, up: str, alpha: float | None = None, **keys: Any) -> Experiment:
    """Return a lab of two layers with this objective, whose devices send their models by this
    codec.
    """
    objective = {"name": name} if alpha is None else {"name": name, "alpha": alpha}
    return parse(
        {
            "topology": {"institutions": 0, "devices": 2},
            "training": {"learning_rate": 0.1, "objective": objective, **keys},
            "cloud": {"aggregation": {"name": rule_with(name)}},
            "transfer": {"wan": {"up": up}},
        }
    )


def finished(
    experiment: Experiment, start: Doubles, end: Doubles, vectors: dict[str, Doubles], *, steps: int
) -> dict[str, Floats]:
    """Return what a device keeps and returns of a training from `start` to `end`."""
    task = vectors_of(experiment, "device-0", ModelParts(LAYOUT, LAYOUT))
    row, out = task.received.empty(), task.returned.empty()
    for each, columns in ((row, start), (out, end)):
        each[:] = 0
        LAYOUT.floats(each)[:D] = columns
    for name, vector in task.read(row).items():
        vector[:] = vectors[name]
    local = load_local_dataset(experiment, "device-0", accelerator=torch.device("cpu"))
    finish(experiment, task, local, Order(row, out, 1, 0), node="device-0", steps=steps)
    return task.returned.extras_of(out)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_vmapped_training_takes_the_same_steps(name: str) -> None:
    assert {item: problem for item, problem in objective_checks.of(training(name)) if problem} == {}
    assert problem_of(*objective_trial(training(name))) == ""


# What a device keeps


def task(number: int, follows: int) -> Task:
    manifest = describe(memoryview(bytes(8)), chunk_bytes=1024, codec="fp32", layout="l")
    return Task(Key(1, number - 1, 0), 1, manifest, None, follows)


@given(
    st.lists(
        st.lists(st.sampled_from(["used", "refused", "absent"]), min_size=3, max_size=3),
        max_size=12,
    )
)
@examples(40)
def test_the_nodes_vector_is_the_mean_of_those_that_devices_keep(rounds: list[list[str]]) -> None:
    """Whoever takes part and whosever result is used: a state whose change the node did not add is
    never followed.
    """
    layout = ModelLayout.build([("w", (3,), Section.PARAMETER)])
    links = link_layouts(RULES["scaffold"](name="scaffold"), layout)
    devices = [
        DeviceMemory(links, kept_bytes=12, rounds=1, rounds_back=100, spool=Spool(None))
        for _ in range(3)
    ]
    follows, c = [0, 0, 0], np.zeros(3)
    draw = np.random.default_rng(1)
    for number, fates in enumerate(rounds, 1):
        for k, fate in enumerate(fates):
            if fate == "absent":
                continue
            row = devices[k].begin(task(number, follows[k]), links.down.empty())
            own = row[-12:].view(np.float32).copy()
            after = draw.normal(size=3).astype(np.float32)
            devices[k].out[-12:].view(np.float32)[:] = after
            devices[k].end(task(number, follows[k]))
            if fate == "used":
                follows[k] = number
                c += (after.astype(np.float64) - own) / 3
    kept = [
        devices[k].begin(task(99, follows[k]), links.down.empty())[-12:].view(np.float32)
        for k in range(3)
    ]
    np.testing.assert_allclose(c, np.mean(kept, axis=0), rtol=0, atol=1e-5)


def test_lost_vectors_are_an_error_with_its_remedy(tmp_path: Path) -> None:
    links = LinkLayouts.plain(ModelLayout.build([("w", (3,), Section.PARAMETER)]))
    memory = DeviceMemory(links, kept_bytes=12, rounds=1, rounds_back=2, spool=Spool(tmp_path))
    with pytest.raises(RunFailed, match=r"after its task 2 is lost.*--spool"):
        memory.begin(task(3, 2), links.down.empty())


# Extras behind the models


@pytest.mark.parametrize("codec", BUILT_IN.values(), ids=BUILT_IN)
@pytest.mark.parametrize("extras", [0, 1, 7])
def test_extras_are_exact_with_any_codec(codec: Any, extras: int) -> None:
    layout = LAYOUT.with_extras({"more": (extras,)} if extras else {})
    row, reference, draw = layout.empty(), layout.empty(), np.random.default_rng(1)
    for each in (row, reference):
        layout.floats(each)[:] = draw.normal(size=layout.columns)
        layout.integers(each)[:] = 7
        layout.extra_columns(each)[:] = draw.normal(size=extras)
    blob = codec.encode(layout, row, reference=reference)
    assert blob.nbytes <= codec.size(layout) and (
        not codec.fixed or blob.nbytes == codec.size(layout)
    )
    arrived = layout.empty()
    buffer = codec.buffer(layout, arrived, size=blob.nbytes)
    buffer[:] = blob
    codec.decode(layout, buffer, arrived, reference=reference)
    assert np.array_equal(layout.extra_columns(arrived), layout.extra_columns(row))
    plain = codec.encode(LAYOUT, row[: LAYOUT.row_bytes], reference=reference[: LAYOUT.row_bytes])
    assert bytes(blob[: blob.nbytes - 4 * extras]) == bytes(plain)
    if extras:
        layout.extra_columns(row)[0] = np.nan
        with pytest.raises(Exception, match=r"extras\.more holds NaN or Inf"):
            layout.check_finite(row)


def test_the_extras_of_all_chunks_are_those_of_the_blob() -> None:
    for extras in (0, 1, 1000, 1500, 2500):
        manifest = describe(
            memoryview(bytes(2500)), chunk_bytes=1024, codec="fp32", layout="l", extras=extras
        )
        assert sum(manifest.extras_in(index) for index in range(manifest.chunks)) == extras


# Labs

LAB: Final = (
    "topology.institutions=2",
    "topology.devices=4",
    "rounds=3",
    "institution.rounds=2",
    "model.name='mlp_digits'",
    "training.batch_size=50",
    "training.learning_rate=0.05",
)


def with_method(name: str) -> tuple[str, ...]:
    return (
        *LAB,
        f"training.objective.name={name!r}",
        f"institution.aggregation.name={rule_with(name)!r}",
    )


def rule_with(objective: str) -> str:
    return objective if objective in METHODS else "fedavg"


def test_the_variates_travel_both_ways(tmp_path: Path) -> None:
    run = run_direct(tmp_path, load(DEMO, with_method("scaffold")))
    weights = sum(tensor.size for tensor in load_file(run / "model.safetensors").values())
    # c down, its change up, in each of 3 x 2 local rounds
    rows = [row for row in table(run / "links.csv") if row["kind"] == "extras"]
    assert len(rows) == 2 * 4
    assert {int(row["payload_bytes"]) for row in rows} == {6 * 4 * weights}


@pytest.mark.parametrize("name", slow(OBJECTIVES, but=["scaffold", "feddyn"]))
def test_a_resumed_run_gives_the_model_of_an_undisturbed_one(name: str, tmp_path: Path) -> None:
    tree = {
        "rounds": 5,
        "topology": {"institutions": 2, "devices": 6},
        "model": {"name": "mlp_digits"},
        "cloud": {"checkpoint_every": 2},
        "training": {"batch_size": 500, "learning_rate": 0.05, "objective": {"name": name}},
        "institution": {
            "rounds": 2,
            "participation": 0.67,
            "aggregation": {"name": rule_with(name)},
        },
    }

    whole, broken = run_direct(tmp_path, tree), run_direct(tmp_path, tree, until=3)
    resumed_run(broken)
    assert tensors(broken) == tensors(whole) and not (broken / "spool").exists()


FAULTY: Final[dict[str, Any]] = {
    "rounds": 4,
    "links": {"check": "off"},
    "topology": {"institutions": 2, "devices": 4},
    "training": {"objective": {"name": "scaffold"}},
    "cloud": {"checkpoint_every": 2},
    "institution": {
        "rounds": 2,
        "aggregation": {"name": "scaffold"},
        "norm_bound": {"action": "refuse", "factor": 1},
    },
}


KILLED: Final = KilledLab(FAULTY, model_bytes=10_000)
KILLS: Final = (
    ("cloud", 0.8),
    ("institution-0", 0.55),
    ("device-0", 0.3),
    ("device-3", 0.55),
    ("device-0", 0.8),
)


@pytest.mark.parametrize(("node", "share"), KILLS)
def test_a_killed_node_continues_with_the_same_vectors(node: str, share: float) -> None:
    KILLED.assert_same_if_killed(node, share)


def test_without_files_results_may_be_refused_too() -> None:
    assert KILLED.run(spool=False).digest == KILLED.undisturbed.digest


def test_a_device_that_lost_its_vectors_ends_the_run() -> None:
    assert (
        "what this device kept after its task" in KILLED.loses_files("device-0", share=0.8).result
    )
