"""The random lab of a seed: its experiment, its machines and links, and its faults."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from common.errors import InvalidExperiment
from common.experiment.codecs import DOWN, UP
from common.experiment.reading import parse
from common.experiment.rounds import participants
from common.experiment.schema import Experiment
from common.experiment.topology import CLOUD
from deploy.simulation.hardware import Durations
from deploy.simulation.network import LinkConditions
from tests.simulation.absence_draws import ABSENCES_FROM, methods_of, with_absences
from tests.simulation.fault_draws import draw_faults
from tests.simulation.faults import Fault
from tests.simulation.method_draws import (
    BUFFERS_FROM,
    CLUSTERS_FROM,
    MEMORIES_FROM,
    METHODS_FROM,
    STATES_FROM,
    with_buffers,
    with_clusters,
    with_methods,
    with_states,
)
from tests.simulation.permanent import MODEL_BYTES_LEAST, draw_permanent_fault, has_permanent_fault

TRAININGS_MOST: Final = 72  # per lab; more would only take longer
MBIT: Final = (1.0, 2.0, 8.0, 20.0, 100.0)
MODEL_BYTES: Final = (2_000, 10_000, 10_000, 40_000, 150_000, 400_000)
TRIES: Final = 100
FLAT_EVERY: Final = 10  # of so many seeds one has a lab without institutions
DEEP: Final = (5, 6)  # of twenty seeds these have labs with regions above the institutions


@dataclass(frozen=True, slots=True)
class DrawnLab:
    """The random lab of one seed. `unequal`: conditions of single nodes' links; `expected_s`: estimated duration."""

    seed: int
    experiment: Experiment
    model_bytes: int
    durations: Durations
    conditions: LinkConditions
    unequal: Mapping[str, LinkConditions]
    broker_each: bool
    spool: bool
    executor_delay_s: float
    expected_s: float
    faults: tuple[Fault, ...]

    @property
    def timed(self) -> bool:
        """Whether the aggregated models depend on time."""
        return any(tier.timed for tier in self.experiment.every_tier)

    @property
    def permanent(self) -> Fault | None:
        """The permanent fault, if it has one."""
        return next((fault for fault in self.faults if fault.permanent), None)


def draw_lab(seed: int) -> DrawnLab:
    """Return the lab of a seed."""
    rng, methods = random.Random(f"{seed} experiment"), methods_of(seed)
    for attempt in range(TRIES):
        durations = _durations(rng)
        tree = _tree(rng, durations)
        try:
            if seed % FLAT_EVERY == 0:
                tree = _without_institutions(tree)
            elif seed % 20 in DEEP:
                tree = _with_regions(random.Random(f"{seed} regions"), tree, durations)
            if methods >= METHODS_FROM:
                tree = with_methods(random.Random(f"{seed} methods"), tree)
            if methods >= STATES_FROM:
                tree = with_states(random.Random(f"{seed} states"), tree)
            if methods >= BUFFERS_FROM:
                chance, memories = random.Random(f"{seed} buffers {attempt}"), methods >= MEMORIES_FROM
                tree = with_buffers(chance, tree, memories=memories)
            elif methods >= CLUSTERS_FROM:
                tree = with_clusters(random.Random(f"{seed} clusters"), tree)
            experiment = parse(tree)
        except InvalidExperiment:
            continue
        drawn = _around(seed, rng, experiment, durations)
        drawn = _with_permanent_fault(drawn) if has_permanent_fault(seed) else drawn
        return _with_absences(drawn) if seed >= ABSENCES_FROM else drawn
    raise AssertionError(f"seed {seed} gives no valid experiment")


def _around(seed: int, rng: random.Random, experiment: Experiment, durations: Durations) -> DrawnLab:
    model_bytes = rng.choice(MODEL_BYTES)
    conditions, unequal = _conditions(rng, experiment)
    broker_each = rng.random() < 0.3
    expected_s = _expected_s(experiment, durations, model_bytes, conditions)
    return DrawnLab(
        seed=seed,
        experiment=experiment,
        model_bytes=model_bytes,
        durations=durations,
        conditions=conditions,
        unequal=unequal,
        broker_each=broker_each,
        spool=rng.random() < 0.8,
        executor_delay_s=rng.choice([0.0, 0.0, 0.05, 0.5]),
        expected_s=expected_s,
        faults=draw_faults(random.Random(f"{seed} faults"), experiment, expected_s, broker_each=broker_each),
    )


def _with_permanent_fault(drawn: DrawnLab) -> DrawnLab:
    """Return a lab with a permanent fault in place of its faults."""
    rng = random.Random(f"{drawn.seed} permanent")
    experiment, faults = draw_permanent_fault(rng, drawn.experiment, drawn.expected_s, broker_each=drawn.broker_each)
    model_bytes = max(drawn.model_bytes, MODEL_BYTES_LEAST)
    expected_s = _expected_s(experiment, drawn.durations, model_bytes, drawn.conditions)
    return replace(drawn, experiment=experiment, model_bytes=model_bytes, expected_s=expected_s, faults=faults)


