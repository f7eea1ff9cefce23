"""The evaluator, in its own process: the cloud agent never imports torch, and evaluation does not delay its rounds.

Protocol over standard input and output: one line of JSON in each direction, followed by `bytes` raw bytes of a flat
model. The argument is the run's folder, where the process writes the data split.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import BinaryIO

from common.errors import InvalidExperiment
from common.experiment.reading import parse
from common.learning import splits
from common.learning.evaluation import ModelTester
from common.model.layout import Row


def main() -> None:
    """Serve one cloud agent until it closes its end of the pipe."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps the output of libraries out of the replies
    requests = os.fdopen(0, "rb")
    try:
        experiment = parse(requests.readline())
        try:
            partition = splits.keep(experiment, Path(sys.argv[1]))
            tester = ModelTester(experiment)
        except InvalidExperiment as error:
            _send(replies, {"invalid": error.parts})
            return
        layout, row = tester.layout, tester.first
        _send(replies, {"layout": layout.to_json(), "bytes": layout.row_bytes, "partition": partition}, row)
        while line := requests.readline():
            if requests.readinto(row.data) != layout.row_bytes:
                return
            result = tester.evaluate(row)
            _send(replies, {**json.loads(line), "accuracy": result.accuracy, "loss": result.loss})
    except (BrokenPipeError, KeyboardInterrupt):
        pass  # the agent is gone


def _send(replies: BinaryIO, facts: dict[str, object], row: Row | None = None) -> None:
    replies.write(json.dumps(facts).encode() + b"\n")
    if row is not None:
        replies.write(row.data)
    replies.flush()


if __name__ == "__main__":
    main()
