"""What a node may send at most: bytes of a message, before it is read, and numbers in a task or a
result.

A message is as large as what it may hold: short texts, an entry for each node below its sender,
digests of a model's chunks, a model inside it, JSON of the experiment. Both ends know the
experiment, so a message beyond these limits is no mistake of a link. Of a sender of whom nothing is
known, the limits are what no lab exceeds.

The limit of a parent is at least the sum of those below it: what passes at one node must not be
refused at the next one, with the work of its siblings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import RefusedModel, WireError
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.experiment.tiers import TIERS_MOST
from fedstrata.common.model.layout import ROW_BYTES_MOST
from fedstrata.common.protocol import messages, topics
from fedstrata.common.protocol.messages import (
    DIGEST_BYTES,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Key,
    Message,
    Result,
    RoundTurn,
    Task,
)
from fedstrata.common.settings.data import samples_most
from fedstrata.common.settings.devices import OnlineTimes
from fedstrata.common.settings.links import LinkSettings
from fedstrata.common.settings.training import SCORES_MOST
from fedstrata.common.text import JSON_MOST
from fedstrata.common.training.scores import (
    CLASSES_MOST,
    COUNT_BYTES,
    R2,
    ScoredModels,
    ScoreSums,
    bytes_most,
)

# of a message without lists, digests, models and JSON: a few short texts, counts
SMALL_BYTES: Final = 8192
TARGET_BYTES: Final = 400
REPORT_BYTES: Final = 704
TRAFFIC_BYTES: Final = 256
FINDINGS_BYTES: Final = 131_072
# short names and texts of the children that a status names, numbers of the rounds
STATUS_BYTES: Final = 131_072
NODES_MOST: Final = 50_000
NOISE_MOST: Final = 1 << 26  # bytes that calibrate a link
NOISE_CHUNKS_MOST: Final = 4096
INLINE_MOST: Final = 1_000_000  # `transfer.inline_bytes` at most
MESSAGE_MOST: Final = 16_000_000  # in any lab
COUNT_MOST: Final = 10**12
EPOCHS_GROW: Final = 2  # times `training.epochs`, of Tempo
PLATO_GROW: Final = 2  # times the number of children, of Tempo's public code
SECONDS_MOST: Final = 1e9  # of one local round
FLOAT_MOST: Final = 1e300  # JSON has integers that no float holds
LOSS_MOST: Final = 1e39  # a float32's is below
CLASS_BYTES: Final = 2 * COUNT_BYTES  # of a class in a report
MODELS: Final = 2  # that a report has scores of


class SenderBounds:
    """What the messages of one sender may hold, and so the most bytes of each."""

    def __init__(
        self,
        *,
        nodes: int = NODES_MOST,  # entries of its lists, one for each node below it
        blob_bytes: int = ROW_BYTES_MOST,  # of a model
        inline_bytes: int = INLINE_MOST,  # of a model inside a message
        frozen_bytes: int = ROW_BYTES_MOST,  # of a file of frozen arrays
        plans: bool = True,  # it aggregates, and reports its decisions
        announces: bool = True,  # it is a parent
        # of the sums of scores, and the counts of classes, in each of its reports
        score_bytes: int = 0,
    ) -> None:
        self.nodes = nodes
        chunks = _chunks(blob_bytes)
        announcement = SMALL_BYTES + announces * 2 * JSON_MOST
        presence = SMALL_BYTES + nodes * TARGET_BYTES
        model = SMALL_BYTES + chunks * DIGEST_BYTES + inline_bytes
        noise = SMALL_BYTES + NOISE_CHUNKS_MOST * DIGEST_BYTES
        tiers = SMALL_BYTES + min(nodes, TIERS_MOST) * TRAFFIC_BYTES
        reports = nodes * (REPORT_BYTES + score_bytes)
        found: dict[type[Message], int] = {
            messages.Presence: presence,
            messages.Announcement: announcement,
            Task: model,
            messages.Progress: tiers,
            Result: model + score_bytes + tiers + reports + plans * JSON_MOST,
            messages.Ask: SMALL_BYTES + chunks // 8,
            messages.Reports: SMALL_BYTES + reports,
            messages.Farewell: tiers,
            messages.FrozenOffered: SMALL_BYTES + _chunks(frozen_bytes) * DIGEST_BYTES,
            messages.Probe: noise,
            messages.Probed: noise,
            messages.Alive: presence + announces * announcement,
            messages.Here: SMALL_BYTES + FINDINGS_BYTES,
            messages.Status: STATUS_BYTES,
        }
        self._bytes = {kind: min(most, MESSAGE_MOST) for kind, most in found.items()}
        self.most_of_all = max(self._bytes.values())

    def most(self, kind: type[Message]) -> int:
        """Return the most bytes of a message of this kind."""
        return self._bytes.get(kind, SMALL_BYTES)


def _chunks(blob_bytes: int) -> int:
    """Return the most chunks of a blob."""
    return -(-blob_bytes // MIN_CHUNK_BYTES)


ANYBODY: Final = SenderBounds(  # of any lab
    score_bytes=MODELS * (bytes_most([R2] * SCORES_MOST) + CLASSES_MOST * CLASS_BYTES)
)
STRANGER: Final = SenderBounds(
    nodes=0, blob_bytes=0, inline_bytes=0, frozen_bytes=0, plans=False, announces=False
)


@dataclass(frozen=True, slots=True)
class Skipped:
    """The place of a payload that is not stored: it is dropped as it arrives."""

    view: None = None


SKIPPED: Final = Skipped()


_ASIDE: Final[Mapping[type[topics.Topic], type[Message]]] = {
    topics.AskTopic: messages.Question,
    topics.AnswerTopic: messages.Here,
    topics.StatusTopic: messages.Status,
}


def bytes_on(topic: topics.Topic, sender: SenderBounds = ANYBODY) -> int:
    """Return the most bytes of a message on a topic, from a sender with these bounds."""
    if isinstance(topic, topics.ChunkTopic):
        return MAX_CHUNK_BYTES
    if isinstance(topic, topics.InboxTopic):
        return sender.most_of_all
    if isinstance(topic, topics.StateTopic):
        return sender.most(messages.Presence)
    if isinstance(topic, topics.SpecTopic):
        return sender.most(messages.Announcement)
    return sender.most(_ASIDE[type(topic)])


def skip_large(topic_text: str, size: int) -> Skipped | None:
    """Return SKIPPED for a payload that is larger than any lab has on its topic, for connections
    without models.
    """
    if size <= SMALL_BYTES:
        return None
    try:
        most = bytes_on(topics.parse(topic_text))
    except WireError:
        most = MESSAGE_MOST
    if size > most:
        return SKIPPED
    return None


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Limits of one child's presence and results."""

    samples: int = COUNT_MOST  # of its training data
    rounds: int = 1  # local rounds of a device below it for each of its tasks
    below: Mapping[str, int] = field(default_factory=dict)  # the most samples of each node below it
    # How many devices besides those may enter below these parents, each with so many samples.
    guests: int = 0
    guest_parents: Collection[str] = ()
    guest_samples: int = 0
    # the nodes below it, and itself, that have children, or whose trainer may report numbers
    aggregators: Collection[str] = ()
    # when a device is present by its trace; at other times nothing is expected of it
    online: OnlineTimes | None = None
    scores: Sequence[str] = ()  # names of the scores in a report, none if devices do not score
    class_bytes: int = 0  # of the counts of classes in a report
    loss: bool = False  # whether its results have a training loss
    start_loss: bool = False  # and that of the model received

    def most_samples(self, report: ChildReport) -> int | None:
        """Return the most samples of a node on which the child reports; None if it cannot be below
        the child.
        """
        if not report.parent:
            return self.below.get(report.name)
        if report.parent in self.guest_parents and topics.is_node(report.name):
            return self.guest_samples
        return None

    @property
    def score_bytes(self) -> int:
        """The most bytes of the scores in a report."""
        return MODELS * (bytes_most(self.scores) + self.class_bytes)

    def steps(self, epochs: int) -> int:
        """Return the most SGD steps of a task: batches have at least one sample."""
        return min(COUNT_MOST, self.rounds * epochs * self.samples)


