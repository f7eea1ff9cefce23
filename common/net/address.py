"""Where a broker is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Where a broker listens and how to log in; the password comes from a file or the environment."""

    host: str
    port: int = 1883
    username: str | None = None
    password: str | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"
