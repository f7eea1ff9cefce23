"""The measurements of `make bench NAME=gpu`, by part: each yields its rows by name, with a function
that measures it.

They run in a process of their own for each part (`tests/bench/gpu.py`), on one accelerator, "cpu"
or "cuda:N".
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from fedstrata.common.experiment.reading import parse
from fedstrata.common.learning.computing import resolve_accelerator, set_up
from fedstrata.common.learning.evaluation import ModelTester
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.learning.nets import reseed
from fedstrata.common.settings.data import MODELS
from fedstrata.deploy.results.run import Run, folders
from fedstrata.device.jobs import DeviceOrder, Done, Ending, LocalResult
from fedstrata.device.pool.trainers_by_kind import Trainers
from fedstrata.device.training.sgd import run_sgd
from fedstrata.device.training.trained_network import source_of
from fedstrata.device.vmapped.schedule import plan
from fedstrata.device.vmapped.shared_steps import Batches
from fedstrata.device.vmapped.stacked_models import VmappedModels
from fedstrata.device.vmapped.vmapped_trainer import VmappedTrainer, _Shared
from tests.bench.image_labs import LENET, MLP, RESNET, Case, first_orders, image_lab
from tests.bench.running import MB, folder, output, turns

Facts: TypeAlias = Mapping[str, object]
Rows: TypeAlias = Iterator[tuple[str, Callable[[], Facts]]]

ROOT: Final = Path(__file__).parents[2]
PATIENCE_S: Final = 450  # for a process that a row starts
BATCH: Final = 10
CASES: Final = (MLP, LENET, RESNET)
ALONE: Final = 10  # devices one after another, at most
PRECISIONS: Final = ("fp32", "tf32", "bf16")
WARM_STEPS: Final = 3
IMAGES: Final = Inputs((3, 32, 32), 10)
INPUTS: Final = MappingProxyType(  # of models that do not take images of 3 x 32 x 32
    {
        **dict.fromkeys(("linear_digits", "mlp_digits", "cnn_digits"), Inputs((1, 8, 8), 10)),
        **dict.fromkeys(("lenet5", "cnn_fedavg", "cnn_fedavg_padded"), Inputs((1, 28, 28), 10)),
        **dict.fromkeys(("cnn_femnist", "vgg_femnist"), Inputs((1, 28, 28), 62)),
        "cnn_motions": Inputs((6, 1, 128), 7),
        "char_lstm": Inputs((80,), 80, tokens=80),
        "sent_lstm": Inputs((25,), 2, tokens=10_000),
    }
)


@dataclass(frozen=True, slots=True)
class Setting:
    """Where to measure, and whether in small form: on a CPU, to show that a part works."""

    accelerator: str

    @property
    def small(self) -> bool:
        """Whether this is no GPU."""
        return self.accelerator == "cpu"

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of devices that are measured."""
        return (1, 4) if self.small else (1, 10, 40, 200)

    def synchronise(self) -> None:
        """Wait for what is queued on the GPU."""
        if not self.small:
            torch.cuda.synchronize(self.accelerator)

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds of the work, to the end of what it queued."""
        self.synchronise()
        started = time.perf_counter()
        work()
        self.synchronise()
        return time.perf_counter() - started


def setting_of(accelerator: str | None) -> Setting:
    """Return where to measure: on this accelerator, by default on the first GPU, else on the
    CPU.
    """
    return Setting(accelerator or ("cuda:0" if torch.cuda.is_available() else "cpu"))


def machine(setting: Setting) -> Facts:
    """Return what the figures depend on: GPU, driver, versions."""
    facts: dict[str, object] = {"accelerator": setting.accelerator, "gpu": "none", "driver": "none"}
    if not setting.small:
        properties = torch.cuda.get_device_properties(setting.accelerator)
        facts |= {
            "gpu": properties.name,
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "driver": _driver(),
        }
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        facts |= {"cuda": torch.version.cuda, "cudnn": cudnn}
    return facts | {
        "torch": str(torch.__version__),
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
    }


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(asked[0]) is None:
        return "unknown"
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout.splitlines() or ["unknown"])[0].strip()


def tests(setting: Setting) -> Rows:
    """Yield each file with tests marked gpu."""
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        if "mark.gpu" not in path.read_text("utf-8"):
            continue
        yield path.name, partial(_tested, path)


def _tested(path: Path) -> Facts:
    """Return how many tests passed, failed and were skipped, and the names of those that failed."""
    options = ("-q", "-m", "gpu", "-p", "no:cacheprovider", "-rfE")
    words = [sys.executable, "-m", "pytest", *options, str(path)]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=ROOT
    )
    lines = done.stdout.splitlines() or [""]
    found = dict.fromkeys(("passed", "failed", "skipped"), 0)
    found |= {
        kind: int(count)
        for count, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])
    }
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if done.returncode:
        raise RuntimeError(
            f"{found}, {'; '.join(failures) or (done.stderr or done.stdout).strip()[-300:]}"
        )
    return found


def models(setting: Setting) -> Rows:
    """Yield each model in each precision."""
    for name in MODELS:
        for precision in PRECISIONS:
            yield f"{name}, {precision}", partial(_step, setting, name, precision)


def _step(setting: Setting, name: str, precision: str) -> Facts:
    """Return the milliseconds of a step of SGD as a device takes it, and its samples per second."""
    device, inputs = torch.device(setting.accelerator), INPUTS.get(name, IMAGES)
    size, count = (2, 2) if setting.small else (BATCH, 50)
    training = {"batch_size": size, "precision": precision}
    lab = parse({"model": {"name": name}, "training": training})
    set_up(device, lab.training)
    made = source_of(lab, inputs, accelerator=device)
    network = made.network()
    reseed(network.module.to(device), 1, device)
    source = torch.Generator().manual_seed(1)
    samples = (
        torch.randint(0, inputs.tokens, (size, *inputs.shape), generator=source)
        if inputs.tokens
        else torch.rand((size, *inputs.shape), generator=source)
    ).to(device)
    labels = torch.randint(0, inputs.classes, (size,), generator=source).to(device)

    def steps(number: int) -> None:
        taken = network.steps(lab, made.parts, rate=0.001, vectors={})
        run_sgd(
            taken, [(0, samples[None], labels[None])] * number, last_epoch=0, watch=lambda _: None
        )

    first_s = setting.seconds(lambda: steps(1))
    steps(WARM_STEPS)
    each_s = setting.seconds(lambda: steps(count)) / count
    found = {"step_ms": 1e3 * each_s, "samples/s": size / each_s, "first_step_ms": 1e3 * first_s}
    if not setting.small:
        found["memory_mb"] = torch.cuda.max_memory_allocated(device) / MB
        torch.cuda.reset_peak_memory_stats(device)
    return found


def together(setting: Setting) -> Rows:
    """Yield each number of devices of each model, one after another and vmapped."""
    for case in CASES:
        for precision in PRECISIONS:
            for count in setting.counts:
                row = f"{case.title}, {precision}, {count}"
                yield row, partial(_together, setting, case, count, precision)


def _work_of(case: Case, count: int, *, samples: int, precision: str) -> list[DeviceOrder]:
    """Return the orders of so many devices, each with a row of its own."""
    # vmapped is what this measures itself: here one after another
    training = {"batch_size": BATCH, "precision": precision, "vmapped": False}
    images = {"partition": "iid", "test_samples": 1}
    lab = image_lab(
        case.model, case.shape, samples * count, devices=count, training=training, **images
    )
    return first_orders(lab)


def _seconds(
    train: Callable[[Sequence[DeviceOrder], Done], object], work: Sequence[DeviceOrder]
) -> float:
    """Train all, and return the seconds."""
    ended: dict[int, Ending] = {}
    started = time.perf_counter()
    train(work, ended.__setitem__)
    taken = time.perf_counter() - started
    if not all(isinstance(ended.get(number), LocalResult) for number in range(len(work))):
        raise RuntimeError(f"not trained: {ended}")
    return taken


def _kernels_s(train: Callable[[], object]) -> float:
    """Return the seconds that the GPU's kernels take in a training."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train()
    return 1e-6 * float(sum(event.self_device_time_total for event in profile.key_averages()))


