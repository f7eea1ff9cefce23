"""The models that one session offers: their chunk sizes for the receivers' links, and the end of their service."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from common.experiment.links import LinkSet
from common.experiment.schema import TransferSettings
from common.protocol.manifest import chunk_bytes_for, renamed
from common.protocol.messages import Manifest
from common.protocol.outbox import Outbox
from common.protocol.sender import Sender


class Offers:
    """A session's offered blobs. `chunk_most`: limit of the chunk size in bytes."""

    def __init__(self, transfer: TransferSettings, ways: LinkSet, *, sender: Sender, outbox: Outbox) -> None:
        self._transfer = transfer
        self._ways = ways
        self._sender = sender
        self._outbox = outbox
        self.chunk_most, self._inline_most = transfer.chunk_bytes, transfer.inline_bytes

    def limit(self, packet_most: float) -> None:
        """Limit the chunks of future offers to packets that the broker accepts."""
        self.chunk_most = int(min(self._transfer.chunk_bytes, packet_most))
        self._inline_most = int(min(self._transfer.inline_bytes, packet_most))

    def largest(self) -> int:
        """Return the most bytes of a chunk, or of a model inside its announcement, on the links of all receivers."""
        chunks = (chunk_bytes_for(way.rate, self._transfer.chunk_bytes) for way in self._ways.to.values())
        return max(self._transfer.inline_bytes, *chunks)

    def cut(self, receivers: Sequence[str]) -> tuple[int, str]:
        """Return the chunk size and the salt of a blob for receivers with equal links."""
        way = self._ways.to[receivers[0]]
        return chunk_bytes_for(way.rate, self.chunk_most), str(way)

    def offer(self, manifest: Manifest, blob: memoryview, receivers: Sequence[str]) -> bytes | None:
        """Offer a model to receivers with equal links. It must not change until it is retired.

        Return its bytes if they are few enough to be sent inside the announcement.
        """
        self._sender.offer(manifest, blob, receivers)
        inline_most = min(self._inline_most, chunk_bytes_for(self._ways.to[receivers[0]].rate, self._inline_most))
        return bytes(blob) if manifest.size <= inline_most else None

    def forwards(self, manifest: Manifest, receivers: Sequence[str]) -> bool:
        """Return whether to forward a model before it is complete: it is large, and its chunks suit the links."""
        fine = manifest.chunk_bytes <= chunk_bytes_for(self._ways.to[receivers[0]].rate, self.chunk_most)
        return fine and manifest.size > self._inline_most

    def forward(
        self, manifest: Manifest, buffer: memoryview, receivers: Sequence[str], *, lacking: npt.NDArray[np.bool_]
    ) -> Manifest:
        """Forward an arriving model to receivers with equal links until it is retired; return its new manifest."""
        passed = renamed(manifest, salt=str(self._ways.to[receivers[0]]))
        self._sender.offer(passed, buffer, receivers, to_come=lacking)
        return passed

    def retire(self, blob: str) -> None:
        """Stop serving a blob."""
        self._sender.retire(blob)
        self._outbox.drop(blob)