ANY: Final = ChildLimits()  # of a node below which there is nobody, with any data


def bounds_of_children(
    limits: Mapping[str, ChildLimits], *, blob_bytes: int, inline_bytes: int
) -> tuple[dict[str, SenderBounds], int]:
    """Return the bounds of each child's messages, with models of so many bytes, and how many nodes
    the children and those below them are.
    """
    bounds = {}
    everybody = 0
    for name, limit in limits.items():
        nodes = len(limit.below) + limit.guests
        everybody += nodes + 1
        bounds[name] = SenderBounds(
            nodes=nodes,
            blob_bytes=blob_bytes,
            inline_bytes=inline_bytes,
            frozen_bytes=0,
            plans=bool(limit.aggregators),
            announces=False,
            score_bytes=limit.score_bytes,
        )
    return bounds, everybody


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """Limits of a parent's tasks."""

    global_rounds: int
    local_rounds: int  # in each global round
    epochs: int
    below_parent: int = 0  # nodes below the parent
    below_node: int = 0  # nodes below the node that gets the tasks
    scored: bool = False  # devices score the run's last model, in a task without epochs

    def check(self, task: Task) -> None:
        """Check a task's numbers. Raises RefusedModel."""
        key = task.key
        if key.turn != RoundTurn.MODEL:
            if key.turn > RoundTurn.UNMASK or task.epochs or task.follows:
                raise RefusedModel(f"turn {key.turn} of a secure sum with {task.epochs} epochs")
            self._check_round(key)
            return
        if not task.epochs and self.scored:
            if key.global_round > self.global_rounds or key.local_round:
                raise RefusedModel(
                    f"round {key.global_round}.{key.local_round} to score, this run has none"
                )
            return
        self._check_round(key)
        number = key.global_round * self.local_rounds + key.local_round
        if task.follows > number:
            raise RefusedModel(f"follows task {task.follows}, only {number} can precede it")
        if not 1 <= task.epochs <= self.epochs:
            raise RefusedModel(f"{task.epochs} epochs, this run has 1 to {self.epochs}")

    def _check_round(self, key: Key) -> None:
        if key.global_round >= self.global_rounds or key.local_round >= self.local_rounds:
            least = f"{self.global_rounds} global rounds of {self.local_rounds}"
            raise RefusedModel(f"round {key.global_round}.{key.local_round}, this run has {least}")


