"""Random generators: the source of every random number of a run.

There is one generator per (seed, purpose, node, round). So any round can be replayed alone, and
nothing depends on the order in which messages arrive. No process-global generator is used anywhere,
but by own code, for which it is seeded.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum, unique
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from fedstrata.common.lazy import np, npt

if TYPE_CHECKING:
    Doubles: TypeAlias = "npt.NDArray[np.float64]"


WORD: Final = (1 << 32) - 1


@unique
class Purpose(IntEnum):
    """The use of the numbers. The values are part of every recorded run: never renumber them."""

    INIT = 1
    SELECTION = 2
    DISPATCH = 3
    BATCHES = 4
    AUGMENTATION = 5
    DROPOUT = 6
    RECOMBINATION = 7
    GROUPING = 8
    CLUSTERS = 9
    PARTITION = 10
    NOISE = 11
    EPOCHS = 12
    HARDWARE = 13
    CYCLES = 14
    HELD_OUT = 15
    DISTILLATION = 16
    TEACHERS = 17
    UNIFORM = 18
    GENERATOR = 19
    OWN_CODE = 20
    TESTS = 21
    SCORING = 22
    SHARPNESS = 23
    CODEC = 24
    PRIVACY = 25
    PRIVACY_OF_CHILDREN = 26
    RULE = 27
    ADVERSARIES = 28
    ATTACK = 29
    AUDIT = 30
    SECURE = 31


def _entropy(seed: int, purpose: Purpose, node: str, round_number: int) -> npt.NDArray[np.uint32]:
    """Return the numbers as SeedSequence cuts each: its own conversion of a list takes 10 us more,
    and a job of a small device has two.
    """
    name = hashlib.blake2b(node.encode(), digest_size=8).digest()
    words: list[int] = []
    for number in (seed, int(purpose), int.from_bytes(name, "little"), round_number):
        words.append(number & WORD)
        rest = number >> 32
        while rest:
            words.append(rest & WORD)
            rest >>= 32
    return np.array(words, np.uint32)


def generator(
    seed: int, purpose: Purpose, node: str = "", round_number: int = 0
) -> np.random.Generator:
    """Return the generator of one purpose at one node in one round (0-based, never reset)."""
    return np.random.Generator(
        np.random.PCG64(np.random.SeedSequence(_entropy(seed, purpose, node, round_number)))
    )


def torch_seed(seed: int, purpose: Purpose, node: str = "", round_number: int = 0) -> int:
    """Return a 63-bit seed for a `torch.Generator` of that purpose, node and round."""
    state = np.random.SeedSequence(_entropy(seed, purpose, node, round_number)).generate_state(
        1, np.uint64
    )
    return int(state[0] >> np.uint64(1))


class Noise(Protocol):
    """A stream of random numbers of one task."""

    def normals(self, count: int) -> Doubles:
        """Return the next standard normal numbers, float64 [count]."""

    def uniforms(self, count: int) -> Doubles:
        """Return the next numbers from 0, included, to 1, float64 [count]."""


class SeededNoise:
    """Noise that anybody can compute who knows the experiment."""

    def __init__(self, seed: int, purpose: Purpose, node: str, round_number: int) -> None:
        self._source = generator(seed, purpose, node, round_number)

    def normals(self, count: int) -> Doubles:
        """Return standard normal numbers."""
        return self._source.standard_normal(count)

    def uniforms(self, count: int) -> Doubles:
        """Return numbers from 0 to 1."""
        return self._source.random(count)


class SecretNoise:
    """Noise that only those can compute who know the key: SHAKE-256 of key and place, then
    Box-Muller.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._place = 0

    def normals(self, count: int) -> Doubles:
        """Return standard normal numbers."""
        half = (count + 1) // 2
        uniform = self.uniforms(2 * half)
        lengths: Doubles = np.sqrt(-2 * np.log1p(-uniform[:half]))  # of numbers above 0
        angles: Doubles = 2 * np.pi * uniform[half:]
        found: Doubles = np.concatenate((lengths * np.cos(angles), lengths * np.sin(angles)))
        return found[:count]

    def uniforms(self, count: int) -> Doubles:
        """Return numbers from 0 to 1, of 53 bits each."""
        self._place += 1
        drawn = hashlib.shake_256(self._key + self._place.to_bytes(8, "little")).digest(8 * count)
        found: Doubles = (np.frombuffer(drawn, "<u8") >> np.uint64(11)) * np.float64(2.0**-53)
        return found


def secret_key(
    secret: bytes, purpose: Purpose, node: str, round_number: int, content: bytes
) -> bytes:
    """Return the key of one task's noise: of a node's secret, a round, and what the noise is added
    to, 32 bytes.

    Other data in the same round has other noise: the difference of two results with the same noise
    would have none.
    """
    place = f"{int(purpose)} {round_number} {node} ".encode()
    return hashlib.blake2b(place + content, key=secret, digest_size=32).digest()
