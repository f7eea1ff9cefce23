"""Models on their way down: an institution forwards chunks as they arrive, whichever of its links
is the slower one.
"""

from __future__ import annotations

from typing import Any

import pytest

from fedstrata.common.experiment.reading import parse
from fedstrata.common.protocol.messages import Phase, Progress, Task
from fedstrata.deploy.simulation.simulated_broker import Routed
from tests.helpers.scenarios import decoded
from tests.simulation.lab import ScenarioLab

MODEL_BYTES = 8_000_000


def dispatched_s(
    *, wan: float, lan: float, model_bytes: int = MODEL_BYTES, **tables: Any
) -> tuple[float, set[int]]:
    """Return the seconds from the cloud's first task until the last device has the model, and the
    chunk sizes.
    """
    tree = {
        "rounds": 1,
        "topology": {"institutions": 2, "devices": 4},
        "links": {"check": "off", "wan": {"down_mbit": wan}, "lan": {"down_mbit": lan}},
        "transfer": {"idle_s": 600.0},
    }
    experiment = parse(tree | tables)
    begun: list[float] = []
    ended: dict[str, float] = {}
    chunks = set()

    async def watch(lab: ScenarioLab) -> None:
        def look(message: Routed) -> None:
            content = decoded(message.body)[1] if "/inbox/" in message.topic else None
            if isinstance(content, Task):
                begun.append(lab.now())
                chunks.add(content.model.chunk_bytes)
            sender = message.topic.rpartition("/")[2]
            if (
                isinstance(content, Progress)
                and content.phase is not Phase.FETCHING
                and sender in lab.homes
            ):
                ended.setdefault(sender, lab.now())

        lab.network.hooks.append(look)

    outcome = ScenarioLab(
        experiment, seed=1, scenario=watch, model_bytes=model_bytes, time_limit_s=5000.0
    ).run()
    assert outcome.ok, outcome.result
    assert len(ended) == 4
    return max(ended.values()) - begun[0], chunks


@pytest.mark.parametrize(("wan", "lan"), [(4.0, 1.5), (1.5, 4.0), (200.0, 1.0), (2.0, 2.0)])
def test_two_tiers_take_the_time_of_the_slower_link(wan: float, lan: float) -> None:
    seconds, _ = dispatched_s(wan=wan, lan=lan)
    slower_s = MODEL_BYTES * 8 / (1e6 * min(wan, lan))
    assert slower_s < seconds < 1.03 * slower_s


def test_chunks_of_one_institution_do_not_depend_on_the_links_below_another() -> None:
    of = {f"device-{number}": {"down_mbit": 1.5} for number in (0, 1)}
    links = {"check": "off", "wan": {"down_mbit": 4}, "lan": {"down_mbit": 100}, "of": of}
    seconds, chunks = dispatched_s(wan=4, lan=100, links=links)
    assert seconds < 1.03 * MODEL_BYTES * 8 / 1.5e6
    assert chunks == {250_000, 93_750}  # half a second of 4 Mbit/s, and of 1.5


@pytest.mark.parametrize(
    ("lan", "tables", "cut"),
    [
        ({"down_mbit": 100}, {}, {250_000}),
        ({}, {}, {250_000}),
        (
            {"down_mbit": 1.5},
            {"transfer": {"idle_s": 600.0, "lan": {"down": "fp16"}}},
            {250_000, 93_750},
        ),
    ],
)
def test_other_chunks_are_those_of_each_link(
    lan: dict[str, float], tables: dict[str, Any], cut: set[int]
) -> None:
    """A link below that is faster, or has another codec, changes nothing above it."""
    links = {"check": "off", "wan": {"down_mbit": 4}, "lan": lan}
    _, chunks = dispatched_s(wan=4, lan=0, model_bytes=800_000, links=links, **tables)
    assert chunks == cut


def test_a_region_forwards_for_the_slowest_link_of_all_below_it() -> None:
    tiers = [
        {"name": "wan", "children": "region", "fan_out": 1, "link": {"down_mbit": 8}},
        {"name": "metro", "children": "institution", "fan_out": 2, "link": {"down_mbit": 20}},
        {"name": "lan", "fan_out": 2, "link": {"down_mbit": 2}},
    ]
    experiment = parse({"tiers": tiers})
    assert experiment.onward_rates("cloud") == {"region-0": 250_000.0}
    assert experiment.onward_rates("region-0") == {
        "institution-0": 250_000.0,
        "institution-1": 250_000.0,
    }
    assert experiment.onward_rates("institution-0") == {}
    tiers[1]["transfer"] = {"down": "fp16"}
    assert parse({"tiers": tiers}).onward_rates("cloud") == {}
