"""Generator of the Grafana dashboards: `python -m docs.tools.dashboards deploy/grafana/dashboards` rewrites them.

A dashboard has rows of panels that show the metrics of `common.metrics` and the recording rules of `deploy/prometheus`.
The JSON follows Grafana's dashboard schema 36, which Grafana 10 and later read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SOURCE: Final = {"type": "prometheus", "uid": "fedstrata"}
WIDTH: Final = 24
RATE: Final = "[$__rate_interval]"
CLOUD: Final = 'run="$run", role="cloud"'
INSTITUTION: Final = 'run="$run", role="institution", node="$node"'
DEVICE: Final = 'run="$run", role="device", parent="$parent", node="$node"'
BOTH: Final = 'run=~"$run_a|$run_b"'

Query = tuple[str, str]  # an expression and the legend of its series


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `kind`: Grafana's panel type; `width`: in 24ths of the dashboard."""

    title: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    stacked: bool = False
    most: float | None = None

    def json(self, number: int, *, x: int, y: int) -> dict[str, Any]:
        """Return the panel as Grafana's JSON."""
        defaults: dict[str, Any] = {"unit": self.unit, "min": 0}
        options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
        if self.most is not None:
            defaults["max"] = self.most
        if self.kind == "timeseries":
            stacking = {"mode": "normal" if self.stacked else "none", "group": "A"}
            defaults["custom"] = {"fillOpacity": 40 if self.stacked else 0, "stacking": stacking}
            options = {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
                "tooltip": {"mode": "multi", "sort": "none"},
            }
        targets = [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend,
             "instant": "$__range" in expr, "range": "$__range" not in expr}
            for i, (expr, legend) in enumerate(self.queries)
        ]  # fmt: skip
        return {
            "id": number, "type": self.kind, "title": self.title, "datasource": SOURCE, "targets": targets,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options,
        }  # fmt: skip

    @property
    def height(self) -> int:
        """The height in Grafana's units."""
        return 4 if self.kind == "stat" else 8


def one(title: str, expr: str, *, unit: str = "short") -> Panel:
    """Return a panel with one number."""
    return Panel(title, [(expr, "")], unit, "stat", width=4)


def machine(of: str) -> list[Panel]:
    """Return panels of a node's process, which it may share with other nodes, and of its host."""
    here = f"and on (run, instance) fedstrata_run_info{{{of}}}"
    return [
        Panel(
            "CPU of its process, cores", [(f"rate(fedstrata_process_cpu_seconds_total{RATE}) {here}", "{{instance}}")]
        ),
        Panel("Memory of its process", [(f"fedstrata_process_resident_bytes {here}", "{{instance}}")], "bytes"),
        Panel("Temperature of its host", [(f"fedstrata_host_temperature_celsius {here}", "{{sensor}}")], "celsius"),
        Panel("GPUs of its host", [(f"fedstrata_gpu_busy_ratio {here}", "GPU {{gpu}}")], "percentunit", most=1),
    ]


def traffic(of: str) -> list[Panel]:
    """Return panels of a node's received and sent bytes."""
    return [
        Panel(
            f"Bytes {direction}, MQTT packets",
            [(f'sum by (peer, kind) (rate(fedstrata_message_bytes_total{{{of}, direction="{direction}"}}{RATE}))',
              "{{peer}} {{kind}}")],
            "Bps",
            stacked=True,
        )
        for direction in ("received", "sent")
    ]  # fmt: skip


def phases(of: str) -> list[Panel]:
    """Return panels of a node's time by phase."""
    return [
        Panel("Seconds by phase, so far", [(f"fedstrata_phase_seconds_total{{{of}}}", "{{phase}}")], "s", stacked=True),
        Panel(
            "Share of time by phase",
            [(f"rate(fedstrata_phase_seconds_total{{{of}}}{RATE})", "{{phase}}")],
            "percentunit",
            stacked=True,
        ),
    ]


