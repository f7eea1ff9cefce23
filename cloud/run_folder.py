"""A run's folder, written during the run. A killed run leaves it consistent.

experiment.toml  the effective experiment        rounds.csv   a row per global round
manifest.json    versions, hosts, links, digest  links.csv    bytes by link and direction
events.jsonl     one event per line              devices.csv  each device's work by global round
checkpoints/     the last two                    model.safetensors  the final model
partition.npz    each device's samples           partition.json     their digest, counts of classes
"""

from __future__ import annotations

import csv
import fcntl
import json
import os
import platform
import shutil
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, TypeVar

from xxhash import xxh3_64

from fedstrata.cloud.device_rows import NO_PLANS, DeviceRows
from fedstrata.cloud.records import (
    DeviceRecord,
    GlobalRoundRecord,
    Record,
    link_records,
    rows_of,
    to_csv,
    wire_status,
)
from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.ledger import Ledger
from fedstrata.common.errors import InvalidExperiment, StorageFailed
from fedstrata.common.experiment.reading import read, recorded, to_toml
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.files import replacing, sync, writing
from fedstrata.common.host.processor import instructions
from fedstrata.common.runtime.world import REAL, World
from fedstrata.common.text import json_text

PACKAGES: Final = ("fedstrata", "aiomqtt", "paho-mqtt", "numpy", "msgpack", "torch")
MANIFEST: Final = "manifest.json"
LEDGER: Final = "ledger.json"
DIGEST: Final = "digest"  # of what else a file has
FORMAT: Final = 1  # of a run's folder
HELD: Final = "experiment.toml"  # the file that is locked; it is never replaced
DIRECT: Final = "direct"  # in manifest.json: marks a run without a network
WITHOUT_A_NETWORK: Final = {
    "bytes": "payload of whole models; nothing was sent, and message bytes equal it",
    "seconds": "computing time of this machine, devices trained one after another",
    "links": "declared, not enforced",
    "hardware": "declared, not emulated",
    "availability": "declared, not replayed: every device is there",
}
# in manifest.json: marks a run in virtual time, and has the speeds of its machines
SIMULATED: Final = "simulated"
KINDS: Final = {
    DIRECT: ("no network", "--direct"),
    SIMULATED: ("a simulated network", "--simulate"),
}
GROWING: Final = ("rounds.csv", "devices.csv", "events.jsonl")

_R = TypeVar("_R", GlobalRoundRecord, DeviceRecord)


