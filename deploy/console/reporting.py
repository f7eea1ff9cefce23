"""Errors of commands: a FedstrataError becomes one line on standard error and an exit code."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import typer

from common.errors import FedstrataError, InvalidExperiment
from common.host.files import failure, is_of_disk
from deploy.console.logs import ERROR, frame_lines, write_line

INTERRUPTED = 130
# Packages that fedstrata's own extras install.
EXTRAS: Final[Mapping[str, str]] = {
    "torch": "learning",
    "torchvision": "learning",
    "PIL": "learning",
    "matplotlib": "report",
    "cryptography": "provision",
    "scipy": "methods",
    "tensorboardX": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "pandas": "notebook",
}


def missing(package: str) -> InvalidExperiment:
    """Return the error of a package of an extra that is not installed."""
    return InvalidExperiment("package", package, "not installed here", f"pip install 'fedstrata[{EXTRAS[package]}]'.")


def require(package: str) -> None:
    """Check that a package is installed, without importing it. Raises InvalidExperiment."""
    if find_spec(package) is None:
        raise missing(package)


def report(error: FedstrataError, *, node: str = "") -> None:
    """Write an error to standard error, prefixed by the failed node's name if `node` is given.

    The frames of own code that failed stand below it, at the log level info.
    """
    write_line(f"{ERROR}{node}: {error}" if node else f"{ERROR}{error}", level=logging.ERROR)
    for line in frame_lines(error.frames) if isinstance(error, InvalidExperiment) else ():
        write_line(line)


@contextmanager
def reporting() -> Iterator[None]:
    """End the command with one line and the exit code on a FedstrataError, a missing extra and a full disk.

    An interruption has exit code 130.
    """
    try:
        yield
    except FedstrataError as error:
        report(error)
        raise typer.Exit(error.exit_code) from None
    except ModuleNotFoundError as error:
        if error.name is None or error.name not in EXTRAS:
            raise
        report(missing(error.name))
        raise typer.Exit(InvalidExperiment.exit_code) from None
    except OSError as error:
        if not (is_of_disk(error) and error.filename):
            raise
        known = failure(error, Path(error.filename))
        report(known)
        raise typer.Exit(known.exit_code) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        write_line("fedstrata: interrupted", level=logging.ERROR)
        raise typer.Exit(INTERRUPTED) from None
