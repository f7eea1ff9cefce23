"""The evaluator, in its own process: the cloud agent never imports torch, and evaluation does not delay its rounds.

The requests on the channel, and the row in shared memory that has the model:

    {"experiment": TEXT, "folder"}         -> {"layout", "partition", "accelerator", "notes", "initial",
                                               "frozen_bytes"}, the model, and behind it so many bytes of frozen
                                              arrays (safetensors)
    {}, and a model                        -> {"score", "loss"}

The data split is written into the folder. Each batch is progress. Instead of a reply there may be an error.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np

from common.experiment.reading import parse
from common.host.memory import frozen_imports
from common.host.subprocess_channel import AgentChannel, error_record
from common.model import tensors


def main() -> None:
    """Serve one cloud agent until it ends."""
    channel = AgentChannel()
    with channel.busy(), frozen_imports():
        from common.learning import splits
        from common.learning.evaluation import ModelTester, accelerator_of  # imports torch: seconds

    request = channel.receive()
    experiment = parse(request["experiment"])
    try:
        with channel.busy():
            partition = splits.keep(experiment, Path(request["folder"]))
            accelerator = accelerator_of(experiment)
            tester = ModelTester(experiment, accelerator=accelerator, watch=channel.moved)
    except Exception as error:  # noqa: BLE001 - the cloud reports it
        channel.send(**error_record(error))
        return
    if tester.parts.frozen:
        tensors.write(frozen := BytesIO(), tester.parts.frozen, {})
    behind = frozen.getvalue() if tester.parts.frozen else b""
    (shared,) = channel.memory.rows(1, tester.layout.row_bytes + len(behind))
    row = shared[: tester.layout.row_bytes]
    row[:], shared[row.size :] = tester.first, np.frombuffer(behind, np.uint8)
    facts = {"partition": partition, "accelerator": str(accelerator), "notes": tester.notes, "initial": tester.initial}
    channel.send(layout=tester.layout.to_json(), frozen_bytes=len(behind), **facts)
    while True:
        channel.receive()
        try:
            result = tester.evaluate(row)
        except Exception as error:  # noqa: BLE001 - the cloud reports it
            channel.send(**error_record(error))
        else:
            channel.send(score=result.score, loss=result.loss)


if __name__ == "__main__":
    main()
