"""Measurement of the costs of messages on this machine: labs whose devices compute nothing, on a real broker.

The cloud runs in this process, the devices in another, as in a lab: a process that is woken for one message does more
work for it than one that has many. For the same reason the devices send their results one after another, as trainings
end. CPU seconds of these processes and of the broker are counted, not the time that passes, so that other programs on
this machine disturb little.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Final

import numpy as np

from cloud.agent import CloudAgent
from cloud.results import RunFolder
from common.experiment.reading import parse
from common.metrics import Metrics
from common.model.layout import Row
from common.net.address import BrokerAddress
from common.runtime.world import Host
from deploy.brokers import broker
from deploy.brokers.guard import one_login
from deploy.planning.calibration import FittedCosts, copy_seconds, mixing_s
from deploy.simulation.hardware import NULL_CHANGE, Durations, NullWorkload, SimulatedEvaluator, SimulatedHardware
from device.agent import DeviceAgent

CONNECT_TIMEOUT_S: Final = 30.0
ROUNDS: Final = 40
SMALL_BYTES: Final = 10_000
APART_S: Final = 0.05  # in which the devices send their results, one after another


@dataclass(frozen=True, slots=True)
class NullRound:
    """A round of `devices` devices with a model of `model_bytes`, which took `cpu_s` CPU seconds of all processes."""

    devices: int
    model_bytes: int
    cpu_s: float


class _CheapWorkload(NullWorkload):
    """Workload whose training takes as long as copying the model: what counts is all the rest."""

    def train(self, node: str, row: Row, out: Row, *, epochs: int, local_round: int) -> tuple[float, int]:
        """Change every weight, so that every chunk is sent."""
        np.multiply(self.layout.floats(row), np.float32(1 + NULL_CHANGE), out=self.layout.floats(out))
        return 1.0, 1


SIZES: Final = ((1, SMALL_BYTES), (8, SMALL_BYTES), (4, 4_000_000))


def measure_costs(*, rounds: int = ROUNDS) -> FittedCosts:
    """Run the labs and return the costs. Raises FedstrataError if the broker or a lab fails."""
    load, found = os.getloadavg()[0], []
    for devices, model_bytes in SIZES:
        with tempfile.TemporaryDirectory(prefix="fedstrata-") as home:
            found.append(NullRound(devices, model_bytes, _cpu_of_a_round(Path(home), devices, model_bytes, rounds)))
    message_s, round_s, byte_s = fit(found, copy_s=copy_seconds())
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return FittedCosts(message_s, round_s, byte_s, socket.gethostname(), now, load)


def fit(measured: Sequence[NullRound], *, copy_s: float) -> tuple[float, float, float]:
    """Return the seconds of a message, of a round, and of a byte; `copy_s`: of copying and hashing a byte.

    A round takes round_s, for each device message_s and 2 * model_bytes * byte_s, and its mixing. The three rounds
    determine the three unknowns; noise may not make one negative.
    """
    one, many, large = measured
    message_s = max(0.0, (many.cpu_s - one.cpu_s) / (many.devices - one.devices))
    round_s = max(0.0, one.cpu_s - message_s * one.devices)
    rest = large.cpu_s - round_s - large.devices * (message_s + mixing_s(copy_s) * large.model_bytes)
    return message_s, round_s, max(0.0, rest / (2 * large.devices * large.model_bytes))


def _cpu_of_a_round(home: Path, devices: int, model_bytes: int, rounds: int) -> float:
    tree = {"name": "calibration", "rounds": rounds, "topology": {"institutions": 0, "devices": devices}}
    experiment = parse(tree | {"links": {"check": "off"}, "cloud": {"checkpoint_every": rounds}})
    guard, marks = one_login(), list[float]()
    with broker.start(directory=home, guard=guard) as served:
        username, password = guard.login or ("", "")
        address = BrokerAddress(served.host, served.port, username=username, password=password)
        with _served(address, experiment.tree.devices, model_bytes) as pid:

            def observe(event: str, facts: dict[str, object]) -> None:
                if event == "global_round":
                    marks.append(time.process_time() + _cpu_of(served.process.pid) + _cpu_of(pid))

            folder = RunFolder.create(home / "runs", experiment)
            evaluator = SimulatedEvaluator(_hardware(model_bytes))
            host = Host(address, CONNECT_TIMEOUT_S, Metrics())
            cloud = CloudAgent(folder, host, resume=False, observe=observe, evaluator=lambda *_: evaluator)
            asyncio.run(cloud.run())
    return (marks[-1] - marks[0]) / (len(marks) - 1)  # the clocks of other processes are too coarse for one round


@contextmanager
def _served(address: BrokerAddress, devices: Sequence[str], model_bytes: int) -> Iterator[int]:
    """Run devices in another process, whose id is yielded."""
    context = get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_serve, args=(ready, address, devices, model_bytes), daemon=True)
    process.start()
    try:
        ready.wait(CONNECT_TIMEOUT_S)
        assert process.pid is not None
        yield process.pid
    finally:
        process.terminate()
        process.join()


def _serve(ready: Event, address: BrokerAddress, devices: Sequence[str], model_bytes: int) -> None:
    """Run devices until they end or this process is terminated."""

    async def serve() -> None:
        hardware, host = _hardware(model_bytes), Host(address, CONNECT_TIMEOUT_S, Metrics())
        async with asyncio.TaskGroup() as group:
            for name in devices:
                group.create_task(DeviceAgent(name, host, parent="cloud", pool=hardware.pool(name)).run())

    ready.set()
    asyncio.run(serve())


def _hardware(model_bytes: int) -> SimulatedHardware:
    durations = Durations(boot_s=0.0, train_s=APART_S, spread=1.0, evaluate_s=0.0)
    return SimulatedHardware(_CheapWorkload(model_bytes), durations, seed=1)


def _cpu_of(pid: int) -> float:
    """Return the CPU seconds of another process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
