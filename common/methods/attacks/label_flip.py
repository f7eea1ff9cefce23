"""Label flip: a device trains on wrong labels (Tolpekin et al. 2020; all labels: Fang et al.
2020).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedstrata.common.lazy import np
from fedstrata.common.methods.attack import Attack, LabelledSamples

Label = Annotated[int, Field(ge=0)]


class LabelFlip(Attack):
    """Wrong labels: of C classes y becomes C - 1 - y, or those of one class become another."""

    name: Literal["label_flip"] = "label_flip"  # the attack
    # `all`: y becomes C - 1 - y; `pair`: `source` becomes `target`
    mode: Literal["all", "pair"] = "all"
    source: Label = 1  # with `pair`: the class whose labels change
    target: Label = 7  # with `pair`: what they become

    def poison(self, samples: LabelledSamples, chance: np.random.Generator) -> LabelledSamples:
        """Return the samples with wrong labels."""
        labels = samples.classes - 1 - samples.labels
        if self.mode == "pair":
            labels = np.where(samples.labels == self.source, self.target, samples.labels)
        return LabelledSamples(samples.images, labels, samples.classes)

    def targets(self, tests: LabelledSamples) -> LabelledSamples:
        """Return the tests whose labels are changed, with the wrong ones."""
        wrong = self.poison(tests, np.random.default_rng(0)).labels
        some = wrong != tests.labels
        return LabelledSamples(tests.images[some], wrong[some], tests.classes)