def limits_below(experiment: Experiment, parent: str) -> dict[str, ChildLimits]:
    """Return the limits of each child of a node."""
    tree = experiment.tree
    tier = experiment.tier_below(parent)
    each = samples_most(experiment.data, devices=len(tree.devices))
    rounds = experiment.device_rounds // experiment.rounds_of(tree.depth(parent))
    numbers = not experiment.training.trainer.learns_module
    scores = experiment.score.names if experiment.evaluation.on_devices else ()
    class_bytes = CLASSES_MOST * CLASS_BYTES if experiment.evaluation.per_class else 0

    def samples(name: str) -> int:
        devices = sum(below not in tree.children for below in (name, *tree.below(name)))
        return each * (devices + guests_below(experiment, name))

    found = {}
    for child, names in tree.below_each(parent).items():
        everybody = frozenset((child, *names))
        guests = guests_below(experiment, child)
        guest_parents = everybody.intersection(tree.parents) if guests else ()
        aggregators = everybody if numbers else everybody.intersection(tree.children)
        found[child] = ChildLimits(
            samples=samples(child),
            rounds=rounds,
            below={name: samples(name) for name in names},
            guests=guests,
            guest_parents=guest_parents,
            guest_samples=each,
            aggregators=aggregators,
            online=experiment.online(child),
            scores=scores,
            class_bytes=class_bytes,
            loss=tier.compares_losses,
            start_loss=tier.aggregation.reads_losses,
        )
    return found


@dataclass(frozen=True, slots=True)
class Entering:
    """Who may become a parent's child besides those that the experiment names there."""

    most: int  # children in all
    parents: Collection[str]  # to which devices may move
    # of a node, by its name: whether it may enter, the link to it, and what it may report
    admits: Callable[[str], bool]
    link: Callable[[str], LinkSettings]
    limits: Callable[[str], ChildLimits]


def entering_below(experiment: Experiment, parent: str) -> Entering | None:
    """Return who may become a node's child besides those that the experiment names, None if nobody
    may.
    """
    tier = experiment.tier_below(parent)
    children = experiment.tree.children[parent]
    if not tier.entering:
        return None
    usual = limits_below(experiment, parent)[children[0]]
    numbers = not experiment.training.trainer.learns_module

    def limits(name: str) -> ChildLimits:
        aggregators = (name,) if numbers else ()
        return replace(usual, online=experiment.online(name), aggregators=aggregators)

    admits = partial(experiment.takes, parent=parent)
    most = len(children) + tier.entering
    return Entering(most, experiment.tree.parents, admits, experiment.link, limits)


