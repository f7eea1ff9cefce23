"""The command `fedstrata` with roles that compute nothing, for labs whose subject is not training.

`python tests/helpers/null_lab.py run ...` is a whole lab, and so on for each role. Processes, brokers, spools and
checkpoints are real; devices add noise that is determined by node, round and epochs, so final models can be compared
bit for bit. No process imports torch, which takes seconds.

With NULL_LAB_HOLD=ROUND:FILE devices train from this local round on only when nobody has locked FILE.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))

from common.model.layout import Row
from deploy.cli.main import main
from deploy.simulation.hardware import Durations, SimulatedEvaluator, SimulatedHardware, SimulatedMember, SimulatedPool
from deploy.simulation.workload import NullWorkload
from device.jobs import LocalResult, Progress

COMMAND = (sys.executable, str(Path(__file__).resolve()))
MODEL_BYTES = 40_000


def wait_for(file: Path) -> None:
    """Return when no other process has locked it."""
    with file.open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)


class NullMember(SimulatedMember):
    """One device, which a test can hold."""

    async def train(self, row: Row, out: Row, *, epochs: int, local_round: int, progress: Progress) -> LocalResult:
        """Train once this round is released."""
        held, _, release = os.environ.get("NULL_LAB_HOLD", "").partition(":")
        if release and local_round >= int(held):
            await asyncio.to_thread(wait_for, Path(release))
        return await super().train(row, out, epochs=epochs, local_round=local_round, progress=progress)


class NullPool(SimulatedPool):
    """The pool of one process of devices."""

    failure = None

    def __init__(self, hardware: SimulatedHardware, **_: object) -> None:
        super().__init__(hardware)

    def member(self, node: str) -> NullMember:
        """Add a device."""
        return NullMember(self, node)

    async def __aenter__(self) -> NullPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


def simulate(command: str) -> None:
    """Replace in this process what the command would compute, or the command of the roles that it starts."""
    durations = Durations(boot_s=0.05, train_s=0.01, evaluate_s=0.01)
    hardware = SimulatedHardware(NullWorkload(MODEL_BYTES), durations, seed=1)
    if command == "cloud":
        import cloud.agent

        agent = cloud.agent.CloudAgent
        setattr(cloud.agent, "CloudAgent", partial(agent, evaluator=lambda *_: SimulatedEvaluator(hardware)))  # noqa: B010
    elif command == "device":
        import device.pool.pool

        setattr(device.pool.pool, "Pool", partial(NullPool, hardware))  # noqa: B010
    elif command == "run":
        from deploy.local import lab

        setattr(lab, "ROLE", COMMAND)  # noqa: B010


if __name__ == "__main__":
    simulate(next((word for word in sys.argv[1:] if word in ("run", "cloud", "device")), ""))
    main()
