"""Addresses of a broker."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Final, TypeAlias

from fedstrata.common.net.tls import Tls

if TYPE_CHECKING:
    import paho.mqtt.client as mqtt

PORT: Final = 1883
# A name or an IPv4 address, or an IPv6 address in brackets; and a port.
_ITEM: Final = re.compile(
    r"(?:\[([^\[\]]+)\]|([\w-]{1,63}(?:\.[\w-]{1,63})*\.?))(?::([0-9]{1,5}))?", re.ASCII
)

HostPort: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Host, port and login of a broker; the password comes from a file or the environment. `tls`:
    None without TLS.

    `others` are further addresses of the same broker, in the order in which they are tried: the
    other nodes of a cluster, or the second address of a server.
    """

    host: str
    port: int = PORT
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    others: tuple[HostPort, ...] = ()
    tls: Tls | None = None

    @property
    def hosts(self) -> tuple[HostPort, ...]:
        """Host and port of each address, in order."""
        return (self.host, self.port), *self.others

    @property
    def each(self) -> tuple[BrokerAddress, ...]:
        """The addresses one by one, in order."""
        return tuple(replace(self, host=host, port=port, others=()) for host, port in self.hosts)

    def identify(self, client: mqtt.Client) -> None:
        """Give a plain client of paho this login and TLS. Raises InvalidExperiment."""
        client.username_pw_set(self.username, self.password)
        if self.tls is not None:
            client.tls_set_context(self.tls.client_context())

    def __str__(self) -> str:
        return ",".join(host_port(*one) for one in self.hosts)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server that listens on a host."""
    try:
        return ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def host_port(host: str, port: int) -> str:
    """Return host:port, an IPv6 address in brackets."""
    if ":" in host:
        return f"[{host}]:{port}"
    return f"{host}:{port}"


def parse_hosts(text: str, *, port: int = PORT) -> tuple[HostPort, ...]:
    """Return the hosts and ports of a list such as `nats-0,nats-1:1884,[::1]:1883`, or this port.
    Raises ValueError.
    """
    found = tuple(parse_host(item, port=port) for item in text.split(","))
    for one in found:
        if found.count(one) > 1:
            raise ValueError(f"{host_port(*one)} is there more than once")
    return found


def parse_host(item: str, *, port: int = PORT) -> HostPort:
    """Return one host and its port, or this port. Raises ValueError."""
    matched = _ITEM.fullmatch(item)
    literal, name, given = matched.groups() if matched else ("", "", "")
    if literal:
        IPv6Address(literal)
    number = int(given or port)
    if not (literal or name) or not 0 < number < 65_536:
        raise ValueError(f"{item!r} is not an address")
    return literal or name, number
