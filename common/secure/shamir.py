"""Shamir's secret sharing: any t of n shares give a secret, t - 1 say nothing of it.

    f(x) = s + a_1 x + ... + a_{t-1} x^{t-1} mod p,   share i is f(i), i = 1 .. n      (Shamir 1979)

p = 2^521 - 1, a prime above each secret of 32 bytes. A share has 66 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

PRIME: Final = (1 << 521) - 1
SECRET_BYTES: Final = 32
SHARE_BYTES: Final = 66
RANDOM_BYTES: Final = SHARE_BYTES + 16  # modulo p: no number is likelier by more than 2^-128


def split(secret: bytes, *, needed: int, count: int, noise: Callable[[int], bytes]) -> list[bytes]:
    """Return `count` shares of a secret, of which `needed` give it; `noise`: random bytes."""
    coefficients = [int.from_bytes(secret, "big")]
    for _ in range(needed - 1):
        coefficients.append(int.from_bytes(noise(RANDOM_BYTES), "big") % PRIME)
    shares = []
    for x in range(1, count + 1):
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * x + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def join(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of shares by their numbers, from 1. Raises ValueError if they give none."""
    secret = 0
    for x, share in shares.items():
        above = below = 1
        for other in shares:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        secret += int.from_bytes(share, "big") * above * pow(below, -1, PRIME)
    secret %= PRIME
    if secret >> (8 * SECRET_BYTES):
        raise ValueError("shares of different secrets")
    return secret.to_bytes(SECRET_BYTES, "big")
