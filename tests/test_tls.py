"""TLS with a lab's own authority: what connects, what is refused and with which line, a lab of
certified nodes.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import ssl
import sys
import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from fedstrata.common.errors import ConnectionFailed, InvalidExperiment
from fedstrata.common.host.processes import free_port, spawn, stop
from fedstrata.common.metrics_server import SERVER_NAME
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.bulk import Body
from fedstrata.common.net.connection import BrokerConnection, Handlers
from fedstrata.common.net.plain_client import reported_limit
from fedstrata.common.net.tls import Tls, reason_of
from fedstrata.deploy.brokers import broker, nats
from fedstrata.deploy.brokers.broker import BrokerProcess, Kind
from fedstrata.deploy.brokers.guard import Guard
from fedstrata.deploy.cli.serving import serve_metrics
from fedstrata.deploy.console.login import Login, report_certificates
from fedstrata.deploy.kits.authority import CERTIFICATE_DAYS, RENEWED_DAYS, Authority, Issued
from tests.helpers.commands import invoke

NOW = datetime.now(UTC)
LONG_AGO = NOW - timedelta(days=1000)
NODES = ("cloud", "institution-0", "device-0", "device-1")
HERE = ("127.0.0.1",)


def written(folder: Path, name: str, issued: Issued) -> tuple[str, str]:
    """Write a certificate and its key; return the paths."""
    paths = folder / f"{name}.crt", folder / f"{name}.key"
    for path, content in zip(paths, (issued.certificate, issued.key), strict=True):
        path.write_bytes(content)
    return str(paths[0]), str(paths[1])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(home: Path) -> Authority:
    return Authority.open(home / "authority", name="north")


@pytest.fixture(scope="module")
def ca(authority: Authority) -> str:
    return str(authority.folder / "ca.crt")


@pytest.fixture(scope="module", params=["mosquitto", "embedded"])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    try:
        broker.choose(found)
    except ConnectionFailed as error:
        pytest.skip(str(error))
    return found


@pytest.fixture(scope="module")
def served(home: Path, authority: Authority, ca: str, kind: Kind) -> Iterator[BrokerProcess]:
    tls = Tls(ca, *written(home, "broker", authority.issue("broker", hosts=HERE)))
    rules = None
    if kind == "embedded":  # the users that certificates may stand for
        rules = home / "rules.json"
        users = [{"user": name} for name in NODES]
        rules.write_text(json.dumps({"users": users}))
    with broker.start(directory=home, kind=kind, guard=Guard(tls=tls, rules=rules)) as process:
        yield process


def connect(
    port: int,
    tls: Tls | None,
    *,
    host: str = "127.0.0.1",
    body: bytes = b"hello",
    timeout_s: float = 0.2,
) -> bytes:
    """Connect, send a large body to oneself, and return what arrives. Raises ConnectionFailed."""
    arrived: list[bytes] = []

    async def play() -> None:
        done = asyncio.Event()

        def received(topic: str, payload: bytes, retained: bool) -> None:
            if payload == b"begin":
                connection.publish_body("t", Body(memoryview(body)), done=lambda: None)
            else:
                arrived.append(payload)
                done.set()

        async def connected() -> None:
            connection.subscribe(["t"], qos=1)
            connection.publish("t", b"begin", qos=1)

        connection = BrokerConnection(
            BrokerAddress(host, port, tls=tls),
            Handlers(received, connected),
            client_id="device-0-a",
            keepalive_s=30,
        )
        running = asyncio.create_task(connection.run(connect_timeout_s=timeout_s))
        waiting = asyncio.create_task(done.wait())
        async with asyncio.timeout(30):
            await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
        for task in (running, waiting):
            task.cancel()
        await asyncio.wait((running, waiting))
        if not running.cancelled():
            running.result()

    asyncio.run(play())
    return arrived[0]


def test_a_certificate_of_the_authority_connects_and_large_bodies_arrive(
    served: BrokerProcess, home: Path, authority: Authority, ca: str
) -> None:
    tls = Tls(ca, *written(home, "device-0", authority.issue("device-0")))
    body = os.urandom(9_000_000)
    assert connect(served.port, tls, body=body) == body
    limit = asyncio.run(reported_limit(BrokerAddress("127.0.0.1", served.port, tls=tls)))
    assert (limit is not None) == (served.kind == "mosquitto"), "asked by TLS, too"


def test_a_certificate_of_the_future_names_the_clock_that_is_to_be_set(
    authority: Authority, ca: str, tmp_path: Path
) -> None:
    soon = datetime.now(UTC) + timedelta(days=2)
    brokers = Tls(ca, *written(tmp_path, "b", authority.issue("broker", hosts=HERE, now=soon)))
    with pytest.raises(ssl.SSLCertVerificationError) as refused:
        handshake(
            brokers.server_context(clients=ssl.CERT_NONE), Tls(ca).client_context(), host=HERE[0]
        )
    assert "is not yet valid by this machine's clock. Set that" in reason_of(refused.value)


def test_what_is_refused_and_with_which_line(
    served: BrokerProcess, home: Path, authority: Authority, ca: str, tmp_path: Path
) -> None:
    other = Authority.open(tmp_path / "other", name="other")
    own = Tls(ca, *written(tmp_path, "own", authority.issue("device-0")))
    cases = {
        "certificate is refused: unable to get local issuer|self-signed": Tls(
            str(other.folder / "ca.crt")
        ),
        "requires a certificate": Tls(ca),
        "does not know the authority|refuses our certificate": Tls(
            ca, *written(tmp_path, "a", other.issue("device-0"))
        ),
        "has expired": Tls(ca, *written(tmp_path, "b", authority.issue("device-0", now=LONG_AGO))),
        "not yet valid|refuses our certificate": Tls(
            ca, *written(tmp_path, "c", authority.issue("device-0", now=NOW + timedelta(days=3)))
        ),
        "closed by the broker": None,
    }
    for line, tls in cases.items():
        waits = tls is None or "yet" in line  # for another broker at the port, or for a clock
        with pytest.raises(ConnectionFailed, match=line) as failure:
            connect(served.port, tls, timeout_s=0.2 if waits or "expired" in line else 1000.0)
        assert "\n" not in str(failure.value)
    with pytest.raises(ConnectionFailed, match="certificate is refused: Hostname mismatch"):
        connect(served.port, own, host="localhost")


# Options


def test_the_options_name_the_files_that_cannot_be_used(
    tmp_path: Path, authority: Authority, ca: str
) -> None:
    certificate, key = written(tmp_path, "device-0", authority.issue("device-0"))
    own = Login(
        tls_ca=ca, tls_cert=str(tmp_path / "{name}.crt"), tls_key=str(tmp_path / "{name}.key")
    )
    found = own.address("localhost", node="device-0")
    assert found.port == 8883 and found.tls == Tls(ca, certificate, key)
    wrong = {
        r"--tls-ca = '.*none': No such file": Login(tls_ca=str(tmp_path / "none")),
        r"--tls-ca = '.*device-0.key': no certificate or crl found": Login(tls_ca=key),
        r"--tls-cert, --tls-key = '.*device-1.crt .*': No such file": own,
        r"--tls-key = .*a key without its certificate": Login(tls=True, tls_key=key),
        r"--tls-cert, --tls-key = .*key values mismatch": Login(
            tls_cert=certificate, tls_key=str(authority.folder / "ca.key")
        ),
    }
    for line, login in wrong.items():
        with pytest.raises(InvalidExperiment, match=line):
            login.address("localhost", node="device-1" if login is own else "device-0")


def test_a_refused_certificate_ends_a_command_with_its_exit_code(
    served: BrokerProcess, ca: str
) -> None:
    found = invoke(
        "lab",
        "status",
        "--broker",
        f"127.0.0.1:{served.port}",
        "--tls-ca",
        ca,
        "--connect-timeout",
        "0.1",
    )
    assert found.exit_code == 3 and "requires a certificate" in found.output


# The authority


def test_certificates_are_kept_and_renewed_in_time(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path, name="north", now=NOW)
    first = authority.of("broker", hosts=["10.0.0.1", "server"], now=NOW)
    assert (
        Authority.open(tmp_path, name="north").of("broker", hosts=["server", "10.0.0.1"], now=NOW)
        == first
    )
    assert authority.of("broker", hosts=["10.0.0.2"], now=NOW) != first, "of another address"
    late = NOW + timedelta(days=CERTIFICATE_DAYS - RENEWED_DAYS)
    kept = authority.of("broker", hosts=["10.0.0.2"], now=late - timedelta(days=1))
    assert authority.of("broker", hosts=["10.0.0.2"], now=late + timedelta(days=1)) != kept
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()} == {
        0o600
    }


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, *, host: str) -> None:
    """Shake hands in memory. Raises what refuses the other side."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(3):
        for side in sides:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()


