"""Errors of commands: a FedstrataError becomes one line on standard error and an exit code."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from common.errors import FedstrataError
from common.host.files import failure, is_of_disk
from deploy.console.logs import write_line

INTERRUPTED = 130


def report(error: FedstrataError, *, node: str = "") -> None:
    """Write an error to standard error, prefixed by the failed node's name if `node` is given."""
    write_line(f"fedstrata: {node}: {error}" if node else f"fedstrata: {error}", level=logging.ERROR)


@contextmanager
def reporting() -> Iterator[None]:
    """End the command on a FedstrataError or a full disk with the exit code, on an interruption with exit code 130."""
    try:
        yield
    except FedstrataError as error:
        report(error)
        raise typer.Exit(error.exit_code) from None
    except OSError as error:
        if not (is_of_disk(error) and error.filename):
            raise
        known = failure(error, Path(error.filename))
        report(known)
        raise typer.Exit(known.exit_code) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        write_line("fedstrata: interrupted", level=logging.ERROR)
        raise typer.Exit(INTERRUPTED) from None
