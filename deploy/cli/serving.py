"""The metrics endpoint of a role."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.host.files import read_text
from fedstrata.deploy.console import logs
from fedstrata.deploy.console.login import METRICS_NAME, Login

if TYPE_CHECKING:
    from fedstrata.common.metrics import Metrics
    from fedstrata.common.metrics_server import MetricsGuard
    from fedstrata.common.net.address import BrokerAddress

METRICS: Final = "127.0.0.1:0"
PORT_MOST: Final = 65_535
LOGIN_FILE: Final = "FEDSTRATA_METRICS_LOGIN_FILE"
MetricsAddress: TypeAlias = Annotated[
    str,
    typer.Option(
        "--metrics",
        help="Address of /metrics, /healthz (and the cloud's /sd), host:port; port 0 = a free one.",
    ),
]
Insecure: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Serve --metrics beyond this machine without login and TLS.",
        envvar="FEDSTRATA_INSECURE",
    ),
]


def check_metrics(address: str) -> tuple[str, int]:
    """Return the host and the port of an address of /metrics. Raises InvalidExperiment."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and int(port) <= PORT_MOST):
        raise InvalidExperiment(
            "--metrics", address, "not host:port", "Use a free host:port, or port 0."
        )
    return host.strip("[]"), int(port)


def serve_metrics(
    address: str,
    *,
    broker: BrokerAddress,
    login: Login,
    insecure: bool,
    folders: Mapping[str, Path | None] | None = None,
) -> tuple[Metrics, str]:
    """Serve /metrics and /healthz at an address, host:port; return the registry, and the address to
    publish.

    Beyond this machine by TLS with the certificate that `login` has for METRICS_NAME, to clients
    with a certificate of its authority or the login in the file FEDSTRATA_METRICS_LOGIN_FILE. The
    health is that of the running event loop. For a wildcard host the published address is the local
    one that reaches the broker. `folders`: those whose disk usage is served, by what they hold;
    None: there is none. Raises InvalidExperiment.
    """
    from fedstrata.common.host.machine import export_machine
    from fedstrata.common.metrics import Metrics
    from fedstrata.common.net.address import is_loopback
    from fedstrata.common.protocol.attendance import HTTPS
    from fedstrata.common.runtime.exports import reachable

    host, port = check_metrics(address)
    registry = Metrics()
    guard = None if is_loopback(host) else _guard(address, login, insecure=insecure)
    export_machine(
        registry, folders={name: path for name, path in (folders or {}).items() if path is not None}
    )
    try:
        found = registry.serve(host, port, guard)
    except OSError as error:
        raise InvalidExperiment(
            "--metrics", address, error.strerror or str(error), "Use a free host:port, or port 0."
        ) from None
    registry.heartbeat.beat()
    scheme = HTTPS if guard is not None and guard.tls is not None else ""
    return registry, f"{scheme}{reachable(host, broker)}:{found}"


def _guard(address: str, own: Login, *, insecure: bool) -> MetricsGuard | None:
    """Return the guard of an address that others reach; None if everybody may read, as --insecure
    allows.
    """
    from fedstrata.common.metrics_server import MetricsGuard
    from fedstrata.common.net.tls import OPTIONAL, RenewedContext

    tls = own.tls_of(METRICS_NAME) if own.tls_cert else None
    context = RenewedContext(tls, clients=OPTIONAL) if tls is not None else None
    login = ""
    if path := os.environ.get(LOGIN_FILE):
        try:
            login = read_text(Path(path)).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidExperiment(
                LOGIN_FILE, path, str(error), "Name a file with name:password."
            ) from None
    if context is not None and (login or own.tls_ca):
        return MetricsGuard(context, login)
    problem = "reachable by others, without login or without TLS"
    if not insecure:
        remedy = (
            "Give --tls-cert and --tls-key, and --tls-ca or a login, or let everybody read "
            "with --insecure."
        )
        raise InvalidExperiment("--metrics", address, problem, remedy)
    logs.write_line(f"metrics: {problem}, as --insecure allows", level=logging.WARNING)
    if login:
        return MetricsGuard(context, login)
    return None
