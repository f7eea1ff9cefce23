"""What own code must do before a lab relies on it: the properties that fedstrata's own has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fedstrata.common.errors import InvalidExperiment, RefusedModel, WireError
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.experiment.tiers import Tier
from fedstrata.common.host.examination import Finding
from fedstrata.common.host.files import remove_folder
from fedstrata.common.methods import aggregator
from fedstrata.common.methods.attack import Attack
from fedstrata.common.methods.column_rule import ColumnRule, Columns, RoundFacts
from fedstrata.common.methods.mixing import BLOCK_COLUMNS, cut
from fedstrata.common.methods.own_rule import GuardedRule, OwnRule
from fedstrata.common.methods.rule import RULE_KEY, RuleContext, Uploads, link_layouts
from fedstrata.common.methods.selection import ClientSelection, ResultFacts, Selector
from fedstrata.common.methods.settings import RuleSettings
from fedstrata.common.methods.statistics import Gram, Statistics
from fedstrata.common.model.codec_settings import CodecSettings
from fedstrata.common.model.delta_codecs import DeltaCodec
from fedstrata.common.model.layout import ModelLayout, Row, Section
from fedstrata.common.model.refinement import RoundModels
from fedstrata.common.settings import own
from fedstrata.common.settings.own_values import changed, kept_in_files
from fedstrata.common.settings.topology import CLOUD
from fedstrata.common.text import named
from fedstrata.common.training.array_trainer import ArrayTrainer, TrainerCode
from fedstrata.common.training.scores import ScoreSums
from fedstrata.deploy.checking import attack_checks, model_checks
from fedstrata.device.jobs import LocalResult, Order, TrainerFolder
from fedstrata.device.training.arrays import ArrayTraining

CHILDREN: Final = 5
ROUNDS: Final = 3
PARAMETERS: Final = 2 * BLOCK_COLUMNS + 11  # three blocks, the last one short
WIDTHS: Final = (1, 2, 63, 1025, 5000)
MEANS: Final = 400  # encodings of a change, of which the mean is taken
NODE_SAMPLES: Final = 100
FEW: Final = 63  # columns of it
SIGMAS: Final = 6.0
GARBAGE: Final = 200


class Report(NamedTuple):
    """A child's statistics."""

    samples: int
    loss: float | None
    path_steps: int = 1
    start_loss: float | None = None


def checks(name: str, keywords: Mapping[str, Any], *, data: Path) -> tuple[str, Iterator[Finding]]:
    """Return what a name of own code is, and its checks, which run one by one. `data`: the samples
    of a trainer.

    The keywords are those of the class; of a model they are keys of its experiment.
    Both raise InvalidExperiment, the latter for own code that fails.
    """
    found = own.load("name", name)
    if isinstance(found, type) and issubclass(found, (ColumnRule, RuleSettings)):
        tree = {
            "institution": {"aggregation": {**keywords, "name": name}},
            "data": {"node_samples": NODE_SAMPLES},
        }
        return "rule", _each(name, _rule(parse(tree).tiers[-1].aggregation))
    if isinstance(found, type) and issubclass(found, Selector):
        tree = {"cloud": {"selection": {**keywords, "name": name}, "participation": 0.4}}
        return "selector", _each(name, _selector(parse(tree).tiers[0]))
    if isinstance(found, type) and issubclass(found, ArrayTrainer):
        tree = {"training": {"trainer": {**keywords, "name": name}}, "data": {"root": str(data)}}
        return "trainer", _each(name, _trainer(parse(tree)))
    if isinstance(found, type) and issubclass(found, DeltaCodec):
        tree = {"transfer": {"wan": {"up": {**keywords, "name": name}}}}
        return "codec", _each(name, _codec(parse(tree).tiers[0].transfer.up))
    if isinstance(found, type) and issubclass(found, Attack):
        return "attack", _each(name, attack_checks.of(name, keywords))
    if isinstance(found, type):
        from fedstrata.device.training.objectives.objective import Objective

        if issubclass(found, Objective):
            from fedstrata.deploy.checking import objective_checks

            settings = parse({"training": {"objective": {**keywords, "name": name}}}).training
            return "objective", _each(name, objective_checks.of(settings))
    kinds = (
        "selector (Selector), trainer (ArrayTrainer), codec (DeltaCodec), objective "
        "(Objective), attack (Attack) or model"
    )
    if model_checks.is_model(found):
        return "model", model_checks.of(name, keywords)
    problem = f"is no rule (ColumnRule, MixingRule, RuleSettings), {kinds}"
    remedy = (
        "The pages docs/own-*.md have an example of each. A run names what is wrong with data sets."
    )
    raise InvalidExperiment("name", name, problem, remedy)


