"""TLS 1.3 between workers and a parameter server: whom each of them trusts, and what its refusals mean.

A server shows a certificate, which a worker knows by its fingerprint, or by who has signed it. A worker may
have to show one, too: the server then has a file with those that it takes. The proof that both know one
secret (`handshake`) comes after that, inside of TLS.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from socket import socket

from tacit.environment import TLS, TLS_CERTIFICATE, TLS_KEY
from tacit.errors import AttachError, ConfigError
from tacit.stores.secret import read_private

_log = logging.getLogger("tacit")

ALERT = b"\x15\x03\x03\x00\x02\x02\x0a"
"""What a server says in plain text to somebody who does not begin with TLS: "unexpected message"."""
_BLOCK = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_FINGERPRINT = re.compile(r"(?:sha256:)?((?:[0-9a-f]{2}:?){31}[0-9a-f]{2})", re.IGNORECASE)
_EXPIRED, _NOT_YET = 10, 9
_WRONG_NAME = (62, 64)
"""Of OpenSSL's X509_V_ERR_...: CERT_HAS_EXPIRED, CERT_NOT_YET_VALID, HOSTNAME_ and IP_ADDRESS_MISMATCH."""


def fingerprint(certificate: bytes) -> str:
    """By which people know a certificate, which is given as DER."""
    return f"sha256:{hashlib.sha256(certificate).hexdigest()}"


