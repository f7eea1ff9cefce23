"""FedMA (Wang et al., ICLR 2020), one exchange a round, fixed width: neurons are matched before
they are averaged.

For each layer, from the inputs on, an upload's neurons are permuted so that they fit those of the
others; the layers that read them are permuted alike, so each upload still computes the same. Then
the uploads are averaged.

    order_k = argmax over permutations of sum_i < sum over j != k of W_j[i], W_k[order[i]] >
    Hungarian algorithm

W_k[i]: the weights, bias and norm of neuron i, behind inputs that are matched already. First each
upload is matched to the model that the children received, which makes the result independent of
arrivals, then in sweeps to the others.

This is the paper's cost where the width cannot grow. There neuron l of upload k costs, at global
neuron i that n others share, with S = 1/sigma0^2 + n/sigma^2 and G_i = sum of W_j[i]/sigma^2,

    -||G_i + W_k[l]/sigma^2||^2 / (S + 1/sigma^2) + ||G_i||^2 / S - popularity(n)

n is the same for all i, and the norms of G_i and W_k[l] sum to the same for every permutation. What
remains is the inner product, so sigma, sigma0 and gamma have no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import NonNegativeInt

from fedstrata import (
    Aggregated,
    InvalidExperiment,
    MeanRule,
    ModelLayout,
    ModelSettings,
    Rule,
    RuleContext,
    RuleSettings,
    SingleModelRule,
    TrainingSettings,
    Uploads,
)
from fedstrata.common.methods.baselines.permutations import (
    Indices,
    NeuronGroup,
    folded,
    groups_of,
    permute,
)

Doubles: TypeAlias = "npt.NDArray[np.float64]"
Row: TypeAlias = "npt.NDArray[np.uint8]"
Weights = Literal["data", "uniform"]


class MatchedSettings(RuleSettings):
    """One model: the mean of the uploads, whose neurons were matched before."""

    weights: Weights = "data"  # of the mean: shares of the samples, or 1/K
    matching: bool = True  # false is FedAvg

    @property
    def packages(self) -> Sequence[str]:
        """The packages of an extra that the node needs."""
        if self.matching:
            return ("scipy",)
        return ()

    def held_bytes(
        self, row_bytes: int, *, children: int, taking_part: int, resident_bytes: float
    ) -> float:
        """Return the bytes of the matched uploads and, as measured with ResNet-18, of what the
        matching takes.
        """
        return (
            min(taking_part * row_bytes, resident_bytes)
            + self.step_models * taking_part * row_bytes
        )

    def check_devices(self, key: str, training: TrainingSettings, model: ModelSettings) -> None:
        """Check that the layers of the model are known. Raises InvalidExperiment."""
        if ":" in model.name:
            problem = f"it knows the layers of fedstrata's models, and {model.name} is your own"
            raise InvalidExperiment(f"{key}.name", self.name, problem, "Use another rule.")
        if model.frozen or model.personal:
            problem = (
                "it permutes the neurons of all layers, and some arrays of the model are "
                "not exchanged"
            )
            raise InvalidExperiment(
                f"{key}.name", self.name, problem, "Use another rule, or exchange the whole model."
            )


class FedMA(MatchedSettings):
    """One model: the mean of the uploads, whose neurons were matched layer by layer before."""

    step_models = 1.2  # for each upload

    name: Literal["fedma"] = "fedma"  # the rule
    # Over the uploads, each matched to the others; 0: only to the model that the children received.
    sweeps: NonNegativeInt = 5

    def build(self, context: RuleContext) -> Rule:
        return LayerMatchedRule(self, context)


class MatchedRule(SingleModelRule):
    """FedAvg of matched uploads; how they are matched is the subclass's."""

    def __init__(self, settings: MatchedSettings, context: RuleContext) -> None:
        super().__init__(context, MeanRule(), weights=settings.weights)
        self._groups = groups_of(context.layout) if settings.matching else []
        if self._groups:
            self._rows_K = context.rows("matched", context.children)

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Match copies of the uploads, and write their mean. Distances are those of the matched
        uploads.
        """
        if not self._groups:
            return super().aggregate(r, uploads)
        rows_K = self._rows_K[: len(uploads.children)]
        for k in uploads.answered:
            np.copyto(rows_K[k], uploads.rows_K[k, : rows_K.shape[1]])
            uploads.release()
        matched = [rows_K[k] for k in uploads.answered]
        moved = self._match(self.current, matched)
        outcome = super().aggregate(r, replace(uploads, rows_K=rows_K))
        return replace(
            outcome,
            facts={**outcome.facts, "moved": dict(zip(uploads.senders, moved, strict=True))},
        )

    def _match(self, received: Row, rows: Sequence[Row]) -> list[int]:
        """Permute flat models in place; return how many neurons of each have moved."""
        raise NotImplementedError


class LayerMatchedRule(MatchedRule):
    """FedMA."""

    def __init__(self, settings: FedMA, context: RuleContext) -> None:
        super().__init__(settings, context)
        self._sweeps = settings.sweeps

    def _match(self, received: Row, rows: Sequence[Row]) -> list[int]:
        return match(self.context.layout, self._groups, received, rows, sweeps=self._sweeps)


def match(
    layout: ModelLayout,
    groups: Sequence[NeuronGroup],
    received: Row,
    rows: Sequence[Row],
    *,
    sweeps: int,
) -> list[int]:
    """Permute the neurons of flat models in place; return how many neurons of each have moved."""
    moved = [0] * len(rows)
    waiting = set(groups)
    for group in groups:
        reference = _own(layout, group, received, waiting)
        neurons = [_own(layout, group, row, waiting) for row in rows]
        orders = [assigned(reference @ each.T) for each in neurons]
        neurons = [each[order] for each, order in zip(neurons, orders, strict=True)]
        if len(rows) > 1:
            _sweep(neurons, orders, total=sum(neurons, np.zeros_like(reference)), sweeps=sweeps)
        for k, order in enumerate(orders):
            if count := int((order != np.arange(group.size)).sum()):
                permute(layout, rows[k], group, order)
                moved[k] += count
        waiting.remove(group)
    return moved


def _sweep(neurons: list[Doubles], orders: list[Indices], *, total: Doubles, sweeps: int) -> None:
    """Match each model's neurons to the `total` of the others, until none moves."""
    for _ in range(sweeps):
        settled = True
        for k, each in enumerate(neurons):
            order = assigned((total - each) @ each.T)
            if (order != np.arange(len(each))).any():
                settled = False
                total += each[order] - each
                neurons[k] = each[order]
                orders[k] = orders[k][order]
        if settled:
            return


def _own(layout: ModelLayout, group: NeuronGroup, row: Row, waiting: set[NeuronGroup]) -> Doubles:
    """Return the neurons' trainable values, float64 [size, F], whose inputs do not wait to be
    matched.
    """
    floats = layout.floats(row)
    parts = []
    for place in group.own():
        if place.entry.section == "parameter" and place.reads not in waiting:
            # [outer, size, rest]
            values = folded(floats[place.entry.start : place.entry.stop], place, group.size)[0]
            parts.append(values.swapaxes(0, 1).reshape(group.size, -1))
    return np.concatenate(parts, axis=1).astype(np.float64)


def assigned(products: Doubles) -> Indices:
    """Return the order of own neurons that maximises the sum of products [i, order[i]], float64
    [size, size].
    """
    from scipy.optimize import linear_sum_assignment  # of an extra, and slow to import

    _, order = linear_sum_assignment(products, maximize=True)
    return np.asarray(order, np.int64)