def test_a_node_passes_as_no_server_and_a_server_as_no_other(
    tmp_path: Path, authority: Authority, ca: str
) -> None:
    hosts = {"device-0": (), "broker": ("10.0.0.1",), "metrics": (SERVER_NAME,)}
    own = {
        name: Tls(ca, *written(tmp_path, name, authority.issue(name, hosts=on)))
        for name, on in hosts.items()
    }
    served = {name: tls.server_context(clients=ssl.CERT_REQUIRED) for name, tls in own.items()}
    client = own["device-0"].client_context()
    handshake(served["broker"], client, host="10.0.0.1")
    handshake(served["metrics"], client, host=SERVER_NAME)
    with pytest.raises(ssl.SSLCertVerificationError, match="unsuitable certificate purpose"):
        handshake(served["device-0"], client, host="device-0")
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        handshake(served["metrics"], client, host="10.0.0.1")
    for name in ("broker", "metrics"):
        with pytest.raises(ssl.SSLCertVerificationError, match="unsuitable certificate purpose"):
            handshake(served["broker"], own[name].client_context(), host="10.0.0.1")


def test_no_broker_takes_a_servers_certificate_as_a_login(
    served: BrokerProcess, home: Path, authority: Authority, ca: str
) -> None:
    with pytest.raises(ConnectionFailed, match="refuses our certificate"):
        connect(
            served.port,
            Tls(ca, *written(home, "cloud-server", authority.issue("cloud", hosts=HERE))),
        )


