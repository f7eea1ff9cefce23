"""Who may connect to a broker that fedstrata starts, and which topics each may use."""

from __future__ import annotations

import logging
import secrets
import ssl
from base64 import b64encode
from dataclasses import dataclass, field, replace
from hashlib import pbkdf2_hmac
from pathlib import Path
from typing import Final

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.host.files import write_private
from fedstrata.common.net.address import is_loopback
from fedstrata.common.net.tls import Tls
from fedstrata.common.protocol.limits import MESSAGE_MOST
from fedstrata.deploy.console.logs import write_line

# The most bytes of a packet: of the largest message of any lab, and of its topic. A broker holds
# one for each subscriber, so that larger ones would take its memory.
PACKET_MOST: Final = MESSAGE_MOST + 1024
HASH_ROUNDS: Final = 101  # as mosquitto_passwd: the password is random, not a word


@dataclass(frozen=True, slots=True)
class Guard:
    """The files that guard a broker.

    passwords: written by mosquitto_passwd (for the embedded broker by `htpasswd -B`); an empty one
    refuses all clients tls: the broker's certificate and key; with an authority, clients need a
    certificate of it that is not revoked, whose common name is their login rules: the access rules,
    in the broker's own form login: the one name and password in place of `passwords`
    """

    passwords: Path | None = None
    tls: Tls | None = None
    rules: Path | None = None
    login: tuple[str, str] | None = field(default=None, repr=False)

    @property
    def open(self) -> bool:
        """Whether everybody who reaches the broker may use it."""
        return (
            self.passwords is None
            and self.login is None
            and (self.tls is None or self.tls.authority is None)
        )

    def check_reach(self, host: str, *, insecure: bool) -> None:
        """Raise InvalidExperiment if strangers could use the broker, or read what it carries,
        without --insecure.
        """
        if is_loopback(host):
            return
        lacks = [*(["no login"] if self.open else []), *(["no TLS"] if self.tls is None else [])]
        problem = f"reachable by others, with {' and '.join(lacks)}"
        if lacks and not insecure:
            remedy = (
                "Give --tls-cert, --tls-key, and --tls-ca or --password-file, or let "
                "everybody in with --insecure."
            )
            raise InvalidExperiment("--host", host, problem, remedy)
        if lacks:
            write_line(f"broker: {problem}, as --insecure allows", level=logging.WARNING)

    def mosquitto(self) -> list[str]:
        """Return the lines of mosquitto's configuration, valid for 2.0 and 2.1."""
        lines = [f"allow_anonymous {'true' if self.open else 'false'}"]
        if self.passwords is not None:
            lines.append(f"password_file {self.passwords}")
        if self.rules is not None:
            lines.append(f"acl_file {self.rules}")
        if self.tls is not None:
            lines += [f"certfile {self.tls.certificate}", f"keyfile {self.tls.key}"]
            if self.tls.authority is not None:
                lines += [
                    f"cafile {self.tls.authority}",
                    "require_certificate true",
                    "use_identity_as_username true",
                ]
                lines += [f"crlfile {self.tls.revoked}"] if self.tls.revoked is not None else []
        return lines

    def in_folder(self, folder: Path) -> Guard:
        """Return the guard for mosquitto, `login` written to a password file in a folder."""
        if self.login is None:
            return self
        name, password = self.login
        salt = secrets.token_bytes(12)
        hashed = pbkdf2_hmac("sha512", password.encode(), salt, HASH_ROUNDS)
        line = f"{name}:$7${HASH_ROUNDS}${b64encode(salt).decode()}${b64encode(hashed).decode()}\n"
        write_private(path := folder / "passwords", line.encode())
        return replace(self, passwords=path, login=None)

    def probe(self) -> ssl.SSLContext | None:
        """Return a context with which to see whether the broker answers; None without TLS."""
        if self.tls is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context


def check_readable(option: str, path: Path) -> None:
    """Raise InvalidExperiment if a file that an option names cannot be read."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise InvalidExperiment(
            option, str(path), error.strerror or str(error), "Name a file."
        ) from None


def one_login() -> Guard:
    """Return a guard with a new random password."""
    return Guard(login=("fedstrata", secrets.token_urlsafe(24)))


OPEN: Final = Guard()
