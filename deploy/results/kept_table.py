"""The table of the runs that are kept of a sweep: two files for all of them.

`sweep.json` has the sweep's axes, what its runs have in common, and a line for each with the rest:
its cell, its experiment, what was run where, and the digest of its model. `rounds.csv` has a row
for each run and global round.

A reader of runs gets each run's files as texts (`texts_of`), under a path that does not exist: the
table's folder and the run's id.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Self

from fedstrata.cloud.records import GlobalRoundRecord, rows_of
from fedstrata.cloud.run_folder import HELD
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.host.files import replacing, writing
from fedstrata.common.settings.tables import write
from fedstrata.common.text import json_text
from fedstrata.deploy.results.cells import CellOrder

# in a sweep's folder, beside its runs: its axes, and the names of its cells
SWEEP: Final = "sweep.json"
ROUNDS: Final = "rounds.csv"
CELL: Final = "cell"  # of a kept run: the name of its cell
RUNS: Final = "runs"
SHARED: Final = "shared"
RUN: Final = "run"  # its id
EXPERIMENT: Final = "experiment"
FINISHED: Final = "finished"  # when, and why it stopped
NAMED: Final = (RUN, CELL, "seed")  # columns of the rows: whose they are
# columns of single nodes, which no comparison needs
NODES: Final = ("epochs_", "omega_", "spread_")

Row = dict[str, str]
Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeptRun:
    """A kept run: the facts of its manifest with its experiment's tree, and its rows of
    rounds.csv.
    """

    facts: Mapping[str, Any]
    rows: Sequence[Row]

    @property
    def id(self) -> str:
        """The run's id."""
        return str(self.facts[RUN])

    def files(self) -> dict[str, str]:
        """Return the texts of a run's files by name."""
        facts = dict(self.facts)
        experiment = facts.pop(EXPERIMENT)
        finished = facts.pop(FINISHED)
        return {
            HELD: write(experiment),
            "manifest.json": json_text(facts),
            "events.jsonl": json_text(finished) + "\n",
            ROUNDS: _csv(_needed(self.rows)),
        }


@dataclass(frozen=True, slots=True)
class KeptTable:
    """The kept runs of a sweep by id, in the order of its cells. `order`: as `CellOrder.written`
    has it.
    """

    order: Mapping[str, Any]
    runs: Mapping[str, KeptRun]

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return the table in a folder, None without one. Raises InvalidExperiment."""
        rows: dict[str, list[Row]] = {}
        try:
            tree = json.loads((folder / SWEEP).read_text(encoding="utf-8"))
            if RUNS not in tree:
                return None
            for row in rows_of((folder / ROUNDS).read_text(encoding="utf-8")):
                rows.setdefault(row[RUN], []).append(row)
            every = [_merged(tree[SHARED], own) for own in tree[RUNS]]
            runs = {facts[RUN]: KeptRun(facts, rows.get(facts[RUN], ())) for facts in every}
            return cls(
                {key: value for key, value in tree.items() if key not in (SHARED, RUNS)}, runs
            )
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
            problem = f"no table of kept runs: {error!r}"
            raise InvalidExperiment(
                "RUN", str(folder), problem, f"Repair {SWEEP} and {ROUNDS}."
            ) from None

    def write(self, folder: Path) -> None:
        """Write both files, first the rows: those of no run do not count. Raises OSError."""
        runs = [self.runs[key] for key in sorted(self.runs, key=self._rank)]
        shared = _shared([run.facts for run in runs])
        shared.pop(RUN, None)  # of a single run
        lines = ",\n".join(json_text(_rest(run.facts, shared)) for run in runs)
        tree = json_text({**self.order, SHARED: shared}, indent=1).removesuffix("\n}")
        rows = [row for run in runs for row in run.rows]
        for name, text in (
            (ROUNDS, _csv(_filled(rows))),
            (SWEEP, f'{tree},\n "{RUNS}": [\n{lines}\n ]\n}}\n'),
        ):
            with replacing(folder / name) as file:
                file.write(text.encode())

    def _rank(self, run: str) -> tuple[int, int, str]:
        """Return the place of a run: by its cell, its seed and its id."""
        facts = self.runs[run].facts
        order = CellOrder.read(self.order)
        place = None if order is None else order.place(facts[CELL])
        return -1 if place is None else place.number, facts[EXPERIMENT].get("seed", 1), run


def add(runs: Iterable[KeptRun], folder: Path, order: Mapping[str, Any]) -> None:
    """Add runs to the table in a folder, which is made if it is missing. Raises InvalidExperiment,
    StorageFailed.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            known = KeptTable.read(folder)
            every = dict(known.runs) if known else {}
            every |= {run.id: run for run in runs}
            KeptTable(order, every).write(folder)


