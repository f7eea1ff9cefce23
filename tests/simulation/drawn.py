"""The random lab of a seed: its experiment, its machines and links, and its faults.

All of it is one draw. It may change at any time, and with it what a seed means: a lab that failed
is kept as a file (`tests/simulation/labs.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.model.codec_settings import DOWN, UP
from fedstrata.common.settings.devices import Availability
from fedstrata.common.settings.topology import CLOUD, participants
from fedstrata.deploy.simulation.hardware import Durations
from fedstrata.deploy.simulation.link import LinkConditions
from fedstrata.device.jobs import WAITS_S
from tests.simulation.attacked import ATTACKED, attacked
from tests.simulation.changes import with_changes, with_minima
from tests.simulation.fault_draws import draw_faults, draw_permanent_fault
from tests.simulation.faults import Fault, FaultKind
from tests.simulation.secured import SECURED, secured
from tests.simulation.together import deaths, in_order, trained_by_own

TRAININGS_MOST: Final = 72  # per lab; more would only take longer
MBIT: Final = (1.0, 2.0, 8.0, 20.0, 100.0)
MODEL_BYTES: Final = (2_000, 10_000, 10_000, 40_000, 150_000, 400_000)
# with a permanent fault: several packets that are too large for a black hole
MODEL_BYTES_LEAST: Final = 10_000
TRIES: Final = 100
# of nodes: without institutions, with them, and with regions above them
LAYERS: Final = (2, *(3,) * 8, 4)
PERMANENT: Final = 0.15  # share of the labs in which a device is lost for good
ABSENT: Final = 0.2  # share of the labs whose devices leave and return by traces
NEWER: Final = 0.4  # share of the tiers whose rule is not one of the papers'
STATES: Final = 0.15  # shares of the labs whose devices keep vectors,
CLUSTERS: Final = 0.1  # whose tiers select by clusters,
BUFFERS: Final = 0.2  # and whose tiers aggregate buffers
# of frozen arrays that some devices do not have
FROZEN_BYTES: Final = (0,) * 6 + (2_000, 40_000, 400_000)
NODES_DIE: Final = (FaultKind.KILL, FaultKind.TERMINATE)
NEWCOMERS: Final = (FaultKind.ENTRY, FaultKind.VISIT)  # they have no machine
# share of the labs with a trainer of a user's own, its state, absences and deaths together
EVERYTHING: Final = 0.15
TRAINERS: Final = 0.1  # share of the others with a trainer of a user's own, if they can have one
SCORES: Final = 0.3  # share of the labs whose devices score models
PERSONAL: Final = 0.4  # of the labs in which devices alone score
PERSONALISED: Final = 0.4  # of the labs in which devices score
BUSY: Final = 0.1  # share of the others whose nodes and brokers are busy with each byte,
SEVERAL: Final = 0.12  # and that have several runs, if these are short
PRIVATE: Final = 0.4  # share of the labs with privacy, if their rules allow it,
PRIVATE_TIER: Final = 0.6  # and of their tiers
ROUNDS_MOST: Final = 8
AWAY: Final = 0.5  # share of the devices that are ever absent, in labs with absences
TOGETHER: Final = 0.2  # share of these labs all of whose devices leave at the same time
LATE: Final = 0.2  # share of the devices that are away as the run begins
PAPERS: Final = ("fedavg", "fedavg", "fedcross", "fedmr", "fedcda", "independent", "fedadp")
RULES: Final[tuple[Mapping[str, Any], ...]] = (
    {"name": "fedavgm", "momentum": 0.5},
    {"name": "fedadam", "learning_rate": 0.1},
    {"name": "fedyogi", "learning_rate": 0.1},
    {"name": "fedexp"},
    {"name": "fednova"},
    {"name": "qfedavg", "q": 1.0},
    *({"name": "trimmed_mean", "trim": 0.0},) * 2,  # for any number of children, as the next one
    {"name": "krum", "wrong": 0},
)
CHANGES: Final[tuple[Mapping[str, Any], ...]] = (  # codecs of changes
    {"name": "topk", "share": 0.05},
    {"name": "topk", "share": 0.3},
    {"name": "sign"},
    {"name": "qsgd", "bits": 3},
    {"name": "qsgd", "bits": 6},
)
FEEDBACK: Final = 0.6  # share of the lossy codecs
# Not `oort`: it depends on time, so a disturbed lab has another model than an undisturbed one.
SELECTORS: Final[tuple[Mapping[str, Any], ...]] = (
    {"name": "round_robin"},
    {"name": "power_of_choice"},
)


@dataclass(frozen=True, slots=True)
class DrawnLab:
    """A random lab. `unequal`: conditions of single nodes' links; `expected_s`: estimated duration.

    `frozen_bytes`: of the model's frozen arrays, which not every device builds
    `runs`: one after another, whose nodes stay    `byte_s`: seconds of a node's, or a broker's,
    core for each byte `name`: of its file, if it was kept    `seed`: of the draw, and of all
    chances while it runs
    """

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
    name: str = ""
    frozen_bytes: int = 0
    runs: int = 1
    byte_s: float = 0.0

    @property
    def title(self) -> str:
        """The file, or the seed."""
        return f"lab {self.name}" if self.name else f"seed {self.seed}"

    @property
    def timed(self) -> bool:
        """Whether the aggregated models depend on time, or on secrets that a killed process may
        draw again.
        """
        return any(tier.timed or tier.privacy.secret for tier in self.experiment.tiers)

    @property
    def slow(self) -> bool:
        """Whether messages may be on their way for longer than their delay."""
        return bool(self.unequal or self.byte_s) or self.conditions.up_rate is not None

    @property
    def waits_s(self) -> float:
        """Seconds for which a preparation that hangs counts as progress: it may be a download of a
        user's trainer.
        """
        hangs = self.permanent is not None and self.permanent.kind is FaultKind.HANG
        return WAITS_S if hangs and not self.experiment.training.trainer.learns_module else 0.0

    @property
    def permanent(self) -> Fault | None:
        """The permanent fault, if it has one."""
        return next((fault for fault in self.faults if fault.permanent), None)

    @property
    def last_return_s(self) -> float:
        """When the last device that is away by its trace has returned, seconds since time zero; 0
        without traces.
        """
        trace = self.experiment.availability.trace
        return 0.0 if trace is None else max(changes[-1] for changes in trace.changes.values())

    @property
    def has_everything(self) -> bool:
        """Whether it has a trainer of a user's own, which keeps a state, absences, and deaths of
        nodes and workers.
        """
        ends = {fault.kind for fault in self.faults}
        absences, own = (
            self.experiment.availability.trace is not None,
            self.experiment.training.trainer.remembers,
        )
        return absences and own and bool(ends & {*NODES_DIE}) and FaultKind.WORKER in ends

    def departures(self, device: str) -> int:
        """Return how often a device leaves."""
        online = self.experiment.online(device)
        return 0 if online is None else (len(online.changes) - 1) // 2 + (online.changes[0] > 0)

    def without_absences(self) -> DrawnLab:
        """Return the lab in which every device is always there, below its own parent."""
        *above, last = self.experiment.tiers
        tiers = [*above, last.model_copy(update={"move_after_s": None})]
        update = {"availability": Availability(), "tiers": tiers}
        return replace(self, experiment=self.experiment.model_copy(update=update))


def draw_lab(seed: int) -> DrawnLab:
    """Return the lab of a seed; one from ATTACKED on is that of a smaller seed, with adversaries,
    one from SECURED on that with secure sums.
    """
    drawn = _draw_lab(seed % ATTACKED)
    if seed < ATTACKED:
        return drawn
    changed = secured if seed >= SECURED else attacked
    return replace(drawn, seed=seed, experiment=changed(seed, drawn.experiment))


def _draw_lab(seed: int) -> DrawnLab:
    rng = random.Random(f"{seed} lab")
    for _ in range(TRIES):
        durations = _durations(rng)
        try:
            tree = _with_methods(rng, _with_layers(rng, _tree(rng, durations), durations))
            experiment = _with_scores(random.Random(f"{seed} evaluation"), parse(tree))
            experiment = _with_privacy(random.Random(f"{seed} privacy"), experiment)
            experiment = with_minima(random.Random(f"{seed} minima"), experiment)
        except InvalidExperiment:
            continue
        drawn = _around(seed, rng, experiment, durations)
        together = random.Random(f"{seed} together")
        if together.random() < EVERYTHING:
            return _with_everything(together, drawn)
        drawn = _with_trainer(random.Random(f"{seed} trainer"), drawn)
        drawn = _with_changes(random.Random(f"{seed} changes"), drawn)
        with_institutions = len(experiment.tiers) == 2
        lost = (
            with_institutions
            and rng.random() < PERMANENT
            and not drawn.experiment.tiers[-1].entering
        )
        drawn = _with_permanent_fault(rng, drawn) if lost else drawn
        if rng.random() < ABSENT:
            return _with_absences(rng, drawn)
        return _with_more(rng, drawn) if drawn.permanent is None else drawn
    raise AssertionError(f"seed {seed} gives no valid experiment")


def _with_scores(rng: random.Random, experiment: Experiment) -> Experiment:
    """Return a lab whose devices score models, and keep personal parts, if it can and chance will."""
    if rng.random() >= SCORES or any(tier.aggregation.buffers for tier in experiment.tiers):
        return experiment
    evaluation = {"at": rng.choice(["devices", "devices", "both"]), "every": rng.choice([1, 1, 2])}
    evaluation |= {
        "participation": rng.choice([1.0, 1.0, 0.5]),
        "data": rng.choice(["held_out", "test"]),
    }
    evaluation["personalised"] = rng.random() < PERSONALISED
    tree = experiment.model_dump(mode="json") | {"evaluation": evaluation}
    whole = (
        any(tier.aggregation.reads_samples for tier in experiment.tiers)
        or not experiment.training.objective.parts
    )
    if evaluation["at"] == "devices" and not whole and rng.random() < PERSONAL:
        tree["model"] = tree["model"] | {"personal": ["b.*"]}
    return parse(tree)


def _with_privacy(rng: random.Random, experiment: Experiment) -> Experiment:
    """Return a lab some of whose tiers have privacy, if its rules allow it and chance will."""
    if rng.random() >= PRIVATE:
        return experiment
    tree = experiment.model_dump(mode="json")
    for tier in tree["tiers"]:
        if rng.random() < PRIVATE_TIER:
            last = tier is tree["tiers"][-1]
            unit = rng.choice(["device", "device", "sample"]) if last else "institution"
            privacy = {
                "unit": unit,
                "clip_norm": rng.choice([0.1, 1.0, 100.0]),
                "noise_multiplier": rng.choice([0.0, 0.5]),
            }
            privacy |= {
                "delta": 1e-5,
                "noise": rng.choice(["seeded", "seeded", "seeded", "system"]),
            }
            if unit != "sample":
                privacy["noise_by"] = rng.choice(["child", "parent"])
                quantile = privacy["noise_by"] == "parent" and rng.random() < 0.5
                privacy |= {"quantile": rng.choice([0.5, 0.9])} if quantile else {}
                tier["norm_bound"] = {} if privacy["noise_by"] == "parent" else tier["norm_bound"]
            tier["privacy"] = privacy
    try:
        return parse(tree)
    except InvalidExperiment:  # of a rule that reads what has no noise
        return experiment


def _with_changes(rng: random.Random, drawn: DrawnLab) -> DrawnLab:
    """Return a lab into which devices enter, or in which they move, if its devices may be absent
    and chance will.
    """
    if drawn.broker_each:
        return drawn
    experiment, entries = with_changes(rng, drawn.experiment, drawn.expected_s)
    faults = tuple(sorted([*drawn.faults, *entries], key=lambda fault: (fault.at_s, fault.kind)))
    return replace(drawn, experiment=experiment, faults=faults)


def _with_trainer(rng: random.Random, drawn: DrawnLab) -> DrawnLab:
    """Return a lab with a trainer of a user's own, if it can have one and chance will."""
    if rng.random() >= TRAINERS:
        return drawn
    return replace(
        drawn, experiment=trained_by_own(rng, drawn.experiment, model_bytes=drawn.model_bytes)
    )


