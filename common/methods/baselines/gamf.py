"""GAMF (Liu et al., ICML 2022): the neurons of all layers and of all uploads are matched together.

Neurons are nodes, weights are edges. With U_k a permutation of all neurons of upload k, and A_k the
upload after it,

    maximise the sum over pairs of <A_i, A_j>, over weights, biases and norms

which is the paper's sum of vec(X_ij)^T K_ij vec(X_ij), X_ij = U_i^T U_j, with the product of two
weights as the affinity of two edges; K is never built. With all permutations but those of one layer
fixed, this is linear in U_k of that layer, with the matrix M_k = own neurons' products with the sum
of the other uploads, by incoming and by outgoing weights. In each pass a layer's U_k becomes
Sinkhorn(M_k / t), and the temperature t falls; the last passes take the Hungarian algorithm. The
first U_k are uniform. The model that the children received takes part as one more upload, which
stays as it is: without it no layer would have a direction. All uploads of a layer are updated at
once, so neither the order of children nor that of arrivals matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field, PositiveFloat

from fedstrata import ModelLayout, Rule, RuleContext
from fedstrata.common.methods.baselines.fedma import MatchedRule, MatchedSettings, assigned
from fedstrata.common.methods.baselines.permutations import (
    NeuronGroup,
    NeuronPlace,
    folded,
    permute,
)

Doubles: TypeAlias = "npt.NDArray[np.float64]"
Row: TypeAlias = "npt.NDArray[np.uint8]"

# at most, until the logarithms of the rows' sums are below the tolerance
SINKHORN_STEPS: Final = 50
SINKHORN_TOLERANCE: Final = 1e-3
ROUNDED_PASSES: Final = 3  # at most, with the Hungarian algorithm


class GAMF(MatchedSettings):
    """One model: the mean of the uploads, whose neurons were matched before, in all layers and
    uploads together.
    """

    step_models = 1.8  # for each upload

    name: Literal["gamf"] = "gamf"  # the rule
    # of the first Sinkhorn pass, relative to the products' standard deviation
    temperature: PositiveFloat = 1.0
    cooling: Annotated[float, Field(gt=0, lt=1)] = 0.8  # factor from pass to pass
    last_temperature: PositiveFloat = 0.05  # of the last one, before the Hungarian algorithm

    def build(self, context: RuleContext) -> Rule:
        return GraphMatchedRule(self, context)


class GraphMatchedRule(MatchedRule):
    """FedAvg of uploads that were matched jointly."""

    def __init__(self, settings: GAMF, context: RuleContext) -> None:
        super().__init__(settings, context)
        self._temperatures = temperatures(settings)

    def _match(self, received: Row, rows: Sequence[Row]) -> list[int]:
        joint = JointMatching(self.context.layout, self._groups, received, rows)
        for temperature in self._temperatures:
            joint.take(temperature)
        for _ in range(ROUNDED_PASSES):
            if not joint.take(0.0):
                break
        return joint.permute()


def temperatures(settings: GAMF) -> list[float]:
    """Return the temperatures of the passes, from the first one down to the last."""
    found = [settings.temperature]
    while found[-1] > settings.last_temperature:
        found.append(max(settings.last_temperature, found[-1] * settings.cooling))
    return found


class JointMatching:
    """The K uploads of one round with soft permutations, float64 [n, n] for a group of n
    neurons.
    """

    def __init__(
        self, layout: ModelLayout, groups: Sequence[NeuronGroup], received: Row, rows: Sequence[Row]
    ) -> None:
        self._layout = layout
        self._groups = groups
        self._rows = rows
        self._soft_K: list[dict[NeuronGroup, Doubles]] = []
        for _ in rows:
            flat = {group: np.full((group.size, group.size), 1 / group.size) for group in groups}
            self._soft_K.append(flat)
        places = [(group, place) for group in groups for place in group.places]
        self._moved_by: dict[str, list[tuple[NeuronGroup, NeuronPlace]]] = {}
        for group, place in places:
            if place.entry.section == "parameter":
                self._moved_by.setdefault(place.entry.name, []).append((group, place))
        self._received = layout.views(received)
        self._own_K = [layout.views(row) for row in rows]

    def take(self, temperature: float) -> bool:
        """Update all groups in turn, by permutations if the temperature is 0; return whether one
        has changed.
        """
        changed = [self._update(group, temperature) for group in self._groups]
        return any(changed)

    def permute(self) -> list[int]:
        """Permute the uploads; return how many neurons of each have moved."""
        moved = []
        for soft, row in zip(self._soft_K, self._rows, strict=True):
            orders = {group: soft[group].argmax(axis=1) for group in self._groups}
            for group, order in orders.items():
                permute(self._layout, row, group, order)
            moved.append(
                sum(int((order != np.arange(group.size)).sum()) for group, order in orders.items())
            )
        return moved

    def _update(self, group: NeuronGroup, temperature: float) -> bool:
        products_KNN = np.zeros((len(self._rows), group.size, group.size))
        for name, moves in self._moved_by.items():
            for place in [place for mover, place in moves if mover is group]:
                neurons_K = [
                    _neurons(self._aligned(k, name, without=place), place, group.size)
                    for k in range(len(self._rows))
                ]
                moved_K = [
                    soft[group] @ each for soft, each in zip(self._soft_K, neurons_K, strict=True)
                ]
                total = _neurons(self._received[name], place, group.size) + sum(moved_K)
                for k, neurons in enumerate(neurons_K):
                    products_KNN[k] += (total - moved_K[k]) @ neurons.T
        changed = False
        for soft, products in zip(self._soft_K, products_KNN, strict=True):
            before = soft[group]
            soft[group] = _solved(products, temperature)
            changed |= not np.array_equal(before, soft[group])
        return changed

    def _aligned(self, k: int, name: str, *, without: NeuronPlace) -> Doubles:
        """Return a tensor of an upload after its soft permutations, but for one of its
        dimensions.
        """
        values = self._own_K[k][name].astype(np.float64)
        for group, place in self._moved_by[name]:
            if place is not without:
                split = folded(values.ravel(), place, group.size)  # [before, outer, size, rest]
                moved = np.tensordot(self._soft_K[k][group], split, (1, 2))
                values = np.moveaxis(moved, 0, 2).reshape(values.shape)
        return values


def _neurons(values: npt.NDArray[Any], place: NeuronPlace, size: int) -> Doubles:
    """Return a tensor as float64 [size, F], a row for each neuron."""
    split = folded(values.astype(np.float64).ravel(), place, size)  # [before, outer, size, rest]
    return np.moveaxis(split, 2, 0).reshape(size, -1)


def _solved(products: Doubles, temperature: float) -> Doubles:
    """Return the doubly stochastic matrix of a temperature, relative to the products' deviation; 0:
    a permutation.
    """
    if not temperature:
        return np.eye(len(products))[assigned(products)]
    deviation = float(products.std())
    if deviation:
        logs = (products - products.mean()) / (temperature * deviation)
    else:
        logs = np.zeros_like(products)
    for _ in range(SINKHORN_STEPS):
        rows = _log_sums(logs, axis=1)
        logs -= rows
        logs -= _log_sums(logs, axis=0)
        if np.abs(rows).max() < SINKHORN_TOLERANCE:
            break
    found: Doubles = np.exp(logs)
    return found


def _log_sums(logs: Doubles, *, axis: int) -> Doubles:
    top = logs.max(axis=axis, keepdims=True)
    found: Doubles = top + np.log(np.exp(logs - top).sum(axis=axis, keepdims=True))
    return found
