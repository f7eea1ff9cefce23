"""The samples by which an institution weighs at its parent: what its devices have prepared, whoever
restarts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import pytest

from fedstrata.common.experiment.reading import parse
from fedstrata.common.protocol.messages import Presence, Result
from fedstrata.deploy.simulation.simulated_broker import Routed
from tests.helpers.scenarios import decoded, restarted
from tests.simulation import trainer
from tests.simulation.drawn import DrawnLab, draw_lab
from tests.simulation.lab import Scenario, ScenarioLab
from tests.simulation.monitor import LabRun
from tests.simulation.runs import run_lab
from tests.simulation.trainer import DrawnTrainer

LAB: Final[dict[str, Any]] = {
    "name": "samples",
    "rounds": 4,
    "topology": {"institutions": 2, "devices": 6},
    "institution": {"rounds": 2, "participation": 0.5},
    "training": {"trainer": trainer.settings(2500, silent=False)},
    "links": {"check": "off"},
    "transfer": {"keepalive_s": 10, "idle_s": 60.0},
}
LAN: Final = {"name": "lan", "fan_out": 2, "rounds": 2, "participation": 0.5}
DEEP: Final[dict[str, Any]] = {
    **{key: value for key, value in LAB.items() if key not in ("topology", "institution")},
    "tiers": [
        {"name": "wan", "children": "region", "fan_out": 2},
        {
            "name": "metro",
            "children": "institution",
            "fan_out": 2,
            "rounds": 2,
            "participation": 0.5,
        },
        LAN,
    ],
}
CHILDREN: Final = {"institution-0": (0, 1, 2), "institution-1": (3, 4, 5)}


def prepared(*devices: int) -> int:
    """Return the samples that these devices prepare, others than those that their trainings use."""
    found = [DrawnTrainer.samples_of(f"device-{number}") for number in devices]
    assert not {49, 50}.intersection(found)
    return sum(found)


def drawn(tree: Mapping[str, Any]) -> DrawnLab:
    """Return a lab of equal links without faults."""
    one = draw_lab(0)
    return replace(
        one,
        experiment=parse(tree),
        unequal={},
        faults=(),
        broker_each=False,
        spool=True,
        byte_s=0.0,
    )


def weights(
    tree: Mapping[str, Any], scenario: Scenario | None = None, *, published: bool = False
) -> tuple[LabRun, dict[str, list[int]]]:
    """Run a lab; return it with the samples of each node's results, or those `published` with its
    state, in order.
    """
    found: dict[str, dict[Any, int]] = {}

    def watch(lab: ScenarioLab) -> None:
        def look(message: Routed) -> None:
            topic, content = message.topic.split("/"), decoded(message.body)[1]
            if isinstance(content, Result) and not published:
                found.setdefault(topic[-1], {})[content.key] = content.samples
            elif isinstance(content, Presence) and content.samples and published:
                found.setdefault(topic[-2], {})[content.samples] = content.samples

        lab.network.hooks.append(look)

    run = run_lab(drawn(tree), seed=1, watch=watch, scenario=scenario)
    assert run.outcome.ok, run.outcome.result
    return run, {node: list(samples.values()) for node, samples in found.items()}


def absent(changes: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the lab whose devices are away by a trace, and that goes on without them."""
    institution = {**LAB["institution"], "min_available": 1, "start_wait_s": 0.0}
    return {**LAB, "institution": institution, "availability": {"trace": {"changes": changes}}}


@pytest.mark.parametrize("node", ["institution-0", "device-0", "cloud"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.8])
def test_no_restart_changes_what_an_institution_weighs(node: str, share: float) -> None:
    """Half of its devices train in each round, and those that have trained report 49 or 50 samples."""
    undisturbed, found = weights(LAB)
    disturbed, others = weights(LAB, restarted(node, share * undisturbed.outcome.virtual_s))
    for each in (found, others):
        for name, devices in CHILDREN.items():
            assert set(each[name]) == {prepared(*devices)}
    assert disturbed.outcome.digest == undisturbed.outcome.digest


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_no_restart_changes_what_a_region_weighs(share: float) -> None:
    """Half of its institutions take part in each round: of the others it has what they have
    published.
    """
    undisturbed, found = weights(DEEP)
    disturbed, others = weights(DEEP, restarted("region-0", share * undisturbed.outcome.virtual_s))
    for each in (found, others):
        assert set(each["region-0"]) == {prepared(0, 1, 2, 3)} and set(each["region-1"]) == {
            prepared(4, 5, 6, 7)
        }
    assert disturbed.outcome.digest == undisturbed.outcome.digest


def test_a_device_that_comes_back_weighs_what_it_had_prepared() -> None:
    run, found = weights(absent({"device-0": [0.0, 4.0, 9.0], "device-1": [0.0, 6.0, 11.0]}))
    assert not run.evidence.weighed
    assert len(set(found["institution-0"])) > 1  # some rounds were without one
    assert set(found["institution-1"]) == {prepared(3, 4, 5)}


def test_an_institution_publishes_the_samples_of_a_device_that_comes_later() -> None:
    async def late(lab: ScenarioLab) -> None:
        await asyncio.sleep(0.01)
        lab.kill("device-0")
        await asyncio.sleep(6.0)
        lab.start("device-0")

    run, found = weights(absent({"device-1": [0.0, 12.0, 13.0]}), late, published=True)
    assert not run.evidence.weighed
    assert found["institution-0"] == [prepared(1, 2), prepared(0, 1, 2)]
    assert found["institution-1"] == [prepared(3, 4, 5)]
