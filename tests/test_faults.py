"""Roles that are killed, interrupted, refused or lied to: what the others do, what a person reads,
what is left.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from paho.mqtt import client as mqtt

from fedstrata.cloud import checkpoint
from fedstrata.cloud.checkpoint import RunState
from fedstrata.cloud.evaluator import Beginning, EvaluationResult
from fedstrata.cloud.global_rounds import GlobalRounds
from fedstrata.cloud.run_folder import RunFolder
from fedstrata.common.accounting.counters import Account
from fedstrata.common.accounting.ledger import Ledger
from fedstrata.common.errors import WireError
from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.common.metrics import Metrics
from fedstrata.common.model.layout import ModelLayout, Row, Section
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import Message, Phase, Progress
from fedstrata.common.runtime.round import NodeContext
from fedstrata.common.storage.spool import Spool
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.brokers.broker import BrokerProcess
from tests.helpers.commands import PATIENCE_S, folder_in, null_model, table, tensors
from tests.helpers.namespaces import VethPair, joined
from tests.helpers.netns import in_namespaces
from tests.helpers.records import a_global_round
from tests.helpers.roles import SMALL, Role, lab_of, task, until
from tests.simulation.outcome import model_digest

pytestmark = pytest.mark.usefixtures("warm")

BRANCH = SMALL | {"topology": {"institutions": 1, "devices": 2}}
DEVICES = [
    ("device-0", "institution-0"),
    ("device-1", "institution-0"),
    ("device-2", "institution-1"),
    ("device-3", "institution-1"),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker.start(directory=tmp_path_factory.mktemp("broker")) as one:
        yield one


def written(folder: Path, tree: Mapping[str, Any]) -> Path:
    """Write an experiment's file."""
    path = folder / "experiment.toml"
    path.write_text(to_toml(parse(tree)))
    return path


@pytest.fixture(scope="module")
def branch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the experiment of one institution and two devices, for labs that are started again and
    again.
    """
    return written(tmp_path_factory.mktemp("experiment"), BRANCH)


class Lab:
    """The roles of one experiment as processes of this test, which compute nothing unless `null` is
    false.
    """

    def __init__(
        self,
        experiment: Path,
        served: BrokerProcess,
        home: Path,
        stack: ExitStack,
        *,
        null: bool = True,
    ) -> None:
        self.address = f"{served.host}:{served.port}"
        self.runs = home / "runs"
        self._experiment = experiment
        self._home = home
        self._stack = stack
        self._count = 0
        self._null = null

    def start(self, *arguments: str | Path) -> Role:
        self._count += 1
        role = Role(
            self._home / f"{self._count}-{arguments[0]}.log",
            *arguments,
            "--broker",
            self.address,
            null=self._null,
        )
        self._stack.callback(role.kill)
        return role

    def cloud(self, resume: Path | None = None) -> Role:
        what = ["--resume", resume] if resume else [self._experiment]
        return self.start("cloud", *what, "--runs", self.runs, "--format", "json")

    def institution(self, name: str) -> Role:
        return self.start("institution", "--name", name)

    def devices(self, *places: int) -> Role:
        words = [
            word for i in places for word in ("--name", DEVICES[i][0], "--parent", DEVICES[i][1])
        ]
        return self.start("device", *words)


class Overheard:
    """All control messages of a broker, in order."""

    def __init__(self, served: BrokerProcess) -> None:
        self._received: list[tuple[topics.Topic, Message]] = []
        self._changed = threading.Condition()
        self._client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
        self._client.on_message = self._on_message
        self._client.connect(served.host, served.port)
        self._client.subscribe([("fs1/lab/+/+/state", 1), ("fs1/lab/+/+/inbox/+", 1)])
        self._client.loop_start()

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def wait_for(self, what: Callable[[topics.Topic, Message], object]) -> None:
        """Wait until a message is received, from now on, for which `what` is true."""
        with self._changed:
            start = len(self._received)
            assert self._changed.wait_for(
                lambda: any(what(*one) for one in self._received[start:]), PATIENCE_S
            )

    def _on_message(self, _client: object, _data: object, message: mqtt.MQTTMessage) -> None:
        try:
            said = topics.parse(message.topic), serialization.decode(message.payload)[1]
        except WireError:
            return
        with self._changed:
            self._received.append(said)
            self._changed.notify_all()


@contextmanager
def overhearing(served: BrokerProcess) -> Iterator[Overheard]:
    one = Overheard(served)
    try:
        yield one
    finally:
        one.close()


def working(device: str) -> Callable[[topics.Topic, Message], bool]:
    """Tell a device's word that it trains, or is about to."""
    return lambda topic, said: (
        isinstance(topic, topics.InboxTopic)
        and topic.sender == device
        and isinstance(said, Progress)
        and said.phase in (Phase.WAITING, Phase.TRAINING)
    )


