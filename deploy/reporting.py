"""How a command ends: an error of ours is one line on standard error and its exit code."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from common.errors import FedstrataError

INTERRUPTED = 130


@contextmanager
def reporting() -> Iterator[None]:
    """Turn an error of ours, and an interruption, into the end of the command."""
    try:
        yield
    except FedstrataError as error:
        typer.echo(f"fedstrata: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        typer.echo("fedstrata: interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
