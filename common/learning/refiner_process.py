"""The refiner, in a process of its own: the agents of cloud and institutions never import torch.

The requests on the channel, and the rows in shared memory:

    {"experiment": TEXT, "node", "partition", "frozen"}
                                                   -> {"layout"} of its own model, null if it builds
                                                   none
    {"r", "layout", "weights": [K]}, 2 + K rows    -> {"facts"}, and the first row

The rows are the mean, the model that the children received, and K uploads. Each batch is progress.
Instead of a reply there may be an error, which ends the process.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedstrata.common.errors import InvalidExperiment, installing
from fedstrata.common.experiment.reading import parse
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.memory import frozen_imports
from fedstrata.common.model.layout import ModelLayout
from fedstrata.common.model.refinement import RoundModels
from fedstrata.common.processes.subprocess_channel import AgentChannel, error_record


def main() -> None:
    """Serve one node's agent until it ends."""
    channel = AgentChannel()
    request = channel.receive()
    experiment = parse(request["experiment"])
    node = request["node"]
    try:
        with channel.busy():
            try:
                with frozen_imports():
                    # imports torch: seconds
                    from fedstrata.common.learning.refiner import NodeRefiner
            except ModuleNotFoundError as error:
                raise _missing(experiment, node, str(error.name)) from None
            frozen = request["frozen"] and Path(request["frozen"])
            refiner = NodeRefiner(
                experiment,
                node,
                partition=request["partition"],
                frozen=frozen,
                watch=channel.progressed,
            )
        channel.send(layout=refiner.layout and refiner.layout.to_json())
        while True:
            request = channel.receive()
            weights_K = np.array(request["weights"])
            layout = ModelLayout.from_json(request["layout"])
            mean, received, *uploads = channel.memory.rows(2 + len(weights_K), layout.row_bytes)
            channel.send(
                facts=refiner.refine(
                    RoundModels(request["r"], layout, mean, received, uploads, weights_K)
                )
            )
    except Exception as error:  # noqa: BLE001 - the agent passes it on
        channel.send(**error_record(error))


def _missing(experiment: Experiment, node: str, package: str) -> InvalidExperiment:
    tier = experiment.tier_below(node)
    problem = f"{package} is not installed where {node} runs"
    key = f"{experiment.key(tier)}.aggregation.name"
    return InvalidExperiment(
        key, tier.aggregation.name, problem, f"There: {installing('learning')}."
    )


if __name__ == "__main__":
    main()
