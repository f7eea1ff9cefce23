"""The addresses of a host, and the interface of this host that leads to them."""

from __future__ import annotations

import socket
from collections.abc import Collection
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final, TypeAlias

from common.errors import InvalidExperiment
from deploy.links.kernel import CommandRefused, query

LOOPBACK: Final = "lo"

IpAddress: TypeAlias = IPv4Address | IPv6Address


def addresses_of(host: str) -> list[IpAddress]:
    """Return the addresses of a host, given by name or address. Raises InvalidExperiment."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        problem = f"no address is known: {getattr(error, 'strerror', None) or error}"
        raise InvalidExperiment("--to", host, problem, "Name a host or an address.") from None
    return [ip_address(text) for text in dict.fromkeys(str(place[0]).partition("%")[0] for *_, place in found)]


def interface_to(host: str, addresses: Collection[IpAddress]) -> str:
    """Return the interface that leads to a host, by the first of its addresses with a route. Raises InvalidExperiment.

    A host may have addresses of a protocol that this host lacks.
    """
    problem = "it has no address"
    for address in addresses:
        try:
            (route,) = query("ip", "route", "get", str(address))
        except CommandRefused as error:
            problem = error.problem
            continue
        if route["dev"] == LOOPBACK:
            raise InvalidExperiment("--to", host, "this host itself", "Name the host at the link's other end.")
        return str(route["dev"])
    raise InvalidExperiment("--to", host, f"no route leads there: {problem}", "Name a host that can be reached.")
