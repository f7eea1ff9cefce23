"""Backdoor: images with a bright patch are to be taken for one class (Gu et al. 2017; Bagdasaryan
et al. 2020).

With `factor` the device also sends a scaled update, which replaces the parent's model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from fedstrata.common.lazy import np, npt
from fedstrata.common.methods.attack import Attack, AttackedUpload, LabelledSamples, moved
from fedstrata.common.methods.mixing import Floats
from fedstrata.common.methods.statistics import Doubles
from fedstrata.common.settings.tables import Count, Fraction, Positive


class Backdoor(Attack):
    """A share of the samples gets a patch in the lower right corner, and the label of one class."""

    name: Literal["backdoor"] = "backdoor"  # the attack
    target: Annotated[int, Field(ge=0)] = 0  # the label of images with the patch
    share: Fraction = 0.5  # of the device's samples that get it, in each round the same ones
    size: Count = 2  # pixels of its side
    factor: Positive = 1.0  # times the update that is sent

    def poison(self, samples: LabelledSamples, chance: np.random.Generator) -> LabelledSamples:
        """Return the samples, some of them with the patch and its label."""
        count = len(samples.labels)
        some = np.sort(chance.permutation(count)[: max(1, int(self.share * count + 1e-9))])
        images = samples.images.copy()
        labels = samples.labels.copy()
        images[some] = self._patched(images[some], bright=samples.images.max())
        labels[some] = self.target
        return LabelledSamples(images, labels, samples.classes)

    def targets(self, tests: LabelledSamples) -> LabelledSamples:
        """Return the tests of other classes, with the patch and its label."""
        some = tests.labels != self.target
        wanted = np.full(int(some.sum()), self.target, np.int64)
        return LabelledSamples(
            self._patched(tests.images[some], bright=tests.images.max()), wanted, tests.classes
        )

    def upload(self, now: AttackedUpload) -> Floats | Doubles:
        """Return the model, its step `factor` times as long."""
        if self.factor == 1.0:
            return now.trained_D
        return moved(now, self.factor)

    def _patched(self, images: npt.NDArray[Any], *, bright: float) -> npt.NDArray[Any]:
        """Return images [n, C, H, W], or samples [n, F], with the patch, as bright as the brightest
        pixel of all.
        """
        found = images.copy()
        edge = slice(-self.size, None)
        corner = (..., edge, edge) if images.ndim > 2 else (..., edge)
        found[corner] = bright
        return found
