"""Slots of a sweep, each of which runs one experiment at a time: in a worker process, or by a command of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from common.errors import ConnectionFailed, FedstrataError, InvalidExperiment, RunFailed, StorageFailed
from common.experiment.reading import to_toml
from common.host.files import writing
from common.host.offload import offload
from common.host.processes import spawn, stop
from common.host.subprocess_channel import ProcessEnded, SubprocessChannel
from deploy.console.logs import ERROR, FRAME, last_error, options
from deploy.local.lab import ROLE
from deploy.sweeps.folder import MissingRun

WORKER: Final = "deploy.sweeps.worker"
STOP_S: Final = 20.0  # in which a lab ends its roles
Watch: TypeAlias = Callable[[str, Mapping[str, Any]], None]


class CellFailed(RunFailed):
    """A run of a sweep failed; `exit_code` is that of its own command, `frames` are those of own code that failed."""

    def __init__(self, reason: str, code: int, frames: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.exit_code = code
        self.frames = tuple(frames)


class Slot(Protocol):
    """Runs one experiment at a time."""

    async def run(self, job: MissingRun, watch: Watch) -> None:
        """Run a job to its end; `watch` gets the run's events. Raises CellFailed."""

    def close(self) -> None:
        """End what runs."""


class DirectSlot:
    """A worker process, which runs experiments without a network. It is started again if it ended."""

    def __init__(self, runs: Path, accelerator: str) -> None:
        self._runs = runs
        self._accelerator = accelerator
        self._worker: SubprocessChannel | None = None

    async def run(self, job: MissingRun, watch: Watch) -> None:
        """Run a job to its end."""
        if self._worker is None:
            self._worker = await SubprocessChannel.start(WORKER, "the worker process")
        what = {"resume": str(job.resume)} if job.resume else {"experiment": job.experiment.to_json()}
        self._worker.send(runs=str(self._runs), accelerator=self._accelerator, **what)
        try:
            while "event" in (record := await self._worker.receive()):
                watch(str(record["event"]), record)
        except ProcessEnded as error:
            self.close()
            raise CellFailed(str(error), error.exit_code) from None
        except FedstrataError as error:
            frames = error.frames if isinstance(error, InvalidExperiment) else ()
            raise CellFailed(str(error), error.exit_code, frames) from None

    def close(self) -> None:
        """Kill the worker; its run can be resumed."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


class CommandSlot:
    """A command for each run: `fedstrata run`, or `fedstrata cloud`, with its options.

    `home`: folder of the experiment's file and of the command's messages.
    """

    def __init__(self, command: Sequence[str], runs: Path, home: Path, number: int) -> None:
        self._command = command
        self._runs = runs
        self._file = home / f"experiment-{number}.toml"
        self._log = home / f"messages-{number}.log"
        self._process: subprocess.Popen[bytes] | None = None

    async def run(self, job: MissingRun, watch: Watch) -> None:
        """Run a job to its end."""
        with writing(self._file):
            self._file.write_text(to_toml(job.experiment), encoding="utf-8")
            self._log.write_bytes(b"")
        what = ["--resume", str(job.resume)] if job.resume else [str(self._file)]
        words = [*ROLE, *options(), *self._command, *what, "--runs", str(self._runs), "--format", "json"]
        self._process = process = spawn(words, log=self._log, read_output=True)
        assert process.stdout is not None
        while line := await offload(process.stdout.readline, cancel=process.terminate):
            if (event := _event(line)) is not None:
                watch(str(event["event"]), event)
        code = await offload(process.wait, cancel=process.terminate)
        if code:
            raise self._failure(code)

    def close(self) -> None:
        """Stop the command; its run can be resumed."""
        if self._process is not None:
            stop(self._process, grace_s=STOP_S)

    def _failure(self, code: int) -> CellFailed:
        if code < 0:
            return CellFailed(f"{self._command[0]} was killed by signal {-code}", code)
        last, *frames = last_error(self._log) or [f"{self._command[0]} ended with {code}"]
        return CellFailed(last.removeprefix(ERROR), code, [frame.removeprefix(FRAME) for frame in frames])


def _event(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line, None if it is truncated: the command was killed."""
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return event if "event" in event else None


def of_the_place(error: CellFailed) -> bool:
    """Return whether an error would be that of each other run, too: of the disk, or of the broker."""
    return error.exit_code in (ConnectionFailed.exit_code, StorageFailed.exit_code)
