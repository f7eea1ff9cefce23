"""A child's side of secure sums (Bonawitz et al. 2017, with the neighbours of Bell et al. 2020).

    y_k = q_k + PRG(b_k) + sum over neighbours j of +- PRG(s_kj)        modulo the ring

b_k is this child's own mask, s_kj the secret of two neighbours, which one adds and the other
subtracts, by the order of the members. Each neighbour gets a share of b_k and one of the key of
s_k*. Of a child that is in the sum they give back that of b, of one that is lost that of its key:
never both.

The keys of an exchange are of this process alone, and are in no file: after a restart it can open
nothing that it began before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from fedstrata.common.errors import RefusedModel, WireError
from fedstrata.common.model.layout import Row
from fedstrata.common.protocol.messages import Key, RoundTurn
from fedstrata.common.randomness import Purpose, generator
from fedstrata.common.secure import masks, shamir
from fedstrata.common.secure.neighbours import neighbours
from fedstrata.common.secure.records import (
    Begin,
    Boxes,
    Keys,
    Opened,
    Opening,
    Present,
    Roster,
    SealedShares,
    Share,
    SumMember,
    packed,
    read,
)
from fedstrata.common.secure.ring import Ring, Words, weight_of
from fedstrata.common.settings.secure import LEAST

MASKS: Final = b"masks of a sum"
BOXES: Final = b"boxes of a sum"
ROUNDS_KEPT: Final = 64  # rounds whose opened sums are remembered


@dataclass(slots=True)
class _Exchange:
    """This child's secrets of one exchange, and what it knows of the others."""

    exchange: bytes
    masks: bytes
    boxes: bytes
    own: bytes
    roster: Roster | None = None
    near: tuple[SumMember, ...] = ()  # its neighbours, itself among them
    members: dict[str, SumMember] = field(default_factory=dict)
    shares: Boxes | None = None  # what a key seals once
    upload: bytes = b""  # digest of the words that were masked


