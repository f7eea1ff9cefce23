"""The cloud agent's interface to the evaluator process: the initial model, and the accuracy of later models."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import InvalidExperiment, RunFailed
from common.experiment.schema import Experiment
from common.model.layout import ModelLayout, Row


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Accuracy and loss of a model on the test set."""

    global_round: int
    accuracy: float
    loss: float


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """Initial model of a run, uint8 [row_bytes], and digest of the data split."""

    layout: ModelLayout
    row: Row
    partition: str


class Evaluator:
    """One evaluator process that serves one request at a time. It writes the data split into the run's folder."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        self._experiment = experiment
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluator")
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> Beginning:
        """Start the process and return the initial model. Raises RunFailed, InvalidExperiment."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._start)

    async def evaluate(self, global_round: int, row: Row) -> Accuracy:
        """Return a model's test accuracy and loss; `row` must not change meanwhile. Raises RunFailed."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._evaluate, global_round, row)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> Beginning:
        command = [sys.executable, "-m", "cloud.evaluator_process", str(self._folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        head = self._request(self._experiment.to_json().encode() + b"\n")
        row = np.empty(int(head["bytes"]), np.uint8)
        stdout = self._process.stdout
        if stdout is None or stdout.readinto(row.data) != row.size:  # type: ignore[attr-defined]
            raise self._died()
        return Beginning(ModelLayout.from_json(head["layout"]), row, head["partition"])

    def _evaluate(self, global_round: int, row: Row) -> Accuracy:
        reply = self._request(json.dumps({"global_round": global_round}).encode() + b"\n", row.data)
        return Accuracy(reply["global_round"], reply["accuracy"], reply["loss"])

    def _request(self, *parts: bytes | memoryview) -> Any:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise RunFailed("the evaluator was not started")
        try:
            for part in parts:
                process.stdin.write(part)
            process.stdin.flush()
            line = process.stdout.readline()
        except (BrokenPipeError, ValueError):
            line = b""
        if not line:
            raise self._died()
        reply = json.loads(line)
        if "invalid" in reply:
            raise InvalidExperiment(*reply["invalid"])
        return reply

    def _died(self) -> RunFailed:
        code = self._process.wait() if self._process else None
        return RunFailed(f"the evaluator process ended with code {code}; its message is above")
