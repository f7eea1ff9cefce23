"""A client of a Flower app as a trainer: a `NumPyClient`, or a plain `Client`, fits and evaluates as in Flower.

A client is made by `client_fn(context)` for each task, as Flower does; what persists is `context.state`. The names are
those of the API; `flwr` itself is imported by the user's file alone, if at all. Its arrays are named by their places in
the list, float32 or int64.
"""

from __future__ import annotations

import inspect
import io
import sys
from collections.abc import Mapping, MutableMapping, Sequence, Sized
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from math import isfinite
from types import SimpleNamespace
from typing import Any, Final, Never

import msgpack
import numpy as np

from common.experiment import own
from common.experiment.schema import Experiment
from common.experiment.trainers import KEY, OF_TRAINING, FlowerTrainer
from common.model.trainer import Array, Arrays, ArrayTrainer, LocalTask, Scored, Trained, TrainingSite

CLIENT: Final = f"{KEY}.client_fn"
LOSSES: Final = ("train_loss", "loss")  # in what `fit` returns
SCORES: Final = ("accuracy", "score")  # in what `evaluate` and `evaluate_fn` return
NUMPY: Final = "numpy.ndarray"  # the type of `Parameters` whose tensors are files of numpy's
LIBRARY: Final = "flwr"
STATES: Final = ("RecordDict", "RecordSet")  # the classes of `context.state`, in flwr.common; the latter before 1.17
FILE: Final = "context.state"