def _each(name: str, steps: Iterator[tuple[str, str]]) -> Iterator[Finding]:
    """Yield a finding for each pair of an item and its problem, "" for none, and one for what the
    file keeps.
    """
    before: Mapping[str, bytes] | None = None
    for item, problem in steps:
        before = before or kept_in_files([name])  # the first item may fill caches
        yield Finding(item, True, not problem, problem)
    shared = changed(before or {}, kept_in_files([name]))
    problem = f"it changes {named(shared)}, which all objects of a process share" if shared else ""
    yield Finding("keeps nothing in its file", True, not problem, problem)


def _rule(settings: RuleSettings) -> Iterator[tuple[str, str]]:
    first = _Lab(settings)
    again = _Lab(settings)
    models = [first.round(r) for r in range(ROUNDS)]
    yield "three rounds", ""
    yield "the same twice", _differs(models, [again.round(r) for r in range(ROUNDS)])
    if isinstance(settings, OwnRule):
        yield "any cut of the columns", _cuts(settings)
    with TemporaryDirectory() as folder:
        killed = _Lab(settings)
        resumed = _Lab(settings)
        for r in range(ROUNDS - 1):
            killed.round(r)
        facts = killed.rule.save(Path(folder))
        resumed.rule.begin(killed.rule.model.copy())
        resumed.rule.restore(Path(folder), json.loads(json.dumps(facts)))
        yield "killed and resumed", _differs(models[-1:], [resumed.round(ROUNDS - 1)])
    _Lab(settings).round(0, missing=CHILDREN - 1)
    yield "one upload alone", ""


def _selector(tier: Tier) -> Iterator[tuple[str, str]]:
    first, again, killed, resumed = (ClientSelection(tier, seed=1, node=CLOUD) for _ in range(4))
    chosen = _select(first, range(2 * ROUNDS))
    yield f"{2 * ROUNDS} rounds", ""
    yield (
        "the same twice",
        "it selects others" if _select(again, range(2 * ROUNDS)) != chosen else "",
    )
    _select(killed, range(ROUNDS))
    resumed.restore(json.loads(json.dumps(killed.save())))
    others = _select(resumed, range(ROUNDS, 2 * ROUNDS)) != chosen[ROUNDS:]
    yield (
        "killed and resumed",
        "it selects others; what it needs to keep belongs into `numbers`" if others else "",
    )


def _select(one: ClientSelection, rounds: Iterable[int]) -> list[list[str]]:
    """Play rounds of ten children, of which some results are missing; return who was selected."""
    children = [f"device-{k}" for k in range(10)]
    found = []
    for r in rounds:
        chosen = one.select(
            children, r, samples={name: 100 * (k + 1) for k, name in enumerate(children)}
        )
        results = {
            name: ResultFacts(100 * (k + 1), 1 / (k + 1 + r), 1.0 + k, 1000)
            for k, name in enumerate(children)
            if name in chosen and (k + r) % 4
        }
        one.observe(r, chosen, results)
        found.append(chosen)
    return found