class RunFolder:
    """One run's folder. `run` is its id on the brokers.

    Once it is created or reopened, and while this object lives, its process alone writes to the
    folder, by a file lock (`held`), which the kernel releases if the process is killed.

    Rows and events that a full disk or a read-only folder does not take are kept in memory, in
    their order, and written with the next ones: they come from callbacks, which cannot wait.
    `catch_up` raises what prevents it.
    """

    def __init__(
        self, path: Path, run: str, experiment: Experiment, *, world: World = REAL
    ) -> None:
        self.path = path
        self.run = run
        self.experiment = experiment
        self.begun = False  # whether a global round has begun, in this process or before
        self._made_root = False
        self._world = world
        self._measured = ""
        self._pending: deque[Callable[[], None]] = deque()
        self._release: Callable[[], object] = lambda: None
        self._devices = DeviceRows(experiment)

    @classmethod
    def create(
        cls,
        root: Path,
        experiment: Experiment,
        *,
        direct: bool = False,
        simulated: Mapping[str, object] | None = None,
        world: World = REAL,
    ) -> RunFolder:
        """Create `runs/<utc>-<name>-<id>/`. Raises StorageFailed if it fails.

        `direct`: of a run without a network. `simulated`: of a run in virtual time, the facts that
        its manifest has.
        """
        utc = datetime.fromtimestamp(world.wall(), UTC).strftime("%Y%m%dT%H%M%SZ")
        token = world.token(3)
        path = root / f"{utc}-{experiment.name}-{token}"
        made_root = not root.exists()
        try:
            path.mkdir(parents=True)
            sync(root)
        except OSError as error:
            raise StorageFailed(
                "--runs", str(root), error.strerror or str(error), "Name another folder."
            ) from None
        folder = cls(path, f"{utc}-{token}", experiment, world=world)
        folder._made_root = made_root
        with folder.removed_unless_begun():
            _replace(path / HELD, to_toml(experiment))
            folder._hold()
            kind: dict[str, Mapping[str, object]] = {}
            if direct:
                kind = {DIRECT: WITHOUT_A_NETWORK}
            elif simulated is not None:
                kind = {SIMULATED: simulated}
            folder._write_manifest(utc, kind)
        return folder

    @classmethod
    def reopen(
        cls, path: Path, *, direct: bool = False, simulated: bool = False, world: World = REAL
    ) -> RunFolder:
        """Reopen a run's folder.

        Raises InvalidExperiment as `check` does, or if another process writes to it, and
        StorageFailed if it is read-only.
        """
        run, experiment = cls.check(path, direct=direct, simulated=simulated)
        folder = cls(path, run, experiment, world=world)
        folder._hold()
        folder.begun = True
        return folder

    @staticmethod
    def check(
        path: Path, *, direct: bool = False, simulated: bool = False
    ) -> tuple[str, Experiment]:
        """Return the id and the experiment of a run whose folder can be reopened.

        Raises InvalidExperiment if it is none, if `direct` or `simulated` differs from the run's,
        or if the manifest or the experiment is damaged.
        """
        file = path / MANIFEST
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
            run = str(manifest["run"])
        except OSError:
            raise InvalidExperiment(
                "--resume", str(path), "not a run's folder", "Name a folder under runs/."
            ) from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            problem = f"not a run's manifest: {error!r:.200}"
            raise InvalidExperiment("--resume", str(file), problem, "Restore the file.") from None
        check_format(manifest, path, key="--resume")
        if manifest.pop(DIGEST, None) != _digest(manifest):
            raise InvalidExperiment(
                "--resume", str(file), "damaged, or changed", "Restore the file."
            )
        _check_kind(manifest, path, {DIRECT: direct, SIMULATED: simulated})
        held = str(path / HELD)
        try:
            experiment = recorded(read(path / HELD))
        except InvalidExperiment as error:
            raise InvalidExperiment(
                "--resume", held, str(error).removesuffix("."), "Restore the file."
            ) from None
        if manifest["experiment_digest"] != experiment.digest:
            raise InvalidExperiment(
                "--resume", held, "its experiment was changed", "Restore the file."
            )
        return run, experiment

    @contextmanager
    def removed_unless_begun(self) -> Iterator[None]:
        """Remove the folder, with a root that it made, if the `with` block fails before the first
        global round begins.

        A run that was resumed, or has begun a global round, stays: what it has may be of use.
        """
        try:
            yield
        except BaseException:
            if not self.begun:
                self.release()
                shutil.rmtree(self.path, ignore_errors=True)
                if self._made_root:
                    with suppress(OSError):  # another run is in it
                        self.path.parent.rmdir()
            raise

    def release(self) -> None:
        """Let other processes write to the folder."""
        self._release()

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    def note(self, **facts: object) -> None:
        """Add facts to manifest.json that became known after the start."""
        self._replace_manifest({**self._manifest(), **facts})

    def add_energy(self, joules: Mapping[str, float], *, seconds: float) -> None:
        """Add this host's energy by source and part to that of earlier processes of the run. Raises
        StorageFailed.
        """
        if not joules:
            return
        hosts = self._manifest().get("energy", {})
        earlier = hosts.get(platform.node(), {"seconds": 0.0, "joules": {}})
        sums = {part: earlier["joules"].get(part, 0.0) + value for part, value in joules.items()}
        hosts[platform.node()] = {
            "seconds": earlier["seconds"] + seconds,
            "joules": earlier["joules"] | sums,
        }
        self.note(energy=hosts)

    def event(self, name: str, facts: Mapping[str, object]) -> None:
        """Append an event with its time."""
        time = datetime.fromtimestamp(self._world.wall(), UTC).isoformat(timespec="milliseconds")
        line = json_text({"time": time, "event": name, **facts}) + "\n"
        self._later(partial(_append, self.path / "events.jsonl", line.encode()))

    def add_round(self, record: GlobalRoundRecord) -> None:
        """Append a global round to rounds.csv."""
        self._add_rows("rounds.csv", [record])

    def complete_round(self, record: GlobalRoundRecord) -> None:
        """Replace the last row of rounds.csv by that of the same global round with its
        evaluation.
        """
        self._later(partial(self._replace_rows, "rounds.csv", to_csv([record], header=False), 1))

    def add_devices(
        self,
        global_round: int,
        reports: Iterable[ChildReport],
        plans: Mapping[str, Sequence[Mapping[str, Any]]] = NO_PLANS,
    ) -> None:
        """Append devices to devices.csv. `plans`: the decisions of their parents in this global
        round.
        """
        self._add_rows("devices.csv", self._devices.add(global_round, reports, plans))

    def score_devices(self, global_round: int, reports: Iterable[ChildReport]) -> None:
        """Add the devices' scores of a global round's model to its rows, the last ones of
        devices.csv.
        """
        count = self._devices.score(global_round, reports)
        rows = self._devices.last
        if count:
            text = to_csv(rows, header=False)
            self._later(partial(self._replace_rows, "devices.csv", text, count))
        elif rows:
            self._add_rows("devices.csv", rows)

    def catch_up(self) -> None:
        """Write the rows and events that could not be written before. Raises StorageFailed."""
        while self._pending:
            self._pending[0]()
            self._pending.popleft()

    def sync(self) -> None:
        """Wait until the tables and events are on the disk. Raises StorageFailed."""
        with writing(self.path):
            self.checkpoints.mkdir(exist_ok=True)
            for path in (self.path / name for name in GROWING):
                if path.exists():
                    sync(path)
            sync(self.path)

    def forget_after(self, global_rounds: int) -> list[GlobalRoundRecord]:
        """Drop the rows of global rounds that a resumed run repeats, and return the remaining rows
        of rounds.csv.

        Raises InvalidExperiment if one is missing or damaged.
        """
        devices = self._forget("devices.csv", DeviceRecord, after=global_rounds)
        self._devices.last = [row for row in devices if row.global_round == global_rounds]
        kept = self._forget("rounds.csv", GlobalRoundRecord, after=global_rounds)
        for place in range(global_rounds):
            if place == len(kept) or kept[place].global_round != place + 1:
                problem = (
                    f"it has no row of global round {place + 1}, and the checkpoint is of "
                    f"{global_rounds}"
                )
                raise InvalidExperiment(
                    "--resume", str(self.path / "rounds.csv"), problem, "Restore the file."
                )
        return kept

    def write_of_ledger(self, ledger: Ledger) -> Callable[[], None]:
        """Return what writes the byte ledger of a resumed run, like `write_of_links`."""
        text = ledger.to_json()
        facts = f'{{"{DIGEST}": "{_digest_of(text)}", "ledger": {text}}}\n'
        return partial(_replace, self.path / LEDGER, facts)

    def write_of_links(self, ledger: Ledger) -> Callable[[], None]:
        """Return what writes links.csv, each link's bytes in the run.

        It writes the present counts, also from another thread: thousands of devices take long. It
        raises StorageFailed.
        """
        reports = ledger.reports()
        wire = ledger.broker()

        def write() -> None:
            records = link_records(reports, wire, self.experiment)
            _replace(self.path / "links.csv", to_csv(records, header=True))
            status = wire_status(reports, self.experiment)
            if status and status != self._measured:
                self._measured = status
                self.note(wire_bytes=status)

        return write

    def finish(self, ledger: Ledger) -> None:
        """Write what could not be written before, and the final byte counts. Raises
        StorageFailed.
        """
        self.catch_up()
        self.write_of_links(ledger)()
        self.write_of_ledger(ledger)()

    def restore(self, ledger: Ledger) -> None:
        """Restore the byte ledger of an earlier process of the run. Raises InvalidExperiment."""
        path = self.path / LEDGER
        if not path.exists():
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            text = json_text(found["ledger"])
            if found[DIGEST] != _digest_of(text):
                raise ValueError("its digest is another one")
            ledger.restore(text)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"it is damaged: {error}"
            raise InvalidExperiment(
                "--resume", str(path), problem, "Remove it: bytes are counted anew."
            ) from None

    def _hold(self) -> None:
        """Lock the folder until `release`, or until this object is gone. Raises InvalidExperiment,
        StorageFailed.
        """
        path = self.path / HELD
        with writing(path):
            file = os.open(path, os.O_RDWR)  # NFS locks exclusively only what can be written
        self._release = weakref.finalize(self, os.close, file)
        while not _try_lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
            # else `held` is looking in this moment
            if not _try_lock(file, fcntl.LOCK_SH | fcntl.LOCK_NB):
                problem = "another process runs this run"
                remedy = "Wait for its end, or stop it."
                raise InvalidExperiment("--resume", str(self.path), problem, remedy)

    def _later(self, write: Callable[[], None]) -> None:
        self._pending.append(write)
        with suppress(StorageFailed):
            self.catch_up()

    def _add_rows(self, name: str, records: Sequence[Record]) -> None:
        def write() -> None:
            path = self.path / name
            header = not path.exists() or not path.stat().st_size
            _append(path, to_csv(records, header=header).encode())

        self._later(write)

    def _replace_rows(self, name: str, text: str, count: int) -> None:
        """Replace the last rows of a table, `count` of them.

        They mostly grow, so one write in place overwrites all of the old ones. Shorter ones are
        written with the table.
        """
        path = self.path / name
        data = text.encode()
        with writing(path), path.open("r+b") as file:
            begin = end = file.seek(0, os.SEEK_END)
            tail = b""
            while begin and tail.count(b"\n") <= count:  # from the end: the rounds before are many
                size = min(begin, len(data))
                begin = file.seek(begin - size)
                tail = file.read(size) + tail
            rows = tail.splitlines(keepends=True)[-count:]
            begin = end - sum(map(len, rows))
            if end - begin <= len(data):
                file.seek(begin)
                file.write(data)
                return
        _replace(path, path.read_bytes()[:begin].decode() + text)

    def _forget(self, name: str, kind: type[_R], *, after: int) -> list[_R]:
        """Cut a table after its rows of the global rounds up to `after`, and return these. Raises
        InvalidExperiment.
        """
        path = self.path / name
        if not path.exists():
            return []
        kept: list[_R] = []
        try:
            text = path.read_bytes().decode()
            for record in map(kind.read, rows_of(text)):
                if record.global_round <= after:
                    kept.append(record)
        except (OSError, ValueError, KeyError, csv.Error) as error:
            problem = f"damaged at line {len(kept) + 2}: {error}"
            raise InvalidExperiment("--resume", str(path), problem, "Restore the file.") from None
        whole = text.splitlines(keepends=True)[: text.count("\n")]
        _replace(path, "".join(whole[: 1 + len(kept)]))
        return kept

    def _write_manifest(self, utc: str, kind: Mapping[str, object]) -> None:
        """Write the manifest. It has the run's kind at once: a run that is killed now is resumed as
        what it is.
        """
        experiment = self.experiment
        trace = experiment.availability.trace
        manifest = {
            "format": FORMAT,
            "run": self.run,
            "started": utc,
            "experiment_digest": experiment.digest,
            "links": {
                "enforce": experiment.links.enforce,
                "of": {name: experiment.link(name).recorded() for name in experiment.tree.nodes},
            },
            "availability": None if trace is None else trace.recorded(),
            "hardware": {
                name: experiment.machine(name).model_dump() for name in experiment.tree.devices
            },
            "codecs": {tier.name: tier.transfer.model_dump() for tier in experiment.tiers},
            "host": platform.node(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "instructions": instructions(),
            "load": _load(),
            "python": platform.python_version(),
            "packages": {name: _version(name) for name in PACKAGES},
        }
        self._replace_manifest({**manifest, **kind})

    def _manifest(self) -> dict[str, Any]:
        """Return the manifest's facts, without their digest."""
        found: dict[str, Any] = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))
        found.pop(DIGEST, None)
        return found

    def _replace_manifest(self, facts: Mapping[str, object]) -> None:
        text = json_text({**facts, DIGEST: _digest(facts)}, indent=2)
        _replace(self.path / MANIFEST, text + "\n")


