"""`fedstrata doctor`: this host, real brokers and the nodes of a lab, with faults made on purpose."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from fedstrata.common.errors import installing
from fedstrata.common.host import examination
from fedstrata.common.host.examination import examine_host
from fedstrata.common.host.processes import free_port
from fedstrata.common.net.address import BrokerAddress
from fedstrata.common.net.tls import Tls
from fedstrata.common.runtime import roll
from fedstrata.common.runtime.roll import call_rolls
from fedstrata.deploy.brokers import broker, contract
from fedstrata.deploy.brokers.guard import Guard
from fedstrata.deploy.cli import doctor
from fedstrata.deploy.console.service import KIT
from fedstrata.deploy.kits import access
from fedstrata.deploy.kits.authority import Authority
from fedstrata.deploy.kits.lab_file import load, parse
from fedstrata.deploy.kits.units import digest
from tests.helpers.commands import command, fedstrata, invoke

TIGHT: Mapping[str, str | int] = {"max_packet_size": 100_000, "max_queued_messages": 3}
HERE: Final = ["127.0.0.1", "localhost"]
LONG_AGO: Final = datetime.now(UTC) - timedelta(days=500)

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def _short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for less time than a slow network needs."""
    monkeypatch.setattr(contract, "REFUSAL_S", 0.3)
    monkeypatch.setattr(doctor, "ROLL_S", 0.2)
    monkeypatch.setattr(roll, "CALL_EVERY_S", 0.2)


