"""A client of a Flower app as a trainer: what a device does is its `fit`, as Flower's `NumPyClient` has it.

A client is made by `client_fn(context)` for each task, as Flower does, and so keeps nothing from one to the next. The
names are those of the API; `flwr` itself is imported by the user's file alone, if at all. Its arrays are named by their
places in the list, float32 or int64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Final, Never

import numpy as np

from common.experiment import own
from common.experiment.trainers import KEY, FlowerTrainer
from common.model.trainer import Array, Arrays, ArrayTrainer, LocalTask, Scored, Trained, TrainingSite

CLIENT: Final = f"{KEY}.client_fn"
LOSSES: Final = ("train_loss", "loss")  # in what `fit` returns
SCORES: Final = ("accuracy", "score")  # in what `evaluate_fn` returns


@dataclass
class Context:
    """What `client_fn` gets, with the fields of Flower's."""

    node_config: dict[str, Any]
    node_id: int = 0
    run_id: int = 0
    run_config: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


class ClientTrainer(ArrayTrainer):
    """Trains by the clients of a Flower app."""

    def __init__(self, settings: FlowerTrainer) -> None:
        """Import nothing yet: each node imports the functions that it calls."""
        self._settings = settings
        self._site: TrainingSite | None = None

    @property
    def evaluates(self) -> bool:
        """Whether there is an `evaluate_fn`."""
        return self._settings.evaluate_fn is not None

    def load(self, method: str) -> None:
        """Import the function that a method calls."""
        self._function({"initial": self._first, "evaluate": "evaluate_fn"}.get(method, "client_fn"))

    def initial(self, seed: int) -> Arrays:
        """Return the arrays of `initial()`, or of the first client's `get_parameters`."""
        if self._first == "initial":
            return _by_place(self._function("initial")())
        client = self._client(place=0, places=1)
        found = client.get_parameters(config={}) if hasattr(client, "get_parameters") else []
        if not found:
            self._refuse("its client has no get_parameters", f"Name a function of the arrays in {KEY}.initial.")
        return _by_place(found)

    def prepare(self, site: TrainingSite) -> int:
        """Return the length of the client's `trainloader.dataset`, else what a first `fit` reports."""
        self._site = site
        client = self._client(place=site.place, places=site.places)
        samples = getattr(getattr(client, "trainloader", None), "dataset", None)
        if samples is not None:
            return len(samples)
        config = _config(site.settings, epochs=site.epochs, global_round=1)
        _, count, _ = self._fit(client, list(self.initial(site.seed).values()), config)
        return count

    def train(self, arrays: dict[str, Array], task: LocalTask) -> Trained:
        """Return what `fit` returns: its `train_loss` or `loss`, and `steps`, are among its metrics."""
        site = self._site
        assert site is not None
        client = self._client(place=site.place, places=site.places)
        config = _config(task.settings, epochs=task.epochs, global_round=task.global_round)
        places = sorted(arrays, key=int)
        found, samples, metrics = self._fit(client, [arrays[place] for place in places], config)
        numbers = {name: value for name, value in metrics.items() if isinstance(value, float | int) and isfinite(value)}
        loss = next((metrics[name] for name in LOSSES if name in metrics), None)
        return Trained(_by_place(found), loss, int(numbers.get("steps", 1)), samples, numbers)

    def evaluate(self, arrays: dict[str, Array], data: Path) -> Scored:
        """Return the loss and the accuracy, or the score, of `evaluate_fn(server_round, arrays, config)`."""
        found = self._function("evaluate_fn")(0, [arrays[place] for place in sorted(arrays, key=int)], {})
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
            self._refuse(f"evaluate_fn returns {found!r:.60}", "Return the loss and a dict of metrics.")
        loss, metrics = found
        scores = [metrics[name] for name in SCORES if name in metrics]
        if not scores:
            self._refuse(f"evaluate_fn returns no {' or '.join(SCORES)} in its metrics", "Add one of them.")
        return Scored(int(metrics.get("num_examples", 1)), loss, scores[0])

    def _client(self, *, place: int, places: int) -> Any:
        """Return a new client, without the wrapper that its `to_client` puts around it."""
        context = Context({"partition-id": place, "num-partitions": places}, node_id=place)
        client = self._function("client_fn")(context)
        client = getattr(client, "numpy_client", client)
        if not hasattr(client, "fit"):
            self._refuse(f"returns {type(client).__name__}, which has no fit", "Return a NumPyClient.")
        return client

    def _fit(
        self, client: Any, arrays: list[Array], config: dict[str, Any]
    ) -> tuple[Sequence[Any], int, Mapping[str, Any]]:
        found = client.fit(arrays, config)
        if not (isinstance(found, tuple) and len(found) == 3 and isinstance(found[2], Mapping)):
            self._refuse(f"fit returns {type(found).__name__}", "Return the arrays, the number of samples, and a dict.")
        return found

    @property
    def _first(self) -> str:
        """The key of the function that knows the first arrays."""
        return "client_fn" if self._settings.initial is None else "initial"

    def _function(self, key: str) -> Any:
        return own.load(f"{KEY}.{key}", self._settings.code[f"{KEY}.{key}"])

    def _refuse(self, problem: str, remedy: str) -> Never:
        own.refuse(CLIENT, self._settings.client_fn, problem, remedy)


def _config(settings: Mapping[str, float], *, epochs: int, global_round: int) -> dict[str, Any]:
    return {**settings, "epochs": epochs, "local_epochs": epochs, "server_round": global_round}


def _by_place(arrays: Sequence[Any]) -> dict[str, Array]:
    return {str(place): np.asarray(array) for place, array in enumerate(arrays)}
