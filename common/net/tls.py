"""TLS: which authority, certificate and key a connection uses, and what went wrong in plain
words.
"""

from __future__ import annotations

import os
import ssl
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from fedstrata.common.errors import InvalidExperiment, in_words

PORT: Final = 8883
# of a server: whether clients need a certificate
REQUIRED = ssl.CERT_REQUIRED
OPTIONAL = ssl.CERT_OPTIONAL
HANDSHAKE_TURNS: Final = 3
SOON_S: Final = 30 * 86_400.0  # before its end a certificate is to be renewed

_CERTIFICATE: Final = "Give a certificate of the broker's own authority: --tls-cert and --tls-key."
_REASONS: Final = {  # OpenSSL's names of the alerts and faults that users meet
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": f"the broker requires a certificate. {_CERTIFICATE}",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": f"the broker refuses the handshake. {_CERTIFICATE}",
    "TLSV1_ALERT_UNKNOWN_CA": (
        f"the broker does not know the authority of our certificate. {_CERTIFICATE}"
    ),
    "SSLV3_ALERT_BAD_CERTIFICATE": f"the broker refuses our certificate. {_CERTIFICATE}",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": (
        "our certificate has expired, or is not yet valid, by the clock of the broker's machine. "
        "Renew it, or set that."
    ),
    "SSLV3_ALERT_CERTIFICATE_REVOKED": f"our certificate is revoked. {_CERTIFICATE}",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": (
        f"the broker refuses our certificate, which is no client's. {_CERTIFICATE}"
    ),
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": f"the broker refuses our certificate. {_CERTIFICATE}",
    "TLSV1_ALERT_DECRYPT_ERROR": f"the broker refuses our certificate. {_CERTIFICATE}",
    "WRONG_VERSION_NUMBER": (
        "no TLS on this port. Use the broker's TLS port, or omit the --tls options."
    ),
    "RECORD_LAYER_FAILURE": (
        "no TLS on this port. Use the broker's TLS port, or omit the --tls options."
    ),
    "UNEXPECTED_EOF_WHILE_READING": (
        "closed during the TLS handshake. Is this the broker's TLS port?"
    ),
}
# may be a clock's
_PASSING: Final = frozenset({"SSLV3_ALERT_CERTIFICATE_EXPIRED", "UNEXPECTED_EOF_WHILE_READING"})
# OpenSSL's codes: a certificate, a list; the clock may not be set yet
_NOT_YET_VALID: Final = frozenset({9, 11})


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files: the authority that signs the other side (default: the system's), and our
    certificate.

    `revoked`: the authority's list of revoked certificates, which are refused.
    """

    authority: str | None = None
    certificate: str | None = None
    key: str | None = None
    revoked: str | None = None

    def client_context(self) -> ssl.SSLContext:
        """Return a context that checks the server's certificate and host name. Raises
        InvalidExperiment.

        The files are read at each call, so that a renewed certificate is used from the next
        connection on.
        """
        if self.authority is None:
            context = ssl.create_default_context()  # reads some 140 authorities
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.sslsocket_class = _ClosedOnFailure
        self._load(context)
        return context

    def server_context(self, *, clients: ssl.VerifyMode) -> ssl.SSLContext:
        """Return a context that shows our certificate and asks clients for one of the authority's.

        Raises InvalidExperiment.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = clients if self.authority is not None else ssl.CERT_NONE
        self._load(context)
        return context

    def stamp(self) -> tuple[int, ...] | None:
        """Return when each file was written, which changes with them; None while one is missing."""
        paths = (self.authority, self.certificate, self.key, self.revoked)
        try:
            return tuple(os.stat(path).st_mtime_ns for path in paths if path is not None)
        except OSError:
            return None

    def ends_at(self) -> float | None:
        """Return when our certificate of a client ends, Unix seconds; None without one. Raises
        InvalidExperiment.

        The standard library decodes the certificates of others only, after a handshake: so this is
        one with ourselves.
        """
        if self.certificate is None:
            return None
        ours = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ours.check_hostname = False
        ours.verify_mode = ssl.CERT_NONE
        for context in (ours, theirs):
            replace(self, authority=None, revoked=None)._load(context)
        theirs.verify_mode = ssl.CERT_REQUIRED
        theirs.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        theirs.load_verify_locations(self.certificate)
        to_client = ssl.MemoryBIO()
        to_server = ssl.MemoryBIO()
        server = theirs.wrap_bio(to_server, to_client, server_side=True)
        client = ours.wrap_bio(to_client, to_server)
        try:
            for _ in range(HANDSHAKE_TURNS):
                for side in (client, server):
                    with suppress(ssl.SSLWantReadError):
                        side.do_handshake()
        except ssl.SSLCertVerificationError:
            return 0.0  # it has ended, or has not begun
        found = server.getpeercert() or {}
        return ssl.cert_time_to_seconds(str(found["notAfter"]))

    def _load(self, context: ssl.SSLContext) -> None:
        if self.authority is not None:
            try:
                context.load_verify_locations(self.authority)
            except OSError as error:
                raise _unusable(
                    "--tls-ca", self.authority, error, "the authority's certificate"
                ) from None
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.key, password=_no_password)
            except OSError as error:
                named = f"{self.certificate} {self.key or ''}".strip()
                raise _unusable(
                    "--tls-cert, --tls-key", named, error, "a certificate and its own key"
                ) from None
        if self.revoked is not None:
            self._refuse_revoked(context, self.revoked)

    def _refuse_revoked(self, context: ssl.SSLContext, path: str) -> None:
        before = context.cert_store_stats()
        try:
            context.load_verify_locations(path)
        except OSError as error:
            raise _unusable(
                "--tls-crl", path, error, "the authority's list of revoked certificates"
            ) from None
        # a certificate would be trusted
        if context.cert_store_stats() != before | {"crl": before["crl"] + 1}:
            problem = "not a list of revoked certificates alone"
            raise InvalidExperiment(
                "--tls-crl", path, problem, "Name the list of the authority of --tls-ca."
            )
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF


