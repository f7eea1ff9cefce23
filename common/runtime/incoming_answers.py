"""The answers of a turn of a secure sum: fetched, and accepted as they are."""

from __future__ import annotations

from fedstrata.common.protocol.events import UploadAnnounced, UploadArrived
from fedstrata.common.protocol.parent_session import ParentSession
from fedstrata.common.runtime.endpoint import Endpoint


class IncomingAnswers:
    """The answers to one parent, by child."""

    def __init__(self, endpoint: Endpoint, session: ParentSession) -> None:
        self._endpoint = endpoint
        self._session = session
        self._buffers: dict[str, bytearray] = {}

    def fetch(self, upload: UploadAnnounced) -> None:
        """Fetch an announced answer."""
        buffer = bytearray(upload.result.model.size)
        if self._session.fetch(upload, memoryview(buffer), self._endpoint.now()):
            self._buffers[upload.child] = buffer

    def check(self, upload: UploadArrived) -> None:
        """Accept an answer that has arrived."""
        if self._session.is_announced(upload):
            self._session.accept(upload, self._endpoint.now())

    def of(self, child: str) -> bytes:
        """Return the answer of a child whose result was accepted."""
        return bytes(self._buffers[child])
