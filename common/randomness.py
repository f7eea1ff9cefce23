"""Random generators: the source of every random number of a run.

There is one generator per (seed, purpose, node, round). So any round can be replayed alone, and nothing depends on the
order in which messages arrive. No process-global generator is used anywhere, but by own code, for which it is seeded.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

from common.lazy import np


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


def _entropy(seed: int, purpose: Purpose, node: str, round_number: int) -> list[int]:
    name = hashlib.blake2b(node.encode(), digest_size=8).digest()
    return [seed, int(purpose), int.from_bytes(name, "little"), round_number]


def generator(seed: int, purpose: Purpose, node: str = "", round_number: int = 0) -> np.random.Generator:
    """Return the generator of one purpose at one node in one round (0-based, never reset)."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(_entropy(seed, purpose, node, round_number))))


def torch_seed(seed: int, purpose: Purpose, node: str = "", round_number: int = 0) -> int:
    """Return a 63-bit seed for a `torch.Generator` of that purpose, node and round."""
    state = np.random.SeedSequence(_entropy(seed, purpose, node, round_number)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
