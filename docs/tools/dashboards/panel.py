"""A panel of a dashboard, with the description that its reader needs, as Grafana's types have it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from grafana_foundation_sdk.builders import bargauge, common, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.dashboard import DashboardLink
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.common import (
    BigValueTextMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import DashboardLinkType, DataSourceRef, GridPos
from grafana_foundation_sdk.models.dashboard import Panel as GrafanaPanel

SOURCE: Final = DataSourceRef(type_val="prometheus", uid="fedstrata")
WIDTH: Final = 24  # of a dashboard
RATE: Final = "[$__rate_interval]"
NAMES: Final = re.compile(r"(?:\b\w+:)?\bfedstrata[_:][\w:]+|\bALERTS\b|\bup\b")
COUNT, BYTES, BYTES_PER_SECOND = units.Short, units.BytesSI, units.BytesPerSecondSI
SECONDS, SHARE, CELSIUS, WATTS, JOULES = (
    units.Seconds,
    units.PercentUnit,
    units.Celsius,
    units.Watt,
    units.Joule,
)
IN_WORDS: Final = {
    COUNT: "a number",
    BYTES: "bytes",
    BYTES_PER_SECOND: "bytes per second",
    SECONDS: "seconds",
    SHARE: "a share, 100 % = 1",
    CELSIUS: "degrees Celsius",
    WATTS: "watts",
    JOULES: "joules",
}

Query: TypeAlias = tuple[str, str]  # an expression and the legend of its series
Builder: TypeAlias = timeseries.Panel | stat.Panel | bargauge.Panel


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `shows` and `remedy` are its description: what it shows, and what to do if it is
    bad.

    `width`: in 24ths of the dashboard. `least`, `most`: the ends of its axis. `link`: title and URL
    of a link of each value.
    """

    title: str
    queries: Sequence[Query]
    shows: str
    remedy: str
    unit: str = COUNT
    kind: Literal["timeseries", "stat", "bargauge"] = "timeseries"
    width: int = 12
    stacked: bool = False
    least: float | None = 0
    most: float | None = None
    link: tuple[str, str] | None = None

    @property
    def height(self) -> int:
        """The height in Grafana's units."""
        return 4 if self.kind == "stat" else 8

    @property
    def description(self) -> str:
        """What it shows, its unit, the metrics and rules that it comes from, and what to do."""
        found = sorted({name for expr, _ in self.queries for name in NAMES.findall(expr)})
        sources = ", ".join(f"`{name}`" for name in found)
        return f"{self.shows}\n\nUnit: {IN_WORDS[self.unit]}. From {sources}.\n\n{self.remedy}"

    def build(self, number: int, *, x: int, y: int) -> GrafanaPanel:
        """Return the panel for Grafana."""
        panel = (
            self._of_its_kind()
            .id(number)
            .title(self.title)
            .description(self.description)
            .datasource(SOURCE)
        )
        panel.grid_pos(GridPos(h=self.height, w=self.width, x=x, y=y)).unit(self.unit)
        if self.least is not None:
            panel.min(self.least)
        if self.most is not None:
            panel.max(self.most)
        if self.link is not None:
            title, url = self.link
            link = DashboardLink(title).type(DashboardLinkType.LINK).url(url).target_blank(True)
            panel.data_links([link])
        for index, (expr, legend) in enumerate(self.queries):
            query = (
                prometheus.Dataquery()
                .ref_id(chr(ord("A") + index))
                .expr(expr)
                .legend_format(legend)
            )
            query.datasource(SOURCE)
            panel.with_target(query.instant() if "$__range" in expr else query.range())
        return panel.build()

    def _of_its_kind(self) -> Builder:
        reduced = common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False)
        if self.kind == "stat":
            return stat.Panel().reduce_options(reduced).text_mode(BigValueTextMode.AUTO)
        if self.kind == "bargauge":
            return bargauge.Panel().reduce_options(reduced)
        legend = (
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
        )
        stacking = StackingMode.NORMAL if self.stacked else StackingMode.NONE
        return (
            timeseries.Panel()
            .legend(legend.show_legend(True).calcs([]))
            .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.NONE))
            .fill_opacity(40 if self.stacked else 0)
            .stacking(common.StackingConfig().mode(stacking).group("A"))
        )


def one(title: str, expr: str, shows: str, remedy: str, *, unit: str = COUNT) -> Panel:
    """Return a panel with one number."""
    return Panel(title, [(expr, "")], shows, remedy, unit, "stat", width=4)