def _with_everything(rng: random.Random, drawn: DrawnLab) -> DrawnLab:
    """Return a lab with a trainer of a user's own, absences and deaths; as it is, if it cannot have
    the trainer.
    """
    experiment = trained_by_own(rng, drawn.experiment, model_bytes=drawn.model_bytes, plainly=True)
    if experiment.training.trainer.learns_module:
        return drawn
    faults = in_order([*drawn.faults, *deaths(rng, experiment, drawn.expected_s)])
    return _with_absences(rng, replace(drawn, experiment=experiment, faults=faults))


def _around(
    seed: int, rng: random.Random, experiment: Experiment, durations: Durations
) -> DrawnLab:
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
        frozen_bytes=random.Random(f"{seed} frozen").choice(FROZEN_BYTES),
        faults=draw_faults(rng, experiment, expected_s, broker_each=broker_each),
    )


def _with_permanent_fault(rng: random.Random, drawn: DrawnLab) -> DrawnLab:
    """Return a lab with a permanent fault in place of its faults."""
    experiment, faults = draw_permanent_fault(
        rng, drawn.experiment, drawn.expected_s, broker_each=drawn.broker_each
    )
    model_bytes = max(drawn.model_bytes, MODEL_BYTES_LEAST)
    expected_s = _expected_s(experiment, drawn.durations, model_bytes, drawn.conditions)
    return replace(
        drawn, experiment=experiment, model_bytes=model_bytes, expected_s=expected_s, faults=faults
    )