def fingerprints(path: Path) -> list[str]:
    """Those of all certificates in a file, in their order.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        blocks = _BLOCK.findall(path.read_text("ascii"))
        return [fingerprint(ssl.PEM_cert_to_DER_cert(each)) for each in blocks]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} has no certificates (PEM) that can be read: {getattr(error, 'strerror', None) or error}"
        ) from error


def _context(side: int, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    """TLS 1.3 and no other, with this certificate."""
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if certificate is None or key is None:
        return context
    if not fingerprints(certificate):
        raise ConfigError(f"{certificate} has no certificate: make one by tacit certificate")
    read_private(key, "key")
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except (ssl.SSLError, ValueError) as error:
        why = getattr(error, "reason", None) or str(error)
        hint = ": it is that of another certificate" if why == "KEY_VALUES_MISMATCH" else f" ({why})"
        raise ConfigError(f"{key} is no key for the certificate in {certificate}{hint}") from error
    return context


def _refuse_password() -> str:
    raise ValueError("it is encrypted, and nobody is there to type its password")


def _out_of_date(certificate: Path, key: Path) -> str:
    """What is wrong with the dates in a certificate, by this machine's clock; "": nothing.

    It is shown to somebody in this process who trusts it.
    """
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    theirs.check_hostname = False
    theirs.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    theirs.load_verify_locations(certificate)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    mine = _context(ssl.PROTOCOL_TLS_SERVER, certificate, key).wrap_bio(there, back, server_side=True)
    other = theirs.wrap_bio(back, there)
    for each in (other, mine, other):
        try:
            each.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return {_EXPIRED: "has run out", _NOT_YET: "is not valid yet"}.get(error.verify_code, "")
    return ""


class TlsServer:
    """A server's side.

    Args:
        certificate: its own, PEM; `key`: the private key of it, which nobody else may read.
        workers: the certificates of those that may connect, PEM, each signed by itself or by one among them;
            read again when the file has changed. None: nobody has to show one.

    Attributes:
        fingerprint: of its own certificate.

    Raises:
        ConfigError: a file cannot be read, or does not hold what it should.
    """

    def __init__(self, certificate: Path, key: Path, workers: Path | None = None) -> None:
        self._files, self._workers = (certificate, key), workers
        self._stamp: tuple[int, ...] = ()
        self._known: frozenset[str] = frozenset()
        self._own = self._made()
        self.fingerprint = fingerprints(certificate)[0]
        if wrong := _out_of_date(certificate, key):
            _log.warning(
                "%s %s (%s): who knows it by its fingerprint connects, and all others refuse it. Set the "
                "clock, or make another one by tacit certificate",
                *(certificate, wrong, _now()),
            )
        if workers is not None and not self._known:
            raise ConfigError(f"{workers} has no certificate: put those of the workers into it, one by one")

    def _made(self) -> ssl.SSLContext:
        context = _context(ssl.PROTOCOL_TLS_SERVER, *self._files)
        context.num_tickets = 0  # a ticket is news to a worker that waits for a frame
        if self._workers is not None:
            self._stamp = self._stamped(self._workers)
            self._known = frozenset(fingerprints(self._workers))
            context.verify_mode = ssl.CERT_REQUIRED
            if self._known:
                context.load_verify_locations(self._workers)
        return context

    @staticmethod
    def _stamped(path: Path) -> tuple[int, ...]:
        try:
            there = path.stat()
        except OSError:
            return ()
        return there.st_mtime_ns, there.st_size, there.st_ino

    def renew(self) -> bool:
        """Read the workers' certificates again, if the file has changed; returns whether it has.

        Raises:
            ConfigError: it cannot be read; what it held before holds on.
        """
        if self._workers is None or self._stamped(self._workers) == self._stamp:
            return False
        self._stamp = self._stamped(self._workers)
        self._own = self._made()
        return True

    def begin(self, connection: socket) -> ssl.SSLSocket:
        """The connection, on which TLS is still to be set up."""
        return self._own.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def shown(self, connection: ssl.SSLSocket) -> str:
        """The fingerprint of the certificate that the other end has shown; "" where none was asked for."""
        certificate = connection.getpeercert(binary_form=True)
        return "" if certificate is None else fingerprint(certificate)

    def admits(self, shown: str) -> bool:
        """Whether somebody who has shown this certificate may be here."""
        return self._workers is None or shown in self._known


_NO_TLS = frozenset(
    {
        "WRONG_VERSION_NUMBER",
        "HTTP_REQUEST",
        "UNEXPECTED_MESSAGE",
        "RECORD_LAYER_FAILURE",
        "PACKET_LENGTH_TOO_LONG",
    }
)
SPOKE_PLAIN = f"it does not speak TLS, as this server does: a worker needs {TLS}"
SPOKE_TLS = "it speaks TLS, and this server was started without --tls"


def _now() -> str:
    return f"by this machine's clock it is {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC"


def why_refused(error: OSError) -> str:
    """Why a server could not set TLS up with somebody."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in (_EXPIRED, _NOT_YET):
            return f"its certificate does not hold now: {error.verify_message}; {_now()}"
        return f"its certificate is none of those that may connect: {error.verify_message}"
    if not isinstance(error, ssl.SSLError):
        return str(error.strerror or error)
    if error.reason in _NO_TLS:
        return SPOKE_PLAIN
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return f"it has shown no certificate: a worker needs {TLS_CERTIFICATE} and {TLS_KEY}"
    if "UNKNOWN_CA" in (error.reason or "") or "CERTIFICATE" in (error.reason or ""):
        return f"it does not trust this server's certificate ({error.reason})"
    return f"TLS could not be set up: {error.reason or error}"


