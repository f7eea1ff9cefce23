"""The codecs of a tier, by name or by table, as an experiment has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedstrata.common.model.codec_settings import Codecs


def codecs_of(up: str | Mapping[str, Any] = "fp32", down: str = "fp32") -> Codecs:
    """Return codecs."""
    return Codecs.model_validate({"up": {"name": up} if isinstance(up, str) else up, "down": down})