def _together(setting: Setting, case: Case, count: int, precision: str) -> Facts:
    """Return samples per second of so many devices, one after another and vmapped, and the median
    of their ratios.

    One after another at most ten devices are trained, and the time is scaled up. Of a GPU also the
    share of the time in which its kernels ran, by either way, as torch's profiler has it of one
    training more, in the time of a training without profiler; and the most memory.
    """
    samples, repeats = (20, 1) if setting.small else (600, 3)
    work = _work_of(case, count, samples=samples, precision=precision)
    some = work[:ALONE]
    trainers = Trainers()
    group = VmappedTrainer(resolve_accelerator(setting.accelerator))

    def one_by_one(orders: Sequence[DeviceOrder], done: Done) -> None:
        trainers.train(orders, setting.accelerator, done)

    def alone() -> float:
        return _seconds(one_by_one, some) * count / len(some)

    def vmapped() -> float:
        return _seconds(group.train if count > 1 else one_by_one, work)

    turns(1, alone, vmapped)  # loads the data, and what the accelerator needs
    if not setting.small:
        torch.cuda.reset_peak_memory_stats()
    alone_s, vmapped_s = turns(repeats, alone, vmapped)
    total = samples * count
    found = {
        "one by one, samples/s": total / median(alone_s),
        "vmapped, samples/s": total / median(vmapped_s),
        "factor": median(map(truediv, alone_s, vmapped_s)),
    }
    if not setting.small:
        one_s = _kernels_s(lambda: _seconds(one_by_one, work[:1]))
        found["busy, one by one"] = one_s * count / median(alone_s)
        found["busy, vmapped"] = _kernels_s(vmapped) / median(vmapped_s)
        found["memory_mb"] = torch.cuda.max_memory_allocated() / MB
    return found


