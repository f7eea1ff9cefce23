"""Runs in the test's own process, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from cloud.results import RunFolder
from common.errors import FedstrataError
from common.experiment.reading import parse
from common.experiment.schema import Experiment
from common.runtime.round import Observe
from deploy.local.direct import run_in_process
from deploy.sweeps import worker
from deploy.sweeps.folder import MissingRun
from deploy.sweeps.running import CellFailed, DirectSlot, Watch


def direct_run(
    folder: RunFolder, *, until: int = 0, resume: bool = False, observe: Observe = lambda event, facts: None
) -> RunFolder:
    """Run a lab in a new folder to its end, or to the end of global round `until`, as if it was killed there."""

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


class HereSlot(DirectSlot):
    """A slot of a sweep whose worker is the test's process, which has loaded torch already."""

    async def run(self, job: MissingRun, watch: Watch) -> None:
        """Run a job to its end."""
        try:
            await asyncio.to_thread(
                worker.run, self._request(job), lambda **record: watch(str(record["event"]), record)
            )
        except FedstrataError as error:
            raise CellFailed(str(error), error.exit_code) from None