def kept_in(folder: Path) -> list[Path]:
    """Return the paths of the kept runs of the table in a folder, none without one. Raises
    InvalidExperiment.
    """
    return [folder / run for run in _files_in(folder)]


def texts_of(path: Path) -> Mapping[str, str] | None:
    """Return the texts of a kept run's files by name, None if the path is not one's. Raises
    InvalidExperiment.
    """
    return _files_in(path.parent).get(path.name)


def _files_in(folder: Path) -> Mapping[str, Mapping[str, str]]:
    try:
        stats = [os.stat(folder / name) for name in (SWEEP, ROUNDS)]
    except OSError:
        return {}
    return _read(folder.resolve(), tuple((stat.st_mtime_ns, stat.st_size) for stat in stats))


@lru_cache(maxsize=8)  # each run of a table is read by its path
def _read(folder: Path, stamps: tuple[tuple[int, int], ...]) -> Mapping[str, Mapping[str, str]]:
    table = KeptTable.read(folder)
    if table is None:
        return {}
    return {key: run.files() for key, run in table.runs.items()}


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other writers out of a folder."""
    file = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(file)


def _needed(rows: Sequence[Row]) -> list[Row]:
    """Return a run's rows with the columns that it has: other runs of the table may have others."""
    required = GlobalRoundRecord.required()
    own = [name for name in _used(rows) if name not in NAMED]
    return [dict.fromkeys(required, "") | _part(row, own) for row in rows]


def _filled(rows: Sequence[Row]) -> list[Row]:
    """Return rows with the columns of all of them that are not empty, but for those of nodes."""
    names = [name for name in _used(rows) if not name.startswith(NODES)]
    return [_part(row, names) for row in rows]


def _used(rows: Sequence[Row]) -> list[str]:
    """Return the columns of some rows that are not empty."""
    return list(dict.fromkeys(name for row in rows for name, cell in row.items() if cell))


def _part(row: Row, names: Sequence[str]) -> Row:
    return {name: row.get(name, "") for name in names}


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    names = list(rows[0]) if rows else [RUN]
    table = csv.DictWriter(text, names, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _shared(trees: Sequence[Mapping[str, Any]]) -> Tree:
    """Return the leaves that all trees have."""
    found: Tree = {}
    for key, value in trees[0].items() if trees else ():
        if all(key in tree and tree[key] == value for tree in trees):
            found[key] = value
        elif all(isinstance(tree.get(key), Mapping) for tree in trees) and (
            inner := _shared([tree[key] for tree in trees])
        ):
            found[key] = inner
    return found


def _rest(tree: Mapping[str, Any], shared: Mapping[str, Any]) -> Tree:
    """Return what a tree has beyond the shared leaves."""
    found: Tree = {}
    for key, value in tree.items():
        if key not in shared:
            found[key] = value
        elif value != shared[key]:
            found[key] = _rest(value, shared[key])
    return found


def _merged(shared: Mapping[str, Any], own: Mapping[str, Any]) -> Tree:
    """Return the tree of which `own` is the rest."""
    found = dict(shared)
    for key, value in own.items():
        found[key] = _merged(shared[key], value) if key in shared else value
    return found
