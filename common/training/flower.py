"""A client of a Flower app as a trainer: a `NumPyClient`, or a plain `Client`, fits and evaluates
as in Flower.

A client is made by `client_fn(context)` for each task, as Flower does; what persists is
`context.state`. The names are those of the API; `flwr` itself is imported by the user's file alone,
if at all. Its arrays are named by their places in the list, float32 or int64.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, MutableMapping, Sized
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final, Never

import numpy as np

from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.settings import own
from fedstrata.common.settings.flower_apps import OF_TRAINING
from fedstrata.common.settings.trainers import TRAINER_KEY, FlowerTrainer
from fedstrata.common.training.array_trainer import (
    Array,
    Arrays,
    ArrayTrainer,
    LocalTask,
    Scored,
    Trained,
    TrainingSite,
)
from fedstrata.common.training.flower_state import (
    LIBRARY,
    UNKEPT,
    UNREAD,
    from_file,
    read_state,
    to_file,
    write_state,
)
from fedstrata.common.training.returned import count, form

CLIENT: Final = f"{TRAINER_KEY}.client_fn"
LOSSES: Final = ("train_loss", "loss")  # in what `fit` returns
SCORES: Final = ("accuracy", "score")  # in what `evaluate` and `evaluate_fn` return
NUMPY: Final = "numpy.ndarray"  # the type of `Parameters` whose tensors are files of numpy's
# the classes of `context.state`, in flwr.common; the latter before 1.17
STATES: Final = ("RecordDict", "RecordSet")
TRAINING: Final = "trainloader"  # attributes of a client
TESTING: Final = ("testloader", "valloader")


@dataclass
class Context:
    """What `client_fn` gets, with the fields of Flower's. `state` is Flower's own class if the app
    imports `flwr`.
    """

    node_config: dict[str, Any]
    state: MutableMapping[str, Any]
    run_config: dict[str, Any]
    node_id: int = 0
    run_id: int = 0


class ClientTrainer(ArrayTrainer):
    """Trains by the clients of a Flower app."""

    def __init__(self, experiment: Experiment) -> None:
        """Import nothing yet: each node imports the functions that it calls."""
        settings = experiment.training.trainer
        assert isinstance(settings, FlowerTrainer)
        self._settings = settings
        self._first_config = _config(
            experiment.settings_in(0), epochs=experiment.training.epochs, global_round=1
        )
        self._site: TrainingSite | None = None
        self._scores = False  # whether the clients do

    @property
    def evaluates(self) -> bool:
        """Whether the clients of this device evaluate, or for the cloud there is an
        `evaluate_fn`.
        """
        if self._site is None:
            return self._settings.evaluate_fn is not None
        return self._scores

    def load(self, method: str) -> None:
        """Import the function that a method calls."""
        evaluate = "evaluate_fn" if self._site is None else "client_fn"
        self._function({"initial": self._first, "evaluate": evaluate}.get(method, "client_fn"))

    def place(self, method: str) -> tuple[str, str, str]:
        """Return the key of the function that does what a method does, its name, and how a message
        names it.
        """
        of_method = {"initial": (self._first, "get_parameters"), "train": ("client_fn", "fit")}
        # which counts the samples of a client without a trainloader
        of_method["prepare"] = of_method["train"]
        key, called = of_method.get(method, ("client_fn", method))
        if method == "evaluate" and self._site is None:
            key = "evaluate_fn"
        whole = f"{TRAINER_KEY}.{key}"
        return whole, self._settings.code[whole], called if key == "client_fn" else "it"

    def array_name(self, name: str) -> str:
        """Return how a message names an array."""
        return f"array {name}"

    def initial(self, seed: int) -> Arrays:
        """Return the arrays of `initial()`, or of the first client's `get_parameters`."""
        if self._first == "initial":
            return self._by_place(self._call("initial"), "initial")
        client = self._made(self._context(self._first_config, place=0, places=1))
        found = client.get_parameters()
        if found is None:
            problem = f"{client.kind} has no get_parameters"
            self._refuse(
                "client_fn", problem, f"Name a function of the arrays in {TRAINER_KEY}.initial."
            )
        return self._by_place(found, "initial")

    def prepare(self, site: TrainingSite) -> int:
        """Return the length of the client's `trainloader.dataset`, else what a first `fit` reports.

        Its tests are those of its largest loader, if it has one of tests: it may score on any of
        them.
        """
        self._site = site
        client = self._made(self._context(self._first_config, place=site.place, places=site.places))
        self._scores = client.evaluates
        samples, *tests = (
            _size(getattr(client.inner, name, None)) for name in (TRAINING, *TESTING)
        )
        if any(tests):
            self.tests = max(samples or 0, *(count or 0 for count in tests))
        if samples is not None:
            return samples
        first = [np.asarray(array) for array in self.initial(site.seed).values()]
        _, found, _ = self._fit(client, first, dict(self._first_config))
        return found  # type: ignore[no-any-return]  # a number, which the caller checks

    def train(self, arrays: dict[str, Array], task: LocalTask) -> Trained:
        """Return what `fit` returns: its `train_loss` or `loss`, and `steps`, are among its
        metrics.

        Without `steps` they are the batches of its `trainloader` in all epochs, or one for each
        epoch.
        """
        config = _config(task.settings, epochs=task.epochs, global_round=task.global_round)
        client, context = self._client(task, config)
        found, samples, metrics = self._fit(client, _in_order(arrays), config)
        self._keep(context, task)
        logged: Mapping[str, Any] = metrics if isinstance(metrics, Mapping) else {}
        loss = next((logged[name] for name in LOSSES if name in logged), None)
        steps = count(logged.get("steps"))
        most = task.epochs * (count(samples) or 0)
        if steps is None or not 0 < steps <= most:  # a log may call something else so
            steps = min(task.epochs * client.batches, most) if most else 0
        return Trained(self._by_place(found, "train"), loss, steps, samples, metrics)

    def evaluate(self, arrays: dict[str, Array], task: LocalTask) -> Scored | None:
        """Return the loss and the accuracy, or the score, of a device's client; at the cloud of the
        `evaluate_fn`.
        """
        if self._site is None:
            found = self._call("evaluate_fn", task.global_round, _in_order(arrays), {})
            if found is None:
                return None
            loss, metrics = self._checked(
                found, "evaluate", "the loss and a dict of metrics", count=2
            )
            return Scored(count(metrics.get("num_examples")) or 1, loss, self._score(metrics))
        epochs = task.epochs or self._site.epochs  # of the client; none are trained here
        config = _config(task.settings, epochs=epochs, global_round=task.global_round)
        client, context = self._client(task, config)
        found = client.evaluate(_in_order(arrays), config)
        self._keep(context, task)
        if found is None:
            return None
        loss, samples, metrics = self._checked(
            found, "evaluate", "the loss, the number of samples, and a dict", count=3
        )
        if count(samples) == 0:
            return None
        return Scored(samples, loss, self._score(metrics))

    def _client(self, task: LocalTask, config: Mapping[str, Any]) -> tuple[_Client, Context]:
        """Return a new client for a task, and its context, with the state that the last task
        left.
        """
        site = self._site
        assert site is not None
        context = self._context(config, place=site.place, places=site.places)
        try:
            read_state(context.state, task.state)
        except ValueError as error:
            self._refuse("client_fn", str(error), UNREAD)
        return self._made(context), context

    def _made(self, context: Context) -> _Client:
        """Return a new client, without the wrapper that a NumPyClient's `to_client` puts around
        it.
        """
        client = self._call("client_fn", context)
        client = getattr(client, "numpy_client", client)
        if isinstance(client, type):
            self._refuse(
                "client_fn", f"it returns the class {client.__name__}", "Return an object of it."
            )
        if not callable(getattr(client, "fit", None)):
            problem = f"it returns {form(client)}, which has no fit"
            self._refuse("client_fn", problem, "Return a NumPyClient or a Client.")
        return _Client(client)

    def _context(self, config: Mapping[str, Any], *, place: int, places: int) -> Context:
        self._function("client_fn")  # which imports flwr, if at all
        state: MutableMapping[str, Any] = {}
        if LIBRARY in sys.modules:
            common = import_module(f"{LIBRARY}.common")
            state = next(getattr(common, name) for name in STATES if hasattr(common, name))()
        run_config = {
            **self._settings.run_config,
            **{name: config[key] for name, key in OF_TRAINING.items()},
        }
        node_config = {"partition-id": place, "num-partitions": places}
        return Context(node_config, state, run_config, node_id=place)

    def _keep(self, context: Context, task: LocalTask) -> None:
        """Write the state of a client into the folder of the task."""
        try:
            write_state(context.state, task.state)
        except TypeError as error:
            self._refuse("client_fn", str(error), UNKEPT)

    def _fit(
        self, client: _Client, arrays: list[Array], config: dict[str, Any]
    ) -> tuple[Any, Any, Any]:
        found = client.fit(arrays, config)
        arrays, samples, metrics = self._checked(
            found, "train", "the arrays, the number of samples, and a dict", count=3
        )
        return arrays, samples, metrics

    def _checked(self, found: Any, method: str, wanted: str, *, count: int) -> Any:
        """Return what a function of the app returned, if it has as many parts as it should."""
        key, _, called = self.place(method)
        short = key.removeprefix(f"{TRAINER_KEY}.")
        if isinstance(found, str):
            self._refuse(short, f"{called} fails: {found[:200]}", "Correct it.")
        if inspect.isawaitable(found):
            self._refuse_async(found, short, called)
        if not (isinstance(found, tuple | list) and len(found) == count):
            self._refuse(short, f"{called} returns {form(found)}", f"Return {wanted}.")
        *_, metrics = found
        if method == "evaluate" and not isinstance(metrics, Mapping):
            self._refuse(
                short, f"{called} returns {form(metrics)} as its metrics", f"Return {wanted}."
            )
        return found

    def _score(self, metrics: Mapping[str, Any]) -> Any:
        scores = [metrics[name] for name in SCORES if name in metrics]
        if not scores:
            key, _, called = self.place("evaluate")
            problem = f"{called} returns no {' or '.join(SCORES)} in its metrics"
            self._refuse(key.removeprefix(f"{TRAINER_KEY}."), problem, "Add one of them.")
        return scores[0]

    def _by_place(self, arrays: Any, method: str) -> dict[str, Any]:
        """Return the arrays of a list by their places."""
        key, _, called = self.place(method)
        short = key.removeprefix(f"{TRAINER_KEY}.")
        if inspect.isawaitable(arrays):
            self._refuse_async(arrays, short, called)
        tensors = getattr(arrays, "tensors", None)
        if isinstance(tensors, list):  # Flower's Parameters
            arrays = _from_parameters(arrays)
        if not isinstance(arrays, list | tuple) or not arrays:
            self._refuse(
                short,
                f"{called} returns {form(arrays)} as its arrays",
                "Return a list of numpy arrays.",
            )
        return {str(place): array for place, array in enumerate(arrays)}

    @property
    def _first(self) -> str:
        """The key of the function that knows the first arrays."""
        if self._settings.initial is None:
            return "client_fn"
        return "initial"

    def _call(self, key: str, *arguments: Any) -> Any:
        """Call the function that a key names."""
        function = self._function(key)
        kind = type(function).__name__
        if kind.endswith("App"):  # Flower's ClientApp or ServerApp, which may be callable
            self._refuse(
                key, f"it is a {kind}", f"Name the function that it was made of, such as {key}."
            )
        if not callable(function):
            self._refuse(key, f"it is {form(function)}, no function", "Name a function.")
        found = function(*arguments)
        if inspect.isawaitable(found):
            self._refuse_async(found, key, "it")
        return found

    def _refuse_async(self, found: Any, key: str, called: str) -> Never:
        if inspect.iscoroutine(found):
            found.close()  # else Python warns that it was never awaited
        remedy = "Write it with `def`; asyncio.run may be called in it."
        self._refuse(
            key, f"{called} is `async`, and what it returns would have to be awaited", remedy
        )

    def _function(self, key: str) -> Any:
        return own.load(f"{TRAINER_KEY}.{key}", self._settings.code[f"{TRAINER_KEY}.{key}"])

    def _refuse(self, key: str, problem: str, remedy: str) -> Never:
        where = "" if self._site is None else f" ({self._site.node})"
        own.refuse(
            f"{TRAINER_KEY}.{key}",
            self._settings.code[f"{TRAINER_KEY}.{key}"],
            f"{problem}{where}",
            remedy,
        )


