"""What Prometheus may ask of a role. The only module that imports prometheus_client.

Prefix `fedstrata_`, base units, `_total` on counters; never a round or message id as a label. Every metric has
the labels `role`, `institution`, `device` of the node it speaks of (several agents may share a process). An
institution has two connections: what is counted for each has a label that tells them apart, all else is their sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

NODE: Final = ("role", "institution", "device")
STATES: Final = ("absent", "init", "ready", "finished", "failed", "disconnected", "lost")

Cells: TypeAlias = Iterable[tuple[str, str, str, int, int]]


class Carried(NamedTuple):
    """The kernel's counts of a connection; None = this kernel does not tell that one."""

    sent: int
    received: int
    retransmitted: int | None
    rtt_s: float


class _Scraped:
    """Numbers that other objects hold, read when Prometheus asks, so that counting costs nothing."""

    def __init__(self) -> None:
        self.links: list[tuple[tuple[str, ...], Callable[[], Cells]]] = []
        self.wires: list[tuple[tuple[str, ...], Callable[[], Carried | None]]] = []
        self.totals: list[tuple[str, str, tuple[str, ...], Callable[[], int]]] = []
        self.children: list[tuple[tuple[str, ...], Callable[[], Mapping[str, str]]]] = []

    def collect(self) -> Iterator[Metric]:
        labels = [*NODE, "peer", "direction", "kind"]
        payload = CounterMetricFamily("fedstrata_payload_bytes", "Blob bytes or control message bodies", labels=labels)
        message = CounterMetricFamily("fedstrata_message_bytes", "Bytes of whole MQTT packets", labels=labels)
        for node, cells in self.links:
            for peer, direction, kind, payload_bytes, message_bytes in cells():
                payload.add_metric([*node, peer, direction, kind], payload_bytes)
                message.add_metric([*node, peer, direction, kind], message_bytes)
        yield payload
        yield message
        yield from self._carried()
        texts = {name: text for name, text, _, _ in self.totals}
        for name, text in texts.items():
            sums: dict[tuple[str, ...], int] = defaultdict(int)
            for other, _, node, read in self.totals:
                if other == name:
                    sums[node] += read()
            family = CounterMetricFamily(f"fedstrata_{name}", text, labels=NODE)
            for node, count in sums.items():
                family.add_metric(node, count)
            yield family
        nodes = GaugeMetricFamily("fedstrata_nodes", "Children of this node by presence", labels=[*NODE, "state"])
        for node, states in self.children:
            seen = list(states().values())
            for state in STATES:
                nodes.add_metric([*node, state], seen.count(state))
        yield nodes

    def _carried(self) -> Iterator[Metric]:
        labels = [*NODE, "peer"]
        wire = CounterMetricFamily(
            "fedstrata_wire_bytes", "TCP bytes of the broker connection", labels=[*labels, "direction"]
        )
        again = CounterMetricFamily("fedstrata_retransmitted_bytes", "TCP bytes that were sent again", labels=labels)
        rtt = GaugeMetricFamily(
            "fedstrata_rtt_seconds", "Round trip time to the broker's host, smoothed", labels=labels
        )
        for node, read in self.wires:
            carried = read()
            if carried is not None:
                wire.add_metric([*node, "sent"], carried.sent)
                wire.add_metric([*node, "received"], carried.received)
                if carried.retransmitted is not None:
                    again.add_metric(node, carried.retransmitted)
                if carried.rtt_s:
                    rtt.add_metric(node, carried.rtt_s)
        yield from (wire, again, rtt)


class Metrics:
    """The metrics of one process, in a registry of its own; `serve` answers /metrics."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._scraped = _Scraped()
        registry.register(self._scraped)
        self.run: Final = Info("fedstrata_run", "Facts of the run", NODE, registry=registry)
        self.round: Final = Gauge("fedstrata_round", "Rounds closed by this node", NODE, registry=registry)
        self.accuracy: Final = Gauge(
            "fedstrata_accuracy_ratio", "Test accuracy of the global model", NODE, registry=registry
        )
        self.test_loss: Final = Gauge("fedstrata_test_loss", "Test loss of the global model", NODE, registry=registry)
        self.train_loss: Final = Gauge(
            "fedstrata_train_loss", "Mean training loss of the last epoch", NODE, registry=registry
        )
        self.epochs: Final = Gauge("fedstrata_epochs", "Local epochs of the present round", NODE, registry=registry)
        self.steps: Final = Counter("fedstrata_sgd_steps", "SGD steps done", NODE, registry=registry)
        self.phase_seconds: Final = Counter(
            "fedstrata_phase_seconds", "Seconds by phase of a round", (*NODE, "phase"), registry=registry
        )

    def watch_bytes(self, node: tuple[str, str, str], cells: Callable[[], Cells]) -> None:
        """Export a node's bytes: (peer, direction, kind, payload, message) for each cell of an account."""
        self._scraped.links.append((node, cells))

    def watch_wire(self, node: tuple[str, str, str], peer: str, read: Callable[[], Carried | None]) -> None:
        """Export what a node's connection for `peer` carried, None where nobody tells."""
        self._scraped.wires.append(((*node, peer), read))

    def watch_total(self, name: str, text: str, *, node: tuple[str, str, str], read: Callable[[], int]) -> None:
        """Export a count that somebody else keeps, as `fedstrata_{name}_total`; those of one node are added up."""
        self._scraped.totals.append((name, text, node, read))

    def watch_children(self, node: tuple[str, str, str], states: Callable[[], Mapping[str, str]]) -> None:
        """Export how many of a node's children are in each state."""
        self._scraped.children.append((node, states))

    def serve(self, host: str, port: int) -> int:
        """Answer /metrics from a thread and return the port, a free one where 0 was given. Raises OSError."""
        server, _ = start_http_server(port, addr=host, registry=self._registry)
        return int(server.server_port)
