"""The evaluator: a process of its own, so that torch never enters the cloud agent and accuracy is off the clock.

It speaks over its standard input and output: a line of JSON each way, followed by `bytes` raw bytes of a row. Its one
argument is the run's folder, where it leaves the split of the data.
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
    """Serve one cloud agent until its end of the pipe closes."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not end up among the answers
    requests = os.fdopen(0, "rb")
    try:
        experiment = parse(requests.readline())
        try:
            partition = splits.keep(experiment, Path(sys.argv[1]))
            tester = ModelTester(experiment)
        except InvalidExperiment as error:
            _answer(answers, {"invalid": error.parts})
            return
        layout, row = tester.layout, tester.first
        _answer(answers, {"layout": layout.to_json(), "bytes": layout.row_bytes, "partition": partition}, row)
        while line := requests.readline():
            if requests.readinto(row.data) != layout.row_bytes:
                return
            result = tester.evaluate(row)
            _answer(answers, {**json.loads(line), "accuracy": result.accuracy, "loss": result.loss})
    except (BrokenPipeError, KeyboardInterrupt):
        pass  # the agent is gone


def _answer(answers: BinaryIO, facts: dict[str, object], row: Row | None = None) -> None:
    answers.write(json.dumps(facts).encode() + b"\n")
    if row is not None:
        answers.write(row.data)
    answers.flush()


if __name__ == "__main__":
    main()
