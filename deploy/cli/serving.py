"""The metrics endpoint of a role."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import InvalidExperiment

if TYPE_CHECKING:
    from common.metrics import Metrics
    from common.net.address import BrokerAddress


def serve_metrics(address: str, *, broker: BrokerAddress) -> tuple[Metrics, str]:
    """Serve /metrics and /healthz at an address, host:port; return the registry, and the address to publish.

    The health is that of the running event loop. For a wildcard host the published address is the local one that
    reaches the broker. Raises InvalidExperiment.
    """
    from common.host.machine import export_machine
    from common.metrics import Metrics
    from common.runtime.targets import reachable

    host, _, port = address.rpartition(":")
    registry, host = Metrics(), host.strip("[]")
    export_machine(registry)
    try:
        found = registry.serve(host, int(port))
        registry.heartbeat.beat()
        return registry, f"{reachable(host, broker)}:{found}"
    except (OSError, ValueError, OverflowError) as error:
        raise InvalidExperiment("--metrics", address, str(error), "Use a free host:port, or port 0.") from None
