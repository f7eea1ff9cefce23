"""Files of named tensors in safetensors' format, which any tool can read, with a digest of their
content.

Its own `save_file` is not used: it gives the file mode 0600, whatever the umask, and hides the
errno of a full disk.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors import deserialize, safe_open
from xxhash import xxh3_64

Tensors: TypeAlias = Mapping[str, npt.NDArray[Any]]

FINAL: Final = "model.safetensors"  # in a run's folder
CONTENT: Final = "content"  # in the metadata: the digest
BFLOAT16: Final = np.dtype([("bfloat16", "<u2")])  # numpy has no such type: its bits
TYPES: Final = {
    BFLOAT16.name: "BF16",
    "float32": "F32",
    "float64": "F64",
    "float16": "F16",
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}  # numpy's names, and those of the format
_DTYPES: Final = {
    **{kind: np.dtype(name) for name, kind in TYPES.items() if kind != "BF16"},
    "BF16": BFLOAT16,
}


def write(file: BinaryIO, tensors: Tensors, metadata: Mapping[str, str]) -> None:
    """Write tensors of `TYPES` and metadata, to which the digest is added. Raises OSError."""
    file.write(_head(tensors, {**metadata, CONTENT: content(tensors, metadata)}))
    for _, tensor in _ordered(tensors):
        file.write(_bytes(tensor))


def size(tensors: Tensors, metadata: Mapping[str, str]) -> int:
    """Return the bytes of the file that `write` makes."""
    head = _head(tensors, {**metadata, CONTENT: content({}, {})})  # any digest has its length
    return len(head) + sum(tensor.nbytes for tensor in tensors.values())


def content(tensors: Tensors, metadata: Mapping[str, str]) -> str:
    """Return 16 hexadecimal digits over the tensors and the metadata, without the digest in it."""
    facts = {name: text for name, text in metadata.items() if name != CONTENT}
    total = xxh3_64(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        total.update(_bytes(tensor))
    return total.hexdigest()


def read(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """Return a file's tensors and its metadata.

    Raises SafetensorError, OSError, TypeError, and ValueError, also if it has a digest and another
    content.
    """
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
        if any(file.get_slice(name).get_dtype() == TYPES[BFLOAT16.name] for name in file.keys()):  # noqa: SIM118
            found = parse(path.read_bytes())
        else:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    if CONTENT in metadata and metadata[CONTENT] != content(found, metadata):
        raise ValueError("its content is damaged")
    return found, metadata


def parse(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of a file's bytes. Raises SafetensorError, and ValueError for a type not
    in `TYPES`.
    """
    found = {}
    for name, tensor in deserialize(data):  # type: ignore[no-untyped-call]
        if tensor["dtype"] not in _DTYPES:
            raise ValueError(f"{name} is {tensor['dtype']}, which numpy does not have")
        found[name] = np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]]).reshape(
            tensor["shape"]
        )
    return found


def file_of(run: str) -> Path:
    """Return the file of a run's folder that has its final model, or the file that was named
    itself.
    """
    if Path(run).is_dir():
        return Path(run) / FINAL
    return Path(run)


def _ordered(tensors: Tensors) -> list[tuple[str, npt.NDArray[Any]]]:
    return sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))  # aligns each


def _head(tensors: Tensors, metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in _ordered(tensors):
        start = end
        end = end + tensor.nbytes
        header[name] = {
            "dtype": TYPES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes(tensor: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
