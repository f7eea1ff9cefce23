"""`make bench NAME=watch`: bytes of the status records of simulated labs, and a watcher's CPU."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from statistics import mean

from fedstrata.common.accounting.counters import packet_bytes
from fedstrata.common.experiment.reading import parse
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import About, Question
from fedstrata.deploy.simulation.simulated_broker import Routed
from fedstrata.deploy.watching.follower import DRAW_S, STATUS_EVERY_S
from fedstrata.deploy.watching.lab_state import WatchedLab
from fedstrata.deploy.watching.view import View
from tests.bench.running import run
from tests.simulation.lab import ScenarioLab

LABS = ((3, 12), (10, 1000))  # institutions, devices
DRAWS = 20


def watched(institutions: int, devices: int) -> str:
    """Return the figures of one lab, in which each training takes ten virtual seconds."""
    topology = {"institutions": institutions, "devices": devices}
    hardware = {"default": {"overhead_s": 10.0}}
    experiment = parse(
        {"rounds": 2, "topology": topology, "links": {"check": "off"}, "hardware": hardware}
    )
    records: list[tuple[float, topics.StatusTopic, bytes]] = []
    sizes, runs = defaultdict[str, list[int]](list), list[str]()

    def observe(event: str, facts: dict[str, object]) -> None:
        if event == "run":
            runs.append(str(facts["run"]))

    def hook(message: Routed) -> None:
        topic = topics.parse(message.topic)
        if isinstance(topic, topics.StatusTopic):
            records.append((lab.now(), topic, message.body))
            role = "cloud" if topic.node == "cloud" else "institution"
            sizes[role].append(packet_bytes(message.topic, len(message.body), qos=0))

    async def ask(sim: ScenarioLab) -> None:
        while not sim.over:
            for name in runs:
                body = serialization.encode(Question("nonce", About.STATUS, name), "operator")
                for parent in experiment.tree.children:
                    sim.inject(topics.ask("lab", parent, "operator"), body, qos=0)
            await asyncio.sleep(STATUS_EVERY_S)

    lab = ScenarioLab(experiment, observe=observe, scenario=ask, time_limit_s=3600.0)
    lab.network.hooks.append(hook)
    outcome = lab.run()
    assert outcome.ok, outcome.result
    span_s = records[-1][0] - records[0][0]
    watch, view = WatchedLab(runs[0], experiment, brokers=["b"], now=0.0), View(100, 50)
    begun = time.process_time()
    for now, topic, body in records:
        watch.receive(topic, body, now)
    receive_s, begun = time.process_time() - begun, time.process_time()
    for _ in range(DRAWS):
        view.picture(watch, records[-1][0], [])
    draw_s = (time.process_time() - begun) / DRAWS
    each = ", ".join(
        f"{role} {mean(found):.0f} bytes (at most {max(found)})" for role, found in sizes.items()
    )
    rate = sum(map(sum, sizes.values())) / span_s
    core = receive_s / span_s + draw_s / DRAW_S
    return (
        f"{devices} devices, {institutions} institutions: {each}; {rate:.0f} bytes/s in all, MQTT "
        "packets\n"
        f"  a watcher: {1e3 * receive_s / len(records):.2f} ms a record, {1e3 * draw_s:.1f} ms to "
        "draw, "
        f"{100 * core:.1f} % of a core"
    )


def main() -> None:
    """Print the figures of each lab."""
    for institutions, devices in LABS:
        print(watched(institutions, devices), flush=True)


if __name__ == "__main__":
    run(main)
