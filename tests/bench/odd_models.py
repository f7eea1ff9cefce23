"""`make bench-odd-models`: users' odd models over a real network, against a plain PyTorch loop.

One broker, one institution and three devices, each a process that stays; each model is one run of two global rounds.
Its final model is compared with the weighted mean of plain loops. What is refused must be one line, with exit code 4.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

from common.errors import InvalidExperiment
from common.experiment.reading import parse, to_toml
from common.experiment.schema import Experiment
from common.host.processes import free_port
from common.learning import datasets, models
from common.model.layout import ModelLayout, Row
from deploy.brokers import broker
from tests.helpers.plain import first_model, plain_training
from tests.test_odd_models import JOINING, REFUSED, TRAINED

DEVICES: Final = tuple(f"device-{i}" for i in range(3))
ROUNDS: Final = 2
ERROR_MOST: Final = 1e-4
PATIENCE_S: Final = 180.0
ALLOWED: Final = "tests.helpers.odd_models"


def experiment(name: str) -> Experiment:
    """Return the run of one model."""
    training = {"batch_size": 31, "learning_rate": 0.02, "momentum": 0.9, "weight_decay": 0.01, "epochs": 1}
    tree = {
        "name": name.lower().replace("_", "-"),
        "rounds": ROUNDS,
        "topology": {"institutions": 1, "devices": 3},
        "model": {"name": f"{ALLOWED}:{name}"},
        "training": training,
        "links": {"check": "off"},
    }
    return parse(tree)


def wanted(lab: Experiment, layout: ModelLayout) -> Row:
    """Return the final model of plain loops and weighted means."""
    row, joins = first_model(lab), lab.model.name.endswith(JOINING)
    for r in range(ROUNDS):
        rows, samples = [], []
        for node in DEVICES:
            out, _ = plain_training(lab, node, row, epochs=1, local_round=r, joins=joins)
            rows.append(layout.floats(out).astype(np.float64))
            samples.append(_samples(lab, node))
        row = rows_to_row(layout, np.average(rows, axis=0, weights=samples), out)
    return row


def rows_to_row(layout: ModelLayout, floats: np.ndarray[tuple[int], np.dtype[np.float64]], counters: Row) -> Row:
    """Return a model of these columns, with the counters of another one."""
    row = counters.copy()
    layout.floats(row)[:] = floats
    return row


def _samples(lab: Experiment, node: str) -> int:
    from common.learning import splits

    return len(splits.split_of(lab, node=node).partitions[lab.tree.devices.index(node)])


def ended(command: list[str], refusal: str | None) -> tuple[int, str, str]:
    """Run a cloud; return its exit code, its output and its last message.

    A cloud waits for devices that refuse a model, and names why: that line, which `refusal` matches, counts as exit 4.
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
                if refusal is not None and "waits for its children" in line and re.search(refusal, line):
                    process.kill()
                    return InvalidExperiment.exit_code, "", line
            code = process.wait()
            output.seek(0)
            return code, output.read(), line
        finally:
            late.cancel()


def main() -> None:
    """Run all models and print a table; the exit code is 1 if one is neither equal nor refused."""
    table, wrong = Table("model", "outcome", "largest difference"), 0
    with tempfile.TemporaryDirectory(prefix="odd-") as root, ExitStack() as stack:
        home, port = Path(root), free_port()
        stack.callback(broker.start(directory=home, port=port).process.kill)
        fedstrata, where = [sys.executable, "-m", "deploy.cli"], ["--broker", f"127.0.0.1:{port}"]
        names = [word for name in DEVICES for word in ("--name", name)]
        for words in (
            ["institution", "--name", "institution-0"],
            ["device", *names, "--parent", "institution-0", "--slots", "1", "--allow", ALLOWED],
        ):
            with (home / f"{words[0]}.log").open("w") as log:
                stack.callback(subprocess.Popen([*fedstrata, *words, *where], stdout=log, stderr=log).kill)
        for name in (*TRAINED, *REFUSED):
            lab, file = experiment(name), home / f"{name}.toml"
            file.write_text(to_toml(lab))
            words = ["cloud", str(file), "--runs", str(home / name), "--format", "json", *where]
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
            print(name, "right" if right else "WRONG", line if not right else "", file=sys.stderr, flush=True)
    Console(width=160).print(table)
    print(f"{len(TRAINED) + len(REFUSED) - wrong} of {len(TRAINED) + len(REFUSED)} equal a plain loop or are refused")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