LAB: Final = [
    one("Global round", f"fedstrata_round{{{CLOUD}}}"),
    one("Test accuracy", f"fedstrata_accuracy_ratio{{{CLOUD}}}", unit="percentunit"),
    one("Training time", 'run:fedstrata_training_seconds:sum{run="$run"}', unit="s"),
    Panel("Bytes by tier, both directions", [('tier:fedstrata_received_bytes:sum{run="$run"}', "{{tier}}")],
          "bytes", "stat", width=8),
    one("Alerts", 'count(ALERTS{alertstate="firing"}) or vector(0)'),
    Panel("Test accuracy", [(f"fedstrata_accuracy_ratio{{{CLOUD}}}", "accuracy")], "percentunit", most=1),
    Panel(
        "Loss",
        [
            (f"fedstrata_test_loss{{{CLOUD}}}", "test"),
            (f"fedstrata_train_loss{{{CLOUD}}}", "training, cloud"),
            ('fedstrata_train_loss{run="$run", role="institution"}', "training, {{node}}"),
        ],
    ),
    *phases(CLOUD),
    Panel(
        "Nodes by tier and state",
        [('sum by (tier, state) (fedstrata_nodes{run="$run"}) > 0', "{{tier}} {{state}}")],
        stacked=True,
        width=8,
    ),
    Panel(
        "Children by parent and state",
        [('sum by (node, state) (fedstrata_nodes{run="$run"}) > 0', "{{node}} {{state}}")],
        stacked=True,
        width=8,
    ),
    Panel(
        "Training devices by parent",
        [('sum by (parent) (rate(fedstrata_phase_seconds_total{run="$run", role="device", phase="train"}'
          f"{RATE}))", "{{parent}}")],
        stacked=True,
        width=8,
    ),
    Panel("Epochs of the cloud's children", [(f"fedstrata_epochs{{{CLOUD}}}", "{{node}}")], width=8),
    Panel(
        "Time without progress", [('max by (peer) (fedstrata_idle_seconds{run="$run"})', "{{peer}}")], "s", width=8
    ),
    Panel("Reachable roles", [('sum by (role) (up{run="$run"})', "{{role}}")], stacked=True, width=8),
    Panel(
        "Broker's memory",
        [
            ('max by (broker) (fedstrata_broker_heap_bytes{run="$run"})', "{{broker}}"),
            ("fedstrata:broker_heap_bound_bytes", "bound"),
        ],
        "bytes",
        width=8,
    ),
    Panel("CPU of hosts", [("host:fedstrata_cpu_busy:ratio_rate1m", "{{host}}")], "percentunit", width=8, most=1),
    Panel("Free memory of hosts", [("host:fedstrata_memory_available:ratio", "{{host}}")], "percentunit", width=8),
]  # fmt: skip

_RECEIVED: Final = 'fedstrata:received_bytes:rate1m{run="$run"'
LINKS: Final = [
    Panel("Received by tier, over a minute", [(f"sum by (tier) ({_RECEIVED}}})", "{{tier}}")], "Bps", stacked=True),
    Panel(
        "Received by tier and node, over a minute",
        [(f"sum by (tier, node) ({_RECEIVED}}})", "{{tier}} {{node}}")],
        "Bps",
    ),
    Panel(
        "Up to $parent, over a minute",
        [(f'sum by (peer) ({_RECEIVED}, tier="$tier", node="$parent"}})', "{{peer}}")],
        "Bps",
    ),
    Panel(
        "Down from $parent, over a minute",
        [(f'sum by (node) ({_RECEIVED}, tier="$tier", peer="$parent"}})', "{{node}}")],
        "Bps",
    ),
    Panel(
        "Measured rate, relative to the declared rate",
        [('fedstrata:link_measured:ratio{run="$run"}', "{{tier}} {{peer}}, {{direction}} by its parent")],
        "percentunit",
        "bargauge",
    ),
    Panel(
        "Declared rate",
        [('fedstrata_link_declared_bytes_per_second{run="$run"}', "{{tier}} {{peer}}, {{direction}} by its parent")],
        "Bps",
        "bargauge",
    ),
    Panel(  # at the child, whose connection has this link only; a parent has `fedstrata_nodes` of the tier below it
        "Three byte counts by tier, both directions",
        [
            (f'sum by (tier) (fedstrata_{count}_bytes_total{{run="$run"}}'
             ' unless on (run, tier, node) fedstrata_nodes{run="$run"})', f"{{{{tier}}}} {count}")
            for count in ("payload", "message", "wire")
        ],
        "bytes",
    ),
    Panel(
        "TCP retransmissions", [('fedstrata:retransmitted:ratio_rate1m{run="$run"}', "{{node}} ({{peer}})")],
        "percentunit",
    ),
    Panel("Round-trip time to the broker", [('fedstrata_rtt_seconds{run="$run"}', "{{node}} ({{peer}})")], "s"),
    Panel(
        "Repeated chunks, and messages dropped by brokers",
        [
            (f'sum by (role) (rate(fedstrata_chunks_repeated_total{{run="$run"}}{RATE}))', "repeated, {{role}}"),
            (f'max by (broker) (rate(fedstrata_broker_dropped_messages_total{{run="$run"}}{RATE}))',
             "dropped, {{broker}}"),
        ],
    ),
]  # fmt: skip