def _with_absences(drawn: DrawnLab) -> DrawnLab:
    rng = random.Random(f"{drawn.seed} absences")
    return replace(drawn, experiment=with_absences(rng, drawn.experiment, drawn.expected_s))


def _durations(rng: random.Random) -> Durations:
    return Durations(
        boot_s=rng.choice([0.1, 0.3, 2.0]),
        train_s=rng.choice([0.1, 0.5, 1.0, 1.0, 4.0]),
        spread=rng.choice([0.0, 0.5, 2.0]),
        evaluate_s=rng.choice([0.05, 0.2, 2.0]),
    )


def _tree(rng: random.Random, durations: Durations) -> dict[str, Any]:
    sizes = [rng.choice([1, 1, 2, 2, 3, 4, 8]) for _ in range(rng.choice([1, 1, 2, 2, 3, 4]))]
    rounds = rng.choice([1, 1, 2, 2, 3, 4])
    while sum(sizes) * rounds > TRAININGS_MOST:
        sizes[sizes.index(max(sizes))] -= 1
    most = TRAININGS_MOST // (sum(sizes) * rounds)
    devices = [f"device-{number}" for number in range(sum(sizes))]
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    shares = [rng.choice([1.0, 1.0, 1.0, 0.5, 0.75]) for _ in range(2)]
    drawn = participants(len(sizes), shares[0]), min(participants(size, shares[1]) for size in sizes)
    keepalive_s = rng.choice([5, 10, 10, 30])
    return {
        "name": "drawn",
        "seed": rng.randrange(1000),
        "rounds": min(rng.randint(1, 5), max(1, most)),
        "topology": {
            "institutions": len(sizes),
            "devices": devices,
            "members": {
                f"institution-{place}": devices[end - size : end]
                for place, (end, size) in enumerate(zip(ends, sizes, strict=True))
            },
        },
        "training": {"epochs": rng.choice([1, 1, 2, 3])},
        "cloud": {
            "participation": shares[0],
            "aggregation": _rule(rng, cloud=True),
            "closing": _closing(rng, drawn[0], 8 * durations.train_s * rounds),
            "epoch_control": rng.choice([{}, {"name": "tempo"}, {"name": "tempo", "variant": "plato"}]),
            "checkpoint_every": rng.choice([1, 1, 2]),
        },
        "institution": {
            "rounds": rounds,
            "participation": shares[1],
            "aggregation": _rule(rng, cloud=False),
            "closing": _closing(rng, drawn[1], 4 * durations.train_s),
        },
        "links": _links(rng),
        "transfer": {
            "inline_bytes": rng.choice([0, 0, 4096, 262_144]),
            "chunk_bytes": rng.choice([32_768, 32_768, 65_536, 1_000_000]),
            "window": rng.choice([2, 4, 8]),
            "upload_slots": rng.choice([1, 2, 4]),
            "idle_s": float(max(rng.choice([30, 60, 120]), 4 * keepalive_s)),
            "keepalive_s": keepalive_s,
            "resident_mb": rng.choice([512.0, 0.001]),
            "wan": _codecs(rng),
            "lan": _codecs(rng),
        },
    }


