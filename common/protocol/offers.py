"""What a node offers to its peers: blobs, cut for their links."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
import numpy.typing as npt

from fedstrata.common.experiment.schema import TransferSettings
from fedstrata.common.protocol.manifest import chunk_bytes_for, renamed
from fedstrata.common.protocol.messages import Manifest
from fedstrata.common.protocol.outbox import Aside, Outbox
from fedstrata.common.protocol.sender import Sender
from fedstrata.common.settings.links import LinkSet


class Offers:
    """The blobs that a node offers over one connection, until it retires them."""

    def __init__(
        self,
        owner: str,
        transfer: TransferSettings,
        ways: LinkSet,
        *,
        sender: Sender,
        outbox: Outbox,
    ) -> None:
        self._owner = owner
        self._transfer = transfer
        self._ways = ways
        self._sender = sender
        self._outbox = outbox
        self.set_packet_most(inf)

    def set_packet_most(self, packet_most: float) -> None:
        """Set the most bytes of a packet that the broker accepts."""
        self.chunk_most = int(min(self._transfer.chunk_bytes, packet_most))
        self._inline_most = int(min(self._transfer.inline_bytes, packet_most))

    def largest(self) -> int:
        """Return the most bytes of a chunk, or of a model inside its announcement, on the links of
        all receivers.
        """
        usual = self._transfer.chunk_bytes
        chunks = (chunk_bytes_for(way.rate, usual) for way in self._ways.to.values())
        return max(self._transfer.inline_bytes, *chunks)

    def cut(self, receivers: Sequence[str]) -> tuple[int, str]:
        """Return the chunk size and the salt of a blob for receivers with equal links and
        chunks.
        """
        return self.chunk_bytes(receivers[0]), self._salt(receivers)

    def _salt(self, receivers: Sequence[str]) -> str:
        return str(self._ways.to[receivers[0]])

    def chunk_bytes(self, peer: str) -> int:
        """Return the chunk size for the slowest link on the way to a peer, and to those to which it
        forwards.
        """
        return chunk_bytes_for(self._ways.chunk_rate(peer), self.chunk_most)

    def add(self, manifest: Manifest, blob: memoryview, receivers: Sequence[str]) -> bytes | None:
        """Offer a model to receivers with equal links. It must not change until it is retired.

        Return its bytes if they are few enough to be sent inside the announcement.
        """
        self._sender.offer(manifest, blob, receivers)
        rate = self._ways.to[receivers[0]].rate
        if manifest.size <= min(self._inline_most, chunk_bytes_for(rate, self._inline_most)):
            return bytes(blob)
        return None

    def forwards(self, manifest: Manifest, receivers: Sequence[str]) -> bool:
        """Return whether to forward a model before it is complete: it is large, and its chunks suit
        the links.
        """
        fits = manifest.chunk_bytes <= self.chunk_bytes(receivers[0])
        return fits and manifest.size > self._inline_most

    def forward(
        self,
        manifest: Manifest,
        buffer: memoryview,
        receivers: Sequence[str],
        *,
        lacking: npt.NDArray[np.bool_],
    ) -> Manifest:
        """Forward an arriving model to receivers with equal links until it is retired; return its
        new manifest. `lacking`, bool [chunks], marks the chunks that have not arrived.
        """
        passed = renamed(manifest, salt=self._salt(receivers))
        self._sender.offer(passed, buffer, receivers, to_come=lacking)
        return passed

    def add_aside(self, kind: Aside, manifest: Manifest, data: memoryview, peer: str) -> None:
        """Offer a blob that is no model to a peer; one that others get already to one more."""
        self._outbox.add_aside(kind, self._owner, manifest.blob)
        self._sender.offer(manifest, data, (peer,))

    def retire(self, blob: str) -> None:
        """Stop serving a blob."""
        self._sender.retire(blob)
        self._outbox.drop(blob)