ONE_INSTITUTION: Final = [
    one("Rounds", f"fedstrata_round{{{INSTITUTION}}}"),
    one("Epochs", f"fedstrata_epochs{{{INSTITUTION}}}"),
    one("Training loss", f"fedstrata_train_loss{{{INSTITUTION}}}"),
    one("Children present", f"sum (fedstrata_child_up{{{INSTITUTION}}})"),
    one("Refused models", f"fedstrata_refused_models_total{{{INSTITUTION}}}"),
    one("Late results", f"fedstrata_late_results_total{{{INSTITUTION}}}"),
    *phases(INSTITUTION),
    *traffic(INSTITUTION),
    Panel("Training loss", [
        (f"fedstrata_train_loss{{{INSTITUTION}}}", "mean"),
        ('fedstrata_train_loss{run="$run", parent="$node"}', "{{node}}"),
    ]),
    Panel("Children present", [(f"fedstrata_child_up{{{INSTITUTION}}}", "{{peer}}")], stacked=True),
    Panel("Time without progress", [(f"fedstrata_idle_seconds{{{INSTITUTION}}}", "{{peer}}")], "s"),
    Panel("Links of its children: measured rate, relative to the declared rate",
          [(f"fedstrata:link_measured:ratio{{{INSTITUTION}}}", "{{peer}} {{direction}}")], "percentunit", "bargauge"),
    *machine(INSTITUTION),
]  # fmt: skip

ONE_DEVICE: Final = [
    one("Rounds", f"fedstrata_round{{{DEVICE}}}"),
    one("SGD steps", f"fedstrata_sgd_steps_total{{{DEVICE}}}"),
    one("Training loss", f"fedstrata_train_loss{{{DEVICE}}}"),
    one("Epochs", f"fedstrata_epochs{{{DEVICE}}}"),
    one("Round-trip time", f"fedstrata_rtt_seconds{{{DEVICE}}}", unit="s"),
    one("Reconnects", f"fedstrata_reconnects_total{{{DEVICE}}}"),
    *phases(DEVICE),
    *traffic(DEVICE),
    Panel("Training loss", [(f"fedstrata_train_loss{{{DEVICE}}}", "loss")]),
    Panel("Steps", [(f"rate(fedstrata_sgd_steps_total{{{DEVICE}}}{RATE})", "steps per second")]),
    *machine(DEVICE),
]

COMPARE: Final = [
    Panel("Global rounds", [(f'fedstrata_round{{{BOTH}, role="cloud"}}', "{{run}}")]),
    Panel("Test accuracy", [(f'fedstrata_accuracy_ratio{{{BOTH}, role="cloud"}}', "{{run}}")], "percentunit", most=1),
    *(
        Panel(title, [(f"max by (run{more}) (max_over_time({expr}[$__range]))", legend)], unit, "bargauge")
        for title, expr, more, legend, unit in (
            ("Best accuracy", f'fedstrata_accuracy_ratio{{{BOTH}, role="cloud"}}', "", "{{run}}", "percentunit"),
            ("Training time", f"run:fedstrata_training_seconds:sum{{{BOTH}}}", "", "{{run}}", "s"),
            ("Seconds by phase", f'fedstrata_phase_seconds_total{{{BOTH}, role="cloud"}}', ", phase",
             "{{run}} {{phase}}", "s"),
            ("Bytes by tier, both directions", f"tier:fedstrata_received_bytes:sum{{{BOTH}}}", ", tier",
             "{{run}} {{tier}}", "bytes"),
            ("SGD steps", f'fedstrata_sgd_steps_total{{{BOTH}, role="cloud"}}', "", "{{run}}", "short"),
        )
    ),
    Panel(
        "Experiments",
        [(f'max by (run, experiment, algorithm, digest) (fedstrata_run_info{{{BOTH}, role="cloud"}})',
          "{{run}}: {{experiment}}, {{algorithm}}, {{digest}}")],
        kind="stat",
        width=24,
    ),
]  # fmt: skip