@dataclass
class Context:
    """What `client_fn` gets, with the fields of Flower's. `state` is Flower's own class if the app imports `flwr`."""

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
        self._first_config = _config(experiment.settings_in(0), epochs=experiment.training.epochs, global_round=1)
        self._site: TrainingSite | None = None
        self._scores = False  # whether the clients do

    @property
    def evaluates(self) -> bool:
        """Whether the clients of this device evaluate, or for the cloud there is an `evaluate_fn`."""
        return self._settings.evaluate_fn is not None if self._site is None else self._scores

    def load(self, method: str) -> None:
        """Import the function that a method calls."""
        evaluate = "evaluate_fn" if self._site is None else "client_fn"
        self._function({"initial": self._first, "evaluate": evaluate}.get(method, "client_fn"))

    def initial(self, seed: int) -> Arrays:
        """Return the arrays of `initial()`, or of the first client's `get_parameters`."""
        if self._first == "initial":
            return _by_place(self._function("initial")())
        found = self._made(self._context(self._first_config, place=0, places=1)).get_parameters()
        if not found:
            self._refuse("its client has no get_parameters", f"Name a function of the arrays in {KEY}.initial.")
        return _by_place(found)

    def prepare(self, site: TrainingSite) -> int:
        """Return the length of the client's `trainloader.dataset`, else what a first `fit` reports."""
        self._site = site
        client = self._made(self._context(self._first_config, place=site.place, places=site.places))
        self._scores = client.evaluates
        samples = getattr(getattr(client.inner, "trainloader", None), "dataset", None)
        if samples is not None:
            return len(samples)
        _, count, _ = self._fit(client, list(self.initial(site.seed).values()), dict(self._first_config))
        return count

    def train(self, arrays: dict[str, Array], task: LocalTask) -> Trained:
        """Return what `fit` returns: its `train_loss` or `loss`, and `steps`, are among its metrics.

        Without `steps` they are the batches of its `trainloader` in all epochs, or one for each epoch.
        """
        config = _config(task.settings, epochs=task.epochs, global_round=task.global_round)
        client, context = self._client(task, config)
        found, samples, metrics = self._fit(client, _in_order(arrays), config)
        self._keep(context, task)
        numbers = {name: float(value) for name, value in metrics.items() if _finite(value)}
        loss = next((metrics[name] for name in LOSSES if name in metrics), None)
        steps = int(numbers.get("steps", task.epochs * client.batches))
        return Trained(_by_place(found), loss, steps, samples, numbers)

    def evaluate(self, arrays: dict[str, Array], task: LocalTask) -> Scored:
        """Return the loss and the accuracy, or the score, of a device's client; at the cloud of the `evaluate_fn`."""
        if self._site is None:
            found = self._function("evaluate_fn")(task.global_round, _in_order(arrays), {})
            loss, metrics = self._checked(found, "evaluate_fn", "the loss and a dict of metrics", count=2)
            return Scored(int(metrics.get("num_examples", 1)), loss, self._score(metrics, "evaluate_fn"))
        epochs = task.epochs or self._site.epochs  # of the client; none are trained here
        config = _config(task.settings, epochs=epochs, global_round=task.global_round)
        client, context = self._client(task, config)
        found = client.evaluate(_in_order(arrays), config)
        loss, samples, metrics = self._checked(
            found, "evaluate", "the loss, the number of samples, and a dict", count=3
        )
        self._keep(context, task)
        return Scored(samples, loss, self._score(metrics, "evaluate"))

    def _client(self, task: LocalTask, config: Mapping[str, Any]) -> tuple[_Client, Context]:
        """Return a new client for a task, and its context, with the state that the last task left."""
        site, file = self._site, task.state / FILE
        assert site is not None
        context = self._context(config, place=site.place, places=site.places)
        if file.exists():
            for name, value in _unpacked(msgpack.unpackb(file.read_bytes(), strict_map_key=False)).items():
                context.state[name] = value
        return self._made(context), context

    def _made(self, context: Context) -> _Client:
        """Return a new client, without the wrapper that a NumPyClient's `to_client` puts around it."""
        client = self._function("client_fn")(context)
        client = getattr(client, "numpy_client", client)
        if not hasattr(client, "fit"):
            self._refuse(f"returns {type(client).__name__}, which has no fit", "Return a NumPyClient or a Client.")
        return _Client(client)

    def _context(self, config: Mapping[str, Any], *, place: int, places: int) -> Context:
        self._function("client_fn")  # which imports flwr, if at all
        state: MutableMapping[str, Any] = {}
        if LIBRARY in sys.modules:
            common = import_module(f"{LIBRARY}.common")
            state = next(getattr(common, name) for name in STATES if hasattr(common, name))()
        run_config = {**self._settings.run_config, **{name: config[key] for name, key in OF_TRAINING.items()}}
        node_config = {"partition-id": place, "num-partitions": places}
        return Context(node_config, state, run_config, node_id=place)

    def _keep(self, context: Context, task: LocalTask) -> None:
        """Write the state of a client into the folder of the task."""
        try:
            packed = msgpack.packb(_packed(dict(context.state), "context.state"))
        except TypeError as error:
            remedy = "Put numbers, texts, bytes, numpy arrays, lists and dicts of them, or Flower's records there."
            self._refuse(str(error), remedy)
        if context.state or (task.state / FILE).exists():
            (task.state / FILE).write_bytes(packed)

    def _fit(
        self, client: _Client, arrays: list[Array], config: dict[str, Any]
    ) -> tuple[Sequence[Any], int, Mapping[str, Any]]:
        found = client.fit(arrays, config)
        arrays, samples, metrics = self._checked(found, "fit", "the arrays, the number of samples, and a dict", count=3)
        return arrays, samples, metrics

    def _checked(self, found: Any, method: str, wanted: str, *, count: int) -> Any:
        """Return what a function of the app returned, if it is a tuple that ends with metrics."""
        if isinstance(found, str):
            self._refuse(f"{method} fails: {found[:200]}", "Correct it.")
        if not (isinstance(found, tuple) and len(found) == count and isinstance(found[-1], Mapping)):
            self._refuse(f"{method} returns {found!r:.60}", f"Return {wanted}.")
        return found

    def _score(self, metrics: Mapping[str, Any], method: str) -> Any:
        scores = [metrics[name] for name in SCORES if name in metrics]
        if not scores:
            self._refuse(f"{method} returns no {' or '.join(SCORES)} in its metrics", "Add one of them.")
        return scores[0]

    @property
    def _first(self) -> str:
        """The key of the function that knows the first arrays."""
        return "client_fn" if self._settings.initial is None else "initial"

    def _function(self, key: str) -> Any:
        return own.load(f"{KEY}.{key}", self._settings.code[f"{KEY}.{key}"])

    def _refuse(self, problem: str, remedy: str) -> Never:
        own.refuse(CLIENT, self._settings.client_fn, problem, remedy)


