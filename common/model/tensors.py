"""Files of named tensors in safetensors' format, which any tool can read, with a digest of their content.

Its own `save_file` is not used: it gives the file mode 0600, whatever the umask, and hides the errno of a full disk.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from xxhash import xxh3_64

Tensors: TypeAlias = Mapping[str, npt.NDArray[Any]]

FINAL: Final = "model.safetensors"  # in a run's folder
CONTENT: Final = "content"  # in the metadata: the digest
TYPES: Final = {
    "float32": "F32",
    "float64": "F64",
    "float16": "F16",
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}  # numpy's names, and those of the format


def write(file: BinaryIO, tensors: Tensors, metadata: Mapping[str, str]) -> None:
    """Write tensors of `TYPES` and metadata, to which the digest is added. Raises OSError."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))  # aligns each
    header: dict[str, Any] = {"__metadata__": {**metadata, CONTENT: content(tensors, metadata)}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": TYPES[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)))
    file.write(text)
    for _, tensor in ordered:
        file.write(_bytes(tensor))


def content(tensors: Tensors, metadata: Mapping[str, str]) -> str:
    """Return 16 hexadecimal digits over the tensors and the metadata, without the digest in it."""
    facts = {name: text for name, text in metadata.items() if name != CONTENT}
    total = xxh3_64(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        total.update(_bytes(tensor))
    return total.hexdigest()


def read(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """Return a file's tensors and its metadata. Raises SafetensorError, OSError, ValueError, TypeError."""
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118 - no mapping


def file_of(run: str) -> Path:
    """Return the file of a run's folder that has its final model, or the file that was named itself."""
    return Path(run) / FINAL if Path(run).is_dir() else Path(run)


def _bytes(tensor: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
