"""The live view of a run: whom it waits for, and what it shows once the run has begun."""

from __future__ import annotations

import io
from typing import Final

from rich.console import Console

from deploy.console.progress import RunView

RUN: Final = {"run": "r", "folder": "runs/r-lab", "experiment": "lab", "global_rounds": 3}


def shown(view: RunView) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(view.picture())
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_it_shows_whom_it_waits_for_until_the_run_has_begun() -> None:
    view = RunView()
    view.take("run", RUN)
    view.take("waiting", {"for": "device-3 gave up: no data; institution-1 never came"})
    assert shown(view)[1:] == ["run r in runs/r-lab", "waits for device-3 gave up: no data; institution-1 never came"]
    view.take("child", {"node": "device-3", "state": "ready"})
    assert shown(view)[-1] == "waits for institution-1 never came"
    states = {"device-0": {"presence": "ready", "phase": "training", "state": "accepted", "epochs": 2}}
    view.take("progress", {"states": states, "wan_up_bytes": 1, "wan_down_bytes": 2})
    assert not [line for line in shown(view) if "waits" in line]
    assert any(line.startswith("device-0") for line in shown(view))