def check_format(manifest: Mapping[str, object], path: Path, *, key: str) -> None:
    """Check that a run's folder has the format of this release. Raises InvalidExperiment, for the
    option `key`.
    """
    if (found := manifest.get("format")) != FORMAT:
        problem = f"a run's folder of format {found}, this release has {FORMAT}"
        raise InvalidExperiment(key, str(path), problem, "Use the release that wrote it.")


def _check_kind(manifest: Mapping[str, object], path: Path, asked: Mapping[str, bool]) -> None:
    """Check that a run is resumed as what it was: its seconds would not be comparable. Raises
    InvalidExperiment.
    """
    network = "a network"
    add = []
    omit = []
    for kind, (name, option) in KINDS.items():
        if kind in manifest:
            network = name
            if not asked[kind]:
                add.append(f"Add {option}.")
        elif asked[kind]:
            omit.append(f"Omit {option}.")
    if add or omit:
        problem = f"the run was started with {network}"
        raise InvalidExperiment("--resume", str(path), problem, " ".join((*add, *omit)))


def held(path: Path) -> bool:
    """Return whether a process writes to this run's folder; False on a file system without
    locks.
    """
    try:
        file = os.open(path / HELD, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _try_lock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(file)


def _digest(facts: Mapping[str, object]) -> str:
    return _digest_of(json_text(facts))


def _digest_of(text: str) -> str:
    return xxh3_64(text.encode()).hexdigest()


def _try_lock(file: int, kind: int) -> bool:
    """Return False if another process holds a conflicting lock; True on a file system without
    locks.
    """
    try:
        fcntl.flock(file, kind)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _replace(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())


def _append(path: Path, data: bytes) -> None:
    """Append all of the data to a file, or nothing. Raises StorageFailed."""
    with writing(path), path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise


def _load() -> float | None:
    """Return how many processes used or awaited this host's cores in the last minute, on average;
    None if unknown.
    """
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
