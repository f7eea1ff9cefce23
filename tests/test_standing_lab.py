"""A lab of processes that stays, run after run: the models and the bytes are those of one process."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from fedstrata.common.experiment.reading import load
from fedstrata.deploy.brokers import broker
from tests.helpers.commands import (
    DEMO,
    PATIENCE_S,
    command,
    fedstrata,
    folder_in,
    sets,
    table,
    tensors,
)
from tests.helpers.direct import run_direct

pytestmark = pytest.mark.usefixtures("warm")

TREE: Final = {
    "institution-0": ["device-0", "device-1", "device-2"],
    "institution-1": ["device-3", "device-4", "device-5"],
}
SMALL: Final = (
    "rounds=2",
    "topology.institutions=2",
    "topology.devices=6",
    "institution.rounds=2",
    "model.name='mlp_digits'",
    "training.batch_size=100",
)
OF_DEVICES: Final = "clip_norm=0.5, delta=1e-5, noise='seeded'"
RUNS: Final[Mapping[str, Sequence[str]]] = {
    "control variates": [
        *SMALL,
        "training.objective.name='scaffold'",
        "institution.aggregation.name='scaffold'",
    ],
    "a generator": [
        *SMALL,
        "training.objective.name='fedgen'",
        "institution.aggregation={name='fedgen', noise=8, hidden=16, steps=5, batch_size=16}",
    ],
    "parts": [
        "rounds=2",
        "topology.institutions=2",
        "topology.devices=6",
        "model.frozen=['conv1.*']",
        "model.personal=['fc.*']",
        "evaluation.at='devices'",
    ],
    "refined models": [
        *SMALL,
        "data.node_samples=40",
        "cloud.aggregation.name='fedlaw'",
        "institution.aggregation.name='feddf'",
    ],
    "noise by a parent": [
        *SMALL,
        f"cloud.privacy={{unit='institution', noise_multiplier=0.01, {OF_DEVICES}}}",
        f"institution.privacy={{unit='device', noise_multiplier=0.1, noise_by='parent', {OF_DEVICES}}}",
    ],
    "secure sums": [
        *SMALL,
        "cloud.epoch_control.name='fixed'",
        "cloud.secure={threshold=0.7}",
        "institution.secure={bits=16, neighbours=1}",
    ],
    "noise of samples": [
        *SMALL,
        f"institution.privacy={{unit='sample', noise_multiplier=1.5, {OF_DEVICES}}}",
    ],
}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the broker of two institutions and six devices that wait for runs."""
    with ExitStack() as stack:
        home = tmp_path_factory.mktemp("lab")
        served = stack.enter_context(broker.start(directory=home))
        found = f"{served.host}:{served.port}"
        nodes = [("institution", "--name", name) for name in TREE]
        for parent, devices in TREE.items():
            names = [word for name in devices for word in ("--name", name)]
            nodes.append(("device", "--parent", parent, *names))
        for words in nodes:
            line = command(*words, "--broker", found, "--spool", home / "spool", stay=True)
            node = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(node.wait, PATIENCE_S)
            stack.callback(node.terminate)
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_it_computes_and_sends_what_one_process_does(
    name: str, address: str, tmp_path: Path
) -> None:
    pairs = list(RUNS[name])
    if name == "parts":
        before = run_direct(tmp_path / "before", load(DEMO, ["rounds=1"]))
        pairs.append(f"model.initial='{before / 'model.safetensors'}'")
    done = fedstrata(
        "cloud", DEMO, *sets(*pairs), "--broker", address, "--runs", tmp_path / "lab",
        "--format", "json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lab = folder_in(done.stdout)
    direct = run_direct(tmp_path / "direct", load(DEMO, pairs))
    assert tensors(lab) == tensors(direct)
    assert payloads(lab) == payloads(direct)
    # down each link, once; conv1's and nothing else
    frozen = [row for row in table(lab / "links.csv") if row["kind"] == "frozen"]
    assert len(frozen) == (2 + 6 if name == "parts" else 0)
    assert not any(row["from"].startswith("device") or row["to"] == "cloud" for row in frozen)
    assert all(4 * (16 * 9 + 16) < int(row["payload_bytes"]) < 1000 for row in frozen)


def payloads(run: Path) -> list[tuple[str, ...]]:
    """Return the bytes of models and what travels with them, of each link and kind."""
    keys = ("from", "to", "kind", "payload_bytes")
    rows = (row for row in table(run / "links.csv") if row["kind"] in ("model", "extras"))
    return sorted(tuple(row[key] for key in keys) for row in rows)
