"""Building a node's rule, behind a bound for the length of a child's step: c times the median of
the round's lengths.

    ||v_k - z_k|| <= c median of ||v_i - z_i||
    ||e_k||       <= c median of ||e_i||

The first is over trainable columns, z_k is the model that child k received; the second is for each
vector behind the model (SCAFFOLD's `control_change`).

What is longer is clipped to the bound (Sun et al. 2019, with a bound that follows the round), or
the upload is left out as if it had not come. c is at least 1, so half of the steps always stay as
they are, and half of each of the vectors. At most half of the uploads are left out, those that are
farthest beyond a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import inf
from typing import Final

from fedstrata.common.errors import InvalidExperiment, installing
from fedstrata.common.lazy import np
from fedstrata.common.methods.adversary import NearAdversaries
from fedstrata.common.methods.attacked_rule import AttackedRule
from fedstrata.common.methods.mixing import Floats
from fedstrata.common.methods.optimisers import stepped
from fedstrata.common.methods.own_rule import GuardedOwn, OwnTable
from fedstrata.common.methods.private import NoiseSource, PrivateRule, lengths, no_secret, shorten
from fedstrata.common.methods.rule import (
    Aggregated,
    Rule,
    RuleContext,
    Uploads,
    WrappedRule,
    link_layouts,
)
from fedstrata.common.methods.settings import CombiningSettings, NormBound, RuleSettings
from fedstrata.common.model.layout import LinkLayouts
from fedstrata.common.randomness import Purpose
from fedstrata.common.settings.privacy import NO_PRIVACY, PrivacySettings

STEP = "step"
NO_BOUND: Final = NormBound()


def build(
    settings: RuleSettings,
    context: RuleContext,
    *,
    bound: NormBound = NO_BOUND,
    privacy: PrivacySettings = NO_PRIVACY,
    secret: Callable[[], bytes] = no_secret,
    hides_uploads: bool = True,
    adversaries: NearAdversaries | None = None,
) -> Rule:
    """Return a node's rule, behind the bound of its children's steps, or their privacy, and what
    `adversaries` do.

    `secret`: the node's own, for noise. `hides_uploads`: nothing reads the uploads but the rule, so
    that a mean may have noise alone. Raises InvalidExperiment without a package of an extra.
    """
    given = settings
    settings = settings.resolved
    for package in settings.packages:
        if find_spec(package) is None:
            problem = f"needs {package}, which is not installed"
            remedy = f"{installing('methods')}."
            raise InvalidExperiment("aggregation.name", settings.name, problem, remedy)
    rule = given.build(context)
    if isinstance(settings, CombiningSettings) and settings.step is not None:
        rule = stepped(rule, settings.step, context)
    if isinstance(given, OwnTable):
        rule = GuardedOwn(given.name, rule, context.layout)
    if privacy.by_parent:
        source = NoiseSource(
            privacy,
            seed=context.seed,
            node=context.node,
            secret=secret,
            purpose=Purpose.PRIVACY_OF_CHILDREN,
        )
        mean = settings.of_mean if hides_uploads else None
        rule = PrivateRule(rule, privacy, layout=context.layout, source=source, mean=mean)
    elif bound.action != "off":
        rule = NormBoundedRule(rule, bound, link_layouts(settings, context.layout))
    if adversaries is None:
        return rule
    return AttackedRule(rule, context.layout, adversaries)


class NormBoundedRule(WrappedRule):
    """A rule whose uploads are bounded first. `links`: what the children's links carry."""

    def __init__(self, rule: Rule, settings: NormBound, links: LinkLayouts) -> None:
        super().__init__(rule)
        self._settings = settings
        self._links = links

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Bound the uploads in their rows, then aggregate them. Facts: all lengths, and whose was
        too long.
        """
        found = [(vectors, self._lengths(vectors, uploads)) for vectors in self._vectors(uploads)]
        medians = [float(np.median(list(each.values()))) for _, each in found]
        facts: dict[str, object] = {f"{vectors.name}_lengths": each for vectors, each in found}
        reasons: dict[str, str] = {}
        if self._settings.action == "clip":
            facts["clipped"] = self._clipped(found, medians, uploads)
        else:
            reasons = self._left_out(found, medians)
            facts["left_out"] = list(reasons)
        reports = dict(zip(uploads.children, uploads.reports, strict=True))
        reports |= dict.fromkeys(reasons)
        done = self._rule.aggregate(r, replace(uploads, reports=tuple(reports.values())))
        return replace(done, facts={**done.facts, **facts}, left_out={**done.left_out, **reasons})

    def _vectors(self, uploads: Uploads) -> list[_BoundedVectors]:
        """Return the uploads' trainable columns, then each of their extras."""
        model = self._links.model
        size = self._links.model.parameters
        steps_K = model.floats(uploads.rows_K)[:, :size]
        steps = _BoundedVectors(
            STEP, steps_K, lambda child: model.floats(self._received[child])[:size]
        )
        extras = self._links.up.extras_of(uploads.rows_K)
        return [steps, *(_BoundedVectors(*each, lambda child: None) for each in extras.items())]

    def _lengths(self, vectors: _BoundedVectors, uploads: Uploads) -> dict[str, float]:
        """Return the lengths of the uploads that came, by child."""
        names = uploads.senders
        own = (vectors.floats_K[k] for k in uploads.answered)
        pairs = [*zip(own, map(vectors.origin, names), strict=True)]
        return dict(zip(names, lengths(pairs, release=uploads.release), strict=True))

    def _clipped(
        self, found: Sequence[Measured], medians: Sequence[float], uploads: Uploads
    ) -> list[str]:
        """Shorten what is beyond its bound; return the children."""
        clipped = set()
        for (vectors, found_lengths), median in zip(found, medians, strict=True):
            most = self._settings.factor * median
            for k in uploads.answered:
                name = uploads.children[k]
                if found_lengths[name] > most:
                    clipped.add(name)
                    share = most / found_lengths[name]
                    origin = vectors.origin(name)
                    shorten(vectors.floats_K[k], origin, share, release=uploads.release)
        return [name for name in uploads.children if name in clipped]

    def _left_out(self, found: Sequence[Measured], medians: Sequence[float]) -> dict[str, str]:
        """Return the reasons of the children to be left out: of those beyond a bound the farthest,
        at most half.
        """
        beyond = []
        for (vectors, found_lengths), median in zip(found, medians, strict=True):
            for name, length in found_lengths.items():
                if length > self._settings.factor * median:
                    times = length / median if median else inf
                    beyond.append((times, name, vectors.name))
        worst: dict[str, str] = {}
        for times, name, vector in sorted(beyond, key=lambda each: (-each[0], each[1])):
            if name not in worst and len(worst) < len(found[0][1]) // 2:
                worst[name] = _reason(vector, times)
        return worst


@dataclass(frozen=True, slots=True)
class _BoundedVectors:
    """One vector of each upload, float32 [K, D], and from where its length is measured: None is
    zero.
    """

    name: str
    floats_K: Floats
    origin: Callable[[str], Floats | None]


# with the lengths of the uploads that came, by child
Measured = tuple[_BoundedVectors, Mapping[str, float]]


def _reason(vector: str, times: float) -> str:
    if times == inf:
        return f"the median {vector} is zero"
    return f"its {vector} is {times:.4g} times as long as the median"
