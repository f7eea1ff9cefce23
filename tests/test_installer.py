"""`install.sh` as root, in folders of its own, with stubs for what changes a machine: users,
services, packages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from fedstrata.deploy.kits.lab_file import load
from fedstrata.deploy.kits.provision import INSTALLER, provision
from tests import test_kits
from tests.helpers.kits import wheel_in

wheel = test_kits.wheel  # a fixture

STUB: Final = '#!/bin/sh\necho "$(basename "$0")" "$@" >> "$STUBS/asked"\n'
KNOWN: Final = (
    STUB + 'if [ "$1 $2" = "passwd fedstrata" ] && [ ! -e "$STUBS/user" ]; then exit 2; fi\n'
)
ADDED: Final = STUB + 'touch "$STUBS/user"\n'
PACKAGES: Final = (
    STUB + 'case "$*" in *mosquitto*) cp "$STUBS/systemctl" "$STUBS/mosquitto" ;; esac\n'
)
# pip installs the command, whose release it prints
PYTHON: Final = (
    STUB
    + 'case "$*" in *./fedstrata-*) wheel=${*##*./fedstrata-}; '
    + 'printf \'#!%s\\n#\\necho %s\\n\' "$(dirname "$0")/sh" "${wheel%%-*}" > "$STUBS/command"; '
    + '[ ! -e "$STUBS/broken" ] || echo "exit 1" >> "$STUBS/command"; '
    + 'rm -f "$(dirname "$0")/fedstrata"; cp "$STUBS/command" "$(dirname "$0")/fedstrata"; '
    + 'chmod 755 "$(dirname "$0")/fedstrata" ;; esac\n'
)
STUBS: Final = {
    "systemctl": STUB,
    "useradd": ADDED,
    "chgrp": STUB,
    "getent": KNOWN,
    "apt-get": PACKAGES,
    "python3.13": STUB,
}
# The folders that the installer writes are empty ones, in a namespace of mounts; what it leaves
# there is copied.
AS_ROOT: Final = """
set -e
mount --bind "$STUBS/etc" /etc
mount --bind "$STUBS/opt" /opt
mount --bind "$STUBS/bin" /usr/local/bin
[ ! -e /usr/sbin/mosquitto ] || mount --bind "$STUBS/none" /usr/sbin/mosquitto
exec "$@"
"""


def namespaces() -> bool:
    done = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    )
    return done.returncode == 0


pytestmark = pytest.mark.skipif(
    shutil.which("unshare") is None or not namespaces(), reason="no namespaces of mounts"
)


@dataclass(frozen=True)
class Machine:
    """A machine whose folders are below `home`."""

    home: Path

    def __post_init__(self) -> None:
        for folder in ("etc", "opt", "bin", "commands"):
            (self.home / folder).mkdir(parents=True)
        for name, text in STUBS.items():
            (self.home / name).write_text(text)
            (self.home / name).chmod(0o755)
        (self.home / "none").touch(mode=0o644)  # in place of this host's own mosquitto
        python = self.home / "opt" / "fedstrata" / "venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON)
        python.chmod(0o755)
        # of the command's first line: what it is run by lies in its own environment
        (python.parent / "sh").symlink_to(str(shutil.which("sh")))

    def install(self, kit: Path, *options: str) -> subprocess.CompletedProcess[str]:
        """Run a kit's installer as root, without a mosquitto on its PATH unless a stub was
        installed.
        """
        tools = self.home / "commands"
        for name in (
            "sh",
            "id",
            "basename",
            "dirname",
            "install",
            "ln",
            "mkdir",
            "rm",
            "env",
            "mount",
            "cp",
            "touch",
            "mv",
            "sed",
            "chmod",
            "uname",
        ):
            if not (tools / name).exists():
                (tools / name).symlink_to(str(shutil.which(name)))
        env = {**os.environ, "PATH": f"{self.home}:{tools}", "STUBS": str(self.home)}
        words = [
            str(shutil.which("unshare")),
            "-rm",
            "sh",
            "-c",
            AS_ROOT,
            "sh",
            str(kit / INSTALLER),
            *options,
        ]
        return subprocess.run(words, capture_output=True, text=True, check=False, env=env)

    def asked(self, *programs: str) -> list[str]:
        """Return the calls of stubs since the last time."""
        file = self.home / "asked"
        lines = file.read_text().splitlines()
        file.write_text("")
        return [line for line in lines if line.split()[0] in programs]

    @property
    def units(self) -> list[str]:
        return sorted(path.name for path in (self.home / "etc" / "systemd" / "system").iterdir())

    @property
    def release(self) -> str:
        """The release of the installed command, and where what runs it is."""
        text = (self.home / "opt" / "fedstrata" / "venv" / "bin" / "fedstrata").read_text()
        first, _, rest = text.partition("\n")
        assert first == "#!/opt/fedstrata/venv/bin/sh", (
            "not that of the folder in which it was made"
        )
        return rest.rpartition("echo ")[2].strip()


def kit_of(folder: Path, wheel: Path, machine: str, text: str = test_kits.RACK) -> Path:
    file = test_kits.rack(folder, text)
    provision(load(file), file, wheel=wheel, out=folder / "kits")
    return folder / "kits" / machine


def boards(count: int) -> str:
    """Return the file of a lab of boards, a device on each."""
    machines = [f'pi-{number} = {{ address = "10.0.0.{number + 10}" }}' for number in range(count)]
    devices = [
        f'[[devices]]\nnames = ["device-{number}"]\nmachine = "pi-{number}"\nparent = "cloud"'
        for number in range(count)
    ]
    lab = ['name = "rack"', 'broker = "main"', "[machines]", 'server = { address = "10.0.0.1" }']
    return "\n".join([*lab, *machines, '[brokers.main]\nmachine = "server"', *devices])


@dataclass(frozen=True)
class Releases:
    """The kits of two releases of a lab of boards."""

    old: Path
    new: Path

    @classmethod
    def of(cls, folder: Path, count: int) -> Releases:
        made = []
        for version in ("0.1.0", "0.2.0"):
            text = boards(count)
            if version == "0.2.0":  # it has other services, too
                text = text.replace('"10.0.0.10" }', '"10.0.0.10", link = "lan-1g" }')
            file = test_kits.rack(folder, text)
            wheel = wheel_in(folder / version, version=version)
            made.append(folder / f"kits-{version}")
            provision(load(file), file, wheel=wheel, out=made[-1])
        return cls(*made)


def started(*names: str) -> list[str]:
    lines = []
    for name in names:
        lines += [f"systemctl enable --quiet fedstrata-{name}.service"]
        lines += [f"systemctl restart --no-block fedstrata-{name}.service"]
    return lines


def test_an_installer_makes_the_user_the_group_and_the_services(
    tmp_path: Path, wheel: Path
) -> None:
    machine = Machine(tmp_path / "machine")
    done = machine.install(kit_of(tmp_path, wheel, "gpu-0"))
    assert done.returncode == 0, done.stderr
    (node,) = [name for name in machine.units if "device" in name]
    assert machine.asked("systemctl", "useradd", "chgrp", "apt-get") == [
        "useradd --system --home-dir /var/lib/fedstrata --shell /usr/sbin/nologin fedstrata",
        "chgrp -R fedstrata /etc/fedstrata/tls",
        "systemctl daemon-reload",
        *started(node.removeprefix("fedstrata-").removesuffix(".service")),
    ]
    keys = machine.home / "etc" / "fedstrata" / "tls"
    assert {path.stat().st_mode & 0o777 for path in keys.iterdir()} == {
        0o640
    } and keys.stat().st_mode & 0o777 == 0o750
    assert os.readlink(machine.home / "bin" / "fedstrata") == "/opt/fedstrata/venv/bin/fedstrata"
    assert machine.install(kit_of(tmp_path, wheel, "gpu-0")).returncode == 0
    assert machine.asked("useradd") == [], "it is there"


def test_a_brokers_machine_gets_mosquitto_whose_own_service_ends(
    tmp_path: Path, wheel: Path
) -> None:
    machine = Machine(tmp_path / "machine")
    done = machine.install(kit_of(tmp_path, wheel, "pi-0"))
    assert done.returncode == 0, done.stderr
    assert machine.asked("systemctl", "apt-get") == [
        "apt-get -qq install --no-install-recommends -y mosquitto",
        "systemctl disable --now --quiet mosquitto",
        "systemctl daemon-reload",
        *started("broker-site", "link", "institution-0"),
    ]
    assert machine.install(kit_of(tmp_path, wheel, "pi-0")).returncode == 0
    assert machine.asked("apt-get") == [], "it is there"
    smaller = test_kits.RACK.replace(
        '{ machine = "pi-0", port = 1884 }', '{ addresses = ["pi-0:1884"] }'
    )
    done = machine.install(kit_of(tmp_path, wheel, "pi-0", smaller))
    assert done.returncode == 0 and "removed fedstrata-broker-site.service" in done.stdout
    assert machine.asked("systemctl") == [
        "systemctl disable --now --quiet fedstrata-broker-site.service",
        "systemctl daemon-reload",
        *started("link", "institution-0"),
    ]


@pytest.mark.parametrize("count", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_a_lab_of_boards_is_upgraded_board_by_board_and_back(tmp_path: Path, count: int) -> None:
    kits = Releases.of(tmp_path, count)
    lab = {f"pi-{number}": Machine(tmp_path / f"machine-{number}") for number in range(count)}
    for name, machine in lab.items():
        assert machine.install(kits.old / name).returncode == 0
    for name, machine in lab.items():
        machine.asked()
        done = machine.install(kits.new / name)
        assert done.returncode == 0, done.stderr
        assert [line for line in machine.asked("systemctl") if "restart" in line] != []
        upgraded = [each.release for each in lab.values()].count("0.2.0")
        assert upgraded == 1 + list(lab).index(name), "the others run on"
    first = lab["pi-0"]
    assert len(first.units) == 2
    for name, machine in lab.items():
        assert machine.install(kits.new / name, "--back").returncode == 0
        assert machine.release == "0.1.0"
    assert len(first.units) == 1 and "link" not in first.units[0]
    text = (first.home / "etc" / "fedstrata" / "lab.toml").read_text()
    assert text == (kits.old / "pi-0" / "lab.toml").read_text()
    *_, stopped, reloaded, enabled, restarted = first.asked("systemctl")
    assert stopped == "systemctl disable --now --quiet fedstrata-link.service"
    assert (reloaded, enabled.split()[1], restarted.split()[1]) == (
        "systemctl daemon-reload",
        "enable",
        "restart",
    )
    assert first.install(kits.old / "pi-0", "--back").returncode == 0
    assert first.release == "0.2.0" and len(first.units) == 2, "back again undoes it"


def test_an_upgrade_that_fails_leaves_what_runs(tmp_path: Path) -> None:
    kits = Releases.of(tmp_path, 1)
    machine = Machine(tmp_path / "machine")
    assert machine.install(kits.old / "pi-0").returncode == 0
    unit = machine.home / "etc" / "systemd" / "system" / machine.units[0]
    before = unit.read_text()
    machine.asked()
    (machine.home / "broken").touch()
    done = machine.install(kits.new / "pi-0")
    assert done.returncode != 0
    assert machine.asked("systemctl") == [] and machine.release == "0.1.0"
    assert unit.read_text() == before and len(machine.units) == 1
    (machine.home / "broken").unlink()
    assert machine.install(kits.new / "pi-0").returncode == 0
    assert machine.release == "0.2.0"


def test_an_upgrade_that_was_killed_between_two_moves_is_repeated(tmp_path: Path) -> None:
    kits = Releases.of(tmp_path, 1)
    machine = Machine(tmp_path / "machine")
    assert machine.install(kits.old / "pi-0").returncode == 0
    folder = machine.home / "opt" / "fedstrata"
    (folder / "venv").rename(folder / "venv-before")
    assert machine.install(kits.new / "pi-0").returncode == 0
    assert machine.release == "0.2.0"
    assert machine.install(kits.new / "pi-0", "--back").returncode == 0
    assert machine.release == "0.1.0"


def test_without_an_earlier_installation_there_is_no_way_back(tmp_path: Path) -> None:
    kits = Releases.of(tmp_path, 1)
    machine = Machine(tmp_path / "machine")
    done = machine.install(kits.old / "pi-0", "--back")
    assert done.returncode == 1 and done.stderr.startswith("nothing to return to: ")


def test_what_is_removed_is_stopped_first(tmp_path: Path, wheel: Path) -> None:
    machine = Machine(tmp_path / "machine")
    kit = kit_of(tmp_path, wheel, "pi-0")
    assert machine.install(kit).returncode == 0
    machine.asked()
    done = machine.install(kit, "--remove")
    names = ("broker-site", "institution-0", "link")
    assert done.returncode == 0 and done.stdout == "".join(
        f"removed fedstrata-{name}.service\n" for name in names
    )
    assert machine.asked("systemctl") == [
        *(f"systemctl disable --now --quiet fedstrata-{name}.service" for name in names),
        "systemctl daemon-reload",
    ]
    assert machine.units == [] and not (machine.home / "etc" / "fedstrata" / "tls").exists()
    assert list((machine.home / "opt" / "fedstrata").iterdir()) == []


@pytest.mark.parametrize("program", ["systemctl", "chgrp", "useradd", "apt-get"])
def test_an_installer_ends_with_the_step_that_fails(
    program: str, tmp_path: Path, wheel: Path
) -> None:
    machine = Machine(tmp_path / "machine")
    (machine.home / program).write_text(STUB + "exit 9\n")
    assert machine.install(kit_of(tmp_path, wheel, "pi-0")).returncode == 9
    last = machine.asked(*STUBS)[-1]
    assert last.startswith(program)


def test_a_user_who_is_not_root_changes_nothing(tmp_path: Path, wheel: Path) -> None:
    machine = Machine(tmp_path / "machine")
    (machine.home / "id").write_text("#!/bin/sh\necho 1000\n")
    (machine.home / "id").chmod(0o755)
    done = machine.install(kit_of(tmp_path, wheel, "pi-0"))
    assert done.returncode == 2 and done.stderr.startswith("not root: use sudo ")
    assert not list((machine.home / "etc").iterdir())


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_no_objection_to_the_installer() -> None:
    file = Path(test_kits.__file__).parents[1] / "deploy" / "kits" / INSTALLER
    # kit.env is in a kit; lists of words
    words = ["shellcheck", "-s", "sh", "-e", "SC1091,SC2086", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
