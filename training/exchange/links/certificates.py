"""Certificates of one run: its own certificate authority, one certificate for the coordinator and one for each member.

The authority's key is discarded once all certificates are signed, so the set of members is fixed when a run is
launched, and a certificate of another run is refused in the TLS handshake.
"""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from profiles.errors import BadInput
from training.records.run_files import explain, private_folder, write_atomically

COORDINATOR_NAME = "muster-coordinator"
"""Name in the coordinator's certificate: members check for it whatever address they dial."""
_BEFORE = datetime.timedelta(days=1)
_AFTER = datetime.timedelta(days=365)
_BOTH = (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH)
"""Members both dial others and are dialled."""
_FILES = ("ca.pem", "certificate.pem", "key.pem")
_RELAY_FILE, _RELAY_BYTES = "relay.key", 32


def member_uri(run_id: str, rank: int) -> str:
    """Return the identity in a member's certificate."""
    return f"muster://{run_id}/member/{rank}"


def issue_run_certificates(
    directory: Path,
    run_id: str,
    members: Sequence[int],
    addresses: Sequence[str],
    at: datetime.datetime | None = None,
) -> None:
    """Write ``coordinator/`` and ``member-<rank>/`` in ``directory``, each with ``ca.pem, certificate.pem, key.pem``.

    Beside them ``relay.key`` has the same 32 random bytes for all (:mod:`~training.exchange.links.relay`). P-256 with
    SHA-256. Valid from a day before, so that a slow clock does no harm, for a year. Files are 0600 from their first
    byte, and folders 0700. They are not awaited on the disk: a
    run of which power is lost in its first seconds has nothing to resume.

    Args:
        addresses: literal IP addresses of the coordinator.
        at: when; default: now.

    Raises:
        BadInput: an address is not a literal IP address, or the folder cannot be written.
    """
    authority = _Authority(run_id, at or datetime.datetime.now(datetime.timezone.utc))
    relay_key = secrets.token_bytes(_RELAY_BYTES)
    names: list[x509.GeneralName] = [x509.DNSName(COORDINATOR_NAME), *(x509.IPAddress(_literal(a)) for a in addresses)]
    try:
        private_folder(directory)
        authority.issue(directory / "coordinator", COORDINATOR_NAME, names, [ExtendedKeyUsageOID.SERVER_AUTH])
        for rank in members:
            uri: list[x509.GeneralName] = [x509.UniformResourceIdentifier(member_uri(run_id, rank))]
            folder = directory / f"member-{rank}"
            authority.issue(folder, f"muster-member-{rank}", uri, _BOTH)
        for folder in (directory / "coordinator", *(directory / f"member-{rank}" for rank in members)):
            write_atomically(folder / _RELAY_FILE, relay_key, durable=False)
    except OSError as error:
        raise BadInput(*explain(error, directory)) from error


def relay_key(directory: Path) -> bytes:
    """Return the relay key that :func:`issue_run_certificates` wrote for one end.

    Raises:
        BadInput: it is missing, unreadable or damaged.
    """
    try:
        key = (directory / _RELAY_FILE).read_bytes()
    except OSError as error:
        raise BadInput(f"{error.filename}: {error.strerror}", "start the run anew: it issues all keys again") from error
    if len(key) != _RELAY_BYTES:
        raise BadInput(f"{directory / _RELAY_FILE}: {len(key)} bytes", "start the run anew: it issues all keys again")
    return key


class _Authority:
    def __init__(self, run_id: str, at: datetime.datetime) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _common_name(f"muster {run_id}"[:64])
        self._now = at
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        self._certificate = self._sign(self._builder(self._name, self._key).add_extension(constraints, critical=True))

    def issue(
        self, folder: Path, name: str, alternative: Sequence[x509.GeneralName], usages: Sequence[x509.ObjectIdentifier]
    ) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(
            self._builder(_common_name(name), key)
            .add_extension(x509.SubjectAlternativeName(alternative), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=True)
        )
        private_folder(folder)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        for file, content in zip(_FILES, (_pem(self._certificate), _pem(certificate), private)):
            write_atomically(folder / file, content, durable=False)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - _BEFORE)
            .not_valid_after(self._now + _AFTER)
        )

    def _sign(self, builder: x509.CertificateBuilder) -> x509.Certificate:
        return builder.sign(self._key, hashes.SHA256())


def _literal(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        raise BadInput(f"'{address}' is not an IP address", "use the coordinator's literal address") from None


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
