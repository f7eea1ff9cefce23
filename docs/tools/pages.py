"""What MkDocs takes of the pages (`mkdocs.yml`): the order of docs/README.md as navigation, and
GitHub's anchors.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
INDEX: Final = "docs/README.md"
# a section, or a page
ROW: Final = re.compile(r"^\| (?:\*\*(.+?)\*\*|\[.+?\]\((\S+?\.md)\)) \|", re.MULTILINE)
SIBLING: Final = re.compile(r"\]\((\w[\w-]*\.md)[#)]")


def pages_of(folder: str) -> list[str]:
    """Return the pages of a folder: its README, then the others in the order of its links."""
    text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    return [f"{folder}/{name}" for name in ("README.md", *dict.fromkeys(SIBLING.findall(text)))]


def navigation() -> list[dict[str, Any]]:
    """Return the sections of the index, each with its pages."""
    pages: list[Any] = ["README.md", INDEX]
    sections = [{"start": pages}]
    for title, target in ROW.findall((ROOT / INDEX).read_text(encoding="utf-8")):
        path = (ROOT / "docs" / target).resolve().relative_to(ROOT)
        if title:
            pages = []
            sections.append({title: pages})
        elif path.name == "README.md":
            pages.append({path.parent.name: pages_of(path.parent.as_posix())})
        else:
            pages.append(path.as_posix())
    return sections


def anchor(title: str, separator: str) -> str:
    """Return GitHub's anchor of a heading."""
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", separator)


def on_config(config: MutableMapping[str, Any]) -> None:
    """Give MkDocs both."""
    config["nav"] = navigation()
    config["mdx_configs"]["toc"]["slugify"] = anchor
