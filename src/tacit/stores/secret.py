"""The secret that a parameter server and its workers share, by which each proves to the other who it is."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from tacit.environment import SERVER_SECRET, SERVER_SECRET_FILE
from tacit.errors import ConfigError

LEAST_BYTES = 16

MAKE = 'python -c "import secrets; print(secrets.token_hex(32))"'
"""The command that prints a new secret."""


class Secret:
    """A shared secret. It is not shown, not even by mistake, and cannot be pickled.

    Args:
        value: white space around it does not count.
        source: where it comes from, for messages.

    Raises:
        ConfigError: it is shorter than 16 bytes. Who overhears one handshake can try secrets on it at home,
            billions a second, so fewer than 2^128 would be too few.
    """

    __slots__ = ("_value",)

    def __init__(self, value: bytes, source: str = "the secret") -> None:
        value = value.strip()
        if len(value) < LEAST_BYTES:
            raise ConfigError(
                f"{source} has {len(value)} bytes, and fewer than {LEAST_BYTES} could be guessed by whoever "
                f"overhears a worker that joins: write 32 random bytes, such as {MAKE} prints"
            )
        self._value = value

    def proof(self, who: str, *seen: bytes) -> bytes:
        """The proof that the sender of these messages knows the secret: HMAC-SHA256, 32 bytes."""
        parts = (who.encode(), *seen)
        framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.digest(self._value, framed, hashlib.sha256)

    def __repr__(self) -> str:
        """A text without the secret."""
        return "Secret(hidden)"

    def __reduce__(self) -> str:
        """Refuse to be pickled.

        Raises:
            TypeError: always.
        """
        raise TypeError("a secret is not to be pickled")


def find_secret(file: Path | None = None, environment: Mapping[str, str] = os.environ) -> Secret | None:
    """The secret in this file, or in the environment, or in the file that it names; None: there is none.

    Raises:
        ConfigError: it is too short, others can read its file, the file cannot be read, or there are two.
    """
    text, named = environment.get(SERVER_SECRET), environment.get(SERVER_SECRET_FILE)
    if file is None and text and named:
        raise ConfigError(f"{SERVER_SECRET} and {SERVER_SECRET_FILE} are both set: unset one of them")
    if file is None and text:
        return Secret(text.encode(), SERVER_SECRET)
    if file is None and not named:
        return None
    path = Path(named or "") if file is None else file
    return Secret(read_private(path, "secret"), f"the file {path}")


def read_private(path: Path, what: str) -> bytes:
    """The content of a file, which nobody else may be able to read; `what` it holds, for messages.

    Raises:
        ConfigError: others can read it, or it cannot be read.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for somebody who writes to it.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{path} is no plain file: write the {what} to one, and chmod 600 {path}")
            if mode & 0o077:
                raise ConfigError(
                    f"others on this machine can read the {what} in {path} (its mode is {mode & 0o777:o}): "
                    f"chmod 600 {path}, and write another {what}, as this one may be known"
                )
            return file.read(1 << 16)
    except OSError as error:
        raise ConfigError(f"the {what} in {path} cannot be read: {error.strerror or error}") from error
