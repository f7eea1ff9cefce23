"""A run's folder, written during the run. A killed run leaves it consistent.

experiment.toml  the effective experiment        rounds.csv   a row per global round
manifest.json    versions, hosts, links, digest  links.csv    bytes by link and direction
events.jsonl     one event per line              devices.csv  work of each device in each global round
checkpoints/     the last two                    model.safetensors  the final model
partition.npz    each device's samples           partition.json     their digest, and the counts of each class
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import platform
import weakref
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from cloud import links
from common.accounting.child_report import ChildReport
from common.accounting.ledger import Ledger
from common.errors import InvalidExperiment
from common.experiment.reading import load, to_toml
from common.experiment.schema import Experiment
from common.runtime.world import REAL, World

PACKAGES: Final = ("fedstrata", "aiomqtt", "paho-mqtt", "numpy", "msgpack", "torch")
DEVICE_FIELDS: Final = (
    "global_round", "institution", "device", "samples", "local_rounds", "epochs", "sgd_steps", "loss", "train_s",
    "wait_s", "pause_s", "path",
)  # fmt: skip
LEDGER: Final = "ledger.json"
FORMAT: Final = 2  # of a run's folder; `deploy.runs` also reads earlier formats
HELD: Final = "experiment.toml"  # the file that is locked; it is never replaced
DIRECT: Final = "direct"  # in manifest.json: marks a run without a network


class RunFolder:
    """One run's folder. `run` is its id on the brokers.

    While this object lives, its process holds the folder (`held`) by a file lock, which the kernel releases if the
    process is killed.
    """

    def __init__(self, path: Path, run: str, experiment: Experiment, *, world: World = REAL) -> None:
        held = os.open(path / HELD, os.O_RDONLY)
        weakref.finalize(self, os.close, held)
        _try_lock(held, fcntl.LOCK_SH)
        self.path = path
        self.run = run
        self.experiment = experiment
        self._world = world
        self._measured = ""
        self._last_round: tuple[int, dict[str, object]] | None = None  # its offset in rounds.csv, and its cells

    @classmethod
    def create(cls, root: Path, experiment: Experiment, *, world: World = REAL) -> RunFolder:
        """Create `runs/<utc>-<name>-<id>/`. Raises InvalidExperiment if that fails."""
        utc, token = datetime.fromtimestamp(world.wall(), UTC).strftime("%Y%m%dT%H%M%SZ"), world.token(3)
        path = root / f"{utc}-{experiment.name}-{token}"
        try:
            path.mkdir(parents=True)
        except OSError as error:
            raise InvalidExperiment("--runs", str(root), error.strerror or str(error), "Name another folder.") from None
        (path / "experiment.toml").write_text(to_toml(experiment), encoding="utf-8")
        folder = cls(path, f"{utc}-{token}", experiment, world=world)
        folder._write_manifest(utc)
        return folder

    @classmethod
    def reopen(cls, path: Path, *, direct: bool = False, world: World = REAL) -> RunFolder:
        """Reopen a run's folder. Raises InvalidExperiment if it is none, or if `direct` differs from the run's."""
        try:
            manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
            run, earlier = str(manifest["run"]), manifest.get("format") != FORMAT
            was_direct = DIRECT in manifest
        except (OSError, ValueError, KeyError, TypeError):
            raise InvalidExperiment("--resume", str(path), "not a run's folder", "Name a folder under runs/.") from None
        if earlier:
            remedy = "Start a new run; report, compare and runs can still read this one."
            raise InvalidExperiment("--resume", str(path), "the run was started by an earlier release", remedy)
        if direct is not was_direct:  # its seconds and bytes would not be comparable
            had, remedy = ("no network", "Add --direct.") if was_direct else ("a network", "Omit --direct.")
            raise InvalidExperiment("--resume", str(path), f"the run was started with {had}", remedy)
        return cls(path, run, load(path / "experiment.toml"), world=world)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    def note(self, **facts: object) -> None:
        """Add facts to manifest.json that became known after the start."""
        path = self.path / "manifest.json"
        _replace(path, json.dumps(json.loads(path.read_text(encoding="utf-8")) | facts, indent=2))

    def event(self, name: str, facts: Mapping[str, object]) -> None:
        """Append an event with its time."""
        time = datetime.fromtimestamp(self._world.wall(), UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": time, "event": name, **facts})
        with (self.path / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def add_round(self, row: Mapping[str, object]) -> None:
        """Append a global round to rounds.csv."""
        self._last_round = (self._append("rounds.csv", list(row), [row]), dict(row))

    def complete_round(self, global_round: int, found: Mapping[str, str]) -> None:
        """Add cells to the row of the last global round.

        The row only grows, so one write in place overwrites all of the old row.
        """
        if self._last_round is None or self._last_round[1]["global_round"] != global_round:
            raise ValueError(f"the last row is not that of global round {global_round}")
        start, row = self._last_round
        text = io.StringIO()
        csv.DictWriter(text, list(row)).writerow(row | dict(found))
        with (self.path / "rounds.csv").open("r+b") as file:
            file.seek(start)
            file.write(text.getvalue().encode())

    def add_devices(self, global_round: int, institution: str, reports: Iterable[ChildReport]) -> None:
        """Append an institution's devices to devices.csv."""
        rows = []
        for r in reports:
            work = (global_round, institution, r.name, r.samples, r.rounds, r.epochs, r.steps)
            costs = (f"{value:.6g}" for value in (r.loss, r.train_s, r.wait_s, r.pause_s))
            rows.append(dict(zip(DEVICE_FIELDS, (*work, *costs, r.path), strict=True)))
        self._append("devices.csv", DEVICE_FIELDS, rows)

    def forget_after(self, global_rounds: int) -> list[dict[str, str]]:
        """Drop the rows of global rounds that a resumed run repeats, and return the remaining rows of rounds.csv."""
        kept: dict[str, list[dict[str, str]]] = {}
        for name in ("rounds.csv", "devices.csv"):
            path = self.path / name
            if path.exists():
                fields, rows = _read(path)
                kept[name] = [row for row in rows if int(row["global_round"]) <= global_rounds]
                self._rewrite(path, fields, kept[name])
        rounds = kept.get("rounds.csv", [])
        if rounds:
            rewritten = (self.path / "rounds.csv").read_bytes()
            start = rewritten.rindex(b"\n", 0, -1) + 1
            self._last_round = (start, rounds[-1] | {"global_round": int(rounds[-1]["global_round"])})
        return rounds

    def write_links(self, ledger: Ledger) -> None:
        """Write links.csv, each link's bytes in the run, and the byte ledger with which a resumed run continues."""
        self._rewrite(self.path / "links.csv", links.FIELDS, links.rows(ledger))
        status = links.wire_status(ledger)
        if status and status != self._measured:
            self._measured = status
            self.note(wire_bytes=status)
        _replace(self.path / LEDGER, ledger.to_json())

    def restore(self, ledger: Ledger) -> None:
        """Restore the byte ledger of an earlier process of the run. Raises InvalidExperiment."""
        path = self.path / LEDGER
        try:
            if path.exists():
                ledger.restore(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidExperiment("--resume", str(path), f"unreadable: {error!r}", "Remove it.") from None

    def _append(self, name: str, fields: Sequence[str], rows: Iterable[Mapping[str, object]]) -> int:
        """Append rows and return their offset in the file."""
        with (self.path / name).open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fields)
            if file.tell() == 0:
                writer.writeheader()
            start = file.tell()
            writer.writerows(rows)
        return start

    @staticmethod
    def _rewrite(path: Path, fields: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
        partial = path.with_suffix(".partial")
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fields)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(partial, path)

    def _write_manifest(self, utc: str) -> None:
        experiment = self.experiment
        manifest = {
            "format": FORMAT,
            "run": self.run,
            "started": utc,
            "experiment_digest": experiment.digest,
            "links": self._links(),
            "hardware": {name: experiment.machine(name).model_dump() for name in experiment.topology.device_names()},
            "codecs": {t: getattr(experiment.transfer, t).model_dump() for t in ("wan", "lan")},
            "host": platform.node(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "packages": {name: _version(name) for name in PACKAGES},
        }
        _replace(self.path / "manifest.json", json.dumps(manifest, indent=2))

    def _links(self) -> dict[str, object]:
        """Return how rates are enforced, and the link of each node to its parent."""
        experiment, topology = self.experiment, self.experiment.topology
        nodes = [*topology.institution_names(), *topology.device_names()]
        links = {name: experiment.link(name).model_dump() for name in nodes}
        return {"enforce": experiment.links.enforce, "of": links}


def held(path: Path) -> bool:
    """Return whether a living process writes to this run's folder; False on a file system without locks."""
    try:
        file = os.open(path / HELD, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _try_lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(file)


def _try_lock(file: int, kind: int) -> bool:
    """Return False if another process holds a conflicting lock; True on a file system without locks."""
    try:
        fcntl.flock(file, kind)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _replace(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)


def _read(path: Path) -> tuple[Sequence[str], list[dict[str, str]]]:
    """Return a table's fields and rows, without a last row that a kill cut short."""
    text = path.read_bytes().decode()
    reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
    return reader.fieldnames or (), list(reader)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
