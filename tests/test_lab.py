"""Whole labs as a user starts them: one command, and separate processes, with the same model at the
end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from fedstrata.common.experiment.reading import load
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.learning import models
from fedstrata.common.learning.inputs import Inputs
from fedstrata.common.model.codecs import codec_of
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.simulation.hardware import NullWorkload
from tests.helpers import direct
from tests.helpers.commands import (
    DEMO,
    PATIENCE_S,
    command,
    null_model,
    run_lab,
    sets,
    table,
    tensors,
)
from tests.helpers.examples import slow
from tests.helpers.null_lab import MODEL_BYTES
from tests.helpers.plain import first_model, trained, trainer_of
from tests.simulation.outcome import model_digest

SMALL = (
    "topology.institutions=2",
    "topology.devices=4",
    "rounds=2",
    "institution.rounds=2",
    "training.batch_size=50",
)
BOTH_TIERS = (
    'cloud.aggregation={name="fedcross", on_new_model="recentre"}',
    'institution.aggregation={name="fedmr"}',
)


def coding(*, up: str, down: str) -> tuple[str, ...]:
    return tuple(
        f"transfer.{tier}.{way}={name}"
        for tier in ("wan", "lan")
        for way, name in (("up", up), ("down", down))
    )


LOSSY = coding(up="delta+int8", down="fp16")
LOSSLESS = coding(up="delta+fp32+zstd", down="fp32+zstd")

Model = Mapping[str, npt.NDArray[np.float32]]


def run_roles(
    runs: Path, address: str, *pairs: str, devices: list[list[str]], null: bool = False
) -> Path:
    """Run the demo as separate processes, devices grouped into processes as given, and return its
    folder.
    """
    tree = load(DEMO, pairs).tree
    with ExitStack() as stack:

        def start(*arguments: str | Path) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                command(*arguments, "--broker", address, null=null),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        processes = [start("cloud", DEMO, "--runs", runs, *sets(*pairs))]
        processes += [start("institution", "--name", name) for name in reversed(tree.aggregators)]
        for group in devices:
            words = [
                word for name in group for word in ("--name", name, "--parent", tree.parent(name))
            ]
            processes.append(start("device", *words, "--slots", "1"))
        for process in processes:
            _, errors = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, errors.decode()
    (folder,) = runs.iterdir()
    return folder


def run_direct(root: Path, *pairs: str) -> Path:
    return direct.run_direct(root, load(DEMO, pairs))


def model_of(folder: Path) -> Model:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a lab that trains, by `fedstrata run`."""
    return run_lab(DEMO, tmp_path_factory.mktemp("runs"), *SMALL, *BOTH_TIERS)


@pytest.fixture(scope="module")
def null_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a lab that computes nothing, by `fedstrata run`."""
    return run_lab(DEMO, tmp_path_factory.mktemp("runs"), *SMALL, *BOTH_TIERS, null=True)


@pytest.fixture(scope="module")
def null_reference() -> str:
    """Return the digest of the final model of a lab that computes nothing."""
    return null_model(load(DEMO, SMALL))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with broker.start(directory=tmp_path_factory.mktemp("broker")) as served:
        yield f"{served.host}:{served.port}"


@pytest.fixture(scope="module")
def coded(address: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of separate processes with lossy codecs, whose models travel in chunks.

    Institutions and devices come in another order than in the experiment.
    """
    pairs = (*SMALL, *LOSSY, "transfer.inline_bytes=0", "transfer.chunk_bytes=32768")
    devices = [["device-3", "device-0"], ["device-2", "device-1"]]
    return run_roles(tmp_path_factory.mktemp("runs"), address, *pairs, devices=devices, null=True)


@pytest.mark.slow
def test_separate_processes_give_the_same_model_bit_for_bit(
    reference: Path, address: str, tmp_path: Path
) -> None:
    # `fedstrata run` has worker processes where there are several cores; with one slot devices
    # train in their own.
    devices = [["device-3", "device-0", "device-2", "device-1"]]
    folder = run_roles(tmp_path, address, *SMALL, *BOTH_TIERS, devices=devices)
    assert tensors(folder) == tensors(reference)


@pytest.mark.slow
def test_a_lab_without_a_network_gives_the_same_model_bit_for_bit(
    reference: Path, tmp_path: Path
) -> None:
    assert_direct_equals(reference, run_direct(tmp_path, *SMALL, *BOTH_TIERS))
    manifest, split = (
        json.loads((reference / name).read_text()) for name in ("manifest.json", "partition.json")
    )
    assert manifest["partition"] == split["digest"] and (reference / "partition.npz").exists()