def spoken(log: Path, **login: str) -> bytes:
    """Return what the embedded broker replies to a subscription to everything by NATS's own
    protocol.
    """
    (port,) = re.findall(r"Listening for client connections on 127.0.0.1:(\d+)", log.read_text())
    with (
        socket.create_connection(("127.0.0.1", int(port)), timeout=10) as client,
        client.makefile("rb") as replies,
    ):
        assert replies.readline().startswith(b"INFO ")
        client.sendall(
            f"CONNECT {json.dumps({'verbose': True} | login)}\r\nSUB > 1\r\nPING\r\n".encode()
        )
        return replies.readline()


@pytest.mark.parametrize("way", ["certificates", "rules", "login", "passwords"])
def test_the_embedded_broker_lets_nobody_in_by_its_own_protocol(
    way: str, tmp_path: Path, authority: Authority, ca: str
) -> None:
    own = Tls(ca, *written(tmp_path, "broker", authority.issue("broker", hosts=HERE)))
    device = Tls(ca, *written(tmp_path, "device-0", authority.issue("device-0")))
    rules, passwords = tmp_path / "rules", tmp_path / "passwords"
    rules.write_text(json.dumps({"users": [{"user": "device-0"}]}))
    passwords.write_text("device-0:$2b$04$abcdefghijklmnopqrstuu2r9OfJnfCsdneAXAGHnS4UpFFP8WIrW\n")
    guard = {
        "certificates": Guard(tls=own),
        "rules": Guard(tls=own, rules=rules),
        "login": Guard(login=("device-0", "secret")),
        "passwords": Guard(passwords=passwords),
    }[way]
    with broker.start(directory=tmp_path, kind="embedded", guard=guard) as served:
        if guard.tls is not None:
            assert connect(served.port, device) == b"hello"
            with pytest.raises(ConnectionFailed, match="requires a certificate"):
                connect(served.port, Tls(ca))
        for user in ("device-0", nats.ANYBODY):
            for password in ("", "secret"):
                refused = spoken(served.log, user=user, **{"pass": password})
                assert refused == spoken(served.log) == b"-ERR 'Authorization Violation'\r\n"
    with pytest.raises(ConnectionFailed, match="not those of NATS that `provision` writes"):
        broker.start(directory=tmp_path, kind="embedded", guard=Guard(rules=passwords))


# Revoked certificates


@dataclass(frozen=True)
class Revoking:
    """An authority whose list is read from where a kit installs it."""

    authority: Authority
    crl: Path

    def of(self, name: str, *, hosts: Sequence[str] = (), now: datetime | None = None) -> Tls:
        """Return the present certificate of a name, in files of its own."""
        issued = self.authority.of(name, hosts=hosts, now=now)
        paths = written(self.crl.parent, f"{name}-{len(list(self.crl.parent.iterdir()))}", issued)
        return Tls(str(self.authority.folder / "ca.crt"), *paths, str(self.crl))

    def revoke(self, *names: str) -> None:
        self.authority.revoke(names)
        self.install()

    def install(self) -> None:
        self.crl.write_bytes(self.authority.revoked)


