"""The services of a machine as systemd units (`man systemd.service`, `man systemd.exec`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from fedstrata.deploy.console.login import NODE
from fedstrata.deploy.console.service import KIT
from fedstrata.deploy.kits.lab_file import Lab

STATE: Final = "/var/lib/fedstrata"
LOGIN: Final = "/etc/fedstrata/login.env"
TLS: Final = "/etc/fedstrata/tls"
DEVICES: Final = "devices"
EVERYWHERE: Final = "0.0.0.0"
RESTART_S: Final = 5
WATCHDOG_S: Final = 60
START_S: Final = 300  # a small machine imports PyTorch in a minute

# What no service needs. Devices keep the machine's devices and system calls: CUDA wants many.
_SANDBOX: Final = (
    "NoNewPrivileges=yes",
    "CapabilityBoundingSet=",
    "ProtectSystem=strict",
    "ProtectHome=read-only",
    "PrivateTmp=yes",
    "ProtectProc=invisible",
    "ProtectClock=yes",
    "ProtectHostname=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "ProtectControlGroups=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "LockPersonality=yes",
    "SystemCallArchitectures=native",
    "UMask=0077",
)
_WITHOUT_ACCELERATOR: Final = ("PrivateDevices=yes", "SystemCallFilter=@system-service")


@dataclass(frozen=True, slots=True)
class Service:
    """A service of a machine: its name without `fedstrata-`, its command after `fedstrata`, and
    what it needs.
    """

    name: str
    description: str
    command: tuple[str, ...]
    after: tuple[str, ...] = ()
    accelerator: bool = False
    # of a service that sets something up and ends: the command that undoes it
    undo: tuple[str, ...] = ()


def services(lab: Lab, machine: str) -> list[Service]:
    """Return the services of a machine: its link, brokers, institutions, and one process for all
    its devices.
    """
    own = lab.machines[machine]
    brokers = lab.brokers_of(machine)
    started = tuple(f"broker-{name}" for name in brokers)
    listen = "::" if ":" in own.address else EVERYWHERE
    found = [
        Service(
            f"broker-{name}",
            f"broker {name}",
            ("broker", "--host", listen, "--port", str(lab.port(broker)), *_guard(lab, name)),
        )
        for name, broker in brokers.items()
    ]
    if own.link is not None and (hosts := lab.above(machine)):
        to = tuple(word for host in hosts for word in ("--to", host))
        rates = (
            ("--up", own.link.up_mbit),
            ("--down", own.link.down_mbit),
            ("--delay", own.link.delay_ms or None),
        )
        numbers = tuple(
            word for option, value in rates if value is not None for word in (option, f"{value:g}")
        )
        link = Service(
            "link", "the link's rates", ("links", "apply", *numbers, *to), undo=("links", "clear")
        )
        found.append(link)
        started = (*started, link.name)
    beyond = ("--metrics", f"{listen}:0", *(() if lab.tls else ("--insecure",)))
    allowed = [word for package in own.allow for word in ("--allow", package)]
    data = ("--data", own.data) if own.data else ()
    common = ("--lab", lab.name, *(beyond if own.metrics else ()))
    for name, node in lab.institutions.items():
        if node.machine != machine:
            continue
        above = lab.meeting_place(node.parent)
        below = lab.meeting_place(name)
        command = ["institution", "--name", name, "--parent", node.parent]
        command += ["--broker", lab.address(above, machine=machine)]
        if below != above:
            command += ["--child-broker", lab.address(below, machine=machine)]
        command += [*data, *allowed, "--spool", f"{STATE}/spool", *common]
        found.append(Service(name, name, tuple(command), started))
    if devices := lab.devices_of(machine):
        command = ["device"]
        for name, parent in devices.items():
            where = lab.address(lab.meeting_place(parent), machine=machine)
            command += ["--name", name, "--parent", parent, "--broker", where]
        command += [
            "--accelerator",
            own.accelerator,
            *(("--slots", str(own.slots)) if own.slots else ()),
        ]
        command += ["--energy", own.energy] if own.energy != "auto" else []
        command += [*data, *allowed]
        summary = next(iter(devices)) if len(devices) == 1 else f"{len(devices)} devices"
        found.append(
            Service(
                DEVICES, summary, (*command, *common), started, accelerator=own.accelerator != "cpu"
            )
        )
    return found


def digest(lab: Lab, machine: str) -> str:
    """Return 12 hexadecimal digits over a machine's services: another digest, and its kit is to be
    installed again.
    """
    commands = [each.command for each in services(lab, machine)]
    return blake2b(json.dumps(commands).encode(), digest_size=6).hexdigest()


def environment(lab: Lab, machine: str) -> dict[str, str]:
    """Return the environment of a machine's roles."""
    found = {
        "XDG_CACHE_HOME": "/var/cache/fedstrata",
        "PYTHONUNBUFFERED": "1",
        KIT: digest(lab, machine),
    }
    if lab.tls:
        found |= {
            "FEDSTRATA_TLS_CA": f"{TLS}/ca.crt",
            "FEDSTRATA_TLS_CERT": f"{TLS}/{NODE}.crt",
            "FEDSTRATA_TLS_KEY": f"{TLS}/{NODE}.key",
            "FEDSTRATA_TLS_CRL": f"{TLS}/ca.crl",
        }
    return found


