"""docs/own.md, and the files that it shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

PAGE: Final = (Path(__file__).parents[2] / "docs" / "own.md").read_text(encoding="utf-8")
FILES: Final[dict[str, str]] = dict(
    re.findall(r"^```(?:python|toml)\n# (\w+\.(?:py|toml))\b.*?\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
)  # by name, without the line that names them
