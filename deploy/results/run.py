"""Reader of a run's folder: the only module that knows the format of its files.

Those of a kept run are in its sweep's table (`kept_table.py`).

A run may still be running, or may have been killed: a truncated last line is skipped, and a missing
file has no rows. The state follows from the last event in events.jsonl and from whether a process
still locks the folder.
"""

from __future__ import annotations

import csv
import errno
import json
import os
import shutil
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from fedstrata.cloud.records import DeviceRecord, GlobalRoundRecord, LinkRecord, Record, rows_of
from fedstrata.cloud.run_folder import DIRECT, HELD, SIMULATED, check_format, held
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import recorded
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.experiment.short_form import as_written
from fedstrata.common.host.files import writing
from fedstrata.common.lazy import npt
from fedstrata.deploy.results.cells import CellOrder, CellPlace
from fedstrata.deploy.results.kept_table import CELL, SWEEP, kept_in, texts_of

if TYPE_CHECKING:
    from pandas import DataFrame

STARTED: Final = "%Y%m%dT%H%M%SZ"
STATE_EVENTS: Final = ("run", "finished", "failed")  # the events that change a run's state
COMMIT: Final = "commit"  # in a manifest: of the source that ran

_R = TypeVar("_R", bound=Record)
_T = TypeVar("_T")


def columns_of(tiers: Sequence[str]) -> list[str]:
    """Return the columns of rounds.csv with the bytes of these tiers."""
    return [f"{tier}_{way}_bytes" for tier in tiers for way in ("up", "down")]


def seconds_of(runs: Iterable[Run]) -> str:
    """Return the unit of the seconds of some runs: whether they are simulated."""
    kinds = {run.simulated for run in runs}
    if kinds == {True, False}:
        return "s, some simulated"
    return "simulated s" if kinds == {True} else "s"


def tiers_of(runs: Iterable[Run]) -> list[str]:
    """Return the tiers of some runs, in order."""
    return list(dict.fromkeys(tier for run in runs for tier in run.tiers))


def largest_epsilon(rows: Sequence[GlobalRoundRecord]) -> float | None:
    """Return the largest epsilon of the tiers after the last global round, infinite without noise;
    None without privacy.
    """
    found = list(rows[-1].epsilon.values()) if rows else []
    if None in found:
        return inf
    return max((each for each in found if each is not None), default=None)


