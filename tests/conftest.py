"""What several tests share. Drawn examples are the same on every run and every machine."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

# Before numpy and torch are imported. Several processes of tests share the cores: threads beside
# one another cost CPU seconds and win no time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# threads that spin take the core of the other test process
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# roles are started a hundred times: compiling takes a third of that
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
from hypothesis import HealthCheck, settings

from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.experiment.reading import parse
from fedstrata.common.protocol.messages import Manifest
from fedstrata.common.settings.topology import CLOUD
from tests.helpers.examples import DRAWN, PROFILE
from tests.helpers.records import a_global_round
from tests.helpers.timeouts import ended_by_timeout
from tests.helpers.warm import WarmProcess

# A job that a shell starts in the background, or by nohup, ignores these, and so do its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# each process of tests imports all of them: compiling is half of that
sys.dont_write_bytecode = False

SLOW_S: Final = 900.0

SAME: Final = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)  # on every run
for _profile, _count in DRAWN.items():
    settings.register_profile(_profile, SAME, max_examples=_count)
settings.load_profile(PROFILE)

LONG: Final = (  # most seconds first, of cores and of waits, the slow tests' too
    "seeds",
    "odd_trainers",
    "clusters",
    "damage",
    "staying",
    "prometheus",
    "faults",
    "trainers",
    "readme",
    "refiner_process",
    "rules",
    "scripts",
    "sweep_cluster",
    "new",
    "vmapped_nets",
    "standing_lab",
    "bare",
    "mutants",
    "simulated_run",
    "doctor",
    "privacy",
    "subprocess_channel",
    "odd_models",
    "changing_labs",
    "simulated_plan",
    "alerts",
    "pool",
    "parts",
    "sweep",
    "convex",
    "fedcda",
    "role_errors",
    "plan",
    "sent_models",
    "lab",
    "device_scores",
    "objectives",
    "access",
    "frozen",
    "own_errors",
    "direct",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: at the end, other processes would wait for them.

    A slow test is given more time until it counts as a hang.
    """
    for item in items:
        slow = item.get_closest_marker("slow") or item.get_closest_marker("flower")
        if slow and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))
    items.sort(
        key=lambda item: (
            LONG.index(name)
            if (name := item.path.stem.removeprefix("test_")) in LONG
            else len(LONG)
        )
    )


def pytest_collection_finish() -> None:
    """Keep what the imports made out of garbage collections: torch's are some 180 000 objects."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or libraries report leaks


@dataclass(frozen=True, slots=True)
class Forgery:
    """A chunk by somebody who read the manifest and all that was published."""

    owner: str
    stream: str
    blob: str
    index: int
    number: int
    data: bytes


class Forge:
    """Makes hostile chunks of every kind; `published` are stream, index and number of what the
    owner published.
    """

    kinds: ClassVar = (
        "damaged",
        "cut",
        "grown",
        "empty",
        "misplaced",
        "repeated",
        "beyond the end",
        "other blob",
        "other owner",
    )

    def __init__(self, owner: str, *, streams: Sequence[str]) -> None:
        self._owner = owner
        self._streams = streams

    def __call__(
        self,
        draw: random.Random,
        kind: str,
        manifest: Manifest,
        data: memoryview,
        *,
        published: Sequence[tuple[str, int, int]],
    ) -> Forgery:
        """Return one of a kind; where its bytes are the chunk's own, it comes out of order or
        twice.
        """
        stream, index = draw.choice(self._streams), draw.randrange(manifest.chunks)
        number = draw.choice(
            [0, published[-1][2] + 1 if published else 1, draw.randrange(6000), 10**17]
        )
        if kind == "repeated" and published:
            stream, index, old = draw.choice(published)
            number = draw.choice([old, number])
        body = bytes(data[manifest.span(index)])
        bit = draw.randrange(8 * len(body))
        damaged = bytearray(body)
        damaged[bit // 8] ^= 1 << bit % 8
        bodies = {
            "damaged": bytes(damaged),
            "cut": body[: bit // 8],
            "grown": body + draw.randbytes(1),
            "empty": b"",
            "misplaced": bytes(data[manifest.span((index + 1) % manifest.chunks)]),
        }
        return Forgery(
            owner="stranger" if kind == "other owner" else self._owner,
            stream=stream,
            blob=f"{draw.getrandbits(64):016x}" if kind == "other blob" else manifest.blob,
            index=manifest.chunks + draw.randrange(10**6) if kind == "beyond the end" else index,
            number=number,
            data=bodies.get(kind, body),
        )


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep data sets that a test stores, its processes' too, out of the user's cache."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def _unsynced() -> Iterator[None]:
    """Leave it to the kernel when it writes files: a run waits 40 times for a disk, and no test has
    a power loss.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """End a test that times out with what it has started: a lab's processes end with the one that
    started them.

    Tasks keep pytest-timeout's error as their own, so a test that goes on regardless is ended with
    its process.
    """
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit_s + 60.0, exit=True)
    try:
        with ended_by_timeout():
            return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _own_code_forgotten(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget the modules that a test wrote and imported: another test's of the same name is another
    file.
    """
    before = set(sys.modules)
    yield
    if (folder := request.node.funcargs.get("tmp_path")) is None:
        return
    sys.path[:] = [each for each in sys.path if not Path(each).is_relative_to(folder)]
    for name in set(sys.modules) - before:
        spec = getattr(sys.modules[name], "__spec__", None)
        places = [spec.origin, *(spec.submodule_search_locations or [])] if spec else []
        if any(Path(place).is_relative_to(folder) for place in places if place):
            del sys.modules[name]


@pytest.fixture
def vmapped_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the devices of a process be vmapped on a CPU as they are on a GPU."""
    monkeypatch.setattr("fedstrata.device.jobs.ALONE_ON", frozenset())


@pytest.fixture
def one_thread() -> None:
    """Let torch compute in one thread."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def forge() -> type[Forge]:
    """Return what makes hostile chunks."""
    return Forge


ACCURACIES = (0.5, 0.75, 0.9)


def _make_run(
    root: Path,
    tree: Mapping[str, Any],
    *,
    accuracies: Sequence[float | None] = ACCURACIES,
    last: str = "finished",
) -> Path:
    """Leave the folder of a run that nobody played, a global round for each accuracy; `last` is its
    last event.
    """
    folder = RunFolder.create(root, parse(tree))
    folder.note(load=None)  # it is the machine's, and notes of reports depend on it
    folder.event("run", {"global_rounds": folder.experiment.rounds, "done": 0})
    names = folder.experiment.tree.children[CLOUD]
    for number, accuracy in enumerate(accuracies, 1):
        folder.add_round(a_global_round(number, accuracy, names=names))
    if last:
        folder.event(last, {"global_round": len(accuracies), "reason": "so"})
    return folder.path


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    """Return what leaves the folder of a run that nobody played."""
    return _make_run


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures out of pages, which take most of the time, where a test reads their texts
    and tables.
    """
    monkeypatch.setattr("fedstrata.deploy.results.figures.Figure.svg", lambda figure, key: "<svg/>")


@pytest.fixture(scope="module")
def warm() -> Iterator[None]:
    """Fork fedstrata's processes from one that has imported what they need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", WarmProcess)
        yield


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start new interpreters in a file that is `warm`."""
    monkeypatch.setattr(subprocess, "Popen", WarmProcess.__base__)


@pytest.fixture(scope="module")
def short_calibration() -> Iterator[None]:
    """Measure trainings of this process for 50 ms instead of 2 s, where their seconds may be
    rough.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedstrata.deploy.planning.machine_speed.TRAINING_S", 0.05)
        yield
