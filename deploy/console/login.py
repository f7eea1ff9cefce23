"""The options of the broker connection that all commands share: login and TLS; and the logins of
this user's runs.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.host.files import private, private_folder, read_text
from fedstrata.deploy.console import logs

if TYPE_CHECKING:
    from fedstrata.common.net.address import BrokerAddress
    from fedstrata.common.net.tls import Tls

OPERATOR: Final = "operator"  # the name of commands that are no node: watch, lab status, doctor
# the name of the certificate with which all roles of a machine serve /metrics
METRICS_NAME: Final = "metrics"
NODE: Final = "{name}"  # in a path or a login: the node's name
LOGINS: Final = "/var/tmp/fedstrata-logins-{uid}"  # the folder of the logins of this user's runs


@dataclass(frozen=True, slots=True)
class Login:
    """How a command's nodes identify themselves at the broker, and how the broker does."""

    username: Annotated[
        str | None,
        typer.Option(
            help="Login at the broker; {name} stands for the node's name.",
            envvar="FEDSTRATA_USERNAME",
        ),
    ] = None
    password_file: Annotated[
        str | None,
        typer.Option(
            help="File with the password. Without it, FEDSTRATA_PASSWORD is used.",
            envvar="FEDSTRATA_PASSWORD_FILE",
        ),
    ] = None
    tls: Annotated[
        bool,
        typer.Option(
            "--tls", help="Connect by TLS, to port 8883 unless given.", envvar="FEDSTRATA_TLS"
        ),
    ] = False
    tls_ca: Annotated[
        str | None,
        typer.Option(
            help="PEM file of the authority that signed the broker's certificate; implies --tls.  "
            "[default: the system's]",
            envvar="FEDSTRATA_TLS_CA",
            show_default=False,
        ),
    ] = None
    tls_cert: Annotated[
        str | None,
        typer.Option(
            help=(
                "PEM file of the node's certificate; implies --tls. {name} stands for the node's "
                "name."
            ),
            envvar="FEDSTRATA_TLS_CERT",
        ),
    ] = None
    tls_key: Annotated[
        str | None,
        typer.Option(help="PEM file of the certificate's key.", envvar="FEDSTRATA_TLS_KEY"),
    ] = None
    tls_crl: Annotated[
        str | None,
        typer.Option(
            help="PEM file of the certificates that this authority has revoked; needs --tls-ca.",
            envvar="FEDSTRATA_TLS_CRL",
        ),
    ] = None

    def address(self, text: str, *, node: str, option: str = "--broker") -> BrokerAddress:
        """Return the broker at host[:port], or at several such addresses, with a node's login and
        certificate.

        Raises InvalidExperiment.
        """
        from fedstrata.common.net import address, tls

        secure = self.tls_of(node)
        usual = tls.PORT if secure else address.PORT
        try:
            (host, port), *others = address.parse_hosts(text, port=usual)
        except ValueError as error:
            remedy = (
                "Write host, host:port or [IPv6 address]:port; separate several addresses of "
                "one broker by commas."
            )
            raise InvalidExperiment(option, text, str(error), remedy) from None
        username = self.username and self.username.replace(NODE, node)
        password = self._password(node)
        own = local_login(host, port)
        if username is None and secure is None and own is not None:
            username, password = own
        return address.BrokerAddress(host, port, username, password, tuple(others), secure)

    def tls_of(self, node: str) -> Tls | None:
        """Return the TLS files of a node, after reading them once; None without TLS. Raises
        InvalidExperiment.
        """
        if not (self.tls or self.tls_ca or self.tls_cert or self.tls_key or self.tls_crl):
            return None
        from fedstrata.common.net.tls import Tls

        own, key = (path and path.replace(NODE, node) for path in (self.tls_cert, self.tls_key))
        if key and not own:
            raise InvalidExperiment(
                "--tls-key", key, "a key without its certificate", "Give --tls-cert, too."
            )
        if self.tls_crl and not self.tls_ca:
            raise InvalidExperiment(
                "--tls-crl", self.tls_crl, "a list without its authority", "Give --tls-ca, too."
            )
        found = Tls(self.tls_ca, own, key, self.tls_crl)
        found.client_context()
        return found

    def options(self) -> list[str]:
        """Return the command-line options of this login; its password is not among them."""
        words: list[str] = []
        for each in fields(self):
            option = f"--{each.name.replace('_', '-')}"
            value = getattr(self, each.name)
            if value:
                words += [option] if value is True else [option, str(value)]
        return words

    def _password(self, node: str) -> str | None:
        if self.password_file is None:
            return os.environ.get("FEDSTRATA_PASSWORD") or None
        if self.username is None:
            problem = "a password without its login"
            remedy = "Give --username, too."
            raise InvalidExperiment("--password-file", self.password_file, problem, remedy)
        path = Path(self.password_file.replace(NODE, node))
        try:
            password = read_text(path).strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise InvalidExperiment(
                "--password-file", str(path), reason, "Name a readable file."
            ) from None
        if not password:
            raise InvalidExperiment(
                "--password-file", str(path), "an empty file", "Write the password into it."
            )
        return password


@contextmanager
def kept_login(port: int, login: tuple[str, str]) -> Iterator[None]:
    """Keep the login of a run's own broker, by its port, for other commands of this user, while the
    run lasts.

    It is in a file that only its owner can read. Where that is not possible, `watch` needs the
    login by hand.
    """
    path = _login_file(port)
    try:
        private_folder(path.parent)
        path.unlink(missing_ok=True)
        with open(path, "x", encoding="utf-8", opener=private) as file:
            file.write("\n".join(login))
    except OSError:
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def local_login(host: str, port: int) -> tuple[str, str] | None:
    """Return the login of a broker of this machine that a run of this user started, None if there
    is none.
    """
    from fedstrata.common.net.address import is_loopback

    if not is_loopback(host) or not _login_file(port).exists():
        return None
    try:
        # others could put a login there to learn what is sent
        private_folder(_login_file(port).parent)
        with open(_login_file(port), encoding="utf-8", opener=private) as file:
            name, _, password = file.read().partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    if password:
        return (name, password)
    return None


def _login_file(port: int) -> Path:
    return Path(LOGINS.format(uid=os.geteuid())) / str(port)


def report_certificates(broker: BrokerAddress) -> None:
    """Report a certificate of ours that ends soon, and that no list of revoked ones is checked, on
    standard error.
    """
    from fedstrata.common.net.tls import SOON_S

    ends_at = broker.tls.ends_at() if broker.tls is not None else None
    if broker.tls is not None and ends_at is not None and ends_at < time.time() + SOON_S:
        left = "has ended, or has not begun by this machine's clock"
        if ends_at:
            left = f"ends in {(ends_at - time.time()) / 86_400:.0f} days"
        remedy = "Renew it: `fedstrata provision`, then install the kits again"
        logs.write_line(
            f"certificate {broker.tls.certificate} {left}. {remedy}", level=logging.WARNING
        )
    if broker.tls is not None and broker.tls.revoked is None:
        logs.write_line(
            f"broker {broker}: a revoked certificate is accepted, as no --tls-crl is given"
        )
