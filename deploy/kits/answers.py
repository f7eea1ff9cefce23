"""What is wrong with the nodes of a lab, from their answers to the roll and from the lab's file."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Final

from fedstrata.common.host.board import BOARD_ITEMS
from fedstrata.common.host.examination import TORCH
from fedstrata.common.runtime.roll import Answer
from fedstrata.deploy.kits.lab_file import Lab
from fedstrata.deploy.kits.units import digest

CLOCKS_APART_S: Final = 5.0


def faults(found: Sequence[Answer], lab: Lab | None) -> dict[str, list[str]]:
    """Return the faults of each node, those of the lab's file that are away included; none: an
    empty list.
    """
    names = Counter(each.node for each in found)
    known: defaultdict[str, list[str]] = defaultdict(list)
    old = {} if lab is None else stale(found, lab)
    for each in found:
        here = each.here
        wrong = known[each.node]
        if names[each.node] > 1:
            wrong.append(f"{names[each.node]} nodes have this name, one on {here.host}")
        if lab is not None and each.node not in lab.parents:
            wrong.append("the lab's file has no such node")
        elif lab is not None and here.parent != lab.parents[each.node]:
            wrong.append(f"its parent is {here.parent}, in the lab's file {lab.parents[each.node]}")
        if each.node in old:
            wrong.append(old[each.node])
        if each.other_release:
            wrong.append(each.other_release)
            continue  # nothing else is known of it
        if here.release != version("fedstrata"):
            wrong.append(
                f"release {here.release}, here {version('fedstrata')}: install the same wheel"
            )
        if abs(each.ahead_s) > CLOCKS_APART_S:
            way = "ahead of" if each.ahead_s > 0 else "behind"
            wrong.append(f"its clock is {abs(each.ahead_s):.0f} s {way} this one's")
        wrong += [
            f"{one.item}: {one.note}"
            for one in here.findings
            if not one.there and (one.needed or one.item in BOARD_ITEMS)
        ]
    torch = {
        each.node: one.note
        for each in found
        for one in each.here.findings
        if one.item == TORCH and one.there
    }
    for usual, _ in Counter(torch.values()).most_common(1):
        for node, own in torch.items():
            if own != usual:
                known[node].append(f"PyTorch {own}, most nodes have {usual}: last bits may differ")
    for node in () if lab is None else lab.parents.keys() - names.keys():
        known[node].append("does not answer")
    return dict(sorted(known.items()))


def stale(found: Sequence[Answer], lab: Lab) -> Mapping[str, str]:
    """Return the nodes whose kit was written from another file of the lab, each with what to do."""
    of_machine = cache(lambda machine: digest(lab, machine))
    old = {}
    for each in found:
        machine = lab.machine_of.get(each.node)
        if each.here.kit and machine and each.here.kit != of_machine(machine):
            remedy = "provision it and install it again"
            old[each.node] = f"the kit of machine {machine} is not that of this lab file: {remedy}"
    return old
