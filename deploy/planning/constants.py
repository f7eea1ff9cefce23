"""Costs of messages that `fedstrata plan --calibrate` measured on this machine, in a file that later plans read."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from common.errors import InvalidExperiment
from common.host.files import writing


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """Seconds of one core, as in `MachineSpeeds`, and the conditions under which they were measured.

    host: its name    measured: UTC, ISO 8601    load: mean number of other running processes in the minute before
    """

    message_s: float
    round_s: float
    byte_s: float
    host: str
    measured: str
    load: float

    def described(self) -> str:
        """Return the conditions as a sentence's end."""
        return f"measured on {self.host} at {self.measured}, under a load of {self.load:.1f}"


def default_file() -> Path:
    """Return the file of this machine: $XDG_CACHE_HOME/fedstrata/calibration.json, by default below ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fedstrata" / "calibration.json"


def read(path: Path | None) -> FittedCosts | None:
    """Return the costs of a file, by default this machine's, or None if it has none. Raises InvalidExperiment."""
    file = path or default_file()
    try:
        costs = FittedCosts(**json.loads(file.read_text(encoding="utf-8")))
        if not all(isinstance(each, float) and each >= 0 for each in (costs.message_s, costs.round_s, costs.byte_s)):
            raise ValueError("costs are not positive numbers")
        return costs
    except FileNotFoundError:
        if path is None:
            return None
        problem = "no such file"
    except OSError as error:
        problem = error.strerror or str(error)
    except (ValueError, TypeError):
        problem = "not a file of --calibrate"
    raise InvalidExperiment("--calibration", str(file), problem, "Measure with `fedstrata plan --calibrate`.")


def write(costs: FittedCosts, path: Path | None) -> Path:
    """Write the costs to a file, by default this machine's, and return it. Raises StorageFailed."""
    file = path or default_file()
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(costs), indent=2) + "\n", encoding="utf-8")
    return file
