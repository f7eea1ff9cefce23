"""The pages on your own code, and the files that they show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parents[2] / "docs"
PAGES: Final = "\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("own-*.md")))
FILES: Final[dict[str, str]] = dict(
    re.findall(
        r"^```(?:python|toml)\n# (\w+\.(?:py|toml))\b.*?\n(.*?)^```",
        PAGES,
        re.MULTILINE | re.DOTALL,
    )
)  # by name, without the line that names them
