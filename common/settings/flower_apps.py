"""What an experiment takes from the `pyproject.toml` of a Flower app: its components, and its
settings.

The file is read once, where the experiment is: the experiment that nodes get has what it said.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Final

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.settings.tables import flat

APP: Final = "training.trainer.app"
COMPONENTS: Final = ("serverapp", "clientapp")
ROUNDS: Final = "num-server-rounds"
# in Flower's `run_config`: keys of the table `training`
OF_TRAINING: Final[Mapping[str, str]] = MappingProxyType(
    {"local-epochs": "epochs"}
    | {
        name.replace("_", "-"): name
        for name in ("batch_size", "learning_rate", "momentum", "weight_decay")
    }
)


def check_place(folder: str) -> None:
    """Check that an app's folder is below the current one: nodes get its name from others. Raises
    InvalidExperiment.
    """
    path = PurePosixPath(folder)
    if path.is_absolute() or ".." in path.parts:
        problem = "not below the folder in which commands start"
        remedy = 'Start them in the folder of the app, and write ".".'
        raise InvalidExperiment(APP, folder, problem, remedy)


def with_app(tree: Mapping[str, Any], table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an experiment's keys with what the app of its trainer's table has of them. Raises
    InvalidExperiment.

    What the experiment gives stays. The app's `num-server-rounds` are the rounds; its
    `local-epochs`, `batch-size`, `learning-rate`, `momentum` and `weight-decay` belong to the table
    `training`; the rest is `run_config`.
    """
    folder = table["app"]
    check_place(folder)
    components, config = _read(folder)
    given = table.get("run_config", {})
    training = tree["training"]
    of_training = {key: config.pop(name) for name, key in OF_TRAINING.items() if name in config}
    rounds = {"rounds": config.pop(ROUNDS)} if ROUNDS in config else {}
    if isinstance(given, Mapping):
        given = {**config, **given}
    trainer = {**components, **table, "run_config": given}
    return {**rounds, **tree, "training": {**of_training, **training, "trainer": trainer}}


def _read(folder: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the components of an app, and its settings by their dotted names. Raises
    InvalidExperiment.
    """
    path = Path(folder) / "pyproject.toml"
    try:
        found: Any = tomllib.loads(path.read_text(encoding="utf-8"))
        for key in ("tool", "flwr", "app"):
            found = found.get(key, {})
        components = {name: found["components"][name] for name in COMPONENTS}
        return components, flat(found.get("config", {}))
    except FileNotFoundError:
        problem = f"there is no {path}"
        remedy = "Name the folder of a Flower app, from where commands start."
    except (OSError, ValueError) as error:
        problem = f"{path} cannot be read ({error})"
        remedy = "Correct that file."
    except (KeyError, TypeError, AttributeError):
        names = " and ".join(COMPONENTS)
        problem = f"{path} has no [tool.flwr.app.components] with {names}"
        remedy = "Add them, as `flwr new` does."
    raise InvalidExperiment(APP, folder, problem, remedy)
