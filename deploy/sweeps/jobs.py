"""How many runs a sweep has at once: by this host's cores, its memory and its GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Final

from common.experiment.reading import parse
from common.experiment.schema import Experiment
from common.host import nvidia
from common.host.accelerators import choose
from common.host.machine import available_bytes
from device.pool.pool import cores

JOBS_STAGE: Final = "finds how many runs at once fit into the memory of this machine"  # what `default_jobs` does
MEMORY_SHARE: Final = 0.9  # of the memory that is available


def accelerators_of(name: str) -> Sequence[str]:
    """Return the accelerators that `--accelerator` selects, of this machine's. Raises InvalidExperiment."""
    if name == "cpu":
        return ("cpu",)
    gpus = nvidia.find()
    return choose(name, ["cpu", *(f"cuda:{gpu.index}" for gpu in (gpus.states() if gpus else ()))])


def default_jobs(experiments: Iterable[Experiment], accelerators: Sequence[str]) -> int:
    """Return how many of the experiments run at once without a network: one per GPU, or per core if memory permits."""
    if accelerators[0] != "cpu":
        return len(accelerators)
    most, available = cores(), available_bytes()
    if most == 1 or available is None:
        return most
    return fitting(most, available, max(map(_in_process, _kinds(experiments))))


def fitting(cores: int, available: float, each: int) -> int:
    """Return how many processes of `each` bytes fit into the available memory, at least 1 and at most one per core."""
    return max(1, min(cores, int(MEMORY_SHARE * available // each)))


def _kinds(experiments: Iterable[Experiment]) -> list[Experiment]:
    """Return an experiment of each kind whose memory may differ: by model, data and nodes."""
    kinds = {str((one.model, one.data.dataset, one.sizes())): one for one in experiments}
    return list(kinds.values())


def _in_process(experiment: Experiment) -> int:
    """Return the memory of a run without a network; found in a process of its own, as it loads data and model."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_bytes_of, experiment.to_json()).result()


def _bytes_of(experiment_json: str) -> int:
    """Return the bytes of a process that has all roles of an experiment, given as JSON."""
    from deploy.planning import footprint, workload

    work = workload.workload(parse(experiment_json))
    return footprint.direct_bytes(work.experiment, work.layout, data_bytes=work.data_bytes, kept_bytes=work.kept_bytes)
