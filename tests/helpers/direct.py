"""Runs in the test's own process, without a network."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.runtime.round import Observe
from fedstrata.deploy.local.direct import run_in_process
from fedstrata.deploy.sweeps import worker
from fedstrata.deploy.sweeps.execution import Report, RunOrder, WorkerProcess


def direct_run(
    folder: RunFolder,
    *,
    until: int = 0,
    resume: bool = False,
    observe: Observe = lambda event, facts: None,
) -> RunFolder:
    """Run a lab in a new folder to its end, or to the end of global round `until`, as if it was
    killed there.
    """

    def look(event: str, facts: dict[str, object]) -> None:
        observe(event, facts)
        if event == "global_round" and facts["global_round"] == until:
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt) if until else nullcontext():
            run_in_process(folder, resume=resume, accelerator="cpu", observe=look)
    finally:
        folder.release()
    return folder


def run_direct(root: Path, lab: Experiment | Mapping[str, Any], **options: Any) -> Path:
    """Run an experiment, or its tree, and return the run's folder; `options` of `direct_run`."""
    experiment = lab if isinstance(lab, Experiment) else parse(lab)
    return direct_run(RunFolder.create(root, experiment, direct=True), **options).path


def resumed_run(path: Path, **options: Any) -> Path:
    """Resume the run of a folder to its end."""
    return direct_run(RunFolder.reopen(path, direct=True), resume=True, **options).path


def events(folder: Path, name: str, **facts: object) -> list[dict[str, Any]]:
    """Return a run's events of a name that have these facts."""
    lines = map(json.loads, (folder / "events.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["event"] == name and facts.items() <= line.items()]


class HereProcess(WorkerProcess):
    """The test's process as the worker process of a sweep: it has loaded torch already."""

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
        what = {"experiment": order.experiment} if resume is None else {"resume": str(resume)}
        request = {"runs": str(runs), "accelerator": order.accelerator or "cpu", **what}
        worker.run(request, lambda **record: report(record))