def assert_direct_equals(network: Path, direct: Path) -> None:
    assert tensors(direct) == tensors(network)
    reported = [f"{name}_bytes" for name in ("wan_up", "wan_down", "lan_up", "lan_down")]
    for one, other in zip(table(network / "rounds.csv"), table(direct / "rounds.csv"), strict=True):
        kept = [key for key in one if not key.endswith("_s") and key not in reported]
        assert {key: one[key] for key in kept} == {key: other[key] for key in kept}
        # messages have topics besides
        assert all(0 < int(other[key]) < int(one[key]) for key in reported)
    payloads = [
        {
            (row["from"], row["to"]): row["payload_bytes"]
            for row in table(folder / "links.csv")
            if row["kind"] == "model"
        }
        for folder in (network, direct)
    ]
    assert payloads[0] == payloads[1]


@pytest.mark.slow
def test_lossy_codecs_give_the_same_model_wherever_the_roles_run_in_any_order(coded: Path) -> None:
    # In chunks, which the institutions pass on as they come; in virtual time the models travel
    # inside the messages.
    assert model_digest(coded.parent) == null_model(load(DEMO, (*SMALL, *LOSSY)))


@pytest.mark.slow
def test_links_csv_counts_models_as_they_travel(coded: Path, null_reference: str) -> None:
    layout = NullWorkload(MODEL_BYTES).layout
    up, down = codec_of("delta+int8").size(layout), codec_of("fp16").size(layout)
    links = [row for row in table(coded / "links.csv") if row["kind"] == "model"]
    assert len(links) == 2 * (2 + 4)
    for row in links:
        upward = row["to"] == "cloud" or row["from"].startswith("device")
        global_rounds = 2 if "cloud" in (row["from"], row["to"]) else 4
        assert int(row["payload_bytes"]) == global_rounds * (up if upward else down), row
    manifest = json.loads((coded / "manifest.json").read_text())
    assert manifest["model_bytes"] == layout.row_bytes
    coded_up = {"name": "delta+int8", "feedback": False}
    assert manifest["codecs"] == {tier: {"up": coded_up, "down": "fp16"} for tier in ("wan", "lan")}
    assert model_digest(coded.parent) != null_reference


def test_lossless_codecs_change_no_bit(null_reference: str) -> None:
    assert null_model(load(DEMO, (*SMALL, *LOSSLESS))) == null_reference


@pytest.mark.slow
def test_neither_the_embedded_broker_nor_an_emulated_slower_machine_changes_the_model(
    tmp_path: Path,
) -> None:
    pairs = ("topology.institutions=1", "topology.devices=2", "rounds=1", "institution.rounds=2")
    slower = "hardware.of.device-1={ slowdown = 2.0, overhead_s = 0.4 }"
    folder = run_lab(
        DEMO, tmp_path, *pairs, slower, null=True, env={"FEDSTRATA_BROKER_KIND": "embedded"}
    )
    assert model_digest(folder.parent) == null_model(load(DEMO, pairs))
    quick, slow = table(folder / "devices.csv")
    assert float(quick["pause_s"]) == 0.0
    # Two rounds; a wait for the process's one slot is part of the slower machine's time.
    least = 2 * 0.4 + float(slow["train_s"]) - float(slow["wait_s"])
    assert float(slow["pause_s"]) >= least - 0.2
    (row,) = table(folder / "rounds.csv")
    assert float(row["elapsed_s"]) >= 2 * (0.4 + float(slow["train_s"]))


def two_layer_fedavg(experiment: Experiment) -> npt.NDArray[np.float64]:
    """Return the float columns of two-layer FedAvg over all devices, in one process and in float64."""
    row, trainers = (
        first_model(experiment),
        [trainer_of(experiment, name) for name in experiment.tree.devices],
    )
    layout = trainers[0].layout
    for global_round in range(experiment.rounds):
        total = np.zeros(layout.columns)
        for trainer in trainers:
            out, _ = trained(
                trainer, row, epochs=experiment.training.epochs, local_round=global_round
            )
            total += trainer.samples * layout.floats(out).astype(np.float64)
        layout.floats(row)[:] = total / sum(trainer.samples for trainer in trainers)
    return layout.floats(row).astype(np.float64)


LONGER = "rounds=4 training.batch_size=2000 training.momentum=0.0"


@pytest.mark.parametrize("size", slow(["rounds=1", LONGER], but=["rounds=1"]))
def test_three_layers_with_one_local_round_equal_two_layer_fedavg(
    size: str, tmp_path: Path
) -> None:
    # Many small steps of SGD enlarge the rounding of the institutions' means a hundredfold within
    # three global rounds; so either one global round of small steps, or several of one large step.
    pairs = (*SMALL, "institution.rounds=1", 'cloud.epoch_control={name="fixed"}', *size.split())
    model = model_of(run_direct(tmp_path, *pairs))
    experiment = load(DEMO, pairs)
    layout = models.layout_of(
        models.build(experiment.model.name, experiment.seed, inputs=Inputs((1, 8, 8), 10))
    )
    row = layout.empty()
    layout.flatten(model, row)
    np.testing.assert_allclose(layout.floats(row), two_layer_fedavg(experiment), rtol=0, atol=1e-6)


