"""Makes certificates that are signed by themselves, for a parameter server or a worker."""

from __future__ import annotations

import ipaddress
import os
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tacit.errors import ConfigError
from tacit.files import put


def openssl_command(names: Sequence[str], days: int, certificate: Path, key: Path) -> str:
    """The command by which openssl makes the same."""
    kinds = ",".join(f"{'IP' if _address(name) else 'DNS'}:{name}" for name in names)
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    words += ["-keyout", str(key), "-out", str(certificate), "-days", str(days)]
    words += ["-subj", f"/CN={names[0]}", "-addext", f"subjectAltName={kinds}"]
    return shlex.join(words)


def make(
    names: Sequence[str], days: int, certificate: Path, key: Path, begins: datetime | None = None
) -> None:
    """Write a new key, which only its owner can read, and a certificate for these names and addresses.

    Args:
        days: for which it is valid.
        begins: from when on; by default from a day ago, for clocks that differ.

    Raises:
        ConfigError: a file is there already, or cannot be written.
        ImportError: there is no cryptography.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    begins = begins or datetime.now(UTC) - timedelta(days=1)
    private = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    kinds = [_address(name) or x509.DNSName(name) for name in names]
    there = [x509.IPAddress(each) if not isinstance(each, x509.DNSName) else each for each in kinds]
    built = (
        x509.CertificateBuilder(subject, subject, private.public_key(), x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + timedelta(days=days + 1))
        .add_extension(x509.SubjectAlternativeName(there), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(private, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = private.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        with os.fdopen(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret)
    except FileExistsError as error:
        raise ConfigError(f"{key} is there already, and may be in use: give another --out") from error
    except OSError as error:
        raise ConfigError(f"{key} cannot be written: {error.strerror}") from error
    put(certificate, built.public_bytes(pem).decode())


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
