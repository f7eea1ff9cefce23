"""On which machines and over which links runs were done, as texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedstrata.common.settings.links import LinkSettings
from fedstrata.deploy.results.run import Run
from fedstrata.deploy.results.series import kept_notes

NO_LINKS = "none, the runs had no network: seconds are computing time, bytes those of the models"


def conditions(runs: Sequence[Run]) -> list[str]:
    """Return a line on the machines and one on the links of finished runs, which their seconds
    depend on.
    """
    if not runs:
        return []
    torch = distinct(f"torch {(run.manifest.get('packages') or {}).get('torch')}" for run in runs)
    lines = [f"hardware: {'; '.join(distinct(map(host_of, runs)))}; {', '.join(torch)}"]
    lines += kept_notes(runs)
    if all(run.direct for run in runs):
        return [*lines, f"links: {NO_LINKS}"]
    if profiles := emulated(runs):
        lines.append(f"emulated: {', '.join(profiles)}")
    lines.append(f"links: {links_of(runs)}")
    if any(run.simulated for run in runs):
        lines.append("seconds: simulated, of machines and links as in the runs' manifest.json")
    return lines


def host_of(run: Run) -> str:
    """Return the host, its cores and its instructions."""
    manifest = run.manifest
    parts = [str(manifest.get("host", "a host")), f"{manifest.get('cpus')} cores"]
    if kind := manifest.get("instructions"):
        parts.append(str(kind))
    return ", ".join(parts)


def emulated(runs: Iterable[Run]) -> list[str]:
    """Return the profiles of the hardware that devices emulate."""
    found = []
    for run in runs:
        machines = (run.manifest.get("hardware") or {}).values()
        found += [str(machine["profile"]) for machine in machines if machine.get("profile")]
    return distinct(found)


def links_of(runs: Sequence[Run]) -> str:
    """Return the links of each tier, and what enforces them."""
    links = []
    enforced = []
    for run in runs:
        links += [f"{tier.name}: {_link(tier.link)}" for tier in run.experiment.tiers]
        enforced.append(str((run.manifest.get("links") or {}).get("enforce")))
    return f"{'; '.join(distinct(links))}; enforced by: {', '.join(distinct(enforced))}"


def _link(link: LinkSettings) -> str:
    parts = []
    for way, rate in (("up", link.up_mbit), ("down", link.down_mbit)):
        if rate:
            parts.append(f"{way} {rate:g} Mbit/s")
    if link.delay_ms:
        parts.append(f"{link.delay_ms:g} ms")
    return ", ".join(parts) or "unlimited"


def distinct(texts: Iterable[str]) -> list[str]:
    """Return each text once."""
    return list(dict.fromkeys(texts))