def _guard(lab: Lab, broker: str) -> tuple[str, ...]:
    if not lab.tls:
        return ("--insecure",)
    own = f"{TLS}/broker-{broker}"
    files = ("--tls-cert", f"{own}.crt", "--tls-key", f"{own}.key", "--rules", f"{own}.acl")
    return (
        "--kind",
        "mosquitto",
        *files,
        "--tls-ca",
        f"{TLS}/ca.crt",
        "--tls-crl",
        f"{TLS}/ca.crl",
    )


def unit(lab: Lab, machine: str, service: Service) -> str:
    """Return the unit file of a service.

    It is started again whenever it ends by itself, but not after a mistake in its command (2) or
    settings (4). 130 is the exit code of a service that was stopped.
    """
    after = " ".join(
        ["network-online.target", *(f"fedstrata-{name}.service" for name in service.after)]
    )
    start = f"ExecStart={_line(lab, service.command)}"
    restart = ("Restart=on-failure", f"RestartSec={RESTART_S}")
    if service.undo:  # it sets something up as root, and undoes it when it is stopped
        stop = f"ExecStop={_line(lab, service.undo)}"
        own = (
            "Type=oneshot",
            "RemainAfterExit=yes",
            start,
            stop,
            *restart,
            "RestartPreventExitStatus=2",
        )
    else:
        limit = lab.machines[machine].memory_gb
        variables = environment(lab, machine)
        assigned = " ".join(f"{name}={value}" for name, value in variables.items())
        own = (
            "Type=notify",
            start,
            *restart,
            "RestartPreventExitStatus=2 4",
            "SuccessExitStatus=130",
            f"TimeoutStartSec={START_S}",
            f"WatchdogSec={WATCHDOG_S}",
            "User=fedstrata",
            "StateDirectory=fedstrata",
            "CacheDirectory=fedstrata",
            f"WorkingDirectory={STATE}",
            f"Environment={assigned}",
            f"EnvironmentFile=-{LOGIN}",
            "LimitNOFILE=65536",
            *((f"MemoryMax={round(limit * 1024)}M",) if limit else ()),
            *_SANDBOX,
            *(() if service.accelerator else _WITHOUT_ACCELERATOR),
        )
    settings = {
        "Unit": (
            f"Description=fedstrata: {service.description}, lab {lab.name}",
            "Wants=network-online.target",
            f"After={after}",
            *(() if service.undo else ("StartLimitIntervalSec=0",)),
        ),
        "Service": own,
        "Install": ("WantedBy=multi-user.target",),
    }
    return "\n".join("\n".join([f"[{section}]", *lines, ""]) for section, lines in settings.items())


def _line(lab: Lab, command: Sequence[str]) -> str:
    return f"{lab.install}/venv/bin/fedstrata {' '.join(command).replace('%', '%%')}"
