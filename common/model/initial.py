"""The first model of a run from a file, `model.initial`: its arrays must be those of the model that the run trains."""

from __future__ import annotations

from collections.abc import Container
from types import MappingProxyType
from typing import Final

from safetensors import SafetensorError

from common.errors import InvalidExperiment, RefusedModel
from common.experiment.tables import NAMED_MOST
from common.model import tensors
from common.model.layout import ModelLayout, Row
from common.model.tensors import Tensors

INITIAL: Final = "model.initial"
NO_ARRAYS: Final[Tensors] = MappingProxyType({})


def read_initial(
    initial: str, layout: ModelLayout, row: Row, *, model: str, known: Container[str] = (), frozen: Tensors = NO_ARRAYS
) -> Tensors:
    """Read a safetensors file, or that of a run's folder, into a flat model, uint8 [row_bytes]; return its arrays.

    They have the names, shapes and dtypes of the layout; the file may also have those that are `known`, and
    `frozen` ones in their form. `model`: its name in errors. Raises InvalidExperiment.
    """
    path = tensors.file_of(initial)
    try:
        found, _ = tensors.read(path)
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        problem = f"{path} cannot be read: {error}"
        remedy = "Name a finished run's folder, or a file in safetensors' format."
        raise InvalidExperiment(INITIAL, initial, problem, remedy) from None
    views = layout.views(row)
    optional = {name: array for name, array in frozen.items() if name in found}
    others = {name for name in found if name in known and name not in views}
    if wrong := differences(found, {**optional, **views}, known=others):
        raise InvalidExperiment(INITIAL, initial, f"not a model of {model}: {wrong}", "Name a file of the same model.")
    layout.flatten(found, row)
    try:
        layout.check_finite(row)
    except RefusedModel as error:
        raise InvalidExperiment(INITIAL, initial, str(error), "Name another file.") from None
    return found


def differences(found: Tensors, wanted: Tensors, *, known: Container[str] = ()) -> str:
    """Return how arrays differ from the wanted ones in names, shapes and types, "" for not at all.

    `known`: names that may be among the found ones.
    """
    wrong = [
        *(f"{name} is missing" for name in wanted if name not in found),
        *(f"{name} is unknown" for name in found if name not in wanted and name not in known),
        *(
            f"{name} is {found[name].dtype} {list(found[name].shape)}, not {array.dtype} {list(array.shape)}"
            for name, array in wanted.items()
            if name in found and (found[name].shape, found[name].dtype) != (array.shape, array.dtype)
        ),
    ]
    more = f" and {len(wrong) - NAMED_MOST} more" if len(wrong) > NAMED_MOST else ""
    return "; ".join(wrong[:NAMED_MOST]) + more