def guests_below(experiment: Experiment, node: str) -> int:
    """Return how many devices may enter below a node, which the experiment does not name there."""
    tree = experiment.tree
    entering = experiment.tiers[-1].entering
    return entering and entering * sum(name in tree.parents for name in (node, *tree.below(node)))


def task_limits(experiment: Experiment, node: str, parent: str) -> TaskLimits:
    """Return the limits of the tasks that a node gets from this parent."""
    tree = experiment.tree
    epochs = experiment.training.epochs
    if experiment.cloud.epoch_control.name == "tempo":
        epochs *= EPOCHS_GROW
        epochs = max(epochs, PLATO_GROW * len(tree.children[tree.layers[0][0]]))
    return TaskLimits(
        experiment.rounds,
        experiment.rounds_of(tree.depth(parent)),
        epochs,
        below_parent=tree.count_below(parent) + guests_below(experiment, parent),
        below_node=tree.count_below(node) + guests_below(experiment, node),
        scored=experiment.evaluation.on_devices,
    )


def check_report(result: Result, *, limits: ChildLimits = ANY, epochs: int = COUNT_MOST) -> None:
    """Check a result against the limits of its child and the epochs of its task. Raises
    RefusedModel.
    """
    work = result.work
    if work.samples < 1:
        raise RefusedModel("it reports no samples")
    _check_work(
        "it", result.work_of(""), samples=limits.samples, epochs=epochs, rounds=1, limits=limits
    )
    if result.path_steps > limits.steps(epochs):
        raise RefusedModel(f"it reports {result.path_steps} steps of SGD in a row")
    if limits.loss and work.epochs and work.loss is None:
        raise RefusedModel("it has no training loss")
    if limits.start_loss and work.epochs:
        if result.start_loss is None:
            raise RefusedModel("it has no loss of the model that it received")
        if not abs(result.start_loss) <= LOSS_MOST:
            raise RefusedModel(f"its loss of the model that it received is {result.start_loss}")
    if len(result.children) > len(limits.below) + limits.guests:
        raise RefusedModel(f"it reports on {len(result.children)} nodes, more than can be below it")
    guests = set()
    rounds = limits.rounds
    for report in result.children:
        most = limits.most_samples(report)
        if most is None:
            raise RefusedModel(f"it reports on {report.name[:64]!r}, which is not below it")
        who = f"{report.name!r}"
        _check_work(who, report, samples=most, epochs=epochs * rounds, rounds=rounds, limits=limits)
        if limits.guests and report.parent:
            guests.add(report.name)
    for name, found in plans_of(result).items():
        if not (name in guests or name in limits.aggregators) or len(found) > rounds:
            raise RefusedModel(f"it reports {len(found)} decisions of {name[:64]!r}")


def _check_work(
    who: str, report: ChildReport, *, samples: int, epochs: int, rounds: int, limits: ChildLimits
) -> None:
    work = report.work
    for what, count, most in (
        ("samples", work.samples, samples),
        ("rounds", report.rounds, rounds),
        ("epochs", work.epochs, epochs),
        ("steps of SGD", work.steps, min(COUNT_MOST, epochs * limits.rounds * samples)),
    ):
        if count > most:
            raise RefusedModel(f"{who} reports {count} {what}, at most {most} are possible")
    seconds = (work.train_s, work.wait_s, work.pause_s)
    if not all(0 <= value <= SECONDS_MOST * limits.rounds for value in seconds):
        raise RefusedModel(
            "{} reports {} s of training, {} s of waiting and a pause of {} s".format(who, *seconds)
        )
    if not abs(work.loss or 0.0) <= LOSS_MOST:
        whose = "its training loss is" if who == "it" else f"{who} has a loss of"
        raise RefusedModel(f"{whose} {work.loss}")


def possible_scores(
    results: Mapping[str, Result], limits: Mapping[str, ChildLimits], *, tests: Mapping[str, int]
) -> tuple[dict[str, Result], dict[str, str]]:
    """Return results without the scores that cannot be, and the nodes that reported these, each
    with the reason.

    `tests`: the test samples of each child, by its presence, 0 if they are not known; those of the
    devices below a child, all together, are no more. A score is a number beside a model, and costs
    no model.
    """
    found: dict[str, Result] = {}
    wrong: dict[str, str] = {}
    for child, result in results.items():
        most = tests.get(child, 0) or COUNT_MOST
        work, why = _possible_scores(result.work, limits[child], most=most)
        if why:
            wrong[child] = why
        reports = []
        count = 0
        for report in result.children:
            below, why = _possible_scores(report.work, limits[child], most=most)
            reports.append(report)
            if why:
                wrong[report.name] = why
                reports[-1] = replace(report, work=below)
            if not report.parent:
                count += _most_samples(below.tests)
        if count > most:
            wrong[child] = f"the nodes below it report {count} test samples, it has {most}"
            for place, report in enumerate(reports):
                if not report.parent:
                    reports[place] = replace(report, work=replace(report.work, tests=None))
        found[child] = replace(result, work=work, children=tuple(reports))
    return found, wrong


