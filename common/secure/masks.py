"""Masks: streams of ChaCha20 that are added to an upload's words, and secrets that two children
share.

`cryptography` is imported when it is needed: it takes megabytes, and most labs have no secure sums.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np

from fedstrata.common.errors import RefusedModel
from fedstrata.common.secure.ring import Words

KEY_BYTES: Final = 32
NONCE: Final = bytes(12)  # a key seals one message
COUNTER_AND_NONCE: Final = bytes(16)  # and begins one stream
PIECE_BYTES: Final = 1 << 18  # which fits into a core's second-level cache


def public_key(private: bytes) -> bytes:
    """Return the public key, 32 bytes, of a private one, 32 random bytes (X25519, RFC 7748)."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed(private: bytes, public: bytes, *, about: bytes) -> bytes:
    """Return the secret, 32 bytes, of two key pairs for one purpose. Raises RefusedModel if the
    public key is none.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:
        key = X25519PublicKey.from_public_bytes(public)
        secret = X25519PrivateKey.from_private_bytes(private).exchange(key)
    except ValueError:
        raise RefusedModel("a public key that gives no secret") from None
    return hashlib.blake2b(secret, digest_size=KEY_BYTES, person=about).digest()


def derived(secret: bytes, purpose: str) -> bytes:
    """Return the key, 32 bytes, that a secret gives for one purpose."""
    return hashlib.blake2b(purpose.encode(), key=secret, digest_size=KEY_BYTES).digest()


def add(words: Words, seed: bytes, *, subtract: bool = False) -> None:
    """Add the stream of a seed, 32 bytes, to words, uint32 or uint64 [n], in place."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    stream = Cipher(ChaCha20(seed, COUNTER_AND_NONCE), mode=None).encryptor()
    width = PIECE_BYTES // words.itemsize
    zeros = bytes(PIECE_BYTES)
    for start in range(0, words.size, width):
        piece = words[start : start + width]
        mask = np.frombuffer(stream.update(zeros[: piece.nbytes]), words.dtype)
        if subtract:
            np.subtract(piece, mask, out=piece)
        else:
            np.add(piece, mask, out=piece)


def sealed(key: bytes, text: bytes, *, about: bytes) -> bytes:
    """Return a text encrypted with a key that seals nothing else (ChaCha20-Poly1305, RFC 8439)."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key).encrypt(NONCE, text, about)


def opened(key: bytes, box: bytes, *, about: bytes) -> bytes:
    """Return the text of a box. Raises RefusedModel if it was sealed otherwise."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(NONCE, box, about)
    except InvalidTag:
        raise RefusedModel("a share that its sender has not sealed for this child") from None
