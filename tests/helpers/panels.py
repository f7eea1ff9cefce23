"""What the panels of the dashboards show at the end of a run, by the columns of its tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from docs.tools.dashboards import DASHBOARDS
from tests.helpers.commands import table
from tests.helpers.monitoring import Prometheus, replaced

DIGITS: Final = 1e-5  # of a number in a table, relative
# Of bytes, relative: roles end one after another, so no sum over all has the last bytes of each.
# `assert_same_bytes` compares those of each link.
LATER: Final = 0.1
MBIT_BYTES: Final = 125_000
HOME: Final = "institution-0"
DEVICE: Final = "device-0"
AT_END: Final = "last_over_time(({})[10m:1s])"
LARGEST: Final = "max_over_time(({})[10m:1s])"  # of a sum over roles, some of which have left

Key = tuple[str, ...]


class Tables:
    """The rows of a run's tables."""

    def __init__(self, folder: Path) -> None:
        self.rounds = table(folder / "rounds.csv")
        self.links = [row for row in table(folder / "links.csv") if row["kind"] == "all"]
        device = f"cloud/{HOME}/{DEVICE}"
        self.device = [row for row in table(folder / "devices.csv") if row["node"] == device]

    def last(self, column: str) -> float:
        return float(self.rounds[-1][column])

    def sum(self, column: str) -> float:
        return sum(float(row[column]) for row in self.rounds)

    def of_device(self, column: str) -> float:
        return sum(float(row[column]) for row in self.device)

    def bytes_by_tier(self) -> dict[Key, float]:
        found: Counter[Key] = Counter()
        for row in self.links:
            found[row["tier"],] += int(row["message_bytes"])
        return dict(found)

    def measured(self) -> dict[Key, float]:
        """Return each link's measured rate, by its parent's direction, its child, and its tier."""
        found = {}
        for row in self.links:
            child, direction = row["to"], "sent"
            if row["to"] == "cloud" or (
                row["to"].startswith("institution") and row["from"].startswith("device")
            ):
                child, direction = row["from"], "received"
            found[row["tier"], child, direction] = float(row["measured_mbit"]) * MBIT_BYTES
        return found


def by_columns(tables: Tables) -> dict[tuple[str, str], list[tuple[Key, dict[Key, float]]]]:
    """Return what each query of a panel shows: the labels that tell its series apart, and their
    values.
    """
    accuracy = {(): tables.last("accuracy")}
    seconds = {(phase,): tables.sum(f"{phase}_s") for phase in PHASES}
    elapsed, rounds = {(): tables.last("elapsed_s")}, {(): tables.last("global_round")}
    traffic = tables.bytes_by_tier()
    epochs = {
        (column.removeprefix("epochs_"),): float(value)
        for column, value in tables.rounds[-1].items()
        if column.startswith("epochs_")
    }
    best = {(): max(float(row["accuracy"]) for row in tables.rounds)}
    local_rounds = {(): tables.of_device("local_rounds")}
    last_of_device = tables.device[-1]
    return {
        ("lab", "Global round"): [((), rounds)],
        ("lab", "Test accuracy"): [((), accuracy)],
        ("lab", "Training time"): [((), elapsed)],
        ("lab", "Bytes by tier, both directions"): [(("tier",), traffic)],
        ("lab", "Test score"): [((), accuracy)],
        ("lab", "Loss"): [((), {(): tables.last("loss")}), ((), {(): tables.last("train_loss")})],
        ("lab", "Seconds by phase, so far"): [(("phase",), seconds)],
        ("lab", "Epochs of the cloud's children"): [(("node",), epochs)],
        ("links", "Measured rate, relative to the declared rate"): [
            (("tier", "peer", "direction"), tables.measured())
        ],
        ("institution", "Rounds"): [((), local_rounds)],
        ("institution", "Epochs"): [((), {(): epochs[HOME,]})],
        ("device", "Rounds"): [((), local_rounds)],
        ("device", "SGD steps"): [((), {(): tables.of_device("sgd_steps")})],
        ("device", "Training loss"): [((), {(): float(last_of_device["loss"])})],
        ("device", "Epochs"): [
            ((), {(): float(last_of_device["epochs"]) / float(last_of_device["local_rounds"])})
        ],
        ("compare", "Global rounds"): [((), rounds)],
        ("compare", "Test accuracy"): [((), accuracy)],
        ("compare", "Best accuracy"): [((), best)],
        ("compare", "Training time"): [((), elapsed)],
        ("compare", "Seconds by phase"): [(("phase",), seconds)],
        ("compare", "Bytes by tier, both directions"): [(("tier",), traffic)],
        ("compare", "SGD steps"): [((), {(): tables.sum("sgd_steps")})],
    }


PHASES: Final = ("record", "dispatch", "train", "wait", "collect", "aggregate", "evaluate")


def assert_panels(prometheus: Prometheus, folder: Path, *, run: str) -> int:
    """Compare panels with the columns of a run's tables; return how many were compared."""
    compared = 0
    expected = by_columns(Tables(folder))
    for name, (_, _, panels) in DASHBOARDS.items():
        for panel in panels:
            queries = expected.get((name, panel.title), [])
            for (expr, _), (labels, values) in zip(panel.queries, queries, strict=False):
                assert shown(prometheus, name, expr, run=run, labels=labels) == near(
                    values, panel.title
                ), panel.title
            compared += bool(queries)
    return compared


def near(values: Mapping[Key, float], title: str) -> object:
    most = DIGITS
    if title.startswith("Bytes"):
        most = LATER
    elif title.startswith("Measured"):
        most = 1e-3  # four digits
    return pytest.approx(dict(values), rel=most)


def shown(
    prometheus: Prometheus, name: str, expr: str, *, run: str, labels: Key
) -> dict[Key, float]:
    """Return the last values of a panel's query by these labels; of rates that are measured, in
    bytes a second.
    """
    parent, node = "cloud", HOME
    if name == "device":
        parent, node = HOME, DEVICE
    filled = replaced(expr, run=run, tier="wan", parent=parent, node=node)
    over = LARGEST if "sum" in expr else AT_END
    rows = prometheus.query(over.format(filled))
    if "link_measured" in expr:
        declared = prometheus.query(
            AT_END.format(f'fedstrata_link_declared_bytes_per_second{{run="{run}"}}')
        )
        rates = {tuple(row[label] for label in labels): value for row, value in declared}
        rows = [(row, value) for row, value in rows if row["source"] == "calibration"]
        return {
            key: value * rates[key]
            for row, value in rows
            for key in [tuple(row[label] for label in labels)]
        }
    found = {tuple(row[label] for label in labels): value for row, value in rows}
    assert len(found) == len(rows), "one series for each"
    return found
