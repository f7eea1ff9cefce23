"""Output of a watch: a live view on a terminal, log lines elsewhere, or JSON lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fedstrata.common.text import json_text
from fedstrata.deploy.console import logs
from fedstrata.deploy.watching import formatting
from fedstrata.deploy.watching.follower import NOTHING_ANNOUNCED, Screen
from fedstrata.deploy.watching.lab_state import Event, WatchedLab
from fedstrata.deploy.watching.runs import Runs
from fedstrata.deploy.watching.view import NOTES, UNLIMITED, View


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
    """Print the current state. Devices are listed one by one off a terminal, or if `devices` is
    true.
    """
    if json_lines:
        print(json_text(formatting.tree(lab, now)), flush=True)
        return
    console = Console()
    view = view_of(console, devices)
    if devices:
        view = replace(view, height=UNLIMITED)
    for line in view.picture(lab, now, []):
        line.rstrip()
        console.print(line, soft_wrap=True)


class Lines:
    """Log output: a line for each global round and each change of state, or a JSON line for each
    event.
    """

    def __init__(self, *, json_lines: bool) -> None:
        self._json_lines = json_lines
        self._waits = False

    def waiting(self, runs: Runs, brokers: str) -> None:
        """Log once that there is no run yet."""
        if not self._waits:
            logs.write_line(f"waiting for a run of lab {runs.lab} on broker {brokers}")
            self._waits = True

    def show(self, lab: WatchedLab, events: Sequence[Event], now: float) -> None:
        """Print the events."""
        for event, facts in events:
            if self._json_lines:
                print(json_text(formatting.facts_of(lab, event, facts, now)), flush=True)
            elif (line := formatting.line(lab, event, facts)) is not None:
                print(line, flush=True)


class Terminal:
    """Live view: the picture of the lab, with the last notes below."""

    def __init__(self, live: Live, *, devices: bool | None = None) -> None:
        self._live = live
        self._devices = devices
        self.notes: deque[str] = deque(maxlen=NOTES)

    def waiting(self, runs: Runs, brokers: str) -> None:
        """Show that there is no active run yet, and list runs that have ended."""
        ended = ", ".join(runs.names()[:3])
        hint = f"no active nodes: {ended}" if ended else NOTHING_ANNOUNCED
        self._live.update(
            Text(f"waiting for a run of lab {runs.lab} on broker {brokers}; {hint}"), refresh=True
        )

    def show(self, lab: WatchedLab, events: Sequence[Event], now: float) -> None:
        """Draw the current state, with notes of failures and restarts."""
        self.notes.extend(filter(None, (formatting.note(lab, *event) for event in events)))
        lines = view_of(self._live.console, self._devices).picture(lab, now, self.notes)
        self._live.update(Group(*lines), refresh=True)


def view_of(console: Console, devices: bool | None = None) -> View:
    """Return the view for a terminal as it is now; of what is no terminal nothing is cropped or
    left out.
    """
    plain = not (console.encoding or "").lower().startswith("utf")
    width, height = console.size if console.is_terminal else (UNLIMITED, UNLIMITED)
    return View(width, height, devices=devices, plain=plain)
