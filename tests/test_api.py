"""The public names: few, typed, documented, and the only ones that pages and messages use."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import fedstrata

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
FILES: Final = dict(
    re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
)
# a rule may do all that fedstrata's own do: twenty names are bases and records of rules
MOST: Final = 53


def test_the_names_are_those_of_the_stub_in_the_same_modules() -> None:
    stub = ast.parse((ROOT / "fedstrata" / "__init__.pyi").read_text(encoding="utf-8"))
    typed = {}
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.asname == alias.name
                typed[alias.name] = (node.module or "").removeprefix("fedstrata.")
    assert typed == fedstrata._MODULES and len(typed) <= MOST


@pytest.mark.parametrize("name", fedstrata.__all__)
def test_each_name_has_a_docstring_and_stands_on_the_page(name: str) -> None:
    found = getattr(fedstrata, name)
    assert found.__name__ == name and inspect.getdoc(found), name
    assert f"`{name}" in PAGE


def test_another_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(AttributeError, match=r"fedstrata has no public name 'rnu': it has .*run"):
        _ = fedstrata.rnu
    assert dir(fedstrata) == sorted(fedstrata.__all__)


def test_the_package_alone_imports_nothing() -> None:
    code = (
        "import fedstrata, sys; print([name for name in sys.modules if "
        "name.startswith('fedstrata.')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_pages_use_the_public_names_alone() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    inner = re.compile(r"^[ >\"]*(?:from|import) fedstrata\.\S+", re.MULTILINE)
    found = {page.name: inner.findall(page.read_text(encoding="utf-8")) for page in pages}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize("name", sorted(FILES))
def test_the_pages_scripts_run(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name], encoding="utf-8")
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    environment = os.environ | {"PYTHONPATH": path}
    words = [sys.executable, name]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^0\.\d+", done.stdout), done.stdout
