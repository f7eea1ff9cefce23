"""Files of first models as wrappers, distributed training, mixed precision and model hubs leave
them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError

from fedstrata.common.errors import InvalidExperiment, RefusedModel
from fedstrata.common.model import tensors
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.model.parts import INITIAL, NO_ARRAYS, differences
from fedstrata.common.model.tensors import BFLOAT16, Tensors

WRAPPERS: Final = (
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_forward_module",
    "_checkpoint_wrapped_module",
)
HEAD_BYTES: Final = 64
TO_SAFETENSORS: Final = (
    "It is not read, as a pickle may run code. Convert its state_dict: "
    'safetensors.torch.save_file(torch.load("{}", weights_only=True), "model.safetensors").'
)
# of files, by their first bytes: what each is, and the remedy
KINDS: Final[Mapping[bytes, tuple[str, str]]] = {
    b"\x80": ("a pickle", TO_SAFETENSORS),
    b"\x93NUMPY": (
        "one array of numpy's",
        "Name its arrays: safetensors.numpy.save_file(dict, FILE).",
    ),
    b"\x89HDF": (
        "an HDF5 file",
        "Convert it: safetensors.numpy.save_file(dict of its arrays, FILE).",
    ),
    b"GGUF": (
        "a GGUF file of quantised weights",
        "Name the file of the model in safetensors' format.",
    ),
    b"version https://git-lfs": (
        "a pointer of Git LFS, not the file",
        "Fetch the file: git lfs pull.",
    ),
    b"\x1f\x8b": ("compressed", "Unpack it."),
    b"": ("empty", "Name another file."),
}


@dataclass(frozen=True, slots=True, eq=False)
class WarmStart:
    """The arrays of a file by the model's names, the digest of the file's content, and what its
    user should know.
    """

    arrays: Tensors
    content: str
    notes: list[str]


def read_initial(
    initial: str,
    layout: ModelLayout,
    row: Row,
    *,
    model: str,
    known: Container[str] = (),
    frozen: Tensors = NO_ARRAYS,
) -> WarmStart:
    """Read a safetensors file, or that of a run's folder, into a flat model, uint8 [row_bytes].

    Its arrays have the shapes of the layout, and its names, but for a prefix or the names of
    wrappers. Other floats and other whole numbers are cast. The file may also have arrays that are
    `known`, and `frozen` ones in their form. `model`: its name in errors. Raises InvalidExperiment.
    """
    path = tensors.file_of(initial)
    try:
        read, _ = tensors.read(path)
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        problem, remedy = _unread(path, error)
        raise InvalidExperiment(INITIAL, initial, problem, remedy) from None
    views = layout.views(row)
    found, notes = _renamed(read, [*views])
    found, cast = _cast(found, {**frozen, **views})
    optional = {name: array for name, array in frozen.items() if name in found}
    others = {name for name in found if name in known and name not in views}
    if wrong := differences(found, {**optional, **views}, known=others):
        raise InvalidExperiment(
            INITIAL, initial, f"not a model of {model}: {wrong}", "Name a file of the same model."
        )
    layout.flatten(found, row)
    try:
        layout.check_finite(row)
    except RefusedModel as error:
        raise InvalidExperiment(INITIAL, initial, str(error), "Name another file.") from None
    noted = [f"{INITIAL} = {initial!r}: {note}" for note in (*notes, *cast)]
    return WarmStart(found, tensors.content(read, {}), noted)


def _renamed(read: Tensors, wanted: list[str]) -> tuple[Tensors, list[str]]:
    """Return a file's arrays by the model's names, and a note if they are others there."""
    if all(name in read for name in wanted):
        return read, []
    for names, note in _candidates(read, wanted):
        given = set(names.values())
        if len(given) == len(names) and given.issuperset(wanted):
            return {name: read[old] for old, name in names.items()}, [note]
    return read, []


def _candidates(read: Iterable[str], wanted: list[str]) -> Iterable[tuple[dict[str, str], str]]:
    """Yield other names for a file's arrays, and how each note describes them."""
    names = {}
    left_out = set()
    for name in read:
        parts = name.split(".")
        names[name] = ".".join(part for part in parts if part not in WRAPPERS)
        left_out.update(set(WRAPPERS).intersection(parts))
    if left_out:
        shown = ", ".join(f"`{part}.`" for part in sorted(left_out))
        yield names, f"its names have {shown}, which is left out"
    prefix = ""
    while True:
        heads = {name.partition(".")[0] for name in names.values()}
        if len(heads) != 1 or not all("." in name for name in names.values()):
            break
        prefix += f"{heads.pop()}."
        names = {old: name.partition(".")[2] for old, name in names.items()}
        yield names, f"its names begin with `{prefix}`, which is left out"
    heads = {name.partition(".")[0] for name in wanted if "." in name}
    if len(heads) == 1:
        added = f"{heads.pop()}."
        yield (
            {name: f"{added}{name}" for name in read},
            f"its names do not begin with `{added}`, which is added",
        )


def _cast(found: Tensors, wanted: Tensors) -> tuple[Tensors, list[str]]:
    """Return arrays with the types of the model's, where both are floats or whole numbers, and
    notes of it.
    """
    made: dict[str, npt.NDArray[Any]] = {}
    changes: dict[str, int] = {}
    for name, array in found.items():
        like = wanted.get(name)
        made[name] = array
        if like is None or array.dtype == like.dtype:
            continue
        if array.dtype == BFLOAT16 and like.dtype.kind == "f":
            values = (array[BFLOAT16.names[0]].astype(np.uint32) << 16).view(np.float32)  # type: ignore[index]
        elif array.dtype.kind == like.dtype.kind or (
            array.dtype.kind in "iub" and like.dtype.kind == "i"
        ):
            values = array
        else:
            continue
        with np.errstate(over="ignore"):  # what is not finite then is refused
            made[name] = values.astype(like.dtype)
        change = (
            f"{array.dtype.name if array.dtype != BFLOAT16 else 'bfloat16'}, cast to {like.dtype}"
        )
        changes[change] = changes.get(change, 0) + 1
    return made, [
        f"{count} of its {len(found)} arrays are {change}" for change, count in changes.items()
    ]


def _unread(path: Path, error: Exception) -> tuple[str, str]:
    """Return why a file is not read, and the remedy."""
    remedy = "Name a finished run's folder, or a file in safetensors' format."
    if not path.exists():
        if path.parent.is_dir() and path.name == tensors.FINAL:
            others = sorted(each.name for each in path.parent.iterdir())[:5]
            return (
                f"the folder has no {tensors.FINAL}; it has {', '.join(others) or 'nothing'}",
                remedy,
            )
        return (
            f"{path} cannot be read: no such file",
            f"{remedy} A hub's model is downloaded first.",
        )
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if any(name.endswith("data.pkl") for name in names):
            return f"{path} is a file of torch.save", TO_SAFETENSORS.format(path.name)
        if names and all(name.endswith(".npy") for name in names):
            return (
                f"{path} is a file of numpy.savez",
                "Convert it: safetensors.numpy.save_file(dict(np.load(FILE)), NEW).",
            )
    head = b"?"
    with suppress(OSError), path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    for first, (kind, how) in KINDS.items():
        if head.startswith(first) if first else not head:
            return f"{path} is {kind}", how.format(path.name)
    return f"{path} cannot be read: {error}", remedy