class State(StrEnum):
    """State of a run. Interrupted: no process writes it, and it has neither finished nor failed."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Event:
    """A line of events.jsonl."""

    time: str
    name: str
    facts: Mapping[str, Any]


class Run:
    """A run's folder, or a kept run. Each file is read on first access.

    Raises InvalidExperiment if a file cannot be read, or the folder has another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept = texts_of(path)
        self.manifest: Mapping[str, Any] = self._json("manifest.json")
        if self._kept is None:  # kept runs are brought along by whoever changes the format
            check_format(self.manifest, path, key="RUN")
        self.id = str(self.manifest.get("run", path.name))
        self.started = str(self.manifest.get("started", ""))
        self.direct = DIRECT in self.manifest
        self.simulated = SIMULATED in self.manifest

    @property
    def kind(self) -> tuple[bool, bool]:
        """Whether it has no network, and whether a simulated one."""
        return self.direct, self.simulated

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment."""
        try:
            return recorded(tomllib.loads(self._content(HELD).decode()))
        except InvalidExperiment as error:
            raise self._damaged(HELD, str(error).removesuffix(".")) from None
        except (OSError, ValueError) as error:
            raise self._damaged(
                HELD, getattr(error, "strerror", None) or f"not TOML: {error}"
            ) from None

    @cached_property
    def tree(self) -> Mapping[str, Any]:
        """The experiment's keys, completed by defaults."""
        return as_written(self.experiment)

    @property
    def text(self) -> str:
        """The experiment, TOML."""
        return self._text(HELD)

    @property
    def ending(self) -> str:
        """The random end of its id, by which runs of one name differ."""
        return self.id.rpartition("-")[2]

    def file_name(self, name: str) -> str:
        """Return the name of a figure's file, which is unique to the run."""
        return f"{name}-{self.ending}"

    @property
    def seed(self) -> int:
        """The experiment's seed."""
        return self.experiment.seed

    @cached_property
    def rounds(self) -> Sequence[GlobalRoundRecord]:
        """The completed global rounds."""
        return self._rows("rounds.csv", GlobalRoundRecord)

    @cached_property
    def links(self) -> Sequence[LinkRecord]:
        """The rows of links.csv: each direction of each link by kind, and the parents'
        connections.
        """
        return self._rows("links.csv", LinkRecord)

    @cached_property
    def devices(self) -> Sequence[DeviceRecord]:
        """Each device's work in each global round."""
        return self._rows("devices.csv", DeviceRecord)

    @cached_property
    def events(self) -> Sequence[Event]:
        """The events, without truncated lines."""
        return list(self._events(""))

    @cached_property
    def partition(self) -> Mapping[str, Any] | None:
        """The content of partition.json, or None: for each of `devices` its `parent`, and
        `by_class` or `by_bin`.
        """
        if not (self.path / "partition.json").exists():
            return None
        content = self._json("partition.json")
        try:
            for device in content["devices"].values():
                counts = device["by_bin"] if "by_bin" in device else device["by_class"]
                possible = all(isinstance(count, int) and count >= 0 for count in counts)
                if not possible or not isinstance(device["parent"], str):
                    raise ValueError(device)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise self._damaged("partition.json", repr(error)) from None
        return content

    @cached_property
    def state(self) -> State:
        """The run's current state."""
        marks = [f'"event": "{name}"' for name in STATE_EVENTS]
        names = [event.name for event in self._events(*marks) if event.name in STATE_EVENTS]
        last = names[-1] if names else ""
        if last == State.FINISHED:
            return State.FINISHED
        if held(self.path):
            return State.RUNNING
        if last == State.FAILED:
            return State.FAILED
        return State.INTERRUPTED

    @property
    def reason(self) -> str:
        """Why the run failed; empty if it did not."""
        if self.state is not State.FAILED:
            return ""
        *_, last = self._events(f'"event": "{State.FAILED}"')
        return str(last.facts.get("reason", ""))

    @property
    def cell(self) -> str:
        """The sweep's name of the run's cell, such as `IID, FedAvg`; empty outside of a sweep's
        folder.
        """
        if self._kept is not None:
            return str(self.manifest[CELL])
        names = self._sweep.get("cells", {})
        if not isinstance(names, Mapping):
            raise self._damaged(f"../{SWEEP}", "no table of cells")
        return str(names.get(self.manifest.get("experiment_digest"), ""))

    @cached_property
    def place(self) -> CellPlace | None:
        """The place of its cell in its sweep, None outside of a sweep's folder."""
        try:
            order = CellOrder.read(self._sweep)
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"../{SWEEP}", f"order: {error!r}") from None
        if order is None:
            return None
        return order.place(self.cell)

    @cached_property
    def _sweep(self) -> Mapping[str, Any]:
        file = self.path.resolve().parent / SWEEP
        if file.exists():
            return self._parsed(f"../{SWEEP}", file.read_bytes)
        return {}

    @property
    def aggregation(self) -> str:
        """The rules of the tiers from the cloud down, such as `fedcross + fedavg`."""
        return " + ".join(tier.aggregation.name for tier in self.experiment.tiers)

    def frame(self, table: Literal["rounds", "links", "devices"]) -> DataFrame:
        """Return a table as a pandas data frame; what is not known is missing. Raises
        InvalidExperiment.
        """
        from pandas import DataFrame

        return DataFrame([record.values() for record in getattr(self, table)])

    def model(self, *, best: bool = False) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of the final model by name, or of the best one, which `stop.best`
        keeps.

        Raises InvalidExperiment if the run has none.
        """
        from safetensors.numpy import load_file

        path = self.path / ("best.safetensors" if best else "model.safetensors")
        if not path.exists():
            raise InvalidExperiment(
                "RUN", str(path), "no such file", "A run has it when it has finished."
            )
        return load_file(path)

    @property
    def began(self) -> datetime | None:
        """When the run was started, None if that is unknown."""
        try:
            return datetime.strptime(self.started, STARTED).replace(tzinfo=UTC)
        except ValueError:
            return None

    def age_s(self, now: float) -> float | None:
        """Return the seconds since the run was started, None if that is unknown."""
        if (began := self.began) is None:
            return None
        return now - began.timestamp()

    def delete(self) -> None:
        """Remove the folder. Raises InvalidExperiment for a kept run, and while a process writes,
        StorageFailed.
        """
        if self._kept is not None:
            raise InvalidExperiment(
                "RUN", str(self.path), "a row of kept runs, no folder", "Edit the table."
            )
        if held(self.path):
            raise InvalidExperiment("RUN", str(self.path), "still running", "Stop it first.")
        with writing(self.path):
            shutil.rmtree(self.path)

    @property
    def tiers(self) -> Sequence[str]:
        """The names of the tiers, from the cloud down."""
        return self.experiment.tier_names

    def last(self, value: Callable[[GlobalRoundRecord], _T | None]) -> _T | None:
        """Return the last known one of a value of the global rounds, or None."""
        for row in reversed(self.rounds):
            found = value(row)
            if found is not None:
                return found
        return None

    @property
    def accuracy(self) -> float | None:
        """The last known accuracy, or None."""
        return self.last(lambda row: row.accuracy)

    @property
    def score(self) -> float | None:
        """The last known score, or None."""
        return self.last(lambda row: row.score)

    @property
    def loss(self) -> float | None:
        """The test loss of the last known score, or None."""
        scored = [row for row in self.rounds if row.score is not None]
        if scored:
            return scored[-1].loss
        return None

    def of_devices(self, statistic: str, *, personalised: bool = False) -> float | None:
        """Return the last known one of the devices' STATISTICS, of the models that they trained or
        not, or None.
        """
        return self.last(lambda row: row.of_devices(statistic, personalised=personalised))

    @property
    def seconds(self) -> float:
        """The seconds of the completed global rounds."""
        if self.rounds:
            return self.rounds[-1].elapsed_s
        return 0.0

    @property
    def totals(self) -> dict[str, int]:
        """The bytes of the completed global rounds, by tier and direction."""
        found = dict.fromkeys(columns_of(self.tiers), 0)
        for row in self.rounds:
            for name in found:
                found[name] += row.bytes_.get(name, 0)
        return found

    def _json(self, name: str) -> Mapping[str, Any]:
        return self._parsed(name, lambda: self._content(name))

    def _parsed(self, name: str, read: Callable[[], bytes]) -> Mapping[str, Any]:
        try:
            found = json.loads(read().decode())
        except (OSError, ValueError, RecursionError) as error:
            raise self._damaged(
                name, getattr(error, "strerror", None) or f"not JSON: {error}"
            ) from None
        if not isinstance(found, dict):
            raise self._damaged(name, "not an object")
        return found

    def _events(self, *marks: str) -> Iterator[Event]:
        """Yield the events whose line contains one of the marks. Truncated lines are skipped, also
        in mid-file.
        """
        for line in self._text("events.jsonl").split("\n"):
            if any(mark in line for mark in marks):
                try:
                    facts = json.loads(line)
                    time = str(facts.pop("time"))
                    name = str(facts.pop("event"))
                    yield Event(time, name, facts)
                except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
                    continue

    def _rows(self, name: str, kind: type[_R]) -> list[_R]:
        """Return a table's rows. A truncated last row is skipped; any other invalid line raises
        InvalidExperiment.
        """
        found: list[_R] = []
        text = self._text(name)
        self._check_header(name, text, kind)
        try:
            for row in rows_of(text):
                found.append(kind.read(row))
        except (KeyError, ValueError, csv.Error) as error:
            raise self._damaged(name, f"line {len(found) + 2}: {error}") from None
        return found

    def _check_header(self, name: str, text: str, kind: type[Record]) -> None:
        """Check the names of a table's columns; of a header that a kill cut short, the first
        name.
        """
        header, ended, _ = text.partition("\n")
        named = header.strip().split(",")
        wanted = kind.required()
        if ended:
            lacking = [column for column in wanted if column not in named]
        else:
            lacking = [] if wanted[0].startswith(named[0]) else wanted[:1]
        if lacking:
            raise self._damaged(name, f"line 1: there is no column {lacking[0]}")

    def _text(self, name: str) -> str:
        try:
            return self._content(name).decode(errors="replace")
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise self._damaged(name, error.strerror or str(error)) from None

    def _content(self, name: str) -> bytes:
        """Return a file's content. Raises OSError."""
        if self._kept is None:
            return (self.path / name).read_bytes()
        if name not in self._kept:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return self._kept[name].encode()

    def _damaged(self, name: str, problem: str) -> InvalidExperiment:
        return InvalidExperiment(
            "RUN", str(self.path / name), problem, "Name a run's folder, or repair the file."
        )


