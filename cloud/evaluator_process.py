"""The evaluator, in its own process: the cloud agent never imports torch, and evaluation does not
delay its rounds.

With a trainer of the user's own this process does not import it either.

The requests on the channel, and the row that has the model, of the cloud if it has a place, else in
shared memory:

    {"experiment": TEXT, "folder"}         -> {"layout", "frozen_bytes", and the rest of
                                              `Beginning`}, the model, and behind it so many bytes
                                              of frozen arrays (safetensors)
    {"global_round", "place"}              -> {"score", "loss", "more", "attacks"}

The data split is written into the folder. Each batch is progress; with a trainer of the user's own,
the use of a core is. Instead of a reply there may be an error.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedstrata.common.experiment.reading import parse
from fedstrata.common.host.memory import frozen_imports, release_freed
from fedstrata.common.model import tensors
from fedstrata.common.processes.shared_rows import row_at
from fedstrata.common.processes.subprocess_channel import AgentChannel, error_record
from fedstrata.common.training.array_trainer import TrainerTester

if TYPE_CHECKING:
    from fedstrata.common.learning.evaluation import Evaluation, ModelTester
    from fedstrata.common.training.array_trainer import Scored


def main() -> None:
    """Serve one cloud agent until it ends."""
    channel = AgentChannel()
    request = channel.receive()
    experiment = parse(request["experiment"])
    facts: dict[str, object]
    tester: ModelTester | TrainerTester
    try:
        with channel.busy():
            if experiment.training.trainer.learns_module:
                with frozen_imports():
                    from fedstrata.common.learning import splits
                    from fedstrata.common.learning.evaluation import (  # imports torch: seconds
                        ModelTester,
                        accelerator_of,
                    )

                partition = splits.keep(experiment, Path(request["folder"]))
                accelerator = accelerator_of(experiment)
                tester = ModelTester(experiment, accelerator=accelerator, watch=channel.progressed)
                facts = {"partition": partition, "accelerator": str(accelerator), "evaluates": True}
            else:
                tester = TrainerTester(experiment)
                facts = {"partition": "", "accelerator": "cpu", "evaluates": tester.evaluates}
    except Exception as error:  # noqa: BLE001 - the cloud reports it
        channel.send(**error_record(error))
        return
    facts |= {
        "frozen_bytes": _give_first(tester, channel),
        "notes": tester.notes,
        "initial": tester.initial,
    }
    release_freed()
    row_bytes = tester.layout.row_bytes
    channel.send(layout=tester.layout.to_json(), **facts)
    while True:
        request = channel.receive()
        result: Evaluation | Scored | None
        try:
            if place := request["place"]:
                row = row_at(place, row_bytes, writable=False)
            else:
                (row,) = channel.memory.rows(1, row_bytes)
            if isinstance(tester, TrainerTester):
                with channel.busy():
                    result = tester.evaluate(row, request["global_round"])
            else:
                result = tester.evaluate(row)
            del row
        except Exception as error:  # noqa: BLE001 - the cloud reports it
            channel.send(**error_record(error))
        else:
            facts = {}
            if result is not None:
                facts = {
                    "score": result.score,
                    "loss": result.loss,
                    "more": result.more,
                    "attacks": result.attacks,
                }
            channel.send(**facts)


def _give_first(tester: ModelTester | TrainerTester, channel: AgentChannel) -> int:
    """Move the first model to the shared memory, and the frozen arrays behind it; return the bytes
    of these.
    """
    behind = b""
    if tester.frozen:
        tensors.write(frozen := BytesIO(), tester.frozen, {})
        behind = frozen.getvalue()
    row_bytes = tester.layout.row_bytes
    (shared,) = channel.memory.rows(1, row_bytes + len(behind))
    shared[:row_bytes] = tester.first
    shared[row_bytes:] = np.frombuffer(behind, np.uint8)
    del tester.first
    return len(behind)


if __name__ == "__main__":
    main()
