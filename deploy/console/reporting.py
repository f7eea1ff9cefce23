"""Errors of commands: a FedstrataError becomes one line on standard error and an exit code."""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import typer

from common.errors import FedstrataError, InvalidExperiment
from common.host.files import failure, is_of_disk
from common.host.processes import interruptible
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


class StandardOutput(io.TextIOWrapper):
    """Standard output; raises StorageFailed if it is a file that cannot be written, for instance on a full disk."""

    def write(self, text: str, /) -> int:
        """Write a text."""
        with self._guarded():
            return super().write(text)

    def flush(self) -> None:
        """Write what is buffered."""
        with self._guarded():
            super().flush()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno == errno.EPIPE:  # nobody reads any more, which ends a command as usual
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # Python writes the rest when it ends
            raise failure(error, Path("standard output")) from None


@contextmanager
def reporting() -> Iterator[None]:
    """End the command with one line and the exit code on a FedstrataError, a missing extra and a full disk.

    An interruption, by any of the ending signals, has exit code 130.
    """
    try:
        with interruptible():
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
