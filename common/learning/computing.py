"""This machine's accelerators according to torch, and the settings and seeds of a process that
computes on one.
"""

from __future__ import annotations

import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

import numpy as np
import torch

from fedstrata.common.errors import AcceleratorLost, InvalidExperiment
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.accelerators import OPTION, choose, is_lost
from fedstrata.common.settings import own
from fedstrata.common.settings.training import TrainingSettings

CPU: Final = torch.device("cpu")
WORKSPACES: Final = "CUBLAS_WORKSPACE_CONFIG"
# Those of the page of torch.use_deterministic_algorithms: the first takes 24 MiB more, the second
# may be slower.
DETERMINISTIC_WORKSPACES: Final = (":4096:8", ":16:8")


class OfExperiment(Protocol):
    """An object that computes for an experiment."""

    _experiment: Experiment


_S = TypeVar("_S", bound=OfExperiment)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def own_code(experiment: Experiment) -> dict[str, str]:
    """Return the names of what computes with tensors, by key, of fedstrata's own too."""
    training = experiment.training
    names = {
        "model.name": experiment.model.name,
        "training.objective.name": training.objective.name,
    }
    if training.own_augmentation is not None:
        names |= {"training.augmentation.name": training.augmentation.name}
    return names | {"training.loss": training.loss}


def calls_own_code(method: Callable[Concatenate[_S, _P], _T]) -> Callable[Concatenate[_S, _P], _T]:
    """Make a method that calls an experiment's model, objective or loss raise InvalidExperiment for
    own code's errors.

    It raises AcceleratorLost where each later call of the accelerator would fail.
    """

    @wraps(method)
    def call(self: _S, /, *arguments: _P.args, **keywords: _P.kwargs) -> _T:
        names = own_code(self._experiment)
        try:
            if not any(map(own.is_own, names.values())):
                return method(self, *arguments, **keywords)
            with own.guarded(names):
                return method(self, *arguments, **keywords)
        except RuntimeError as error:
            if is_lost(error):
                raise AcceleratorLost(first_line(error)) from None
            raise

    return call


def accelerators() -> list[str]:
    """Return the names of this machine's accelerators, the CPU first; `choose` knows which of them
    are used.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    others = {"mps": torch.backends.mps.is_available(), "xpu": torch.xpu.is_available()}
    return [
        "cpu",
        *(f"cuda:{i}" for i in range(gpus)),
        *(name for name, there in others.items() if there),
    ]


def resolve_accelerator(name: str, *, key: str = OPTION) -> torch.device:
    """Return the first device selected by 'cpu', 'cuda', 'cuda:N' or 'auto'. Raises
    InvalidExperiment naming `key`.
    """
    return torch.device(choose(name, accelerators(), key=key)[0])


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, which has many with torch, or the name of its type
    without a text.
    """
    return str(error).strip().partition("\n")[0] or type(error).__name__


def set_up(accelerator: torch.device, training: TrainingSettings) -> None:
    """Apply an experiment's settings to this thread and its process. Raises InvalidExperiment.

    Sums must not depend on the number of cores, and a call that names no GPU would open a context
    on the first one. The number of threads and the current GPU are each thread's own, and the
    process may train for other experiments too. So all is applied before every training.
    """
    if accelerator.type == "cpu" and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    if accelerator.type != "cuda":
        return
    torch.cuda.set_device(accelerator)
    if training.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(accelerator)
        raise InvalidExperiment(
            "training.precision", "bf16", f"{name} does not support it", "Use fp32."
        )
    _set_up_gpu(tf32=training.precision == "tf32", deterministic=training.deterministic)


def set_up_evaluation(accelerator: torch.device) -> None:
    """Make this thread evaluate in fp32 on this GPU; on a CPU leave everything as it is."""
    if accelerator.type == "cuda":
        torch.cuda.set_device(accelerator)
        _set_up_gpu(tf32=False, deterministic=False)


_SEEDING = threading.RLock()  # all threads share these generators


@contextmanager
def seeded(seed: int, accelerator: torch.device = CPU) -> Iterator[None]:
    """Seed the generators of torch, numpy and Python that own code may use, for one block of a
    process at a time.

    Those of the CPU are restored.
    """
    with _SEEDING:
        before = torch.get_rng_state(), np.random.get_state(), random.getstate()
        torch.default_generator.manual_seed(seed)
        if accelerator.type == "cuda":
            torch.cuda.manual_seed(seed)
        np.random.seed(seed % (1 << 32))
        random.seed(seed)
        try:
            yield
        finally:
            torch.set_rng_state(before[0])
            np.random.set_state(before[1])
            random.setstate(before[2])


def _set_up_gpu(*, tf32: bool, deterministic: bool) -> None:
    # Releases of torch before 2.10 look for it at the process's first matrix product, and refuse
    # deterministic ones later, though it has been set meanwhile.
    workspaces = os.environ.setdefault(WORKSPACES, DETERMINISTIC_WORKSPACES[0])
    if deterministic and workspaces not in DETERMINISTIC_WORKSPACES:
        problem = f"the environment has {WORKSPACES}={workspaces}, with which cuBLAS is not"
        remedy = f"Unset it, or use {' or '.join(DETERMINISTIC_WORKSPACES)}."
        raise InvalidExperiment("training.deterministic", True, problem, remedy)
    # setting it imports the compiler's settings
    if torch.are_deterministic_algorithms_enabled() != deterministic:
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    # Once in a process, where the first matrix product is that of a backward pass: autograd's
    # thread has no context yet, and torch sets it.
    warnings.filterwarnings(
        "ignore", "Attempting to run cuBLAS, but there was no current CUDA context", UserWarning
    )
    # By default torch computes convolutions and recurrent layers in TF32. Of its two interfaces
    # this is the older: it sets what both return. After the newer one alone, torch's compiler fails
    # where it reads the older.
    warnings.filterwarnings(
        "ignore", "Please use the new API settings to control TF32", UserWarning
    )
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
