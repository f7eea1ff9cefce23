"""The numbers of a link that a command names: a built-in profile, single numbers, or both."""

from __future__ import annotations

from pydantic import ValidationError

from common.experiment.links import LinkSettings, shipped
from common.experiment.messages import explain
from common.experiment.tables import named


def link_of(
    profile: str | None, *, up_mbit: float | None, down_mbit: float | None, delay_ms: float | None
) -> LinkSettings:
    """Return a profile's link with the given numbers in place of its own. Raises InvalidExperiment."""
    given = {"profile": profile, "up_mbit": up_mbit, "down_mbit": down_mbit, "delay_ms": delay_ms}
    try:
        return LinkSettings.model_validate(
            named("PROFILE", {key: value for key, value in given.items() if value is not None}, shipped())
        )
    except ValidationError as error:
        raise explain(error, LinkSettings) from None
