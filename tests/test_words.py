"""The words of the field: the private dialect that fedstrata once had does not come back."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
REFUSED: Final = (
    *("wish", "wishes", "foretell", "foretells", "foretold", "herald", "courier", "mend", "mended", "mends"),
    *("tells", "told", "hears", "heard", "says", "desk", "shelf", "examiner", "descent", "receipt", "stand-in"),
    *("iteration", "iterations"),
)
WORD: Final = re.compile(rf"(?<![A-Za-z])({'|'.join(REFUSED)})(?![A-Za-z])", re.IGNORECASE)
THIS: Final = "tests/test_words.py"


def test_no_refused_word_stands_in_code_messages_or_docs() -> None:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    kinds = (".py", ".md", ".toml", ".json", ".yml", ".css", ".sh", ".svg")
    found = [
        f"{name}:{number}: {match[0]}"
        for name in names
        if name.endswith(kinds) and name != THIS and (ROOT / name).exists()
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1)
        for match in WORD.finditer(line)
    ]
    assert found == []
