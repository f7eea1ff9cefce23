"""FLTrust's own step: SGD from the model that the children received, on the samples of the node."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch.nn import functional

from fedstrata import NodeSamples, RoundModels
from fedstrata.common.methods.baselines.fltrust import FLTrust


def train(node: NodeSamples, settings: FLTrust, models: RoundModels) -> Mapping[str, Any]:
    """Write the trained model over the mean; return the steps, and the loss before and after."""
    node.load(models.received)
    before = node.loss()
    steps = 0
    for batches in islice(node.passes(settings.batch_size, r=models.r), settings.epochs):
        for places in batches:
            loss = functional.cross_entropy(
                node.logits(places), node.labels.index_select(0, places)
            )
            loss.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for weight in node.weights:
                    if weight.grad is not None:
                        weight.sub_(weight.grad, alpha=settings.learning_rate)
                        weight.grad = None
            steps += 1
    node.store(models.mean)
    return {"steps": steps, "loss_before": before, "loss_after": node.loss()}