class _Lab:
    """A node with a rule, and children whose uploads are random, the same for each lab."""

    def __init__(self, settings: RuleSettings) -> None:
        self._layout = _layout()
        self._links = link_layouts(settings, self._layout)
        self.rule = aggregator.build(
            settings,
            RuleContext(
                layout=self._layout,
                node=CLOUD,
                seed=1,
                measures=True,
                rows=_memory,
                children=CHILDREN,
                refiner=_Refiner(),
            ),
        )
        start = self._layout.empty()
        self._layout.floats(start)[:] = _random(0, (PARAMETERS + 3,))
        self.rule.begin(start)

    def round(self, r: int, *, missing: int = 0) -> npt.NDArray[np.float32]:
        """Play a round, and return its model."""
        given = self.rule.dispatch(r, [f"device-{k}" for k in range(CHILDREN)])
        children = tuple(child for _, those in given for child in those)
        sent_K = np.stack([row for row, those in given for _ in those])
        rows_K = np.zeros((CHILDREN, self._links.up.row_bytes), np.uint8)
        extras_K = self._links.up.extra_columns(rows_K)
        extras_K[:] = _random(r + 100, extras_K.shape)
        floats_K = self._layout.floats(rows_K)
        floats_K[:] = self._layout.floats(sent_K) + _random(r + 1, (CHILDREN, PARAMETERS + 3))
        reports = (*[None] * missing, *_reports()[missing:])
        self.rule.aggregate(r, Uploads(children, rows_K, reports, lambda: None))
        return self._layout.floats(self.rule.model).copy()


class _Refiner:
    """A refiner that leaves the mean as it is."""

    moves = 0

    def refine(self, models: RoundModels) -> Mapping[str, Any]:
        return {}

    def cancel(self) -> None:
        pass

    def allow(self) -> None:
        pass


def _reports() -> list[Report]:
    return [Report(100 * (k + 1), 1.0 / (k + 1)) for k in range(CHILDREN)]


def _layout() -> ModelLayout:
    return ModelLayout.build(
        (("w", (PARAMETERS,), Section.PARAMETER), ("mean", (3,), Section.BUFFER))
    )


def _memory(name: str, count: int) -> npt.NDArray[np.uint8]:
    return np.zeros((count, _layout().row_bytes), np.uint8)


