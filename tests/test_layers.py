"""Labs of four layers: regions between the cloud and the institutions. `test_direct` and `test_lab`
have the others.
"""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.common.experiment.schema import Experiment
from fedstrata.deploy.brokers import broker
from tests.helpers.commands import PATIENCE_S, command, null_model, table, tensors
from tests.helpers.direct import run_direct
from tests.helpers.examples import slow
from tests.helpers.scenarios import restarted
from tests.simulation.lab import ScenarioLab
from tests.simulation.outcome import LabOutcome, model_digest

pytestmark = pytest.mark.usefixtures("warm")

# Each rule remembers something between its tasks, so a repeated task shows whether that was
# restored.
FOUR: Final[dict[str, Any]] = {
    "name": "four",
    "rounds": 3,
    "links": {"check": "off"},
    "cloud": {"epoch_control": {"name": "tempo"}},
    "tiers": [
        {"name": "wan", "children": "region", "fan_out": 2, "aggregation": {"name": "fedcross"}},
        {
            "name": "metro",
            "children": "institution",
            "fan_out": 2,
            "rounds": 2,
            "aggregation": {"name": "fedmr", "on_new_model": "recentre"},
        },
        {
            "name": "lan",
            "fan_out": 2,
            "rounds": 2,
            "aggregation": {"name": "fedcda", "depth": 2, "history": "keep"},
        },
    ],
}
ROUNDS: Final = {"region": 3, "institution": 3 * 2, "device": 3 * 2 * 2}  # of the link above
MODEL_BYTES: Final = 10_000


class PlayedLab(NamedTuple):
    """The outcome of a lab in virtual time, the model bytes of its links, and its devices.csv."""

    outcome: LabOutcome
    counted: dict[tuple[str, str], int]
    devices: list[dict[str, str]]


def play(**options: Any) -> PlayedLab:
    found: list[list[dict[str, str]]] = []

    def at_end(lab: ScenarioLab) -> None:
        (folder,) = lab.agents.runs.iterdir()
        found.extend(table(folder / name) for name in ("links.csv", "devices.csv"))

    outcome = ScenarioLab(
        parse(FOUR), seed=1, model_bytes=MODEL_BYTES, at_end=at_end, **options
    ).run()
    assert outcome.ok, outcome.result
    links, devices = found
    counted = {
        (row["from"], row["to"]): int(row["payload_bytes"])
        for row in links
        if row["kind"] == "model"
    }
    return PlayedLab(outcome, counted, devices)


@pytest.fixture(scope="module")
def undisturbed() -> PlayedLab:
    return play()


def test_one_model_goes_down_and_one_up_in_each_round_of_each_tier(undisturbed: PlayedLab) -> None:
    _, counted, devices = undisturbed
    assert len(counted) == 2 * (2 + 4 + 8)
    for (source, target), count in counted.items():
        child = max(source, target, key=parse(FOUR).tree.depth)
        assert count == ROUNDS[child.split("-")[0]] * MODEL_BYTES, (source, target)
    assert len(devices) == 3 * 8 and {row["local_rounds"] for row in devices} == {"4"}
    assert devices[-1]["node"] == "cloud/region-1/institution-3/device-7"


@pytest.mark.parametrize(
    ("node", "share"),
    slow(
        [("region-0", 0.3), ("device-3", 0.3), ("institution-1", 0.6), ("cloud", 0.9)],
        but=[("region-0", 0.3), ("device-3", 0.3)],
    ),
)
def test_a_node_that_is_killed_changes_no_bit_and_no_byte_is_counted_twice(
    node: str, share: float, undisturbed: PlayedLab
) -> None:
    expected, whole, devices = undisturbed
    outcome, counted, work = play(scenario=restarted(node, share * expected.virtual_s))
    assert outcome.digest == expected.digest
    assert [row["node"] for row in work] == [row["node"] for row in devices]
    # a global round is repeated at most, and what it had counted is lost at most
    for link, count in counted.items():
        assert 2 * whole[link] <= 3 * count <= 4 * whole[link], (link, count, whole[link])


def test_two_rounds_of_regions_over_two_of_one_institution_each_are_four_of_three_layers() -> None:
    """Both count the same rounds: the selected devices and the seeds of their trainings depend on
    them.
    """
    devices = {"name": "lan", "fan_out": 4, "participation": 0.5}
    regions = [
        {"name": "wan", "children": "region", "fan_out": 2},
        {"name": "metro", "children": "institution", "rounds": 2},
        devices | {"rounds": 2},
    ]
    institutions = [
        {"name": "wan", "children": "institution", "fan_out": 2},
        devices | {"rounds": 4},
    ]
    four, three = (
        null_model(parse({"rounds": 2, "tiers": tiers})) for tiers in (regions, institutions)
    )
    assert four == three


def test_fedavg_with_one_round_a_tier_is_fedavg_of_two_layers(tmp_path: Path) -> None:
    tiers = [
        {"name": "wan", "children": "region", "fan_out": 2},
        {"name": "metro", "children": "institution", "fan_out": 2},
        {"name": "lan", "fan_out": 2},
    ]
    common = {
        "rounds": 2,
        "model": {"name": "mlp_digits"},
        "data": {"partition": "dirichlet", "concentration": 0.5},
    }
    four, two = (
        load_file(run_direct(tmp_path, common | layers) / "model.safetensors")
        for layers in ({"tiers": tiers}, {"topology": {"institutions": 0, "devices": 8}})
    )
    assert four.keys() == two.keys()
    assert max(float(np.abs(four[name] - two[name]).max()) for name in four) < 1e-6


@pytest.mark.slow
def test_a_region_of_processes_is_killed_and_started_again(tmp_path: Path) -> None:
    experiment: Experiment = parse(FOUR)
    file = tmp_path / "four.toml"
    file.write_text(to_toml(experiment))
    tree = experiment.tree
    with ExitStack() as stack:
        served = stack.enter_context(broker.start(directory=tmp_path))

        def start(*words: str | Path) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                command(*words, "--broker", f"{served.host}:{served.port}", null=True),
                stdout=subprocess.PIPE,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        def aggregator(name: str) -> subprocess.Popen[bytes]:
            spool = tmp_path / "spool" / name
            return start(
                "institution", "--name", name, "--parent", tree.parent(name), "--spool", spool
            )

        cloud = start(
            "cloud", file, "--runs", tmp_path / "runs", "--format", "json", "--spool", "none"
        )
        roles = {name: aggregator(name) for name in tree.aggregators}
        devices = [
            word
            for name in tree.devices
            for word in ("--name", name, "--parent", tree.parent(name))
        ]
        roles["devices"] = start("device", *devices, "--spool", "none")
        killed = 0
        for line in cloud.stdout or ():
            if json.loads(line)["event"] == "global_round" and not killed:
                killed = roles["region-1"].pid
                roles["region-1"].kill()
                roles["region-1"] = aggregator("region-1")
        assert killed
        assert [process.wait(PATIENCE_S) for process in (cloud, *roles.values())] == [0] * (
            2 + len(tree.aggregators)
        )
    (folder,) = (tmp_path / "runs").iterdir()
    assert model_digest(folder.parent) == null_model(experiment)
    assert len(tensors(folder)) == 40_000
