"""Hierarchical federated learning on real networks: the public names, which docs/api.md explains.

A build puts `common`, `cloud`, `institution`, `device` and `deploy` into this package; in a
checkout they are the folders beside it.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
# `make links` made these, for tools
if not (_HERE / "common").is_dir() or (_HERE / "common").is_symlink():
    __path__.insert(0, str(_HERE.parent))

# Each name with its module, which is imported when the name is first used. __init__.pyi has the
# types.
_MODULES = {
    "Aggregated": "common.methods.rule",
    "ArrayTrainer": "common.training.array_trainer",
    "Attack": "common.methods.attack",
    "AttackedUpload": "common.methods.attack",
    "CachedUpload": "common.methods.cached_uploads",
    "ColumnRule": "common.methods.column_rule",
    "Columns": "common.methods.column_rule",
    "CombiningSettings": "common.methods.settings",
    "DeltaCodec": "common.model.delta_codecs",
    "Entry": "common.model.layout",
    "Experiment": "common.experiment.schema",
    "ExtrasRule": "common.methods.single_model",
    "FedstrataError": "common.errors",
    "Gram": "common.methods.statistics",
    "InvalidExperiment": "common.errors",
    "LabelledSamples": "common.methods.attack",
    "LocalTask": "common.training.array_trainer",
    "LocalUpdate": "device.training.objectives.objective",
    "MeanRule": "common.methods.column_rule",
    "Minibatch": "device.training.objectives.objective",
    "MixingRound": "common.methods.multi_model",
    "MixingRule": "common.methods.multi_model",
    "ModelLayout": "common.model.layout",
    "ModelSettings": "common.settings.data",
    "NodeDraws": "common.learning.refiner",
    "NodeSamples": "common.learning.refiner",
    "Objective": "device.training.objectives.objective",
    "RoundFacts": "common.methods.column_rule",
    "RoundModels": "common.model.refinement",
    "Rule": "common.methods.rule",
    "RuleContext": "common.methods.rule",
    "RuleSettings": "common.methods.settings",
    "RuleUse": "common.methods.settings",
    "Run": "deploy.results.run",
    "RunFailed": "common.errors",
    "RunningLab": "deploy.scripts",
    "Scored": "common.training.array_trainer",
    "Selector": "common.methods.selection",
    "SingleModelRule": "common.methods.single_model",
    "Situation": "common.methods.selection",
    "StagedSettings": "common.methods.settings",
    "Trained": "common.training.array_trainer",
    "TrainingSettings": "common.settings.training",
    "TrainingSite": "common.training.array_trainer",
    "TwoStageRule": "common.methods.multi_model",
    "UploadCache": "common.methods.cached_uploads",
    "Uploads": "common.methods.rule",
    "by_block": "common.methods.mixing",
    "compare": "deploy.scripts",
    "load": "deploy.scripts",
    "run": "deploy.scripts",
    "start": "deploy.scripts",
    "sweep": "deploy.scripts",
}
__all__ = tuple(_MODULES)


def __getattr__(name: str) -> Any:
    """Return a public name, from now on as an attribute of the package."""
    if name not in _MODULES:
        raise AttributeError(f"fedstrata has no public name {name!r}: it has {', '.join(_MODULES)}")
    found = getattr(import_module(f"fedstrata.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(_MODULES)