class TlsWorker:
    """A worker's side: which servers it trusts, and the certificate that it shows.

    Args:
        trusted: "system": those that the system's authorities have signed for their name. A file (PEM):
            those in it, or signed by one in it, for their name. Fingerprints with commas: these.
        certificate, key: what it shows, where a server asks for it.

    Raises:
        ConfigError: a file cannot be read, or `trusted` is neither.
    """

    def __init__(self, trusted: str, certificate: Path | None = None, key: Path | None = None) -> None:
        self._trusted, self._shows = trusted, certificate is not None
        context = self._context = _context(ssl.PROTOCOL_TLS_CLIENT, certificate, key)
        found = [_FINGERPRINT.fullmatch(each.strip()) for each in trusted.split(",")]
        self._pinned = frozenset(
            f"sha256:{each[1].replace(':', '').lower()}" for each in found if each is not None
        )
        if all(found):
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        elif trusted == "system":
            context.load_default_certs()
        elif fingerprints(_existing(trusted)):
            context.load_verify_locations(trusted)
        else:
            raise ConfigError(f"{TLS}={trusted}: the file has no certificate")

    def begin(self, connection: socket, host: str, server: str) -> ssl.SSLSocket:
        """Set TLS up; `host`: as the user has written it.

        Raises:
            AttachError: the server is not trusted, or speaks no TLS.
            OSError: the connection ends.
        """
        try:
            line = self._context.wrap_socket(connection, server_hostname=host)
        except ssl.SSLError as error:
            raise self.refusal(error, server) from error
        shown = fingerprint(line.getpeercert(binary_form=True) or b"")
        if self._pinned and shown not in self._pinned:
            line.close()
            raise AttachError(
                f"{server} shows the certificate {shown}, and {TLS} trusts {self._trusted}: it is another "
                "server, or has another certificate now. Ask whoever runs it, and write its fingerprint"
            )
        return line

    def refusal(self, error: ssl.SSLError, server: str) -> OSError | AttachError:
        """What an error of TLS means, to be raised: an OSError where another attempt may succeed."""
        if isinstance(error, ssl.SSLCertVerificationError):
            if error.verify_code == _EXPIRED:
                what = f"has run out ({_now()}): make another one by tacit certificate, or set the clock"
            elif error.verify_code == _NOT_YET:
                what = f"is not valid yet ({_now()}): set the clock, or wait"
            elif error.verify_code in _WRONG_NAME:
                what = (
                    f"is for another name ({error.verify_message}): write the name that it is for, make one "
                    f"by tacit certificate NAME, or let {TLS} be its fingerprint"
                )
            else:
                what = (
                    f"is not trusted by {TLS}={self._trusted} ({error.verify_message}): write the server's "
                    "fingerprint, or the file with its certificate"
                )
            return AttachError(f"the certificate of {server} {what}")
        reason = error.reason or ""
        if reason in _NO_TLS:
            return AttachError(
                f"{server} does not speak TLS: start it with --tls CERTIFICATE KEY, or unset {TLS}"
            )
        if "ALERT" in reason and not self._shows:
            return AttachError(
                f"{server} asks for a certificate, and none is shown: make one by tacit certificate NAME "
                "--out NAME, have it put into the file of the server's --certificates, and set "
                f"{TLS_CERTIFICATE}=NAME.pem and {TLS_KEY}=NAME.key"
            )
        if "ALERT" in reason:
            return AttachError(
                f"{server} has refused this worker's certificate ({reason.lower().replace('_', ' ')}): let "
                f"{TLS_CERTIFICATE} and {TLS_KEY} name one that is in the server's --certificates and has "
                "not run out"
            )
        return ConnectionError(f"TLS could not be set up: {reason or error}")


def _existing(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise ConfigError(
            f"{TLS}={text:.200} is no fingerprint, such as sha256:6f0c..., and no file with certificates: "
            'write one of them, or "system"'
        )
    return path


def find_tls(environment: Mapping[str, str] = os.environ) -> TlsWorker | None:
    """A worker's side as the environment says; None: plain text.

    Raises:
        ConfigError: what it says cannot be.
    """
    trusted = environment.get(TLS, "")
    certificate, key = environment.get(TLS_CERTIFICATE), environment.get(TLS_KEY)
    if bool(certificate) != bool(key) or (certificate and not trusted):
        raise ConfigError(
            f"{TLS_CERTIFICATE}, {TLS_KEY} and {TLS} belong together: set the first two to the worker's "
            "certificate and its key, and the third to what it trusts"
        )
    if not trusted:
        return None
    return TlsWorker(trusted, Path(certificate) if certificate else None, Path(key) if key else None)
