"""Where a watch is shown: live on a terminal, a line for each change elsewhere, JSON lines on demand."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from deploy.console import logs
from deploy.watching import words
from deploy.watching.follower import UNHEARD, Screen
from deploy.watching.lab import WatchedLab
from deploy.watching.runs import Runs
from deploy.watching.view import View

NOTED: Final = ("restarted", "refused", "declined", "waiting", "warning")


@contextmanager
def screen_for(*, json_lines: bool, devices: bool | None) -> Iterator[Screen]:
    """Yield the screen that standard output asks for."""
    console = Console()
    if json_lines or not console.is_terminal:
        yield Lines(json_lines=json_lines)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        yield Terminal(live, devices=devices)


def look(lab: WatchedLab, now: float, *, json_lines: bool, devices: bool | None) -> None:
    """Print the present state, each device unless it is to be left out."""
    if json_lines:
        print(json.dumps(words.tree(lab, now)), flush=True)
        return
    console = Console()
    shown = True if devices is None and not console.is_terminal else devices
    console.print(*_view(console, shown).picture(lab, now, []), sep="\n")


class Lines:
    """A log: a line for each global round and each state, or a JSON line for each event."""

    def __init__(self, *, json_lines: bool) -> None:
        self._json_lines = json_lines
        self._waits = False

    def waiting(self, runs: Runs, brokers: str) -> None:
        """Say once that there is no run yet."""
        if not self._waits:
            logs.write_line(f"waiting for a run of lab {runs.lab} on broker {brokers}")
            self._waits = True

    def event(self, lab: WatchedLab, event: str, facts: dict[str, object], now: float) -> None:
        """Print an event."""
        if self._json_lines:
            print(json.dumps(words.facts_of(lab, event, facts, now)), flush=True)
        elif (line := words.line(lab, event, facts, now)) is not None:
            print(line, flush=True)

    def draw(self, lab: WatchedLab, now: float) -> None:
        """Print nothing: the state is in the events."""


class Terminal:
    """A picture that is drawn anew twice a second."""

    def __init__(self, live: Live, *, devices: bool | None) -> None:
        self._live = live
        self._devices = devices
        self._notes: deque[str] = deque(maxlen=3)

    def waiting(self, runs: Runs, brokers: str) -> None:
        """Show that there is no run yet, and which ones are over."""
        dead = ", ".join(runs.names()[:3])
        there = f"nobody lives of {dead}" if dead else UNHEARD
        self._live.update(Text(f"waiting for a run of lab {runs.lab} on broker {brokers}; {there}"), refresh=True)

    def event(self, lab: WatchedLab, event: str, facts: dict[str, object], now: float) -> None:
        """Note what is worth a look."""
        gone = event == "state" and facts["state"] in words.GONE
        if (gone or event in NOTED) and (line := words.line(lab, event, facts, now)) is not None:
            self._notes.append(line)

    def draw(self, lab: WatchedLab, now: float) -> None:
        """Draw the present state."""
        lines = _view(self._live.console, self._devices).picture(lab, now, list(self._notes))
        self._live.update(Group(*lines), refresh=True)


def _view(console: Console, devices: bool | None) -> View:
    plain = not (console.encoding or "").lower().startswith("utf")
    return View(console.width, console.height, devices=devices, plain=plain)
