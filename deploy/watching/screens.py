"""Output of a watch: a live view on a terminal, log lines elsewhere, or JSON lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from common.text import json_text
from deploy.console import logs
from deploy.watching import formatting
from deploy.watching.follower import NOTHING_ANNOUNCED, Screen
from deploy.watching.lab import WatchedLab
from deploy.watching.runs import Runs
from deploy.watching.view import View


@contextmanager
def screen_for(*, json_lines: bool, devices: bool | None) -> Iterator[Screen]:
    """Yield the screen that suits standard output."""
    console = Console()
    if json_lines or not console.is_terminal:
        yield Lines(json_lines=json_lines)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        yield Terminal(live, devices=devices)


def look(lab: WatchedLab, now: float, *, json_lines: bool, devices: bool | None) -> None:
    """Print the current state. Devices are listed one by one off a terminal, or if `devices` is true."""
    if json_lines:
        print(json_text(formatting.tree(lab, now)), flush=True)
        return
    console = Console()
    view = view_of(console, devices)
    if console.is_terminal:
        lines = replace(view, height=None if devices else view.height).picture(lab, now, [])
        console.print(*lines, sep="\n")
    else:  # where a rich console would crop and wrap lines
        lines = replace(view, width=None, height=None).picture(lab, now, [])
        print("\n".join(line.plain.rstrip() for line in lines), flush=True)


class Lines:
    """Log output: a line for each global round and each change of state, or a JSON line for each event."""

    def __init__(self, *, json_lines: bool) -> None:
        self._json_lines = json_lines
        self._waits = False

    def waiting(self, runs: Runs, brokers: str) -> None:
        """Log once that there is no run yet."""
        if not self._waits:
            logs.write_line(f"waiting for a run of lab {runs.lab} on broker {brokers}")
            self._waits = True

    def event(self, lab: WatchedLab, event: str, facts: dict[str, object], now: float) -> None:
        """Print an event."""
        if self._json_lines:
            print(json_text(formatting.facts_of(lab, event, facts, now)), flush=True)
        elif (line := formatting.line(lab, event, facts)) is not None:
            print(line, flush=True)

    def draw(self, lab: WatchedLab, now: float) -> None:
        """Do nothing: the events contain the state."""


class Terminal:
    """Live view, redrawn twice a second."""

    def __init__(self, live: Live, *, devices: bool | None) -> None:
        self._live = live
        self._devices = devices
        self._notes: deque[str] = deque(maxlen=3)

    def waiting(self, runs: Runs, brokers: str) -> None:
        """Show that there is no active run yet, and list runs that have ended."""
        ended = ", ".join(runs.names()[:3])
        hint = f"no active nodes: {ended}" if ended else NOTHING_ANNOUNCED
        self._live.update(Text(f"waiting for a run of lab {runs.lab} on broker {brokers}; {hint}"), refresh=True)

    def event(self, lab: WatchedLab, event: str, facts: dict[str, object], now: float) -> None:
        """Add a note for failures and restarts."""
        if (note := formatting.note(lab, event, facts)) is not None:
            self._notes.append(note)

    def draw(self, lab: WatchedLab, now: float) -> None:
        """Draw the current state."""
        lines = view_of(self._live.console, self._devices).picture(lab, now, [*self._notes])
        self._live.update(Group(*lines), refresh=True)


def view_of(console: Console, devices: bool | None = None) -> View:
    """Return the view for a terminal as it is now."""
    plain = not (console.encoding or "").lower().startswith("utf")
    return View(console.width, console.height, devices=devices, plain=plain)
