"""The experiment as typed data: what a TOML file under `deploy/experiments/` may say.

Every key has its default here (of links, data, models, training, rules and hardware: in `links.py`, `data.py`,
`training.py`, `aggregation.py`, `hardware.py`) and nowhere else. An unknown key, a value of the wrong type and a lab
that cannot work are errors that name the key, the value and the remedy (`InvalidExperiment`, exit code 4).
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, Self, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError, model_validator

from common.errors import InvalidExperiment
from common.experiment import aggregation, codecs, hardware, links
from common.experiment.aggregation import RULES, Aggregation, FedAvg
from common.experiment.data import Data, Model
from common.experiment.data import check as check_data
from common.experiment.hardware import Hardware, Machine
from common.experiment.links import Link, Links, Profile
from common.experiment.tables import Count, Fraction, Name, Positive, proposal, write
from common.experiment.tables import Table as _Table
from common.experiment.training import Training
from common.experiment.training import check as check_training

CLOUD: Final = "cloud"
_FORMS: Final = frozenset({"int", "float", "constrained-int", "list[constrained-str]", "[key]"})  # pydantic's, not keys
RESERVED: Final = frozenset({CLOUD, "all"})  # `all` is the lane of every receiver


class Topology(_Table):
    """Who belongs to whom. A number makes names (`institution-0`, `device-0`); a list gives them."""

    institutions: Count | list[Name] = 1
    devices: Count | list[Name] = 1
    members: dict[Name, list[Name]] = Field(default_factory=dict)

    def institution_names(self) -> list[str]:
        """Return the institutions in order."""
        return _names("institution", self.institutions)

    def device_names(self) -> list[str]:
        """Return all devices in order; a device's place in this list is its data partition."""
        return _names("device", self.devices)

    def children(self) -> dict[str, list[str]]:
        """Return each institution's devices: as `members` says, else contiguous blocks, sizes within 1."""
        if self.members:
            return {name: list(self.members.get(name, [])) for name in self.institution_names()}
        devices = self.device_names()
        ends = self._ends()
        names = self.institution_names()
        return {name: devices[start:end] for name, start, end in zip(names, [0, *ends[:-1]], ends, strict=True)}

    def sizes(self) -> list[int]:
        """Return how many devices each institution has, without a name for each: there may be millions."""
        if self.members:
            return [len(devices) for devices in self.children().values()]
        return [end - start for start, end in pairwise([0, *self._ends()])]

    def _ends(self) -> list[int]:
        institutions, devices = _count(self.institutions), _count(self.devices)
        return [devices * (m + 1) // institutions for m in range(institutions)]


Share = Annotated[float, Field(le=1)]


class Closing(_Table):
    """When a round closes: on all results, or on `quorum` of them once `deadline_s` has passed."""

    rule: Literal["all", "quorum"] = "all"
    quorum: Count | None = None
    deadline_s: Positive | None = None


class EpochControl(_Table):
    """How many epochs devices train: always `training.epochs`, or as Tempo decides from that start.

    `plato` is the form of Tempo's public code; `shuffled` and `fixed_mean` are controls that spend the same epochs
    without regard to distances; `per_epoch` divides each distance by the epochs that led to it.
    """

    name: Literal["fixed", "tempo"] = "fixed"
    variant: Literal["paper", "plato"] = "paper"
    control: Literal["none", "shuffled", "fixed_mean"] = "none"
    per_epoch: bool = False


class Cloud(_Table):
    """The cloud's rounds: global iterations over the institutions drawn."""

    participation: Share = 1.0
    aggregation: Aggregation = FedAvg()
    closing: Closing = Closing()
    epoch_control: EpochControl = EpochControl()
    evaluate_every: Count = 1
    checkpoint_every: Count = 1


class Institution(_Table):
    """An institution's rounds: `rounds` (tau_i) per global iteration over the devices drawn."""

    rounds: Count = 1
    participation: Share = 1.0
    aggregation: Aggregation = FedAvg()
    closing: Closing = Closing()


class Codecs(_Table):
    """How a tier's models are written (`common/codecs.py`), `up` towards the cloud; fp32 is bit for bit."""

    up: str = "fp32"
    down: str = "fp32"


PLAIN: Final = Codecs()


class Transfer(_Table):
    """How models travel, what is accepted from the network, and when silence is failure."""

    inline_bytes: Annotated[int, Field(ge=0, le=1_000_000)] = 262_144
    chunk_bytes: Annotated[int, Field(ge=32_768, le=1_900_000)] = 1_000_000
    window: Annotated[int, Field(ge=2, le=64)] = 8
    upload_slots: Count = 4
    idle_s: Positive = 120.0
    resident_mb: Positive = 512.0  # uploads beyond it stay in the spool's file until they are read
    keepalive_s: Annotated[int, Field(ge=5, le=65_535)] = 30  # MQTT's; it has 16 bits
    wan: Codecs = Codecs()
    lan: Codecs = Codecs()


class Experiment(_Table):
    """All that defines a run; equal experiments with equal seeds give equal models, bit for bit, on CPU."""

    name: Name = "experiment"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    iterations: Count = 10
    target_accuracy: Fraction | None = None
    topology: Topology = Topology()
    data: Data = Data()
    model: Model = Model()
    training: Training = Training()
    cloud: Cloud = Cloud()
    institution: Institution = Institution()
    profiles: dict[Name, Profile] = Field(default_factory=dict)
    links: Links = Links()
    transfer: Transfer = Transfer()
    hardware: Hardware = Hardware()

    @model_validator(mode="before")
    @classmethod
    def _with_profiles(cls, tree: Any) -> Any:
        return hardware.resolve(links.resolve(tree)) if isinstance(tree, dict) else tree

    @model_validator(mode="after")
    def _possible(self) -> Self:
        _check_topology(self.topology)
        check_data(self.data, self.model)
        check_training(self.training, self.data)
        sizes = self.topology.sizes()
        for key, share in (("cloud", self.cloud.participation), ("institution", self.institution.participation)):
            if share <= 0:
                remedy = "Give a fraction above 0 and at most 1."
                raise InvalidExperiment(f"{key}.participation", share, "nobody would ever take part", remedy)
        institutions = participants(len(sizes), self.cloud.participation)
        _check_closing("cloud.closing", self.cloud.closing, institutions)
        drawn = [participants(size, self.institution.participation) for size in sizes]
        _check_closing("institution.closing", self.institution.closing, min(drawn))
        aggregation.check("cloud.aggregation", self.cloud.aggregation, institutions)
        aggregation.check("institution.aggregation", self.institution.aggregation, max(drawn))
        for child in self.links.of:
            _check_child("links.of", child, self.topology)
        for device in self.hardware.of:
            _check_device("hardware.of", device, self.topology)
        for key, way in (("transfer.wan", self.transfer.wan), ("transfer.lan", self.transfer.lan)):
            codecs.check_name(f"{key}.up", way.up, codecs.UP)
            codecs.check_name(f"{key}.down", way.down, codecs.DOWN)
        return self

    def link(self, child: str) -> Link:
        """Return the link between an institution or a device and its parent. Raises InvalidExperiment."""
        _check_child("topology", child, self.topology)
        tier = self.links.wan if child in self.topology.institution_names() else self.links.lan
        return self.links.of.get(child, tier)

    def machine(self, device: str) -> Machine:
        """Return the machine that a device plays. Raises InvalidExperiment."""
        _check_device("topology", device, self.topology)
        return self.hardware.machine(device, seed=self.seed)

    def to_json(self) -> str:
        """Return the effective experiment as canonical JSON, the form that travels to the nodes."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that name the effective experiment."""
        return blake2b(self.to_json().encode(), digest_size=8).hexdigest()


def participants(children: int, fraction: float) -> int:
    """Return K = max(1, floor(fraction * children + 1e-9)), the children that take part in a round."""
    return max(1, int(fraction * children + 1e-9))


def load(path: Path, overrides: Iterable[str] = ()) -> Experiment:
    """Read a TOML file and apply `key=value` overrides. Raises InvalidExperiment."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidExperiment("experiment", str(path), error.strerror or str(error), "Name a TOML file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidExperiment("experiment", str(path), f"not TOML: {error}", "Mend that line.") from None
    for override in overrides:
        _override(tree, override)
    return parse(tree)


def parse(tree: Mapping[str, Any] | str | bytes) -> Experiment:
    """Check a tree, or its JSON text, and return the experiment. Raises InvalidExperiment."""
    try:
        if isinstance(tree, (str, bytes)):
            return Experiment.model_validate_json(tree)
        return Experiment.model_validate(tree)
    except ValidationError as error:
        raise _explain(error) from None


def to_toml(experiment: Experiment) -> str:
    """Return the experiment as TOML, every key that counts written out."""
    return write(experiment.model_dump(mode="json", exclude_none=True))


def _count(given: int | list[str]) -> int:
    return given if isinstance(given, int) else len(given)


def _names(kind: str, given: int | list[str]) -> list[str]:
    return [f"{kind}-{i}" for i in range(given)] if isinstance(given, int) else list(given)


def _check_topology(topology: Topology) -> None:
    if isinstance(topology.institutions, list) or isinstance(topology.devices, list) or topology.members:
        _check_names(topology)
    for institution, size in enumerate(topology.sizes()):
        if size == 0:
            raise InvalidExperiment(
                "topology.devices",
                _count(topology.devices),
                f"{topology.institution_names()[institution]} would have no device",
                "Have at least one device in every institution.",
            )


def _check_names(topology: Topology) -> None:
    institutions, devices = topology.institution_names(), topology.device_names()
    if not institutions:
        raise InvalidExperiment("topology.institutions", [], "no institution", "Have at least one institution.")
    for key, names in (("topology.institutions", institutions), ("topology.devices", devices)):
        if len(set(names)) < len(names):
            double = next(name for name, times in Counter(names).items() if times > 1)
            raise InvalidExperiment(key, double, "the name stands twice", "Give every node a name of its own.")
    both = set(institutions) & set(devices)
    for name in [*institutions, *devices]:
        if name in RESERVED or name in both:
            problem = "the name is reserved" if name in RESERVED else "two roles share this name"
            raise InvalidExperiment("topology", name, problem, "Give every node a name of its own.")
    children = topology.children()
    for stranger in (name for name in topology.members if name not in children):
        raise InvalidExperiment(
            f"topology.members.{stranger}",
            topology.members[stranger],
            "no institution has this name",
            f"Use one of topology.institutions: {', '.join(institutions)}.",
        )
    homes = Counter(device for members in children.values() for device in members)
    for device in devices:
        if homes[device] != 1:
            problem = "is in no institution" if device not in homes else "is in more than one institution"
            raise InvalidExperiment("topology.members", device, problem, "List each device in exactly one.")
    for device in homes.keys() - set(devices):
        raise InvalidExperiment("topology.members", device, "is no device of topology.devices", "Add it there.")


def _check_child(key: str, child: str, topology: Topology) -> None:
    names = [*topology.institution_names(), *topology.device_names()]
    if child not in names:
        remedy = proposal(child, names, what="There are")
        raise InvalidExperiment(key, child, "no institution or device has this name", remedy)


def _check_device(key: str, device: str, topology: Topology) -> None:
    names = topology.device_names()
    if device not in names:
        raise InvalidExperiment(key, device, "no device has this name", proposal(device, names, what="There are"))


def _check_closing(key: str, closing: Closing, children: int) -> None:
    if closing.rule == "all":
        return
    if closing.quorum is None or closing.deadline_s is None:
        missing = "quorum" if closing.quorum is None else "deadline_s"
        raise InvalidExperiment(f"{key}.{missing}", None, "rule 'quorum' needs it", f"Set {key}.{missing}.")
    if closing.quorum > children:
        raise InvalidExperiment(
            f"{key}.quorum",
            closing.quorum,
            f"above the number of children that take part ({children})",
            f"Give at most {children}.",
        )


def _override(tree: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InvalidExperiment("--set", text, "not of the form key=value", "Write for instance seed=3.")
    *parents, last = key.strip().split(".")
    for depth, parent in enumerate(parents):
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise InvalidExperiment("--set", text, f"{'.'.join(parents[: depth + 1])} is no table", "Check the key.")
    try:
        read = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        read = {}
    # A bare word is a string, as in a shell; so is what would smuggle in further lines.
    tree[last] = read["value"] if read.keys() == {"value"} else value.strip()


def _explain(error: ValidationError) -> InvalidExperiment:
    errors = [(_path(details["loc"]), details) for details in error.errors(include_url=False)]
    top = errors[0][0]
    # Where a key takes either of two forms, the form that was meant is the one whose error lies deepest.
    path, first = max((e for e in errors if e[0][: len(top)] == top), key=lambda e: len(e[0]))
    key = ".".join(path) or "experiment"
    if first["type"] == "extra_forbidden":
        return _unknown(key, first["loc"], first["input"])
    if first["type"] == "union_tag_invalid":
        name = first["ctx"]["tag"]
        return InvalidExperiment(f"{key}.name", name, "no rule has this name", proposal(name, RULES, what="There are"))
    if first["type"] == "json_invalid":
        return InvalidExperiment("experiment", "...", first["msg"], "Start all roles from one release.")
    return InvalidExperiment(key, first["input"], first["msg"], "Correct the value.")


def _unknown(key: str, loc: tuple[int | str, ...], value: object) -> InvalidExperiment:
    *parents, last = map(str, loc)
    rule = parents[-1] if parents[1:2] == ["aggregation"] else ""
    owners = [name for name, table in RULES.items() if rule and last in table.model_fields]
    if owners:
        remedy = f"It belongs to {' and '.join(owners)}; this is {rule}."
    else:
        remedy = proposal(last, _known_keys(parents), what="Known keys")
    return InvalidExperiment(key, value, "unknown key", remedy)


def _path(loc: tuple[int | str, ...]) -> list[str]:
    """Return the key in the file: without pydantic's forms, and without the rule's name below an aggregation."""
    return [str(part) for i, part in enumerate(loc) if part not in _FORMS and (i != 2 or loc[1] != "aggregation")]


def _known_keys(path: list[str]) -> list[str]:
    table: Any = Experiment
    for part in path:
        if part not in _FORMS:
            table = _below(table, part)
        if get_origin(table) not in (dict, UnionType) and not (
            isinstance(table, type) and issubclass(table, BaseModel)
        ):
            return []
    return list(table.model_fields)


def _below(table: Any, part: str) -> Any:
    if get_origin(table) is dict:
        return get_args(table)[1]
    if get_origin(table) is UnionType:
        return RULES[part]
    return table.model_fields[part].annotation if part in table.model_fields else None
