"""Address of a broker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Host, port and login of a broker; the password comes from a file or the environment."""

    host: str
    port: int = 1883
    username: str | None = None
    password: str | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"
