"""`fedstrata provision`: a folder for each machine of a lab with all that it needs, and one
playbook for all.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final
from zipfile import BadZipFile, ZipFile

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.host.files import write_private
from fedstrata.common.metrics_server import SERVER_NAME
from fedstrata.common.net.address import parse_hosts
from fedstrata.deploy.console.login import METRICS_NAME
from fedstrata.deploy.kits import access, units
from fedstrata.deploy.kits.lab_file import AUTHORITY, HERE, KEPT_TLS, REVOKED, Lab, authority_of

if TYPE_CHECKING:
    from fedstrata.deploy.kits.authority import Authority

LAB_FILE: Final = "lab.toml"
PLAYBOOK: Final = "install.yml"
INVENTORY: Final = "hosts.ini"
INSTALLER: Final = "install.sh"
LOCKED: Final = "locked"  # the folder of exact versions, in a wheel and in a kit


def find_wheel(given: Path | None, folder: Path = Path("dist")) -> Path:
    """Return the wheel that the machines install: the given one, else the newest in a folder.

    Raises InvalidExperiment.
    """
    if given is not None:
        if given.suffix != ".whl" or not given.is_file():
            raise InvalidExperiment(
                "--wheel", str(given), "not a wheel", "Build one with `make wheel`."
            )
        return given
    wheels = sorted(folder.glob("fedstrata-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        problem = "has no wheel of fedstrata for the machines to install"
        raise InvalidExperiment(
            "--wheel", str(folder), problem, "Build one with `make wheel`, or give --wheel FILE."
        )
    return wheels[-1]


def provision(
    lab: Lab, source: Path, *, wheel: Path, out: Path, authority: Path | None = None
) -> list[Path]:
    """Write the kits of all machines below `out`, replacing earlier ones, and return their folders.

    `source` is the lab's file, `authority` the folder of its authority (beside the file unless
    given), which is made if there is none. A kit has the certificates of its machine alone; those
    of brokers that no machine of the lab runs are beside the kits, with the access rules. Raises
    InvalidExperiment if `out` has something else, or cannot be written.
    """
    kits = [out / machine for machine in lab.machines]
    for kit in kits:
        if kit.exists() and not (kit / INSTALLER).is_file():
            raise InvalidExperiment(
                "--out", str(kit), "exists and is no kit", "Name another folder."
            )
    locked = _locked_of(wheel)
    signer = _authority(lab, authority or authority_of(lab, source)) if lab.tls else None
    try:
        for machine, kit in zip(lab.machines, kits, strict=True):
            shutil.rmtree(kit, ignore_errors=True)
            kit.mkdir(parents=True, mode=0o700)
            _write_kit(lab, machine, source, wheel, locked, kit)
            if signer is not None:
                _write_certificates(lab, machine, signer, kit / KEPT_TLS)
        for name, broker in lab.brokers.items():
            if signer is not None and broker.addresses is not None:
                for form, text in access.FORMS.items():
                    (out / f"{name}.{form}").write_text(text(lab, name), encoding="utf-8")
                own = signer.of(
                    f"broker-{name}",
                    hosts=[host for host, _ in parse_hosts(",".join(broker.addresses))],
                )
                write_private(out / f"{name}.crt", own.certificate)
                write_private(out / f"{name}.key", own.key)
        (out / INVENTORY).write_text(_inventory(lab), encoding="utf-8")
        shutil.copyfile(str(files("fedstrata.deploy.kits") / PLAYBOOK), out / PLAYBOOK)
    except OSError as error:
        raise InvalidExperiment(
            "--out", str(out), error.strerror or str(error), "Name a writable folder."
        ) from None
    return kits


def revoke_certificates(
    lab: Lab, source: Path, names: Sequence[str], *, authority: Path | None = None
) -> str:
    """Revoke all certificates that nodes and brokers have had; return what to do then. Raises
    InvalidExperiment.
    """
    if not lab.tls:
        raise InvalidExperiment(
            "--revoke", names[0], "this lab has no certificates: tls = false", "Omit it."
        )
    folder = authority or authority_of(lab, source)
    _authority(lab, folder).revoke(names)
    renewed = [name for name in lab.machines if not set(names).isdisjoint(_issued_to(lab, name))]
    urgent = _refusing(lab, names)
    later = [name for name, own in lab.machines.items() if own.metrics or own.cloud]
    later = [name for name in dict.fromkeys([*later, *renewed]) if name not in urgent]
    steps = []
    given = [name for name, each in lab.brokers.items() if each.addresses is not None]
    if given:
        steps.append(f"give {folder / REVOKED} to broker {', '.join(given)}")
    if urgent:
        steps.append(f"install these kits: {', '.join(urgent)}")
    text = (
        f"revoked: {', '.join(names)}. First, as the old certificates are accepted until then: "
        f"{', and '.join(steps)}"
    )
    if later:
        text += f". Then install these kits: {', '.join(later)}"
    if new := [name for name in given if f"broker-{name}" in names]:
        text += f". Give its new certificate and key to {', '.join(new)}"
    return text


def _refusing(lab: Lab, names: Sequence[str]) -> list[str]:
    """Return the machines on which somebody is to refuse revoked certificates.

    A node's are refused by brokers, a broker's by nodes.
    """
    brokers = {f"broker-{name}" for name in lab.brokers}
    found = []
    for name in lab.machines:
        refuses_nodes = not brokers.issuperset(names) and lab.brokers_of(name)
        refuses_brokers = not brokers.isdisjoint(names) and lab.nodes_of(name)
        if refuses_nodes or refuses_brokers:
            found.append(name)
    return found


def login(lab: Lab, machine: str) -> str:
    """Return a machine's login for ssh."""
    own = lab.machines[machine]
    if own.user:
        return f"{own.user}@{own.address}"
    return own.address


