"""Bytes of a round with one child, as MQTT packets. The sizes of control messages were measured once, with the demo."""

from __future__ import annotations

from typing import Final

from common.experiment.schema import TransferSettings

DOWN_BYTES: Final = 295  # besides the model: the task and the acknowledgement
UP_BYTES: Final = 645  # besides the model: the result and the progress messages
REPORT_BYTES: Final = 330  # per device below the child, in its result
CHUNK_BYTES: Final = 95  # per chunk: topic, header, digest, and its share of the asks


def down_bytes(nbytes: int, transfer: TransferSettings) -> int:
    """Return what sends a model of `nbytes` bytes to a child."""
    return _packets(nbytes, transfer) + DOWN_BYTES


def up_bytes(nbytes: int, transfer: TransferSettings, *, devices: int) -> int:
    """Return what sends a child's result of `nbytes` bytes, with the reports of the devices below it."""
    return _packets(nbytes, transfer) + UP_BYTES + devices * REPORT_BYTES


def _packets(nbytes: int, transfer: TransferSettings) -> int:
    chunks = 1 if nbytes <= transfer.inline_bytes else -(-nbytes // transfer.chunk_bytes)
    return nbytes + chunks * CHUNK_BYTES
