"""An app of Flower's messages as a trainer: `@app.train` and `@app.evaluate` of a ClientApp, begun
by its ServerApp.

A ServerApp's main runs up to the `start` of its strategy, which has the first arrays, the settings
and `evaluate_fn`. Of the strategy `configure_train` and `configure_evaluate` make the messages of a
task; what aggregates is a rule of the experiment. No process of Flower's runs, and nothing is sent
to one. The names are those of flwr 1.27 to 1.42.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple, Never

import numpy as np

from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.settings import own
from fedstrata.common.settings.flower_apps import OF_TRAINING, ROUNDS
from fedstrata.common.settings.trainers import TRAINER_KEY, FlowerTrainer
from fedstrata.common.training.array_trainer import (
    Array,
    Arrays,
    ArrayTrainer,
    LocalTask,
    Scored,
    Trained,
    TrainingSite,
    seed_generators,
)
from fedstrata.common.training.flower_state import LIBRARY, UNKEPT, UNREAD, read_state, write_state
from fedstrata.common.training.returned import count, form, number

TRAIN: Final = "train"  # Flower's types of messages
EVALUATE: Final = "evaluate"
TRAIN_LOSSES: Final = ("train_loss", "loss")
LOSSES: Final = ("eval_loss", "loss")
SCORES: Final = ("accuracy", "score")
RUN_ID: Final = 1  # of all messages: no process of Flower's reads it


class Start(NamedTuple):
    """What a ServerApp gives to the `start` of its strategy."""

    strategy: Any
    arrays: Any  # an ArrayRecord
    train_config: Mapping[str, Any]
    evaluate_config: Mapping[str, Any]
    evaluate_fn: Any  # of a global round and an ArrayRecord, or None


class _StartedStrategy(BaseException):
    """Ends a ServerApp's main, whose own `except Exception` must not see it."""


class _NoGrid(BaseException):
    """A ServerApp used what only Flower's runtime has."""


class _Grid:
    """The nodes of a lab, to whom nothing can be sent."""

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids = list(ids)

    def get_node_ids(self) -> list[int]:
        """Return their ids."""
        return self._ids

    def __getattr__(self, name: str) -> Never:
        raise _NoGrid(name)


