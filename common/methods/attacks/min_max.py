"""Min-Max and Min-Sum (Shejwalkar & Houmansadr 2021, section 4.4): far from the mean, and no
outlier.

    u_i: the steps that the colluders know      u = mean_i u_i + gamma p,  p = -std_i(u_i), -u/|u|
    or -sign(u)

    Min-Max    the largest gamma with    max_i ||u - u_i|| <= max_ij ||u_i - u_j||
    Min-Sum    the largest gamma with    sum_i ||u - u_i||^2 <= max_i sum_j ||u_i - u_j||^2

The paper searches gamma by halving; both bounds are quadratic in it, so here it is their root.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from fedstrata.common.lazy import np
from fedstrata.common.methods.attack import Attack, AttackedUpload
from fedstrata.common.methods.statistics import Doubles


class MinMax(Attack):
    """As far from each known upload as these are from each other, at most."""

    colludes: ClassVar[bool] = True

    name: Literal["min_max"] = "min_max"  # the attack
    # the vector p: std_i(u_i), u/|u| or sign(u), negative
    direction: Literal["std", "unit", "sign"] = "std"

    def upload(self, now: AttackedUpload) -> Doubles:
        """Return z + mean u + gamma p, z being the model received."""
        received_D = now.received_D.astype(np.float64)
        steps_KD = np.stack(now.known or [now.trained_D]) - received_D
        mean_D = steps_KD.mean(axis=0)
        if self.direction == "std":
            way_D = -steps_KD.std(axis=0)
        elif self.direction == "sign":
            way_D = -np.sign(mean_D)
        else:
            way_D = -mean_D / max(float(np.sqrt(np.square(mean_D).sum())), 1e-300)
        found: Doubles = received_D + mean_D + self.gamma(steps_KD - mean_D, way_D) * way_D
        return found

    def gamma(self, offsets_KD: Doubles, way_D: Doubles) -> float:
        """Return the largest gamma, 0 for a single upload; `offsets_KD`: u_i minus their mean."""
        squares_K = np.square(offsets_KD).sum(axis=1)
        apart_KK = np.stack([np.square(offsets_KD - each_D).sum(axis=1) for each_D in offsets_KD])
        along_K = -(offsets_KD * way_D).sum(axis=1)
        length = float(np.square(way_D).sum())
        if length == 0:
            return 0.0
        return self._root(squares_K, apart_KK, along_K, length)

    def _root(
        self, squares_K: Doubles, apart_KK: Doubles, along_K: Doubles, length: float
    ) -> float:
        """Return the least root of length g^2 + 2 along_i g + squares_i = max_ij apart_ij."""
        room_K = np.maximum(apart_KK.max() - squares_K, 0.0)
        return float(((np.sqrt(np.square(along_K) + length * room_K) - along_K) / length).min())


class MinSum(MinMax):
    """As far from all known uploads together as one of them is from the others, at most."""

    name: Literal["min_sum"] = "min_sum"  # type: ignore[assignment]  # the attack

    def _root(
        self, squares_K: Doubles, apart_KK: Doubles, along_K: Doubles, length: float
    ) -> float:
        """Return the root of K length g^2 + sum squares = max_i sum_j apart_ij; the sum of
        `along_K` is 0.
        """
        room = max(float(apart_KK.sum(axis=1).max() - squares_K.sum()), 0.0)
        return float(np.sqrt(room / (len(squares_K) * length)))