@pytest.fixture
def revoking(tmp_path: Path) -> Revoking:
    (tmp_path / "installed").mkdir()
    found = Revoking(
        Authority.open(tmp_path / "authority", name="north"), tmp_path / "installed" / "ca.crl"
    )
    found.install()
    return found


def test_a_revoked_node_is_refused_by_the_broker_with_all_certificates_it_has_had(
    tmp_path: Path, revoking: Revoking
) -> None:
    if broker.choose() != "mosquitto":
        pytest.skip("mosquitto is not installed")
    first = revoking.of("device-0", now=NOW - timedelta(days=CERTIFICATE_DAYS - RENEWED_DAYS + 1))
    renewed, other = revoking.of("device-0"), revoking.of("device-1")
    guard = Guard(tls=revoking.of("broker", hosts=HERE))
    with broker.start(directory=tmp_path, kind="mosquitto", guard=guard) as served:
        assert connect(served.port, first) == connect(served.port, renewed) == b"hello"
    revoking.revoke("device-0")
    with broker.start(directory=tmp_path, kind="mosquitto", guard=guard) as served:
        for old in (first, renewed):
            with pytest.raises(ConnectionFailed, match="is revoked"):
                connect(served.port, old)
        assert (
            connect(served.port, revoking.of("device-0")) == connect(served.port, other) == b"hello"
        )


@pytest.mark.parametrize("when", ["before its process goes on", "later"])
def test_a_running_broker_reads_the_list_again(
    when: str, revoking: Revoking, tmp_path: Path
) -> None:
    if broker.choose() != "mosquitto":
        pytest.skip("mosquitto is not installed")
    node, own, port, goes_on = (
        revoking.of("device-0"),
        revoking.of("broker", hosts=HERE),
        free_port(),
        tmp_path / "go",
    )
    os.mkfifo(goes_on)
    code = (
        "from fedstrata.common.net.tls import Tls; from fedstrata.deploy.brokers import broker\n"
        "from fedstrata.deploy.brokers.guard import Guard\n"
        "broker.write_line = lambda line: print(line, flush=True) or "
        f"open({str(goes_on)!r}).read()\n"
        f"broker._RENEW_S = 0.05; broker.run_foreground(port={port}, kind='mosquitto', "
        f"guard=Guard(tls={own!r}))"
    )
    process = spawn([sys.executable, "-c", code])
    try:
        assert process.stdout is not None and b"listens" in process.stdout.readline()
        if when == "later":
            goes_on.write_text("")
        assert connect(port, node) == b"hello"
        revoking.revoke("device-0")
        if when != "later":
            goes_on.write_text("")
        deadline, refusal = time.monotonic() + 30, ""
        while "our certificate is revoked" not in refusal and time.monotonic() < deadline:
            try:
                connect(port, node)
            except ConnectionFailed as error:
                refusal = str(error)
        assert time.monotonic() < deadline, refusal
        assert process.poll() is None
    finally:
        stop(process)


def test_a_revoked_broker_is_refused_by_a_node(
    tmp_path: Path, revoking: Revoking, kind: Kind
) -> None:
    node = revoking.of("device-0")
    stolen = replace(revoking.of("broker", hosts=HERE), revoked=None)
    with broker.start(directory=tmp_path, kind=kind, guard=Guard(tls=stolen)) as served:
        assert connect(served.port, node) == b"hello"
        revoking.revoke("broker")
        with pytest.raises(
            ConnectionFailed, match="the broker's certificate is refused: certificate revoked"
        ):
            connect(served.port, node)


def test_a_revoked_client_is_refused_by_metrics_while_it_runs(revoking: Revoking) -> None:
    own = revoking.of("metrics", hosts=(SERVER_NAME,))
    login = Login(
        tls_ca=own.authority, tls_cert=own.certificate, tls_key=own.key, tls_crl=own.revoked
    )
    first, other = revoking.of("operator"), revoking.of("device-0")

    async def serve() -> str:
        return serve_metrics(
            "0.0.0.0:0", broker=BrokerAddress("127.0.0.1"), login=login, insecure=False
        )[1]

    port = int(asyncio.run(serve()).rpartition(":")[2])
    assert scraped(port, first.client_context()) == 200
    revoking.revoke("operator")
    # the server may close before we read why
    with pytest.raises(OSError, match=r"certificate revoked|EOF|reset"):
        scraped(port, first.client_context())
    assert (
        scraped(port, revoking.of("operator").client_context())
        == scraped(port, other.client_context())
        == 200
    )


