"""The refiner, in a process of its own: the agents of cloud and institutions never import torch.

The requests on the channel, and the rows in shared memory:

    {"experiment": TEXT, "node", "partition"}      -> {"facts": {}}
    {"r", "layout", "weights": [K]}, 2 + K rows    -> {"moves"} ..., then {"facts"}, and the first row

The rows are the mean, the model that the children received, and K uploads. An error takes the place of the facts, and
ends the process.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from common.errors import FedstrataError, InvalidExperiment
from common.experiment.reading import parse
from common.experiment.schema import Experiment
from common.host.memory import frozen_imports
from common.host.subprocess_channel import AgentChannel, error_record
from common.model.layout import ModelLayout
from common.model.refinement import RoundModels

REPORT_S: Final = 0.5  # between two reports of progress


def main() -> None:
    """Serve one node's agent until it ends."""
    channel = AgentChannel()
    request = channel.receive()
    experiment, node = parse(request["experiment"]), request["node"]
    reported = time.monotonic()

    def watch() -> None:
        nonlocal reported
        if time.monotonic() >= reported + REPORT_S:
            reported = time.monotonic()
            channel.send(moves=True)

    try:
        try:
            with frozen_imports():
                from common.learning.refiner import NodeRefiner  # imports torch: seconds
        except ModuleNotFoundError as error:
            raise _missing(experiment, node, str(error.name)) from None
        refiner = NodeRefiner(experiment, node, partition=request["partition"], watch=watch)
        channel.send(facts={})
        while True:
            request = channel.receive()
            weights_K, layout = np.array(request["weights"]), ModelLayout.from_json(request["layout"])
            mean, received, *uploads = channel.memory.rows(2 + len(weights_K), layout.row_bytes)
            channel.send(facts=refiner.refine(RoundModels(request["r"], layout, mean, received, uploads, weights_K)))
    except FedstrataError as error:
        channel.send(**error_record(error))


def _missing(experiment: Experiment, node: str, package: str) -> InvalidExperiment:
    key = experiment.keyed_tiers()[experiment.tree.depth(node)][0]
    name = experiment.tier_below(node).aggregation.name
    problem = f"{package} is not installed where {node} runs"
    return InvalidExperiment(f"{key}.aggregation.name", name, problem, "Install fedstrata[learning] there.")


if __name__ == "__main__":
    main()
