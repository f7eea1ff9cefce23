"""Stages of work that takes seconds, on standard error: a bar on a terminal, else one line each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fedstrata.deploy.console.logs import as_json, write_line

if TYPE_CHECKING:
    from rich.progress import Progress


class Stages:
    """What shows `count` stages. `bar`: None = a line for each."""

    def __init__(self, count: int, bar: Progress | None) -> None:
        self._bar = bar
        self._begun = 0
        if bar is not None:
            self._task = bar.add_task("", total=count)

    def __call__(self, what: str) -> None:
        """Show what begins."""
        if self._bar is None:
            write_line(what)
        else:
            self._bar.update(self._task, description=what, completed=self._begun)
        self._begun += 1

    def reach(self, share: float) -> None:
        """Show which share of a stage is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._begun - 1 + share)


@contextmanager
def stages(count: int) -> Iterator[Stages]:
    """Yield what is called with what begins, `count` times."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    errors = Console(stderr=True)
    if not errors.is_terminal or as_json():
        yield Stages(count, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=errors, transient=True) as bar:
        yield Stages(count, bar)
