"""FedMR (Hu et al. 2022): the layers of K models are permuted among the models, each layer by its own permutation.

    w_k[l] = v_pi_l(k)[l]

Every layer of every upload is used exactly once; nothing is averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Literal

from common.experiment.methods import Rounds, RuleUse
from common.experiment.tables import Fraction
from common.methods.mixing import MixedColumns, Mixture
from common.methods.multi_model import MultiModelRule, MultiModelSettings, first_stage_advice
from common.methods.rule import MixingPlan, Planner, Rule, RuleContext, Uploads
from common.methods.statistics import Gram
from common.model.layout import Entry, ModelLayout
from common.randomness import Purpose, generator

Layer = tuple[Entry, ...]


class FedMR(MultiModelSettings):
    """K models whose layers are permuted among them in every round after the first stage."""

    name: Literal["fedmr"] = "fedmr"  # the rule
    granularity: Literal["module", "key", "block", "model"] = "module"  # which entries of a model stay together
    block_fraction: Fraction = 0.1  # of `block`: the share of the state's entries in a block
    first_stage_rounds: Rounds = 0  # first rounds, in which all models become their mean

    def build(self, context: RuleContext) -> Rule:
        return MultiModelRule(self, context, planner(self, context))

    def advice(self, use: RuleUse) -> Iterator[str]:
        """Yield a warning for a run that is a first stage, too."""
        yield from first_stage_advice(use.key, self.first_stage_rounds, use.rounds)
        yield from super().advice(use)


def planner(settings: FedMR, context: RuleContext) -> Planner:
    """Return what decides a node's rounds."""
    found = layers(settings, context.layout)

    def decide(r: int, uploads: Uploads, compare: Callable[[], Gram]) -> MixingPlan:
        if r < settings.first_stage_rounds:
            return (), {"stage": "first"}
        return plan(found, len(uploads.children), seed=context.seed, node=context.node, r=r)

    return decide


def layers(settings: FedMR, layout: ModelLayout) -> tuple[Layer, ...]:
    """Return the state's entries in groups that stay together.

    `module`: a layer's weight, bias, statistics and counter (the paper); `key`: single entries (the authors' code);
    `block`: runs of about block_fraction of the entries; `model`: all entries, so nothing is recombined.
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
        if i + 1e-9 >= len(entries) * settings.block_fraction * len(runs):  # 10 * 0.1 * 3 is a little above 3
            runs.append([])
        runs[-1].append(entry)
    return tuple(map(tuple, runs))


def plan(
    found: Sequence[Layer], count: int, *, seed: int, node: str, r: int
) -> tuple[tuple[MixedColumns, ...], dict[str, object]]:
    """Return a permutation matrix [K, K] per layer, and a digest of all permutations."""
    parts, digest = [], blake2b(digest_size=8)
    for place, layer in enumerate(found):
        # A node's name contains no slash, so each layer has its own random stream.
        order = generator(seed, Purpose.RECOMBINATION, f"{node}/{place}", r).permutation(count).tolist()
        digest.update(repr(order).encode())
        parts.append(MixedColumns.of(tuple(map(Mixture.copy, order)), layer))
    return tuple(parts), {"stage": "recombination", "layers": len(parts), "permutations": digest.hexdigest()}
