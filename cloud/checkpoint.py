"""Checkpoints: a run's state after a global round.

A safetensors file holds the model by tensor name, with the run's state as JSON metadata. A folder
of the same name holds the state of the cloud's rule.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from safetensors import SafetensorError

from fedstrata.common.errors import InvalidExperiment, RefusedModel, WireError
from fedstrata.common.host.files import replacing, writing
from fedstrata.common.methods.rule import Rule
from fedstrata.common.model import tensors
from fedstrata.common.model.layout import ModelLayout, Row, Section
from fedstrata.common.model.parts import ModelParts, part_of_each
from fedstrata.common.model.tensors import Tensors
from fedstrata.common.settings.data import ModelSettings
from fedstrata.common.storage.states import keep_last, read_state, write_state

KEPT: Final = 2
NO_ARRAYS: Final[Tensors] = MappingProxyType({})
FACTS: Final = "fedstrata"  # in a file's metadata
LAYOUT: Final = "layout"


@dataclass(frozen=True, slots=True)
class RunState:
    """State of a run besides its model. `global_round`: the number of completed global rounds."""

    run: str
    digest: str
    global_round: int
    elapsed_s: float
    epochs: dict[str, int]
    selection: dict[str, Any] = field(default_factory=dict)  # the state of client selection
    privacy: dict[str, Any] = field(default_factory=dict)  # the releases of each unit
    course: dict[str, Any] = field(default_factory=dict)  # of the evaluations


def save(
    folder: Path,
    state: RunState,
    *,
    layout: ModelLayout,
    row: Row,
    rule: Rule,
    frozen: Tensors = NO_ARRAYS,
) -> Path:
    """Write a checkpoint and remove all but the last two. The model's file is written last: it
    marks completeness.

    Each step is on the disk before the next. Raises StorageFailed.
    """
    path = folder / f"round-{state.global_round:06d}.safetensors"
    write_state(folder, path.stem, rule.save)
    facts = {key: getattr(state, key) for key in RunState.__slots__}
    save_model(path, layout=layout, row=row, facts=facts, frozen=frozen)
    for old in sorted(folder.glob("round-*.safetensors"))[:-KEPT]:
        old.unlink(missing_ok=True)
    keep_last(folder, KEPT)
    return path


def save_model(
    path: Path, *, layout: ModelLayout, row: Row, facts: dict[str, Any], frozen: Tensors = NO_ARRAYS
) -> None:
    """Write a model under its state_dict's names, atomically, with facts as JSON metadata. Raises
    StorageFailed.

    `frozen`: its frozen arrays. Personal ones are in no file of the cloud.
    """
    with replacing(path) as file:
        tensors.write(
            file,
            {**layout.views(row), **frozen},
            {FACTS: json.dumps(facts), LAYOUT: layout.to_json()},
        )


def load_initial(model: ModelSettings) -> tuple[ModelLayout, Row, str, Tensors]:
    """Return the model of a file that a run wrote, or of a run's folder, the digest of its content,
    and frozen arrays.

    Frozen are those of that run, and those that `model.frozen` names. Raises InvalidExperiment.
    """
    initial = str(model.initial)
    path = tensors.file_of(initial)
    try:
        found, metadata = tensors.read(path)
        layout = ModelLayout.from_json(metadata[LAYOUT])
        constant = found.keys() - {entry.name for entry in layout.entries}
        digest = layout.frozen.digest if layout.frozen else ""
        if constant and tensors.content({name: found[name] for name in constant}, {}) != digest:
            raise ValueError("its frozen arrays are damaged")
        listed = [(entry.name, entry.shape, entry.section) for entry in layout.entries]
        listed += [(name, found[name].shape, Section.BUFFER) for name in sorted(constant)]
        held = [pattern for pattern in model.personal if _matches(pattern, found)]
        # a run with personal parts has none of them here
        patterns = model.model_copy(update={"personal": held})
        parts = part_of_each(patterns, {name: [name] for name in found}, constant=constant)
        made = ModelParts.of(listed, parts, found)
        layout = made.exchanged
        frozen = made.frozen
        row = layout.empty()
        layout.flatten(found, row)
        layout.check_finite(row)
    except (
        SafetensorError,
        OSError,
        ValueError,
        TypeError,
        KeyError,
        WireError,
        RefusedModel,
    ) as error:
        problem = f"{path} has no model that a run of fedstrata wrote: {error}"
        remedy = (
            "Name a finished run's folder, or evaluate at the cloud, which then reads any file."
        )
        raise InvalidExperiment("model.initial", initial, problem, remedy) from None
    return layout, row, tensors.content(found, {}), frozen


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def save_best(
    folder: Path,
    global_round: int,
    *,
    layout: ModelLayout,
    row: Row,
    run: str,
    rounds_back: int,
    frozen: Tensors = NO_ARRAYS,
) -> None:
    """Write the best model so far, and remove those that no resumed run returns to. Raises
    StorageFailed.

    `rounds_back`: global rounds that a resumed run may repeat: the best model before them stays,
    too.
    """
    with writing(folder):  # it may be the first file there
        folder.mkdir(exist_ok=True)
    facts = {"run": run, "global_round": global_round}
    save_model(best_of(folder, global_round), layout=layout, row=row, facts=facts, frozen=frozen)
    older = sorted(folder.glob("best-*.safetensors"))
    first = best_of(folder, max(0, global_round - rounds_back))
    for old in [path for path in older if path < first][:-1]:
        old.unlink(missing_ok=True)


def best_of(folder: Path, global_round: int) -> Path:
    """Return the file of the model that was the best one after a global round."""
    return folder / f"best-{global_round:06d}.safetensors"


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, none if the run ended before its first one."""
    return sorted(folder.glob("round-*.safetensors"), reverse=True)


def load(path: Path, *, layout: ModelLayout, row: Row, rule: Rule) -> RunState:
    """Read a checkpoint into the row, uint8 [row_bytes], from which the rule began. Raises
    InvalidExperiment.
    """
    try:
        found, metadata = tensors.read(path)
        if tensors.CONTENT not in metadata:
            raise ValueError("it has no digest")
        state = RunState(**json.loads(metadata[FACTS]))
        if ModelLayout.from_json(metadata[LAYOUT]).frozen != layout.frozen:
            raise ValueError("its frozen arrays are not those with which the cloud begins now")
        layout.flatten(found, row)
        read_state(path.with_suffix(""), rule.restore)
    except (
        SafetensorError,
        OSError,
        KeyError,
        TypeError,
        ValueError,
        WireError,
        RefusedModel,
    ) as error:
        raise InvalidExperiment(
            "--resume", str(path), f"not a checkpoint of this run: {error}", "Remove it."
        ) from None
    return state


def copy_best(best: Path, to: Path) -> None:
    """Copy a best model. Raises StorageFailed, and InvalidExperiment if it is damaged."""
    try:
        tensors.read(best)
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise InvalidExperiment(
            "stop.best", str(best), f"it cannot be read: {error}", "Examine that disk."
        ) from None
    with replacing(to) as file:
        file.write(best.read_bytes())