# Layers, machines and links


def _with_layers(rng: random.Random, tree: dict[str, Any], durations: Durations) -> dict[str, Any]:
    """Return a drawn lab with other layers, or as it is."""
    layers = rng.choice(LAYERS)
    if layers == 3:
        return tree
    return _without_institutions(tree) if layers == 2 else _with_regions(rng, tree, durations)


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
    drawn = (
        participants(len(sizes), shares[0]),
        min(participants(size, shares[1]) for size in sizes),
    )
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
            "epoch_control": rng.choice(
                [{}, {"name": "tempo"}, {"name": "tempo", "variant": "plato"}]
            ),
            "checkpoint_every": rng.choice([1, 1, 2, 3]),
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
    devices, links, transfer = (
        tree["topology"]["devices"],
        dict(tree["links"]),
        dict(tree["transfer"]),
    )
    links.pop("lan", None)
    transfer.pop("lan", None)
    kept = {key: value for key, value in tree.items() if key != "institution"}
    return kept | {
        "topology": {"institutions": 0, "devices": devices},
        "links": links,
        "transfer": transfer,
    }


def _with_regions(rng: random.Random, tree: dict[str, Any], durations: Durations) -> dict[str, Any]:
    """Return a drawn lab with one to three regions between the cloud and its institutions."""
    cloud, institution, topology = dict(tree["cloud"]), tree["institution"], tree["topology"]
    links, transfer = dict(tree["links"]), dict(tree["transfer"])
    names = list(topology["members"])
    regions = [f"region-{place}" for place in range(min(len(names), rng.choice([1, 2, 2, 3])))]
    homes = [*regions, *(rng.choice(regions) for _ in names[len(regions) :])]
    members = {
        region: [name for name, home in zip(names, homes, strict=True) if home == region]
        for region in regions
    }
    participation = rng.choice([1.0, 1.0, 0.5])
    drawn = min(participants(len(found), participation) for found in members.values())
    trainings = len(topology["devices"]) * institution["rounds"] * tree["rounds"]
    rounds = rng.choice([1, 2, 3]) if 3 * trainings <= TRAININGS_MOST else 1
    seconds = 8 * durations.train_s * institution["rounds"]
    wide, local = links.pop("wan", {}), links.pop("lan", {})
    tiers = [
        {
            "name": "wan",
            "children": "region",
            "members": {CLOUD: regions},
            "link": wide,
            "participation": cloud.pop("participation"),
            "aggregation": cloud.pop("aggregation"),
            "closing": _closing(rng, len(regions), seconds * rounds)
            if cloud.pop("closing")
            else {},
            "transfer": transfer.pop("wan"),
        },
        {
            "name": "metro",
            "children": "institution",
            "members": members,
            "link": rng.choice([wide, local]),
            "participation": participation,
            "aggregation": _rule(rng, cloud=False),
            "rounds": rounds,
            "closing": _closing(rng, drawn, seconds),
            "transfer": _codecs(rng),
        },
        {
            "name": "lan",
            "members": topology["members"],
            "link": local,
            "transfer": transfer.pop("lan"),
            **institution,
        },
    ]
    kept = {key: value for key, value in tree.items() if key not in ("topology", "institution")}
    return kept | {"cloud": cloud, "tiers": tiers, "links": links, "transfer": transfer}


