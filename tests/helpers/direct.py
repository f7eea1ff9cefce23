"""Runs in the test's own process, without a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloud.results import RunFolder
from common.experiment.reading import parse
from common.experiment.schema import Experiment
from deploy.local.direct import run_in_process


def run_direct(root: Path, lab: Experiment | Mapping[str, Any]) -> Path:
    """Run an experiment, or its tree, and return the run's folder."""
    folder = RunFolder.create(root, lab if isinstance(lab, Experiment) else parse(lab), direct=True)
    try:
        run_in_process(folder, resume=False, accelerator="cpu", observe=lambda event, facts: None)
    finally:
        folder.release()
    return folder.path