class AppTrainer(ArrayTrainer):
    """Trains by the ClientApp of a Flower app."""

    def __init__(self, experiment: Experiment) -> None:
        """Import nothing yet: each node imports the parts that it calls."""
        settings = experiment.training.trainer
        assert isinstance(settings, FlowerTrainer)
        self._settings = settings
        own.look_in(settings.folder)
        self._epochs = experiment.training.epochs
        self._rounds = experiment.rounds
        self._places = len(experiment.tree.devices)
        self._first_settings = experiment.settings_in(0)
        self._site: TrainingSite | None = None
        # the last one, by the settings with which it was made
        self._starts: dict[tuple[float, ...], Start] = {}

    @property
    def evaluates(self) -> bool:
        """Whether the app has `@app.evaluate`, or for the cloud its strategy starts with an
        `evaluate_fn`.
        """
        if self._site is None:
            return self._start({}).evaluate_fn is not None
        # without it a call shows it
        functions = getattr(self._part("clientapp"), "_registered_funcs", None)
        return functions is None or f"{EVALUATE}.default" in functions

    def load(self, method: str) -> None:
        """Import the parts that a method calls."""
        self._part("serverapp")
        if self._site is not None or method == "prepare":
            self._part("clientapp")

    def place(self, method: str) -> tuple[str, str, str]:
        """Return the key of the part that does what a method does, its name, and how a message
        names it.
        """
        if method == "initial":
            key = "serverapp"
            called = "the ArrayRecord of its strategy"
        elif method == "evaluate" and self._site is None:
            key = "serverapp"
            called = "evaluate_fn"
        else:
            key = "clientapp"
            called = EVALUATE if method == "evaluate" else TRAIN
        return f"{TRAINER_KEY}.{key}", self._settings.code[f"{TRAINER_KEY}.{key}"], called

    def array_name(self, name: str) -> str:
        """Return how a message names an array."""
        return f"array {name}"

    def initial(self, seed: int) -> Arrays:
        """Return the arrays with which the app's strategy starts."""
        self._starts.clear()
        return _arrays(self._start({}).arrays)

    def prepare(self, site: TrainingSite) -> int:
        """Return the number of examples that a first training of one epoch reports; it changes no
        state.
        """
        self._site = site
        with TemporaryDirectory(prefix="fedstrata-") as state:
            task = LocalTask(
                node=site.node,
                data=site.data,
                seed=site.seed,
                epochs=1,
                global_round=1,
                local_round=1,
                settings=site.settings,
                deadline_s=None,
                state=Path(state),
                progress=lambda done, of: None,
            )
            content = self._reply(TRAIN, dict(self.initial(site.seed)), task)
        return self._examples(_metrics(content), TRAIN)

    def train(self, arrays: dict[str, Array], task: LocalTask) -> Trained:
        """Return what `@app.train` replies: its `train_loss`, `loss`, or a metric with `loss` in
        its name is the loss.

        Without a metric `steps` they are one for each epoch.
        """
        content = self._reply(TRAIN, arrays, task)
        metrics = _metrics(content)
        records = list(content.array_records.values())
        if len(records) != 1:
            self._refuse(
                TRAIN, f"replies with {len(records)} ArrayRecords", "Reply with one, the model."
            )
        samples = self._examples(metrics, TRAIN)
        steps = count(metrics.get("steps"))
        most = task.epochs * samples
        if steps is None or not 0 < steps <= most:  # a log may call something else so
            steps = min(task.epochs, most)
        return Trained(
            _arrays(records[0]), _metric(metrics, TRAIN_LOSSES, ["loss"]), steps, samples, metrics
        )

    def evaluate(self, arrays: dict[str, Array], task: LocalTask) -> Scored | None:
        """Return the loss and the score of `@app.evaluate`, or at the cloud of the strategy's
        `evaluate_fn`.
        """
        if self._site is None:
            start = self._start({})
            found = start.evaluate_fn(task.global_round, _record(arrays, start))
            if found is None:
                return None
            metrics = dict(found)
            return Scored(count(metrics.get(_weight(start))) or 1, *self._scores(metrics))
        # of the app; none are trained here
        task = replace(task, epochs=task.epochs or self._site.epochs)
        metrics = _metrics(self._reply(EVALUATE, arrays, task))
        samples = self._examples(metrics, EVALUATE)
        if samples:
            return Scored(samples, *self._scores(metrics))
        return None

    def _reply(self, kind: str, arrays: dict[str, Array], task: LocalTask) -> Any:
        """Return the RecordDict that the ClientApp replies to the message of its strategy for a
        task.
        """
        assert self._site is not None
        start = self._start(task.settings)
        app = self._part("clientapp")
        library = _flwr("app")
        strategy = start.strategy
        config = start.train_config
        node = self._site.place + 1
        configure = strategy.configure_train
        if kind == EVALUATE:
            configure = strategy.configure_evaluate
            config = start.evaluate_config
        grid = _Grid([node] * _nodes(strategy))
        record = library.ConfigRecord(dict(config))
        messages = list(configure(task.global_round, _record(arrays, start), record, grid))
        if not messages:
            self._refuse(
                kind,
                "gets no message of the app's strategy",
                f"Let its fraction_{kind} be above 0.",
            )
        places = {"partition-id": self._site.place, "num-partitions": self._site.places}
        state = library.RecordDict()
        try:
            read_state(state, task.state)
        except ValueError as error:
            self._refuse(kind, str(error), UNREAD)
        context = self._context(node, places, state, self._run_config(task.settings, task.epochs))
        seed_generators(task.seed)  # a strategy draws clients, and a ServerApp's model its weights
        reply = app(messages[0], context)
        try:
            write_state(context.state, task.state)
        except TypeError as error:
            self._refuse(kind, str(error), UNKEPT)
        content = getattr(reply, "content", None)
        if not isinstance(content, library.RecordDict):
            self._refuse(kind, f"returns {form(reply)}", "Return a Message with a RecordDict.")
        if len(content.metric_records) != 1:
            problem = f"replies with {len(content.metric_records)} MetricRecords"
            self._refuse(kind, problem, "Reply with one, with the number of its samples.")
        return content

    def _start(self, settings: Mapping[str, float]) -> Start:
        """Return with what the app starts by the settings of a task, those of the first round for
        {}.
        """
        settings = settings or self._first_settings
        key = tuple(settings.values())
        if key not in self._starts:
            server = self._part("serverapp")
            context = self._context(
                0, {}, _flwr("app").RecordDict(), self._run_config(settings, self._epochs)
            )
            self._starts = {key: self._started(server, context)}
        return self._starts[key]

    def _started(self, server: Any, context: Any) -> Start:
        """Run a ServerApp up to the start of its strategy."""
        found: list[Start] = []

        def start(
            strategy: Any, grid: Any, initial_arrays: Any = None, *rest: Any, **named: Any
        ) -> Never:
            names = ("num_rounds", "timeout", "train_config", "evaluate_config", "evaluate_fn")
            given = {**dict(zip(names, rest, strict=False)), **named}
            train, evaluate = (
                given.get(name) or {} for name in ("train_config", "evaluate_config")
            )
            found.append(Start(strategy, initial_arrays, train, evaluate, given.get("evaluate_fn")))
            raise _StartedStrategy

        kinds = [
            each for each in _kinds(_flwr("serverapp.strategy").Strategy) if "start" in vars(each)
        ]
        kept = {each: vars(each)["start"] for each in kinds}
        problem = "its ServerApp starts no strategy of flwr.serverapp.strategy"
        try:
            for each in kinds:
                each.start = start
            if getattr(server, "_main", server) is not None:  # None: an app of a server_fn
                server(_Grid(range(1, self._places + 1)), context)  # a main may wait for them
        except _StartedStrategy:
            pass
        except _NoGrid as error:
            problem = f"its ServerApp calls grid.{error}, which needs Flower's runtime"
        finally:
            for each, its in kept.items():
                each.start = its
        if not found:
            remedy = (
                "Give an app with a client_fn by training.trainer.client_fn, others a strategy."
            )
            self._refuse("initial", problem, remedy)
        if not hasattr(found[0].arrays, "to_numpy_ndarrays"):
            remedy = "Give its start the ArrayRecord of a model."
            self._refuse(
                "initial",
                f"its strategy starts with {form(found[0].arrays)} as initial_arrays",
                remedy,
            )
        return found[0]

    def _context(
        self, node: int, places: dict[str, int], state: Any, run_config: dict[str, Any]
    ) -> Any:
        return _flwr("app").Context(
            run_id=RUN_ID, node_id=node, node_config=places, state=state, run_config=run_config
        )

    def _run_config(self, settings: Mapping[str, float], epochs: int) -> dict[str, Any]:
        """Return the app's settings, with those of the table `training`, the batch size as an
        int.
        """
        values = {**settings, "batch_size": int(settings["batch_size"]), "epochs": epochs}
        given = {name: values[key] for name, key in OF_TRAINING.items()}
        return {**self._settings.run_config, **given, ROUNDS: self._rounds}

    def _part(self, key: str) -> Any:
        """Import a part of the app."""
        found = own.load(f"{TRAINER_KEY}.{key}", self._settings.code[f"{TRAINER_KEY}.{key}"])
        if not callable(found):
            name = self._settings.code[f"{TRAINER_KEY}.{key}"]
            own.refuse(
                f"{TRAINER_KEY}.{key}",
                name,
                f"it is {form(found)}",
                "Name Flower's ServerApp or ClientApp.",
            )
        return found

    def _examples(self, metrics: Mapping[str, Any], kind: str) -> int:
        name = _weight(self._start({}))
        found = count(metrics.get(name))
        if found is None or found < 0:
            problem = f"replies with {name} = {form(metrics.get(name))}"
            self._refuse(kind, problem, "Add the number of its samples.")
        return found

    def _scores(self, metrics: Mapping[str, Any]) -> tuple[float, float]:
        """Return the loss and the score among metrics."""
        loss = _metric(metrics, LOSSES, ["loss"])
        if self._settings.score:
            score = _metric(metrics, [self._settings.score], [])
        else:
            score = _metric(metrics, SCORES, ["acc", "score"])
        if loss is None or score is None:
            missing = "loss" if loss is None else "score"
            problem = f"returns no {missing} among {', '.join(map(str, metrics))}"
            self._refuse(EVALUATE, problem, f"Add one, or name a metric in {TRAINER_KEY}.score.")
        return loss, score

    def _refuse(self, method: str, problem: str, remedy: str) -> Never:
        where = "" if self._site is None else f" ({self._site.node})"
        key, name, called = self.place(method)
        if method != "initial":
            problem = f"{called} {problem}"
        own.refuse(key, name, f"{problem}{where}", remedy)