def findings(*arguments: str | Path) -> tuple[int, dict[tuple[str, str], Row]]:
    """Run doctor; return its exit code, and each finding by section (host, broker, nodes) and item."""
    done = invoke("doctor", *arguments, "--format", "json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return done.exit_code, {(row["section"].split()[0], row["item"]): row for row in rows}


def examined(served: broker.BrokerProcess) -> tuple[int, dict[str, Row]]:
    code, found = findings("--broker", f"{served.host}:{served.port}")
    return code, {item: row for (section, item), row in found.items() if section == "broker"}


def missing(found: Mapping[tuple[str, str], Row]) -> set[tuple[str, str]]:
    return {where for where, row in found.items() if row["needed"] and not row["there"]}


def test_standard_output_has_the_sections_with_their_headings() -> None:
    done = invoke("doctor", "--broker", "localhost:1")
    sections = done.stdout.split("\n\n")
    assert [section.partition("\n")[0] for section in sections] == [
        "this host",
        "broker localhost:1",
        "",
    ]
    assert all(section.splitlines()[1].startswith("item ") for section in sections[:2])
    assert (
        done.stderr == "examines this host\nexamines broker localhost:1\n" and done.exit_code == 3
    )


def test_an_open_mosquitto_lacks_access_rules_alone(tmp_path: Path) -> None:
    with broker.start(directory=tmp_path, kind="mosquitto") as served:
        code, found = examined(served)
    assert code == 0 and len(found) == 9
    assert [item for item, row in found.items() if not row["there"]] == [
        "other nodes' names are refused"
    ]
    assert [item for item, row in found.items() if row["needed"]] == [
        "name", "TCP", "login", "two connections of one login", "subscriptions are granted",
        "messages are delivered", "packets of 33792 bytes",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_embedded_broker_has_what_is_needed(tmp_path: Path) -> None:
    with broker.start(directory=tmp_path, kind="embedded") as served:
        code, found = examined(served)
    assert code == 0 and all(row["there"] for row in found.values() if row["needed"])


@pytest.mark.slow
def test_what_a_tight_broker_lacks_is_named(tmp_path: Path) -> None:
    with broker.start(directory=tmp_path, kind="mosquitto", settings=TIGHT) as served:
        code, found = examined(served)
    assert (
        code == 0
        and "takes 100000 bytes, not 1001000, as it reports"
        in found["packets of 33792 bytes"]["note"]
    )
    with broker.start(
        directory=tmp_path, kind="mosquitto", settings={"max_packet_size": 2000}
    ) as served:
        code, found = examined(served)
    assert code == 1 and not found["packets of 33792 bytes"]["there"]
    silent = {"message_size_limit": 300_000, "retain_available": "false"}
    with broker.start(directory=tmp_path, kind="mosquitto", settings=silent) as served:
        code, found = examined(served)
    note = (
        "takes 250250 bytes, not 1001000, and it does not report that (mosquitto: "
        "message_size_limit)"
    )
    assert code == 0 and note in found["packets of 33792 bytes"]["note"]


def test_a_broker_that_makes_ids_of_logins_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSTRATA_PASSWORD", "secret")
    settings = {"use_username_as_clientid": "true"}
    guard = Guard(login=("me", "secret"))
    with broker.start(
        directory=tmp_path, kind="mosquitto", guard=guard, settings=settings
    ) as served:
        code, found = findings("--broker", f"127.0.0.1:{served.port}", "--username", "me")
    row = found["broker", "two connections of one login"]
    assert code == 1 and list(found)[-1] == ("broker", "two connections of one login")
    assert "use_username_as_clientid" in row["note"]


# This host


def test_the_cache_is_in_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".cache").mkdir()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    _, found = findings("--broker", "localhost:1")
    assert found["this", "disk of cache"]["note"].endswith(f" free at {tmp_path / '.cache'}")


def test_what_a_host_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 900000 kB\nMemAvailable: 90000 kB\n")
    (tmp_path / "file").touch()
    folders = {"spool": tmp_path / "new" / "spool", "cache": tmp_path / "file" / "cache"}

    def absent(name: str) -> str:
        raise examination.PackageNotFoundError(name)

    found = {one.item: one for one in examine_host(folders, learns=True, proc=tmp_path)}
    assert found["disk of spool"].there and str(tmp_path) in found["disk of spool"].note
    assert not found["disk of cache"].there and "not writable" in found["disk of cache"].note
    assert not found["memory"].there and found["memory"].note == "0.1 of 0.9 GB available"
    assert found["PyTorch"].there
    monkeypatch.setattr(examination, "version", absent)
    monkeypatch.setattr(examination, "DISK_LEAST", 1 << 60)
    found = {one.item: one for one in examine_host(folders, learns=True, proc=tmp_path)}
    assert not found["disk of spool"].there and "make room" in found["disk of spool"].note
    assert found["PyTorch"].needed and found["PyTorch"].note == installing("learning")
    (unneeded,) = (
        one for one in examine_host({}, learns=False, proc=tmp_path) if one.item == "PyTorch"
    )
    assert not unneeded.needed


# The way to a broker, step by step


def without_login(directory: Path, stack: ExitStack) -> list[str]:
    (directory / "passwords").touch()
    guard = Guard(passwords=directory / "passwords")
    served = stack.enter_context(broker.start(directory=directory, kind="mosquitto", guard=guard))
    return ["--broker", f"127.0.0.1:{served.port}"]


def secured(
    directory: Path, stack: ExitStack, *, now: datetime | None = None, trusted: str = "north"
) -> list[str]:
    """Start a broker with a certificate of a time; return the options with the authority of a lab,
    or another one's.
    """
    for name in {"north", trusted}:
        Authority.open(directory / name, name=name)
    issued = Authority.open(directory / "north", name="north").issue("broker", hosts=HERE, now=now)
    files = [directory / "broker.crt", directory / "broker.key"]
    for file, content in zip(files, (issued.certificate, issued.key), strict=True):
        file.write_bytes(content)
    guard = Guard(tls=Tls(None, *map(str, files)))
    served = stack.enter_context(broker.start(directory=directory, kind="mosquitto", guard=guard))
    return ["--broker", f"127.0.0.1:{served.port}", "--tls-ca", str(directory / trusted / "ca.crt")]


@pytest.mark.parametrize(
    ("start", "item", "note"),
    [
        (lambda *_: ["--broker", "no-such-host.invalid"], "name", "no-such-host.invalid: "),
        (
            lambda *_: ["--broker", f"127.0.0.1:{free_port()}"],
            "TCP",
            "Connection refused. Is it running there?",
        ),
        (without_login, "login", "Are the login and --broker right?"),
        (
            lambda d, s: secured(d, s, trusted="south"),
            "TLS",
            "unable to get local issuer certificate",
        ),
        (lambda d, s: secured(d, s, now=LONG_AGO), "TLS", "certificate has expired"),
    ],
)
def test_the_step_to_a_broker_that_fails_is_named(
    tmp_path: Path, start: Callable[[Path, ExitStack], list[str]], item: str, note: str
) -> None:
    with ExitStack() as stack:
        code, found = findings(*start(tmp_path, stack))
    assert code == 3 and {row for section, row in missing(found) if section == "broker"} == {item}
    assert note in found["broker", item]["note"]
    assert list(found)[-1] == ("broker", item), "what follows cannot be examined"


def test_certificates_that_end_soon_are_named(tmp_path: Path) -> None:
    with ExitStack() as stack:
        soon = datetime.now(UTC) - timedelta(days=380)
        code, found = findings(*secured(tmp_path, stack, now=soon))
    assert (
        code == 0 and "certificate by fedstrata lab north, until " in found["broker", "TLS"]["note"]
    )
    row = found["broker", "the broker's certificate is valid for 30 days"]
    assert not row["there"] and "ends in 1" in row["note"] and "provision again" in row["note"]


# A lab with its file

LAB: Final[Mapping[str, Any]] = {
    "name": "north",
    "broker": "main",
    "machines": {"server": {"address": "127.0.0.1", "cloud": True}, "pi": {"address": "127.0.0.1"}},
    "brokers": {"main": {"machine": "server"}},
    "devices": [{"names": ["device-0..2"], "machine": "pi"}],
}
FILE: Final = """
name = "north"
broker = "main"
tls = {tls}
machines.server = {{ address = "127.0.0.1", cloud = true }}
machines.pi = {{ address = "127.0.0.1", accelerator = "cuda:0", data = "/no/such/folder" }}
brokers.main = {{ machine = "server", port = {port} }}
devices = [{{ names = ["device-0..2"], machine = "pi" }}]
"""


def test_access_rules_are_examined_with_a_nodes_own_certificate(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path / "north-authority", name="north")
    for name in ("broker", "operator", "device-0"):
        authority.of(name, hosts=HERE if name == "broker" else ())
    issued = str(tmp_path / "north-authority" / "issued" / "broker")
    rules = tmp_path / "rules"
    rules.write_text(access.mosquitto(parse(dict(LAB)), "main"))
    own = Tls(str(tmp_path / "north-authority" / "ca.crt"), f"{issued}.crt", f"{issued}.key")
    file = tmp_path / "lab.toml"
    with broker.start(
        directory=tmp_path, kind="mosquitto", guard=Guard(tls=own, rules=rules)
    ) as served:
        file.write_text(FILE.format(tls="true", port=served.port))
        code, as_device = findings("--lab", file, "--name", "device-0")
        _, as_operator = findings("--lab", file)
    for found in (as_device, as_operator):
        assert found["broker", "other nodes' names are refused"]["there"]
        assert found["broker", "our certificate is valid for 30 days"]["there"]
        assert {item for section, item in missing(found) if section == "broker"} == set()
    assert code == 1 and missing(as_device) == {("this", "accelerator"), ("this", "data sets")}, (
        "of its machine"
    )
    assert {item for section, item in missing(as_operator)} == {"device-0", "device-1", "device-2"}
    assert as_operator["nodes", "device-1"]["note"] == "does not answer"


def staying(home: Path, stack: ExitStack, name: str, *, kit: str, port: int) -> None:
    """Start a device that stays, as its kit's service does."""
    words = (
        "--name",
        name,
        "--broker",
        f"127.0.0.1:{port}",
        "--lab",
        "north",
        "--data",
        "/no/such/folder",
    )
    with (home / f"{name}.log").open("wb") as log:
        line = command("device", *words, null=True, stay=True)
        process = subprocess.Popen(line, stderr=log, env={**os.environ, KIT: kit})
    stack.callback(process.wait)
    stack.callback(process.kill)


@pytest.mark.slow
def test_nodes_with_an_old_kit_are_named_and_refused(tmp_path: Path) -> None:
    file, experiment = tmp_path / "lab.toml", tmp_path / "experiment.toml"
    experiment.write_text('name = "two"\nrounds = 1\ntopology = "lab"\nmodel.name = "mlp_digits"\n')
    words = ("cloud", experiment, "--lab", file, "--runs", tmp_path / "runs", "--spool", "none")
    with ExitStack() as stack:
        served = stack.enter_context(broker.start(directory=tmp_path, kind="mosquitto"))
        file.write_text(FILE.format(tls="false", port=served.port))
        kits = {"device-0": digest(load(file), "pi"), "device-1": "0123456789ab"}
        for name, kit in kits.items():
            staying(tmp_path, stack, name, kit=kit, port=served.port)
        where = [BrokerAddress("127.0.0.1", served.port)]
        asyncio.run(
            call_rolls(
                where,
                lab="north",
                name="operator",
                wait_s=60.0,
                connect_timeout_s=10.0,
                expected=kits,
            )
        )
        code, found = findings("--lab", file)
        refused = invoke(*words, "--set", 'topology={devices = ["device-0", "device-1"]}')
        taken = fedstrata(*words, null=True)
    old = "the kit of machine pi is not that of this lab file: provision it and install it again"
    lacks = "data sets: /no/such/folder: there is no such folder"
    assert code == 1 and {
        item: row["note"] for (section, item), row in found.items() if section == "nodes"
    } == {"device-0": lacks, "device-1": f"{old}; {lacks}", "device-2": "does not answer"}
    assert refused.exit_code == 4 and f"device-1 cannot take part: {old}" in refused.output
    assert taken.returncode == 0 and f"device-1 is left out: {old}" in taken.stderr, taken.stderr