def _size(loader: object) -> int | None:
    """Return the number of samples of a loader, None if it is not known."""
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, Sized):
        return len(dataset)
    return None


class _Client:
    """One interface to both kinds of clients: that of a `NumPyClient`.

    A plain `Client` has methods of one argument and of Flower's records, of which a text is its
    error's message.
    """

    def __init__(self, client: Any) -> None:
        self.inner = client
        self._plain = _is_plain(client)

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self.inner).__name__

    @property
    def batches(self) -> int:
        """The batches of its `trainloader`, 1 if it has none."""
        loader = getattr(self.inner, TRAINING, None)
        if isinstance(loader, Sized):
            return len(loader)
        return 1

    @property
    def evaluates(self) -> bool:
        """Whether it has an `evaluate` of its own: those of Flower's base classes evaluate
        nothing.
        """
        found = getattr(self.inner, "evaluate", None)
        return found is not None and not getattr(found, "__module__", "").startswith(f"{LIBRARY}.")

    def get_parameters(self) -> Any:
        """Return its arrays, None if it has no such method, or Flower's, which returns none."""
        if not hasattr(self.inner, "get_parameters"):
            return None
        if not self._plain:
            return self.inner.get_parameters(config={}) or None
        return self.inner.get_parameters(SimpleNamespace(config={})).parameters

    def fit(self, arrays: list[Array], config: dict[str, Any]) -> Any:
        """Return arrays, the number of samples, and metrics."""
        if not self._plain:
            return self.inner.fit(arrays, config)
        found = self.inner.fit(SimpleNamespace(parameters=_parameters(arrays), config=config))
        return _failure(found) or (
            _from_parameters(found.parameters),
            found.num_examples,
            found.metrics,
        )

    def evaluate(self, arrays: list[Array], config: dict[str, Any]) -> Any:
        """Return the loss, the number of samples, and metrics."""
        if not self._plain:
            return self.inner.evaluate(arrays, config)
        found = self.inner.evaluate(SimpleNamespace(parameters=_parameters(arrays), config=config))
        return _failure(found) or (found.loss, found.num_examples, found.metrics)


