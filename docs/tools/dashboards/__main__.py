"""Write all dashboards into the folder named on the command line."""

from __future__ import annotations

import sys
from pathlib import Path

from docs.tools.dashboards import DASHBOARDS, dashboard

if __name__ == "__main__":
    for name in DASHBOARDS:
        Path(sys.argv[1], f"{name}.json").write_text(dashboard(name), encoding="utf-8")