def test_a_list_is_valid_as_long_as_its_authority(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path, name="north", now=NOW)
    own = x509.load_pem_x509_certificate(authority.certificate)
    for name in ("a", "b"):
        authority.of(name)
    for count, names in enumerate(([], ["a"], ["a", "b"])):
        authority.revoke(names)
        found = x509.load_pem_x509_crl(Authority.open(tmp_path, name="north").revoked)
        assert (found.last_update_utc, found.next_update_utc) == (
            own.not_valid_before_utc,
            own.not_valid_after_utc,
        )
        assert (
            len(found)
            == found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
            == count
        )


def test_nothing_is_revoked_if_a_name_is_unknown(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path, name="north")
    authority.of("device-0")
    before = authority.revoked
    with pytest.raises(
        InvalidExperiment, match="--revoke = 'device-9': no certificate of this name was issued"
    ):
        authority.revoke(["device-0", "device-9"])
    assert authority.revoked == before
    (tmp_path / "ca.crl").unlink()
    with pytest.raises(
        InvalidExperiment, match=r"ca.crl: No such file or directory.* with all its files"
    ):
        Authority.open(tmp_path, name="north")


def test_what_is_no_list_of_the_authority_is_named(
    tmp_path: Path, revoking: Revoking, kind: Kind
) -> None:
    node, own = revoking.of("device-0"), revoking.of("broker", hosts=HERE)
    for path, line in (
        (node.certificate, "not a list of revoked certificates alone"),  # it would be trusted
        (node.key, "no certificate or crl found"),
        ("none", "No such file"),
    ):
        with pytest.raises(InvalidExperiment, match=f"--tls-crl = '{path}': {line}"):
            replace(node, revoked=path).client_context()
    with pytest.raises(
        InvalidExperiment,
        match=r"--tls-crl = 'x': a list without its authority. Give --tls-ca, too.",
    ):
        Login(tls_crl="x").tls_of("device-0")
    if kind == "embedded":
        with pytest.raises(
            InvalidExperiment, match=r"--tls-crl = .*embedded broker cannot check.*--kind mosquitto"
        ):
            broker.start(directory=tmp_path, kind=kind, guard=Guard(tls=own))
        own = replace(own, revoked=None)
    other = tmp_path / "other.crl"
    other.write_bytes(Authority.open(tmp_path / "other", name="other").revoked)
    with (
        broker.start(directory=tmp_path, kind=kind, guard=Guard(tls=own)) as served,
        pytest.raises(
            ConnectionFailed, match="certificate is refused: unable to get certificate CRL"
        ),
    ):
        connect(served.port, replace(node, revoked=str(other)))


def test_what_is_no_authority_is_named(tmp_path: Path) -> None:
    Authority.open(tmp_path / "a", name="a")
    Authority.open(tmp_path / "b", name="b")
    (tmp_path / "a" / "ca.key").write_bytes((tmp_path / "b" / "ca.key").read_bytes())
    with pytest.raises(InvalidExperiment, match=r"ca.key is not the key of ca.crt. Restore"):
        Authority.open(tmp_path / "a", name="a")
    (tmp_path / "b" / "ca.crt").write_text("x")
    with pytest.raises(InvalidExperiment, match="not an authority"):
        Authority.open(tmp_path / "b", name="b")


