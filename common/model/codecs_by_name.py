"""The codecs of changes by name, each with its settings' class, which is imported when it is
needed, as a user's own.

A file of this folder and a line here make a codec one of fedstrata's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CODECS: Final[Mapping[str, str]] = {
    "topk": "fedstrata.common.model.topk:TopKSettings",
    "sign": "fedstrata.common.model.signs:SignSettings",
    "qsgd": "fedstrata.common.model.qsgd:QsgdSettings",
}
OWN_CODEC: Final = "fedstrata.common.model.delta_codecs:OwnCodec"
