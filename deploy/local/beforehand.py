"""What a run needs of this machine, checked before anything of it exists: packages, own code, files
of data.
"""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from fedstrata.cloud.evaluator import needs_process
from fedstrata.common.errors import InvalidExperiment, StorageFailed, installing
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.experiment.tiers import Tier
from fedstrata.common.methods.settings import RuleSettings
from fedstrata.common.settings import own
from fedstrata.common.settings.data import check_fits
from fedstrata.common.settings.own import OwnSettings, is_own
from fedstrata.common.settings.tables import SettingsTable
from fedstrata.common.settings.topology import CLOUD
from fedstrata.deploy.console.reporting import EXTRAS, require

FILES_BESIDE: Final = 100  # of a process, beside its connections
DATA: Final = "FEDSTRATA_DATA"  # the folder of data sets of a host's institutions and devices


def check_lab(experiment: Experiment, runs: Path | None, *, direct: bool) -> None:
    """Check what all nodes of a lab on this machine need, and that it can have a folder below
    `runs`.

    `direct`: all nodes are in this process. Raises InvalidExperiment, StorageFailed.
    """
    tree = experiment.tree
    if not direct:
        allow_connections(len(tree.nodes) + 1)
    require_torch(experiment)
    check_cloud(experiment, runs)
    check_code(experiment)
    for tier in experiment.tiers:
        _check_packages(experiment.key(tier), tier.aggregation)
    if experiment.data.dataset == "folder":
        require("PIL")
    if direct:
        here = experiment
    else:
        here = experiment.with_data_root(os.environ.get(DATA) or experiment.data.root)
    most = None if "{node}" in here.data.root else 1
    _check_data(here, tree.devices[:most])


def allow_connections(nodes: int) -> None:
    """Let this process and those that it starts open a connection for each node, as the broker
    does.

    The soft limit is raised for that, up to the hard one. Raises InvalidExperiment if that is too
    low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = nodes + FILES_BESIDE
    if hard != resource.RLIM_INFINITY and needed > hard:
        problem = f"the broker needs {needed} open files, and a process here may have {hard}"
        raise InvalidExperiment(
            "topology", f"{nodes} nodes", problem, f"Raise it as root: ulimit -Hn {needed}."
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def check_cloud(experiment: Experiment, runs: Path | None) -> None:
    """Check what the cloud and its evaluator need on this machine, and `runs`, unless it is None.

    Raises InvalidExperiment, StorageFailed.
    """
    if runs is not None:
        check_folder(runs)
    tier = experiment.tiers[0]
    _check_packages(experiment.key(tier), tier.aggregation)
    _check_tier(experiment, tier)
    if needs_process(experiment):
        require_torch(experiment)
        _check_learned(experiment)
        _check_data(experiment, [CLOUD])
    check_fits(experiment.data, experiment.model, devices=len(experiment.tree.devices))


def check_code(experiment: Experiment) -> None:
    """Check the own code of all nodes. Raises InvalidExperiment."""
    _check_learned(experiment)
    for tier in experiment.tiers:
        _check_tier(experiment, tier)
    training = experiment.training
    if training.trainer.folder:
        own.look_in(training.trainer.folder)
    for key, name in training.trainer.code.items():
        _check_name(key, name, training.trainer)
    _check_name("training.loss", training.loss)
    _check_name("training.objective.name", training.objective.name, training.objective)
    _check_name("training.augmentation.name", training.augmentation.name, training.augmentation)


def _check_learned(experiment: Experiment) -> None:
    if not experiment.training.trainer.learns_module:  # it stands for both
        return
    _check_name("model.name", experiment.model.name)
    _check_name("data.dataset", experiment.data.dataset)


def _check_tier(experiment: Experiment, tier: Tier) -> None:
    key = experiment.key(tier)
    codec = tier.transfer.up
    _check_name(f"{key}.aggregation.name", tier.aggregation.name, tier.aggregation)
    _check_name(f"{key}.selection.name", tier.selection.name, tier.selection)
    _check_name(f"{experiment.key(tier, 'transfer')}.up.name", codec.name, codec)


def require_torch(experiment: Experiment) -> None:
    """Check that PyTorch is installed if the experiment's trainer needs it. Raises
    InvalidExperiment.
    """
    if experiment.training.trainer.learns_module:
        require("torch")


def check_folder(runs: Path) -> None:
    """Check that a run's folder can be created. Raises StorageFailed."""
    there = next(each for each in (runs.absolute(), *runs.absolute().parents) if each.exists())
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".fedstrata-", dir=there))
    except OSError as error:
        raise StorageFailed(
            "--runs", str(runs), error.strerror or str(error), "Name another folder."
        ) from None


def _check_packages(key: str, rule: RuleSettings) -> None:
    for package in rule.packages:
        if find_spec(package) is None:
            problem = f"needs {package}, not installed here"
            remedy = f"{installing(EXTRAS[package])}."
            raise InvalidExperiment(f"{key}.aggregation.name", rule.name, problem, remedy)


def _check_name(key: str, name: str, settings: SettingsTable | None = None) -> None:
    """Import own code that a key names, and build what takes its keywords from its settings
    alone.
    """
    if not is_own(name):
        return
    if isinstance(settings, OwnSettings):
        settings.made(key)
    else:
        own.code(key, name)


def _check_data(experiment: Experiment, nodes: Iterable[str]) -> None:
    if is_own(experiment.data.dataset):
        return
    from fedstrata.common.learning.readers.builtin import check_files

    for node in nodes:
        check_files(experiment.data, node=node)
