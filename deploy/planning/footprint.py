"""Bytes of a global round on each tier, and the memory of each role and of the broker.

The sizes of control messages and the roles' own memory were measured once: with the demo, on Linux x86-64, with
PyTorch's CUDA build. The rest follows from the models' sizes.
"""

from __future__ import annotations

from typing import Final

from common.experiment.rounds import participants
from common.experiment.schema import Experiment, TransferSettings
from common.experiment.topology import CLOUD
from deploy.planning.prediction import PlannedLab, Sizes

DOWN_BYTES: Final = 295  # per child and round, besides the model: the task and the acknowledgement
UP_BYTES: Final = 645  # per child and round, besides the model: the result and the progress messages
REPORT_BYTES: Final = 330  # per device, in its institution's result
CHUNK_BYTES: Final = 95  # per chunk: topic, header, digest, and its share of the asks
AGENT_BYTES: Final = 60_000_000
TORCH_BYTES: Final = 560_000_000
BROKER_BYTES: Final = 9_000_000


def tiers_of(lab: PlannedLab) -> dict[str, int]:
    """Return the bytes of a global round by tier and direction, as whole MQTT packets."""
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
    """Return the mean bytes of a global round on each link, by `FROM TO`, given the share of selected children."""
    transfer, rounds = experiment.transfer, experiment.institution.rounds
    children = experiment.topology.children()
    cloud_share = participants(len(children), experiment.cloud.participation) / len(children)
    found: dict[str, float] = {}
    for name, devices in children.items():
        selected = participants(len(devices), experiment.institution.participation)
        found[f"{CLOUD} {name}"] = cloud_share * _down(sizes.wan_down, transfer)
        found[f"{name} {CLOUD}"] = cloud_share * (_up(sizes.wan_up, transfer) + selected * REPORT_BYTES)
        share = cloud_share * rounds * selected / len(devices)
        for device in devices:
            found[f"{name} {device}"] = share * _down(sizes.lan_down, transfer)
            found[f"{device} {name}"] = share * _up(sizes.lan_up, transfer)
    return found


def memory_of(lab: PlannedLab, *, data_bytes: int, devices: int) -> dict[str, int]:
    """Return the peak memory of each process by role, bytes.

    `data_bytes`: size of the data set, which devices and the evaluator load. `devices`: devices in the largest process.
    """
    row, transfer = lab.sizes.row, lab.transfer
    selected = max(sum(device.count for device in branch.devices) for branch in lab.branches)
    institutions = sum(branch.count for branch in lab.branches)
    return {
        "cloud": AGENT_BYTES + _parent(institutions, row, transfer),
        "evaluator": TORCH_BYTES + data_bytes + 4 * row,  # in shared memory, initial, weights, one tensor's copy
        "institution": AGENT_BYTES + _parent(selected, row, transfer),
        "device": TORCH_BYTES + data_bytes + devices * 5 * row,  # received, result, weights, gradients, momentum
        "cloud_broker": _broker(institutions, row, transfer),
        "device_broker": _broker(selected, row, transfer),
    }


def _down(nbytes: int, transfer: TransferSettings) -> int:
    return _packets(nbytes, transfer) + DOWN_BYTES


def _up(nbytes: int, transfer: TransferSettings) -> int:
    return _packets(nbytes, transfer) + UP_BYTES


def _packets(nbytes: int, transfer: TransferSettings) -> int:
    chunks = 1 if nbytes <= transfer.inline_bytes else -(-nbytes // transfer.chunk_bytes)
    return nbytes + chunks * CHUNK_BYTES


def _parent(children: int, row: int, transfer: TransferSettings) -> int:
    """Return the bytes of the resident uploads (the rest is in the spool), the model and the mixing buffer."""
    return int(min(children * row, transfer.resident_mb * 1e6)) + 2 * row


def _broker(children: int, row: int, transfer: TransferSettings) -> int:
    """Return the broker's own bytes and its queued chunks: a window to the children, and one per concurrent upload."""
    window = min(row, transfer.window * transfer.chunk_bytes)
    return BROKER_BYTES + (1 + min(children, transfer.upload_slots)) * window