def test_a_run_leaves_its_folder(null_run: Path) -> None:
    names = {path.name for path in null_run.iterdir()}
    assert names >= {
        "experiment.toml",
        "manifest.json",
        "rounds.csv",
        "links.csv",
        "devices.csv",
        "events.jsonl",
        "checkpoints",
        "model.safetensors",
        "logs",
    }
    experiment = load(null_run / "experiment.toml")
    assert experiment == load(DEMO, (*SMALL, *BOTH_TIERS))
    manifest = json.loads((null_run / "manifest.json").read_text())
    assert manifest["experiment_digest"] == experiment.digest
    assert manifest["packages"]["aiomqtt"]
    assert manifest["links"]["enforce"] == "bucket"
    nodes = ["institution-0", "institution-1", *(f"device-{i}" for i in range(4))]
    assert manifest["links"]["of"] == {
        name: experiment.link(name).model_dump(exclude={"trace"}) for name in nodes
    }
    rows = table(null_run / "rounds.csv")
    assert [int(row["global_round"]) for row in rows] == [1, 2]
    for row in rows:
        assert 0 <= float(row["accuracy"]) <= 1
        assert {int(row[f"epochs_institution-{m}"]) for m in (0, 1)} <= {1, 2, 3, 4}
    # A model down and one up for each link: WAN once a global round, LAN once a local round.
    size = sum(entry.nbytes for entry in model_of(null_run).values())
    for row in rows:
        for column, models_moved in (
            ("wan_up", 2),
            ("wan_down", 2),
            ("lan_up", 8),
            ("lan_down", 8),
        ):
            assert models_moved * size <= int(row[f"{column}_bytes"]) < models_moved * size * 1.1
    devices = table(null_run / "devices.csv")
    assert len(devices) == 2 * 4
    assert sum(int(d["sgd_steps"]) for d in devices) == sum(int(row["sgd_steps"]) for row in rows)


def test_the_seconds_of_the_phases_add_up(null_run: Path) -> None:
    rows = table(null_run / "rounds.csv")
    phases = (
        "record_s",
        "dispatch_s",
        "train_s",
        "wait_s",
        "collect_s",
        "aggregate_s",
        "evaluate_s",
    )
    total = sum(float(row[phase]) for row in rows for phase in phases)
    assert total == pytest.approx(float(rows[-1]["elapsed_s"]), rel=0.01)


def test_links_csv_counts_whole_models(null_run: Path) -> None:
    size = sum(entry.nbytes for entry in model_of(null_run).values())
    links = table(null_run / "links.csv")
    moved = {
        (row["from"], row["to"]): int(row["payload_bytes"])
        for row in links
        if row["kind"] == "model"
    }
    assert len(moved) == 2 * (2 + 4)
    for (source, target), payload in moved.items():
        global_rounds = 2 if "cloud" in (source, target) else 4
        assert payload == global_rounds * size, (source, target)


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's")
def test_links_csv_shows_what_the_kernels_carried(null_run: Path) -> None:
    lines = table(null_run / "links.csv")
    links = [row for row in lines if row["kind"] == "all"]
    assert len(links) == 2 * (2 + 4)
    for row in links:
        # What MQTT needs besides: login, subscriptions, presences, an acknowledgement for each
        # control message.
        assert (
            0 <= int(row["wire_bytes"]) - int(row["probe_bytes"]) - int(row["message_bytes"]) < 4000
        ), row
        assert float(row["measured_mbit"]) > 0
        assert (
            0 < float(row["overhead_percent"]) < 10
            and float(row["rtt_ms"]) >= float(row["rtt_min_ms"]) > 0
        ), row
    brokers = {
        (row["from"], row["to"]): int(row["wire_bytes"]) for row in lines if row["kind"] == "broker"
    }
    parents = ("cloud", "institution-0", "institution-1")
    assert set(brokers) == {
        pair for name in parents for pair in ((name, "broker"), ("broker", name))
    }
    for name in parents:  # downward a model that all get crosses the parent's connection once
        mine = [row for row in links if row["to"] == name and row["tier"] == _tier(name)]
        up = sum(int(row["message_bytes"]) + int(row["probe_bytes"]) for row in mine)
        assert up <= brokers["broker", name] < up + 10_000
    assert (
        json.loads((null_run / "manifest.json").read_text())["wire_bytes"]
        == "counted by the kernels (TCP_INFO)"
    )


def _tier(parent: str) -> str:
    return "wan" if parent == "cloud" else "lan"