class SecureMember:
    """One child of a parent that learns sums alone; `noise`: random bytes of the system."""

    def __init__(self, ring: Ring, *, node: str, seed: int, noise: Callable[[int], bytes]) -> None:
        self._ring = ring
        self._node = node
        self._seed = seed
        self._noise = noise
        self._round: tuple[int, int] = (-1, -1)
        self._attempt = -1
        self._now: _Exchange | None = None
        self._opened: dict[tuple[int, int], frozenset[str]] = {}

    def holds(self, key: Key) -> bool:
        """Return whether this process has what a turn after the first needs."""
        exchange = self._now
        if exchange is None or (self._attempt, *self._round) != key[:3]:
            return False
        return key.turn == RoundTurn.SHARES or exchange.roster is not None

    def answer(self, key: Key, question: bytes | memoryview) -> bytes:
        """Return the answer to a question of the parent's. Raises WireError, or RefusedModel if it
        would open more than one sum.
        """
        if key.turn == RoundTurn.KEYS:
            return packed(self._keys(key, read(Begin, question)))
        exchange = self._now
        if exchange is None or not self.holds(key):
            raise RefusedModel("its keys are those of another process")
        if key.turn == RoundTurn.SHARES:
            return packed(self._shares(exchange, read(Roster, question)))
        return packed(self._open(exchange, read(Present, question)))

    def masked(self, key: Key, row: Row, received: Row, *, samples: int, loss: float | None) -> Row:
        """Return the masked words of a model, uint8 [layout.row_bytes]. Raises RefusedModel if it
        is not finite.
        """
        exchange = self._now
        if exchange is None or exchange.roster is None or not self.holds(key):
            raise RefusedModel("its keys are those of another exchange")
        self._ring.model.check_finite(row)
        most = exchange.roster.samples_most
        weight = weight_of(samples, most=most)
        place = f"{self._node}/{key.global_round}"
        chance = generator(self._seed, Purpose.SECURE, place, key.local_round)
        words = self._ring.quantised(row, received, weight=weight, loss=loss, chance=chance)
        # two uploads with the same masks would show their difference
        digest = hashlib.blake2b(words.data).digest()
        if exchange.upload not in (b"", digest):
            raise RefusedModel("a second upload of one exchange")
        exchange.upload = digest
        self._mask(exchange, words)
        return words.view(np.uint8)

    def _mask(self, exchange: _Exchange, words: Words) -> None:
        masks.add(words, exchange.own)
        before = True
        for member in exchange.near:
            if member.name == self._node:
                before = False
                continue
            seed = masks.agreed(exchange.masks, member.masks, about=MASKS)
            masks.add(words, seed, subtract=before)

    def _keys(self, key: Key, begin: Begin) -> Keys:
        size = masks.KEY_BYTES
        exchange = _Exchange(
            begin.exchange, masks=self._noise(size), boxes=self._noise(size), own=self._noise(size)
        )
        self._now = exchange
        self._attempt = key.attempt
        self._round = (key.global_round, key.local_round)
        opened = self._opened.get(self._round, frozenset())
        return Keys(
            masks.public_key(exchange.masks),
            masks.public_key(exchange.boxes),
            tuple(map(Opening, sorted(opened))),
        )

    def _shares(self, exchange: _Exchange, roster: Roster) -> Boxes:
        """Take the members, and return the shares for the neighbours. Raises WireError."""
        members = {member.name: member for member in roster.members}
        me = members.get(self._node)
        mine = masks.public_key(exchange.masks), masks.public_key(exchange.boxes)
        if roster.exchange != exchange.exchange or me is None or me[1:] != mine:
            raise WireError("a roster of another exchange")
        if len(members) < max(LEAST, len(roster.members)):
            raise WireError("a roster with one child, or with a child twice")
        if exchange.shares is not None:
            if exchange.roster != roster:
                raise WireError("a second roster of one exchange")
            return exchange.shares
        near = neighbours(roster.members, self._ring.settings.neighbours)[self._node]
        needed = self._ring.settings.shares_needed(len(near))
        of_own, of_key = (
            shamir.split(secret, needed=needed, count=len(near), noise=self._noise)
            for secret in (exchange.own, exchange.masks)
        )
        found = []
        for place, name in enumerate(near):
            key = self._box_key(exchange, members[name], sender=self._node, to=name)
            text = of_own[place] + of_key[place]
            found.append(SealedShares(name, masks.sealed(key, text, about=exchange.exchange)))
        exchange.shares = Boxes(tuple(found))
        exchange.roster = roster
        exchange.members = members
        exchange.near = tuple(members[name] for name in near)
        return exchange.shares

    def _open(self, exchange: _Exchange, asked: Present) -> Opened:
        """Return this child's shares for one sum. Raises WireError, RefusedModel."""
        present = frozenset(opening.name for opening in asked.names)
        roster = exchange.roster
        assert roster is not None, "`holds` has looked"
        if asked.exchange != exchange.exchange or not present <= exchange.members.keys():
            raise WireError("a sum of another exchange")
        near = {member.name for member in exchange.near}
        if len(near & present) < self._ring.settings.shares_needed(len(near)):
            raise RefusedModel("a sum of too few children")
        if self._opened.setdefault(self._round, present) != present:
            raise RefusedModel("it has opened another sum of this round")
        while len(self._opened) > ROUNDS_KEPT:
            del self._opened[next(iter(self._opened))]
        found = []
        for box in asked.boxes:
            if box.name not in near:
                raise WireError("a share of a child that is no neighbour")
            member = exchange.members[box.name]
            key = self._box_key(exchange, member, sender=box.name, to=self._node)
            try:
                text = masks.opened(key, box.box, about=exchange.exchange)
            except RefusedModel:
                continue  # its sender lies; the parent names it, as it lacks shares
            half = shamir.SHARE_BYTES
            share = text[:half] if box.name in present else text[half:]
            found.append(Share(box.name, box.name in present, share))
        return Opened(tuple(found))

    @staticmethod
    def _box_key(exchange: _Exchange, other: SumMember, *, sender: str, to: str) -> bytes:
        """Return the key of the one text that this child and another one seal in a direction."""
        secret = masks.agreed(exchange.boxes, other.boxes, about=BOXES)
        return masks.derived(secret, f"{sender}>{to}")
