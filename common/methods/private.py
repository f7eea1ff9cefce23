"""Privacy of children: clipping and noise of their updates, at the child or at the parent.

    update      d_k = v_k - z_k over trainable columns, z_k: the model that child k received
    clipping    d_k min(1, C / ||d_k||)
    child       v_k = z_k + clipped d_k + N(0, (z C)^2)
    parent      the same for each upload before the rule; the rule then computes with noisy uploads
    alone
    mean        sum of p_k v_k + N(0, (z C max p_k)^2), where the next model depends on the mean
    alone

The noise of a mean is that of one upload, of the largest weight. C is fixed, or follows the
quantile g of the lengths (Andrew et al. 2021, Algorithm 1), with m uploads and b_k = 1 where
||d_k|| <= C:

    s = max(m / 20, 2 z)    share = (sum of b_k + N(0, s^2)) / m    C = C exp(-rate (share - g))
    z of the updates = (z^-2 - s^-2)^(-1/2), so that updates and count together cost what z costs

A neighbour has a zero update in place of one child's. That is within every bound, so the count's
sensitivity is 1. In the paper a neighbour lacks the child, and the sum of b_k - 1/2 has sensitivity
1/2: then the count costs a quarter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import exp, sqrt
from pathlib import Path
from typing import Any, Final

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.lazy import np
from fedstrata.common.methods.mixing import Floats, by_block, cut
from fedstrata.common.methods.rule import Aggregated, Rule, Uploads, WrappedRule
from fedstrata.common.methods.settings import Weights
from fedstrata.common.methods.statistics import Doubles
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.common.randomness import Noise, Purpose, SecretNoise, SeededNoise, secret_key
from fedstrata.common.settings.privacy import PrivacySettings

BOUND: Final = "privacy_clip_norm"  # among the facts of a rule's state
COUNT_SHARE: Final = 20  # uploads for each unit of the count's noise
COUNT_LEAST: Final = 2  # of the multiplier: the count then costs at most a quarter of it


def no_secret() -> bytes:
    """Raise: nothing draws noise."""
    raise RuntimeError("this node has no secret")


def check_covered(key: str, settings: PrivacySettings, layout: ModelLayout) -> None:
    """Check that updates are all that children send of a model. Raises InvalidExperiment."""
    has_buffers = layout.columns > layout.parameters or layout.counters
    if has_buffers and (settings.by_child or settings.by_parent):
        buffers = "the model has buffers, such as batch statistics"
        problem = f"{buffers}, which are not clipped and have no noise"
        remedy = "Use a model without, or name them in model.personal."
        raise InvalidExperiment(f"{key}.unit", settings.unit, problem, remedy)


class NoiseSource:
    """A node's noise, for its own updates or its children's: of the experiment's seed, or of a
    secret of the node's.
    """

    def __init__(
        self,
        settings: PrivacySettings,
        *,
        seed: int,
        node: str,
        secret: Callable[[], bytes] = no_secret,
        purpose: Purpose = Purpose.PRIVACY,
    ) -> None:
        self._settings = settings
        self._purpose = purpose
        self._seed = seed
        self._node = node
        self._secret = secret

    def key(self, number: int, content: Iterable[Floats | Row]) -> bytes:
        """Return the secret key of a task's noise, for this content; empty if noise comes from the
        seed.
        """
        if not self._settings.secret:
            return b""
        digest = hashlib.blake2b(digest_size=32)
        for each in content:
            digest.update(np.ascontiguousarray(each).data)
        return secret_key(self._secret(), self._purpose, self._node, number, digest.digest())

    def of(self, number: int, content: Iterable[Floats]) -> Noise:
        """Return the noise of a task, counted over the run."""
        key = self.key(number, content)
        return noise_of(key, seed=self._seed, node=self._node, number=number, purpose=self._purpose)


def noise_of(
    key: bytes, *, seed: int, node: str, number: int, purpose: Purpose = Purpose.PRIVACY
) -> Noise:
    """Return the noise of a task's key, of the seed if that is empty."""
    if key:
        return SecretNoise(key)
    return SeededNoise(seed, purpose, node, number)


class PrivateUpdates:
    """A child's own clipping and noise."""

    def __init__(self, settings: PrivacySettings, layout: ModelLayout, source: NoiseSource) -> None:
        self._settings = settings
        self._layout = layout
        self._source = source

    def protect(self, received: Row, result: Row, *, number: int) -> None:
        """Clip the update of task `number` in its row, uint8 [row_bytes], and add noise to it."""
        settings = self._settings
        size = self._layout.parameters
        own = self._layout.floats(result)[:size]
        origin = self._layout.floats(received)[:size]
        assert settings.clip_norm is not None
        noise = self._source.of(number, (own, origin))
        (length,) = lengths([(own, origin)])
        if length > settings.clip_norm:
            shorten(own, origin, settings.clip_norm / length)
        add_noise(own, noise, settings.multiplier * settings.clip_norm)