def graphs(setting: Setting) -> Rows:
    """Yield each number of devices of each model: a vmapped step as it is, and from a CUDA graph."""
    for case in CASES:
        for count in setting.counts:
            yield f"{case.title}, {count}", partial(_graph, setting, case, count)


def _graph(setting: Setting, case: Case, count: int) -> Facts:
    """Return the milliseconds of a step, and how far the graph's models are from those without it.

    The difference is relative to the length of the steps. On a CPU there is no graph.
    """
    number = 3 if setting.small else 100
    plain_row, plain_step = _vmapped_step(setting, case, count)
    for _ in range(WARM_STEPS):
        plain_step()

    def plain() -> None:
        for _ in range(number):
            plain_step()

    found: dict[str, object] = {"step_ms": 1e3 * setting.seconds(plain) / number}
    if setting.small:
        return found
    row, step = _vmapped_step(setting, case, count)
    start = row()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    # libraries allocate before the capture, on the stream that is captured
    with torch.cuda.stream(stream):
        for _ in range(WARM_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()

    def replayed() -> None:
        for _ in range(number):
            graph.replay()

    graph_ms = 1e3 * setting.seconds(replayed) / number
    away, moved = np.linalg.norm(row() - plain_row()), np.linalg.norm(plain_row() - start)
    return found | {"graph_step_ms": graph_ms, "difference": float(away / moved)}


def _vmapped_step(
    setting: Setting, case: Case, count: int
) -> tuple[Callable[[], np.ndarray[Any, np.dtype[np.float32]]], Callable[[], None]]:
    """Return a function for the first device's model, and one that takes the first step of all
    devices.
    """
    work = _work_of(case, count, samples=BATCH, precision="fp32")
    experiment, device = work[0][0].experiment, torch.device(setting.accelerator)
    set_up(device, experiment.training)
    shared = _Shared(work[0][0], device)
    shared.know([hosted.node for hosted, _ in work])
    recipe = shared.recipe(experiment.training.learning_rate)
    turns = [shared.turn(hosted, order, lambda _: None) for hosted, order in work]
    made = plan([turn.load for turn in turns], batch_size=BATCH, pad=recipe.pads)
    ordered = [turns[k] for k in made.order]
    state = VmappedModels(recipe, [turn.row for turn in ordered], [turn.seed for turn in ordered])
    first = Batches(recipe, made, ordered).of(0)
    return lambda: recipe.layout.floats(state.read([0])[0][0]).copy(), lambda: state.step(*first)


def evaluation(setting: Setting) -> Rows:
    """Yield models, evaluated on the CPU and on the GPU."""
    for name in ("lenet5", "resnet20", "resnet18_cifar", "vgg16_bn"):
        yield name, partial(_evaluated, setting, name)


def _evaluated(setting: Setting, name: str) -> Facts:
    """Return seconds for 10,000 images."""
    images = (100, 100) if setting.small else (1_000, 10_000)
    shape = INPUTS.get(name, IMAGES).shape
    found: dict[str, object] = {}
    for where, count in zip(("cpu", setting.accelerator), images, strict=True):
        lab = image_lab(name, shape, 10, test_samples=count)
        tester = ModelTester(lab, accelerator=torch.device(where))
        if where != "cpu":  # its libraries are loaded by the first call
            tester.evaluate(tester.first)
        taken_s = setting.seconds(partial(tester.evaluate, tester.first))
        found[f"{where.partition(':')[0]}_s/10,000"] = taken_s * 10_000 / count
    if not setting.small:
        found["times"] = float(found["cpu_s/10,000"]) / float(found["cuda_s/10,000"])  # type: ignore[arg-type]
    return found


def lab(setting: Setting) -> Rows:
    """Yield whole labs of processes, whose devices choose their accelerators."""
    yield "vmapped", partial(_lab, setting, "")
    yield "one after another", partial(_lab, setting, "training = { vmapped = false }")


def _lab(setting: Setting, training: str) -> Facts:
    """Return what a run's files have: median seconds of a global round, accuracy, paths, where it
    was evaluated.
    """
    devices, samples, rounds = (4, 80, 2) if setting.small else (40, 24_000, 5)
    text = f"""
name = "bench-gpu"
rounds = {rounds}
topology = {{ institutions = 2, devices = {devices} }}
data = {{ dataset = "synthetic", classes = 10, image_shape = [1, 28, 28], samples = {samples}, test_samples = 1000 }}
model = {{ name = "lenet5" }}
{training}
links = {{ check = "off" }}
[evaluation]
accelerator = "auto"
"""
    with folder() as home:
        file = home / "lab.toml"
        file.write_text(text, encoding="utf-8")
        runs = home / "runs"
        metrics = ("--metrics", "127.0.0.1:0")
        output("run", file, "--runs", runs, *metrics, timeout=PATIENCE_S, cwd=home)
        (found,) = folders(runs)
        run = Run(found)
        paths = Counter(str(row.path) for row in run.devices)
        return {
            "global_round_s": median(row.seconds for row in run.rounds),
            "accuracy": run.accuracy,
            "trained": ", ".join(f"{path} {count}" for path, count in paths.items()),
            "evaluated_on": run.manifest["evaluated_on"],
        }


PARTS: Final[Mapping[str, Callable[[Setting], Rows]]] = MappingProxyType(
    {
        "tests": tests,
        "models": models,
        "vmapped": together,
        "graphs": graphs,
        "evaluation": evaluation,
        "lab": lab,
    }
)
