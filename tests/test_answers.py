"""What is wrong with the nodes of a lab, by their answers to the roll."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from typing import Any, Final

import pytest

from common.host.examination import Finding
from common.protocol.messages import Here
from common.runtime.roll import Answer
from deploy.kits.answers import faults
from deploy.kits.lab import parse
from deploy.kits.units import digest

LAB: Final = parse(
    {
        "name": "north",
        "broker": "main",
        "machines": {"server": {"address": "10.0.0.1"}, "pi": {"address": "10.0.0.2"}},
        "brokers": {"main": {"machine": "server"}},
        "institutions": {"institution-0": {"machine": "server"}},
        "devices": [{"names": ["device-0..2"], "machine": "pi", "parent": "institution-0"}],
    }
)
TORCH: Final = Finding("PyTorch", True, True, "2.9.0")


def sound(node: str) -> Answer:
    role, machine, parent = (
        ("institution", "server", "cloud") if node == "institution-0" else ("device", "pi", "institution-0")
    )
    has = (TORCH, Finding("data sets", False, False, "data: there is no such folder"))
    here = Here("n", role, parent, "", version("fedstrata"), machine, "1 x cpu", "", digest(LAB, machine), 0.0, has)
    return Answer(node, here, 0.1)


EVERY: Final = [sound(node) for node in LAB.parents]


def with_fault(node: str, *, ahead_s: float = 0.0, **fields: Any) -> list[Answer]:
    return [
        replace(each, here=replace(each.here, **fields), ahead_s=ahead_s) if each.node == node else each
        for each in EVERY
    ]


def test_a_sound_lab_has_no_fault() -> None:
    assert faults(EVERY, LAB) == {node: [] for node in sorted(LAB.parents)}
    assert faults(EVERY, None) == {node: [] for node in sorted(LAB.parents)}
    assert faults([], None) == {}


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (EVERY[:2] + EVERY[3:], "does not answer"),
        ([*EVERY, EVERY[2]], "2 nodes have this name, one on pi"),
        (with_fault("device-1", parent="cloud"), "its parent is cloud, in the lab's file institution-0"),
        (with_fault("device-1", kit="0123456789ab"), "the kit of machine pi is not that of this lab file"),
        (with_fault("device-1", release="0.0.1"), "release 0.0.1, here "),
        (with_fault("device-1", ahead_s=312.0), "its clock is 312 s ahead of this one's"),
        (with_fault("device-1", ahead_s=-40.0), "its clock is 40 s behind this one's"),
        (with_fault("device-1", findings=(Finding("memory", True, False, "0.1 of 1 GB"),)), "memory: 0.1 of 1 GB"),
        (with_fault("device-1", findings=(replace(TORCH, note="2.7.1"),)), "PyTorch 2.7.1, most nodes have 2.9.0"),
    ],
)
def test_each_fault_is_named_at_its_node(found: list[Answer], line: str) -> None:
    named = faults(found, LAB)
    assert [node for node, problems in named.items() if problems] == ["device-1"]
    assert any(each.startswith(line) for each in named["device-1"])


def test_a_node_of_another_lab_file_is_named_and_one_without_a_kit_is_not() -> None:
    stranger = replace(EVERY[1], node="device-9")
    assert faults([*EVERY, stranger], LAB)["device-9"] == ["the lab's file has no such node"]
    assert faults(with_fault("device-1", kit=""), LAB)["device-1"] == [], "started by hand"
