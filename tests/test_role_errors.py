"""One role on a real broker that gets the wrong experiment, parent or data, or whose broker is
away.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from paho.mqtt import client as mqtt

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import parse, to_toml
from fedstrata.common.experiment.schema import Experiment
from fedstrata.common.metrics import Metrics
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.protocol.messages import Announcement
from fedstrata.common.runtime.parent_endpoint import ParentEndpoint
from fedstrata.common.runtime.world import Host
from fedstrata.common.settings.closing import Closing
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.brokers.broker import BrokerProcess
from fedstrata.deploy.brokers.guard import Guard
from fedstrata.institution.institution_agent import InstitutionAgent
from tests.helpers import sites
from tests.helpers.nodes import layout_of, living, parent_of
from tests.helpers.roles import SMALL, Role, device, lab_of, until
from tests.helpers.sites import RealSite, in_real_time

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker.start(directory=tmp_path_factory.mktemp("broker")) as one:
        yield one


# One role, reported the wrong thing


@asynccontextmanager
async def announcing(
    address: BrokerAddress, name: str, experiment: Experiment, *, children: list[str]
) -> AsyncIterator[ParentEndpoint]:
    """Keep a parent on the broker that announces an experiment."""
    site, layout, over, run = (
        RealSite(address),
        layout_of(400),
        asyncio.Event(),
        f"run-{secrets.token_hex(4)}",
    )
    parent = parent_of(
        site, children, layout=layout, name=name, run=run, transfer=experiment.transfer
    )
    parent.announce(Announcement(experiment.to_json(), layout.to_json()))
    parenting = living(site, parent, work=over.wait())
    try:
        yield parent
    finally:
        over.set()
        await asyncio.wait((parenting,))
        parenting.exception()


@pytest.fixture
def address(served: BrokerProcess) -> BrokerAddress:
    return BrokerAddress(served.host, served.port)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "device-3",
            [
                "device-3 is not there",
                "it belongs to institution-1",
                "institution-0 has device-0, device-1",
            ],
        ),
        (
            "device-9",
            [
                "device-9 is not there",
                "no device of this experiment",
                "institution-0 has device-0, device-1",
            ],
        ),
    ],
)
@in_real_time
async def test_a_device_of_another_institution_ends_with_4_and_disturbs_nobody(
    address: BrokerAddress, name: str, words: list[str]
) -> None:
    async with announcing(address, "institution-0", parse(SMALL), children=["device-0"]):
        with overhearing_states(address) as said, pytest.raises(InvalidExperiment) as reported:
            await device(address, name, "institution-0")
    assert reported.value.exit_code == 4
    for word in ["--parent = 'institution-0'", *words]:
        assert word in str(reported.value)
    assert name not in said


@contextmanager
def overhearing_states(address: BrokerAddress) -> Iterator[set[str]]:
    """Collect the names of all who say how they are."""
    said: set[str] = set()

    def note(_client: object, _data: object, message: mqtt.MQTTMessage) -> None:
        said.add(message.topic.split("/")[3])

    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
    client.on_message = note
    client.connect(address.host, address.port)
    client.subscribe("fs1/lab/+/+/state", qos=1)
    client.loop_start()
    try:
        yield said
        # What was said before this is received before this.
        client.publish("fs1/lab/end-1/end/state", b"", qos=1)
        until(lambda: "end" in said, "the end")
    finally:
        client.disconnect()
        client.loop_stop()


@in_real_time
async def test_an_institution_that_the_experiment_does_not_know_ends_with_4(
    address: BrokerAddress,
) -> None:
    agent = InstitutionAgent("institution-9", Host(address, 10.0, Metrics()), child_broker=address)
    with pytest.raises(
        InvalidExperiment,
        match=r"institution-9 is not there.*cloud has institution-0, institution-1",
    ) as reported:
        async with announcing(address, "cloud", parse(SMALL), children=["institution-0"]):
            await agent.run()
    assert reported.value.exit_code == 4


@in_real_time
async def test_a_device_imports_no_model_that_its_host_did_not_allow(
    address: BrokerAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "announced.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    experiment = parse(SMALL | {"model": {"name": "announced:build"}})
    waits_for = [""]
    async with announcing(
        address, "institution-0", experiment, children=["device-0"]
    ) as institution:
        gathering = asyncio.create_task(institution.gather(Closing(), waiting=waits_for.append))
        with pytest.raises(InvalidExperiment, match="--allow announced"):
            await device(address, "device-0", "institution-0")
        await sites.until(
            lambda: "device-0 gave up: " in waits_for[-1] and "--allow announced" in waits_for[-1]
        )
        gathering.cancel()
        await asyncio.wait((gathering,))
    assert "announced" not in sys.modules


def test_a_lab_without_its_data_ends_soon_and_not_by_patience(tmp_path: Path) -> None:
    missing = tmp_path / "no-such-folder"
    slow = parse(
        SMALL
        | {
            "topology": {"institutions": 1, "devices": 1},
            "data": {"dataset": "mnist", "root": str(missing)},
            "model": {"name": "lenet5"},
            "transfer": {"idle_s": 600.0},
        }
    )
    path = tmp_path / "mnist.toml"
    path.write_text(to_toml(slow))
    said = lab_of(
        tmp_path / "lab.log", path, "--runs", tmp_path / "runs", NULL_LAB_EVALUATOR="real"
    ).ends(4)
    complaints = [line for line in said.splitlines() if "data.root" in line]
    assert len(complaints) == 1
    assert str(missing) in complaints[0]
    assert "MNIST" in complaints[0] and "download=True" in complaints[0]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["cloud"], marks=pytest.mark.slow),
        pytest.param(["institution", "--name", "institution-0"], marks=pytest.mark.slow),
        ["device", "--name", "device-0", "--parent", "institution-0"],
    ],
    ids=lambda words: words[0],
)
def test_a_refused_login_ends_every_role_with_3_and_names_the_address(
    words: list[str], tmp_path: Path
) -> None:
    passwords = tmp_path / "passwords"
    passwords.write_text("")
    file = tmp_path / "experiment.toml"
    file.write_text(to_toml(parse(SMALL)))
    secret = tmp_path / "secret"
    secret.write_text("wrong")
    login = ["--username", "me", "--password-file", secret, "--connect-timeout", "1"]
    with broker.start(directory=tmp_path, guard=Guard(passwords=passwords)) as refusing:
        address = f"{refusing.host}:{refusing.port}"
        runs = [file, "--runs", tmp_path / "runs"] if words[0] == "cloud" else []
        role = Role(tmp_path / f"{words[0]}.log", *words, *runs, "--broker", address, *login)
        (error,) = (line for line in role.ends(3).splitlines() if line.startswith("fedstrata: "))
        assert address in error and "login" in error


def test_a_broker_that_stays_away_ends_a_role_with_5_and_is_named(tmp_path: Path) -> None:
    async def run(dying: BrokerProcess) -> str:
        address = BrokerAddress(dying.host, dying.port)
        role = Role(
            tmp_path / "institution.log",
            "institution",
            "--name",
            "institution-0",
            "--broker",
            str(address),
        )
        try:
            experiment = parse(SMALL | {"transfer": {"idle_s": 1.0}})
            async with announcing(
                address, "cloud", experiment, children=["institution-0"]
            ) as cloud:
                await sites.until(
                    lambda: cloud.session.coordinator.states()["institution-0"] == "init"
                )
                dying.stop()
                return await asyncio.to_thread(role.ends, 5)
        finally:
            role.kill()

    with broker.start(directory=tmp_path) as dying:
        said = asyncio.run(run(dying))
    where = f"{dying.host}:{dying.port}"
    assert said.splitlines()[-1].startswith(
        f"fedstrata: broker {where} was away for 1 s ({where}: "
    )
    assert "trying again" in said
    assert "fedstrata.mqtt" not in said