class RenewedContext:
    """A server's context, made anew when its files have changed. Raises InvalidExperiment at
    first.
    """

    def __init__(self, tls: Tls, *, clients: ssl.VerifyMode) -> None:
        self._tls = tls
        self._clients = clients
        self._stamp = tls.stamp()
        self._context = tls.server_context(clients=clients)

    def __call__(self) -> ssl.SSLContext:
        """Return the context of the files as they are, the one before while they are being
        replaced.
        """
        stamp = self._tls.stamp()
        if stamp not in (self._stamp, None):
            with suppress(InvalidExperiment):
                self._context = self._tls.server_context(clients=self._clients)
                self._stamp = stamp
        return self._context


class _ClosedOnFailure(ssl.SSLSocket):
    """A socket that a failed handshake closes; paho forgets such a socket."""

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except OSError:
            self.close()
            raise


def reason_of(error: OSError) -> str:
    """Return what an error of a connection means, by TLS or without."""
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"the broker's certificate is refused: {error.verify_message.rstrip('.')}"
        early = (
            " by this machine's clock. Set that, or the one of the machine that made the "
            "certificate."
        )
        if error.verify_code in _NOT_YET_VALID:
            return f"{text}{early}"
        return text
    if isinstance(error, ssl.SSLError) and error.reason:
        return _REASONS.get(error.reason, f"TLS: {error.reason.lower().replace('_', ' ')}")
    return in_words(error)


def is_final(error: OSError) -> bool:
    """Return whether another attempt with the same certificates would fail, too."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_code not in _NOT_YET_VALID
    return getattr(error, "reason", None) in _REASONS.keys() - _PASSING


def _unusable(option: str, path: str, error: OSError, wanted: str) -> InvalidExperiment:
    if not isinstance(error, ssl.SSLError):
        known = error.strerror
    else:
        known = (error.reason or "not PEM").lower()
    return InvalidExperiment(
        option, path, (known or str(error)).replace("_", " "), f"Name {wanted}, PEM files."
    )


def _no_password() -> str:
    """Refuse a key with a passphrase, for which OpenSSL would ask on the terminal."""
    return ""
