"""A parent's side of a secure sum: one exchange with its children, without I/O.

    sum of q_k = sum of y_k - sum over present k of PRG(b_k)
                 - sum over lost j of what its present neighbours added for it

The parent learns b_k of the children in the sum and the key of those that are lost, each from the
shares of enough neighbours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

import numpy as np

from fedstrata.common.errors import RefusedModel, WireError
from fedstrata.common.secure import masks, shamir
from fedstrata.common.secure.member import MASKS
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
    SumMember,
    packed,
    read,
)
from fedstrata.common.secure.ring import Ring, Words
from fedstrata.common.settings.secure import LEAST

SHARE: Final = shamir.SHARE_BYTES


class SecureExchange:
    """One exchange; `exchange`: its number, random bytes."""

    def __init__(self, ring: Ring, *, exchange: bytes) -> None:
        self._ring = ring
        self._exchange = exchange
        self._members: dict[str, SumMember] = {}
        self._near: Mapping[str, tuple[str, ...]] = {}
        # what each child has sealed for another one: by receiver, then sender
        self._boxes: dict[str, dict[str, bytes]] = defaultdict(dict)
        self._present: tuple[str, ...] = ()
        self.opened: frozenset[str] = frozenset()  # of the sum that a child has helped to open

    def begin(self) -> bytes:
        """Return the question for keys."""
        return packed(Begin(self._exchange))

    def take_keys(self, child: str, answer: bytes) -> None:
        """Take a child's keys. Raises WireError."""
        keys = read(Keys, answer)
        if {len(keys.masks), len(keys.boxes)} != {masks.KEY_BYTES}:
            raise WireError("keys of another length")
        self._members[child] = SumMember(child, keys.masks, keys.boxes)
        if keys.opened:
            self.opened = frozenset(opening.name for opening in keys.opened)

    def roster(self, children: Iterable[str], *, samples_most: int) -> bytes:
        """Return the question for shares, for these children, whose keys it has taken."""
        self._members = {name: self._members[name] for name in children}
        members = tuple(self._members.values())
        self._near = neighbours(members, self._ring.settings.neighbours)
        return packed(Roster(self._exchange, samples_most, members))

    def take_shares(self, child: str, answer: bytes) -> None:
        """Take what a child has sealed for its neighbours. Raises WireError."""
        boxes = read(Boxes, answer).boxes
        if [box.name for box in boxes] != list(self._near[child]):
            raise WireError("shares for others than its neighbours")
        for box in boxes:
            self._boxes[box.name][child] = box.box

    @property
    def uploads_needed(self) -> int:
        """How many children's uploads have a sum that can be opened, whoever they are."""
        return max(LEAST, self.answers_needed(self._members))

    def enough(self, present: Collection[str]) -> bool:
        """Return whether the sum of these children can be opened, if all of them answer."""
        needed = self._ring.settings.shares_needed
        return len(present) >= LEAST and all(
            len({*near}.intersection(present)) >= needed(len(near)) for near in self._near.values()
        )

    def answers_needed(self, present: Collection[str]) -> int:
        """Return how many of these children's answers open their sum, whoever answers."""
        most = 0
        for near in self._near.values():
            here = len({*near}.intersection(present))
            # all but those whom this child can spare
            spare = here - self._ring.settings.shares_needed(len(near))
            most = max(most, len(present) - spare)
        return most

    def unmask(self, present: Iterable[str]) -> dict[str, bytes]:
        """Return the question for what opens the sum of these children, for each of them."""
        self._present = tuple(present)
        names = tuple(map(Opening, self._present))
        found = {}
        for child in self._present:
            boxes = tuple(SealedShares(sender, box) for sender, box in self._boxes[child].items())
            found[child] = packed(Present(self._exchange, names, boxes))
        return found

    def total(self, uploads: Iterable[Words], answers: Mapping[str, bytes]) -> Words:
        """Return the sum of the present children's words, in new memory; `answers`: of some of
        them. Raises RefusedModel if these do not open it.
        """
        present = frozenset(self._present)
        total = np.zeros(self._ring.size, self._ring.dtype)
        for words in uploads:
            np.add(total, words, out=total)
        shares = self._shares(present, answers)
        for child, near in self._near.items():
            secret = self._joined(child, shares[child])
            if child in present:
                masks.add(total, secret, subtract=True)
            else:
                self._without(child, secret, near, present, total)
        return total

    def _without(
        self, child: str, key: bytes, near: tuple[str, ...], present: frozenset[str], total: Words
    ) -> None:
        """Take out what the present neighbours of a lost child added for it."""
        if masks.public_key(key) != self._members[child].masks:
            raise RefusedModel(f"the shares of {child}'s key give another key")
        order = {name: number for number, name in enumerate(self._members)}
        for other in near:
            if other in present:
                seed = masks.agreed(key, self._members[other].masks, about=MASKS)
                # a member subtracts the masks of those before it
                masks.add(total, seed, subtract=order[other] < order[child])

    def _shares(
        self, present: frozenset[str], answers: Mapping[str, bytes]
    ) -> Mapping[str, dict[int, bytes]]:
        """Return the shares of each child's secret, by number."""
        found: dict[str, dict[int, bytes]] = defaultdict(dict)
        for child, name, share in self._answered(present, answers):
            number = self._near[name].index(child) + 1
            found[name][number] = share
        return found

    def _answered(
        self, present: frozenset[str], answers: Mapping[str, bytes]
    ) -> Iterator[tuple[str, str, bytes]]:
        """Yield who gave a share, of whom, and the share; what cannot be one is left out."""
        for child, answer in answers.items():
            for share in read(Opened, answer).shares:
                fits = share.present == (share.name in present) and len(share.share) == SHARE
                if fits and child in self._near.get(share.name, ()):
                    yield child, share.name, share.share

    def _joined(self, child: str, shares: Mapping[int, bytes]) -> bytes:
        needed = self._ring.settings.shares_needed(len(self._near[child]))
        if len(shares) < needed:
            raise RefusedModel(f"{len(shares)} shares of {child}'s secret, {needed} are needed")
        try:
            return shamir.join(dict(sorted(shares.items())[:needed]))
        except ValueError as error:
            raise RefusedModel(f"{child}: {error}") from None
