"""Generator of the Grafana dashboards: `python -m docs.tools.dashboards deploy/grafana/dashboards`
rewrites them.

A dashboard has rows of panels that show the metrics of `common.metrics` and the recording rules of
`deploy/prometheus`. They are built with Grafana's own types (grafana-foundation-sdk for 10.1), so
that mypy checks them against its schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
    QueryVariable,
    TextBoxVariable,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import TimeZoneBrowser
from grafana_foundation_sdk.models.dashboard import (
    AnnotationContainer,
    AnnotationQuery,
    DashboardLinkType,
    VariableHide,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.dashboard import Dashboard as GrafanaDashboard

from docs.tools.dashboards.compare import BOTH, COMPARE
from docs.tools.dashboards.lab import LAB
from docs.tools.dashboards.links import LINKS
from docs.tools.dashboards.nodes import ONE_DEVICE, ONE_INSTITUTION
from docs.tools.dashboards.panel import SOURCE, WIDTH, Panel

REPORTS: Final = "http://127.0.0.1:8000"  # python -m http.server --directory runs --bind 127.0.0.1
_RUN: Final = {"run": "label_values(fedstrata_run_info, run)"}
_PARENT: Final = {
    "tier": 'label_values(fedstrata_nodes{run="$run"}, tier)',
    "parent": 'label_values(fedstrata_nodes{run="$run", tier="$tier"}, node)',
}
_INSTITUTION: Final = {
    "node": 'label_values(fedstrata_run_info{run="$run", role="institution"}, node)'
}
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


class PrometheusAnnotation(AnnotationQuery):
    """An annotation by the Prometheus data source, whose OWN keys Grafana's schema does not have."""

    OWN: Final = ("titleFormat", "step", "useValueForTime")

    def __init__(
        self, name: str, expr: str, *, text: str, colour: str, step: str, times: bool = False
    ) -> None:
        super().__init__(name=name, datasource=SOURCE, enable=True, icon_color=colour, expr=expr)
        self._own = dict(zip(self.OWN, (text, step, times), strict=True))

    def to_json(self) -> dict[str, object]:
        """Return the annotation as JSON."""
        return super().to_json() | self._own


def build(name: str) -> GrafanaDashboard:
    """Return a dashboard in Grafana's types."""
    title, variables, panels = DASHBOARDS[name]
    links = (
        DashboardLink("").type(DashboardLinkType.DASHBOARDS).tags(["fedstrata"]).icon("dashboard")
    )
    made = (
        Dashboard(f"fedstrata: {title}")
        .uid(f"fedstrata-{name}")
        .tags(["fedstrata"])
        .version(1)
        .editable()
        .refresh("5s")
        .time("now-30m", "now")
        .timezone(TimeZoneBrowser)
        .links([links.include_vars(True).keep_time(True)])
    )
    for variable, query in variables.items():
        made.with_variable(_variable(variable, query))
    if any(panel.link for panel in panels):
        reports = (
            TextBoxVariable("reports")
            .label("reports")
            .default_value(REPORTS)
            .current(VariableOption(True, REPORTS, REPORTS))
        )
        made.with_variable(
            reports.description("URL of a web server with the folder of runs, for links to reports")
        )
    dashboard = made.build()
    dashboard.annotations = AnnotationContainer(
        list(_annotations('run="$run"' if "run" in variables else BOTH))
    )
    x = y = height = 0
    dashboard.panels = []
    # from left to right, in rows as high as their highest panel
    for number, panel in enumerate(panels, 1):
        if x + panel.width > WIDTH:
            x, y, height = 0, y + height, 0
        dashboard.panels.append(panel.build(number, x=x, y=y))
        x, height = x + panel.width, max(height, panel.height)
    return dashboard


def dashboard(name: str) -> str:
    """Return the JSON of a dashboard."""
    return json.dumps(build(name), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _variable(name: str, query: str) -> QueryVariable:
    order = VariableSort.ALPHABETICAL_DESC if name.startswith("run") else VariableSort.NUMERICAL_ASC
    return (
        QueryVariable(name)
        .label(name.replace("_", " "))
        .hide(VariableHide.DONT_HIDE)
        .datasource(SOURCE)
        .query({"query": query, "refId": name})
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(order)
    )


def _annotations(run: str) -> Iterator[AnnotationQuery]:
    """Yield the annotations of all panels.

    Grafana marks only values above 0, and joins marks that are at most a step apart. The time of a
    global round is that of the clock of the cloud's host.
    """
    lost, global_rounds = f"1 - fedstrata_child_up{{{run}}} > 0", f'{{{run}, role="cloud"}} * 1000'
    yield PrometheusAnnotation("Lost nodes", lost, text="{{peer}} is lost", colour="red", step="5s")
    yield PrometheusAnnotation(
        "Global rounds", f"fedstrata_round_timestamp_seconds{global_rounds}", text="global_round",
        colour="rgba(128, 128, 128, 0.5)", step="1s", times=True,
    )  # fmt: skip
