"""Access rules of a lab: what a node with a certificate may publish and receive, on real brokers.

Refused means that no subscriber that may receive a topic got the message, and that a reader got
nothing: mosquitto acknowledges what it denies.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from fedstrata.common.errors import ConnectionFailed
from fedstrata.common.experiment.reading import load
from fedstrata.common.net import plain_client
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.plain_client import PlainClient, Will, pump
from fedstrata.common.net.tls import Tls
from fedstrata.deploy.brokers import broker
from fedstrata.deploy.brokers.broker import BrokerProcess
from fedstrata.deploy.brokers.guard import Guard
from fedstrata.deploy.kits import access
from fedstrata.deploy.kits.authority import Authority
from fedstrata.deploy.kits.lab_file import parse
from tests.helpers.commands import DEMO, command, fedstrata, null_model, sets
from tests.simulation.outcome import model_digest

pytestmark = pytest.mark.usefixtures("warm")

LAB_TREE: Final = {
    "name": "north",
    "broker": "main",
    "machines": {"server": {"address": "127.0.0.1"}},
    "brokers": {"main": {"machine": "server"}},
    "institutions": {
        "institution-0": {"machine": "server"},
        "institution-1": {"machine": "server"},
    },
    "devices": [
        {"names": ["device-0..1"], "machine": "server", "parent": "institution-0"},
        {"names": ["device-2..3"], "machine": "server", "parent": "institution-1"},
    ],
}
LAB: Final = parse(LAB_TREE)
NAMES: Final = ("operator", *LAB.parents, "cloud")
RUN: Final = "fs1/north/20260101T000000Z-aaaaaa"
BLOB: Final = "0123456789abcdef"


def lines(text: str) -> list[list[str]]:
    """Return the words of each line before its comment."""
    text = text.strip().replace("RUN", RUN).replace("BLOB", BLOB)
    return [line.partition("#")[0].split() for line in text.splitlines()]


# Who publishes where, as whom nobody may be believed.
WRITES: Final = lines("""
device-0       RUN/device-1/state  # the presence of a sibling
device-0       RUN/institution-0/state
device-0       RUN/cloud/state
device-0       RUN/cloud/spec  # another experiment
device-0       RUN/institution-0/spec
device-0       RUN/institution-0/blob/all/BLOB/0/1  # another model for all
device-0       RUN/institution-0/blob/device-1/BLOB/0/1
device-0       RUN/device-1/blob/all/BLOB/0/1  # a sibling's upload
device-0       RUN/cloud/blob/all/BLOB/0/1
device-0       RUN/institution-0/inbox/device-1  # a result under a sibling's name
device-0       RUN/institution-0/inbox/cloud  # a task under the cloud's
device-0       RUN/device-1/inbox/institution-0
device-0       RUN/cloud/inbox/institution-0
device-0       RUN/device-0/inbox/institution-0  # to itself, under its parent's name
device-0       fs1/north/ask/institution-0/device-1
device-0       fs1/north/ask/cloud/cloud  # a second cloud
device-0       fs1/north/ask/institution-1/device-0  # a parent of another branch
device-0       fs1/north/ask/all/device-0  # a question to all nodes
device-0       fs1/north/ask/all/operator
institution-0  fs1/north/ask/all/institution-0
device-0       RUN/institution-0/status
institution-0  RUN/cloud/status
operator       RUN/cloud/status
device-0       fs1/north/answer/operator/device-1
device-0       fs1/south/20260101T000000Z-aaaaaa/device-0/state  # another lab
device-0       elsewhere
device-0       RUN/operator/state
institution-0  RUN/institution-1/state
institution-0  RUN/cloud/inbox/institution-1
institution-0  RUN/device-2/inbox/institution-1
institution-0  RUN/institution-1/blob/all/BLOB/0/1
institution-0  RUN/device-0/blob/institution-0/BLOB/0/1  # an upload of a child of its own
cloud          RUN/institution-0/inbox/device-0
cloud          RUN/institution-0/state
operator       RUN/cloud/inbox/cloud
operator       RUN/institution-0/blob/all/BLOB/0/1
""")
# What others publish, and who may not receive it.
READS: Final = lines("""
institution-1  RUN/institution-1/blob/all/BLOB/0/1       device-0  # the model of another institution
institution-1  RUN/institution-1/blob/device-2/BLOB/0/1  device-0
device-1       RUN/device-1/blob/all/BLOB/0/1            device-0  # a sibling's upload
device-1       RUN/device-1/blob/institution-0/BLOB/0/1  device-0
cloud          RUN/cloud/blob/all/BLOB/0/1               device-0
institution-0  RUN/institution-0/blob/device-1/BLOB/0/1  device-0  # a model for a sibling alone
institution-0  RUN/device-1/inbox/institution-0          device-0
device-1       RUN/institution-0/inbox/device-1          device-0
institution-0  RUN/cloud/inbox/institution-0             device-0
device-1       RUN/device-1/state                        device-0
device-2       RUN/device-2/state                        device-0
cloud          RUN/cloud/state                           device-0
cloud          RUN/cloud/spec                            device-0
device-2       RUN/device-2/blob/institution-1/BLOB/0/1  institution-0
device-2       RUN/institution-1/inbox/device-2          institution-0
institution-1  RUN/institution-1/spec                    institution-0
device-0       fs1/north/answer/cloud/device-0           institution-0
institution-1  RUN/institution-1/status                  institution-0
cloud          RUN/cloud/status                          device-0
""")
ALLOWED: Final = lines("""
device-0       RUN/device-0/state                        institution-0
device-0       RUN/device-0/blob/institution-0/BLOB/0/1  institution-0
device-0       RUN/device-0/blob/all/BLOB/0/1            institution-0
device-0       RUN/institution-0/inbox/device-0          institution-0
device-0       fs1/north/ask/institution-0/device-0      institution-0
device-0       fs1/north/answer/operator/device-0        operator
institution-0  RUN/institution-0/spec                    device-0
institution-0  RUN/institution-0/blob/all/BLOB/0/1       device-1
institution-0  RUN/institution-0/blob/device-0/BLOB/0/1  device-0
institution-0  RUN/device-0/inbox/institution-0          device-0
institution-0  RUN/institution-0/state                   cloud
institution-0  RUN/cloud/inbox/institution-0             cloud
cloud          RUN/cloud/blob/all/BLOB/0/1               institution-1
cloud          fs1/north/ask/cloud/cloud                 cloud
device-0       fs1/north/ask/device-0/device-0           device-0
device-0       fs1/north/answer/device-0/device-0        device-0
cloud          fs1/north/ask/all/cloud                   device-3
operator       fs1/north/ask/all/operator                institution-1
operator       fs1/north/ask/cloud/operator              cloud
operator       fs1/north/ask/institution-1/operator      institution-1
cloud          RUN/cloud/status                          operator
institution-1  RUN/institution-1/status                  operator
institution-1  RUN/device-2/inbox/institution-1          operator
""")


class Members:
    """All members of the lab, each connected with the certificate of its node."""

    def __init__(self, port: int, home: Path) -> None:
        self.address = {
            name: BrokerAddress(
                "127.0.0.1",
                port,
                tls=Tls(
                    str(home / "ca.crt"),
                    *(str(home / "issued" / f"{name}.{kind}") for kind in ("crt", "key")),
                ),
            )
            for name in NAMES
        }
        self.all = {name: PlainClient(address) for name, address in self.address.items()}

    def publish(self, messages: Iterable[Sequence[str]]) -> None:
        """Publish on topics, each by its publisher, and wait until all was delivered."""
        by_publisher: dict[str, dict[str, None]] = {}
        for publisher, topic in messages:
            by_publisher.setdefault(publisher, {})[topic] = None
        for publisher, its in by_publisher.items():
            for topic in its:
                self.all[publisher].publish(topic, b"")
            self.flush(publisher)

    def flush(self, publisher: str) -> None:
        """Wait until all that the publisher sent was delivered: a last message, to itself by way of
        the broker.
        """
        last, own = f"{RUN}/{publisher}/blob/{publisher}/{BLOB}/0/0", self.all[publisher]
        assert own.subscribe([last])
        own.messages = [message for message in own.messages if message[0] != last]
        own.publish(last, b"")
        assert pump(list(self.all.values()), lambda: last in own.topics())
        for member in 5 * list(self.all.values()):
            assert member.turn()

    def received(self, name: str, topic: str) -> bool:
        return topic in self.all[name].topics()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("access")
    authority = Authority.open(home, name="north")
    authority.of("broker", hosts=["127.0.0.1"])
    for name in NAMES:
        authority.of(name)
    return home


@pytest.fixture(scope="module", params=["mosquitto", "embedded"])
def served(home: Path, request: pytest.FixtureRequest) -> Iterator[BrokerProcess]:
    try:
        broker.choose(request.param)
    except ConnectionFailed as error:
        pytest.skip(str(error))
    rules = home / f"rules-{request.param}"
    rules.write_text(
        (access.mosquitto if request.param == "mosquitto" else access.nats)(LAB, "main")
    )
    own = Tls(
        str(home / "ca.crt"), str(home / "issued/broker.crt"), str(home / "issued/broker.key")
    )
    with broker.start(
        directory=home, kind=request.param, guard=Guard(tls=own, rules=rules)
    ) as process:
        yield process


@pytest.fixture
def members(
    served: BrokerProcess, home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Members]:
    monkeypatch.setattr(plain_client, "TURN_S", 0.001)
    members = Members(served.port, home)
    yield members
    for member in members.all.values():
        member.leave()


def test_nobody_publishes_under_another_name(members: Members) -> None:
    """The operator may receive every topic of the lab."""
    members.all["operator"].subscribe(["fs1/north/#"])
    for name in NAMES:
        members.all[name].subscribe([topic for _, topic in WRITES])
    members.publish(WRITES)
    assert [
        (each, topic) for each in NAMES for _, topic in WRITES if members.received(each, topic)
    ] == []


def test_nobody_receives_what_is_not_for_it(members: Members) -> None:
    members.all["operator"].subscribe(["fs1/north/#"])
    for _, topic, reader in READS:
        members.all[reader].subscribe([topic, "fs1/north/#", "#"])
    members.publish((publisher, topic) for publisher, topic, _ in READS)
    assert [topic for _, topic, _ in READS if not members.received("operator", topic)] == []
    assert [(topic, reader) for _, topic, reader in READS if members.received(reader, topic)] == []


def test_what_a_lab_needs_is_allowed(members: Members) -> None:
    for _, topic, reader in ALLOWED:
        members.all[reader].subscribe([topic])
    members.publish((publisher, topic) for publisher, topic, _ in ALLOWED)
    assert [
        (topic, reader) for _, topic, reader in ALLOWED if not members.received(reader, topic)
    ] == []


def test_retained_presences_of_others_and_false_wills_are_refused(members: Members) -> None:
    kept, false = f"{RUN}/institution-1/state", f"{RUN}/device-1/state"
    members.all["institution-1"].publish(kept, b"state", retain=True)
    members.flush("institution-1")
    for reader, may in (
        ("device-0", False),
        ("institution-0", False),
        ("cloud", True),
        ("device-2", True),
    ):
        members.all[reader].subscribe([kept, f"{RUN}/+/state"])
        members.flush(reader)
        assert members.received(reader, kept) is may, reader
    for watcher in ("operator", "institution-0"):
        members.all[watcher].subscribe([false])
    liar = PlainClient(members.address["device-0"], will=Will(false, retain=False))
    liar.die()
    while liar.turn():
        pass
    members.flush("device-0")
    members.flush("operator")
    assert not members.received("operator", false) and not members.received("institution-0", false)


@pytest.mark.slow
def test_a_lab_under_the_rules_runs_as_without_them(
    served: BrokerProcess, home: Path, tmp_path: Path
) -> None:
    where = {
        "FEDSTRATA_BROKER": f"127.0.0.1:{served.port}",
        "FEDSTRATA_LAB": "north",
        "FEDSTRATA_TLS_CA": str(home / "ca.crt"),
        "FEDSTRATA_TLS_CERT": str(home / "issued" / "{name}.crt"),
        "FEDSTRATA_TLS_KEY": str(home / "issued" / "{name}.key"),
    }
    parents = {name: parent for name, parent in LAB.parents.items() if parent != "cloud"}
    devices = [
        word for name, parent in parents.items() for word in ("--name", name, "--parent", parent)
    ]
    words = [("institution", "--name", name) for name in LAB.institutions] + [("device", *devices)]
    with pytest.MonkeyPatch.context() as patch:
        for key, value in where.items():
            patch.setenv(key, value)
        roles = [
            subprocess.Popen(command(*each, null=True, stay=True), stderr=subprocess.PIPE)
            for each in words
        ]
        pairs = ["topology.institutions=2", "topology.devices=4", "rounds=2"]
        try:
            done = fedstrata(
                "cloud", DEMO, "--runs", tmp_path, "--format", "json", *sets(*pairs), null=True
            )
            status = fedstrata("lab", "status", "--format", "json")
            examined = fedstrata("doctor", "--format", "json", "--name", "device-0")
        finally:
            for role in roles:
                role.terminate()
                role.communicate()
    assert done.returncode == 0, done.stderr
    assert model_digest(tmp_path) == null_model(load(DEMO, pairs))
    assert status.returncode == 0 and status.stdout.count('"there": true') == len(LAB.parents), (
        status.stderr
    )
    findings = {row["item"]: row["there"] for row in map(json.loads, examined.stdout.splitlines())}
    assert examined.returncode == 0
    assert findings["messages are delivered"] and findings["two connections of one login"]


def test_devices_of_a_lab_that_lets_them_move_reach_all_parents_on_their_broker() -> None:
    """And their parents reach them; institutions, and devices on another broker, are as before."""
    other = {"institution-2": {"machine": "server", "broker": "second"}}
    tree = {
        **LAB_TREE,
        "brokers": {"main": {"machine": "server"}, "second": {"machine": "server", "port": 9999}},
    }
    tree["institutions"] = {**LAB_TREE["institutions"], **other}
    tree["devices"] = [
        *LAB_TREE["devices"],
        {"names": ["device-4"], "machine": "server", "parent": "institution-2"},
    ]
    still, moving = (
        access.users(parse({**tree, "moves": moves}), "main") for moves in (False, True)
    )
    seek = "fs1/north/ask/institution-{}/device-0"
    assert {each for each in moving["device-0"].publish if "/ask/" in each} == {
        seek.format(k) for k in (0, 1)
    }
    assert {each for each in still["device-0"].publish if "/ask/" in each} == {seek.format(0)}
    assert "fs1/north/+/device-0/state" in moving["institution-1"].receive
    assert "fs1/north/+/device-0/state" not in still["institution-1"].receive
    assert moving["cloud"] == still["cloud"] and "device-4" not in moving


def test_a_broker_lets_those_in_that_meet_there_and_who_calls_the_roll() -> None:
    sites = {"main": {"machine": "server"}, "site": {"machine": "server", "port": 1900}}
    places = {
        "institution-0": {"machine": "server", "broker": "site"},
        "institution-1": {"machine": "server"},
    }
    lab = parse({**LAB_TREE, "brokers": sites, "institutions": places})
    on_site = access.users(lab, "site")
    assert list(on_site) == ["operator", "cloud", "institution-0", "device-0", "device-1"]
    assert on_site["cloud"] == access.Access(("fs1/north/ask/all/cloud",))
    assert not {"device-0", "device-1"} & set(access.users(lab, "main"))


def test_the_rules_for_other_brokers(tmp_path: Path) -> None:
    everybody, *lines = access.emqx(LAB, "main").splitlines()
    assert everybody.startswith('{allow, all, publish, ["fs1/north/+/${username}/state", ')
    assert lines[-1] == "{deny, all}."
    assert any(
        line.startswith('{allow, {username, "device-0"}, subscribe, ["fs1/north/+/inst')
        for line in lines
    )
    dotted = parse({**LAB_TREE, "name": "north.lab"})
    assert "fs1.north//lab.*.operator.state" in access.nats(dotted, "main")
