"""FedMR (Hu et al. 2022): the layers of K models are permuted among the models, each layer by its
own permutation.

    w_k[l] = v_pi_l(k)[l]

Every layer of every upload is used exactly once; nothing is averaged.
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import groupby
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from fedstrata.common.lazy import np, npt
from fedstrata.common.methods.multi_model import MixingRound, TwoStageRule
from fedstrata.common.model.layout import Entry, ModelLayout

Layer = tuple[Entry, ...]
Permutations: TypeAlias = "list[tuple[Layer, npt.NDArray[np.int64]]]"


class FedMR(TwoStageRule):
    """K models whose layers are permuted among them in every round after the first stage."""

    name: Literal["fedmr"] = "fedmr"  # the rule
    # which entries of a model stay together
    granularity: Literal["module", "key", "block", "model"] = "module"
    # of `block`: the share of the state's entries in a block
    block_fraction: Annotated[float, Field(gt=0, le=1)] = 0.1

    def plan(self, now: MixingRound) -> tuple[Permutations, dict[str, object]]:
        """Return a permutation of the uploads for each layer, and a digest of all permutations."""
        parts: Permutations = []
        digest = blake2b(digest_size=8)
        for place, layer in enumerate(layers(self, now.context.layout)):
            # A node's name contains no slash, so each layer has its own random stream.
            order = now.context.chance(now.r, "recombination", place=str(place)).permutation(
                now.count
            )
            digest.update(repr(order.tolist()).encode())
            parts.append((layer, order))
        return parts, {
            "stage": "recombination",
            "layers": len(parts),
            "permutations": digest.hexdigest(),
        }


def layers(settings: FedMR, layout: ModelLayout) -> tuple[Layer, ...]:
    """Return the state's entries in groups that stay together.

    `module`: a layer's weight, bias, statistics and counter (the paper); `key`: single entries (the
    authors' code); `block`: runs of about block_fraction of the entries; `model`: all entries, so
    nothing is recombined.
    """
    entries = layout.in_state_order
    if settings.granularity == "module":
        return tuple(tuple(group) for _, group in groupby(entries, key=lambda entry: entry.module))
    if settings.granularity == "key":
        return tuple((entry,) for entry in entries)
    if settings.granularity == "model":
        return (entries,)
    runs: list[list[Entry]] = [[]]
    for i, entry in enumerate(entries):
        # 10 * 0.1 * 3 is a little above 3
        if i + 1e-9 >= len(entries) * settings.block_fraction * len(runs):
            runs.append([])
        runs[-1].append(entry)
    return tuple(map(tuple, runs))