class _Client:
    """One interface to both kinds of clients: that of a `NumPyClient`.

    A plain `Client` has methods of one argument and of Flower's records, of which a text is its error's message.
    """

    def __init__(self, client: Any) -> None:
        self.inner = client
        self._plain = len(inspect.signature(self.inner.fit).parameters) == 1

    @property
    def batches(self) -> int:
        """The batches of its `trainloader`, 1 if it has none."""
        loader = getattr(self.inner, "trainloader", None)
        return len(loader) if isinstance(loader, Sized) else 1

    @property
    def evaluates(self) -> bool:
        """Whether it has an `evaluate` of its own: those of Flower's base classes evaluate nothing."""
        found = getattr(self.inner, "evaluate", None)
        return found is not None and not getattr(found, "__module__", "").startswith(f"{LIBRARY}.")

    def get_parameters(self) -> list[Any]:
        """Return its arrays, none if it has no such method."""
        if not hasattr(self.inner, "get_parameters"):
            return []
        if not self._plain:
            return list(self.inner.get_parameters(config={}))
        return _from_parameters(self.inner.get_parameters(SimpleNamespace(config={})).parameters)

    def fit(self, arrays: list[Array], config: dict[str, Any]) -> Any:
        """Return arrays, the number of samples, and metrics."""
        if not self._plain:
            return self.inner.fit(arrays, config)
        found = self.inner.fit(SimpleNamespace(parameters=_parameters(arrays), config=config))
        return _failure(found) or (_from_parameters(found.parameters), found.num_examples, found.metrics)

    def evaluate(self, arrays: list[Array], config: dict[str, Any]) -> Any:
        """Return the loss, the number of samples, and metrics."""
        if not self._plain:
            return self.inner.evaluate(arrays, config)
        found = self.inner.evaluate(SimpleNamespace(parameters=_parameters(arrays), config=config))
        return _failure(found) or (found.loss, found.num_examples, found.metrics)


def _failure(found: Any) -> str:
    """Return the message of a result that is an error, else ""."""
    status = getattr(found, "status", None)
    code = getattr(status, "code", 0)
    return "" if getattr(code, "value", code) == 0 else str(getattr(status, "message", "") or code)


def _parameters(arrays: list[Array]) -> Any:
    """Return arrays as Flower's `Parameters` has them."""
    return SimpleNamespace(tensors=[_to_file(array) for array in arrays], tensor_type=NUMPY)


def _from_parameters(parameters: Any) -> list[Array]:
    return [_from_file(tensor) for tensor in parameters.tensors]


def _to_file(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _from_file(data: bytes) -> Array:
    found: Array = np.load(io.BytesIO(data), allow_pickle=False)
    return found


def _packed(value: Any, name: str) -> Any:
    """Return a value as msgpack has it; `name`: its own, for the error. Raises TypeError.

    A list is the list of a tag and its contents, so that each type is read as it was written.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return ["array" if isinstance(value, np.ndarray) else "number", _to_file(value)]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_packed(one, f"{name}[{place}]") for place, one in enumerate(value)]]
    its = f"{type(value).__module__}:{type(value).__qualname__}"
    flowers = its.startswith(f"{LIBRARY}.")
    if isinstance(value, Mapping) and (flowers or type(value) is dict):
        items = [[_packed(key, name), _packed(one, f"{name}[{key!r}]")] for key, one in value.items()]
        return ["dict" if type(value) is dict else its, items]
    if flowers and is_dataclass(value):
        each = fields(value)
        return [its, {one.name: _packed(getattr(value, one.name), f"{name}.{one.name}") for one in each if one.init}]
    raise TypeError(f"{name} is {type(value).__name__}, which does not persist")


def _unpacked(value: Any) -> Any:
    """Return the value of `_packed`."""
    if not isinstance(value, list):
        return value
    its, content = value
    if its in ("array", "number"):
        return _from_file(content) if its == "array" else _from_file(content)[()]
    if its in ("list", "tuple"):
        return [*map(_unpacked, content)] if its == "list" else tuple(map(_unpacked, content))
    module, _, name = its.partition(":")
    kind: Any = dict if its == "dict" else getattr(import_module(module), name)
    if isinstance(content, dict):
        return kind(**{key: _unpacked(one) for key, one in content.items()})
    found = kind()
    for key, one in content:
        found[_unpacked(key)] = _unpacked(one)
    return found


def _finite(value: Any) -> bool:
    return isinstance(value, float | int | np.number) and isfinite(value)


def _config(settings: Mapping[str, float], *, epochs: int, global_round: int) -> dict[str, Any]:
    """Return what a client gets of a round: the settings, a batch size as an int, and the rest by Flower's names."""
    size = {"batch_size": int(settings["batch_size"])}
    return {**settings, **size, "epochs": epochs, "local_epochs": epochs, "server_round": global_round}


def _in_order(arrays: Mapping[str, Array]) -> list[Array]:
    return [arrays[place] for place in sorted(arrays, key=int)]


def _by_place(arrays: Sequence[Any]) -> dict[str, Array]:
    return {str(place): np.asarray(array) for place, array in enumerate(arrays)}
