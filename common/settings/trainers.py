"""What trains a model on devices: fedstrata's SGD on a PyTorch module, a trainer of the user's own,
a Flower app.

A trainer that is not fedstrata's brings its arrays and reads its samples, so the tables of the data
and the model have its name, and it knows its test samples. Its code is in
`common/training/array_trainer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.settings.data import CLASSES, PARTS, Data, ModelSettings
from fedstrata.common.settings.flower_apps import OF_TRAINING, ROUNDS, check_place, with_app
from fedstrata.common.settings.own import OwnName, OwnSettings, is_own
from fedstrata.common.settings.tables import (
    Refused,
    Selected,
    SettingsTable,
    check_table,
    form,
    place_of,
)

TRAINER_KEY: Final = "training.trainer"
PARTITION: Final = "private"  # every device has samples of its own
OWN_SAMPLES: Final = "own"  # of `evaluation.data`: the trainer knows its test samples
Rounds = dict[
    Annotated[str, form(r"^[1-9]\d{0,11}$", "the number of a global round, from 1")], float
]
NUMBER: Final = r"^[A-Za-z_]\w*$"  # with {0,63} its automaton takes 10 MB, and 40 ms of each start
NumberName = Annotated[
    str, form(NUMBER, "a name of letters, digits and _, no digit first"), Field(max_length=64)
]
ByRound = dict[NumberName, Rounds]


class TrainerTable(SettingsTable):
    """The settings of a trainer."""

    # Whether it trains `model` on `data` by the loss and the objective.
    learns_module: ClassVar[bool] = False
    # Whether a device has state that persists between its tasks.
    remembers: ClassVar[bool] = False

    name: str  # the trainer

    @property
    def code(self) -> Mapping[str, str]:
        """The names of the user's own code, by key, that of the trainer first."""
        return {}

    @property
    def folder(self) -> str:
        """Where its code is, "" if it is where commands start or on the path of Python."""
        return ""

    @property
    def whose(self) -> str:
        """The name that stands for its model and its samples."""
        return next(iter(self.code.values()))


class SgdTrainer(TrainerTable):
    """SGD on a PyTorch module, on samples of a data set, by a loss and an objective."""

    learns_module = True

    name: Literal["sgd"] = "sgd"  # the trainer


OF_APP: Final[tuple[str, ...]] = ("clientapp", "serverapp")  # what an app names
OF_CLIENT: Final[tuple[str, ...]] = ("client_fn", "initial", "evaluate_fn")  # in place of an app


