"""The certificate authority of a lab: certificates for its nodes and servers, renewal and
revocation.

A certificate is a node's, for its connections to brokers and /metrics, or a server's, for the hosts
at which it is reached. Their extended key usages differ, so that no node passes as a broker. The
authority's key stays in its folder, on the machine where `fedstrata provision` runs. Keys are
elliptic (P-256), which a Raspberry Pi signs with in a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.host.files import write_private
from fedstrata.deploy.kits.lab_file import AUTHORITY, REVOKED

AUTHORITY_DAYS: Final = 3650
CERTIFICATE_DAYS: Final = 397
RENEWED_DAYS: Final = 60  # a certificate with fewer days left is issued again
BACKDATED: Final = timedelta(hours=1)  # the clocks of a lab's machines differ
AUTHORITY_KEY: Final = "ca.key"
ALL: Final = ".all"  # of the file with all certificates that a name has had


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """An authority in a folder: its certificate, its key, its list of revoked certificates, and all
    it has issued.
    """

    def __init__(
        self, folder: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
    ) -> None:
        self.folder = folder
        self._certificate = certificate
        self._key = key

    @classmethod
    def open(cls, folder: Path, *, name: str, now: datetime | None = None) -> Self:
        """Return the authority of a folder; a new one if the folder has none. Raises
        InvalidExperiment.
        """
        try:
            if not (folder / AUTHORITY).exists():
                cls._create(folder, name, now or datetime.now(UTC))
            key = serialization.load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), None)
            certificate = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
            x509.load_pem_x509_crl((folder / REVOKED).read_bytes())
        except OSError as error:
            problem = f"{Path(str(error.filename)).name}: {error.strerror}"
            remedy = (
                "Name a folder that you can write, or the one of this lab's authority, with "
                "all its files."
            )
            raise InvalidExperiment("--authority", str(folder), problem, remedy) from None
        except (ValueError, TypeError) as error:
            raise InvalidExperiment(
                "--authority", str(folder), f"not an authority: {error}", "Use another."
            ) from None
        if (
            not isinstance(key, ec.EllipticCurvePrivateKey)
            or key.public_key() != certificate.public_key()
        ):
            problem = f"{AUTHORITY_KEY} is not the key of {AUTHORITY}"
            raise InvalidExperiment("--authority", str(folder), problem, "Restore both files.")
        return cls(folder, certificate, key)

    @property
    def certificate(self) -> bytes:
        """The authority's certificate, as PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        name: str,
        *,
        hosts: Iterable[str] = (),
        days: int = CERTIFICATE_DAYS,
        now: datetime | None = None,
    ) -> Issued:
        """Return a new certificate with the common name `name`: of a server at these hosts; without
        any, of a node.
        """
        begin = now or datetime.now(UTC)
        key = ec.generate_private_key(ec.SECP256R1())
        names, usage = _valid_for(name, hosts)
        built = (
            _builder(name, self._certificate.subject, key, begin, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(names, critical=False)
            .add_extension(usage, critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        return Issued(built.public_bytes(serialization.Encoding.PEM), _pem(key))

    def of(self, name: str, *, hosts: Iterable[str] = (), now: datetime | None = None) -> Issued:
        """Return the kept certificate of a name; a new one if there is none, it ends soon, or it is
        for other hosts.
        """
        now = now or datetime.now(UTC)
        wanted = _valid_for(name, hosts := list(hosts))
        certificate, key, every = (self._kept(name, kind) for kind in (".crt", ".key", ALL))
        if certificate.exists() and key.exists():
            found = x509.load_pem_x509_certificate(certificate.read_bytes())
            has = tuple(
                found.extensions.get_extension_for_class(type(each)).value for each in wanted
            )
            valid = found.not_valid_after_utc - now > timedelta(days=RENEWED_DAYS)
            if valid and has == wanted and found.serial_number not in self._revoked():
                return Issued(certificate.read_bytes(), key.read_bytes())
        issued = self.issue(name, hosts=hosts, now=now)
        certificate.parent.mkdir(mode=0o700, exist_ok=True)
        before = every.read_bytes() if every.exists() else b""
        # first: what is given away can be revoked
        write_private(every, before + issued.certificate)
        write_private(certificate, issued.certificate)
        write_private(key, issued.key)
        return issued

    def revoke(self, names: Iterable[str], *, now: datetime | None = None) -> None:
        """Revoke all certificates that these names have ever had. Raises InvalidExperiment."""
        serials: dict[int, datetime] = {}
        for name in names:
            if not (path := self._kept(name, ALL)).exists():
                raise InvalidExperiment(
                    "--revoke", name, "no certificate of this name was issued", "Name a node."
                )
            found = x509.load_pem_x509_certificates(path.read_bytes())
            serials |= {each.serial_number: now or datetime.now(UTC) for each in found}
        self._write_list(serials | self._revoked())

    @property
    def revoked(self) -> bytes:
        """The list of the revoked certificates, as PEM."""
        return (self.folder / REVOKED).read_bytes()

    def _kept(self, name: str, kind: str) -> Path:
        return self.folder / "issued" / f"{name}{kind}"

    def _revoked(self) -> dict[int, datetime]:
        """Return the serial numbers of the revoked certificates, each with its date."""
        return {
            each.serial_number: each.revocation_date_utc
            for each in x509.load_pem_x509_crl(self.revoked)
        }

    def _write_list(self, serials: Mapping[int, datetime]) -> None:
        """Write the list. It is valid as long as the authority, since OpenSSL refuses everybody by
        one that is not.

        A machine whose clock is late would find a list of today not yet valid, and nobody renews
        one in time.
        """
        built = x509.CertificateRevocationListBuilder().issuer_name(self._certificate.subject)
        built = built.last_update(self._certificate.not_valid_before_utc)
        built = built.next_update(self._certificate.not_valid_after_utc)
        built = built.add_extension(x509.CRLNumber(len(serials)), critical=False)
        for serial, date in serials.items():
            one = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(date)
            built = built.add_revoked_certificate(one.build())
        signed = built.sign(self._key, hashes.SHA256())
        write_private(self.folder / REVOKED, signed.public_bytes(serialization.Encoding.PEM))

    @classmethod
    def _create(cls, folder: Path, name: str, now: datetime) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"fedstrata lab {name}"[:64])])
        signs = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        built = (
            _builder(f"fedstrata lab {name}"[:64], subject, key, now, AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(signs, critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .sign(key, hashes.SHA256())
        )
        write_private(folder / AUTHORITY_KEY, _pem(key))
        cls(folder, built, key)._write_list({})
        write_private(folder / AUTHORITY, built.public_bytes(serialization.Encoding.PEM))


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


def _valid_for(
    name: str, hosts: Iterable[str]
) -> tuple[x509.SubjectAlternativeName, x509.ExtendedKeyUsage]:
    names = [_host(each) for each in sorted(set(hosts))]
    usage = ExtendedKeyUsageOID.SERVER_AUTH if names else ExtendedKeyUsageOID.CLIENT_AUTH
    return x509.SubjectAlternativeName(names or [x509.DNSName(name)]), x509.ExtendedKeyUsage(
        [usage]
    )


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    encoding = serialization.Encoding.PEM
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption())
