"""A finished run as rows of its sweep's table, for a repository, and what it cost.

A kept run has less than a run's folder: of the experiment only the keys that differ from the
defaults, the global rounds, how it ended, and what was run where, with the digest of the model.
`sweep`, `report` and `compare` read it as any other run. It outlives the format of run folders: the
digest of its experiment is computed anew when it is read, and whoever renames a key or a column, or
changes a default, does so in the tables, too.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from fedstrata.cloud.run_folder import DIRECT, SIMULATED, RunFolder
from fedstrata.common.experiment.reading import recorded
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.experiment.short_form import as_written
from fedstrata.common.model.tensors import content
from fedstrata.deploy.results.cells import CellOrder
from fedstrata.deploy.results.kept_table import CELL, EXPERIMENT, FINISHED, RUN, KeptRun, add
from fedstrata.deploy.results.run import COMMIT, Run, State

CPU_S: Final = "cpu_s"  # in manifest.json
SOURCE: Final = Path(__file__).resolve().parents[2]
MODEL: Final = "model.safetensors"
STOPPED: Final = "stopped"  # of the last event: why the run ended
# Of the manifest: nothing of single nodes, which the experiment has, and no name of a host.
KEPT: Final = (
    "run",
    "started",
    "experiment_digest",
    "cpus",
    "instructions",
    "python",
    "packages",
    "evaluated_on",
    "model_bytes",
    "partition",
    CPU_S,
    COMMIT,
    DIRECT,
    SIMULATED,
)


@contextmanager
def cost_noted(
    folder: RunFolder, used_s: Callable[[], float] = lambda: sum(os.times()[:4])
) -> Iterator[None]:
    """Note the CPU seconds of the `with` block in a run's manifest, over restarts, and the commit
    of the source.

    The seconds are those of this process and of its children that ended; what a killed process used
    is missing.
    """
    begin = used_s()
    try:
        yield
    finally:
        if folder.path.exists():
            earlier = json.loads((folder.path / "manifest.json").read_text(encoding="utf-8")).get(
                CPU_S, 0.0
            )
            folder.note(**{CPU_S: round(earlier + used_s() - begin, 2), COMMIT: source_commit()})


def source_commit(source: Path = SOURCE) -> str | None:
    """Return the git commit of the source that runs, with `-dirty` if it was changed; None for an
    installed release.
    """
    if not (source / ".git").exists():
        return None
    words = [
        "git",
        "-C",
        str(source),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
        "--exclude=*",
    ]
    try:
        found = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return None
    return found.stdout.strip() or None


def keep(runs: Iterable[tuple[Run, str]], folder: Path, order: CellOrder) -> None:
    """Add finished runs, each with the name of its cell, to the table in a folder. Raises
    StorageFailed.
    """
    add([_kept(run, cell) for run, cell in runs], folder, order.written())


def _kept(run: Run, cell: str) -> KeptRun:
    last = next(event for event in reversed(run.events) if event.name == State.FINISHED)
    facts = {key: run.manifest[key] for key in KEPT if key in run.manifest} | {
        CELL: cell,
        "links": {"enforce": run.experiment.links.enforce},
        "model": _model_digest(run.path / MODEL),
        FINISHED: {"time": last.time, "event": last.name, STOPPED: last.facts.get(STOPPED)},
        EXPERIMENT: brief(run.experiment),
    }
    named = {RUN: run.id, CELL: cell, "seed": str(run.seed)}
    rows = [
        named | dict(zip(row.columns(), map(str, row.cells()), strict=True)) for row in run.rounds
    ]
    return KeptRun(facts, rows)


def brief(experiment: Experiment) -> dict[str, Any]:
    """Return an experiment's tree without the keys that have their defaults; its nodes and tiers
    are whole.
    """
    tree = as_written(experiment)
    nodes: dict[str, Any] = {key: tree[key] for key in ("topology", "tiers") if key in tree}
    found = nodes | _changed(tree, as_written(recorded(nodes)))
    if recorded(found).digest == experiment.digest:
        return found
    return tree


def _changed(tree: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return what differs from a tree of defaults. A table of another name is whole: its defaults
    are others.
    """
    found = {}
    for key, value in tree.items():
        other = plain.get(key)
        if (
            isinstance(value, Mapping)
            and isinstance(other, Mapping)
            and value.get("name") == other.get("name")
        ):
            if inner := _changed(value, other):
                found[key] = inner
        elif value != other:  # TOML as we write it has no empty tables
            found[key] = (
                {k: v for k, v in value.items() if v != {}} if isinstance(value, Mapping) else value
            )
    return found


def _model_digest(path: Path) -> str | None:
    """Return the digest of a model's tensors, without its file's metadata, which name the run; None
    without a file.
    """
    from safetensors.numpy import load_file

    if path.exists():
        return content(load_file(path), {})
    return None
