"""Adversaries in a report: who they were, the success of their attacks, and whose results the rules
used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from fedstrata.cloud.records import AGAINST, HONEST
from fedstrata.common.experiment.attackers import SUCCESS
from fedstrata.common.text import named
from fedstrata.deploy.console.tabular import Cell, Column, Table
from fedstrata.deploy.results import charts
from fedstrata.deploy.results.charts import Axis, Curve
from fedstrata.deploy.results.device_scores import GLOBAL_ROUND
from fedstrata.deploy.results.figures import Figure
from fedstrata.deploy.results.run import Run

TEXT: Final = (
    "Attack success: the share of an attack's own test samples that the global model takes as it "
    "wants. Used: local"
    " rounds in which the parent's rule used a device's result; refused: those in which it left "
    "it out, or gave it no"
    " weight."
)
SHARE: Final = Axis("share of samples, or of devices' scores", "%", 100.0, (0.0, 1.0))


def facts(run: Run) -> Iterator[str]:
    """Yield who attacks, and how: nodes, or somebody on the links of nodes."""
    at = run.experiment.attackers.at
    for table in run.experiment.adversaries:
        names = [name for name, each in at.items() if each.settings is table]
        chance = "" if table.probability == 1 else f", with probability {table.probability:g}"
        knows = "" if table.knows == "itself" else f", knowing its {table.knows}"
        where = "on the links of " if table.links else ""
        yield (
            f"{table.attack.name} from global round {table.from_round}{chance}{knows}: "
            f"{where}{named(names)}"
        )


def figures(run: Run) -> list[Figure]:
    """Return the course of the attacks' success, and of the scores of honest devices; none if
    nothing is known.
    """
    known = dict.fromkeys(
        column for row in run.rounds for column in row.other_scores if column.startswith(SUCCESS)
    )
    columns = {column: column.replace("_", " ") for column in known}
    if run.experiment.score.share:
        columns |= {
            f"{HONEST}_mean": "mean over honest devices",
            f"{HONEST}_worst": "worst tenth of honest devices",
        }
    lines = {}
    for column, title in columns.items():
        points = [(float(row.global_round), row.further(column)) for row in run.rounds]
        if finite := [(x, y) for x, y in points if y is not None]:
            lines[title] = Curve(finite)
    name = run.file_name("attacks")
    if lines:
        return [charts.curves(name, "Attacks over global rounds", lines, x=GLOBAL_ROUND, y=SHARE)]
    return []


def table(run: Run) -> Table:
    """Return a table of the devices: the attack of each, or on its link, and how often the rule of
    its parent used its result.
    """
    counts: dict[str, Counter[str]] = {}
    for row in run.devices:
        counts.setdefault(row.node, Counter()).update(
            {key: int(row.more.get(key) or 0) for key in AGAINST[1:]}
        )
    at = run.experiment.attackers.at
    rows: list[list[Cell]] = []
    for node, found in counts.items():
        own = at.get(node.rpartition("/")[2])
        attack = own.settings.attack.name if own else "-"
        rows.append([node, attack, *(float(found[key]) for key in AGAINST[1:])])
    columns = [Column("device", text=True), Column("attack", text=True), *map(Column, AGAINST[1:])]
    return Table(run.file_name("attacks"), "Results that rules used", columns, rows)
