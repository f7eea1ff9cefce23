"""docs/watch.svg: the live view of a run in a global round, once a device trains, as `watch` draws
it.

fedstrata run demo --set links.wan=lte --set rounds=12 --set training.batch_size=2 --set
training.epochs=12 python -m docs.tools.watch_picture HOST:PORT 4 > docs/watch.svg
"""

from __future__ import annotations

import asyncio
import io
import re
import sys
from collections.abc import Sequence
from typing import Final

from rich.console import Console

from fedstrata.common.protocol.messages import Step
from fedstrata.deploy.console.login import OPERATOR, Login
from fedstrata.deploy.watching.follower import Follower
from fedstrata.deploy.watching.lab_state import Event, WatchedLab
from fedstrata.deploy.watching.runs import Runs
from fedstrata.deploy.watching.view import View

WIDTH: Final = 96
HEIGHT: Final = 30
FONTS: Final = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # rich's come from another host


class Camera:
    """A screen that prints the SVG of one moment, and ends the process."""

    def __init__(self, global_round: int) -> None:
        self._global_round = global_round

    def waiting(self, runs: Runs, brokers: str) -> None:
        """Wait for the run."""

    def show(self, lab: WatchedLab, events: Sequence[Event], now: float) -> None:
        """Print the picture when its moment has come, and raise SystemExit."""
        lines = View(WIDTH, HEIGHT).picture(lab, now, [])
        if lab.global_round < self._global_round or not any(
            Step.TRAINING in line.plain for line in lines
        ):
            return
        console = Console(
            record=True,
            width=WIDTH,
            file=io.StringIO(),
            force_terminal=True,
            color_system="truecolor",
        )
        console.print(*lines, sep="\n")
        print(FONTS.sub("", console.export_svg(title="fedstrata watch", unique_id="watch")), end="")
        sys.exit(0)


async def _follow(broker: str, global_round: int) -> None:
    follower = Follower([Login().address(broker, node=OPERATOR)], run=None, connect_timeout_s=30.0)
    await follower.follow(Camera(global_round))


if __name__ == "__main__":
    asyncio.run(_follow(sys.argv[1], int(sys.argv[2])))
