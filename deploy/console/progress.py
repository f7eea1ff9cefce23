"""Progress of a run: a live view on a terminal, else one line per global round; a table at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.console.logs import as_json, shows_activity, write_line
from deploy.console.tabular import size

if TYPE_CHECKING:
    from common.runtime.children import Observe


@contextmanager
def show(*, json_lines: bool) -> Iterator[Observe]:
    """Yield a callback for the cloud's events. It shows them on standard error, or prints them as JSON lines."""
    if json_lines:
        yield lambda event, facts: print(json.dumps({"event": event, **facts}), flush=True)
        return
    errors = Console(stderr=True)
    view = RunView()
    if not errors.is_terminal or as_json():

        def log(event: str, facts: dict[str, object]) -> None:
            view.take(event, facts)
            if shows_activity() and (line := view.line(event, facts)) is not None:
                write_line(line)

        yield log
    else:
        with Live(console=errors, refresh_per_second=4, transient=True) as live:

            def redraw(event: str, facts: dict[str, object]) -> None:
                view.take(event, facts)
                live.update(view.picture())

            yield redraw
    if view.finished:
        Console().print(view.summary())


class RunView:
    """State of a run, built from the cloud's events."""

    def __init__(self) -> None:
        self._run: Mapping[str, Any] = {}
        self._row: Mapping[str, Any] = {}
        self._accuracy: float | None = None
        self._progress: Mapping[str, Any] = {}
        self._rates: dict[str, float] = {}
        self._last: tuple[float, dict[str, int]] | None = None
        self._notes: list[str] = []
        self._waits_for = ""
        self.finished: Mapping[str, Any] = {}

    def take(self, event: str, facts: Mapping[str, Any]) -> None:
        """Update the state with an event."""
        match event:
            case "run":
                self._run = facts
            case "global_round":
                self._row = facts
            case "evaluated":
                self._accuracy = facts["accuracy"]
            case "waiting":
                self._waits_for = str(facts["for"])
            case "progress":
                self._waits_for, self._progress = "", facts
                self._measure(facts)
            case "refused":
                self._notes.append(f"refused {facts['node']}'s model: {facts['reason']}")
            case "warning":
                self._notes.append(f"warning: {facts['reason']}")
            case "child" if facts["state"] == "ready":
                rest = [each for each in self._waits_for.split("; ") if not each.startswith(f"{facts['node']} ")]
                self._waits_for = "; ".join(rest)
            case "child" if facts["state"] == "lost":
                self._notes.append(f"lost {facts['node']}")
            case "finished":
                self.finished = facts

    def line(self, event: str, facts: Mapping[str, Any]) -> str | None:
        """Return the log line for an event, or None if the event is not logged."""
        match event:
            case "run":
                lab = ", ".join(f"{count} {kind}" for kind, count in facts["nodes"].items())
                model = f"{facts['model']} ({size(facts['model_bytes'])})"
                return f"run {facts['run']}: {facts['experiment']}, {lab}, {model}, in {facts['folder']}"
            case "evaluated":
                row = self._row
                traffic = ", ".join(f"{tier} {size(_both(row, tier))}" for tier in tiers_in(row))
                return (
                    f"global round {facts['global_round']}/{self._run.get('global_rounds', '?')}  "
                    f"accuracy {facts['accuracy']:.4f}  loss {facts['loss']:.4f}  "
                    f"{row.get('elapsed_s', 0):.1f} s  {traffic}"
                )
            case "refused":
                return f"refused {facts['node']}'s model: {facts['reason']}"
            case "warning":
                return f"warning: {facts['reason']}"
            case "child" if facts["state"] in ("ready", "lost", "failed", "disconnected"):
                reason = f" ({facts['reason']})" if facts.get("reason") else ""
                return f"{facts['node']}: {facts['state']}{reason}"
        return None

    def picture(self) -> Group:
        """Return the live view of the current state."""
        run, row = self._run, self._row
        done, total = row.get("global_round", run.get("done", 0)), run.get("global_rounds", 0)
        accuracy = "-" if self._accuracy is None else f"{self._accuracy:.4f}"
        head = Text.assemble(
            (f"{run.get('experiment', 'waiting for the lab')} ", "bold"),
            f"global round {done}/{total}  accuracy {accuracy}  {self._left(done, total)}",
        )
        nodes = Table(box=None, pad_edge=False)
        for column in ("node", "presence", "phase", "epochs"):
            nodes.add_column(column)
        for name, child in self._progress.get("states", {}).items():
            nodes.add_row(name, child["presence"], child["phase"] or child["state"], str(child["epochs"]))
        links = Table(box=None, pad_edge=False)
        for column in ("tier", "up", "down", "up rate", "down rate"):
            links.add_column(column, justify="left" if column == "tier" else "right")
        for tier in tiers_in(self._progress):
            up, down = f"{tier}_up_bytes", f"{tier}_down_bytes"
            seen, rates = self._progress, self._rates
            sizes = (size(seen.get(up, 0)), size(seen.get(down, 0)))
            links.add_row(tier.upper(), *sizes, f"{size(rates.get(up, 0))}/s", f"{size(rates.get(down, 0))}/s")
        notes = [Text(note, style="yellow") for note in self._notes[-3:]]
        if self._waits_for:
            where = Text(f"run {run['run']} in {run['folder']}") if "run" in run else Text()
            return Group(head, where, Text(f"waits for {self._waits_for}", style="yellow"), *notes)
        return Group(head, nodes, links, *notes)

    def summary(self) -> Table:
        """Return the table printed at the end of a run."""
        facts = self.finished
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")  # paths are never truncated, so that they can be copied
        accuracy = facts["accuracy"]
        for name, value in (
            ("test accuracy", "-" if accuracy is None else f"{accuracy:.4f}"),
            ("global rounds", str(facts["global_round"])),
            ("training time", f"{facts['elapsed_s']:.1f} s"),
            *((f"{tier.upper()} up / down", self._sizes(tier)) for tier in tiers_in(facts)),
            ("model", str(facts["model"])),
        ):
            table.add_row(name, value)
        return table

    def _sizes(self, tier: str) -> str:
        return f"{size(self.finished[f'{tier}_up_bytes'])} / {size(self.finished[f'{tier}_down_bytes'])}"

    def _measure(self, facts: Mapping[str, Any]) -> None:
        now = time.monotonic()
        counts = {name: int(value) for name, value in facts.items() if name.endswith("_bytes")}
        if self._last is not None and now > self._last[0]:
            passed = now - self._last[0]
            for name, value in counts.items():
                rate = max(0, value - self._last[1].get(name, 0)) / passed
                self._rates[name] = 0.7 * self._rates.get(name, rate) + 0.3 * rate
        self._last = (now, counts)

    def _left(self, done: int, total: int) -> str:
        elapsed = self._row.get("elapsed_s", 0.0)
        if not done or not elapsed:
            return ""
        return f"{elapsed:.0f} s, about {elapsed / done * (total - done):.0f} s left"


def tiers_in(names: Iterable[str]) -> list[str]:
    """Return the tiers whose bytes have these columns or facts, from the cloud down."""
    return [name.removesuffix("_up_bytes") for name in names if name.endswith("_up_bytes")]


def _both(row: Mapping[str, Any], tier: str) -> int:
    return int(row.get(f"{tier}_up_bytes", 0)) + int(row.get(f"{tier}_down_bytes", 0))