def _rule(rng: random.Random, *, cloud: bool) -> dict[str, Any]:
    name = rng.choice(PAPERS)
    rule: dict[str, Any] = {"name": name}
    if name in ("fedcross", "fedmr", "independent") and not cloud:
        rule["on_new_model"] = rng.choice(["reset", "recentre"])
    if name == "fedcross":
        rule |= {
            "strategy": rng.choice(["in_order", "lowest"]),
            "first_stage_rounds": rng.choice([0, 1]),
        }
    elif name == "fedmr":
        rule |= {"granularity": rng.choice(["module", "key", "block", "model"])}
    elif name == "fedcda":
        rule |= {"depth": rng.choice([1, 2]), "warmup_rounds": rng.choice([0, 1]), "groups": 4}
        rule |= {"history": rng.choice(["clear", "keep"])}
    return rule


def _closing(rng: random.Random, children: int, seconds: float) -> dict[str, Any]:
    if rng.random() < 0.75:
        return {}
    return {
        "rule": "quorum",
        "quorum": rng.randint(1, children),
        "deadline_s": rng.uniform(0.3, 1.5) * seconds,
    }


def _codecs(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {}
    up: dict[str, Any] = (
        dict(rng.choice(CHANGES)) if rng.random() < 0.5 else {"name": rng.choice(UP)}
    )
    if rng.random() < FEEDBACK and "fp32" not in up["name"]:
        up["feedback"] = True
    return {"up": up, "down": rng.choice(DOWN)}


def _links(rng: random.Random) -> dict[str, Any]:
    links: dict[str, Any] = {
        "check": rng.choice(["off", "off", "warn"]),
        "enforce": rng.choice(["bucket", "bucket", "none"]),
    }
    if rng.random() < 0.4:
        place = rng.randrange(len(MBIT))
        links["wan"] = {
            "up_mbit": MBIT[place],
            "down_mbit": MBIT[min(place + 1, 4)],
            "delay_ms": rng.choice([0, 50]),
        }
        links["lan"] = rng.choice([{}, {"up_mbit": 20, "down_mbit": 100}])
        if rng.random() < 0.3:
            links["of"] = {"device-0": {"up_mbit": 1, "down_mbit": 2, "delay_ms": 20}}
    return links


def _conditions(
    rng: random.Random, experiment: Experiment
) -> tuple[LinkConditions, dict[str, LinkConditions]]:
    conditions = LinkConditions(delay_s=rng.choice([0.0005, 0.0005, 0.02]))
    if rng.random() < 0.2:
        conditions = LinkConditions(up_rate=1e6, down_rate=2e6, delay_s=0.01)
    nodes = experiment.tree.nodes
    unequal = {}
    if rng.random() < 0.3:
        slow = LinkConditions(
            up_rate=rng.choice([5e4, 3e5]), down_rate=rng.choice([1e5, 1e6]), delay_s=0.05
        )
        unequal[rng.choice(nodes)] = slow
    return conditions, unequal


def _expected_s(
    experiment: Experiment, durations: Durations, model_bytes: int, conditions: LinkConditions
) -> float:
    links = [tier.link for tier in experiment.tiers]
    rates = [way.rate for link in links for way in (link.up, link.down) if way.rate]
    slowest = min([1e6, *rates])
    training_s = durations.train_s * (1 + durations.spread / 2) * experiment.training.epochs
    local_s = 0.3 + training_s + 2 * model_bytes / slowest
    rounds = experiment.device_rounds
    transfers = sum(experiment.rounds_of(depth) for depth in range(len(experiment.tiers) - 1)) or 1
    carried_s = transfers * (2 * model_bytes / slowest + 0.3)
    return 1 + 4 * durations.boot_s + experiment.rounds * (rounds * local_s + carried_s)


# Methods


def _with_methods(rng: random.Random, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a drawn lab some of whose tiers have other rules, selectors and bounds; its devices
    may keep more.
    """
    found = _with_rules(rng, tree)
    if rng.random() < STATES:
        found = _with_states(rng, found)
    if rng.random() < BUFFERS:
        return _with_buffers(rng, found, memories=rng.random() < 0.5)
    return _with_clusters(rng, found) if rng.random() < CLUSTERS else found


def _with_rules(rng: random.Random, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a drawn lab in which some tiers have newer rules, selectors and bounds."""
    if "tiers" in tree:
        return {**tree, "tiers": [_tier(rng, tier) for tier in tree["tiers"]]}
    return {
        **tree,
        **{key: _tier(rng, tree[key]) for key in ("cloud", "institution") if key in tree},
    }


def _with_states(rng: random.Random, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a drawn lab whose devices keep vectors, and with SCAFFOLD send and receive some behind
    the models.
    """
    name = rng.choice(["scaffold", "scaffold", "feddyn"])
    rule = {"aggregation": {"name": name}}
    found = {**tree, "training": {**tree["training"], "objective": {"name": name}}}
    if "tiers" in tree:
        return {**found, "tiers": [*tree["tiers"][:-1], {**tree["tiers"][-1], **rule}]}
    last = "institution" if "institution" in tree else "cloud"
    return {**found, last: {**tree[last], **rule}}


def _with_clusters(rng: random.Random, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a drawn lab whose tiers select by clusters, of children or of their steps, where no
    quorum has to fit.
    """
    if "tiers" in tree:
        return {**tree, "tiers": [_clustered(rng, tier) for tier in tree["tiers"]]}
    return {
        **tree,
        **{key: _clustered(rng, tree[key]) for key in ("cloud", "institution") if key in tree},
    }


def _with_buffers(rng: random.Random, tree: Mapping[str, Any], *, memories: bool) -> dict[str, Any]:
    """Return a drawn lab of which a tier at least aggregates buffers; with `memories` its devices
    keep a model.
    """
    objective = {"objective": {"name": "moon"}} if memories else {}
    settings = {key: value for key, value in tree["training"].items() if key != "objective"}
    found = {**tree, "training": settings | objective}
    if "tiers" in tree:
        chosen = rng.randrange(len(tree["tiers"]))
        tiers = [_buffered(rng, tier, i == chosen) for i, tier in enumerate(tree["tiers"])]
        return {**found, "tiers": tiers, "cloud": _fixed(tree["cloud"])}
    keys = [key for key in ("cloud", "institution") if key in tree]
    chosen = rng.randrange(len(keys))
    found |= {key: _buffered(rng, tree[key], i == chosen) for i, key in enumerate(keys)}
    return {**found, "cloud": _fixed(found["cloud"])}


def _fixed(cloud: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in cloud.items() if key != "epoch_control"}


def _buffered(rng: random.Random, tier: Mapping[str, Any], always: bool) -> dict[str, Any]:
    objective = tier.get("aggregation", {}).get("name") in ("scaffold", "feddyn")
    if not always and rng.random() < 0.5:
        return {**tier, "aggregation": {"name": "fedavg"}} if objective else dict(tier)
    kept = {
        key: value
        for key, value in tier.items()
        if key not in ("closing", "norm_bound", "selection")
    }
    return {**kept, "aggregation": {"name": "fedbuff", "buffer": rng.choice([1, 1, 2])}}


def _clustered(rng: random.Random, tier: Mapping[str, Any]) -> dict[str, Any]:
    if tier.get("closing"):
        return dict(tier)
    found = {**tier, "participation": rng.choice([0.5, 0.75, 1.0])}
    if tier.get("aggregation", {}).get("name") in ("scaffold", "feddyn") or rng.random() < 0.4:
        return {**found, "selection": {"name": "fedcluster"}}
    found.pop("selection", None)
    return {
        **found,
        "aggregation": {"name": "clusamp", "distance": rng.choice(["cosine", "l1", "l2"])},
    }


def _tier(rng: random.Random, tier: Mapping[str, Any]) -> dict[str, Any]:
    return {**tier, **dict(_changes(rng, tier))}


def _changes(rng: random.Random, tier: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if rng.random() < NEWER:
        yield "aggregation", dict(rng.choice(RULES))
    if rng.random() < 0.15:
        yield (
            "norm_bound",
            {"action": rng.choice(["clip", "refuse"]), "factor": rng.choice([1.0, 2.0])},
        )
    if rng.random() < 0.3:
        yield "selection", dict(rng.choice(SELECTORS))
        if not tier.get("closing"):  # else the quorum may not fit
            yield "participation", rng.choice([0.5, 0.75])


# More runs, and sizes that cost time


def _with_more(rng: random.Random, drawn: DrawnLab) -> DrawnLab:
    """Return a drawn lab with several runs, or whose nodes are busy with each byte, or as it is."""
    if rng.random() < BUSY and not any(fault.kind in NEWCOMERS for fault in drawn.faults):
        return replace(drawn, byte_s=rng.choice([1e-7, 1e-6]))
    if (
        rng.random() >= SEVERAL
        or drawn.experiment.rounds * drawn.experiment.device_rounds > ROUNDS_MOST
    ):
        return drawn
    runs = rng.choice([2, 2, 3])
    faults = tuple(replace(fault, at_s=round(runs * fault.at_s, 3)) for fault in drawn.faults)
    return replace(drawn, runs=runs, expected_s=runs * drawn.expected_s, faults=faults)


# Absences


def _with_absences(rng: random.Random, drawn: DrawnLab) -> DrawnLab:
    """Return a drawn lab in which some devices are away for a while, one at least; all of them
    return for good.
    """
    experiment, expected_s = drawn.experiment, drawn.expected_s
    devices = experiment.tree.devices
    if rng.random() < TOGETHER:
        leave_s = rng.uniform(0.0, expected_s)
        away = {name: [0.0, leave_s, leave_s + _away_s(rng, experiment)] for name in devices}
    else:
        away = {
            name: _times(rng, experiment, expected_s) for name in devices if rng.random() < AWAY
        }
        away = away or {rng.choice(devices): _times(rng, experiment, expected_s)}
    changes = {name: [round(at_s, 3) for at_s in each] for name, each in away.items()}
    tree = experiment.model_dump(mode="json") | {"availability": {"trace": {"changes": changes}}}
    return replace(drawn, experiment=parse(tree))


def _times(rng: random.Random, experiment: Experiment, expected_s: float) -> list[float]:
    late = rng.random() < LATE
    lengths = [_away_s(rng, experiment) if late else 0.0]
    for _ in range(rng.choice([0, 1, 1, 2]) if late else rng.choice([1, 1, 1, 2, 3])):
        lengths += [rng.uniform(0.05, expected_s), _away_s(rng, experiment)]
    return list(accumulate(lengths))


def _away_s(rng: random.Random, experiment: Experiment) -> float:
    """Return the length of an absence: a moment, about a keep-alive, or up to twice `idle_s`;
    seconds.
    """
    keepalive_s, idle_s = experiment.transfer.keepalive_s, experiment.transfer.idle_s
    most_s = rng.choice([1.0, 8.0, 8.0, 2.0 * keepalive_s, 2.0 * idle_s])
    return rng.uniform(0.05, most_s)
