"""Both brokers start, carry what the agents rely on, and stop."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import aiomqtt
import pytest

from fedstrata.common.errors import ConnectionFailed
from fedstrata.common.experiment.reading import load
from fedstrata.common.host.processes import free_port, spawn, stop
from fedstrata.common.protocol import topics
from fedstrata.common.protocol.limits import MESSAGE_MOST
from fedstrata.deploy.brokers.broker import BrokerProcess, Kind, choose, start
from fedstrata.deploy.brokers.guard import PACKET_MOST, Guard, one_login
from fedstrata.deploy.console import login
from fedstrata.deploy.console.login import kept_login, local_login
from fedstrata.deploy.local.lab_network import OWN_LOGIN, one_host
from tests.helpers.commands import DEMO, invoke
from tests.helpers.sites import in_real_time

PATIENCE_S = 10.0


def mosquitto_is_here() -> bool:
    try:
        return choose("mosquitto") == "mosquitto"
    except ConnectionFailed:
        return False


@pytest.fixture(autouse=True)
def _no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSTRATA_BROKER_KIND", raising=False)


@pytest.fixture(params=["mosquitto", "embedded"])
def kind(request: pytest.FixtureRequest) -> Kind:
    wanted: Kind = request.param
    if wanted == "mosquitto" and not mosquitto_is_here():
        pytest.skip("mosquitto is not installed")
    return wanted


@pytest.fixture
def broker(kind: Kind, tmp_path: Path) -> Iterator[BrokerProcess]:
    with start(directory=tmp_path, kind=kind) as broker:
        yield broker


def client(broker: BrokerProcess, name: str | None = None) -> aiomqtt.Client:
    return aiomqtt.Client(
        broker.host, broker.port, identifier=name, protocol=aiomqtt.ProtocolVersion.V311
    )


async def received(client: aiomqtt.Client, count: int = 1) -> list[tuple[str, bytes, bool]]:
    """Return the next `count` messages: topic, payload, retain flag."""
    async with asyncio.timeout(PATIENCE_S):
        messages = [await anext(client.messages) for _ in range(count)]
    return [(message.topic.value, bytes(message.payload), message.retain) for message in messages]


def connect_with_will(
    broker: BrokerProcess, name: bytes, *, will: bytes, keep_alive_s: int = 60
) -> socket.socket:
    """Log in by hand; the will goes, retained, to the topic `will/<name>`."""
    fields = [name, b"will/" + name, will]
    body = (
        b"\x00\x04MQTT\x04\x26"
        + keep_alive_s.to_bytes(2)
        + b"".join(len(f).to_bytes(2) + f for f in fields)
    )
    connection = socket.create_connection((broker.host, broker.port), timeout=PATIENCE_S)
    connection.sendall(bytes([0x10, len(body)]) + body)
    assert connection.recv(4) == b"\x20\x02\x00\x00"
    return connection


def test_starts_and_stops(broker: BrokerProcess, kind: Kind) -> None:
    assert broker.kind == kind and broker.port > 0
    broker.stop()
    assert broker.process.returncode == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((broker.host, broker.port))
    broker.stop()


@in_real_time
async def test_retained_messages_reach_those_who_subscribe_and_can_be_cleared(
    broker: BrokerProcess,
) -> None:
    async with client(broker) as sender, client(broker) as early:
        await early.subscribe("state/+")
        await sender.publish("state/a", b"1", qos=1, retain=True)
        await sender.publish("state/b", b"2", qos=1, retain=True)
        assert await received(early, 2) == [("state/a", b"1", False), ("state/b", b"2", False)]
        await sender.publish("state/a", b"", qos=1, retain=True)
        assert await received(early) == [("state/a", b"", False)]
        async with client(broker) as late:
            await late.subscribe("state/#")
            assert await received(late) == [("state/b", b"2", True)]
            await sender.publish("state/end", b"")
            assert await received(late) == [("state/end", b"", False)]


@in_real_time
async def test_names_with_dots_and_dashes_are_levels_like_others(broker: BrokerProcess) -> None:
    """NATS separates levels by dots."""
    name = "a.lab_1-x.y"
    state, inbox = (
        topics.state(name, "r-1.2", "node..1."),
        topics.inbox(name, "r-1.2", "b.", "node..1."),
    )
    async with client(broker) as sender, client(broker) as early:
        await early.subscribe(
            [(topics.inbox(name, "+", "b.", "+"), 0), (topics.state(name, "+", "node..1."), 0)]
        )
        for topic in (
            topics.state(name, "r-1.2", "node.1"),
            topics.state("a", "lab_1-x.y", "node..1."),
            state,
        ):
            await sender.publish(topic, b"1", qos=1, retain=True)
        assert await received(early) == [(state, b"1", False)]
        await sender.publish(inbox, b"2")
        assert await received(early) == [(inbox, b"2", False)]
        async with client(broker) as late:
            await late.subscribe(topics.state(name, "+", "node..1."))
            assert await received(late) == [(state, b"1", True)]


@in_real_time
async def test_a_newcomer_receives_only_what_it_subscribes_to(broker: BrokerProcess) -> None:
    async with client(broker) as other:
        await other.subscribe("state/+")
        await other.publish("state/a", b"1", qos=1, retain=True)
        await received(other)
        async with client(broker) as newcomer:
            await newcomer.subscribe("mine")
            await newcomer.publish("mine", b"")
            assert await received(newcomer) == [("mine", b"", False)]


@in_real_time
async def test_forty_nodes_join_at_once_and_all_meet(broker: BrokerProcess) -> None:
    """NATS may miss what is published while a client subscribes: each publishes again when all are
    there.
    """

    async def node(number: int, all_there: asyncio.Barrier, all_met: asyncio.Barrier) -> None:
        async with client(broker, f"node{number}") as me:
            for part in range(5):
                await me.subscribe(f"node{number}/{part}/#")
            await me.subscribe("birth/+")
            await me.publish(f"birth/{number}", b"", qos=1, retain=True)
            await me.publish(f"birth/{number}", b"alive", qos=1, retain=True)
            await all_there.wait()
            await me.publish(f"birth/{number}", b"alive", qos=1, retain=True)
            met: set[str] = set()
            async with asyncio.timeout(PATIENCE_S):
                while len(met) < 40:
                    ((topic, payload, _),) = await received(me)
                    met |= {topic} if payload else set()
                await all_met.wait()

    all_there, all_met = asyncio.Barrier(40), asyncio.Barrier(40)
    async with asyncio.TaskGroup() as nodes:
        for number in range(40):
            nodes.create_task(node(number, all_there, all_met))


@in_real_time
async def test_a_will_is_delivered_and_retained_when_the_link_breaks(broker: BrokerProcess) -> None:
    async with client(broker) as watcher:
        await watcher.subscribe("will/#")
        with connect_with_will(broker, b"node", will=b"dead\xff"):
            pass
        assert await received(watcher) == [("will/node", b"dead\xff", False)]
        async with client(broker) as late:
            await late.subscribe("will/#")
            assert await received(late) == [("will/node", b"dead\xff", True)]


# mosquitto looks every five seconds only
@pytest.mark.parametrize("kind", ["embedded"], indirect=True)
@in_real_time
async def test_a_silent_client_is_said_dead(broker: BrokerProcess) -> None:
    async with client(broker) as watcher:
        await watcher.subscribe("will/#")
        with connect_with_will(broker, b"node", will=b"silent", keep_alive_s=1):
            assert await received(watcher) == [("will/node", b"silent", False)]


@in_real_time
async def test_a_second_login_ends_the_first(broker: BrokerProcess) -> None:
    """mosquitto publishes the first one's will, too; fedstrata's client ids are unique."""
    async with client(broker) as watcher:
        await watcher.subscribe("will/#")
        with connect_with_will(broker, b"node", will=b"first") as first:
            with connect_with_will(broker, b"node", will=b"second"):
                assert first.recv(1) == b""
                if broker.kind == "mosquitto":
                    assert await received(watcher) == [("will/node", b"first", False)]
            assert await received(watcher) == [("will/node", b"second", False)]


@in_real_time
async def test_a_chunk_of_two_megabytes_passes(broker: BrokerProcess) -> None:
    chunk = os.urandom(1_900_000)
    async with client(broker) as receiver, client(broker) as sender:
        await receiver.subscribe("blob/#")
        for index in range(3):
            await sender.publish(f"blob/{index}", chunk)
        assert await received(receiver, 3) == [
            (f"blob/{index}", chunk, False) for index in range(3)
        ]


def test_garbage_ends_only_its_connection(broker: BrokerProcess) -> None:
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x10\xff\xff\xff\xff\xff",
        b"\x00" * 64,
        os.urandom(256),
    ):
        with socket.create_connection((broker.host, broker.port)) as stranger:
            stranger.sendall(garbage)
    with connect_with_will(broker, b"x", will=b"") as known:
        known.sendall(b"\x82\x06\x00\x01\x00\x01\xff\x00")
    with connect_with_will(broker, b"x", will=b""):
        pass


def test_a_taken_port_is_named(kind: Kind, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        port = squatter.getsockname()[1]
        with pytest.raises(ConnectionFailed, match=f"{port}.*already in use"):
            start(directory=tmp_path, kind=kind, port=port)


def test_a_broker_that_cannot_start_gives_its_last_words(kind: Kind, tmp_path: Path) -> None:
    found = r"(?s)ended with code.*" if kind == "mosquitto" else "password file .*"
    with pytest.raises(ConnectionFailed, match=f"{found}no-such-file"):
        start(directory=tmp_path, kind=kind, guard=Guard(passwords=tmp_path / "no-such-file"))


def test_a_broker_can_refuse_logins(kind: Kind, tmp_path: Path) -> None:
    nobody = tmp_path / "passwords"
    nobody.touch()

    async def scenario(broker: BrokerProcess) -> None:
        async with client(broker):
            pass

    with (
        start(directory=tmp_path, kind=kind, guard=Guard(passwords=nobody)) as broker,
        pytest.raises(aiomqtt.MqttError),
    ):
        asyncio.run(scenario(broker))


def test_the_embedded_broker_takes_the_logins_of_a_file_of_bcrypt_hashes(tmp_path: Path) -> None:
    passwords = tmp_path / "passwords"
    passwords.write_text("me:$2b$04$abcdefghijklmnopqrstuu2r9OfJnfCsdneAXAGHnS4UpFFP8WIrW\n")

    async def log_in(broker: BrokerProcess, password: str) -> None:
        async with aiomqtt.Client(broker.host, broker.port, username="me", password=password):
            pass

    with start(directory=tmp_path, kind="embedded", guard=Guard(passwords=passwords)) as broker:
        asyncio.run(log_in(broker, "secret"))
        with pytest.raises(aiomqtt.MqttError):
            asyncio.run(log_in(broker, "wrong"))
    passwords.write_text("me:secret\n")
    with pytest.raises(ConnectionFailed, match=r"'me' has no bcrypt hash. Use htpasswd -B."):
        start(directory=tmp_path, kind="embedded", guard=Guard(passwords=passwords))


def test_the_environment_goes_before_the_argument(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDSTRATA_BROKER_KIND", "embedded")
    assert choose("auto") == choose("mosquitto") == "embedded"
    monkeypatch.setenv("FEDSTRATA_BROKER_KIND", "hivemq")
    with pytest.raises(ConnectionFailed, match="'hivemq': use auto, mosquitto or embedded"):
        choose()


def test_the_largest_message_of_any_lab_passes_and_larger_packets_do_not(
    broker: BrokerProcess,
) -> None:
    """One that is let in, such as a device, could send packets of 268 MB, held for each subscriber."""

    async def play() -> list[int]:
        async with client(broker) as reader:
            await reader.subscribe("t")
            async with client(broker) as sender:
                await sender.publish("t", bytes(MESSAGE_MOST))
                sizes = [len(body) for _, body, _ in await received(reader)]
                with suppress(aiomqtt.MqttError):  # nothing acknowledges
                    await sender.publish("t", bytes(PACKET_MOST + 1), qos=1, timeout=0.1)
                with pytest.raises(aiomqtt.MqttError):  # it is disconnected
                    await received(sender)
            async with client(broker) as sender:
                await sender.publish("t", b"last")
                return sizes + [len(body) for _, body, _ in await received(reader)]

    assert asyncio.run(play()) == [MESSAGE_MOST, len(b"last")]


def test_in_the_foreground_until_a_signal(kind: Kind) -> None:
    port = free_port()
    code = (
        "from fedstrata.deploy.brokers.broker import run_foreground; "
        f"run_foreground(port={port}, kind={kind!r})"
    )
    process = spawn([sys.executable, "-c", code])
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    assert f"{kind} listens on 127.0.0.1:{port}" in line and ("apt install mosquitto" in line) == (
        kind == "embedded"
    )
    assert stop(process) == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_a_process_that_ignores_sigterm_is_killed() -> None:
    process = spawn(["sh", "-c", "trap '' TERM; echo; exec sleep 60"])
    assert process.stdout is not None
    process.stdout.readline()
    assert stop(process, grace_s=0.0) == -signal.SIGKILL


@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel ends a child with its parent on Linux alone"
)
def test_a_broker_does_not_outlive_a_killed_parent(kind: Kind, tmp_path: Path) -> None:
    code = (
        "import pathlib, signal; from fedstrata.deploy.brokers.broker import start\n"
        f"print(start(directory=pathlib.Path({str(tmp_path)!r}), kind={kind!r}).process.pid, "
        "flush=True)\n"
        "signal.pause()"
    )
    parent = spawn([sys.executable, "-c", code])
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    assert select.select([child], [], [], PATIENCE_S)[0]
    os.close(child)
    stop(parent)


# The login of a run's own broker, which the user's other commands find and nobody else has


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(login, "LOGINS", str(tmp_path / "logins"))
    return tmp_path / "logins"


def test_a_login_is_found_while_its_run_lasts(folder: Path) -> None:
    with kept_login(1883, ("name", "secret")):
        assert (
            local_login("127.0.0.1", 1883) == local_login("localhost", 1883) == ("name", "secret")
        )
        assert local_login("127.0.0.1", 1884) is None and local_login("10.0.0.1", 1883) is None
        assert (
            folder / "1883"
        ).stat().st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o777 == 0o700
    assert local_login("127.0.0.1", 1883) is None


def test_a_folder_that_others_write_to_is_not_believed(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    (folder / "1883").write_text("name\nsecret")
    assert local_login("127.0.0.1", 1883) is None
    with kept_login(1883, ("name", "other")):
        assert (folder / "1883").read_text() == "name\nsecret"


@pytest.mark.usefixtures("folder")
def test_watch_enters_the_broker_of_this_users_run_and_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["watch", "--once", "--timeout", "0.5", "--connect-timeout", "0.1", "--broker"]
    with one_host(load(DEMO), tmp_path) as network:
        entered = invoke(*words, network.address)
        assert entered.exit_code == 5 and "no active run" in entered.output
        monkeypatch.setattr(login, "LOGINS", str(tmp_path / "another user's"))
        refused = invoke(*words, network.address)
        assert refused.exit_code == 3 and "authori" in refused.output
        given = {
            name: network.environment[name] for name in ("FEDSTRATA_USERNAME", "FEDSTRATA_PASSWORD")
        }
        assert invoke(*words, network.address, env=given).exit_code == 5
        assert network.environment.keys() == OWN_LOGIN.keys()


def test_each_run_has_a_password_of_its_own_that_is_not_shown() -> None:
    one, other = one_login(), one_login()
    assert one.login is not None and one.login != other.login
    assert one.login[1] not in repr(one) and one.login[1] not in "".join(one.mosquitto())
