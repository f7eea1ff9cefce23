"""Metrics of a role for Prometheus. The only module that imports prometheus_client.

Names have the prefix `fedstrata_`, base units, and `_total` on counters; round numbers and message
ids are never labels. Every metric has the labels of its node (`NodeLabels`), because several agents
may share a process, except the metrics of the process and its host. A node between the cloud and
the devices has two connections: counts per link have the label `tier`, which distinguishes them,
all other counts are their sum.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Info,
    disable_created_metrics,
    make_wsgi_app,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fedstrata.common.metrics_server import (
    REFRESH,
    TIMEOUT,
    Heartbeat,
    MetricsGuard,
    Scrapes,
    serve,
)

STATES: Final = ("absent", "init", "ready", "finished", "failed", "disconnected", "lost", "moved")
DISCOVERY: Final = "/sd"
HEALTH: Final = "/healthz"

Reading: TypeAlias = Iterable[tuple[tuple[str, ...], float]]


class NodeLabels(NamedTuple):
    """The labels of a node; with the role `cloud` and a parent, of a child that the cloud reports
    on.

    The cloud itself has no parent.
    """

    role: str
    node: str
    parent: str = ""


NODE: Final = NodeLabels._fields


class Family(NamedTuple):
    """A metric: its type, its labels besides those in `of`, its description, and the labels of its
    subject.
    """

    kind: Literal["counter", "gauge", "info"]
    labels: tuple[str, ...]
    text: str
    of: tuple[str, ...] = NODE

    def exposed(self, name: str) -> str:
        """Return the name under which it is scraped."""
        return f"fedstrata_{name}" + {"counter": "_total", "gauge": "", "info": "_info"}[self.kind]


RUN_STATES: Final = ("running", "finished", "failed", "interrupted")
LINK: Final = ("tier", "peer", "direction", "kind")
FAMILIES: Final[Mapping[str, Family]] = {
    "run": Family(
        "info",
        (),
        "Facts of the run, as labels: its experiment, algorithm, and at the cloud its folder",
    ),
    "run_state": Family(
        "gauge", ("state",), "Whether the run is in this state (1) or not (0), at the cloud"
    ),
    "round": Family(
        "gauge", (), "Rounds closed by this node; at the cloud the global rounds of the whole run"
    ),
    "round_timestamp_seconds": Family(
        "gauge", (), "When the last round closed, by this host's clock, for annotations"
    ),
    "accuracy_ratio": Family("gauge", (), "Test accuracy of the global model"),
    "score": Family(
        "gauge", ("score",), "The score of the global model on the test set, by its name"
    ),
    "devices_score": Family(
        "gauge",
        ("score", "statistic"),
        "Over the devices that scored the global model: mean, worst tenth, spread",
    ),
    "personalised_score": Family(
        "gauge",
        ("score", "statistic"),
        "The same over the devices that scored the model that each had trained",
    ),
    "honest_score": Family(
        "gauge", ("score", "statistic"), "The same over those of them that are no adversaries"
    ),
    "attack_success": Family(
        "gauge",
        ("column", "attack"),
        "Share of an attack's own test samples that the global model takes as it wants",
    ),
    "test_loss": Family("gauge", (), "Test loss of the global model"),
    "train_loss": Family("gauge", (), "Mean training loss of the last epoch"),
    "privacy_epsilon": Family(
        "gauge",
        ("tier", "unit"),
        "Epsilon of the worst unit so far, at the cloud, by the tier whose children it is of",
    ),
    "epochs": Family(
        "gauge", (), "Local epochs of the present round; at the cloud those of each child"
    ),
    "sgd_steps": Family("counter", (), "SGD steps of this node, or of the nodes below it"),
    "device_energy_joules": Family(
        "counter",
        (),
        (
            "A device's share of its host's energy, from its first training in a run to its last "
            "result"
        ),
    ),
    "phase_seconds": Family("counter", ("phase",), "Seconds by phase of a round"),
    "payload_bytes": Family(
        "counter", LINK, "Bytes of blobs or control message bodies, by the other end of the link"
    ),
    "message_bytes": Family(
        "counter", LINK, "Bytes of whole MQTT packets, by the other end of the link"
    ),
    "wire_bytes": Family(
        "counter",
        ("tier", "peer", "direction"),
        "TCP bytes of the broker connection, by the kernel",
    ),
    "retransmitted_bytes": Family("counter", ("tier", "peer"), "Retransmitted TCP bytes"),
    "rtt_seconds": Family(
        "gauge", ("tier", "peer"), "Round trip time to the broker's host, smoothed by the kernel"
    ),
    "link_declared_bytes_per_second": Family(
        "gauge",
        ("tier", "peer", "direction"),
        "Declared rate of a link to a child, from the experiment",
    ),
    "link_measured_bytes_per_second": Family(
        "gauge",
        ("tier", "peer", "direction", "source"),
        (
            "Measured rate of a link to a child: by calibration before the run, or of its last "
            "model "
            "of 8 chunks or more"
        ),
    ),
    "ignored_messages": Family("counter", ("reason",), "Messages refused, by reason"),
    "reconnects": Family("counter", (), "Broken or failed connections to the broker"),
    "chunks_published": Family("counter", (), "Chunks of models published"),
    "chunks_repeated": Family("counter", (), "Chunks published again"),
    "chunks_refused": Family("counter", (), "Chunks that were damaged or unknown"),
    "chunks_lost": Family(
        "counter", (), "Chunks that the broker dropped, by the gaps in their numbers"
    ),
    "refused_models": Family("counter", (), "Uploads that were refused"),
    "late_results": Family(
        "counter", (), "Results that no round used: late ones, and those that were taken back"
    ),
    "nodes": Family(
        "gauge",
        ("tier", "state"),
        "Children of this node by presence, or `moved` to another parent",
    ),
    "child_up": Family(
        "gauge",
        ("tier", "peer"),
        (
            "Whether a child that has joined, and has not moved, is present (1), or was lost or "
            "failed (0)"
        ),
    ),
    "idle_seconds": Family(
        "gauge", ("tier", "peer"), "Time without progress of a child that the open round waits for"
    ),
    "idle_most_seconds": Family(
        "gauge", (), "Time without progress after which a child is given up"
    ),
    "broker_heap_bytes": Family(
        "gauge", ("broker",), "Memory allocated by mosquitto, as it reports"
    ),
    "broker_dropped_messages": Family(
        "counter", ("broker",), "Messages dropped by mosquitto, as it reports"
    ),
    "process_cpu_seconds": Family(
        "counter", (), "CPU time of a role's process and its child processes", ()
    ),
    "process_resident_bytes": Family(
        "gauge", (), "Resident memory of a role's process and its child processes", ()
    ),
    "host_cpu_seconds": Family("counter", ("host", "mode"), "CPU time of the host, all cores", ()),
    "host_memory_bytes": Family("gauge", ("host",), "Memory of the host", ()),
    "host_memory_available_bytes": Family("gauge", ("host",), "Available memory of the host", ()),
    "host_temperature_celsius": Family(
        "gauge", ("host", "sensor"), "Temperature of a thermal zone", ()
    ),
    "energy_joules": Family(
        "counter",
        ("host", "source", "part"),
        "Energy of the host's processors, GPUs, rails or plug, by all processes",
        (),
    ),
    "disk_used_bytes": Family(
        "gauge",
        ("host", "folder"),
        "Disk that the files of a role's folder take: its spool, the cloud's runs",
        (),
    ),
    "disk_free_bytes": Family(
        "gauge", ("host", "folder"), "Free bytes of that folder's file system", ()
    ),
    "gpu_memory_bytes": Family("gauge", ("host", "gpu"), "Memory of a GPU", ()),
    "gpu_memory_used_bytes": Family(
        "gauge", ("host", "gpu"), "Used memory of a GPU, by all processes", ()
    ),
    "gpu_busy_ratio": Family(
        "gauge", ("host", "gpu"), "Fraction of the last sample period in which a GPU had work", ()
    ),
    "gpu_temperature_celsius": Family("gauge", ("host", "gpu"), "Temperature of a GPU", ()),
}


class _Watched:
    """Values that other objects hold, read at each scrape, so that counting has no overhead."""

    def __init__(self) -> None:
        self._reads: dict[
            str, dict[tuple[str, ...], list[tuple[tuple[str, ...], Callable[[], Reading]]]]
        ] = {}  # by node
        self._ended: dict[str, dict[tuple[str, ...], float]] = defaultdict(lambda: defaultdict(int))
        self._lock = Lock()  # the server's thread must not count a run twice that ends

    def add(self, name: str, node: tuple[str, ...], read: Callable[[], Reading]) -> None:
        with self._lock:
            self._reads.setdefault(name, {}).setdefault(node[: len(NODE)], []).append((node, read))

    def end(self, node: tuple[str, ...]) -> None:
        """Keep the counts of a node whose run is over, and no object of the run."""
        with self._lock:
            for name, reads in self._reads.items():
                over = reads.pop(node, [])
                if FAMILIES[name].kind == "counter":
                    for of, read in over:
                        for labels, value in read():
                            self._ended[name][*of, *labels] += value

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            found = [(name, self._sums(name)) for name in self._reads]
        for name, sums in found:
            family = FAMILIES[name]
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = kind(f"fedstrata_{name}", family.text, labels=[*family.of, *family.labels])
            for values, total in sums.items():
                metric.add_metric(values, total)
            yield metric

    def _sums(self, name: str) -> dict[tuple[str, ...], float]:
        sums: dict[tuple[str, ...], float] = defaultdict(int, self._ended.get(name, {}))
        for reads in self._reads[name].values():
            for node, read in reads:
                for labels, value in read():
                    sums[*node, *labels] += value
        return sums


_M = TypeVar("_M")


class Metrics:
    """The metrics of one process, in its own registry.

    `serve` answers /metrics, /healthz, and /sd with the scrape targets.
    """

    def __init__(self) -> None:
        self.heartbeat = Heartbeat()
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series beside each counter
        registry = self._registry = CollectorRegistry()
        self._watched = _Watched()
        registry.register(self._watched)
        self._targets: Callable[[str], Sequence[Mapping[str, object]]] = lambda asked: ()
        self._scrapes = Scrapes()
        self._discoveries = Scrapes()
        self._scored: dict[NodeLabels, tuple[str, ...]] = {}  # the scores that a run's end removes
        self.run: Final = Info("fedstrata_run", FAMILIES["run"].text, NODE, registry=registry)
        self.run_state: Final = self._gauge("run_state")
        self.round: Final = self._gauge("round")
        self.round_timestamp_seconds: Final = self._gauge("round_timestamp_seconds")
        self.accuracy: Final = self._gauge("accuracy_ratio")
        self.score: Final = self._gauge("score")
        self.devices_score: Final = self._gauge("devices_score")
        self.personalised_score: Final = self._gauge("personalised_score")
        self.honest_score: Final = self._gauge("honest_score")
        self.attack_success: Final = self._gauge("attack_success")
        self.test_loss: Final = self._gauge("test_loss")
        self.train_loss: Final = self._gauge("train_loss")
        self.privacy_epsilon: Final = self._gauge("privacy_epsilon")
        self.epochs: Final = self._gauge("epochs")
        self.steps: Final = self._counter("sgd_steps")
        self.device_energy: Final = self._counter("device_energy_joules")
        self.phase_seconds: Final = self._counter("phase_seconds")

    def serve_targets(self, targets: Callable[[str], Sequence[Mapping[str, object]]]) -> None:
        """Serve the run's scrape targets; `targets` gets the address at which Prometheus requests
        them.
        """
        self._targets = targets

    def introduce(
        self, node: NodeLabels, facts: Mapping[str, str], *, phases: Iterable[str]
    ) -> None:
        """Start a node's metrics: the facts of its run, and zeros, so that the first increment is
        visible as one.
        """
        self.run.labels(*node).info(dict(facts))
        self.round.labels(*node).set(0)
        self.steps.labels(*node)
        for phase in phases:
            self.phase_seconds.labels(*node, phase)

    def run_is(self, node: NodeLabels, state: str) -> None:
        """Set the state of the cloud's run, one of RUN_STATES."""
        for each in RUN_STATES:
            self.run_state.labels(*node, each).set(each == state)

    @contextmanager
    def run_of(self, node: NodeLabels) -> Iterator[None]:
        """Let a node's metrics of a run end with it: its gauges disappear, its counters keep their
        values.
        """
        try:
            yield
        finally:
            self._watched.end(node)
            for metric in (
                self.run,
                self.round,
                self.round_timestamp_seconds,
                self.train_loss,
                self.epochs,
            ):
                with suppress(KeyError):  # it was never set
                    metric.remove(*node)
            if (names := self._scored.pop(node, None)) is not None:
                for name in names:
                    self.score.remove(*node, name)
                self.test_loss.remove(*node)

    def scored(self, node: NodeLabels, scores: Mapping[str, float], *, loss: float) -> None:
        """Set the scores, by name, and the loss of a model that a node has scored, until the end of
        its run.
        """
        self._scored[node] = tuple(scores)
        for name, score in scores.items():
            self.score.labels(*node, name).set(score)
        self.test_loss.labels(*node).set(loss)

    def trained(self, node: NodeLabels, loss: float | None) -> None:
        """Set the mean training loss of a node's last round; without a series where it is not
        known.
        """
        if loss is not None:
            self.train_loss.labels(*node).set(loss)
            return
        with suppress(KeyError):  # it was never known
            self.train_loss.remove(*node)

    def closed(self, node: NodeLabels, *, rounds: int | None = None) -> None:
        """Count a round that a node closed; `rounds` sets the total if it is known."""
        gauge = self.round.labels(*node)
        gauge.inc() if rounds is None else gauge.set(rounds)
        self.round_timestamp_seconds.labels(*node).set_to_current_time()

    def watch(self, name: str, node: tuple[str, ...], read: Callable[[], Reading]) -> None:
        """Export values of another object: label values with a number each; numbers with equal
        labels are added.

        `node`: the first label values, a node's, then a tier's name if the metric is about links;
        empty for metrics without a node. `read` is called from the server's thread.
        """
        self._watched.add(name, node, read)

    def serve(self, host: str, port: int, guard: MetricsGuard | None = None) -> int:
        """Serve HTTP from a thread and return the port; port 0 selects a free one. Raises OSError.

        With a guard all but the health needs a client's certificate or a login.
        """
        scrape = make_wsgi_app(self._registry)

        def answer(environ: Any, start_response: Any) -> Iterable[bytes]:
            if environ["PATH_INFO"] == HEALTH:
                failure = self.heartbeat.failure()
                status = "503 Service Unavailable" if failure else "200 OK"
                start_response(status, [("Content-Type", "text/plain")])
                return [f"{failure or 'ok'}\n".encode()]
            if guard is not None and not guard.admits(environ):
                start_response(
                    "401 Unauthorized", [("WWW-Authenticate", 'Basic realm="fedstrata"')]
                )
                return [b"a login or a client's certificate is needed\n"]
            if environ["PATH_INFO"] == DISCOVERY:
                start_response("200 OK", [("Content-Type", "application/json")])
                asked = environ.get("HTTP_HOST", "")
                known = environ.get(REFRESH, "")
                return self._discoveries.serve(
                    lambda: [json.dumps(self._targets(asked)).encode()], interval=known
                )
            return self._scrapes.serve(
                lambda: scrape(environ, start_response), interval=environ.get(TIMEOUT, "")
            )

        tls = None if guard is None else guard.tls
        return serve(answer, host, port, tls=tls)

    async def last_scrape(self) -> None:
        """Wait for one more scrape if Prometheus scrapes regularly, so that it gets the last
        values.
        """
        await self._scrapes.wait_for_next()

    def patience_s(self) -> float:
        """Return how long others may wait for a scrape: 0 if nobody scrapes this process
        regularly.
        """
        return self._scrapes.patience_s()

    async def last_discovery(self) -> None:
        """Serve no target from now on, and wait until Prometheus has seen that, if it asks
        regularly.

        It keeps the last list that it got, and would report each role of a run that has ended as
        down, for ever.
        """
        self._targets = lambda asked: ()
        await self._discoveries.wait_for_next()

    def _gauge(self, name: str) -> Gauge:
        return self._metric(Gauge, name)

    def _counter(self, name: str) -> Counter:
        return self._metric(Counter, name)

    def _metric(self, kind: Callable[..., _M], name: str) -> _M:
        family = FAMILIES[name]
        labels = (*family.of, *family.labels)
        return kind(f"fedstrata_{name}", family.text, labels, registry=self._registry)
