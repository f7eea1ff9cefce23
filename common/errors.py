"""The exceptions of fedstrata.

FedstrataError                 base of all errors; has the exit code of the command
├── InvalidExperiment     (4)  the experiment cannot be run: names the key, the value, the remedy
│   └── LeftOut           (4)  it has no node of this name, which may wait for the next run
├── ConnectionFailed      (3)  broker unreachable, login refused
│   ├── DuplicateName     (3)  another living node on this broker has the same name
│   └── LabInUse          (3)  another run has the lab
├── StorageFailed         (6)  a file or folder of this machine cannot be used: disk full,
read-only, another user's
├── RunFailed             (1)  the run cannot continue
│   ├── NoProgress        (5)  no progress for `idle_s`
│   │   └── OutOfReach    (5)  the parent, or a broker, was away so long
│   ├── ParentGaveUp      (1)  the parent ended the run with an error
│   ├── AcceleratorLost   (1)  each call of an accelerator fails from now on, in this process
│   ├── StateLost         (1)  this process does not have what an earlier task of its node left
│   └── InvalidBelow      (4)  a node below cannot take part in the experiment
├── WireError                  malformed or unknown bytes from the network; counted, never fatal
│   ├── TooLarge               a message larger than its sender can have; it is not read
│   ├── OtherRelease           of a release with another version of the protocol
│   ├── Misfit                 a sound message that contradicts what its receiver knows
│   └── Flooded                one of too many
└── RefusedModel               an upload that is not used: wrong digest or layout, or not finite
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

UNEXPECTED: Final = "ended by an unexpected error"
MESSAGE_MOST: Final = 1500  # characters of an error's text: some lines
VALUE_MOST: Final = 300  # characters of the value in it
TEXT_MOST: Final = 300  # characters of another's error in it
# PyTorch's own index of builds without CUDA, which is public.
CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"

log = logging.getLogger("fedstrata.lifecycle")


class FedstrataError(Exception):
    """Base of all errors that a user may see; `exit_code` ends the command."""

    exit_code = 1

    def __init__(self, text: str = "") -> None:
        super().__init__(bounded(text, MESSAGE_MOST))

    def __reduce__(self) -> tuple[Callable[..., FedstrataError], tuple[object, ...]]:
        """Pickle and copy all attributes: Exception's own form would call the class with the
        message alone.
        """
        return _again, (type(self), self.args, vars(self))


class InvalidExperiment(FedstrataError):
    """An experiment, or a host's settings for it, that cannot work.

    `frames`: of a user's code that failed, one line each, the innermost one last.
    """

    exit_code = 4

    def __init__(
        self, key: str, value: object, problem: str, remedy: str, frames: Sequence[str] = ()
    ) -> None:
        given = "" if value is None else f" = {_shown(value)}"  # without one, the key is missing
        super().__init__(f"{key}{given}: {problem}. {remedy}")
        self.parts = (key, value, problem, remedy)
        self.frames = tuple(frames)


class LeftOut(InvalidExperiment):
    """An experiment without a node of this name: a later one may have it."""


class StorageFailed(FedstrataError):
    """A file or folder of this machine that cannot be used."""

    exit_code = 6

    def __init__(self, key: str, value: str, problem: str, remedy: str) -> None:
        super().__init__(f"{key} = {_shown(value)}: {problem}. {remedy}")
        self.parts = (key, value, problem, remedy)


class ConnectionFailed(FedstrataError):
    """The broker could not be reached, or refused the login."""

    exit_code = 3


class DuplicateName(ConnectionFailed):
    """Another living node already uses this name."""


class LabInUse(ConnectionFailed):
    """Another run has the lab."""


class RunFailed(FedstrataError):
    """The run cannot continue. `without`: the children without which a round could not close, if
    that is why.
    """

    without: frozenset[str] = frozenset()


class NoProgress(RunFailed):
    """Neither a byte nor a training step made progress for `idle_s` seconds."""

    exit_code = 5


class OutOfReach(NoProgress):
    """The parent, or a broker, was away for `idle_s` seconds; a node that stays returns to the run
    when it is back.
    """


class ParentGaveUp(RunFailed):
    """The parent ended the run with an error, whose text this has."""


class AcceleratorLost(RunFailed):
    """An accelerator of which each call fails from now on in this process; another process may use
    it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason}. This process cannot use its accelerator any more: start it again."
        )
        self.reason = reason