def _random(seed: int, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _differs(wanted: list[npt.NDArray[np.float32]], found: list[npt.NDArray[np.float32]]) -> str:
    apart = max(float(np.abs(one - other).max()) for one, other in zip(wanted, found, strict=True))
    if apart:
        return f"its models differ by up to {apart:.2g}"
    return ""


def _cuts(settings: OwnRule) -> str:
    """Return why columns computed in other blocks differ, or ""."""
    context = RuleContext(_layout(), CLOUD, 1, measures=True, rows=_memory, children=CHILDREN)
    uploads_KD = _random(1, (CHILDREN, PARAMETERS))
    model_D = _random(2, (PARAMETERS,))
    extras = {
        name: _random(3 + i, (CHILDREN, PARAMETERS)) for i, name in enumerate(settings.returns)
    }
    children = [f"device-{k}" for k in range(CHILDREN)]
    statistics = Statistics.of(_reports())
    found = []
    for width in (PARAMETERS, BLOCK_COLUMNS, 1000):
        rule = GuardedRule(settings)
        products = Gram.of(list(uploads_KD), model_D) if rule.compares else None
        facts = RoundFacts.of(
            context, 0, children, statistics, weights=settings.weights, products=products
        )
        rule.begin(facts)
        weights_K = rule.weights(facts)
        state = {name: np.full(PARAMETERS, rule.first(name), np.float32) for name in rule.vectors}
        mean_D = (weights_K @ uploads_KD).astype(np.float32)
        whole = Columns(uploads_KD, model_D, mean_D, weights_K, state, extras)
        parts = [rule.columns(_part(whole, columns)) for columns in cut(0, PARAMETERS, width)]
        found.append(np.concatenate(parts).astype(np.float32))
    if all(np.array_equal(found[0], other) for other in found[1:]):
        return ""
    return (
        "its columns depend on others of the same block. What needs all of them belongs into "
        f"`begin` ({RULE_KEY})"
    )


def _part(whole: Columns, columns: slice) -> Columns:
    state = {name: values[columns] for name, values in whole.state.items()}
    extras = {name: values_K[:, columns] for name, values_K in whole.extras.items()}
    return Columns(
        whole.uploads_KC[:, columns],
        whole.model_C[columns],
        whole.mean_C[columns],
        whole.weights_K,
        state,
        extras,
    )


# Trainers


def _trainer(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """Yield each item and its problem, "" for none. Raises InvalidExperiment if the trainer
    fails.
    """
    with TemporaryDirectory(prefix="fedstrata-") as home:
        folders = [Path(home) / name for name in ("first", "again", "killed")]
        first = _Trained(experiment, folders[0])
        yield "first arrays and samples", ""
        models = [first.round(r) for r in range(ROUNDS)]
        yield (
            f"{ROUNDS} rounds",
            "" if _apart(models, [first.start, *models]) else "it changes no array",
        )
        again = _Trained(experiment, folders[1])
        same = _differ(models, [again.round(r) for r in range(ROUNDS)])
        yield (
            "the same twice",
            same and f"{same}; draw random numbers from task.seed, or from global generators",
        )
        if first.evaluates:
            yield (
                "the same score twice",
                "" if first.score() == again.score() else "its scores of one model differ",
            )
        killed = _Trained(experiment, folders[2])
        for r in range(ROUNDS - 1):
            killed.round(r)
        resumed = _Trained(experiment, folders[2], model=killed.model)
        same = _differ(models[-1:], [resumed.round(ROUNDS - 1)])
        yield (
            "killed and resumed",
            same and f"{same}; what it needs to keep belongs into task.state",
        )
        once = resumed.result.work
        more = resumed.again(ROUNDS, epochs=2).work
        if more.samples == once.samples:
            wrong = ""
        else:
            wrong = f"it reports {more.samples} samples after {once.samples}"
        yield "the same samples with more epochs", wrong
        few = f"it takes {more.steps} steps in two epochs, and {once.steps} in one"
        yield "more steps with more epochs", "" if more.steps > once.steps else few


class _Trained:
    """A device with a trainer, alone: its model goes from task to task. `model`: None for the first
    one.
    """

    def __init__(self, experiment: Experiment, folder: Path, model: Row | None = None) -> None:
        self._training = ArrayTraining(
            experiment, node=experiment.tree.devices[0], accelerator="cpu"
        )
        self._layout, self.start = TrainerCode(experiment).first(experiment.seed)
        self._training.prepare()
        self.model = self.start if model is None else model
        self._folder = folder
        self._next = folder.with_name(f"{folder.name}-next")

    def round(self, r: int) -> Row:
        """Train for a round, and return the model."""
        self.result, self.model = self._order(r, epochs=1)
        remove_folder(self._folder)
        self._next.rename(self._folder)
        return self.model

    def again(self, r: int, *, epochs: int) -> LocalResult:
        """Train for some epochs, and change neither the model nor the state."""
        return self._order(r, epochs=epochs)[0]

    @property
    def evaluates(self) -> bool:
        """Whether it can score models."""
        return self._training.evaluates

    def score(self) -> ScoreSums:
        """Return the sums of the model over its test samples, without the seconds."""
        tests = self._order(ROUNDS, epochs=0, scores=True)[0].work.tests
        assert tests is not None and tests.received is not None
        return replace(tests.received, seconds=0.0)

    def _order(self, r: int, *, epochs: int, scores: bool = False) -> tuple[LocalResult, Row]:
        out = self._layout.empty()
        given = self.model.copy()
        given.flags.writeable = False
        kept = self._folder if self._folder.exists() else None
        folder = TrainerFolder(kept, self._next)
        order = Order(given, out, epochs, r, lambda done, of: None, Event(), scores, folder=folder)
        return self._training.train(order), out


def _apart(wanted: Sequence[Row], found: Sequence[Row]) -> bool:
    return not all(map(np.array_equal, wanted, found))


def _differ(wanted: Sequence[Row], found: Sequence[Row]) -> str:
    if _apart(wanted, found):
        return "its models differ"
    return ""


# Codecs


def _codec(settings: CodecSettings) -> Iterator[tuple[str, str]]:
    """Yield each item and its problem, "" for none. Raises InvalidExperiment if the codec fails in
    encoding.
    """
    codec = settings.build()
    changes = [_change(i, columns) for i, columns in enumerate(WIDTHS)]
    yield "sizes", next(filter(None, (_wrong_size(codec, delta_D) for delta_D in changes)), "")
    yield "the same twice", next(filter(None, (_draws(codec, delta_D) for delta_D in changes)), "")
    if codec.unbiased:
        yield "unbiased", _bias(codec, _change(9, FEW))
    else:
        yield (
            "a contraction",
            next(filter(None, (_grows(codec, delta_D) for delta_D in changes)), ""),
        )
    yield "any bytes", next(filter(None, (_fails(codec, columns) for columns in WIDTHS)), "")
    yield (
        "numbers that are not finite",
        next(filter(None, (_hides(codec, value) for value in (np.nan, np.inf))), ""),
    )


def _change(seed: int, columns: int) -> npt.NDArray[np.float32]:
    return (1e-3 * np.random.default_rng(seed).laplace(size=columns)).astype(np.float32)


def _decoded(
    codec: DeltaCodec, delta_D: npt.NDArray[np.float32], seed: int = 0
) -> npt.NDArray[np.float64]:
    return codec.decode(
        codec.encode(delta_D.copy(), np.random.default_rng(seed)), delta_D.size
    ).astype(np.float64)


def _is_change(found: object, columns: int) -> bool:
    return isinstance(found, np.ndarray) and found.shape == (columns,) and found.dtype == np.float32


def _wrong_size(codec: DeltaCodec, delta_D: npt.NDArray[np.float32]) -> str:
    columns = delta_D.size
    found = codec.decode(codec.encode(delta_D.copy(), np.random.default_rng(0)), columns)
    if _is_change(found, columns):
        return ""
    if isinstance(found, np.ndarray):
        shape = f"{found.dtype} {list(found.shape)}"
    else:
        shape = type(found).__name__
    return f"decode returns {shape}, not float32 [{columns}]"


def _draws(codec: DeltaCodec, delta_D: npt.NDArray[np.float32]) -> str:
    same = codec.encode(delta_D.copy(), np.random.default_rng(5)) == codec.encode(
        delta_D.copy(), np.random.default_rng(5)
    )
    if same:
        return ""
    return "its bytes differ; draw random numbers from `chance`"


def _grows(codec: DeltaCodec, delta_D: npt.NDArray[np.float32]) -> str:
    d = delta_D.astype(np.float64)
    share = np.sum((d - _decoded(codec, delta_D)) ** 2) / np.sum(d**2)
    if not share < 1:
        return f"of {d.size} columns it leaves out {share:.4g} times what there is"
    return ""


def _bias(codec: DeltaCodec, delta_D: npt.NDArray[np.float32]) -> str:
    found = np.array([_decoded(codec, delta_D, seed) for seed in range(MEANS)])
    apart = np.abs(found.mean(axis=0) - delta_D)
    allowed = SIGMAS * found.std(axis=0).max() / np.sqrt(MEANS) + 1e-4 * np.abs(delta_D).max()
    if (apart <= allowed).all():
        return ""
    share = apart.max() / np.abs(delta_D).max()
    return (
        f"the mean of {MEANS} decoded changes differs from the change by {share:.2g} of its "
        "largest column"
    )


def _fails(codec: DeltaCodec, columns: int) -> str:
    """Return why bytes from the network are not handled: each gives a change, WireError or
    ValueError.
    """
    draw = np.random.default_rng(columns)
    most = codec.nbytes(columns)
    sound = codec.encode(_change(1, columns), np.random.default_rng(0))
    tried = [sound[: draw.integers(len(sound) + 1)] for _ in range(GARBAGE // 4)]
    tried += [draw.bytes(int(draw.integers(most + 1))) for _ in range(GARBAGE // 2)]
    for _ in range(GARBAGE // 4 * bool(sound)):
        flipped = bytearray(sound)
        flipped[draw.integers(len(sound))] ^= 1 << int(draw.integers(8))
        tried.append(bytes(flipped))
    for data in tried:
        try:
            found = codec.decode(data, columns)
        except (WireError, ValueError):
            continue
        except RefusedModel as error:
            return f"decode must raise ValueError for {len(data)} bytes that are invalid: {error}"
        if not _is_change(found, columns):
            return f"decode returns no float32 [{columns}] of {len(data)} invalid bytes"
    return ""


def _hides(codec: DeltaCodec, value: float) -> str:
    """Return why a model that diverged would not be refused."""
    delta_D = _change(2, 1025)
    delta_D[700] = value
    try:
        with np.errstate(all="ignore"):
            found = codec.decode(codec.encode(delta_D, np.random.default_rng(0)), delta_D.size)
    except (WireError, ValueError, RefusedModel, InvalidExperiment):
        return ""
    hides = np.isfinite(found).all()
    if hides:
        return f"a change with {value} is decoded to finite numbers, so the parent would use it"
    return ""
