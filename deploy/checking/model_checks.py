"""What a model of the user's own must do before a lab relies on it, and whether its steps can be
recorded.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from fedstrata.common.experiment.reading import parse
from fedstrata.common.host.examination import Finding

# that a function of a model may have
KEYWORDS: Final = frozenset({"shape", "classes", "outputs", "tokens"})


def is_model(found: object) -> bool:
    """Return whether own code is a class of modules, or a function with the keywords of one that
    makes a module.
    """
    torch = sys.modules.get("torch")
    if isinstance(found, type):
        return torch is not None and issubclass(found, torch.nn.Module)
    if not inspect.isfunction(found):
        return False
    parameters = inspect.signature(found).parameters.values()
    known = {each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD}
    return known <= KEYWORDS


def of(name: str, keys: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the findings about a model; `keys`: of its experiment. Raises InvalidExperiment if it
    fails.
    """
    from fedstrata.device.training.trainer import Trainer

    model, training = ({**keys.get(table, {})} for table in ("model", "training"))
    tree = {**keys, "model": {**model, "name": name}, "training": {"recorded": True, **training}}
    experiment = parse(tree)
    trainer = Trainer(experiment, node=experiment.tree.devices[0], accelerator="cpu")
    trainer.prepare()
    yield Finding("trains", True, True, "")
    yield Finding("the same twice", True, True, "")
    shared = [note for note in trainer.notes if "training.recorded" not in note]
    yield Finding("keeps nothing in its file", True, not shared, " ".join(shared))
    others = [note for note in trainer.notes if note not in shared]
    yield Finding("recorded steps", True, True, " ".join(others) or "as by autograd")
