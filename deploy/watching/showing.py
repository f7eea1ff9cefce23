"""Progress of a run in the process that starts it: a live view on a terminal, else log lines; a table at the end."""

from __future__ import annotations

import math
import os
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, Group
from rich.live import Live

from common.experiment.schema import Experiment
from common.net.address import BrokerAddress
from common.protocol.topics import DEFAULT_LAB
from common.text import json_text
from deploy.console.logs import as_json, shows_activity, write_line
from deploy.console.tabular import size
from deploy.watching import formatting
from deploy.watching.cloud_feed import CloudFeed, number, tiers_in
from deploy.watching.lab import WatchedLab
from deploy.watching.screens import view_of
from deploy.watching.subscription import Subscription
from deploy.watching.view import NOTES

if TYPE_CHECKING:
    from common.runtime.round import Observe

DRAWS_PER_S: Final = 2.0
NODES_PER_S: Final = 1000  # drawn, at most, so that a large lab's view takes some 1 % of a core
FOLLOWED_MOST: Final = 64  # devices: the messages of more would take CPU from the lab on this machine


@contextmanager
def show(
    experiment: Experiment,
    *,
    json_lines: bool,
    broker: str = "",
    lab: str = DEFAULT_LAB,
    follow: BrokerAddress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Observe]:
    """Yield a callback for the cloud's events. It shows them on standard error, or prints them as JSON lines.

    `broker`: its address, to be shown. `follow`: the broker of a lab on this machine, whose messages the live view
    receives too, and so shows each device. `clock`: of the run, in seconds.
    """
    if json_lines:
        yield lambda event, facts: print(json_text({"event": event, **facts}), flush=True)
        return
    errors = Console(stderr=True)
    watched = WatchedLab("", experiment, brokers=[broker] if broker else [], now=clock(), lab=lab, deep=False)
    feed = CloudFeed(watched)
    if not errors.is_terminal or errors.is_dumb_terminal or as_json():

        def log(event: str, facts: dict[str, object]) -> None:
            feed.take(event, facts, clock())
            if shows_activity() and (line := feed.line(event, facts)) is not None:
                write_line(line)

        yield log
    else:
        few = sum(experiment.sizes()[-1]) <= FOLLOWED_MOST
        with LiveView(errors, feed, watched, follow=follow if few else None, clock=clock).shown() as view:
            yield view.observe
    if feed.finished:
        print(summary({**feed.run, **feed.finished}, label=experiment.score.label), flush=True)
        if shows_activity():
            write_line(f"report it with: fedstrata report {_name(Path(str(feed.run['folder'])))}")


class LiveView:
    """Live view of a run, from its cloud's events and the messages on a broker. Its calls come from several threads."""

    def __init__(
        self,
        console: Console,
        feed: CloudFeed,
        lab: WatchedLab,
        *,
        follow: BrokerAddress | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._feed = feed
        self._lab = lab
        self._follow = follow
        self._clock = clock
        self._subscription: Subscription | None = None
        self._notes: deque[str] = deque(maxlen=NOTES)
        self._lock = threading.Lock()

    @contextmanager
    def shown(self) -> Iterator[LiveView]:
        """Show the view; it stays on the screen unless the run finishes."""
        rate = min(DRAWS_PER_S, NODES_PER_S / len(self._lab.nodes))
        live = Live(console=self._console, get_renderable=self.picture, refresh_per_second=rate, transient=True)
        try:
            with live:
                try:
                    yield self
                finally:
                    live.transient = bool(self._feed.finished)
        finally:
            if self._subscription is not None:
                self._subscription.close()

    def observe(self, event: str, facts: dict[str, object]) -> None:
        """Take an event of the cloud."""
        with self._lock:
            self._feed.take(event, facts, self._clock())
            if (note := self._feed.note(event, facts)) is not None:
                self._notes.append(note)
        if event == "run" and self._follow is not None and self._subscription is None:
            run = str(facts["run"])
            self._subscription = Subscription(
                self._follow, lab=self._lab.name, run=run, received=self._received, connected=self._connected
            )

    def picture(self) -> Group:
        """Return the lines of the current state."""
        with self._lock:
            return Group(*view_of(self._console).picture(self._lab, self._clock(), [*self._notes]))

    def _received(self, topic: str, body: bytes, retained: bool) -> None:
        now = self._clock()
        with self._lock:
            self._lab.receive(0, topic, body, now, retained=retained)
            while (event := self._lab.next_event()) is not None:
                if (note := formatting.note(self._lab, *event, now)) is not None:
                    self._notes.append(note)

    def _connected(self, up: bool) -> None:
        with self._lock:
            if up:
                self._lab.follow_below()
                self._lab.connected(0, self._clock())
            else:
                self._lab.disconnected(0, self._clock())


def _name(folder: Path) -> str:
    """Return what names a run to other commands: the last part of its id, or its folder if it is not in `runs`."""
    usual = folder.parent == Path(os.environ.get("FEDSTRATA_RUNS") or "runs")
    return folder.name.rpartition("-")[2] if usual else shlex.quote(str(folder))


def summary(facts: Mapping[str, Any], *, label: str) -> str:
    """Return the lines printed at the end of a run; `label`: of its score.

    `facts`: those of the event `finished`, and of `run` whether its time is simulated.
    Paths are never wrapped or cropped, so that they can be copied.
    """
    score = facts["score"]
    lost = not math.isfinite(number(facts["loss"])) and score is not None
    rows = (
        (f"test {label}", "-" if score is None else f"{score:.4f}"),
        *((("test loss", "not a finite number: training has diverged"),) if lost else ()),
        ("global rounds", str(facts["global_round"])),
        ("simulated time" if facts.get("simulated") else "training time", f"{facts['elapsed_s']:.1f} s"),
        *(
            (f"{tier.upper()} up / down", f"{size(facts[f'{tier}_up_bytes'])} / {size(facts[f'{tier}_down_bytes'])}")
            for tier in tiers_in(facts)
        ),
        ("model", str(facts["model"])),
    )
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
