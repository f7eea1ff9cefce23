"""A run's folder, read into records: the one place that knows what its files look like to a reader.

A run may be under way or killed: a last line that was cut is left out, a file that is not there yet has no rows, and
what `state` says comes from the last word in events.jsonl and from whether a process still holds the folder.
"""

from __future__ import annotations

import csv
import io
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from cloud.results import DIRECT, held
from common.errors import InvalidExperiment
from common.experiment.reading import parse, rename_keys
from common.experiment.topology import Topology
from deploy.runs.records import (
    COUNTS,
    PREDICTION,
    RENAMED,
    DeviceRecord,
    Event,
    GlobalRoundRecord,
    LinkRecord,
    Prediction,
    number,
    read_device,
    read_link,
    read_round,
    renamed,
)

LIFE: Final = ("run", "finished", "failed")  # the events that change a run's state

T = TypeVar("T")


class State(StrEnum):
    """How a run stands. Interrupted: nobody writes it, and it neither finished nor failed."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class Run:
    """A run's folder; each file is read when it is first asked for. Raises InvalidExperiment where it cannot be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: Mapping[str, Any] = self._json("manifest.json")
        self.id = str(self.manifest.get("run", path.name))
        self.started = str(self.manifest.get("started", ""))
        self.direct = DIRECT in self.manifest

    @cached_property
    def tree(self) -> Mapping[str, Any]:
        """Return the experiment's keys, with this release's defaults where it still reads them, else as they stand."""
        try:
            read = tomllib.loads((self.path / "experiment.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._damaged("experiment.toml", str(error)) from None
        try:
            rename_keys(read)
            return parse(read).model_dump(mode="json", exclude_none=True)
        except InvalidExperiment:
            return read

    @property
    def name(self) -> str:
        """Return the experiment's name."""
        return str(self.tree.get("name", ""))

    @property
    def seed(self) -> Any:
        """Return the experiment's seed."""
        return self.tree.get("seed")

    @cached_property
    def rounds(self) -> Sequence[GlobalRoundRecord]:
        """Return the global rounds done."""
        return self._rows("rounds.csv", read_round)

    @cached_property
    def links(self) -> Sequence[LinkRecord]:
        """Return each link's direction by kind, and what the parents' connections carried."""
        return self._rows("links.csv", read_link)

    @cached_property
    def devices(self) -> Sequence[DeviceRecord]:
        """Return each device's work in each global round."""
        return self._rows("devices.csv", read_device)

    @cached_property
    def events(self) -> Sequence[Event]:
        """Return what happened, without lines that a kill cut short."""
        return list(self._events(""))

    @cached_property
    def partition(self) -> Mapping[str, Any] | None:
        """Return what partition.json says, if it is there: of each of `devices` its `institution` and `by_class`."""
        if not (self.path / "partition.json").exists():
            return None
        told = self._json("partition.json")
        try:
            for held in told["devices"].values():
                if not all(isinstance(count, int) and count >= 0 for count in held["by_class"]):
                    raise ValueError(held["by_class"])
                str(held["institution"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise self._damaged("partition.json", repr(error)) from None
        return told

    @cached_property
    def prediction(self) -> Prediction | None:
        """Return what was foretold, if it was."""
        if not (self.path / PREDICTION).exists():
            return None
        told = self._json(PREDICTION)
        try:
            seconds, bytes_ = (
                {str(key): number(value) for key, value in told.get(part, {}).items()} for part in ("seconds", "bytes")
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise self._damaged(PREDICTION, str(error)) from None
        return Prediction(seconds, bytes_)

    @cached_property
    def state(self) -> State:
        """Return how the run stands now."""
        last = ""
        for event in self._events(*(f'"event": "{name}"' for name in LIFE)):
            last = event.name if event.name in LIFE else last
        if last == State.FINISHED:
            return State.FINISHED
        if held(self.path):
            return State.RUNNING
        return State.FAILED if last == State.FAILED else State.INTERRUPTED

    @cached_property
    def children(self) -> Mapping[str, Sequence[str]]:
        """Return each institution's devices, as the experiment says; else those that worked."""
        try:
            return Topology.model_validate(self.tree.get("topology", {})).children()
        except ValidationError:
            homes = {work.device: work.institution for work in self.devices}
            return {home: [device for device in homes if homes[device] == home] for home in set(homes.values())}

    @property
    def global_rounds(self) -> int:
        """Return how many global rounds were wanted."""
        wanted = self.tree.get("rounds")
        return wanted if isinstance(wanted, int) else 0

    @property
    def accuracy(self) -> float | None:
        """Return the last accuracy known."""
        return next((row.accuracy for row in reversed(self.rounds) if row.accuracy is not None), None)

    @property
    def seconds(self) -> float:
        """Return the seconds of the global rounds done."""
        return self.rounds[-1].elapsed_s if self.rounds else 0.0

    @property
    def totals(self) -> dict[str, int]:
        """Return the bytes of the global rounds done, by tier and direction."""
        return {name: sum(row.bytes_[name] for row in self.rounds) for name in COUNTS}

    def _json(self, name: str) -> Mapping[str, Any]:
        try:
            found = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise self._damaged(name, getattr(error, "strerror", None) or str(error)) from None
        if not isinstance(found, dict):
            raise self._damaged(name, "not an object")
        return found

    def _events(self, *marks: str) -> Iterator[Event]:
        """Yield the events whose line has one of the marks; one that was cut, also in mid-file, is left out."""
        for line in self._text("events.jsonl").split("\n"):
            if any(mark in line for mark in marks):
                try:
                    facts = json.loads(line)
                    time, name = str(facts.pop("time")), str(facts.pop("event"))
                    yield Event(time, RENAMED.get(name, name), renamed(facts))
                except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
                    continue

    def _rows(self, name: str, read: Callable[[Mapping[str, str]], T]) -> list[T]:
        """Return a table's rows; the last, if it was cut, is left out, any other that cannot be read is an error."""
        text = self._text(name)
        lines = io.StringIO(text[: text.rfind("\n") + 1], newline="")
        found: list[T] = []
        try:
            for row in csv.DictReader(lines, strict=True):
                try:
                    found.append(read(renamed(row)))
                except (KeyError, ValueError, TypeError) as error:
                    raise self._damaged(name, f"row {len(found) + 1}: {error!r}") from None
        except csv.Error as error:
            raise self._damaged(name, f"row {len(found) + 1}: {error}") from None
        return found

    def _text(self, name: str) -> str:
        try:
            return (self.path / name).read_bytes().decode(errors="replace")
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise self._damaged(name, error.strerror or str(error)) from None

    def _damaged(self, name: str, problem: str) -> InvalidExperiment:
        return InvalidExperiment("RUN", str(self.path / name), problem, "Name the folder of a run, or repair the file.")


def find(text: str, root: Path) -> Path:
    """Return the folder that is meant: itself, or the one below `root` whose name, id or id's end begins so.

    Raises InvalidExperiment where none or several do.
    """
    if (Path(text) / "manifest.json").is_file():
        return Path(text)
    matching = [
        path
        for path in (folders(root) if root.is_dir() else ())
        for words in [path.name.split("-")]
        if text and any(name.startswith(text) for name in (path.name, f"{words[0]}-{words[-1]}", words[-1]))
    ]
    if len(matching) == 1:
        return matching[0]
    among = f"below {root}" if not matching else ", ".join(path.name for path in matching[:5])
    problem = "no run's folder, and no run's id begins so" if not matching else f"{len(matching)} runs begin so"
    raise InvalidExperiment("RUN", text, f"{problem} ({among})", "See: fedstrata runs list.")


def folders(root: Path) -> list[Path]:
    """Return the runs' folders below `root`, the oldest first. Raises InvalidExperiment."""
    try:
        return sorted(path for path in root.iterdir() if (path / "manifest.json").is_file())
    except OSError as error:
        raise InvalidExperiment("--runs", str(root), error.strerror or str(error), "Name another folder.") from None
