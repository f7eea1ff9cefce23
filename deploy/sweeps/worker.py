"""The worker process of a sweep: runs experiments without a network, one after another.

    {"experiment": TEXT, "runs": FOLDER, "accelerator"}, or {"resume": FOLDER, "accelerator"}
        -> {"event", "folder", "done" or "global_round"} ..., then {"ended": true}, or an error

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

from fedstrata.common.host.memory import frozen_imports, keep_large_buffers
from fedstrata.common.processes.subprocess_channel import AgentChannel, Record, error_record

SHOWN: Final = ("run", "global_round")  # events that are passed on
SENT: Final = ("done", "global_round")  # facts of them


def run(request: Record, send: Callable[..., None]) -> None:
    """Run or resume the experiment of a request; `send` gets the events that are shown."""
    from fedstrata.cloud.run_folder import RunFolder
    from fedstrata.common.experiment.reading import parse
    from fedstrata.deploy.local.direct import run_in_process
    from fedstrata.deploy.results.kept import cost_noted

    if "resume" in request:
        folder = RunFolder.reopen(Path(request["resume"]), direct=True)
    else:
        folder = RunFolder.create(Path(request["runs"]), parse(request["experiment"]), direct=True)

    def observe(event: str, facts: dict[str, object]) -> None:
        if event in SHOWN:
            known = {key: facts[key] for key in SENT if key in facts}
            send(event=event, folder=str(folder.path), **known)

    try:
        with cost_noted(folder):
            run_in_process(
                folder,
                resume="resume" in request,
                accelerator=request["accelerator"],
                observe=observe,
            )
    finally:
        folder.release()


def main() -> None:
    """Serve one sweep until it ends."""
    channel = AgentChannel()
    keep_large_buffers()
    with frozen_imports():
        import fedstrata.deploy.local.direct  # noqa: F401 - imports torch: seconds
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