class PrivateRule(WrappedRule):
    """A rule whose parent clips the uploads and adds noise. `mean`: the weights of the mean that
    alone gets noise.
    """

    def __init__(
        self,
        rule: Rule,
        settings: PrivacySettings,
        *,
        layout: ModelLayout,
        source: NoiseSource,
        mean: Weights | None = None,
    ) -> None:
        super().__init__(rule)
        assert settings.clip_norm is not None
        self._settings = settings
        self._layout = layout
        self._source = source
        self._mean = mean
        self._bound = settings.clip_norm

    @property
    def hides_uploads(self) -> bool:
        """Whether the mean alone has noise."""
        return self._mean is not None

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Clip the uploads in their rows and add noise, then aggregate them. Facts: the bound, and
        the noise.
        """
        size = self._layout.parameters
        floats = self._layout.floats
        bound = self._bound
        z = self._settings.multiplier
        answered = uploads.answered
        own = [floats(uploads.rows_K[k])[:size] for k in answered]
        origins = [floats(self._received[child])[:size] for child in uploads.senders]
        pairs = list(zip(own, origins, strict=True))
        noise = self._source.of(r, chain.from_iterable(pairs))
        found = lengths(pairs, release=uploads.release)
        for (vector, origin), length in zip(pairs, found, strict=True):
            if length > bound:
                shorten(vector, origin, bound / length, release=uploads.release)
        counted = 0.0
        if z and self._settings.quantile is not None:
            counted = max(len(own) / COUNT_SHARE, COUNT_LEAST * z)
            z /= sqrt(1 - (z / counted) ** 2)
        std = bound * z
        noisy = own
        if self._mean is not None:
            noisy = [own[np.argmax(uploads.statistics.weights_K(self._mean))]]
        for vector in noisy:
            add_noise(vector, noise, std, release=uploads.release)
        if self._settings.quantile is not None:
            within = sum(length <= bound for length in found)
            share = (within + counted * float(noise.normals(1)[0])) / len(found)
            beyond = share - self._settings.quantile
            self._bound = bound * exp(-self._settings.quantile_rate * beyond)
        done = self._rule.aggregate(r, uploads)
        if self.hides_uploads:
            done = replace(done, distances={})
        return replace(done, facts={**done.facts, "clip_norm": bound, "noise": std})

    def save(self, folder: Path) -> dict[str, object]:
        """Write the rule's state, and the bound that follows a quantile."""
        found = self._rule.save(folder)
        if self._settings.quantile is None:
            return found
        return {**found, BOUND: self._bound}

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self._rule.restore(folder, facts)
        self._bound = float(facts.get(BOUND, self._bound))


def add_noise(
    own: Floats, noise: Noise, std: float, *, release: Callable[[], None] = lambda: None
) -> None:
    """Add noise of a standard deviation to a vector, float32 [D]: summed in float64, rounded
    once.
    """
    if std == 0:
        return
    for columns in cut(0, len(own)):
        own[columns] = own[columns] + std * noise.normals(columns.stop - columns.start)
    release()


def lengths(
    vectors: Sequence[tuple[Floats, Floats | None]], *, release: Callable[[], None] = lambda: None
) -> list[float]:
    """Return ||v - z|| of each v, float32 [D], and z, from where its length is measured; None is
    zero.
    """

    def block(columns: slice) -> Doubles:
        squares = []
        for own, origin in vectors:
            step = own[columns].astype(np.float64)
            if origin is not None:
                step -= origin[columns]
            squares.append(step @ step)
        return np.array(squares)

    size = len(vectors[0][0]) if vectors else 0
    squares = by_block(size, block, release=release)
    if not squares:
        return [0.0] * len(vectors)
    found: list[float] = np.sqrt(np.sum(squares, axis=0)).tolist()
    return found


def shorten(
    own: Floats, origin: Floats | None, share: float, *, release: Callable[[], None] = lambda: None
) -> None:
    """Replace a vector v by z + share (v - z)."""

    def block(columns: slice) -> None:
        start = np.float64(0) if origin is None else origin[columns].astype(np.float64)
        own[columns] = start + share * (own[columns] - start)

    by_block(len(own), block, release=release)
