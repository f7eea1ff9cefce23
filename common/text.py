"""Text that others wrote, made safe for terminals, logs and files."""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from typing import Final

_SHORT: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def escaped(text: str) -> str:
    r"""Return text in one printable line: control characters, line breaks and direction marks as in JSON, `\u001b`.

    A terminal would obey them, a log would have lines that nobody wrote.
    """
    return text if text.isprintable() else "".join(map(_escaped, text))


@lru_cache(maxsize=1 << 16)  # a hostile text of megabytes must not hold up the event loop
def _escaped(letter: str) -> str:
    if letter.isprintable() or unicodedata.category(letter) == "Zs":  # a space of another width
        return letter
    units = letter.encode("utf-16-be", "surrogatepass").hex()
    return _SHORT.get(letter) or "".join(f"\\u{units[place : place + 4]}" for place in range(0, len(units), 4))
