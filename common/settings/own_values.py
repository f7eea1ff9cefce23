"""What the user's own files keep: the values of their globals and classes, as digests that can be
compared.

A model, a loss or an objective may count in a global of its file. All devices of a process share
that, and the devices of other processes do not, so a result would depend on which devices train in
one process, and in which order.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, GeneratorType, ModuleType
from typing import Any, Final
from weakref import ReferenceType

from fedstrata.common.settings.tables import PACKAGE

INSTALLED: Final = ("site-packages", "dist-packages")


class ValueWriter(pickle.Pickler):
    """A pickler for comparisons: tensors and modules by value, functions by identity and by what
    they keep.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=4)
        self._seen: set[int] = set()

    def persistent_id(self, value: Any) -> object:
        """Return what stands for a value, None for itself."""
        if isinstance(value, FunctionType):
            return self._once(value, _kept_by)
        if isinstance(value, (BuiltinFunctionType, ModuleType, type)):
            return id(value)
        if isinstance(value, ReferenceType):
            return id(value())
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        return self._of_torch(value, torch)

    def _of_torch(self, value: Any, torch: Any) -> object:
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().flatten()
            digest = blake2b(flat.view(torch.uint8).numpy().data).digest()
            return value.requires_grad, str(value.dtype), tuple(value.shape), digest
        if isinstance(value, torch.Generator):
            return value.get_state().numpy().tobytes()
        if isinstance(value, torch.nn.Module):
            return self._once(value, vars)
        return None

    def _once(self, value: Any, kept: Callable[[Any], object]) -> object:
        """Return a value's identity, and the first time what it keeps: that may have the value
        itself.
        """
        if id(value) in self._seen:
            return id(value)
        self._seen.add(id(value))
        return id(value), kept(value)


class _AnyValue(ValueWriter):
    """A pickler that writes the text of what cannot be pickled."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to write an object."""
        if isinstance(value, GeneratorType) and value.gi_frame is not None:
            return str, (f"{value!r} {value.gi_frame.f_lasti} {dict(value.gi_frame.f_locals)!r}",)
        try:
            value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001 - any object may refuse it, with any error
            return str, (repr(value),)
        return NotImplemented


class _Digest:
    """A file that keeps the digest of what is written into it."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        """Add some bytes."""
        self._hash.update(data)
        return len(data)

    @property
    def value(self) -> bytes:
        """The digest."""
        return self._hash.digest()


def kept_in_files(names: Iterable[str]) -> dict[str, bytes]:
    """Return a digest of each value that the files of own code keep in globals and classes, by
    `module.NAME`.

    `names` are those of the own code, `package.module:Name`. Their packages count, and what they
    import from the current folder, but nothing of fedstrata's. Of installed packages, which may be
    large, only the named modules count.
    """
    found: dict[str, bytes] = {}
    for module in _files_of(names):
        found |= {label: _digest(value) for label, value in _values_of(module)}
    return found


def changed(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> list[str]:
    """Return the names of the values that differ; new ones too."""
    return sorted(label for label, digest in after.items() if before.get(label) != digest)


def _digest(value: object) -> bytes:
    file = _Digest()
    try:
        _AnyValue(file).dump(value)
    except Exception:  # noqa: BLE001 - any object may refuse to be pickled, with any error
        return repr(value).encode()
    return file.value


def _kept_by(function: FunctionType) -> object:
    """Return what a function keeps from call to call."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # it is empty
            cells.append(None)
    return cells, function.__defaults__, function.__kwdefaults__, vars(function)


def _values_of(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Yield the names and values of a module's globals and of its classes' attributes."""
    where = module.__name__
    for name, value in list(vars(module).items()):
        if name.startswith("__") or isinstance(value, ModuleType):
            continue
        if not isinstance(value, (type, FunctionType)):
            yield f"{where}.{name}", value
        elif value.__module__ == where:
            yield f"{where}.{name}", value
            if isinstance(value, type):
                for each, found in list(vars(value).items()):
                    if not each.startswith("__"):
                        yield f"{where}.{name}.{each}", found


def _files_of(names: Iterable[str]) -> list[ModuleType]:
    """Return the modules of own code, and those of the user's that they refer to."""
    named = [name.partition(":")[0] for name in names]
    packages = {name.partition(".")[0] for name in named}
    left = list(named)
    found: dict[str, ModuleType] = {}
    while left:
        name = left.pop()
        module = sys.modules.get(name)
        if module is None or name in found:
            continue
        if name not in named and not _is_users(module, packages):
            continue
        found[name] = module
        for value in list(vars(module).values()):
            if isinstance(value, ModuleType):
                left.append(value.__name__)
            elif isinstance(where := getattr(value, "__module__", None), str):
                left.append(where)
    return list(found.values())


def _is_users(module: ModuleType, packages: set[str]) -> bool:
    """Return whether a module is of these packages, or a file of the current folder, and not
    installed.
    """
    package = module.__name__.partition(".")[0]
    path = Path(getattr(module, "__file__", None) or "")
    if any(folder in path.parts for folder in INSTALLED):
        return False
    return package in packages or (package != PACKAGE and path.is_relative_to(Path.cwd()))