def tests_below(experiment: Experiment, tests: Mapping[str, int]) -> int:
    """Return the test samples of all children, by those of each; 0 if one of them does not know its
    own.
    """
    unknown = not experiment.training.trainer.learns_module and not all(tests.values())
    if unknown:
        return 0
    return sum(tests.values())


def _most_samples(tests: ScoredModels | None) -> int:
    """Return the number of a device's test samples."""
    if tests is not None:
        return max((sums.samples for sums in tests.each), default=0)
    return 0


def _possible_scores(work: Work, limits: ChildLimits, *, most: int) -> tuple[Work, str]:
    """Return a node's work without scores that cannot be, and why one cannot, "" if all can."""
    if work.tests is None:
        return work, ""
    tests = work.tests
    reason = ""
    if tests.trained is not None and (why := _impossible(tests.trained, limits, most=most)):
        reason = why
        tests = replace(tests, trained=None)
    if tests.received is not None and (why := _impossible(tests.received, limits, most=most)):
        reason = why
        tests = replace(tests, received=None)
    possible = tests if tests.each else None
    return replace(work, tests=possible), reason


def _impossible(sums: ScoreSums, limits: ChildLimits, *, most: int) -> str:
    """Return why sums cannot be those of a device with at most this many test samples, "" if they
    can.
    """
    reason = ""
    if not limits.scores:
        reason = "no device scores models in this run"
    elif not 1 <= sums.samples <= most:
        reason = f"it reports {sums.samples} test samples, it has {most}"
    elif not 0 <= sums.seconds <= SECONDS_MOST:
        reason = f"its scoring took {sums.seconds} s"
    elif len(sums.classes) > limits.class_bytes or not sums.counts_classes():
        reason = "its counts of classes are not possible"
    elif not abs(sums.loss) <= LOSS_MOST * sums.samples:
        reason = f"its loss is {sums.mean_loss}"
    return reason or sums.impossible(limits.scores)


def with_plausible_costs(
    result: Result, *, child: str, limits: ChildLimits
) -> tuple[Result, tuple[str, ...]]:
    """Return a result without costs that cannot be, and the names of the nodes that reported such.

    What a device's work cost is a side number: it is then not known, and the model counts.
    """
    work = _plausible(result.work, limits)
    liars = []
    reports = []
    if work is not result.work:
        liars.append(child)
    for report in result.children:
        below = _plausible(report.work, limits)
        if below is not report.work:
            liars.append(report.name)
        reports.append(replace(report, work=below))
    if not liars:
        return result, ()
    return replace(result, work=work, children=tuple(reports)), tuple(liars)


def _plausible(work: Work, limits: ChildLimits) -> Work:
    """Return the work itself if its costs can be, else without those that cannot."""
    costs = work.costs.plausible(rounds=limits.rounds)
    if costs == work.costs:
        return work
    return replace(work, costs=costs)


def plans_of(result: Result) -> dict[str, list[dict[str, Any]]]:
    """Return the aggregation decisions of the child and of those below it, one per round. Raises
    RefusedModel.
    """
    try:
        plans = json.loads(result.plans or "{}")
    except (ValueError, RecursionError):
        plans = None
    if not isinstance(plans, dict) or not all(isinstance(found, list) for found in plans.values()):
        raise RefusedModel("the report on its own aggregation is not a JSON object of lists")
    every = [plan for found in plans.values() for plan in found]
    if not all(isinstance(plan, dict) for plan in every):
        raise RefusedModel("a decision of its own aggregation is not a JSON object")
    spreads = [plan.get("spread", 0.0) for plan in every]
    if not all(isinstance(spread, float | int) and abs(spread) <= FLOAT_MOST for spread in spreads):
        raise RefusedModel("the spread of its models is not a finite number")
    return plans
