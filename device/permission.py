"""Which models of one's own a host imports. Without torch, as an agent asks before any process of its loads it."""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import InvalidExperiment


def permit(name: str, allowed: Iterable[str]) -> None:
    """Check that a model of one's own is below a package, or in a module, or is the very one, that this host allows.

    Raises InvalidExperiment.
    """
    if ":" in name and not any(name == prefix or name.startswith((f"{prefix}.", f"{prefix}:")) for prefix in allowed):
        package = name.partition(":")[0].partition(".")[0]
        raise InvalidExperiment(
            "model.name",
            name,
            "this host imports no model that an experiment names, unless its user allows it",
            f"Start its devices with --allow-models {package}, or set FEDSTRATA_ALLOW_MODELS.",
        )
