"""Bytes of a global round on each tier, and the memory of each role and of the broker.

Control messages and the roles' own memory were measured once, on the demo, on Linux x86-64 with PyTorch's CUDA build;
what models take follows from their sizes.
"""

from __future__ import annotations

from typing import Final

from common.experiment.rounds import participants
from common.experiment.schema import Experiment, TransferSettings
from common.experiment.topology import CLOUD
from deploy.planning.prediction import PlannedLab, Sizes

DOWN_BYTES: Final = 295  # of a child's round, besides its model: the task and the receipt
UP_BYTES: Final = 645  # the result, and what it says of progress
REPORT_BYTES: Final = 330  # of each device, in its institution's result
CHUNK_BYTES: Final = 95  # topic and head of a chunk, its digest, its share of the asks
AGENT_BYTES: Final = 60_000_000
TORCH_BYTES: Final = 560_000_000
BROKER_BYTES: Final = 9_000_000


def tiers_of(lab: PlannedLab) -> dict[str, int]:
    """Return a global round's bytes of whole MQTT packets on each tier and way."""
    sizes = lab.sizes
    institutions = sum(branch.count for branch in lab.branches)
    devices = sum(branch.count * device.count for branch in lab.branches for device in branch.devices)
    trainings = devices * lab.rounds
    return {
        "wan_up": institutions * _up(sizes.wan_up, lab.transfer) + devices * REPORT_BYTES,
        "wan_down": institutions * _down(sizes.wan_down, lab.transfer),
        "lan_up": trainings * _up(sizes.lan_up, lab.transfer),
        "lan_down": trainings * _down(sizes.lan_down, lab.transfer),
    }


def links_of(experiment: Experiment, sizes: Sizes) -> dict[str, float]:
    """Return the mean bytes of a global round on each link, by `FROM TO`: who is not drawn gets nothing."""
    transfer, rounds = experiment.transfer, experiment.institution.rounds
    children = experiment.topology.children()
    cloud_share = participants(len(children), experiment.cloud.participation) / len(children)
    found: dict[str, float] = {}
    for name, devices in children.items():
        drawn = participants(len(devices), experiment.institution.participation)
        found[f"{CLOUD} {name}"] = cloud_share * _down(sizes.wan_down, transfer)
        found[f"{name} {CLOUD}"] = cloud_share * (_up(sizes.wan_up, transfer) + drawn * REPORT_BYTES)
        share = cloud_share * rounds * drawn / len(devices)
        for device in devices:
            found[f"{name} {device}"] = share * _down(sizes.lan_down, transfer)
            found[f"{device} {name}"] = share * _up(sizes.lan_up, transfer)
    return found


def memory_of(lab: PlannedLab, *, data_bytes: int, devices: int) -> dict[str, int]:
    """Return the bytes of memory that each process takes at its most, by role.

    `data_bytes` of the data set, which devices and the evaluator hold; `devices`: how many share the largest process.
    """
    row, transfer = lab.sizes.row, lab.transfer
    drawn = max(sum(device.count for device in branch.devices) for branch in lab.branches)
    institutions = sum(branch.count for branch in lab.branches)
    return {
        "cloud": AGENT_BYTES + _parent(institutions, row, transfer),
        "evaluator": TORCH_BYTES + data_bytes + 3 * row,
        "institution": AGENT_BYTES + _parent(drawn, row, transfer),
        "device": TORCH_BYTES + data_bytes + devices * 5 * row,  # received, answered; weights, gradients, momentum
        "cloud_broker": _broker(institutions, row, transfer),
        "device_broker": _broker(drawn, row, transfer),
    }


def _down(nbytes: int, transfer: TransferSettings) -> int:
    return _packets(nbytes, transfer) + DOWN_BYTES


def _up(nbytes: int, transfer: TransferSettings) -> int:
    return _packets(nbytes, transfer) + UP_BYTES


def _packets(nbytes: int, transfer: TransferSettings) -> int:
    chunks = 1 if nbytes <= transfer.inline_bytes else -(-nbytes // transfer.chunk_bytes)
    return nbytes + chunks * CHUNK_BYTES


def _parent(children: int, row: int, transfer: TransferSettings) -> int:
    """Return what uploads take in memory before they are read from the spool, the models, and what mixes them."""
    return int(min(children * row, transfer.resident_mb * 1e6)) + 2 * row


def _broker(children: int, row: int, transfer: TransferSettings) -> int:
    """Return what may be under way: a window to all children, and one from each of those that send at once."""
    window = min(row, transfer.window * transfer.chunk_bytes)
    return BROKER_BYTES + (1 + min(children, transfer.upload_slots)) * window
