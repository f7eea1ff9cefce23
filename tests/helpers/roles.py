"""Roles as processes, and what they publish."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedstrata.common.metrics import Metrics
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.protocol import topics
from fedstrata.common.protocol.messages import Message, Task
from fedstrata.common.runtime.world import Host
from fedstrata.device.device_agent import DeviceAgent
from fedstrata.device.pool.pool import Pool
from tests.helpers.commands import PATIENCE_S, command

SMALL: dict[str, Any] = {
    "name": "faults",
    "seed": 5,
    "rounds": 3,
    "topology": {"institutions": 2, "devices": 4},
    "model": {"name": "mlp_digits"},
    "training": {"epochs": 40},
    "institution": {"rounds": 2, "aggregation": {"name": "fedmr", "on_new_model": "recentre"}},
    "cloud": {
        "epoch_control": {"name": "tempo"},
        "aggregation": {"name": "fedcross", "alpha": 0.9},
    },
}


class Role:
    """One process, which computes nothing unless `null` is false, and what it printed."""

    def __init__(self, log: Path, *arguments: str | Path, null: bool = True, **env: str) -> None:
        self.log = log
        words = command(*arguments, null=null)
        with log.open("wb") as errors, log.with_suffix(".out").open("wb") as output:
            self.process = subprocess.Popen(
                words, stdout=output, stderr=errors, env={**os.environ, **env}
            )

    def ends(self, code: int, patience_s: float = PATIENCE_S) -> str:
        """Wait for the end, check the exit code, and return what it said on standard error."""
        try:
            found = self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            found = None
        said = self.log.read_text()
        assert found == code, f"{self.log.stem} ended with {found}: {said}"
        return said

    def output(self) -> str:
        return self.log.with_suffix(".out").read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def task(
    sender: str, global_round: int, local_round: int
) -> Callable[[topics.Topic, Message], bool]:
    """Tell a parent's task in one round."""
    return lambda topic, said: (
        isinstance(topic, topics.InboxTopic)
        and topic.sender == sender
        and isinstance(said, Task)
        and (said.key.global_round, said.key.local_round) == (global_round, local_round)
    )


# A whole lab


def lab_of(log: Path, *arguments: str | Path, null: bool = True, **env: str) -> Role:
    return Role(log, "run", *arguments, "--format", "json", null=null, **env)


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until something in another process has come true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.02)


async def device(address: BrokerAddress, name: str, institution: str) -> None:
    """Run a device that trains in this process."""
    async with Pool(accelerator="cpu", slots=1, devices=1) as pool:
        await DeviceAgent(name, Host(address, 10.0, Metrics()), parent=institution, pool=pool).run()
