"""Bytes of a global round on each tier, and the memory of each role and of the broker.

The roles' own memory was measured once: with the demo, on Linux x86-64, with PyTorch's CUDA build. The rest follows
from the models' sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from common.experiment.schema import Experiment, TransferSettings
from common.experiment.tiers import participants
from common.experiment.topology import CLOUD
from deploy.planning.packets import down_bytes, up_bytes
from deploy.planning.prediction import Branch, PlannedDevice, PlannedLab, Sizes
from device.training.objectives.table import objective_of

AGENT_BYTES: Final = 60_000_000
TORCH_BYTES: Final = 560_000_000
BROKER_BYTES: Final = 9_000_000


def tiers_of(lab: PlannedLab) -> dict[str, int]:
    """Return the bytes of a global round by tier and direction, as whole MQTT packets."""
    found = {f"{tier.tier}_{way}": 0 for tier in lab.sizes.tiers for way in ("up", "down")}
    _add_tiers(lab, lab.children, 0, 1, found)
    return found


def _add_tiers(
    lab: PlannedLab, kinds: Sequence[Branch | PlannedDevice], depth: int, rounds: int, found: dict[str, int]
) -> None:
    """Add the bytes of some children of one layer, which take part in `rounds` rounds of a global round."""
    tier = lab.sizes.tiers[depth]
    for kind in kinds:
        reported = kind.devices() if isinstance(kind, Branch) else 0
        found[f"{tier.tier}_up"] += rounds * kind.count * up_bytes(tier.up, lab.transfer, devices=reported)
        found[f"{tier.tier}_down"] += rounds * kind.count * down_bytes(tier.down, lab.transfer)
        if isinstance(kind, Branch):
            _add_tiers(lab, kind.children, depth + 1, rounds * kind.count * kind.rounds, found)


def links_of(experiment: Experiment, sizes: Sizes) -> dict[str, float]:
    """Return the mean bytes of a global round on each link, by `FROM TO`, given the share of selected children."""
    transfer, tree = experiment.transfer, experiment.tree
    found: dict[str, float] = {}
    shares = {CLOUD: 1.0}  # mean rounds of a node's parent in which it takes part, in a global round
    for parent, children in tree.children.items():
        tier, nbytes = experiment.tier_below(parent), sizes.tiers[tree.depth(parent)]
        share = shares[parent] * tier.rounds * participants(len(children), tier.participation) / len(children)
        for child in children:
            shares[child] = share
            below = tree.children.get(child, ())
            selected = participants(len(below), experiment.tier_below(child).participation) if below else 0
            found[f"{parent} {child}"] = share * down_bytes(nbytes.down, transfer)
            found[f"{child} {parent}"] = share * up_bytes(nbytes.up, transfer, devices=selected)
    return found


def memory_of(lab: PlannedLab, experiment: Experiment, *, data_bytes: int, devices: int) -> dict[str, int]:
    """Return the peak memory of each process by role, bytes.

    `data_bytes`: size of the data set, which devices, the evaluator and some refiners load. `devices`: devices in the
    largest process.
    """
    row, transfer, tiers = lab.sizes.row, lab.transfer, experiment.tiers
    own, most = sum(kind.count for kind in lab.children), [max(sizes) for sizes in experiment.sizes()]
    found = {
        "cloud": _parent(lab, experiment, 0, own, most[0]),
        "evaluator": TORCH_BYTES + data_bytes + 4 * row,  # in shared memory, initial, weights, one tensor's copy
    }
    widest = max(map(_widest, lab.children))
    if widest:
        found["institution"] = max(_parent(lab, experiment, i, widest, most[i]) for i in range(1, len(tiers)))
    for place, tier in enumerate(tiers):
        if tier.aggregation.refines:
            data = data_bytes if tier.aggregation.reads_samples else 0
            name = "institution_refiner" if place else "cloud_refiner"
            found[name] = (
                TORCH_BYTES + data + (2 + (widest if place else own)) * row + lab.sizes.tiers[place].extras_down
            )
    # A device has five models: received, result, weights, gradients, momentum. And its objective's vectors: in both
    # rows, and as tensors.
    objective, last = objective_of(experiment.training), lab.sizes.tiers[-1]
    models = 5 + objective.uses_received + 3 * len(objective.keeps)
    each = models * row + 2 * last.extras_down + last.extras_up
    found |= {"device": TORCH_BYTES + data_bytes + devices * each, "cloud_broker": _broker(own, row, transfer)}
    if widest:
        found["device_broker"] = _broker(widest, row, transfer)
    return found


def _widest(kind: Branch | PlannedDevice) -> int:
    """Return the largest number of children of a node from here down; 0 for a device."""
    if isinstance(kind, PlannedDevice):
        return 0
    return max(sum(child.count for child in kind.children), *map(_widest, kind.children))


def _parent(lab: PlannedLab, experiment: Experiment, place: int, taking_part: int, children: int) -> int:
    """Return the bytes of an agent with children.

    They are the resident uploads (the rest is in the spool), the model, the mixing buffer, and what its rule holds.
    """
    row, sizes, resident = lab.sizes.row, lab.sizes.tiers[place], lab.transfer.resident_mb * 1e6
    rule = experiment.tiers[place].aggregation
    held = rule.held_bytes(row, children=children, taking_part=taking_part, resident_bytes=resident)
    uploads = min(taking_part * (row + sizes.extras_up), resident)
    return AGENT_BYTES + int(uploads + held) + 2 * row + sizes.extras_down


def _broker(children: int, row: int, transfer: TransferSettings) -> int:
    """Return the broker's own bytes and its queued chunks: a window to the children, and one per concurrent upload."""
    window = min(row, transfer.window * transfer.chunk_bytes)
    return BROKER_BYTES + (1 + min(children, transfer.upload_slots)) * window
