"""The settings of rules that compute in a refiner's process at the node, most of them with samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from common.experiment.rules import Rounds, RuleSettings, Weights
from common.experiment.tables import Count, Positive

HIDDEN: Final = "generator_hidden"  # FedGen's vectors
FEATURES: Final = "generator_features"
LABEL_COUNTS: Final = "label_counts"


class FedDF(RuleSettings):
    """One model: the mean of the uploads, distilled from their ensemble on the node's samples."""

    step_models = 1.0

    name: Literal["feddf"] = "feddf"  # the rule
    weights: Weights = "data"  # of the mean from which the student starts: shares of the samples, or 1/K
    steps: Rounds = 500  # of Adam at most; 0 is FedAvg
    patience: Count = 100  # steps without a smaller divergence, after which it stops
    batch_size: Count = 128  # samples in each step
    learning_rate: Positive = 0.001  # of Adam; a cosine lowers it to 0 over `steps`
    clip_norm: Positive = 5.0  # longest gradient

    @property
    def refines(self) -> bool:
        """Whether there is a step."""
        return self.steps > 0


class FedBE(RuleSettings):
    """One model: the mean of the uploads, distilled from a Bayesian ensemble of models around them."""

    step_models = 1.0

    name: Literal["fedbe"] = "fedbe"  # the rule
    weights: Weights = "data"  # of the mean from which the student starts: shares of the samples, or 1/K
    # How models are sampled: from a Gaussian around the mean step, or as Dirichlet mixtures of the uploads.
    teachers: Literal["gaussian", "dirichlet"] = "gaussian"
    samples: Rounds = 10  # models sampled, beside the mean and the uploads
    spread: Positive = 0.1  # of `gaussian`: factor of the standard deviation
    concentration: Positive = 1.0  # of `dirichlet`
    temperature: Positive = 0.5  # to which the ensemble's mean probabilities are sharpened; 1 leaves them
    epochs: Rounds = 20  # over the node's samples; 0 is FedAvg
    batch_size: Count = 128  # samples in each step
    learning_rate: Positive = 0.001  # of SGD
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # of SGD

    @property
    def refines(self) -> bool:
        """Whether there is an epoch."""
        return self.epochs > 0


class FedLAW(RuleSettings):
    """One model: gamma times a mean of the uploads, both learned on the node's samples and labels."""

    step_models = 1.0

    name: Literal["fedlaw"] = "fedlaw"  # the rule
    weights: Weights = "data"  # from which the weights start: shares of the samples, or 1/K
    epochs: Rounds = 20  # over the node's samples; 0 is FedAvg
    batch_size: Count = 128  # samples in each step
    learning_rate: Positive = 0.01  # of Adam on ln gamma and on the logarithms of the weights

    @property
    def refines(self) -> bool:
        """Whether there is an epoch."""
        return self.epochs > 0


class FedGen(RuleSettings):
    """One model: the mean of the uploads; a generator of features, learned from their heads, goes down with it."""

    reads_samples: ClassVar[bool] = False
    objective = "fedgen"

    name: Literal["fedgen"] = "fedgen"  # the rule
    weights: Weights = "data"  # of the mean: shares of the samples, or 1/K
    noise: Count = 100  # uniform numbers that enter the generator, beside the label
    hidden: Count = 512  # units of its hidden layer
    steps: Rounds = 50  # of Adam after each round; 0: there is no generator
    batch_size: Annotated[int, Field(ge=2)] = 128  # labels in each step
    learning_rate: Positive = 0.0003  # of Adam
    weight_decay: Annotated[float, Field(ge=0)] = 0.01  # of Adam

    @property
    def sends(self) -> Sequence[str]:
        """The generator's two layers."""
        return (HIDDEN, FEATURES)

    @property
    def returns(self) -> Sequence[str]:
        """How many samples of each label a device has."""
        return (LABEL_COUNTS,)

    @property
    def remembers(self) -> bool:
        """Whether there is a generator."""
        return self.refines

    @property
    def refines(self) -> bool:
        """Whether there is a step."""
        return self.steps > 0
