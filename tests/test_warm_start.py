"""`model.initial`: files as wrappers, compilers, distributed training, mixed precision and model
hubs leave them.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.model.layout import ModelLayout, Section
from fedstrata.common.model.tensors import write
from fedstrata.common.model.warm_start import read_initial

Arrays = Mapping[str, npt.NDArray[Any]]
NAMES: Final = ["fc1.weight", "fc1.bias", "norm.count"]
LAYOUT: Final = ModelLayout.build(
    [
        ("fc1.weight", (2, 3), Section.PARAMETER),
        ("fc1.bias", (2,), Section.PARAMETER),
        ("norm.count", (), Section.COUNTER),
    ]
)
ARRAYS: Final[dict[str, npt.NDArray[Any]]] = {
    "fc1.weight": np.arange(6, dtype=np.float32).reshape(2, 3) / 4,
    "fc1.bias": np.array([0.5, -1.0], np.float32),
    "norm.count": np.array(3),
}


def renamed(name_of: Callable[[str], str]) -> dict[str, npt.NDArray[Any]]:
    return {name_of(name): array for name, array in ARRAYS.items()}


FILES: Final[dict[str, tuple[Arrays, str]]] = {
    "as it is": (ARRAYS, ""),
    "distributed": (renamed("module.{}".format), "its names have `module.`, which is left out"),
    "compiled": (renamed("_orig_mod.{}".format), "its names have `_orig_mod.`, which is left out"),
    "both": (
        renamed("module._orig_mod.{}".format),
        "its names have `_orig_mod.`, `module.`, which is left out",
    ),
    "compiled inside": (
        renamed(lambda name: name.replace("fc1.", "fc1._orig_mod.")),
        "its names have `_orig_mod.`, which is left out",
    ),
    "sharded": (
        renamed("_fsdp_wrapped_module.{}".format),
        "its names have `_fsdp_wrapped_module.`",
    ),
    "in a trainer": (
        renamed("model.{}".format),
        "its names begin with `model.`, which is left out",
    ),
    "in a trainer of a wrapper": (
        renamed("net.module.backbone.{}".format),
        "its names begin with `net.backbone.`, which is left out",
    ),
    "half": (
        {
            **ARRAYS,
            "fc1.weight": ARRAYS["fc1.weight"].astype(np.float16),
            "fc1.bias": np.float16([0.5, -1]),
        },
        "2 of its 3 arrays are float16, cast to float32",
    ),
    "double": (
        {**ARRAYS, "fc1.bias": np.array([0.5, -1.0])},
        "1 of its 3 arrays are float64, cast to float32",
    ),
    "a small counter": (
        {**ARRAYS, "norm.count": np.array(3, np.int32)},
        "1 of its 3 arrays are int32, cast to int64",
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_of_the_same_model_is_taken_with_a_note(kind: str, tmp_path: Path) -> None:
    arrays, note = FILES[kind]
    save_file(dict(arrays), path := tmp_path / "given.safetensors")
    row = LAYOUT.empty()
    found = read_initial(str(path), LAYOUT, row, model="net")
    for name, view in LAYOUT.views(row).items():
        assert np.array_equal(view, ARRAYS[name])
    assert [each.startswith(f"model.initial = {str(path)!r}: {note}") for each in found.notes] == [
        True
    ] * bool(note)


def test_a_file_with_a_digest_and_another_content_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        write(file, ARRAYS, {"run": "earlier"})
    assert not read_initial(str(tmp_path), LAYOUT, LAYOUT.empty(), model="net").notes
    content = path.read_bytes()
    for changed in (
        content[:-1] + bytes([content[-1] ^ 1]),
        content.replace(b"earlier", b"another"),
    ):
        path.write_bytes(changed)
        with pytest.raises(InvalidExperiment, match="cannot be read: its content is damaged"):
            read_initial(str(tmp_path), LAYOUT, LAYOUT.empty(), model="net")


def test_bfloat16_is_cast_with_a_note(tmp_path: Path) -> None:
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in ARRAYS.items()}
    tensors["fc1.weight"] = tensors["fc1.weight"].bfloat16()
    save_tensors(tensors, path := tmp_path / "given.safetensors")
    row = LAYOUT.empty()
    found = read_initial(str(path), LAYOUT, row, model="net")
    assert np.array_equal(LAYOUT.views(row)["fc1.weight"], ARRAYS["fc1.weight"])
    assert found.notes == [
        f"model.initial = {str(path)!r}: 1 of its 3 arrays are bfloat16, cast to float32"
    ]


def test_a_model_in_a_wrapper_takes_the_file_of_the_model(tmp_path: Path) -> None:
    layout = ModelLayout.build(
        [("net.w", (2,), Section.PARAMETER), ("net.b", (1,), Section.PARAMETER)]
    )
    save_file(
        {"w": np.float32([1, 2]), "b": np.float32([3])}, path := tmp_path / "given.safetensors"
    )
    row = layout.empty()
    found = read_initial(str(path), layout, row, model="net")
    assert layout.views(row)["net.w"].tolist() == [1, 2]
    assert "its names do not begin with `net.`, which is added" in found.notes[0]


REFUSED: Final[dict[str, tuple[Arrays, str]]] = {
    "another shape": (
        {**ARRAYS, "fc1.bias": np.zeros(3, np.float32)},
        r"fc1.bias is float32 \[3\], not float32 \[2\]",
    ),
    "another name": (renamed(lambda name: name.replace("fc1", "fc2")), "fc1.weight is missing"),
    "two of a name": (
        renamed("module.{}".format) | {"_orig_mod.fc1.bias": np.zeros(2, np.float32)},
        "is missing",
    ),
    "whole weights": (
        {**ARRAYS, "fc1.bias": np.array([1, 2])},
        r"fc1.bias is int64 \[2\], not float32",
    ),
    "a count of floats": (
        {**ARRAYS, "norm.count": np.array(3.0)},
        r"norm.count is float64 \[\], not int64",
    ),
    "too large": ({**ARRAYS, "fc1.bias": np.array([1e99, 0])}, "fc1.bias holds NaN or Inf"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_of_another_model_is_refused(kind: str, tmp_path: Path) -> None:
    arrays, problem = REFUSED[kind]
    save_file(dict(arrays), path := tmp_path / "given.safetensors")
    with pytest.raises(InvalidExperiment, match=rf"^model.initial = .*{problem}"):
        read_initial(str(path), LAYOUT, LAYOUT.empty(), model="net")


def _torch(path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, path)


def _older_torch(path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, path, _use_new_zipfile_serialization=False)


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "pytorch_model.bin").touch()


OTHERS: Final[dict[str, tuple[Callable[[Path], Any], str]]] = {
    "model.pt": (
        _torch,
        r"is a file of torch.save. It is not read, .*torch.load\(\"model.pt\", weights_only=True\)",
    ),
    "model.pth": (
        _older_torch,
        r"is a pickle. It is not read, .*safetensors.torch.save_file\(torch.load\(\"model.pth\"",
    ),
    "model.npz": (
        lambda path: np.savez(path, w=np.zeros(2)),
        "is a file of numpy.savez. Convert it",
    ),
    "model.npy": (lambda path: np.save(path, np.zeros(2)), "is one array of numpy's"),
    "model.h5": (
        lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(99)),
        "is an HDF5 file",
    ),
    "model.gguf": (lambda path: path.write_bytes(b"GGUF" + bytes(99)), "is a GGUF file"),
    "lfs.safetensors": (
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "is a pointer of Git LFS, not the file. Fetch the file: git lfs pull",
    ),
    "model.safetensors.gz": (
        lambda path: path.write_bytes(gzip.compress(b"x")),
        "is compressed. Unpack it",
    ),
    "empty.safetensors": (lambda path: path.touch(), "is empty"),
    "text.safetensors": (lambda path: path.write_text("hello" * 9), "cannot be read"),
    "hub": (
        _folder,
        (
            "the folder has no model.safetensors; it has pytorch_model.bin. Name a finished run's "
            "folder"
        ),
    ),
    "absent/org": (lambda path: None, "no such file. Name a .*downloaded first"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_each_other_kind_of_file_has_its_remedy(name: str, tmp_path: Path) -> None:
    make, problem = OTHERS[name]
    make(tmp_path / name)
    with pytest.raises(InvalidExperiment) as caught:
        read_initial(str(tmp_path / name), LAYOUT, LAYOUT.empty(), model="net")
    text = str(caught.value)
    assert text.startswith("model.initial = ") and "\n" not in text and re.search(problem, text), (
        text
    )
