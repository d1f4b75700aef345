"""How worker and parameter server prove to each other that they know one secret, before anything is parsed.

    server -> worker    greeting: who it is and its version, and a random number drawn for this connection
    worker -> server    reply: the same of the worker, and HMAC-SHA256(secret, "worker", greeting, this)
    server -> worker    verdict: one byte, and HMAC-SHA256(secret, "server", greeting, reply)

All three have a fixed size. The secret itself never travels; overheard messages are of no use for another
connection, as each has other numbers; and the two proofs differ, so that neither can be sent back as the
other. Here are the messages alone: `listener` and `connecting` send them.
"""

from __future__ import annotations

import hmac
import os
import struct
from enum import IntEnum

from tacit.environment import SERVER_SECRET, SERVER_SECRET_FILE
from tacit.errors import AttachError
from tacit.kernels.payloads import FORMAT
from tacit.stores.secret import Secret

VERSION = 5
"""The version of the handshake and of the frames after it; it rises when either changes."""
SECONDS = 10.0
"""How long a handshake may take, in all."""

_MAGIC = b"tacit-ps"
_HEAD = struct.Struct("<8sHH32s")
_PROOF = 32
GREETING_BYTES = _HEAD.size
REPLY_BYTES = _HEAD.size + _PROOF
VERDICT_BYTES = 1 + _PROOF


class Verdict(IntEnum):
    """A server's judgement of a worker's reply."""

    WELCOME = 0
    WRONG_SECRET = 1
    OTHER_VERSION = 2
    NO_WORKER = 3


REASONS = {
    Verdict.WRONG_SECRET: "it does not know the secret",
    Verdict.OTHER_VERSION: "it is a worker of another version of tacit",
    Verdict.NO_WORKER: "it does not speak as a worker does",
}


def greeting() -> bytes:
    """The server's first message; another one for each connection."""
    return _HEAD.pack(_MAGIC, VERSION, FORMAT, os.urandom(32))


def reply(secret: Secret, greeting: bytes) -> bytes:
    """The worker's answer."""
    head = _HEAD.pack(_MAGIC, VERSION, FORMAT, os.urandom(32))
    return head + secret.proof("worker", greeting, head)


def may_be(got: bytes) -> bool:
    """Whether what has come so far may become a worker's reply."""
    return _MAGIC.startswith(got[: len(_MAGIC)])


def versions(reply: bytes) -> bytes:
    """The reply without its proof, so that a server of another version can say so too."""
    return reply[: _HEAD.size] + bytes(_PROOF)


def judged(secret: Secret, greeting: bytes, reply: bytes) -> tuple[Verdict, bytes]:
    """The server's verdict on a reply, and the message with it for the worker."""
    verdict = _judged(secret, greeting, reply)
    proof = secret.proof("server", greeting, reply) if verdict is Verdict.WELCOME else bytes(_PROOF)
    return verdict, bytes([verdict]) + proof


def _judged(secret: Secret, greeting: bytes, reply: bytes) -> Verdict:
    head, proof = reply[: _HEAD.size], reply[_HEAD.size :]
    magic, version, format_, _ = _HEAD.unpack(head)
    if magic != _MAGIC:
        return Verdict.NO_WORKER
    if (version, format_) != (VERSION, FORMAT):
        return Verdict.OTHER_VERSION
    known = hmac.compare_digest(proof, secret.proof("worker", greeting, head))
    return Verdict.WELCOME if known else Verdict.WRONG_SECRET


def check_greeting(greeting: bytes, server: str) -> None:
    """Refuse a greeting that is not of a server of this version.

    Raises:
        AttachError: it is of another program or version; the message says of which.
    """
    magic, version, format_, _ = _HEAD.unpack(greeting)
    if magic != _MAGIC:
        raise AttachError(f"{server} is no parameter server of tacit: check its address and port")
    if (version, format_) != (VERSION, FORMAT):
        raise AttachError(
            f"{server} is of another version of tacit (its frames are {version}.{format_}, and this tacit's "
            f"{VERSION}.{FORMAT}): install the same version there and here"
        )


def check_verdict(secret: Secret, greeting: bytes, reply: bytes, verdict: bytes, server: str) -> None:
    """Refuse a verdict that does not let this worker in, or of a server that does not know the secret.

    Raises:
        AttachError: the message says which of the two.
    """
    if verdict[0] == Verdict.OTHER_VERSION:
        raise AttachError(f"{server} is of another version of tacit: install the same version there and here")
    right = hmac.compare_digest(verdict[1:], secret.proof("server", greeting, reply))
    if verdict[0] != Verdict.WELCOME or not right:
        raise AttachError(
            f"{server} has another secret than this worker: give both the same {SERVER_SECRET}, or a "
            f"{SERVER_SECRET_FILE} with the same content"
        )
