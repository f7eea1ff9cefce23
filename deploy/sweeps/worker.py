"""The worker process of a sweep: runs experiments without a network, one after another.

    {"experiment": TEXT, "runs": FOLDER, "accelerator"}, or {"resume": FOLDER, "accelerator"}
        -> {"event", "global_round", "folder"} ..., then {"ended": true}, or an error

It computes in one thread, so that several share the cores without waiting for each other.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy and torch are imported
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

from collections.abc import Callable
from pathlib import Path
from typing import Final

from common.host.memory import frozen_imports, keep_large_buffers
from common.host.subprocess_channel import AgentChannel, Record, error_record

SHOWN: Final = ("run", "global_round", "finished", "failed")  # events that are passed on


def run(request: Record, send: Callable[..., None]) -> None:
    """Run or resume the experiment of a request; `send` gets the events that are shown."""
    from cloud.results import RunFolder
    from common.experiment.reading import parse
    from deploy.local.direct import run_in_process
    from deploy.results.kept import cost_noted

    if "resume" in request:
        folder = RunFolder.reopen(Path(request["resume"]), direct=True)
    else:
        folder = RunFolder.create(Path(request["runs"]), parse(request["experiment"]), direct=True)

    def observe(event: str, facts: dict[str, object]) -> None:
        if event in SHOWN:
            send(event=event, global_round=facts.get("global_round", 0), folder=str(folder.path))

    try:
        with cost_noted(folder):
            run_in_process(folder, resume="resume" in request, accelerator=request["accelerator"], observe=observe)
    finally:
        folder.release()


def main() -> None:
    """Serve one sweep until it ends."""
    channel = AgentChannel()
    keep_large_buffers()
    with frozen_imports():
        import deploy.local.direct  # noqa: F401 - imports torch: seconds
    while True:
        request = channel.receive()
        try:
            run(request, channel.send)
        except Exception as error:  # noqa: BLE001 - the sweep reports it and goes on
            channel.send(**error_record(error))
        else:
            channel.send(ended=True)


if __name__ == "__main__":
    main()