def _without_institutions(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a drawn lab with its devices below the cloud."""
    devices, links, transfer = tree["topology"]["devices"], dict(tree["links"]), dict(tree["transfer"])
    links.pop("lan", None)
    transfer.pop("lan", None)
    kept = {key: value for key, value in tree.items() if key != "institution"}
    return kept | {"topology": {"institutions": 0, "devices": devices}, "links": links, "transfer": transfer}


def _with_regions(rng: random.Random, tree: dict[str, Any], durations: Durations) -> dict[str, Any]:
    """Return a drawn lab with one to three regions between the cloud and its institutions."""
    cloud, institution, topology = dict(tree["cloud"]), tree["institution"], tree["topology"]
    links, transfer = dict(tree["links"]), dict(tree["transfer"])
    names = list(topology["members"])
    regions = [f"region-{place}" for place in range(min(len(names), rng.choice([1, 2, 2, 3])))]
    homes = [*regions, *(rng.choice(regions) for _ in names[len(regions) :])]
    members = {region: [name for name, home in zip(names, homes, strict=True) if home == region] for region in regions}
    participation = rng.choice([1.0, 1.0, 0.5])
    drawn = min(participants(len(found), participation) for found in members.values())
    trainings = len(topology["devices"]) * institution["rounds"] * tree["rounds"]
    rounds = rng.choice([1, 2, 3]) if 3 * trainings <= TRAININGS_MOST else 1
    seconds = 8 * durations.train_s * institution["rounds"]
    wide, local = links.pop("wan", {}), links.pop("lan", {})
    tiers = [
        {
            "name": "wan", "children": "region", "members": {CLOUD: regions}, "link": wide,
            "participation": cloud.pop("participation"), "aggregation": cloud.pop("aggregation"),
            "closing": _closing(rng, len(regions), seconds * rounds) if cloud.pop("closing") else {},
            "transfer": transfer.pop("wan"),
        },
        {
            "name": "metro", "children": "institution", "members": members, "link": rng.choice([wide, local]),
            "participation": participation, "aggregation": _rule(rng, cloud=False), "rounds": rounds,
            "closing": _closing(rng, drawn, seconds), "transfer": _codecs(rng),
        },
        {"name": "lan", "members": topology["members"], "link": local, "transfer": transfer.pop("lan"), **institution},
    ]  # fmt: skip
    kept = {key: value for key, value in tree.items() if key not in ("topology", "institution")}
    return kept | {"cloud": cloud, "tiers": tiers, "links": links, "transfer": transfer}


def _rule(rng: random.Random, *, cloud: bool) -> dict[str, Any]:
    name = rng.choice(["fedavg", "fedavg", "fedcross", "fedmr", "fedcda", "independent", "fedadp"])
    rule: dict[str, Any] = {"name": name}
    if name in ("fedcross", "fedmr", "independent") and not cloud:
        rule["on_new_model"] = rng.choice(["reset", "recentre"])
    if name == "fedcross":
        rule |= {"strategy": rng.choice(["in_order", "lowest"]), "first_stage_rounds": rng.choice([0, 1])}
    elif name == "fedmr":
        rule |= {"granularity": rng.choice(["module", "key", "block", "model"])}
    elif name == "fedcda":
        rule |= {"depth": rng.choice([1, 2]), "warmup_rounds": rng.choice([0, 1]), "groups": 4}
        rule |= {"history": rng.choice(["clear", "keep"])}
    return rule


def _closing(rng: random.Random, children: int, seconds: float) -> dict[str, Any]:
    if rng.random() < 0.75:
        return {}
    return {"rule": "quorum", "quorum": rng.randint(1, children), "deadline_s": rng.uniform(0.3, 1.5) * seconds}


def _codecs(rng: random.Random) -> dict[str, str]:
    if rng.random() < 0.6:
        return {}
    return {"up": rng.choice(UP), "down": rng.choice(DOWN)}


def _links(rng: random.Random) -> dict[str, Any]:
    links: dict[str, Any] = {
        "check": rng.choice(["off", "off", "warn"]),
        "enforce": rng.choice(["bucket", "bucket", "none"]),
    }
    if rng.random() < 0.4:
        place = rng.randrange(len(MBIT))
        links["wan"] = {"up_mbit": MBIT[place], "down_mbit": MBIT[min(place + 1, 4)], "delay_ms": rng.choice([0, 50])}
        links["lan"] = rng.choice([{}, {"up_mbit": 20, "down_mbit": 100}])
        if rng.random() < 0.3:
            links["of"] = {"device-0": {"up_mbit": 1, "down_mbit": 2, "delay_ms": 20}}
    return links


def _conditions(rng: random.Random, experiment: Experiment) -> tuple[LinkConditions, dict[str, LinkConditions]]:
    conditions = LinkConditions(delay_s=rng.choice([0.0005, 0.0005, 0.02]))
    if rng.random() < 0.2:
        conditions = LinkConditions(up_rate=1e6, down_rate=2e6, delay_s=0.01)
    nodes = experiment.tree.nodes
    unequal = {}
    if rng.random() < 0.3:
        slow = LinkConditions(up_rate=rng.choice([5e4, 3e5]), down_rate=rng.choice([1e5, 1e6]), delay_s=0.05)
        unequal[rng.choice(nodes)] = slow
    return conditions, unequal


def _expected_s(experiment: Experiment, durations: Durations, model_bytes: int, conditions: LinkConditions) -> float:
    links = [tier.link for tier in experiment.every_tier]
    rates = [way.rate for link in links for way in (link.up, link.down) if way.rate]
    slowest = min([1e6, *rates])
    training_s = durations.train_s * (1 + durations.spread / 2) * experiment.training.epochs
    local_s = 0.3 + training_s + 2 * model_bytes / slowest
    rounds = experiment.device_rounds
    transfers = sum(experiment.rounds_of(depth) for depth in range(len(experiment.every_tier) - 1)) or 1
    carried_s = transfers * (2 * model_bytes / slowest + 0.3)
    return 1 + 4 * durations.boot_s + experiment.rounds * (rounds * local_s + carried_s)