class StateLost(RunFailed):
    """This process does not have the state that an earlier task of its node left; another of this
    name may have it.
    """


class InvalidBelow(RunFailed):
    """A node below cannot take part; has the text of that node's InvalidExperiment."""

    exit_code = 4


class WireError(FedstrataError):
    """Bytes from the network that are no valid record."""


class TooLarge(WireError):
    """A message larger than its sender can have."""


class OtherRelease(WireError):
    """A message of a release with another version of the protocol."""


class Misfit(WireError):
    """A sound message that contradicts what its receiver knows."""


class Flooded(WireError):
    """One of too many messages of a peer."""


class RefusedModel(FedstrataError):
    """A received model that must not be used, with the reason."""


def described(error: BaseException) -> str:
    """Return the type of another's error, and the first line of its text, which has many with
    torch, and of its notes.

    It is cut to a limit.
    """
    try:
        lines = [
            str(text).strip().partition("\n")[0]
            for text in (error, *getattr(error, "__notes__", ()))
        ]
    except Exception:  # noqa: BLE001 - a class of the user's own may raise anything
        lines = [""]
    return bounded(
        ", ".join([f"{type(error).__name__}: {lines[0]}".rstrip(": "), *lines[1:]]), TEXT_MOST
    )


def in_words(error: OSError | RuntimeError) -> str:
    """Return what the operating system reports, without its number, as part of a line: `connection
    refused`.
    """
    text = getattr(error, "strerror", None) or str(error)
    where = getattr(error, "filename", None)
    if where:
        return f"{where}: {text[:1].lower()}{text[1:]}"
    return f"{text[:1].lower()}{text[1:]}"


def as_known(error: BaseException, where: str) -> FedstrataError | None:
    """Return the first FedstrataError, see `first_error`; log any other error and return it as
    RunFailed.

    Return None for exceptions that are no errors, such as an interruption. `where`: the node or the
    process.
    """
    known = first_error(error)
    if known is None and isinstance(error, Exception):
        log.error("%s %s", where, UNEXPECTED, exc_info=error)
        inner: BaseException = error
        while isinstance(inner, BaseExceptionGroup):
            inner = inner.exceptions[0]
        known = RunFailed(f"unexpected {described(inner)}")
        known.__cause__ = error
    return known


def first_error(error: BaseException) -> FedstrataError | None:
    """Return the first FedstrataError in an exception or a group of them."""
    if isinstance(error, FedstrataError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := first_error(inner))), None)
    return None


def _again(
    kind: type[FedstrataError], arguments: Sequence[object], facts: Mapping[str, Any]
) -> FedstrataError:
    error = kind.__new__(kind, *arguments)
    vars(error).update(facts)
    return error


def bounded(text: str, most: int) -> str:
    """Return a text for people in at most `most` characters: what is too long loses its middle."""
    if len(text) <= most:
        return text
    left_out = f" ... ({len(text):,} characters) ... "
    end = (most - len(left_out)) // 4
    return text[: most - len(left_out) - end] + left_out + text[-end:]


def installing(extra: str) -> str:
    """Return the command that installs an extra of fedstrata.

    The extra `learning` brings PyTorch, which PyPI has with 3 GB of CUDA for Linux, also on a board
    that has no use for it: then the build without must be there first.
    """
    command = f"pip install 'fedstrata[{extra}]'"
    if extra != "learning":
        return command
    return (
        f"{command}, without an NVIDIA GPU after `pip install torch torchvision --index-url "
        f"{CPU_INDEX}`"
    )


def _shown(value: object) -> str:
    try:
        return bounded(repr(value), VALUE_MOST)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of too many digits"