_RUN: Final = {"run": "label_values(fedstrata_run_info, run)"}
_PARENT: Final = {
    "tier": 'label_values(fedstrata_nodes{run="$run"}, tier)',
    "parent": 'label_values(fedstrata_nodes{run="$run", tier="$tier"}, node)',
}
_INSTITUTION: Final = {"node": 'label_values(fedstrata_run_info{run="$run", role="institution"}, node)'}
_DEVICE: Final = {
    "parent": 'label_values(fedstrata_run_info{run="$run", role="device"}, parent)',
    "node": 'label_values(fedstrata_run_info{run="$run", role="device", parent="$parent"}, node)',
}
DASHBOARDS: Final[Mapping[str, tuple[str, Mapping[str, str], Sequence[Panel]]]] = {
    "lab": ("Lab", _RUN, LAB),
    "links": ("Links", _RUN | _PARENT, LINKS),
    "institution": ("One institution", _RUN | _INSTITUTION, ONE_INSTITUTION),
    "device": ("One device", _RUN | _DEVICE, ONE_DEVICE),
    "compare": ("Two runs", dict.fromkeys(("run_a", "run_b"), _RUN["run"]), COMPARE),
}


def dashboard(name: str) -> str:
    """Return the JSON of a dashboard."""
    title, variables, panels = DASHBOARDS[name]
    run = 'run="$run"' if "run" in variables else BOTH
    made = {
        "uid": f"fedstrata-{name}", "title": f"fedstrata: {title}", "tags": ["fedstrata"], "schemaVersion": 36,
        "version": 1, "editable": True, "refresh": "5s", "time": {"from": "now-30m", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["fedstrata"], "asDropdown": False, "includeVars": True,
                   "keepTime": True, "targetBlank": False, "title": "", "tooltip": "", "url": "", "icon": "dashboard"}],
        "templating": {"list": [_variable(*variable) for variable in variables.items()]},
        "annotations": {"list": list(_annotations(run))},
        "panels": list(_placed(panels)),
    }  # fmt: skip
    return json.dumps(made, indent=1) + "\n"


def main() -> None:
    """Write all dashboards into the folder named on the command line."""
    for name in DASHBOARDS:
        Path(sys.argv[1], f"{name}.json").write_text(dashboard(name), encoding="utf-8")


def _placed(panels: Sequence[Panel]) -> Iterator[dict[str, Any]]:
    """Yield the panels from left to right, in rows as high as their highest panel."""
    x = y = height = 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > WIDTH:
            x, y, height = 0, y + height, 0
        yield panel.json(number, x=x, y=y)
        x, height = x + panel.width, max(height, panel.height)


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name, "label": name.replace("_", " "), "type": "query", "datasource": SOURCE, "definition": query,
        "query": {"query": query, "refId": name}, "refresh": 2, "sort": 2 if name.startswith("run") else 3,
    }  # fmt: skip


def _annotations(run: str) -> Iterator[dict[str, Any]]:
    """Yield the annotations of all panels.

    Grafana marks only values above 0, and joins marks that are at most a step apart. The time of a global round is that
    of the clock of the cloud's host.
    """
    global_rounds = f'fedstrata_round_timestamp_seconds{{{run}, role="cloud"}} * 1000'
    for name, expr, text, colour, more in (
        ("Lost nodes", f"1 - fedstrata_child_up{{{run}}} > 0", "{{peer}} is lost", "red", {"step": "5s"}),
        (
            "Global rounds",
            global_rounds,
            "global_round",
            "rgba(128, 128, 128, 0.5)",
            {"step": "1s", "useValueForTime": True},
        ),
    ):
        yield {"name": name, "datasource": SOURCE, "enable": True, "iconColor": colour, "expr": expr,
               "titleFormat": text, **more}  # fmt: skip


if __name__ == "__main__":
    main()