def _is_plain(client: Any) -> bool:
    """Return whether a client is a plain `Client`: by its class if it is of Flower's, else by what
    its `fit` takes.
    """
    for kind in type(client).__mro__:
        if kind.__module__.startswith(f"{LIBRARY}.") and kind.__name__ in ("NumPyClient", "Client"):
            return kind.__name__ == "Client"
    taken = inspect.signature(client.fit).parameters.values()
    return [each.kind for each in taken] == [inspect.Parameter.POSITIONAL_OR_KEYWORD]


def _failure(found: Any) -> str:
    """Return the message of a result that is an error, else ""."""
    status = getattr(found, "status", None)
    code = getattr(status, "code", 0)
    if getattr(code, "value", code) == 0:
        return ""
    return str(getattr(status, "message", "") or code)


def _parameters(arrays: list[Array]) -> Any:
    """Return arrays as Flower's `Parameters` has them."""
    return SimpleNamespace(tensors=[to_file(array) for array in arrays], tensor_type=NUMPY)


def _from_parameters(parameters: Any) -> list[Array]:
    return [from_file(tensor) for tensor in parameters.tensors]


def _config(settings: Mapping[str, float], *, epochs: int, global_round: int) -> dict[str, Any]:
    """Return what a client gets of a round: the settings, a batch size as an int, and the rest by
    Flower's names.
    """
    size = {"batch_size": int(settings["batch_size"])}
    return {
        **settings,
        **size,
        "epochs": epochs,
        "local_epochs": epochs,
        "server_round": global_round,
    }


def _in_order(arrays: Mapping[str, Array]) -> list[Array]:
    return [arrays[place] for place in sorted(arrays, key=int)]
