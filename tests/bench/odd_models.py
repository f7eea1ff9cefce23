"""`make bench NAME=odd_models`: users' odd models over a real network, against a plain PyTorch
loop.

One broker, one institution and three devices, each a process that stays; each model is one run of
two global rounds. Its final model is compared with the weighted mean of plain loops. What is
refused must be one line, with exit code 4. With `--recorded` the experiments have
`training.recorded = true`. `--only NAME` takes some of the models.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.host.processes import free_port
from fedstrata.common.learning import datasets, models
from fedstrata.common.model.layout import ModelLayout, Row
from fedstrata.deploy.brokers import broker
from tests import test_odd_models
from tests.helpers.plain import first_model, plain_training

DEVICES: Final = tuple(f"device-{i}" for i in range(3))
ROUNDS: Final = 2
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


def experiment(name: str, *, recorded: bool | str) -> Experiment:
    """Return the run of one model."""
    training = {
        "batch_size": 31,
        "learning_rate": 0.02,
        "momentum": 0.9,
        "weight_decay": 0.01,
        "epochs": 1,
    }
    training |= {"recorded": recorded}
    tree = {
        "name": name.partition(":")[2].lower().replace("_", "-"),
        "rounds": ROUNDS,
        "topology": {"institutions": 1, "devices": 3},
        "model": {"name": name},
        "training": training,
        "links": {"check": "off"},
    }
    return parse(tree)


def wanted(lab: Experiment, layout: ModelLayout) -> Row:
    """Return the final model of plain loops and weighted means."""
    row, joins = first_model(lab), lab.model.name.endswith(test_odd_models.JOINING)
    for r in range(ROUNDS):
        rows, samples = [], []
        for node in DEVICES:
            out, _ = plain_training(lab, node, row, epochs=1, local_round=r, joins=joins)
            rows.append(layout.floats(out).astype(np.float64))
            samples.append(_samples(lab, node))
        row = rows_to_row(layout, np.average(rows, axis=0, weights=samples), out)
    return row


def rows_to_row(
    layout: ModelLayout, floats: np.ndarray[tuple[int], np.dtype[np.float64]], counters: Row
) -> Row:
    """Return a model of these columns, with the counters of another one."""
    row = counters.copy()
    layout.floats(row)[:] = floats
    return row


def _samples(lab: Experiment, node: str) -> int:
    from fedstrata.common.learning import splits

    return len(splits.split_of(lab, node=node).partitions[lab.tree.devices.index(node)])


def ended(command: list[str], refusal: str | None) -> tuple[int, str, str]:
    """Run a cloud; return its exit code, its output and its last message.

    A cloud waits for devices that refuse a model, and names why: that line, which `refusal`
    matches, counts as exit 4.
    """
    line = ""
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True) as process,
    ):
        late = threading.Timer(PATIENCE_S, process.kill)
        late.start()
        assert process.stderr is not None
        try:
            for line in map(str.strip, process.stderr):
                if (
                    refusal is not None
                    and "waits for its children" in line
                    and re.search(refusal, line)
                ):
                    process.kill()
                    return InvalidExperiment.exit_code, "", line
            code = process.wait()
            output.seek(0)
            return code, output.read(), line
        finally:
            late.cancel()


def main() -> None:
    """Run all models and print a table; the exit code is 1 if one is neither equal nor refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--recorded", action="store_true", help="ask for recorded steps of all models"
    )
    parser.add_argument("--only", action="append", help="models by name")
    chosen = parser.parse_args()
    table, wrong = Table("model", "outcome", "largest difference"), 0
    models_here = [
        name
        for name in (*TRAINED, *REFUSED)
        if not chosen.only or name.partition(":")[2] in chosen.only
    ]
    with tempfile.TemporaryDirectory(prefix="odd-") as root, ExitStack() as stack:
        home, port = Path(root), free_port()
        stack.callback(broker.start(directory=home, port=port).process.kill)
        fedstrata, where = [sys.executable, "-m", "fedstrata"], ["--broker", f"127.0.0.1:{port}"]
        names = [word for name in DEVICES for word in ("--name", name)]
        allowed = [word for name in ALLOWED for word in ("--allow", name)]
        for words in (
            ["institution", "--name", "institution-0"],
            ["device", *names, "--parent", "institution-0", "--slots", "1", *allowed],
        ):
            with (home / f"{words[0]}.log").open("w") as log:
                stack.callback(
                    subprocess.Popen([*fedstrata, *words, *where], stdout=log, stderr=log).kill
                )
        for name in models_here:
            lab = experiment(name, recorded=chosen.recorded or "auto")
            file = home / f"{lab.name}.toml"
            file.write_text(to_toml(lab))
            words = ["cloud", str(file), "--runs", str(home / lab.name), "--format", "json", *where]
            code, output, line = ended([*fedstrata, *words], REFUSED.get(name))
            if code:
                right = name in REFUSED and code == InvalidExperiment.exit_code
                table.add_row(name, f"{code}: {line}", "")
            else:
                folder = Path(json.loads(output.splitlines()[0])["folder"])
                layout = models.layout_of(models.anew(lab, inputs=datasets.load(lab.data).inputs))
                row = wanted(lab, layout)
                found = load_file(folder / "model.safetensors")
                apart = max(
                    float(np.abs(found[entry] - value).max(initial=0.0))
                    for entry, value in layout.views(row).items()
                    if value.dtype == np.float32
                )
                right = name in TRAINED and apart <= ERROR_MOST
                table.add_row(name, "trained", f"{apart:.2g}")
            wrong += not right
            print(
                name,
                "right" if right else "WRONG",
                line if not right else "",
                file=sys.stderr,
                flush=True,
            )
    Console(width=160).print(table)
    print(f"{len(models_here) - wrong} of {len(models_here)} equal a plain loop or are refused")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
