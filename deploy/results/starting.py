"""Runs from Python, for scripts and notebooks: load one, or start one and wait for its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Final

from common.errors import InvalidExperiment, RunFailed
from common.experiment.reading import parse, to_toml
from common.host.processes import python
from deploy.results.run import Run, find

ERRORS: Final = 20  # lines of standard error that are kept
Observe = Callable[[str, Mapping[str, Any]], None]


def load(run: str | Path, *, runs: str | Path = "runs") -> Run:
    """Return a run by its folder, or by a prefix of its id below `runs`. Raises InvalidExperiment."""
    return Run(find(str(run), Path(runs)))


def start(
    experiment: str | Path | Mapping[str, Any],
    changes: Mapping[str, Any] | None = None,
    *,
    runs: str | Path = "runs",
    direct: bool = False,
    observe: Observe = lambda event, facts: None,
) -> RunningLab:
    """Start a lab on this machine, in processes of its own: `fedstrata run`.

    `experiment`: a TOML file, the name of one that fedstrata brings along, or its keys as a tree. `changes`: values by
    dotted key. `direct`: without a network. `observe(event, facts)` gets each event of the cloud, from another thread.
    Raises InvalidExperiment for a tree or a value that cannot be.
    """
    words = ["run", "--format", "json", "--runs", str(runs)]
    for key, value in (changes or {}).items():
        words += ["--set", f"{key}={_toml(key, value)}"]
    if isinstance(experiment, Mapping):
        return RunningLab(words, direct, observe, text=to_toml(parse(experiment)))
    return RunningLab([*words, "--", str(experiment)], direct, observe)


class RunningLab:
    """A started run. `await lab`, or `lab.wait()`, gives the finished Run."""

    def __init__(self, words: list[str], direct: bool, observe: Observe, *, text: str = "") -> None:
        self.folder: Path | None = None  # once the run has one
        self._observe = observe
        self._file: Path | None = None
        if text:
            handle, name = tempfile.mkstemp(prefix="fedstrata-", suffix=".toml")
            self._file = Path(name)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            words = [*words, "--", name]
        self._errors: deque[str] = deque(maxlen=ERRORS)
        self._process = subprocess.Popen(
            [*python("deploy.cli"), words[0], *(["--direct"] if direct else []), *words[1:]],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
            errors="replace",
        )  # fmt: skip
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def wait(self, timeout_s: float | None = None) -> Run:
        """Return the run once it has finished.

        Raises RunFailed with the last line that the command wrote if it failed or was refused, and TimeoutError, after
        which it can be waited for again.
        """
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the run is not finished after {timeout_s:g} s") from None
        for reader in self._readers:
            reader.join()
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        if code != 0 or self.folder is None:
            raise self._failure(code)
        return Run(self.folder)

    def __await__(self) -> Generator[Any, None, Run]:
        """Wait without blocking the event loop."""
        return asyncio.to_thread(self.wait).__await__()

    def stop(self) -> None:
        """Interrupt the run, which can be resumed: `fedstrata run --resume FOLDER`."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                facts = json.loads(line)
                event = facts.pop("event")
                if event == "run":
                    self.folder = Path(facts["folder"])
                self._observe(event, facts)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            self._errors.extend(line.strip() for line in lines if line.strip())

    def _failure(self, code: int) -> RunFailed:
        reason = self._errors[-1].removeprefix("fedstrata: ") if self._errors else "the command wrote nothing"
        return RunFailed(f"{reason} (exit code {code})")


def _toml(key: str, value: Any) -> str:
    """Return a value as `--set` reads it. Raises InvalidExperiment."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(key, name)} = {_toml(key, part)}" for name, part in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(key, part) for part in value) + "]"
    if isinstance(value, (bool, int, float, str)):
        return json.dumps(value, ensure_ascii=False)
    problem, remedy = "no value of an experiment", "Give a number, a text, true or false, or a list or table of them."
    raise InvalidExperiment(key, value, problem, remedy)