def _write_kit(
    lab: Lab, machine: str, source: Path, wheel: Path, locked: Mapping[str, bytes], kit: Path
) -> None:
    own = lab.machines[machine]
    found = units.services(lab, machine)
    files_of = {f"fedstrata-{each.name}.service": units.unit(lab, machine, each) for each in found}
    (kit / "units").mkdir()
    for name, text in files_of.items():
        (kit / "units" / name).write_text(text, encoding="utf-8")
    extras = {*own.extras, *(["learning"] if own.cloud or lab.devices_of(machine) else [])}
    facts = {
        "MACHINE": machine,
        "INSTALL": lab.install,
        "WHEEL": wheel.name,
        "EXTRAS": " ".join(sorted(extras)),
        "UNITS": " ".join(files_of),
        "MOSQUITTO": "yes" if lab.brokers_of(machine) else "no",
    }
    lines = [f"{name}={shlex.quote(value)}\n" for name, value in facts.items()]
    (kit / "kit.env").write_text("".join(lines), encoding="utf-8")
    (kit / "README.md").write_text(_readme(lab, machine, found), encoding="utf-8")
    (kit / LOCKED).mkdir()
    for name, content in locked.items():
        (kit / LOCKED / name).write_bytes(content)
    shutil.copyfile(source, kit / LAB_FILE)
    shutil.copyfile(wheel, kit / wheel.name)
    shutil.copyfile(str(files("fedstrata.deploy.kits") / INSTALLER), kit / INSTALLER)
    (kit / INSTALLER).chmod(0o755)


def _locked_of(wheel: Path) -> dict[str, bytes]:
    """Return the files of exact versions of the packages that a wheel was tested with. Raises
    InvalidExperiment.
    """
    found = {}
    try:
        with ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith(f"fedstrata/deploy/{LOCKED}/"):
                    found[name.rpartition("/")[2]] = archive.read(name)
    except (OSError, BadZipFile) as error:
        remedy = "Build one with `make wheel`."
        raise InvalidExperiment("--wheel", str(wheel), f"cannot be read: {error}", remedy) from None
    if INSTALLER not in found:
        problem = "a release without exact versions of its packages"
        raise InvalidExperiment(
            "--wheel", str(wheel), problem, "Give a later release, or build one with `make wheel`."
        )
    return found


def _authority(lab: Lab, folder: Path) -> Authority:
    from fedstrata.deploy.kits.authority import Authority

    return Authority.open(folder, name=lab.name)


def _write_certificates(lab: Lab, machine: str, authority: Authority, folder: Path) -> None:
    """Write the certificates of a machine's nodes and servers, and the brokers' access rules."""
    issued = {
        name: authority.of(name, hosts=hosts) for name, hosts in _issued_to(lab, machine).items()
    }
    private = {f"{name}.crt": each.certificate for name, each in issued.items()}
    private |= {f"{name}.key": each.key for name, each in issued.items()}
    private |= {
        f"broker-{name}.acl": access.mosquitto(lab, name).encode()
        for name in lab.brokers_of(machine)
    }
    private |= {AUTHORITY: authority.certificate, REVOKED: authority.revoked}
    folder.mkdir(mode=0o700)
    for name, content in private.items():
        write_private(folder / name, content)


def _issued_to(lab: Lab, machine: str) -> dict[str, list[str]]:
    """Return the names of a machine's certificates, each with the hosts of its server; a node has
    none.
    """
    own = lab.machines[machine]
    found: dict[str, list[str]] = {name: [] for name in lab.nodes_of(machine)}
    found |= {
        f"broker-{name}": [own.address, HERE, "127.0.0.1"] for name in lab.brokers_of(machine)
    }
    return found | ({METRICS_NAME: [SERVER_NAME]} if own.metrics or own.cloud else {})


def _readme(lab: Lab, machine: str, found: list[units.Service]) -> str:
    rows = (
        "".join(f"- `fedstrata-{each.name}`: {each.description}\n" for each in found) or "- none\n"
    )
    where = login(lab, machine)
    return f"""# {machine}, lab {lab.name}

From the folder that contains this one:

    scp -r {machine} {where}:
    ssh -t {where} sudo ./{machine}/install.sh

The same two commands renew it. `install.sh --back` returns to what the last
installation replaced. `install.sh --remove` removes it. Services:

{rows}
`systemctl status 'fedstrata-*'` shows what they do, `journalctl -u 'fedstrata-*'` their logs. A
login at the broker belongs into {units.LOGIN}, readable by root alone: FEDSTRATA_USERNAME=...,
FEDSTRATA_PASSWORD=...
"""


def _inventory(lab: Lab) -> str:
    lines = ["[lab]"]
    for name, own in lab.machines.items():
        user = f" ansible_user={own.user}" if own.user else ""
        lines.append(f"{name} ansible_host={own.address}{user}")
    return "\n".join(lines) + "\n"
