"""How a command ends: an error of ours is one line on standard error and its exit code."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from common.errors import FedstrataError
from deploy.console.logs import tell

INTERRUPTED = 130


def report(error: FedstrataError, *, node: str = "") -> None:
    """Write an error to standard error, with the node that it ended where a process has several."""
    tell(f"fedstrata: {node}: {error}" if node else f"fedstrata: {error}", level=logging.ERROR)


@contextmanager
def reporting() -> Iterator[None]:
    """Turn an error of ours, and an interruption, into the end of the command."""
    try:
        yield
    except FedstrataError as error:
        report(error)
        raise typer.Exit(error.exit_code) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        tell("fedstrata: interrupted", level=logging.ERROR)
        raise typer.Exit(INTERRUPTED) from None
