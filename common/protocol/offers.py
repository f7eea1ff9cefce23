"""The models that one session offers: how they are cut for their receivers' links, and when they are served no more."""

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
    """What a session offers. `chunk_most`: bytes of a chunk at most."""

    def __init__(self, transfer: TransferSettings, ways: LinkSet, *, sender: Sender, outbox: Outbox) -> None:
        self._transfer = transfer
        self._ways = ways
        self._sender = sender
        self._outbox = outbox
        self.chunk_most, self._inline_most = transfer.chunk_bytes, transfer.inline_bytes

    def limit(self, packet_most: float) -> None:
        """Cut what is offered from now on to packets that the broker takes."""
        self.chunk_most = int(min(self._transfer.chunk_bytes, packet_most))
        self._inline_most = int(min(self._transfer.inline_bytes, packet_most))

    def cut(self, receivers: Sequence[str]) -> tuple[int, str]:
        """Return the chunk bytes and the salt of a blob for receivers whose links are alike."""
        way = self._ways.to[receivers[0]]
        return chunk_bytes_for(way.rate, self.chunk_most), str(way)

    def offer(self, manifest: Manifest, blob: memoryview, receivers: Sequence[str]) -> bytes | None:
        """Hold a model, which must stay unchanged until it is retired, for receivers whose links are alike.

        Return its bytes where they are few enough to travel inside the announcement.
        """
        self._sender.offer(manifest, blob, receivers)
        inline_most = min(self._inline_most, chunk_bytes_for(self._ways.to[receivers[0]].rate, self._inline_most))
        return bytes(blob) if manifest.size <= inline_most else None

    def forwards(self, manifest: Manifest, receivers: Sequence[str]) -> bool:
        """Return whether to pass a model on before it is here: it is large, and cut finely enough for their links."""
        fine = manifest.chunk_bytes <= chunk_bytes_for(self._ways.to[receivers[0]].rate, self.chunk_most)
        return fine and manifest.size > self._inline_most

    def forward(
        self, manifest: Manifest, buffer: memoryview, receivers: Sequence[str], *, lacking: npt.NDArray[np.bool_]
    ) -> Manifest:
        """Pass a model on, as it comes, to receivers whose links are alike, until it is retired."""
        passed = renamed(manifest, salt=str(self._ways.to[receivers[0]]))
        self._sender.offer(passed, buffer, receivers, to_come=lacking)
        return passed

    def retire(self, blob: str) -> None:
        """Stop serving a blob."""
        self._sender.retire(blob)
        self._outbox.drop(blob)
