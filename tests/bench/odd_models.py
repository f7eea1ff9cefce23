"""`make bench NAME=odd_models`: users' odd models over a real network, against a plain PyTorch
loop.

One broker, one institution and three devices, each a process that stays; each model is one run of
two global rounds. Its final model is compared with the weighted mean of plain loops. What is
refused must be one line, with exit code 4. With `--recorded` the experiments have
`training.recorded = true`. `--only NAME` takes some of the models.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final

import numpy as np
from safetensors.numpy import load_file

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import datasets, models, splits
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.deploy.brokers import broker
from tests import test_odd_models
from tests.bench.running import Table, folder, run, started
from tests.helpers.commands import command
from tests.helpers.plain import first_model, plain_training

DEVICES: Final = tuple(f"device-{i}" for i in range(3))
ROUNDS: Final = 2
LAB: Final = f"""
rounds = {ROUNDS}
topology = {{ institutions = 1, devices = 3 }}
links = {{ check = "off" }}
[training]
batch_size = 31
learning_rate = 0.02
momentum = 0.9
weight_decay = 0.01
epochs = 1
"""
ERROR_MOST: Final = 1e-4
# a run takes a minute, and a process that shares its core with others has a tenth of it
PATIENCE_S: Final = 900.0
ALLOWED: Final = ("tests.helpers.odd_models", "tests.helpers.rare_models")
# it takes a gradient as it is evaluated, which has none: one line names it
IN_EVALUATION: Final = "GradientInside"
REFUSED: Final[Mapping[str, str]] = {
    **{
        f"{test_odd_models.PLACES[name]}:{name}": problem
        for name, problem in test_odd_models.REFUSED.items()
    },
    f"{ALLOWED[1]}:{IN_EVALUATION}": "does not require grad",
}
TRAINED: Final = [
    f"{test_odd_models.PLACES[name]}:{name}"
    for name in test_odd_models.TRAINED
    if name != IN_EVALUATION
]


def experiment(name: str, *, recorded: bool) -> Experiment:
    """Return the run of one model."""
    own = {"name": name.partition(":")[2].lower().replace("_", "-"), "model": {"name": name}}
    tree = tomllib.loads(LAB) | own
    if recorded:
        tree["training"]["recorded"] = True
    return parse(tree)


def wanted(lab: Experiment, layout: ModelLayout) -> Row:
    """Return the final model of plain loops and weighted means."""
    row = first_model(lab)
    joins = lab.model.name.endswith(test_odd_models.JOINING)
    samples = [len(splits.split_of(lab, node=node).partitions[i]) for i, node in enumerate(DEVICES)]
    for r in range(ROUNDS):
        uploads = []
        for node in DEVICES:
            out, _ = plain_training(lab, node, row, epochs=1, local_round=r, joins=joins)
            uploads.append(layout.floats(out).astype(np.float64))
        row = out.copy()  # with its counters
        layout.floats(row)[:] = np.average(uploads, axis=0, weights=samples)
    return row


def ended(words: list[str], refusal: str | None) -> tuple[int, str, str]:
    """Run a cloud; return its exit code, its output and its last message.

    A cloud waits for devices that refuse a model, and names why: that line, which `refusal`
    matches, counts as exit 4.
    """
    line = ""
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(words, stdout=output, stderr=subprocess.PIPE, text=True) as process,
    ):
        late = threading.Timer(PATIENCE_S, process.kill)
        late.start()
        assert process.stderr is not None
        try:
            for line in map(str.strip, process.stderr):
                waits = refusal is not None and "waits for its children" in line
                if waits and re.search(str(refusal), line):
                    process.kill()
                    return InvalidExperiment.exit_code, "", line
            code = process.wait()
            output.seek(0)
            return code, output.read(), line
        finally:
            late.cancel()


def play(name: str, home: Path, broker_: list[str], *, recorded: bool) -> tuple[bool, str, str]:
    """Run a model; return whether it became what it should, what, and the largest difference."""
    lab = experiment(name, recorded=recorded)
    file = home / f"{lab.name}.toml"
    file.write_text(to_toml(lab))
    words = command(
        "cloud", file, "--runs", home / lab.name, "--format", "json", *broker_, stay=True
    )
    code, output, line = ended(words, REFUSED.get(name))
    if code:
        return name in REFUSED and code == InvalidExperiment.exit_code, f"{code}: {line}", ""
    found = load_file(Path(json.loads(output.splitlines()[0])["folder"]) / "model.safetensors")
    layout = models.layout_of(models.anew(lab, inputs=datasets.load(lab.data).inputs))
    apart = max(
        float(np.abs(found[entry] - value).max(initial=0.0))
        for entry, value in layout.views(wanted(lab, layout)).items()
        if value.dtype == np.float32
    )
    return name in TRAINED and apart <= ERROR_MOST, "trained", f"{apart:.2g}"


def main(
    *,
    recorded: Annotated[bool, "ask for recorded steps of all models"] = False,
    only: Annotated[Sequence[str], "models by name"] = (),
) -> bool:
    """Run all models and print a table; return whether one is neither equal nor refused."""
    table = Table("model", "outcome", "largest difference")
    chosen = [name for name in (*TRAINED, *REFUSED) if not only or name.partition(":")[2] in only]
    right = 0
    with folder() as home, ExitStack() as stack:
        port = stack.enter_context(broker.start(directory=home)).port
        where = ["--broker", f"127.0.0.1:{port}"]
        names = [word for name in DEVICES for word in ("--name", name)]
        allowed = [word for name in ALLOWED for word in ("--allow", name)]
        for words in (
            ["institution", "--name", "institution-0"],
            ["device", *names, "--parent", "institution-0", "--slots", "1", *allowed],
        ):
            role = command(*words, *where, stay=True)
            stack.enter_context(started(role, home / f"{words[0]}.log"))
        for name in chosen:
            good, *cells = play(name, home, where, recorded=recorded)
            table.add(name, *cells)
            if not good:
                print(name, "WRONG", *cells, file=sys.stderr, flush=True)
            right += good
    print(f"{right} of {len(chosen)} equal a plain loop or are refused")
    return right < len(chosen)


if __name__ == "__main__":
    run(main)
