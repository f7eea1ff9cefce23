"""The command `fedstrata` with roles that compute nothing, for labs whose subject is not training.

`python tests/helpers/null_lab.py run ...` is a whole lab, and so on for each role. Processes,
brokers, spools and checkpoints are real; devices add noise that is determined by node, round and
epochs, so final models can be compared bit for bit. No process imports torch, which takes seconds.

With NULL_LAB_HOLD=ROUND:FILE devices train from this local round on only when nobody has locked
FILE. With NULL_LAB_SPLIT=DEVICE:DIGEST a device has this split of the data. With
NULL_LAB_EVALUATOR=real the cloud has its own evaluator, and so needs the data, and torch.
NULL_LAB_BYTES is the size of a model.
With NULL_LAB_PROCESSES=N the devices of a lab are in N processes. With
NULL_LAB_RELEASE=VERSION:PROTOCOL the process is of another release, with that version of the
protocol. With NULL_LAB_SPOOL=FOLDER its default spool is there.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import signal
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))

from fedstrata.common.host.memory import frozen_imports

if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # when the process ends that has started this one

COMMAND = (sys.executable, str(Path(__file__).resolve()))
MODEL_BYTES = int(os.environ.get("NULL_LAB_BYTES", "40000"))


def simulate(command: str) -> None:
    """Replace in this process what the command would compute, or the command of the roles that it
    starts.
    """
    if command == "cloud":
        if os.environ.get("NULL_LAB_EVALUATOR") == "real":
            return
        from fedstrata.cloud import cloud_agent as agent
        from tests.helpers.null_roles import evaluator

        setattr(agent, "CloudAgent", partial(agent.CloudAgent, evaluator=evaluator))  # noqa: B010
    elif command == "institution":
        pass
    elif command == "device":
        from fedstrata.device.pool import pool
        from tests.helpers.null_roles import NullPool

        setattr(pool, "Pool", NullPool)  # noqa: B010
    elif command in ("run", "sweep"):
        from fedstrata.deploy.local import lab_network as network
        from fedstrata.deploy.local import process_lab as lab

        setattr(lab, "ROLE", COMMAND)  # noqa: B010
        if processes := int(os.environ.get("NULL_LAB_PROCESSES", "0")):
            setattr(network, "cores", lambda: processes)  # noqa: B010
            setattr(network, "DEVICES_MOST", 1)  # noqa: B010


def be_of_release(given: str) -> None:
    """Let this process be of a release, VERSION:PROTOCOL, before anything else is imported that
    asks for either.
    """
    from fedstrata.common.protocol import serialization

    release, _, protocol = given.partition(":")
    known = importlib.metadata.version
    importlib.metadata.version = lambda name: release if name == "fedstrata" else known(name)
    setattr(serialization, "VERSION", int(protocol))  # noqa: B010


if __name__ == "__main__":
    with frozen_imports():
        if "NULL_LAB_RELEASE" in os.environ:
            be_of_release(os.environ["NULL_LAB_RELEASE"])
        if "NULL_LAB_SPOOL" in os.environ:
            from fedstrata.deploy.cli import roles

            setattr(roles, "SPOOL", os.environ["NULL_LAB_SPOOL"])  # noqa: B010
        from fedstrata.deploy.cli.main import main

        simulate(
            next(
                (
                    word
                    for word in sys.argv[1:]
                    if word in ("run", "sweep", "cloud", "institution", "device")
                ),
                "",
            )
        )
    main()
