"""Stages of work that takes seconds, on standard error: a bar on a terminal, else one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deploy.console.logs import as_json, write_line


@contextmanager
def stages(count: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that is called with what begins, `count` times."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    errors = Console(stderr=True)
    if not errors.is_terminal or as_json():
        yield write_line
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=errors, transient=True) as bar:
        task, begun = bar.add_task("", total=count), 0

        def begin(what: str) -> None:
            nonlocal begun
            bar.update(task, description=what, completed=begun)
            begun += 1

        yield begin
