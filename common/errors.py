"""The exceptions of fedstrata.

FedstrataError                 every error of ours; carries the exit code of the command
├── InvalidExperiment     (4)  the experiment cannot be run: names the key, the value, the remedy
├── ConnectionFailed      (3)  broker unreachable, login refused
│   └── DuplicateName     (3)  another living node has this name on this broker
├── RunFailed             (1)  the run cannot go on
│   ├── NoProgress        (5)  nothing moved for `idle_s`
│   └── InvalidBelow      (4)  a node below cannot take part in the experiment as it is
├── WireError                  bytes from the network that are no message of ours; counted, never fatal
└── RefusedModel               an upload that is not used: wrong digest, layout, or not finite
"""

from __future__ import annotations


class FedstrataError(Exception):
    """Base of every error that a user may see; `exit_code` ends the command."""

    exit_code = 1


class InvalidExperiment(FedstrataError):
    """An experiment, or a host's part in it, that cannot work."""

    exit_code = 4

    def __init__(self, key: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(f"{key} = {value!r}: {problem}. {remedy}")
        self.parts = (key, value, problem, remedy)


class ConnectionFailed(FedstrataError):
    """The broker could not be reached, or refused us."""

    exit_code = 3


class DuplicateName(ConnectionFailed):
    """Another living node already has this name."""


class RunFailed(FedstrataError):
    """The run cannot go on."""


class NoProgress(RunFailed):
    """No byte and no training step moved for `idle_s` seconds."""

    exit_code = 5


class InvalidBelow(RunFailed):
    """A node below cannot take part: its own InvalidExperiment, in its words."""

    exit_code = 4


class WireError(FedstrataError):
    """Foreign bytes that are no valid record."""


class RefusedModel(FedstrataError):
    """A received model that must not be used; the text says why."""
