"""Messages between the command and the supervisor of its testbed: JSON, together with open files."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

_HEADER = struct.Struct("!I")
_MOST_FILES = 8
_PRIVATE = socket.MSG_CMSG_CLOEXEC  # programs that are started later do not inherit the files


def send(control: socket.socket, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    """Send one message, and copies of open files with it."""
    body = json.dumps(message).encode()
    header = _HEADER.pack(len(body))
    if files:
        sent = socket.send_fds(control, [header], list(files))
        header = header[sent:]
    control.sendall(header + body)


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one message and its files; None when the other side is gone."""
    try:
        header, files, _, _ = socket.recv_fds(control, _HEADER.size, _MOST_FILES, _PRIVATE)
        if not header:
            return None
        header += _exactly(control, _HEADER.size - len(header))
        (size,) = _HEADER.unpack(header)
        return json.loads(_exactly(control, size)), files
    except (EOFError, ConnectionError):
        return None


def _exactly(control: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = control.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