def assert_bytes_of_one_run(folder: Path, *, lives: int) -> None:
    """Check that restarts lost no model but what a killed process had not reported, and counted
    none twice.
    """
    size = len(tensors(folder))
    lines = table(folder / "links.csv")
    models = {
        (row["from"], row["to"]): int(row["payload_bytes"]) / size
        for row in lines
        if row["kind"] == "model"
    }
    assert len(models) == 2 * (1 + 2)
    for (source, target), count in models.items():
        global_rounds = 3 if "cloud" in (source, target) else 3 * 2
        assert global_rounds - 1 <= count <= global_rounds * lives, (source, target)
    for row in table(folder / "rounds.csv"):
        for column in ("wan_up_bytes", "wan_down_bytes", "lan_up_bytes", "lan_down_bytes"):
            assert 0 <= int(row[column]) < lives * 1.2 * size * 8, column


def test_every_role_killed_once_and_started_again_gives_the_same_model(
    branch: Path, served: BrokerProcess, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        overheard = stack.enter_context(overhearing(served))
        lab = Lab(branch, served, tmp_path, stack)
        cloud, institution, devices = (
            lab.cloud(),
            lab.institution("institution-0"),
            lab.devices(0, 1),
        )

        overheard.wait_for(working("device-0"))
        devices.kill()
        devices = lab.devices(0, 1)

        overheard.wait_for(task("institution-0", 1, 1))
        institution.kill()
        institution = lab.institution("institution-0")

        overheard.wait_for(task("cloud", 2, 0))
        cloud.kill()
        (folder,) = lab.runs.iterdir()
        assert not (folder / "model.safetensors").exists()
        assert [path.stem for path in sorted((folder / "checkpoints").glob("*.safetensors"))][
            -1
        ] == "round-000002"
        cloud = lab.cloud(resume=folder)

        for role in (cloud, institution, devices):
            role.ends(0)
        assert folder_in(cloud.output()) == folder
        assert model_digest(folder.parent) == null_model(parse(BRANCH))
        assert [row["global_round"] for row in table(folder / "rounds.csv")] == ["1", "2", "3"]
        assert all(0.5 <= float(row["accuracy"]) <= 1 for row in table(folder / "rounds.csv"))
        assert_bytes_of_one_run(folder, lives=3)


@pytest.mark.slow
@pytest.mark.timeout(300)  # five processes with torch
@pytest.mark.parametrize(("rule", "killed"), [("fedcross", False), ("fedcda", True)])
def test_two_layers_of_processes_give_the_model_of_a_direct_run(
    rule: str, killed: bool, served: BrokerProcess, tmp_path: Path
) -> None:
    from fedstrata.deploy.local.direct import run_in_process  # torch

    tree = {
        "name": rule,
        "rounds": 4,
        "topology": {"institutions": 0, "devices": 8},
        "model": {"name": "mlp_digits"},
        "data": {"partition": "dirichlet"},
        "training": {"epochs": 40},
        "cloud": {"participation": 1.0 if killed else 0.5, "aggregation": {"name": rule}},
    }
    direct = RunFolder.create(tmp_path / "direct", parse(tree), direct=True)
    run_in_process(direct, resume=False, accelerator="cpu", observe=lambda event, facts: None)
    with ExitStack() as stack:
        overheard = stack.enter_context(overhearing(served))
        lab = Lab(written(tmp_path, tree), served, tmp_path, stack, null=False)
        cloud = lab.cloud()
        groups = [["device-3"], ["device-0", "device-5"], [f"device-{i}" for i in (1, 2, 4, 6, 7)]]
        words = [[word for name in group for word in ("--name", name)] for group in groups]
        devices = [lab.start("device", *each, "--slots", "1") for each in words]
        if killed:
            overheard.wait_for(working("device-3"))
            devices[0].kill()
            devices[0] = lab.start("device", *words[0], "--slots", "1")
            overheard.wait_for(task("cloud", 2, 0))
            cloud.kill()
            (folder,) = lab.runs.iterdir()
            cloud = lab.cloud(resume=folder)
        for role in (cloud, *devices):
            role.ends(0, patience_s=200)
    (folder,) = lab.runs.iterdir()
    assert tensors(folder) == tensors(direct.path)
    trained = [row["node"] for row in table(folder / "devices.csv")]
    assert len(trained) == 4 * (8 if killed else 4) and {
        node.split("/")[0] for node in trained
    } == {"cloud"}
    if not killed:
        nbytes = 4 * 2_410
        counted = {(row["from"], row["to"]): row for row in table(folder / "links.csv")}
        for i in range(8):
            one = trained.count(f"cloud/device-{i}") * nbytes
            for ends in (("cloud", f"device-{i}"), (f"device-{i}", "cloud")):
                row = counted[ends]
                assert (row["kind"], row["tier"]) == ("all", "wan") and one <= int(
                    row["payload_bytes"]
                ) < one + 20_000
                assert one <= int(row["wire_bytes"]) - int(row["probe_bytes"] or 0) < one + 40_000


@pytest.mark.slow
@in_namespaces
@pytest.mark.timeout(2 * PATIENCE_S)
def test_a_device_whose_large_packets_vanish_costs_a_quorum_its_deadlines(tmp_path: Path) -> None:
    """Its uplink drops frames of more than 1,000 bytes: it reports and offers, but none of its
    chunks comes.
    """
    quorum = {"closing": {"rule": "quorum", "quorum": 1, "deadline_s": 1.0}}
    transfer = {"inline_bytes": 0, "keepalive_s": 5}
    lab_of_two = {"rounds": 3, "topology": BRANCH["topology"], "links": {"check": "off"}}
    experiment = written(tmp_path, lab_of_two | {"institution": quorum, "transfer": transfer})
    wire = VethPair(0, "device-0", "above", "below", up_mbit=50.0, down_mbit=50.0)
    with ExitStack() as stack:
        spaces = stack.enter_context(joined(("above", "below"), (wire,)))
        spaces["below"].batch(
            "tc", ["qdisc replace dev up0 root handle 1: tbf rate 50mbit burst 1000 limit 100000"]
        )
        with spaces["above"].entered():
            served = stack.enter_context(broker.start(directory=tmp_path, host="0.0.0.0"))
            lab = Lab(experiment, served, tmp_path, stack)
            lab.address = f"{wire.parent_address}:{served.port}"
            roles = [lab.cloud(), lab.institution("institution-0"), lab.devices(1)]
        with spaces["below"].entered():
            roles.append(lab.devices(0))
        for role in roles:
            role.ends(0)
    (path,) = lab.runs.glob("*/devices.csv")
    did = [(row["node"].rpartition("/")[2], row["local_rounds"]) for row in table(path)]
    assert sorted(did) == [("device-0", "0")] * 3 + [("device-1", "1")] * 3


def happened(role: Role, event: str) -> bool:
    whole = role.output().rpartition("\n")[0]
    return any(json.loads(line)["event"] == event for line in whole.splitlines())


ROLES = (
    "cloud",
    "institution",
    "device",
    "fedstrata.cloud.evaluator_process",
    "fedstrata.common.processes.fork_server",
)


def family(role: Role) -> dict[str, psutil.Process]:
    """Return a lab's processes by what they are."""
    found = {}
    for process in psutil.Process(role.process.pid).children(recursive=True):
        try:
            while not (words := process.cmdline()):  # while it becomes another program
                time.sleep(0.001)
        except psutil.NoSuchProcess:
            continue
        roles = [word for word in words if word in ROLES]
        brokers = [word for word in words if word.endswith(("mosquitto", "nats-server"))]
        kind = roles[0] if roles else "broker" if brokers else "other"
        found[f"{kind} {process.pid}"] = process
    return found


def kinds(processes: dict[str, psutil.Process]) -> set[str]:
    return {name.split()[0] for name in processes} - {"other"}


def port_of(role: Role) -> int:
    return int(role.log.read_text().splitlines()[0].rpartition(":")[2])


def assert_gone(role: Role, processes: dict[str, psutil.Process]) -> None:
    _, alive = psutil.wait_procs(list(processes.values()), timeout=30)
    assert not alive, [name for name, process in processes.items() if process in alive]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port_of(role)), timeout=10)


