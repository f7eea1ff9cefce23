"""`lab.toml`, and the kits of its machines."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest
import typer
from cryptography import x509
from typer.core import TyperGroup

from docs.tools.locked import FOLDER
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.net.tls import Tls
from fedstrata.deploy.cli.main import app
from fedstrata.deploy.console.login import Login
from fedstrata.deploy.kits.access import users
from fedstrata.deploy.kits.lab_file import Lab, LabAccess, expand, load, reach
from fedstrata.deploy.kits.provision import INSTALLER, find_wheel, provision
from fedstrata.deploy.kits.units import digest, services, unit
from tests.helpers.commands import invoke
from tests.helpers.kits import wheel_in

RACK = """
name = "rack"
broker = "main"

[machines]
server = { address = "10.0.0.1", cloud = true, metrics = true }
pi-0 = { address = "10.0.0.10", user = "pi", memory_gb = 0.75, link = "wan-50mbit", extras = ["methods"] }

[machines.gpu-0]
address = "fd00::20"
accelerator = "cuda:0"
slots = 2
energy = "plug:plugs/gpu-0"
data = "/srv/data"
allow = ["nets.own"]

[brokers]
main = { machine = "server" }
site = { machine = "pi-0", port = 1884 }
cluster = { addresses = ["a", "b"] }

[institutions]
region-0 = { machine = "server", broker = "cluster" }
institution-0 = { machine = "pi-0", parent = "region-0", broker = "site" }

[[devices]]
names = ["device-0..2", "probe"]
machine = "gpu-0"
parent = "institution-0"

