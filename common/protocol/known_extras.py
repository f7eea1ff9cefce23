"""Which bytes of arriving chunks are extras."""

from __future__ import annotations

from collections import deque
from typing import Final

from common.protocol.messages import Manifest

BLOBS_KNOWN: Final = 4  # of each owner


class KnownExtras:
    """The manifests of each owner's last blobs that have extras: even their late chunks are counted by kind."""

    def __init__(self) -> None:
        self._manifests: dict[str, deque[Manifest]] = {}

    def note(self, owner: str, manifest: Manifest) -> None:
        """Take note of a blob that is fetched."""
        self._manifests.setdefault(owner, deque(maxlen=BLOBS_KNOWN)).append(manifest)

    def in_chunk(self, owner: str, blob: str, index: int) -> int:
        """Return how many bytes of a chunk are extras, 0 for a blob that was not fetched lately."""
        for manifest in self._manifests.get(owner, ()):
            if manifest.blob == blob and index < manifest.chunks:
                return manifest.extras_in(index)
        return 0
