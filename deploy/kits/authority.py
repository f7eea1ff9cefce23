"""The certificate authority of a lab: certificates for its nodes and brokers, renewal and revocation.

The authority's key stays in its folder, on the machine where `fedstrata provision` runs. Keys are elliptic (P-256),
which a Raspberry Pi signs with in a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.errors import InvalidExperiment
from common.host.files import write_private

AUTHORITY_DAYS: Final = 3650
CERTIFICATE_DAYS: Final = 397
RENEWED_DAYS: Final = 60  # a certificate with fewer days left is issued again
BACKDATED: Final = timedelta(hours=1)  # the clocks of a lab's machines differ
CERTIFICATE, KEY, REVOKED = "ca.crt", "ca.key", "ca.crl"


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """An authority in a folder: its certificate, its key, its list of revoked certificates, and all it has issued."""

    def __init__(self, folder: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.folder = folder
        self._certificate = certificate
        self._key = key

    @classmethod
    def open(cls, folder: Path, *, name: str, now: datetime | None = None) -> Self:
        """Return the authority of a folder; a new one if the folder has none. Raises InvalidExperiment."""
        try:
            if not (folder / CERTIFICATE).exists():
                cls._create(folder, name, now or datetime.now(UTC))
            key = serialization.load_pem_private_key((folder / KEY).read_bytes(), None)
            certificate = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
        except OSError as error:
            remedy = "Name a folder that you can write, or the one of this lab's authority."
            raise InvalidExperiment("--authority", str(folder), error.strerror or str(error), remedy) from None
        except (ValueError, TypeError) as error:
            raise InvalidExperiment("--authority", str(folder), f"not an authority: {error}", "Use another.") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            problem = f"{KEY} is not the key of {CERTIFICATE}"
            raise InvalidExperiment("--authority", str(folder), problem, "Restore both files.")
        return cls(folder, certificate, key)

    @property
    def certificate(self) -> bytes:
        """The authority's certificate, as PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self, name: str, *, hosts: Iterable[str] = (), days: int = CERTIFICATE_DAYS, now: datetime | None = None
    ) -> Issued:
        """Return a new certificate of a node or broker, its common name `name`, valid for host names and addresses."""
        begin = now or datetime.now(UTC)
        key = ec.generate_private_key(ec.SECP256R1())
        others = [_host(each) for each in dict.fromkeys((name, *hosts))]  # NATS takes the first that is a user
        usage = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        built = (
            _builder(name, self._certificate.subject, key, begin, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(others), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Issued(built.public_bytes(serialization.Encoding.PEM), _pem(key))

    def of(self, name: str, *, hosts: Iterable[str] = (), now: datetime | None = None) -> Issued:
        """Return the kept certificate of a name; a new one if there is none, or it ends soon, or its hosts changed."""
        now = now or datetime.now(UTC)
        kept = self.folder / "issued" / f"{name}.crt", self.folder / "issued" / f"{name}.key"
        hosts = list(hosts)
        if all(path.exists() for path in kept):
            found = x509.load_pem_x509_certificate(kept[0].read_bytes())
            names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            valid = found.not_valid_after_utc - now > timedelta(days=RENEWED_DAYS)
            same = set(names) == {_host(each) for each in (*hosts, name)}
            if valid and same and not self._is_revoked(found):
                return Issued(kept[0].read_bytes(), kept[1].read_bytes())
        issued = self.issue(name, hosts=hosts, now=now)
        kept[0].parent.mkdir(mode=0o700, exist_ok=True)
        write_private(kept[0], issued.certificate)
        write_private(kept[1], issued.key)
        return issued

    def revoke(self, name: str, *, now: datetime | None = None) -> None:
        """Revoke the kept certificate of a name: `revoked` names it from now on. Raises InvalidExperiment."""
        path = self.folder / "issued" / f"{name}.crt"
        if not path.exists():
            raise InvalidExperiment("--revoke", name, "no certificate of this name was issued", "Name a node.")
        serial = x509.load_pem_x509_certificate(path.read_bytes()).serial_number
        write_private(self.folder / REVOKED, self._list([*self._revoked(), serial], now or datetime.now(UTC)))

    def revoked(self, *, now: datetime | None = None) -> bytes:
        """Return the list of the revoked certificates, as PEM, signed anew: brokers refuse a list that has ended."""
        return self._list(self._revoked(), now or datetime.now(UTC))

    def _is_revoked(self, certificate: x509.Certificate) -> bool:
        return certificate.serial_number in self._revoked()

    def _revoked(self) -> list[int]:
        path = self.folder / REVOKED
        if not path.exists():
            return []
        return [each.serial_number for each in x509.load_pem_x509_crl(path.read_bytes())]

    def _list(self, serials: Iterable[int], now: datetime) -> bytes:
        begin = now - BACKDATED
        built = x509.CertificateRevocationListBuilder().issuer_name(self._certificate.subject)
        built = built.last_update(begin).next_update(now + timedelta(days=AUTHORITY_DAYS))
        for serial in dict.fromkeys(serials):
            one = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(begin)
            built = built.add_revoked_certificate(one.build())
        return built.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    @classmethod
    def _create(cls, folder: Path, name: str, now: datetime) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"fedstrata lab {name}"[:64])])
        signs = x509.KeyUsage(
            digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        built = (
            _builder(f"fedstrata lab {name}"[:64], subject, key, now, AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(signs, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        write_private(folder / KEY, _pem(key))
        write_private(folder / CERTIFICATE, built.public_bytes(serialization.Encoding.PEM))


def _builder(
    name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + timedelta(days=days))
    )


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption())
