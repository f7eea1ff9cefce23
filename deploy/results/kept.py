"""A finished run as a few small text files, for a repository, and what it cost.

A kept run is a run's folder with less in it: `experiment.toml` has only the keys that differ from the defaults,
`rounds.csv` the global rounds, `events.jsonl` the run's begin and end, `manifest.json` what was run where, with the
digest of the model. So `sweep`, `report` and `compare` read it as any other run. It outlives the format of run folders:
the digest of its experiment is computed anew when it is read, and whoever renames a key or a column, or changes a
default, does so in the kept files, too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from cloud.records import to_csv
from cloud.results import DIRECT, HELD, SIMULATED, RunFolder
from common.experiment.reading import parse
from common.experiment.schema import Experiment
from common.experiment.short_form import as_written
from common.experiment.tables import write
from common.host.files import replacing, writing
from common.model.tensors import content
from common.text import json_text
from deploy.results.run import CELL, Run, State

CPU_S: Final = "cpu_s"  # in manifest.json
COMMIT: Final = "commit"  # in manifest.json
SOURCE: Final = Path(__file__).parents[2]
MODEL: Final = "model.safetensors"
# Of the manifest: nothing of single nodes, which the experiment has, and no name of a host.
KEPT: Final = (
    "run", "started", "experiment_digest", "cpus", "python", "packages", "evaluated_on",
    "model_bytes", "partition", CPU_S, COMMIT, DIRECT, SIMULATED,
)  # fmt: skip


@contextmanager
def cost_noted(folder: RunFolder, used_s: Callable[[], float] = lambda: sum(os.times()[:4])) -> Iterator[None]:
    """Note the CPU seconds of the `with` block in a run's manifest, over restarts, and the commit of the source.

    The seconds are those of this process and of its children that ended; what a killed process used is missing.
    """
    begin = used_s()
    try:
        yield
    finally:
        if folder.path.exists():
            earlier = json.loads((folder.path / "manifest.json").read_text(encoding="utf-8")).get(CPU_S, 0.0)
            folder.note(**{CPU_S: round(earlier + used_s() - begin, 2), COMMIT: source_commit()})


def source_commit(source: Path = SOURCE) -> str | None:
    """Return the git commit of the source that runs, with `-dirty` if it was changed; None for an installed release."""
    if not (source / ".git").exists():
        return None
    words = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return None
    return found.stdout.strip() or None


def keep(run: Run, root: Path, *, cell: str) -> Path:
    """Write a finished run to a folder of its own below `root`, and return that. Raises StorageFailed.

    `cell`: its name in the sweep, such as `IID, FedAvg`.
    """
    experiment = run.experiment
    words = re.sub(r"[^a-z0-9.]+", "-", f"{cell} seed {experiment.seed}".lower()).strip("-")
    path = root / f"{words}-{experiment.digest[:6]}"
    manifest = {key: run.manifest[key] for key in KEPT if key in run.manifest} | {
        CELL: cell,
        "links": {"enforce": experiment.links.enforce},
        "model": _model_digest(run.path / MODEL),
    }
    last = next(event for event in reversed(run.events) if event.name == State.FINISHED)
    facts = {key: value for key, value in last.facts.items() if key != "model"}  # its path
    texts = {
        HELD: write(brief(experiment)),
        "rounds.csv": to_csv(run.rounds, header=True),
        "events.jsonl": json_text({"time": last.time, "event": last.name, **facts}) + "\n",
        "manifest.json": json_text(manifest, indent=2) + "\n",  # at last: it makes the folder a run's
    }
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with replacing(path / name) as file:
                file.write(text.encode())
    return path


def brief(experiment: Experiment) -> dict[str, Any]:
    """Return an experiment's tree without the keys that have their defaults; its nodes and tiers are whole."""
    tree = as_written(experiment)
    nodes: dict[str, Any] = {key: tree[key] for key in ("topology", "tiers") if key in tree}
    found = nodes | _changed(tree, as_written(parse(nodes)))
    return found if parse(found).digest == experiment.digest else tree


def _changed(tree: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return what differs from a tree of defaults. A table of another name is whole: its defaults are others."""
    found = {}
    for key, value in tree.items():
        other = plain.get(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping) and value.get("name") == other.get("name"):
            if inner := _changed(value, other):
                found[key] = inner
        elif value != other:  # TOML as we write it has no empty tables
            found[key] = {k: v for k, v in value.items() if v != {}} if isinstance(value, Mapping) else value
    return found


def _model_digest(path: Path) -> str | None:
    """Return the digest of a model's tensors, without its file's metadata, which name the run; None without a file."""
    from safetensors.numpy import load_file

    return content(load_file(path), {}) if path.exists() else None
