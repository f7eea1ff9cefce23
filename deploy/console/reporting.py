"""Errors of commands: a FedstrataError becomes one line on standard error and an exit code."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from common.errors import FedstrataError
from deploy.console.logs import write_line

INTERRUPTED = 130


def report(error: FedstrataError, *, node: str = "") -> None:
    """Write an error to standard error, prefixed by the failed node's name if `node` is given."""
    write_line(f"fedstrata: {node}: {error}" if node else f"fedstrata: {error}", level=logging.ERROR)


@contextmanager
def reporting() -> Iterator[None]:
    """End the command on a FedstrataError, with its exit code, or on an interruption, with exit code 130."""
    try:
        yield
    except FedstrataError as error:
        report(error)
        raise typer.Exit(error.exit_code) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        write_line("fedstrata: interrupted", level=logging.ERROR)
        raise typer.Exit(INTERRUPTED) from None
