"""A run of a sweep in a process, on this host or on a worker of a cluster: its order, and what is
sent back.

Without a network runs are done by worker processes, one after another; else by the command that a
user would give. A process that a signal ends is started again, and its run is resumed.
"""

from __future__ import annotations

import asyncio
import io
import json
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias
from zipfile import ZIP_DEFLATED, ZipFile

from fedstrata.common.errors import RunFailed
from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.common.host.offload import repeated
from fedstrata.common.host.processes import spawn, stop
from fedstrata.common.processes.subprocess_channel import (
    REPLACEMENTS,
    ReplaceableProcess,
    SubprocessChannel,
)
from fedstrata.common.text import counted
from fedstrata.deploy.console.logs import ERROR, FRAME, last_error
from fedstrata.deploy.local.process_lab import ROLE

WORKER: Final = "fedstrata.deploy.sweeps.worker"
ADVICE: Final = "If memory was short: run fewer at once (--jobs)."
LOOK_S: Final = 0.2  # between looks at whether to stop
STOP_S: Final = 20.0  # in which a lab ends its roles
SPEEDS: Final = "speeds.json"  # of the machines of simulated runs
STARTED: Final = "started"  # the event before the run's own
# of a finished run's folder: what only a run that goes on needs
WITHOUT: Final = ("checkpoints", "spool")
Report: TypeAlias = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class RunOrder:
    """A run to be done. It has no object of this process: it may be sent to another host.

    `experiment`: its JSON. `words`: the command's, without experiment and folders. `folder`: the
    sweep's, absolute. `accelerator`: "" leaves it to the command. `speeds`: the text of a file for
    `--speeds`, or "".
    """

    experiment: str
    words: Sequence[str]
    folder: Path
    accelerator: str = ""
    speeds: str = ""

    @property
    def kind(self) -> tuple[bool, bool]:
        """Whether the run has no network, and whether a simulated one."""
        return "--direct" in self.words, "--simulate" in self.words


class CellFailed(RunFailed):
    """A run of a sweep failed; `exit_code` is that of its own command, `frames` are those of own
    code that failed.
    """

    def __init__(self, reason: str, code: int, frames: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.exit_code = code
        self.frames = tuple(frames)


class Slot(Protocol):
    """Does one run at a time."""

    def run(
        self,
        order: RunOrder,
        runs: Path,
        resume: Path | None,
        *,
        report: Report,
        stopped: Callable[[], bool],
    ) -> None:
        """Do a run in the folder `runs`, or resume that of a folder; `report` gets its events.

        Once `stopped` returns True the run ends, and can be resumed. Raises FedstrataError.
        """

    def close(self) -> None:
        """End the process, if any."""


class WorkerProcess(Slot):
    """A process that does runs without a network, one after another: it imports torch once."""

    def __init__(self) -> None:
        self._loop = asyncio.Runner()
        self._process = ReplaceableProcess(WORKER, "the worker process", advice=ADVICE)

    def run(
        self,
        order: RunOrder,
        runs: Path,
        resume: Path | None,
        *,
        report: Report,
        stopped: Callable[[], bool],
    ) -> None:
        """Do a run."""
        folder = resume

        async def work(channel: SubprocessChannel) -> None:
            nonlocal folder
            what = {"experiment": order.experiment} if folder is None else {"resume": str(folder)}
            channel.send(runs=str(runs), accelerator=order.accelerator or "cpu", **what)
            while "event" in (record := await channel.receive()):
                folder = Path(record["folder"])
                report(record)

        async def until_stopped() -> None:
            working = asyncio.ensure_future(self._process.do(work))
            while not (await asyncio.wait((working,), timeout=LOOK_S))[0]:
                if stopped():
                    working.cancel()
            if not working.cancelled():
                working.result()

        self._loop.run(until_stopped())

    def close(self) -> None:
        """Kill the process."""

        async def end() -> None:
            self._process.close()

        self._loop.run(end())
        self._loop.close()


class RunCommand(Slot):
    """A command for each run: `fedstrata run`, or `fedstrata cloud`, with its options."""

    def run(
        self,
        order: RunOrder,
        runs: Path,
        resume: Path | None,
        *,
        report: Report,
        stopped: Callable[[], bool],
    ) -> None:
        """Do a run."""
        with tempfile.TemporaryDirectory(prefix="fedstrata-sweep-") as home:
            file, log, speeds = (
                Path(home) / name for name in ("experiment.toml", "messages.log", SPEEDS)
            )
            file.write_text(to_toml(parse(order.experiment)), encoding="utf-8")
            log.write_bytes(b"")
            words = [*ROLE, *order.words, "--runs", str(runs), "--format", "json"]
            words += ["--accelerator", order.accelerator] if order.accelerator else []
            if order.speeds:
                speeds.write_text(order.speeds, encoding="utf-8")
                words += ["--speeds", str(speeds)]
            for _ in range(1 + REPLACEMENTS):
                what = [str(file)] if resume is None else ["--resume", str(resume)]
                code, folder = _to_its_end([*words, *what], log, report=report, stopped=stopped)
                resume = resume or folder
                if code >= 0 or stopped():
                    break
            if code:
                raise _failure(code, last_error(log))

    def close(self) -> None:
        """The command has ended."""


def _to_its_end(
    command: Sequence[str], log: Path, *, report: Report, stopped: Callable[[], bool]
) -> tuple[int, Path | None]:
    """Run a command to its end; return its exit code, and the folder of its run, None if it has
    none.
    """
    process = spawn(command, log=log, read_output=True)
    folder = None
    assert process.stdout is not None

    def look() -> None:
        if stopped():
            stop(process, grace_s=STOP_S)

    # stopped, they are closed
    with repeated(look, every_s=LOOK_S), process.stdout as lines, suppress(ValueError):
        for line in lines:
            if (event := _event(line)) is not None:
                folder = Path(event["folder"]) if event["event"] == "run" else folder
                report(event)
    return process.wait(), folder


def _event(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line, None if it is truncated: the command was killed."""
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    if "event" in event:
        return event
    return None


def _failure(code: int, lines: Sequence[str]) -> CellFailed:
    """Return the error of a command, of the last error that it wrote and its frames."""
    if code < 0:
        name = signal.Signals(-code).name
        others = counted(REPLACEMENTS, "replacements")
        return CellFailed(f"its command was killed by {name}, and so were {others}. {ADVICE}", code)
    last, *frames = lines or [f"its command ended with {code}"]
    return CellFailed(
        last.removeprefix(ERROR), code, [frame.removeprefix(FRAME) for frame in frames]
    )


def packed(folder: Path, *, finished: bool) -> bytes:
    """Return a run's folder as one text of bytes; of a finished run without what only a resumed one
    needs.
    """
    content = io.BytesIO()
    with ZipFile(content, "w", ZIP_DEFLATED, compresslevel=1, strict_timestamps=False) as archive:
        for path in sorted(folder.rglob("*")):
            if not (finished and path.relative_to(folder).parts[0] in WITHOUT):
                archive.write(path, path.relative_to(folder.parent))
    return content.getvalue()


def unpack(content: bytes, runs: Path) -> Path:
    """Write a packed folder below `runs`; return its path. One that is there already is
    replaced.
    """
    with (
        tempfile.TemporaryDirectory(dir=runs, prefix=".") as home,
        ZipFile(io.BytesIO(content)) as archive,
    ):
        archive.extractall(home)
        (folder,) = Path(home).iterdir()
        if (earlier := runs / folder.name).exists():  # this run as it was when it was sent
            earlier.rename(Path(home) / "earlier")
        return folder.rename(earlier)