class FlowerTrainer(TrainerTable):
    """A Flower app: `app`, or the `client_fn` of a `NumPyClient` or a `Client`.

    A `client_fn` needs `flwr` only if its file imports it.
    """

    remembers = True  # `context.state`

    name: Literal["flower"] = "flower"  # the trainer
    # The folder of an app with `@app.train`, below the one in which commands start; its
    # `pyproject.toml` gives the next two, `run_config`, and what the experiment does not set of
    # `rounds` and `[training]`.
    app: str | None = None
    # the app's ServerApp, of whose strategy only the first message is used
    serverapp: OwnName | None = None
    clientapp: OwnName | None = None  # the app's ClientApp, which trains and evaluates
    # The metric of the app's `@app.evaluate` that is the score; not set: `accuracy`, else one with
    # `acc` or `score`.
    score: str | None = None
    # in place of `app`: the function that makes a client of a context
    client_fn: OwnName | None = None
    # The function that returns the first arrays; not set: the client's `get_parameters`.
    initial: OwnName | None = None
    # The function by which the cloud evaluates, as in a strategy of Flower's; not set: it does not
    # evaluate.
    evaluate_fn: OwnName | None = None
    # The app's settings that clients find in `context.run_config`, besides `local-epochs`,
    # `batch-size`, `learning-rate`, `momentum` and `weight-decay`, which are those of `[training]`.
    run_config: dict[str, bool | int | float | str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _given_once(self) -> Self:
        keys = {name: f"training.{key}" for name, key in OF_TRAINING.items()}
        for name, key in (keys | {ROUNDS: "rounds"}).items():
            if name in self.run_config:
                at = f"{TRAINER_KEY}.run_config.{name}"
                problem = f"clients have it from {key}"
                remedy = f"Omit it, and set {key}."
                raise InvalidExperiment(at, self.run_config[name], problem, remedy)
        return self

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        if self.app is not None:
            check_place(self.app)
        check_table(TRAINER_KEY, self, self._refused())
        return self

    def _refused(self) -> Refused:
        if self.app is None and self.client_fn is None:
            yield "client_fn", "neither it nor app is set", "Set one of them."
        whose = "client_fn" if self.app is None else "app"
        others = (*OF_APP, "score") if self.app is None else OF_CLIENT
        for key in others:
            if getattr(self, key) is not None:
                yield key, f"has no effect beside {whose}", "Omit one of them."

    @property
    def code(self) -> Mapping[str, str]:
        """The names of its functions, or of the parts of its app."""
        keys = OF_CLIENT if self.app is None else OF_APP
        found = {key: getattr(self, key) for key in keys}
        return {f"{TRAINER_KEY}.{key}": name for key, name in found.items() if name is not None}

    @property
    def folder(self) -> str:
        """The folder of its app."""
        if self.app is None:
            return ""
        return str(Path(self.app).resolve())


class OwnTrainer(TrainerTable, OwnSettings):
    """A trainer of the user's own; the other keys are its keywords."""

    remembers = True  # it may have a state

    name: OwnName  # the class, `package.module:Name`

    @property
    def code(self) -> Mapping[str, str]:
        """The name of its class."""
        return {f"{TRAINER_KEY}.name": self.name}


TRAINERS: Final[Mapping[str, type[TrainerTable]]] = MappingProxyType(
    {"sgd": SgdTrainer, "flower": FlowerTrainer}
)

TrainerSettings = Annotated[
    TrainerTable, Selected(TRAINERS, "fedstrata.common.settings.trainers:OwnTrainer", "trainers")
]


def with_trainer(tree: Any) -> Any:
    """Return an experiment's keys with the data, the model and the test samples of a trainer that
    brings its own.
    """
    training = tree.get("training", {}) if isinstance(tree, Mapping) else None
    if not isinstance(training, Mapping):
        return tree
    data = tree.get("data", {})
    model = tree.get("model", {})
    table = training.get("trainer", {"name": "sgd"})
    if not all(isinstance(each, Mapping) for each in (data, model, table)):
        return tree
    name = table.get("name")
    if name == "flower":
        if isinstance(table.get("app"), str) and not table.keys() >= {*OF_APP}:
            tree = with_app(tree, table)
            table = tree["training"]["trainer"]
        code = "clientapp" if "app" in table else "client_fn"
        name = table.get(code)
    elif name not in TRAINERS:
        name = place_of("trainers", name)
    if not isinstance(name, str) or not is_own(name):  # sgd, or an error of the table itself
        return tree
    own = {
        "data": {"dataset": name, "partition": PARTITION, **data},
        "model": {"name": name, **model},
    }
    evaluation = tree.get("evaluation", {})
    if isinstance(evaluation, Mapping) and evaluation.get("at") in ("devices", "both"):
        own["evaluation"] = {"data": OWN_SAMPLES, **evaluation}
    return {**tree, **own}


def check_trainer(trainer: TrainerTable, data: Data, model: ModelSettings) -> None:
    """Check that a trainer that brings its own has no other data and model. Raises
    InvalidExperiment.
    """
    if trainer.learns_module:
        return
    check_table("data", data, _refused_data(data, trainer.whose))
    check_table("model", model, _refused_model(model, trainer.whose))
    for key in PARTS:
        if patterns := getattr(model, key):
            problem = f"{TRAINER_KEY} {trainer.whose} trains all of its arrays"
            raise InvalidExperiment(f"model.{key}", ", ".join(patterns), problem, "Omit it.")


def _refused_data(data: Data, whose: str) -> Refused:
    wanted = {"dataset": whose, "partition": PARTITION, "targets": CLASSES}
    for key in sorted(data.model_fields_set - {"root"}):
        usual = Data.model_fields[key].get_default(call_default_factory=True)
        if getattr(data, key) != wanted.get(key, usual):
            yield key, f"{TRAINER_KEY} {whose} reads its samples from data.root", "Omit it."


def _refused_model(model: ModelSettings, whose: str) -> Refused:
    problem = f"{TRAINER_KEY} {whose} has its arrays"
    if model.name != whose:
        yield "name", problem, "Omit it."
    if not model.same_initial:
        yield "same_initial", problem, "Omit it."
