"""Labs that once failed, kept as the labs that they were: one TOML file each in `labs/`, with what
failed in it.

A file has the drawn lab and its faults, without the keys of the experiment that have their
defaults. So a kept lab stays what it is when the draw changes: `python -m tests.simulation --seed K
--keep NAME` writes one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import Any, Final, TypeVar

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.settings.tables import write
from fedstrata.deploy.simulation.hardware import Durations
from fedstrata.deploy.simulation.link import LinkConditions
from tests.simulation.drawn import DrawnLab
from tests.simulation.faults import Fault, FaultKind

LABS: Final = Path(__file__).with_name("labs")
PLAIN: Final = (
    "seed",
    "model_bytes",
    "frozen_bytes",
    "broker_each",
    "spool",
    "executor_delay_s",
    "expected_s",
    "runs",
    "byte_s",
)

_R = TypeVar("_R", Fault, LinkConditions, Durations)


def kept_labs() -> list[Path]:
    """Return the files of all kept labs."""
    return sorted(LABS.glob("*.toml"))


def read_lab(path: Path) -> DrawnLab:
    """Return the lab of a file."""
    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    return DrawnLab(
        name=path.stem,
        experiment=parse(tree["experiment"]),
        durations=Durations(**tree.get("durations", {})),
        conditions=LinkConditions(**tree.get("conditions", {})),
        unequal={node: LinkConditions(**found) for node, found in tree.get("unequal", {}).items()},
        faults=tuple(_fault(found) for found in tree.get("faults", ())),
        **{name: tree[name] for name in PLAIN if name in tree},
    )


def write_lab(drawn: DrawnLab, *, why: str) -> str:
    """Return the file of a lab; `why`: what failed in it."""
    return write(
        {
            "why": why,
            **{name: getattr(drawn, name) for name in PLAIN},
            "durations": _changed(drawn.durations, Durations()),
            "conditions": _changed(drawn.conditions, LinkConditions()),
            "unequal": {
                node: _changed(found, LinkConditions()) for node, found in drawn.unequal.items()
            },
            "faults": [_fault_table(fault) for fault in drawn.faults],
            "experiment": _least(drawn.experiment),
        }
    )


def _fault(table: Mapping[str, Any]) -> Fault:
    """Return a fault; one without an end is permanent."""
    return Fault(**{"for_s": inf, **table, "kind": FaultKind(table["kind"])})


def _fault_table(fault: Fault) -> dict[str, Any]:
    table = {"kind": fault.kind.value, "at_s": fault.at_s, "for_s": fault.for_s}
    table |= _changed(fault, Fault(fault.kind, fault.at_s, fault.for_s))
    return {key: value for key, value in table.items() if value != inf}


def _changed(record: _R, usual: _R) -> dict[str, Any]:
    """Return the fields in which a record differs from the usual one."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: value for name, value in values.items() if value != getattr(usual, name)}


def _least(experiment: Experiment) -> dict[str, Any]:
    """Return the tree of an experiment without the keys that may be left out."""
    tree = experiment.model_dump(mode="json", exclude_none=True)
    _leave_out(tree, tree, experiment)
    return tree


def _leave_out(table: dict[str, Any], tree: Mapping[str, Any], experiment: Experiment) -> None:
    for key, value in list(table.items()):
        del table[key]
        if _is_same(tree, experiment):
            continue
        table[key] = value
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                _leave_out(inner, tree, experiment)


def _is_same(tree: Mapping[str, Any], experiment: Experiment) -> bool:
    try:
        return parse(tree) == experiment
    except InvalidExperiment:
        return False
