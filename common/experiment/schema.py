"""The experiment as typed data: the keys of a TOML file under `deploy/experiments/`.

Every key has its default here or in the file of its table, and nowhere else. An unknown key, a
value of the wrong type and a lab that cannot work are errors that name the key, the value and the
remedy (`InvalidExperiment`, exit code 4).

The comment above a key, or behind it, is its meaning in docs/experiment.md
(`docs.tools.experiment`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property, partial
from hashlib import blake2b
from itertools import pairwise
from typing import Annotated, Any, Final, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.across_tiers import (
    check_buffering,
    check_objective,
    check_personal,
    check_privacy,
    check_same_initial,
    refused_entering,
    refused_refiner,
    refused_secure,
)
from fedstrata.common.experiment.attackers import Attackers
from fedstrata.common.experiment.tiers import (
    NODES_MOST,
    Tier,
    TierTable,
    check_rounds,
    check_tiers,
    fewest_of,
    is_short,
    key_of,
    layers_of,
    rounds_of,
    sizes_of,
)
from fedstrata.common.methods.adversary import Adversaries
from fedstrata.common.model.codec_settings import check_codecs
from fedstrata.common.randomness import Purpose, generator
from fedstrata.common.settings.accountant import steps_in_epoch
from fedstrata.common.settings.cloud import CloudSettings
from fedstrata.common.settings.data import NUMBERS, Data, ModelSettings, check_data
from fedstrata.common.settings.devices import (
    Availability,
    HardwareSettings,
    Machine,
    Moves,
    OnlineTimes,
    check_availability,
    with_machines,
)
from fedstrata.common.settings.evaluation import EvaluationSettings, check_evaluation
from fedstrata.common.settings.links import (
    Links,
    LinkSettings,
    Profile,
    check_speed,
    check_trace,
    with_profiles,
)
from fedstrata.common.settings.own import is_own
from fedstrata.common.settings.stopping import Stop, check_stop
from fedstrata.common.settings.tables import (
    Count,
    Name,
    Positive,
    SettingsTable,
    check_table,
    proposal,
    with_tables,
)
from fedstrata.common.settings.topology import CLOUD, RESERVED, Tree
from fedstrata.common.settings.trainers import check_trainer, with_trainer
from fedstrata.common.settings.training import (
    Score,
    TrainingSettings,
    check_score,
    learning_rate,
    settings_in,
    with_loss_and_score,
)
from fedstrata.common.settings.training_checks import check_training


class TransferSettings(SettingsTable):
    """How models are transferred, and how long a node may make no progress."""

    # Models up to this size travel inside messages, on slow links only up to half a second's bytes.
    inline_bytes: Annotated[int, Field(ge=0, le=1_000_000)] = 262_144
    # Bytes of a chunk at most. A link with a declared rate gets chunks of half a second, 32 KB or
    # more.
    chunk_bytes: Annotated[int, Field(ge=32_768, le=1_900_000)] = 1_000_000
    # Chunks in flight from one sender; more, or fewer, where the link's delay or the keep-alive
    # requires it.
    window: Annotated[int, Field(ge=2, le=64)] = 8
    # uploads that a parent fetches at once; one link below 250 Mbit/s takes a part of a slot
    upload_slots: Count = 4
    # Seconds without progress (bytes, training steps) after which a node counts as failed. A
    # process of the cloud that ends no batch of an evaluation meanwhile is replaced.
    idle_s: Positive = 120.0
    # Megabytes of uploads in memory; those beyond it stay in the spool until they are mixed.
    resident_mb: Positive = 512.0
    keepalive_s: Annotated[int, Field(ge=5, le=65_535)] = 30  # MQTT's keep-alive in seconds


ROUNDS_MOST: Final = 10**12  # of a device in a run; their numbers fit into messages


class ExperimentSettings(SettingsTable):
    """The keys of both forms of an experiment."""

    name: Name = "experiment"  # it is part of the name of the run's folder
    # of the split, the first model, client selection, batches, mixing
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    rounds: Count = 10  # global rounds
    score: Score = Score()
    evaluation: EvaluationSettings = EvaluationSettings()
    stop: Stop = Stop()
    data: Data = Data()
    model: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    cloud: CloudSettings = CloudSettings()
    profiles: dict[Name, Profile] = Field(default_factory=dict)
    links: Links = Links()
    transfer: TransferSettings = TransferSettings()
    hardware: HardwareSettings = HardwareSettings()
    availability: Availability = Availability()
    adversaries: list[Adversaries] = Field(default_factory=list)

    @model_serializer(mode="wrap")
    def _without_adversaries(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if value or key != "adversaries"}

    @model_validator(mode="before")
    @classmethod
    def _with_profiles(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        return with_loss_and_score(with_machines(with_profiles(with_trainer(with_tables(tree)))))


class Experiment(ExperimentSettings):
    """All that defines a run. Equal experiments with equal seeds give equal models, bit for bit, on
    CPUs.
    """

    tiers: Annotated[list[Tier], Field(min_length=1)]

    @model_validator(mode="after")
    def _possible(self) -> Self:
        tiers = self.tiers
        control = self.cloud.epoch_control
        check_tiers(tiers)
        if self.rounds * self.device_rounds > ROUNDS_MOST:
            problem = "too many local rounds of each device"
            remedy = f"Use at most {ROUNDS_MOST:,} in all."
            raise InvalidExperiment("rounds", self.rounds, problem, remedy)
        split = self.data.partition
        if len(tiers) == 1 and split.startswith("institution_"):
            problem = "this lab has no institution"
            remedy = "Use a partition over the devices."
            raise InvalidExperiment("data.partition", split, problem, remedy)
        check_trainer(self.training.trainer, self.data, self.model)
        check_data(self.data, self.model)
        check_training(self.training, self.data)
        check_score(self.data.targets, self.training.loss, self.score)
        check_evaluation(self.evaluation, self.data, self.training, self.score)
        check_stop(self.stop, self.score)
        for tier, sizes in zip(tiers, self.sizes(), strict=True):
            key = self.key(tier)
            check_rounds(key, tier, sizes)
            tier.aggregation.check_devices(f"{key}.aggregation", self.training, self.model)
            if tier.entering or tier.move_after_s is not None:
                check_table(key, tier, refused_entering(tiers, tier, control))
            check_table(key, tier, refused_refiner(tier, self.data))
            if tier.secure is not None:
                fewest = fewest_of(tier, min(sizes))
                refused = refused_secure(tiers, tier, control, self.evaluation, fewest)
                check_table(key, tier, refused)
            for table, children in tier.aggregation.named_children.items():
                self._check_children(f"{key}.aggregation.{table}", tier, children)
        check_objective(tiers, self.training)
        check_privacy(tiers, self.training)
        check_buffering(tiers, self.evaluation, control)
        check_personal(tiers, self.model, self.training, self.evaluation)
        for child in self.links.of:
            self._check_node("links.of", child)
        for device in self.hardware.of:
            self._check_device("hardware.of", device)
        check_availability(self.availability, self._check_device)
        self._check_moves()
        self.attackers.check()
        self._check_links()
        for tier in tiers:
            check_codecs(self.key(tier, "transfer"), tier.transfer)
        check_same_initial(tiers, self.model)
        return self

    @property
    def is_short(self) -> bool:
        """Whether the file may have the short form (`short_form.py`): then errors have its keys."""
        return is_short(self.tiers)

    def key(self, tier: Tier, table: TierTable = "") -> str:
        """Return the key in the file of a tier's rounds, or of its link or transfer."""
        return key_of(self.tiers, tier, table)

    def link(self, child: str) -> LinkSettings:
        """Return the link between a node and its parent. Raises InvalidExperiment."""
        if not self.enters(child):
            self._check_node("topology", child)
        return self.links.of.get(child) or self.tier_above(child).link

    def onward_rates(self, parent: str) -> dict[str, float]:
        """Return the lowest rate, bytes per second, at which each child of a node forwards models.

        It forwards them in their chunks where its tier has the codec of the one above. Children
        without such a limit are left out.
        """
        found = {}
        children = self.tree.children
        for child in children[parent]:
            if child not in children:
                continue
            if self.tier_below(child).transfer.down != self.tier_above(child).transfer.down:
                continue
            rates = [self.link(name).down.rate for name in children[child]]
            limits = [rate for rate in rates if rate is not None]
            limits += self.onward_rates(child).values()
            if limits:
                found[child] = min(limits)
        return found

    def machine(self, device: str) -> Machine:
        """Return the machine that a device emulates. Raises InvalidExperiment."""
        if not self.enters(device):
            self._check_device("topology", device)
        return self.hardware.machine(device, seed=self.seed)

    def online(self, device: str) -> OnlineTimes | None:
        """Return when a device is available, None: always."""
        trace = self.availability.trace
        if trace is None:
            return None
        return trace.times(device)

    def moves(self, device: str) -> Moves:
        """Return a device's moves by its trace."""
        return Moves(self.availability.moves.get(device, ()))

    def with_data_root(self, root: str) -> Self:
        """Return the experiment with another folder of data sets."""
        return self.model_copy(update={"data": self.data.model_copy(update={"root": root})})

    @cached_property
    def tree(self) -> Tree:
        """The nodes of the lab. Raises InvalidExperiment if they are too many to have names."""
        count = sum(map(sum, self.sizes()))
        if count > NODES_MOST:
            key = "topology" if self.is_short else "tiers"
            problem = "too many nodes for a run; only a plan may have more"
            raise InvalidExperiment(key, count, problem, f"Use at most {NODES_MOST:,}.")
        return Tree(layers_of(self.tiers))

    def takes(self, device: str, parent: str) -> bool:
        """Return whether a device may take part below a parent: its own, or one that takes in."""
        tree = self.tree
        if parent not in tree.parents or device in RESERVED:
            return False
        takes_others = self.tiers[-1].entering > 0
        if device not in tree:
            return takes_others
        if tree.parent(device) == parent:
            return True
        return takes_others and tree.depth(device) == len(self.tiers)

    def enters(self, node: str) -> bool:
        """Return whether a node is a device that may take part, and is not named here."""
        return self.tiers[-1].entering > 0 and node not in self.tree

    def depth(self, node: str) -> int:
        """Return the number of links between a node and the cloud. Raises KeyError."""
        if self.enters(node):
            return len(self.tiers)
        return self.tree.depth(node)

    def tier_above(self, child: str) -> Tier:
        """Return the tier between a node and its parent. Raises KeyError."""
        return self.tiers[self.depth(child) - 1]

    def tier_below(self, parent: str) -> Tier:
        """Return the tier between a node and its children. Raises KeyError."""
        return self.tiers[self.tree.depth(parent)]

    def rounds_below(self, parent: str) -> int:
        """Return a device's local rounds in each round of a node above it. Raises KeyError."""
        return self.device_rounds // self.rounds_of(self.tree.depth(parent))

    def remembers(self, parent: str) -> bool:
        """Return whether a parent below the cloud has state between its tasks. Raises KeyError.

        Its rule or its selection may have some, and its codec has with feedback. So may a node
        below it: then it must know what that node's next task follows. Devices have some if the
        objective, the trainer, the model or the codec has.
        """
        above, *below = self.tiers[self.tree.depth(parent) - 1 :]
        if self.devices_remember or above.transfer.up.feedback:
            return True
        return any(tier.remembers or tier.transfer.up.feedback for tier in below)

    def steps_in_epoch(self, samples: int) -> int:
        """Return the steps of a device with so many samples in an epoch."""
        table = self.tiers[-1].privacy
        if table.on_samples and table.sampling_rate is not None:
            return steps_in_epoch(table.sampling_rate)
        return -(-samples // self.training.batch_size)

    def keeps_secret(self, node: str) -> bool:
        """Return whether a node draws noise from a secret of its own. Raises KeyError."""
        depth = self.depth(node)
        for below in self.tiers[depth : depth + 1]:
            if below.privacy.by_parent and below.privacy.secret:
                return True
        if not depth:
            return False
        above = self.tiers[depth - 1].privacy
        return above.secret and (above.by_child or above.on_samples)

    @property
    def devices_remember(self) -> bool:
        """Whether a device has state that persists between its tasks.

        Its objective or its trainer may have some. Personal arrays are some, and so is what its
        codec leaves out.
        """
        feedback = self.tiers[-1].transfer.up.feedback
        return self.training.remembers or bool(self.model.personal) or feedback

    def count_by_kind(self) -> dict[str, int]:
        """Return the number of nodes by what they are: `{"institutions": 3, "devices": 12}`."""
        kinds = (f"{tier.children}s" for tier in self.tiers)
        return dict(zip(kinds, map(sum, self.sizes()), strict=True))

    @property
    def tier_names(self) -> list[str]:
        """The names of the tiers from the cloud down."""
        return [tier.name for tier in self.tiers]

    def sizes(self) -> list[list[int]]:
        """Return the number of children of each parent, by tier: there may be millions."""
        return sizes_of(self.tiers)

    def rounds_of(self, depth: int) -> int:
        """Return how many rounds a parent at a depth, the cloud's is 0, runs in a global round."""
        return rounds_of(self.tiers, depth)

    @property
    def device_rounds(self) -> int:
        """The local rounds of a device in each global round: those of its parent."""
        return self.rounds_of(len(self.tiers) - 1)

    def learning_rate_in(self, local_round: int) -> float:
        """Return the devices' learning rate in one of their local rounds of the run, from 0."""
        global_round = local_round // self.device_rounds
        return learning_rate(self.training, global_round=global_round, global_rounds=self.rounds)

    def scores(self, node: str, *, global_round: int, local_round: int, last: bool) -> bool:
        """Return whether a device scores the model of a task, both rounds from 0.

        `last`: the task is to score the run's last model. The first model of a run has no row, and
        is not scored.
        """
        evaluation = self.evaluation
        if not evaluation.on_devices or local_round or not global_round:
            return False
        return self._scores_in(node, global_round, last=last)

    def scores_trained(self, node: str, *, global_round: int, local_round: int) -> bool:
        """Return whether a device scores the model that it trains with a task, both rounds from 0.

        That is a model of the next global round, in its last local round.
        """
        if not self.evaluation.personalised or local_round + 1 != self.device_rounds:
            return False
        return self._scores_in(node, global_round + 1, last=global_round + 1 == self.rounds)

    def _scores_in(self, node: str, global_round: int, *, last: bool) -> bool:
        """Return whether a device is drawn to score models of a global round, counted from 1."""
        evaluation = self.evaluation
        if not last and global_round % evaluation.every:
            return False
        devices = self.tree.devices
        count = evaluation.scoring(len(devices))
        if count == len(devices):
            return True
        if node not in devices:
            return False
        rng = generator(self.seed, Purpose.SCORING, CLOUD, global_round)
        return devices.index(node) in rng.permutation(len(devices))[:count]

    @cached_property
    def attackers(self) -> Attackers:
        """The adversaries, and their places."""
        learns_classes = self.training.trainer.learns_module and self.data.targets != NUMBERS
        tree = partial(getattr, self, "tree")
        return Attackers(
            self.adversaries, tree, self.tiers, seed=self.seed, learns_classes=learns_classes
        )

    @property
    def score_label(self) -> str:
        """The name for people of the score of a run's models."""
        if self.model.personal:
            return f"{self.score.label} with personal parts"
        return self.score.label

    @property
    def several_models(self) -> bool:
        """Whether devices begin a global round with one of several models."""
        first, *below = (tier.aggregation for tier in self.tiers)
        return first.several or any(rule.several and rule.remembers for rule in below)

    @property
    def compares_losses(self) -> str:
        """The rule or the selector that needs the training loss of each result, as text, or ""."""
        for table in ("aggregation", "selection"):
            for tier in self.tiers:
                settings = getattr(tier, table)
                if settings.compares_losses:
                    return f"{self.key(tier)}.{table}.name = {settings.name!r}"
        return ""

    def code_at(self, node: str) -> dict[str, str]:
        """Return the names of what runs at a node, by key; of codecs the user's own alone."""
        depth = self.depth(node)
        near = self.tiers[max(0, depth - 1) : depth + 1]  # a codec runs at both ends of its links
        up = {f"{self.key(tier, 'transfer')}.up.name": tier.transfer.up.name for tier in near}
        names = {key: name for key, name in up.items() if is_own(name)}
        names |= self.attackers.code_at(node)
        if depth < len(self.tiers):
            rounds = self.tiers[depth]
            key = self.key(rounds)
            rule = {f"{key}.aggregation.name": rounds.aggregation.name}
            names = rule | {f"{key}.selection.name": rounds.selection.name} | names
            if rounds.aggregation.reads_samples:
                names |= self._learned
            return names
        training = self.training
        last = self.tiers[-1]
        # its class knows the shapes of the vectors
        if last.aggregation.shaped and is_own(last.aggregation.name):
            names[f"{self.key(last)}.aggregation.name"] = last.aggregation.name
        if not training.trainer.learns_module:
            return dict(training.trainer.code) | names
        names["training.loss"] = training.loss
        names["training.objective.name"] = training.objective.name
        if self.evaluation.on_devices:
            names["score.name"] = self.score.name
            names |= {f"score.also[{place}]": name for place, name in enumerate(self.score.also)}
        if training.own_augmentation is not None:
            names["training.augmentation.name"] = training.augmentation.name
        return self._learned | names

    def settings_in(self, local_round: int) -> dict[str, float]:
        """Return a trainer's numbers of a local round, counted as in `learning_rate_in`."""
        global_round = local_round // self.device_rounds
        rate = self.learning_rate_in(local_round)
        return settings_in(self.training, global_round=global_round, rate=rate)

    @property
    def _learned(self) -> dict[str, str]:
        return {"model.name": self.model.name, "data.dataset": self.data.dataset}

    def to_json(self) -> str:
        """Return the effective experiment as canonical JSON, as the nodes receive it."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that identify the effective experiment."""
        return blake2b(self.to_json().encode(), digest_size=8).hexdigest()

    def _check_children(self, key: str, tier: Tier, names: Iterable[str]) -> None:
        """Check that nodes are children of this tier. Raises InvalidExperiment."""
        for name in names:
            self._check_node(key, name)
            if self.tier_above(name) is not tier:
                problem = f"no {tier.children}: the rule's children are those of tier {tier.name}"
                raise InvalidExperiment(f"{key}.{name}", name, problem, "Name one of them.")

    def _check_moves(self) -> None:
        """Check the parents to which devices move. Raises InvalidExperiment."""
        last = self.tiers[-1]
        for device, moves in self.availability.moves.items():
            key = f"availability.moves.{device}"
            self._check_device("availability.moves", device)
            if not last.entering:
                problem = "no parent takes in a device that moves"
                remedy = f"Set {self.key(last)}.entering."
                raise InvalidExperiment(key, moves[0].parent, problem, remedy)
            for move in moves:
                if move.parent not in self.tree.parents:
                    problem = "no parent of devices has this name"
                    remedy = proposal(move.parent, self.tree.parents, what="There are")
                    raise InvalidExperiment(key, move.parent, problem, remedy)
            if any(after.at_s <= before.at_s for before, after in pairwise(moves)):
                remedy = "Sort the moves by their seconds."
                raise InvalidExperiment(key, moves[0].at_s, "does not grow", remedy)

    def _check_links(self) -> None:
        enforce = self.links.enforce
        links = {self.key(tier, "link"): tier.link for tier in self.tiers}
        links |= {f"links.of.{name}": link for name, link in self.links.of.items()}
        for key, link in links.items():
            if link.trace is not None:
                check_trace(f"{key}.trace", link.trace)
                if enforce != "bucket":
                    problem = "only token buckets replay a trace"
                    remedy = f'Use links.enforce = "bucket", or remove {key}.trace.'
                    raise InvalidExperiment("links.enforce", enforce, problem, remedy)
            check_speed(key, link, idle_s=self.transfer.idle_s)

    def _check_node(self, key: str, name: str) -> None:
        if name not in self.tree or name == CLOUD:
            remedy = proposal(name, self.tree.nodes, what="There are")
            raise InvalidExperiment(key, name, "no institution or device has this name", remedy)

    def _check_device(self, key: str, name: str) -> None:
        devices = self.tree.layers[-1]
        if name not in self.tree or self.tree.depth(name) != len(self.tiers):
            remedy = proposal(name, devices, what="There are")
            raise InvalidExperiment(key, name, "no device has this name", remedy)