def _flwr(name: str) -> Any:
    """Import a part of Flower's library, which the app has imported."""
    found = import_module(f"{LIBRARY}.{name}")
    logging.getLogger(LIBRARY).setLevel(logging.WARNING)  # else each message is a line
    try:  # who sends a message, from 1.40 on
        identity = import_module(f"{LIBRARY}.supercore.task_identity").TaskIdentity
        identity.task_id = identity.run_id = identity.node_id = RUN_ID
    except ModuleNotFoundError:
        pass
    return found


def _kinds(kind: type) -> Iterator[type[Any]]:
    """Yield a class and all below it."""
    yield kind
    below: type
    for below in kind.__subclasses__():
        yield from _kinds(below)


def _nodes(strategy: Any) -> int:
    """Return the number of nodes for which a strategy, or the one that it wraps, waits no
    longer.
    """
    most = 1
    while strategy is not None:
        least = [value for name, value in vars(strategy).items() if name.startswith("min_")]
        most = max([most, *(value for value in least if isinstance(value, int))])
        strategy = getattr(strategy, "strategy", None)
    return most


def _weight(start: Start) -> str:
    """Return the name of the metric by which a strategy weighs."""
    return str(getattr(start.strategy, "weighted_by_key", "num-examples"))


def _arrays(record: Any) -> dict[str, Array]:
    return {str(name): array.numpy() for name, array in record.items()}


def _record(arrays: Mapping[str, Array], start: Start) -> Any:
    """Return arrays as the app has them: in the order of its first ones."""
    app = _flwr("app")
    return app.ArrayRecord({name: app.Array(np.asarray(arrays[name])) for name in start.arrays})


def _metrics(content: Any) -> dict[str, Any]:
    (found,) = content.metric_records.values()
    return dict(found)


def _metric(metrics: Mapping[str, Any], names: Any, parts: Any) -> float | None:
    """Return the first number with one of the names, else the first whose name has one of the
    parts, else None.
    """
    exact = [name for name in names if name in metrics]
    partly = [name for part in parts for name in metrics if part in name]
    for name in [*exact, *partly]:
        if (found := number(metrics[name])) is not None:
            return found
    return None