[[devices]]
names = ["device-3"]
machine = "gpu-0"
parent = "region-0"
"""


def rack(home: Path, text: str = RACK) -> Path:
    file = home / "lab.toml"
    file.write_text(text)
    return file


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return load(rack(tmp_path))


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return wheel_in(tmp_path / "dist")


def test_a_node_meets_its_children_on_its_own_broker_or_its_parents(lab: Lab) -> None:
    places = {
        parent: lab.meeting_place(parent) for parent in ("cloud", "region-0", "institution-0")
    }
    assert places == {"cloud": "main", "region-0": "cluster", "institution-0": "site"}
    assert lab.addresses() == ["10.0.0.1:8883", "a,b", "10.0.0.10:1884"]
    assert lab.address("site", machine="pi-0") == "localhost:1884"
    assert lab.parents["probe"] == "institution-0" and len(lab.parents) == 7
    everywhere = Lab.model_validate(lab.model_dump() | {"brokers": {"main": {"machine": "gpu-0"}}})
    assert everywhere.address("main") == "[fd00::20]:8883"


def test_names_of_many_devices() -> None:
    assert expand(["a", "d-9..11", "x2.5"]) == ["a", "d-9", "d-10", "d-11", "x2.5"]
    for name in ("d-3..1", "d-0..999999999", "a b", "../x", ""):
        with pytest.raises(InvalidExperiment, match="Write for instance"):
            expand([name])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'broker = "main"',
            'broker = "mian"',
            r"broker = 'mian': nothing in this lab .* Did you mean 'main'\?",
        ),
        (
            'machine = "pi-0"',
            'machine = "pi-1"',
            r"brokers.site.machine = 'pi-1'.* Did you mean 'pi-0'\?",
        ),
        (
            'parent = "region-0"',
            'parent = "region-1"',
            r"the parent of \S+ = 'region-1'.* Did you mean 'region-0'\?",
        ),
        (
            '{ machine = "server", b',
            '{ machine = "server", parent = "institution-0", b',
            "is below itself",
        ),
        ('"probe"', '"device-1"', "name = 'device-1': 2 nodes have this name"),
        *(
            ('"probe"', f'"{name}"', f"name = '{name}': a reserved name")
            for name in ("cloud", "operator", "ca", "broker-main", "metrics")
        ),
        ('"b"]', '"b:x"]', r"brokers.cluster.addresses = \['a', 'b:x'\]: .*"),
        ("port = 1884", 'addresses = ["x"]', "Give one of machine and addresses"),
        (
            '{ machine = "pi-0", port = 1884 }',
            "{ port = 1884 }",
            "Give one of machine and addresses",
        ),
        ('"pi-0", port = 1884', '"server"', "brokers = 'server': 2 brokers on its port 8883"),
        ("slots = 2", 'link = "lte5"', r"machines.gpu-0.link = 'lte5': no profile has this name"),
        ("plug:plugs/gpu-0", "plug:plugs/#", "a source of energy, for instance rapl or plug:TOPIC"),
        ("slots = 2", "slot = 2", r"machines.gpu-0.slot = 2: unknown key. Did you mean 'slots'\?"),
        ('"cuda:0"', '"gpu"', "machines.gpu-0.accelerator = 'gpu'"),
        ('"/srv/data"', '"/srv/my data"', "machines.gpu-0.data"),
        ('name = "rack"', 'name = "rack"\ninstall = "/"', "install = '/'"),
        ('name = "rack"', "name = rack", "not TOML"),
    ],
)
def test_mistakes_are_named_with_their_remedy(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert RACK.count(old) >= 1
    with pytest.raises(InvalidExperiment, match=message):
        load(rack(tmp_path, RACK.replace(old, new, 1)))


def test_a_lab_is_reached_by_its_name_or_its_file(tmp_path: Path, lab: Lab) -> None:
    own = Login(username="me")
    assert reach("rack", None, own) == LabAccess("rack", ["localhost"], own)
    assert reach(str(rack(tmp_path)), None, own) == LabAccess("rack", lab.addresses(), own, lab)
    assert reach(str(rack(tmp_path)), ["other"], own) == LabAccess("rack", ["other"], own, lab)
    assert lab.addresses("device-0") == ["10.0.0.10:1884"]
    assert lab.addresses("institution-0") == ["a,b", "10.0.0.10:1884"], "its parent's, and its own"
    with pytest.raises(InvalidExperiment, match=r"lab = 'no.toml': No such file"):
        reach("no.toml", None, own)
    refused = invoke("watch", "--lab", "no.toml", "--once")
    assert refused.exit_code == 4 and "No such file" in refused.output


def test_the_services_of_each_machine(lab: Lab) -> None:
    found = {
        machine: {each.name: " ".join(each.command) for each in services(lab, machine)}
        for machine in lab.machines
    }
    tls = "/etc/fedstrata/tls"
    guards = {
        name: f" --kind mosquitto --tls-cert {tls}/broker-{name}.crt --tls-key "
        f"{tls}/broker-{name}.key"
        f" --rules {tls}/broker-{name}.acl --tls-ca {tls}/ca.crt --tls-crl {tls}/ca.crl"
        for name in ("main", "site")
    }
    assert found == {
        "server": {
            "broker-main": "broker --host 0.0.0.0 --port 8883" + guards["main"],
            "region-0": "institution --name region-0 --parent cloud --broker localhost:8883"
            " --child-broker a,b --spool /var/lib/fedstrata/spool --lab rack --metrics 0.0.0.0:0",
        },
        "pi-0": {
            "link": "links apply --up 50 --down 50 --delay 22.5 --to a --to b",
            "broker-site": "broker --host 0.0.0.0 --port 1884" + guards["site"],
            "institution-0": "institution --name institution-0 --parent region-0 --broker a,b"
            " --child-broker localhost:1884 --spool /var/lib/fedstrata/spool --lab rack",
        },
        "gpu-0": {
            "devices": "device"
            + "".join(
                f" --name {name} --parent institution-0 --broker 10.0.0.10:1884"
                for name in ("device-0", "device-1", "device-2", "probe")
            )
            + " --name device-3 --parent region-0 --broker a,b"
            " --accelerator cuda:0 --slots 2 --energy plug:plugs/gpu-0 --data /srv/data --allow "
            "nets.own --lab rack"
        },
    }


def test_the_first_device_of_a_machine_may_read_its_plug(lab: Lab) -> None:
    found = {
        (broker, name): access.receive
        for broker in lab.brokers
        for name, access in users(lab, broker).items()
    }
    assert [who for who, topics in found.items() if "plugs/gpu-0" in topics] == [
        ("site", "device-0")
    ]


def test_a_lab_without_tls_is_marked_in_its_commands(tmp_path: Path) -> None:
    lab = load(rack(tmp_path, RACK.replace('broker = "main"', 'broker = "main"\ntls = false', 1)))
    broker, region = services(lab, "server")
    assert broker.command == ("broker", "--host", "0.0.0.0", "--port", "1883", "--insecure")
    assert region.command[-3:] == ("--metrics", "0.0.0.0:0", "--insecure")
    assert "TLS" not in unit(lab, "server", region)


def test_the_digest_of_a_kit_is_that_of_its_own_services(tmp_path: Path, lab: Lab) -> None:
    before = {machine: digest(lab, machine) for machine in lab.machines}
    region = next(each for each in services(lab, "server") if each.name == "region-0")
    assert f"FEDSTRATA_KIT={before['server']} " in unit(lab, "server", region)
    more = load(rack(tmp_path, RACK.replace('"probe"', '"probe", "device-9"')))
    moved = load(rack(tmp_path, RACK.replace("port = 1884", "port = 1885")))
    assert [m for m in lab.machines if digest(more, m) != before[m]] == ["gpu-0"]
    assert [m for m in lab.machines if digest(moved, m) != before[m]] == ["pi-0", "gpu-0"]


def test_the_command_line_accepts_each_service(lab: Lab) -> None:
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    found = [each for machine in lab.machines for each in services(lab, machine)]
    for words in [each.command for each in found] + [each.undo for each in found if each.undo]:
        command, rest = root.commands[words[0]], list(words[1:])
        while isinstance(command, TyperGroup):
            command = command.commands[rest.pop(0)]
        assert command.make_context(words[0], rest).args == []


def settings(text: str) -> RawConfigParser:
    parser = RawConfigParser(strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(text)
    return parser


def test_a_unit_is_started_again_but_not_after_a_mistake(lab: Lab) -> None:
    (broker, link, institution), (devices,) = services(lab, "pi-0"), services(lab, "gpu-0")
    read = settings(unit(lab, "pi-0", institution))
    service = read["Service"]
    assert service["ExecStart"] == "/opt/fedstrata/venv/bin/fedstrata " + " ".join(
        institution.command
    )
    assert (service["Type"], service["Restart"], service["RestartPreventExitStatus"]) == (
        "notify",
        "on-failure",
        "2 4",
    )
    assert service["SuccessExitStatus"] == "130" and service["MemoryMax"] == "768M"
    assert (
        read["Unit"]["After"]
        == "network-online.target fedstrata-broker-site.service fedstrata-link.service"
    )
    assert service["PrivateDevices"] == "yes"
    on_gpu = settings(unit(lab, "gpu-0", devices))["Service"]
    assert (
        "PrivateDevices" not in on_gpu
        and "SystemCallFilter" not in on_gpu
        and "MemoryMax" not in on_gpu
    )
    assert "PrivateDevices" in unit(lab, "pi-0", broker)
    once = settings(unit(lab, "pi-0", link))["Service"]
    assert (once["Type"], once["ExecStop"]) == (
        "oneshot",
        "/opt/fedstrata/venv/bin/fedstrata links clear",
    )


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
def test_systemd_accepts_the_units(lab: Lab, tmp_path: Path) -> None:
    program = Path(lab.install) / "venv" / "bin" / "fedstrata"
    for machine in lab.machines:
        for service in services(lab, machine):
            text = unit(lab, machine, service).replace(str(program), "/bin/true")
            (tmp_path / f"fedstrata-{service.name}.service").write_text(text)
    files = sorted(tmp_path.glob("*.service"))
    done = subprocess.run(
        ["systemd-analyze", "verify", *files], capture_output=True, text=True, check=False
    )
    assert len(files) == 6 and done.returncode == 0 and done.stderr == ""


def test_a_kit_has_all_that_its_machine_needs(lab: Lab, tmp_path: Path, wheel: Path) -> None:
    file, out = rack(tmp_path), tmp_path / "kits"
    for _ in range(2):  # the second time replaces the first
        kits = provision(lab, file, wheel=wheel, out=out)
        (out / "pi-0" / "units" / "fedstrata-stale.service").touch()
    assert [kit.name for kit in kits] == ["server", "pi-0", "gpu-0"]
    provision(lab, file, wheel=wheel, out=out)
    own = [f"fedstrata-{name}.service" for name in ("broker-site", "institution-0", "link")]
    others = ("tls", "locked")
    found = sorted(
        path.name
        for path in (out / "pi-0").rglob("*")
        if path.is_file() and path.parent.name not in others
    )
    assert {path.name: path.read_bytes() for path in (out / "pi-0" / "locked").iterdir()} == {
        path.name: path.read_bytes() for path in FOLDER.iterdir()
    }
    assert found == ["README.md", wheel.name, *own, "install.sh", "kit.env", "lab.toml"]
    own = [f"{name}.{kind}" for name in ("broker-site", "institution-0") for kind in ("crt", "key")]
    assert sorted(path.name for path in (out / "pi-0" / "tls").iterdir()) == sorted(
        [*own, "broker-site.acl", "ca.crl", "ca.crt"]
    )
    assert {path.stat().st_mode & 0o777 for path in (out / "pi-0" / "tls").iterdir()} == {0o600}
    assert {path.name for path in (out / "server" / "tls").glob("*.key")} == {
        "broker-main.key", "cloud.key", "metrics.key", "operator.key", "region-0.key",
    }  # fmt: skip
    assert sorted(path.name for path in out.glob("cluster.*")) == [
        "cluster.crt", "cluster.emqx", "cluster.key", "cluster.mosquitto", "cluster.nats",
    ]  # fmt: skip
    own = x509.load_pem_x509_certificate((out / "cluster.crt").read_bytes())
    hosts = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert hosts.get_values_for_type(x509.DNSName) == ["a", "b"], (
        "of a server at the broker's addresses"
    )
    assert (out / "cluster.key").stat().st_mode & 0o777 == 0o600
    assert "ssh -t pi@10.0.0.10 sudo ./pi-0/install.sh" in (out / "pi-0" / "README.md").read_text()
    assert "pi-0 ansible_host=10.0.0.10 ansible_user=pi\n" in (out / "hosts.ini").read_text()
    assert (out / "install.yml").is_file()
    extras = {"server": "learning", "pi-0": "methods", "gpu-0": "learning"}
    for kit in kits:
        units = [f"fedstrata-{service.name}.service" for service in services(lab, kit.name)]
        assert sorted(path.name for path in (kit / "units").iterdir()) == sorted(units)
        assert dict(line.split("=", 1) for line in shlex.split((kit / "kit.env").read_text())) == {
            "MACHINE": kit.name,
            "INSTALL": "/opt/fedstrata",
            "WHEEL": wheel.name,
            "EXTRAS": extras[kit.name],
            "UNITS": " ".join(units),
            "MOSQUITTO": "no" if kit.name == "gpu-0" else "yes",
        }


def test_certificates_are_kept_revoked_and_found_beside_the_file(
    lab: Lab, tmp_path: Path, wheel: Path
) -> None:
    file, out = rack(tmp_path), tmp_path / "kits"
    words = ["provision", str(file), "--out", str(out), "--wheel", str(wheel)]
    with pytest.raises(
        InvalidExperiment, match=r"no certificates beside the lab's file. Install a kit"
    ):
        reach(str(file), None, Login())
    assert invoke(*words).exit_code == 0
    first = (out / "pi-0" / "tls" / "institution-0.crt").read_bytes()
    assert invoke(*words).exit_code == 0
    assert (out / "pi-0" / "tls" / "institution-0.crt").read_bytes() == first
    done = invoke(*words, "--revoke", "institution-0", "--revoke", "device-1")
    assert done.exit_code == 0
    assert (
        "revoked: institution-0, device-1. First, as the old certificates are accepted until "
        "then: give "
        f"{tmp_path / 'rack-authority' / 'ca.crl'} to broker cluster, and install these kits: "
        "server, pi-0. "
        "Then install these kits: gpu-0\n"
    ) in done.output, "the brokers' machines, and a renewed one"
    by_nodes = invoke(*words, "--revoke", "broker-site").output
    assert "and install these kits: server, pi-0, gpu-0\n" in by_nodes, "nodes refuse it"
    before = (out / "cluster.crt").read_bytes()
    assert (
        ". Give its new certificate and key to cluster"
        in invoke(*words, "--revoke", "broker-cluster").output
    )
    assert (out / "cluster.crt").read_bytes() != before
    assert (out / "pi-0" / "tls" / "institution-0.crt").read_bytes() != first
    assert invoke(*words, "--revoke", "institution-9").exit_code == 4
    kept = (tmp_path / "rack-authority" / "ca.crl").read_bytes()
    assert {(out / machine / "tls" / "ca.crl").read_bytes() for machine in lab.machines} == {kept}
    plain = rack(tmp_path, RACK.replace('broker = "main"', 'broker = "main"\ntls = false', 1))
    assert (
        "this lab has no certificates"
        in invoke("provision", plain, *words[2:], "--revoke", "device-1").output
    )
    rack(tmp_path)
    login = reach(str(file), None, Login()).login
    authority = tmp_path / "rack-authority"
    assert login.tls_of("cloud") == Tls(
        *(
            str(authority / path)
            for path in ("ca.crt", "issued/cloud.crt", "issued/cloud.key", "ca.crl")
        )
    )
    shutil.copytree(out / "server" / "tls", tmp_path / "tls")
    login = reach(str(file), None, Login()).login
    assert login.tls_ca == str(tmp_path / "tls" / "ca.crt")


def test_a_folder_that_is_no_kit_is_not_replaced(lab: Lab, tmp_path: Path, wheel: Path) -> None:
    (tmp_path / "kits" / "pi-0").mkdir(parents=True)
    kept = tmp_path / "kits" / "pi-0" / "thesis.tex"
    kept.touch()
    with pytest.raises(InvalidExperiment, match="exists and is no kit"):
        provision(lab, rack(tmp_path), wheel=wheel, out=tmp_path / "kits")
    assert kept.exists()


def test_provision_needs_a_wheel(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = wheel.with_name("fedstrata-0.2.0-py3-none-any.whl")
    newer.touch()
    os.utime(wheel, (1, 1))
    assert find_wheel(None, wheel.parent) == newer and find_wheel(wheel) == wheel
    monkeypatch.chdir(tmp_path / "dist")
    refused = invoke("provision", rack(tmp_path))
    assert refused.exit_code == 4 and "make wheel" in refused.output
    assert invoke("provision", rack(tmp_path), "--wheel", rack(tmp_path)).exit_code == 4


def test_a_wheel_has_the_exact_versions_of_its_packages(lab: Lab, tmp_path: Path) -> None:
    out = tmp_path / "kits"
    older, torn = wheel_in(tmp_path, version="0.0.9", locked=False), wheel_in(tmp_path)
    torn.write_bytes(torn.read_bytes()[:-100])
    for path, problem in ((older, "a release without exact versions"), (torn, "cannot be read")):
        with pytest.raises(InvalidExperiment, match=problem):
            provision(lab, rack(tmp_path), wheel=path, out=out)
    assert not out.exists()


class Host:
    """The folder of a machine into which kits are installed; its Python only notes what it is
    asked.
    """

    def __init__(self, home: Path) -> None:
        self.root, self.asked = home / "root", home / "asked"
        python = self.root / "opt" / "fedstrata" / "venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\necho "$@" >> {self.asked}\n')
        command = python.with_name("fedstrata")
        command.write_text("#!/bin/sh\n")
        for path in (python, command):
            path.chmod(0o755)

    def install(self, kit: Path, *options: str) -> str:
        line = [kit / INSTALLER, "--root", self.root, *options]
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout

    @property
    def units(self) -> list[str]:
        return sorted(path.name for path in (self.root / "etc" / "systemd" / "system").iterdir())


def test_an_installer_puts_renews_and_removes_a_machines_part(
    lab: Lab, tmp_path: Path, wheel: Path
) -> None:
    file, out, host = rack(tmp_path), tmp_path / "kits", Host(tmp_path)
    provision(lab, file, wheel=wheel, out=out)
    assert "installed fedstrata-institution-0.service" in host.install(out / "pi-0")
    services = [
        "fedstrata-broker-site.service",
        "fedstrata-institution-0.service",
        "fedstrata-link.service",
    ]
    assert host.units == services
    assert (host.root / "etc" / "fedstrata" / "lab.toml").read_text() == RACK
    keys = host.root / "etc" / "fedstrata" / "tls"
    assert {path.stat().st_mode & 0o777 for path in keys.iterdir()} == {
        0o640
    } and keys.stat().st_mode & 0o777 == 0o750
    assert (
        os.readlink(host.root / "usr" / "local" / "bin" / "fedstrata")
        == "/opt/fedstrata/venv/bin/fedstrata"
    )
    sets = "".join(f" -r locked/{name}.txt" for name in ("base", "methods"))
    assert host.asked.read_text().splitlines() == [
        f"-m pip install --only-binary :all: --require-hashes{sets}",
        f"-m pip install --force-reinstall --no-deps ./{wheel.name}",
    ]
    smaller = rack(
        tmp_path, RACK.replace('{ machine = "pi-0", port = 1884 }', '{ addresses = ["pi-0:1884"] }')
    )
    provision(load(smaller), smaller, wheel=wheel, out=out)
    assert "removed fedstrata-broker-site.service" in host.install(out / "pi-0")
    assert host.units == services[1:]
    assert host.install(out / "pi-0", "--remove") == "".join(
        f"removed {name}\n" for name in services[1:]
    )
    assert not keys.exists()
    assert host.units == [] and not (host.root / "opt" / "fedstrata" / "venv").exists()
    asked = subprocess.run(
        [out / "pi-0" / INSTALLER, "--rood"], capture_output=True, text=True, check=False
    )
    assert asked.returncode == 2 and "unknown option --rood" in asked.stderr
