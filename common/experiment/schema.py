"""The experiment as typed data: the keys of a TOML file under `deploy/experiments/`.

Every key has its default here or in the file of its table, and nowhere else. An unknown key, a value of the wrong type
and a lab that cannot work are errors that name the key, the value and the remedy (`InvalidExperiment`, exit code 4).

The comment above a key, or behind it, is its meaning in docs/experiment.md (`docs.tools.experiment`).
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from common.errors import InvalidExperiment
from common.experiment import aggregation, codecs, hardware, links
from common.experiment.codecs import Codecs
from common.experiment.data import Data, Model
from common.experiment.data import check as check_data
from common.experiment.hardware import HardwareSettings, Machine
from common.experiment.links import Links, LinkSettings, Profile
from common.experiment.rounds import Cloud, Institution, check_closing, participants
from common.experiment.tables import Count, Fraction, Name, Positive, SettingsTable
from common.experiment.topology import Topology, check_child, check_device, check_topology
from common.experiment.training import TrainingSettings
from common.experiment.training import check as check_training


class TransferSettings(SettingsTable):
    """How models are transferred, and how long a node may make no progress."""

    # Models up to this size travel inside messages, on slow links only up to half a second's bytes.
    inline_bytes: Annotated[int, Field(ge=0, le=1_000_000)] = 262_144
    # Bytes of a chunk at most. A link with a declared rate gets chunks of half a second, 32 KB or more.
    chunk_bytes: Annotated[int, Field(ge=32_768, le=1_900_000)] = 1_000_000
    # Chunks in flight from one sender; more, or fewer, where the link's delay or the keep-alive requires it.
    window: Annotated[int, Field(ge=2, le=64)] = 8
    upload_slots: Count = 4  # uploads that a parent fetches at once; one link below 250 Mbit/s takes a part of a slot
    idle_s: Positive = 120.0  # seconds without progress (bytes, training steps) after which a node counts as failed
    # Megabytes of uploads in memory; those beyond it stay in the spool until they are mixed.
    resident_mb: Positive = 512.0
    keepalive_s: Annotated[int, Field(ge=5, le=65_535)] = 30  # MQTT's keep-alive in seconds
    wan: Codecs = Codecs()
    lan: Codecs = Codecs()


class Experiment(SettingsTable):
    """All that defines a run. Equal experiments with equal seeds give equal models, bit for bit, on CPUs."""

    name: Name = "experiment"  # it is part of the name of the run's folder
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1  # of the split, the first model, client selection, batches, mixing
    rounds: Count = 10  # global rounds
    target_accuracy: Fraction | None = None  # the run ends once the test accuracy has reached it
    topology: Topology = Topology()
    data: Data = Data()
    model: Model = Model()
    training: TrainingSettings = TrainingSettings()
    cloud: Cloud = Cloud()
    institution: Institution = Institution()
    profiles: dict[Name, Profile] = Field(default_factory=dict)
    links: Links = Links()
    transfer: TransferSettings = TransferSettings()
    hardware: HardwareSettings = HardwareSettings()

    @model_validator(mode="before")
    @classmethod
    def _with_profiles(cls, tree: Any) -> Any:
        return hardware.resolve(links.resolve(tree)) if isinstance(tree, dict) else tree

    @model_validator(mode="after")
    def _possible(self) -> Self:
        check_topology(self.topology)
        check_data(self.data, self.model)
        check_training(self.training, self.data)
        sizes = self.topology.sizes()
        for key, share in (("cloud", self.cloud.participation), ("institution", self.institution.participation)):
            if share <= 0:
                remedy = "Give a fraction above 0 and at most 1."
                raise InvalidExperiment(f"{key}.participation", share, "selects no clients", remedy)
        institutions = participants(len(sizes), self.cloud.participation)
        check_closing("cloud.closing", self.cloud.closing, institutions)
        selected = [participants(size, self.institution.participation) for size in sizes]
        check_closing("institution.closing", self.institution.closing, min(selected))
        aggregation.check("cloud.aggregation", self.cloud.aggregation, institutions)
        aggregation.check("institution.aggregation", self.institution.aggregation, max(selected))
        for child in self.links.of:
            check_child("links.of", child, self.topology)
        for device in self.hardware.of:
            check_device("hardware.of", device, self.topology)
        for key, tier in (("transfer.wan", self.transfer.wan), ("transfer.lan", self.transfer.lan)):
            codecs.check_name(f"{key}.up", tier.up, codecs.UP)
            codecs.check_name(f"{key}.down", tier.down, codecs.DOWN)
        return self

    def link(self, child: str) -> LinkSettings:
        """Return the link between an institution or a device and its parent. Raises InvalidExperiment."""
        check_child("topology", child, self.topology)
        tier = self.links.wan if child in self.topology.institution_names() else self.links.lan
        return self.links.of.get(child, tier)

    def machine(self, device: str) -> Machine:
        """Return the machine that a device emulates. Raises InvalidExperiment."""
        check_device("topology", device, self.topology)
        return self.hardware.machine(device, seed=self.seed)

    def to_json(self) -> str:
        """Return the effective experiment as canonical JSON, the form in which the nodes receive it."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that identify the effective experiment."""
        return blake2b(self.to_json().encode(), digest_size=8).hexdigest()
