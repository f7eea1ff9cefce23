"""The links of an experiment: a table for a tier or a node, or the name of a profile.

`profiles.toml` beside this file has the profiles that ship; an experiment may add or replace some in `[profiles.NAME]`.
A link that names a profile has its numbers as soon as the experiment is read, so what travels to the nodes and what a
run leaves behind does not depend on the profiles of the release that reads it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from common.experiment.tables import Name, Positive, SettingsTable, named
from common.experiment.traces import LinkTrace, RateTrace, read_trace


@dataclass(frozen=True, slots=True)
class LinkDirection:
    """One direction of a link: rate in bytes per second, None = unlimited, and delay of each message in seconds.

    `trace`: of the run; the rate, and the delay before it, are those that chunks, windows and calibration go by.
    """

    rate: float | None = None
    delay_s: float = 0.0
    trace: RateTrace | None = None


@dataclass(frozen=True, slots=True)
class LinkSet:
    """The links of one end: directions to its peers and from them; `shaped`: this end enforces rates and delays."""

    to: Mapping[str, LinkDirection]
    from_: Mapping[str, LinkDirection]
    shaped: bool


class Profile(SettingsTable):
    """A link's numbers under a name. It adds to the profiles that ship, or replaces one of them."""

    up_mbit: Positive | None = None  # Mbit/s towards the cloud; omitted rates are unlimited
    down_mbit: Positive | None = None  # Mbit/s towards the devices
    delay_ms: Annotated[float, Field(ge=0)] = 0.0  # milliseconds, one way

    @property
    def up(self) -> LinkDirection:
        """The direction towards the cloud."""
        return LinkDirection(_bytes_s(self.up_mbit), self.delay_ms / 1e3)

    @property
    def down(self) -> LinkDirection:
        """The direction towards the devices."""
        return LinkDirection(_bytes_s(self.down_mbit), self.delay_ms / 1e3)


class LinkSettings(Profile):
    """The link between a node and its parent. The name of a profile stands for a table that has only `profile`."""

    profile: Name | None = None  # it gives the keys that the table leaves out
    # Rates and delays over time, or the name of its CSV file. The rates above decide the sizes of chunks, and are
    # measured before the run; omitted ones are the trace's mean.
    trace: LinkTrace | None = None

    @property
    def up(self) -> LinkDirection:
        """The direction towards the cloud."""
        return self._traced(super().up, self.trace.up_mbit if self.trace else [])

    @property
    def down(self) -> LinkDirection:
        """The direction towards the devices."""
        return self._traced(super().down, self.trace.down_mbit if self.trace else [])

    def recorded(self) -> dict[str, Any]:
        """Return what a run's manifest has of this link for each node: of a trace its file, length and digest."""
        found = self.model_dump(exclude={"trace"})
        return found if self.trace is None else found | {"trace": self.trace.recorded()}

    def _traced(self, way: LinkDirection, mbit: list[float]) -> LinkDirection:
        if self.trace is None:
            return way
        trace = self.trace.direction(mbit)
        return LinkDirection(way.rate or trace.mean() or max(trace.rates), way.delay_s or trace.delays[0], trace)


class Links(SettingsTable):
    """The links of the two tiers: `wan` between cloud and institution, `lan` between institution and device.

    `links.of.NODE` is the link of a single node to its parent. A link is a table, or the name of a profile.
    """

    # What shapes the links: token buckets in the sending agents, the kernel, or nothing. The declared rates decide the
    # sizes of chunks and windows in any case.
    enforce: Literal["bucket", "kernel", "none"] = "bucket"
    # Whether a link off its declared rate ends the run; `off` measures none.
    check: Literal["error", "warn", "off"] = "error"
    # Share by which a measured rate may differ from the declared one.
    tolerance: Annotated[float, Field(gt=0, le=1)] = 0.1
    wan: LinkSettings = LinkSettings()
    lan: LinkSettings = LinkSettings()
    of: dict[Name, LinkSettings] = Field(default_factory=dict)


@cache
def shipped() -> Mapping[str, Mapping[str, Any]]:
    """Return the built-in profiles by name."""
    return tomllib.loads(Path(__file__).with_name("profiles.toml").read_text(encoding="utf-8"))


def resolve(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return an experiment's tree whose links have the numbers of the profiles that they name.

    A link's own keys go before those of its profile. Values of a wrong type are left for the tables' own check.
    Raises InvalidExperiment where no profile has the name.
    """
    own = tree.get("profiles")
    profiles = {**shipped(), **(own if isinstance(own, Mapping) else {})}
    return _with_links(tree, lambda key, link: named(key, link, profiles))


def with_traces(tree: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return an experiment's tree with the numbers of the trace files that its links name. Raises InvalidExperiment."""

    def with_trace(key: str, link: Any) -> Any:
        trace = link.get("trace") if isinstance(link, Mapping) else None
        return link if trace is None else {**link, "trace": read_trace(f"{key}.trace", trace, folder)}

    return _with_links(tree, with_trace)


def _with_links(tree: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return an experiment's tree with each of its links changed, from its key and its table."""
    changed = dict(tree)
    links, tiers = tree.get("links"), tree.get("tiers")
    if isinstance(tiers, list):
        changed["tiers"] = [
            {**tier, "link": change(f"tiers.{place}.link", tier["link"])}
            if isinstance(tier, Mapping) and "link" in tier
            else tier
            for place, tier in enumerate(tiers)
        ]
    if isinstance(links, Mapping):
        changed["links"] = {
            **links,
            **{key: change(f"links.{key}", links[key]) for key in ("wan", "lan") if key in links},
        }
        if isinstance(of := links.get("of"), Mapping):
            changed["links"]["of"] = {child: change(f"links.of.{child}", link) for child, link in of.items()}
    return changed


def _bytes_s(mbit: float | None) -> float | None:
    return None if mbit is None else mbit * 1e6 / 8