@pytest.mark.slow
def test_an_interrupted_lab_leaves_nothing_behind_and_can_be_resumed(
    branch: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        # At once, before the first global round; then in mid-run; then to the end.
        early = lab_of(tmp_path / "early.log", branch, "--runs", tmp_path / "runs")
        stack.callback(early.kill)
        until(lambda: happened(early, "run"), "the run")
        processes = family(early)
        assert kinds(processes) == {"cloud", "institution", "device", "broker"}
        early.process.send_signal(signal.SIGTERM)
        said = early.ends(130, patience_s=20)
        assert_gone(early, processes)
        folder = folder_in(early.output())
        if not folder.exists():  # else a global round had begun before the signal came
            assert f"no global round had begun: {folder} is removed" in said
            assert "--resume" not in said

        middle = lab_of(tmp_path / "middle.log", branch, "--runs", tmp_path / "runs")
        stack.callback(middle.kill)
        until(lambda: happened(middle, "run"), "the run")
        folder = folder_in(middle.output())
        processes = family(middle)
        devices = [process for name, process in processes.items() if name.startswith("device ")]
        until(lambda: happened(middle, "global_round"), "the first global round")
        for device in devices:
            device.suspend()  # a busy machine might see the last global round before it sees us
        until(lambda: list(folder.glob("checkpoints/*.safetensors")), "the first checkpoint")
        middle.process.send_signal(signal.SIGINT)
        for device in devices:
            device.resume()
        said = middle.ends(130, patience_s=20)
        assert "Traceback" not in said and f"fedstrata run --resume {folder}" in said
        assert_gone(middle, processes)
        assert not (folder / "model.safetensors").exists()

        last = lab_of(tmp_path / "last.log", "--resume", folder)
        stack.callback(last.kill)
        last.ends(0)
        assert model_digest(folder.parent) == null_model(parse(BRANCH))
        assert [row["global_round"] for row in table(folder / "rounds.csv")] == ["1", "2", "3"]
        assert all(row["accuracy"] for row in table(folder / "rounds.csv"))
        assert_bytes_of_one_run(folder, lives=2)
        assert {path.name for path in (tmp_path / "runs").iterdir()} == {folder.name, ".spool"}
        assert not list((tmp_path / "runs" / ".spool").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("killed", [("cloud",), ("institution", "device")], ids=" and ".join)
def test_a_lab_starts_roles_again_that_were_killed(
    killed: tuple[str, ...], branch: Path, tmp_path: Path
) -> None:
    flags = ("--set", "rounds=40", "--set", "training.epochs=1", "--runs", tmp_path / "runs")
    with ExitStack() as stack:
        role = lab_of(tmp_path / "lab.log", branch, *flags)
        stack.callback(role.kill)
        until(lambda: happened(role, "global_round"), "the first global round")
        for name, process in family(role).items():
            if name.split()[0] in killed:
                process.kill()
        said = role.ends(0)
        assert (
            f"{killed[0]}{'' if killed[0] == 'cloud' else '-0'} was killed by signal 9: it is "
            "started again"
        ) in said
        assert said.count("is started again") == len(killed)
        (folder,) = [
            path for path in (tmp_path / "runs").iterdir() if not path.name.startswith(".")
        ]
        assert model_digest(tmp_path / "runs") == null_model(
            parse(BRANCH | {"rounds": 40, "training": {"epochs": 1}})
        )
        assert [row["global_round"] for row in table(folder / "rounds.csv")] == [
            str(n) for n in range(1, 41)
        ]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills children with their parent")
@pytest.mark.parametrize(
    "workers", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["no workers", "workers"]
)
def test_a_killed_lab_leaves_no_process_behind(workers: bool, branch: Path, tmp_path: Path) -> None:
    # That workers end with their agent is a quick test of the pool.
    words = (tmp_path / "lab.log", branch, "--runs", tmp_path / "runs")
    role = lab_of(*words, null=not workers, NULL_LAB_EVALUATOR="real")
    all_kinds = {"cloud", "fedstrata.cloud.evaluator_process", "institution", "device", "broker"}
    all_kinds |= {"fedstrata.common.processes.fork_server"} if workers else set()
    try:
        until(lambda: kinds(family(role)) == all_kinds, "all roles")
        processes = family(role)
    finally:
        role.kill()
    assert_gone(role, processes)


def test_a_lab_whose_cloud_is_killed_ends_and_reports_it(branch: Path, tmp_path: Path) -> None:
    role = lab_of(tmp_path / "lab.log", branch, "--runs", tmp_path / "runs")
    try:
        until(lambda: "cloud" in kinds(family(role)), "the cloud")
        processes = family(role)
        next(process for name, process in processes.items() if name.startswith("cloud ")).kill()
        said = role.ends(1)
    finally:
        role.kill()
    assert "cloud" in said
    assert "signal 9" in said
    assert "Traceback" not in said
    assert_gone(role, processes)


def resumed(root: Path, *accuracies: str) -> tuple[RunFolder, list[int]]:
    """Resume a run with a target of 0.8 after rows of these accuracies; return its folder and what
    was evaluated.
    """
    evaluated = []

    async def evaluate(global_round: int, row: Row) -> EvaluationResult:
        evaluated.append(global_round)
        return EvaluationResult(global_round, 0.5, 1.5)

    async def run() -> None:
        alone = SimpleNamespace(
            peers=(), tests={}, ledger=Ledger((), Account()), now=asyncio.get_running_loop().time
        )
        global_rounds = GlobalRounds(
            folder,
            Beginning(layout, layout.empty(), ""),
            NodeContext(down=alone, spool=Spool(None), metrics=Metrics()),
            evaluate=evaluate,
            observe=lambda event, facts: None,
        )
        state = RunState(folder.run, folder.experiment.digest, len(accuracies), 1.0, {})
        checkpoint.save(
            folder.checkpoints, state, layout=layout, row=layout.empty(), rule=global_rounds._rule
        )
        global_rounds.resume()
        await global_rounds.run()  # another global round would need the institutions

    layout = ModelLayout.build([("weight", (100,), Section.PARAMETER)])
    folder = RunFolder.create(root, parse(SMALL | {"stop": {"target": 0.8}}))
    # and one whose checkpoint was not written any more
    for place, accuracy in enumerate([*accuracies, ""]):
        folder.add_round(a_global_round(place + 1, float(accuracy) if accuracy else None))
    asyncio.run(run())
    return folder, evaluated


@pytest.mark.parametrize(
    ("accuracies", "wanted"), [(["0.7", "0.75", "0.9"], []), (["0.7", "0.75", ""], [3])]
)
def test_a_resumed_run_that_had_reached_its_target_trains_no_more_and_evaluates_what_its_end_cut_off(
    accuracies: list[str], wanted: list[int], tmp_path: Path
) -> None:
    folder, evaluated = resumed(tmp_path, *accuracies)
    assert [row["accuracy"] for row in table(folder.path / "rounds.csv")] == [
        each or "0.5" for each in accuracies
    ]
    assert evaluated == wanted
