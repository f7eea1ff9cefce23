"""`make bench NAME=payloads`: bytes of each method on the links of its devices, in labs of
processes.

Each lab has one institution and four devices, which do three local rounds in each of two global
rounds. Bytes are of one local round and child. The model has D parameters and no buffers, so a
model is 4 D bytes.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

from fedstrata.common.methods.settings import RULES
from fedstrata.common.settings.training import OBJECTIVES
from tests.helpers.commands import DEMO, run_lab, table
from tests.helpers.rules import LEAST

LAB: Final = (
    "topology.institutions=1",
    "topology.devices=4",
    "rounds=2",
    "institution.rounds=3",
    "model.name='mlp_digits'",
    # no probes among the bytes
    "data.node_samples=29",
    "training.batch_size=100",
    "links.check='off'",
)
# as they are by default: the least of the others sends as much
REFINED: Final = ("feddf", "fedbe", "fedlaw", "fedgen")


def methods() -> dict[str, tuple[str, ...]]:
    """Return what each method sets: the rules, then the objectives that work with any rule."""
    found = {}
    for name, rule in RULES.items():
        settings: Mapping[str, Any] = {"name": name} if name in REFINED else LEAST[name]
        found[name] = (
            f"institution.aggregation={toml(settings)}",
            f"training.objective.name={rule.objective!r}",
        )
        if rule.objective is None:
            found[name] = found[name][:1]
    found |= {
        name: (f"training.objective.name={name!r}",)
        for name, one in OBJECTIVES.items()
        if one.rule is None
    }
    return found


def toml(settings: Mapping[str, Any]) -> str:
    """Return a table in one line."""
    return "{" + ", ".join(f"{key}={value!r}" for key, value in settings.items()) + "}"


def measure(method: tuple[str, ...], runs: Path) -> tuple[int, dict[str, float]]:
    """Return a model's bytes, and the bytes of a local round and child by direction and kind."""
    folder = run_lab(DEMO, runs, *LAB, *method)
    tasks = sum(int(row["local_rounds"]) for row in table(folder / "devices.csv"))
    total: Counter[str] = Counter()
    for row in table(folder / "links.csv"):
        if "device" in row["from"] + row["to"]:
            way = "up" if "device" in row["from"] else "down"
            total[f"{way} {row['kind']}"] += int(row["payload_bytes"])
            total[f"{way} wire"] += int(row["wire_bytes"] or 0)
    model = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    return model, {key: value / tasks for key, value in total.items()}


def main() -> None:
    """Run a lab for each method and print a table."""
    columns = (
        "model down",
        "model up",
        "extras down",
        "extras up",
        "control down",
        "control up",
        "wire down",
        "wire up",
    )
    found = Table("method", *columns)
    for column in found.columns[1:]:
        column.justify = "right"
    model = 0
    for name, method in methods().items():
        with tempfile.TemporaryDirectory() as runs:
            model, each = measure(method, Path(runs))
        ways = (" ".join(reversed(column.split())) for column in columns)
        found.add_row(name, *(f"{each.get(way, 0):,.0f}" for way in ways))
    console = Console(width=120)
    console.print(
        f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}; 4 D "
        f"= {model:,}"
    )
    console.print(found)


if __name__ == "__main__":
    main()
