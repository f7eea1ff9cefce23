"""`make bench NAME=payloads`: bytes of each method on the links of its devices, in labs of
processes.

Each lab has one institution and four devices, which do three local rounds in each of two global
rounds. Bytes are of one local round and child. The model has D parameters and no buffers, so a
model is 4 D bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from safetensors.numpy import load_file

from fedstrata.common.methods.settings import RULES
from fedstrata.common.settings.training import OBJECTIVES
from tests.bench.running import Table, folder, run
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
KINDS: Final = ("model", "extras", "control", "wire")
REFINED: Final = ("feddf", "fedbe", "fedlaw", "fedgen")


def methods() -> dict[str, tuple[str, ...]]:
    """Return what each method sets: the rules, then the objectives that work with any rule."""
    found = {}
    for name, rule in RULES.items():
        settings: Mapping[str, Any] = {"name": name} if name in REFINED else LEAST[name]
        objective = (f"training.objective.name={rule.objective!r}",) if rule.objective else ()
        found[name] = (f"institution.aggregation={toml(settings)}", *objective)
    for name, one in OBJECTIVES.items():
        if one.rule is None:
            found[name] = (f"training.objective.name={name!r}",)
    return found


def toml(settings: Mapping[str, Any]) -> str:
    """Return a table in one line."""
    return "{" + ", ".join(f"{key}={value!r}" for key, value in settings.items()) + "}"


def measure(method: tuple[str, ...]) -> tuple[int, dict[str, float]]:
    """Return a model's bytes, and the bytes of a local round and child by direction and kind."""
    with folder() as runs:
        return figures_of(run_lab(DEMO, runs, *LAB, *method))


def figures_of(run: Path) -> tuple[int, dict[str, float]]:
    """Return the same figures of a run's folder."""
    tasks = sum(int(row["local_rounds"]) for row in table(run / "devices.csv"))
    total: Counter[str] = Counter()
    for row in table(run / "links.csv"):
        if "device" in row["from"] + row["to"]:
            way = "up" if "device" in row["from"] else "down"
            total[f"{way} {row['kind']}"] += int(row["payload_bytes"])
            total[f"{way} wire"] += int(row["wire_bytes"] or 0)
    model = sum(tensor.nbytes for tensor in load_file(run / "model.safetensors").values())
    return model, {key: value / tasks for key, value in total.items()}


def main() -> None:
    """Run a lab for each method and print a row for it."""
    columns = [f"{kind} {way}" for kind in KINDS for way in ("down", "up")]
    found = Table("method", *columns)
    for name, method in methods().items():
        model, each = measure(method)
        ways = (" ".join(reversed(column.split())) for column in columns)
        found.add(name, *(f"{each.get(way, 0):,.0f}" for way in ways))
    print(f"4 D = {model:,}")


if __name__ == "__main__":
    run(main)
