"""How many bytes a message may have: a limit that stands before the message is read.

A message is as large as what it may hold: short texts, an entry for each node below its sender, digests of a model's
chunks, a model inside it, JSON of the experiment. Both ends know the experiment. Of a sender of whom nothing is known,
the limits are what no lab exceeds.
"""

from __future__ import annotations

from typing import Final

from common.errors import WireError
from common.experiment.tiers import TIERS_MOST
from common.model.layout import ROW_BYTES_MOST
from common.protocol import topics
from common.protocol.fetches import SKIPPED, Skipped
from common.protocol.messages import (
    DIGEST_BYTES,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Alive,
    Announcement,
    Ask,
    Farewell,
    Here,
    Message,
    Presence,
    Probe,
    Probed,
    Progress,
    Reports,
    Result,
    RollCall,
    Task,
    WhoIsThere,
)
from common.text import JSON_MOST

SMALL_BYTES: Final = 8192  # of a message without lists, digests, models and JSON: a few short texts, counts
TARGET_BYTES: Final = 400
REPORT_BYTES: Final = 640
TRAFFIC_BYTES: Final = 256
FINDINGS_BYTES: Final = 131_072
NODES_MOST: Final = 50_000
NOISE_MOST: Final = 1 << 26  # bytes that calibrate a link
NOISE_CHUNKS_MOST: Final = 4096
INLINE_MOST: Final = 1_000_000  # `transfer.inline_bytes` at most
MESSAGE_MOST: Final = 16_000_000  # in any lab


class SenderBounds:
    """What the messages of one sender may hold, and so the most bytes of each.

    `nodes`: entries of its lists, one for each node below it; `blob_bytes`: of a model; `inline_bytes`: of one inside a
    message. `plans`: it aggregates, and reports its decisions; `announces`: it is a parent.
    """

    def __init__(
        self,
        *,
        nodes: int = NODES_MOST,
        blob_bytes: int = ROW_BYTES_MOST,
        inline_bytes: int = INLINE_MOST,
        plans: bool = True,
        announces: bool = True,
    ) -> None:
        self.nodes = nodes
        chunks = -(-blob_bytes // MIN_CHUNK_BYTES)
        announcement = SMALL_BYTES + announces * 2 * JSON_MOST
        presence = SMALL_BYTES + nodes * TARGET_BYTES
        model = SMALL_BYTES + chunks * DIGEST_BYTES + inline_bytes
        noise = SMALL_BYTES + NOISE_CHUNKS_MOST * DIGEST_BYTES
        tiers = SMALL_BYTES + min(nodes, TIERS_MOST) * TRAFFIC_BYTES
        reports = nodes * REPORT_BYTES
        found: dict[type[Message], int] = {
            Presence: presence,
            Announcement: announcement,
            Task: model,
            Progress: tiers,
            Result: model + tiers + reports + plans * JSON_MOST,
            Ask: SMALL_BYTES + chunks // 8,
            Reports: SMALL_BYTES + reports,
            Farewell: tiers,
            Probe: noise,
            Probed: noise,
            Alive: presence + announces * announcement,
            Here: SMALL_BYTES + FINDINGS_BYTES,
        }
        self._bytes = {kind: min(most, MESSAGE_MOST) for kind, most in found.items()}
        self.most_of_all = max(self._bytes.values())

    def most(self, kind: type[Message]) -> int:
        """Return the most bytes of a message of this kind."""
        return self._bytes.get(kind, SMALL_BYTES)


ANYBODY: Final = SenderBounds()  # of any lab
STRANGER: Final = SenderBounds(nodes=0, blob_bytes=0, inline_bytes=0, plans=False, announces=False)


def bytes_on(topic: topics.Topic, sender: SenderBounds = ANYBODY) -> int:
    """Return the most bytes of a message on a topic, from a sender with these bounds."""
    if isinstance(topic, topics.ChunkTopic):
        return MAX_CHUNK_BYTES
    if isinstance(topic, topics.InboxTopic):
        return sender.most_of_all
    if isinstance(topic, topics.StateTopic):
        return sender.most(Presence)
    if isinstance(topic, topics.SpecTopic):
        return sender.most(Announcement)
    if isinstance(topic, topics.HereTopic):
        return sender.most(Here)
    return sender.most(WhoIsThere if isinstance(topic, topics.SeekTopic) else RollCall)


def skip_large(topic_text: str, size: int) -> Skipped | None:
    """Return SKIPPED for a payload that is larger than any lab has on its topic, for connections without models."""
    if size <= SMALL_BYTES:
        return None
    try:
        most = bytes_on(topics.parse(topic_text))
    except WireError:
        most = MESSAGE_MOST
    return SKIPPED if size > most else None
