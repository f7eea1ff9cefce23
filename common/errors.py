"""The exceptions of fedstrata.

FedstrataError                 base of all errors; has the exit code of the command
├── InvalidExperiment     (4)  the experiment cannot be run: names the key, the value, the remedy
├── ConnectionFailed      (3)  broker unreachable, login refused
│   ├── DuplicateName     (3)  another living node on this broker has the same name
│   └── LabInUse          (3)  another run has the lab
├── StorageFailed         (6)  a file or folder of this machine cannot be used: disk full, read-only, another user's
├── RunFailed             (1)  the run cannot continue
│   ├── NoProgress        (5)  no progress for `idle_s`
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


class FedstrataError(Exception):
    """Base of all errors that a user may see; `exit_code` ends the command."""

    exit_code = 1


class InvalidExperiment(FedstrataError):
    """An experiment, or a host's settings for it, that cannot work."""

    exit_code = 4

    def __init__(self, key: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(f"{key} = {value!r}: {problem}. {remedy}")
        self.parts = (key, value, problem, remedy)


class StorageFailed(FedstrataError):
    """A file or folder of this machine that cannot be used."""

    exit_code = 6

    def __init__(self, key: str, value: str, problem: str, remedy: str) -> None:
        super().__init__(f"{key} = {value!r}: {problem}. {remedy}")
        self.parts = (key, value, problem, remedy)


class ConnectionFailed(FedstrataError):
    """The broker could not be reached, or refused the login."""

    exit_code = 3


class DuplicateName(ConnectionFailed):
    """Another living node already uses this name."""


class LabInUse(ConnectionFailed):
    """Another run has the lab."""


class RunFailed(FedstrataError):
    """The run cannot continue."""


class NoProgress(RunFailed):
    """Neither a byte nor a training step made progress for `idle_s` seconds."""

    exit_code = 5


class StateLost(RunFailed):
    """This process does not have the state that an earlier task of its node left; another of this name may have it."""


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
