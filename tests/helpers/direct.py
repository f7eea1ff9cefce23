"""Runs in the test's own process, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloud.results import RunFolder
from common.errors import FedstrataError
from common.experiment.reading import parse
from common.experiment.schema import Experiment
from deploy.local.direct import run_in_process
from deploy.sweeps import worker
from deploy.sweeps.folder import MissingRun
from deploy.sweeps.running import CellFailed, DirectSlot, Watch


def run_direct(root: Path, lab: Experiment | Mapping[str, Any]) -> Path:
    """Run an experiment, or its tree, and return the run's folder."""
    folder = RunFolder.create(root, lab if isinstance(lab, Experiment) else parse(lab), direct=True)
    try:
        run_in_process(folder, resume=False, accelerator="cpu", observe=lambda event, facts: None)
    finally:
        folder.release()
    return folder.path


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