def find(text: str, root: Path) -> Path:
    """Return the folder of the run that `text` names.

    `text` is a folder, or a prefix of the name, the id or the id's last part of one run below
    `root`. Raises InvalidExperiment if no run or several runs match.
    """
    if _is_run(Path(text)):
        return Path(text)
    known = folders(root) if root.is_dir() else []
    matching = [path for path in known if text and _begins(path.name, text)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        among = ", ".join(path.name for path in matching[:5])
        problem = f"{len(matching)} runs match ({among})"
    else:
        problem = f"not a run's folder, and no run id has this prefix (below {root})"
    raise InvalidExperiment("RUN", text, problem, "List the runs: fedstrata runs list.")


def _begins(name: str, text: str) -> bool:
    """Return whether a run's folder, its id or the id's last part begins so."""
    parts = name.split("-")
    known = (name, f"{parts[0]}-{parts[-1]}", parts[-1])
    return any(each.startswith(text) for each in known)


def find_all(texts: Sequence[str], root: Path) -> tuple[list[Path], list[str]]:
    """Return the folders of the runs that `texts` name, each once, and the files and folders that
    hold no run.

    A text names a run, as for `find`, or a folder of runs, such as a sweep's: its path, or its name
    below `root`. Raises InvalidExperiment if a text names nothing, or none names a run.
    """
    found: dict[Path, Path] = {}
    others = []
    for text in texts:
        places = [Path(text), root / text] if text else []
        folder = next((path for path in places if path.is_dir() and not _is_run(path)), None)
        if folder is not None:
            inside = sorted(folders(folder), key=_begun)
        else:
            inside = [] if Path(text).is_file() else [find(text, root)]
        if not inside:
            others.append(text)
        for path in inside:
            found.setdefault(path.resolve(), path)
    if not found:
        raise InvalidExperiment(
            "RUN", " ".join(texts), "no run in it", "List the runs: fedstrata runs list."
        )
    return list(found.values()), others


def folders(root: Path) -> list[Path]:
    """Return the folders of runs in `root` and in its folders, as those of sweeps, oldest first by
    the second.

    A kept run's is its place in the table, which is no folder.

    Raises InvalidExperiment.
    """
    try:
        inside = list(root.iterdir())
        others = [path for path in inside if not _has_manifest(path)]
        below = [file.parent for path in others for file in path.glob("*/manifest.json")]
        kept = [run for path in (root, *others) for run in kept_in(path)]
        return sorted([*filter(_has_manifest, inside), *below, *kept], key=lambda path: path.name)
    except OSError as error:
        raise InvalidExperiment(
            "--runs", str(root), error.strerror or str(error), "Name another folder."
        ) from None


def may_resume(path: Path, *, by_experiment: bool) -> bool:
    """Return whether a failed run may go on: not if its experiment failed before the first global
    round.
    """
    return not by_experiment or (path / "rounds.csv").exists()


def _begun(path: Path) -> tuple[str, str]:
    """Return when a run began, to the second, and its experiment's digest: the end of its id is
    random.
    """
    run = Run(path)
    return run.started, str(run.manifest.get("experiment_digest", ""))


def _is_run(path: Path) -> bool:
    return _has_manifest(path) or texts_of(path) is not None


def _has_manifest(path: Path) -> bool:
    return (path / "manifest.json").is_file()
