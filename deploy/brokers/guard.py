"""Who may connect to a broker that fedstrata starts, and which topics each may use."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.errors import InvalidExperiment
from common.net.address import is_loopback
from common.net.tls import Tls
from deploy.console.logs import write_line


@dataclass(frozen=True, slots=True)
class Guard:
    """The files that guard a broker.

    passwords: written by mosquitto_passwd (for the embedded broker by `htpasswd -B`); an empty one refuses all clients
    tls: the broker's certificate and key; with an authority, clients need a certificate of it, whose common name is
        their login
    rules: the access rules, in the broker's own form    revoked: PEM list of revoked certificates (mosquitto)
    """

    passwords: Path | None = None
    tls: Tls | None = None
    rules: Path | None = None
    revoked: Path | None = None

    @property
    def open(self) -> bool:
        """Whether everybody who reaches the broker may use it."""
        return self.passwords is None and (self.tls is None or self.tls.authority is None)

    def check_reach(self, host: str, *, insecure: bool) -> None:
        """Raise InvalidExperiment if strangers could use the broker, or read what it carries, and nobody said so."""
        if is_loopback(host):
            return
        lacks = [*(["no login"] if self.open else []), *(["no TLS"] if self.tls is None else [])]
        problem = f"reachable by others, with {' and '.join(lacks)}"
        if lacks and not insecure:
            remedy = "Give --tls-cert, --tls-key, and --tls-ca or --password-file, or let everybody in with --insecure."
            raise InvalidExperiment("--host", host, problem, remedy)
        if lacks:
            write_line(f"broker: {problem}, as --insecure says", level=logging.WARNING)

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
                lines += [f"cafile {self.tls.authority}", "require_certificate true", "use_identity_as_username true"]
        if self.revoked is not None:
            lines.append(f"crlfile {self.revoked}")
        return lines

    def probe(self) -> ssl.SSLContext | None:
        """Return a context with which to see whether the broker answers; None without TLS."""
        if self.tls is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context


OPEN: Final = Guard()
