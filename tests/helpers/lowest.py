"""Print the lowest version of each package that fedstrata itself needs, as constraints of pip."""

from __future__ import annotations

import tomllib
from pathlib import Path


def main() -> None:
    """Print a line `name==version` for each dependency."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    for line in project["dependencies"]:
        name, bounds = line.split(">=")
        print(f"{name}=={bounds.split(',')[0]}")


if __name__ == "__main__":
    main()