def test_a_certificate_that_ends_soon_is_reported(
    tmp_path: Path, authority: Authority, ca: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = {}
    for days in (-1, 10, 100):
        issued = authority.issue(
            "device-0", days=CERTIFICATE_DAYS, now=NOW - timedelta(days=CERTIFICATE_DAYS - days)
        )
        tls = Tls(ca, *written(tmp_path, f"of-{days}", issued))
        ends[days] = tls.ends_at() or 0.0
        report_certificates(BrokerAddress("127.0.0.1", tls=tls))
    assert ends[-1] == 0.0 and ends[10] == pytest.approx(
        (NOW + timedelta(days=10)).timestamp(), abs=2
    )
    lines = capsys.readouterr().err.splitlines()
    ended, soon = [line for line in lines if line.startswith("certificate ")]
    assert "of--1.crt has ended" in ended and "of-10.crt ends in 10 days. Renew it" in soon
    assert Tls(ca).ends_at() is None


def test_a_role_without_a_list_of_revoked_certificates_reports_that(
    ca: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report_certificates(BrokerAddress("127.0.0.1"))
    report_certificates(BrokerAddress("127.0.0.1", tls=Tls(ca, revoked="ca.crl")))
    assert capsys.readouterr().err == ""
    report_certificates(BrokerAddress("127.0.0.1", 8883, tls=Tls(ca)))
    line = "broker 127.0.0.1:8883: a revoked certificate is accepted, as no --tls-crl is given\n"
    assert capsys.readouterr().err == line


# Metrics


def scraped(
    port: int, context: ssl.SSLContext | None, path: str = "/metrics", login: str = ""
) -> int:
    """Return the status of a request, by TLS to a server of the name that all have."""
    head = f"GET {path} HTTP/1.0\r\n"
    if login:
        head += f"Authorization: Basic {b64encode(login.encode()).decode()}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        secured = (
            plain if context is None else context.wrap_socket(plain, server_hostname=SERVER_NAME)
        )
        with secured:
            secured.sendall(f"{head}\r\n".encode())
            return int(secured.recv(4096).split()[1])


def test_metrics_beyond_this_machine_need_a_certificate_or_a_login(
    tmp_path: Path, authority: Authority, ca: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "metrics", authority.issue("metrics", hosts=(SERVER_NAME,)))
    own = Tls(ca, *written(tmp_path, "device-0", authority.issue("device-0")))
    broker = BrokerAddress("127.0.0.1", tls=own)
    login = Login(
        tls_ca=ca, tls_cert=str(tmp_path / "{name}.crt"), tls_key=str(tmp_path / "{name}.key")
    )
    monkeypatch.setenv("FEDSTRATA_METRICS_LOGIN_FILE", str(tmp_path / "login"))
    (tmp_path / "login").write_text("prometheus:secret\n")

    async def serve() -> tuple[str, str]:
        _, guarded = serve_metrics("0.0.0.0:0", broker=broker, login=login, insecure=False)
        _, plain = serve_metrics("127.0.0.1:0", broker=broker, login=login, insecure=False)
        return guarded, plain

    guarded, plain = asyncio.run(serve())
    assert guarded.startswith("https://") and "0.0.0.0" not in guarded
    port = int(guarded.rpartition(":")[2])
    stranger = Tls(ca).client_context()
    assert scraped(port, own.client_context()) == 200
    assert (
        scraped(port, stranger)
        == scraped(port, stranger, "/sd")
        == scraped(port, stranger, login="prometheus:")
        == 401
    )
    assert scraped(port, stranger, login="prometheus:secret") == 200
    assert scraped(port, stranger, "/healthz") in (200, 503)
    with pytest.raises((OSError, IndexError)):  # closed
        scraped(port, None)
    assert scraped(int(plain.rpartition(":")[2]), None) == 200


def test_metrics_beyond_this_machine_are_refused_without(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def serve(*, insecure: bool) -> None:
        serve_metrics(
            "0.0.0.0:0", broker=BrokerAddress("127.0.0.1"), login=Login(), insecure=insecure
        )

    with pytest.raises(
        InvalidExperiment, match=r"--metrics = '0.0.0.0:0': reachable by others.*--insecure"
    ):
        asyncio.run(serve(insecure=False))
    asyncio.run(serve(insecure=True))
    assert "as --insecure allows" in capsys.readouterr().err


def test_a_broker_that_others_reach_needs_logins_and_tls(tmp_path: Path) -> None:
    open_tls = Tls(None, "broker.crt", "broker.key")
    for guard, lacks in (
        (Guard(), "no login and no TLS"),
        (Guard(tls=open_tls), "no login"),
        (Guard(passwords=tmp_path / "passwords"), "no TLS"),
    ):
        with pytest.raises(
            InvalidExperiment, match=f"--host = '0.0.0.0': reachable by others, with {lacks}"
        ):
            guard.check_reach("0.0.0.0", insecure=False)
        guard.check_reach("0.0.0.0", insecure=True)
        guard.check_reach("::1", insecure=False)
    Guard(passwords=tmp_path / "passwords", tls=open_tls).check_reach("0.0.0.0", insecure=False)
    for words, needed in (("--tls-ca x", "--tls-cert"), ("--tls-cert x --tls-crl y", "--tls-ca")):
        refused = invoke("broker", *words.split())
        assert (
            refused.exit_code == 4
            and f"of no use without {needed}. Give {needed}, too." in refused.output
        )
    assert invoke("broker", "--host", "0.0.0.0").exit_code == 4
