"""FedCross's O(1/t) on a convex loss: the experiment `convex` against the least loss that L-BFGS
finds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.convex import LAMBDA, ROUNDS, convex, gaps, least, loss_on


def test_the_rate_is_the_theorems() -> None:
    """2 / (mu (t + lambda)), t = 5 r: the SGD steps of a device with a sixth of the samples, on
    average.
    """
    experiment = convex()
    decay, steps = experiment.training.weight_decay, 5
    for r in (0, 10, 799):
        assert experiment.learning_rate_in(r) == pytest.approx(2 / (decay * steps * (r + LAMBDA)))
    assert least(loss_on(experiment)) > 0


@pytest.mark.slow
def test_the_gap_falls_as_1_over_t(tmp_path: Path) -> None:
    """gap * (r + lambda) is bounded, here it falls; with a constant rate it grows, as the gap no
    longer falls.
    """
    rounds = ROUNDS[:-1]
    scaled, constant = (
        [
            gap * (r + LAMBDA)
            for r, gap in zip(
                rounds, gaps(tmp_path, seed=1, constant=kind, rounds=rounds), strict=True
            )
        ]
        for kind in (False, True)
    )
    assert max(scaled[2:]) < scaled[1] < scaled[0]
    assert constant[-1] > constant[1] and constant[-1] > 10 * scaled[-1]
