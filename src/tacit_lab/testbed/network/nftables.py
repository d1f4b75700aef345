"""What is asked of the kernel's nf_tables, as messages of netlink, with the standard library alone.

A message's body is made of attributes: a number of their kind, and data, in which there may be others.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence

from tacit_lab.testbed.network.nodes import INTERFACE

INPUT, OUTPUT = 1, 3
"""Where a chain is asked: for what the node gets, and for what it sends."""
IN_NAME, OUT_NAME = 6, 7
"""What to look at of a packet: the name of the interface by which it came, or goes."""
TABLES = 10
NEW_TABLE, NEW_CHAIN, NEW_RULE, NEW_SET, GET_ELEMENTS = 0, 3, 6, 9, 13
REQUEST, DUMP, DONE = 1, 0x300, 3
TABLE = b"tacit"
FAMILY = struct.Struct("!BBH")
_NETFILTER, _IPV4 = 12, 2
_BATCH_BEGIN, _BATCH_END, _ERROR = 0x10, 0x11, 2
_ACKNOWLEDGE, _CREATE = 4, 0x400
_NESTED, _TYPE = 0x8000, 0x3FFF
_HEADER, _ATTRIBUTE, _CODE = struct.Struct("=IHHII"), struct.Struct("=HH"), struct.Struct("=i")
_NEW = (1 << 3).to_bytes(4, sys.byteorder)
"""The state of a packet that begins a connection."""
_PATIENCE = 5.0


def change(messages: Iterable[bytes]) -> None:
    """Have the kernel do all this, or nothing.

    Raises:
        OSError: it lacks nf_tables, or this process may not use them.
    """
    asked = [*messages]
    ends = (message(kind, b"", family=0, resource=TABLES) for kind in (_BATCH_BEGIN, _BATCH_END))
    with opened() as tables:
        tables.send(next(ends) + b"".join(asked) + next(ends))
        waiting = len(asked)  # the batch's own two are not answered
        while waiting:
            waiting -= len([*answers(tables.recv(1 << 16))])


def chain(name: bytes, hook: int) -> bytes:
    """Make a chain of rules."""
    place = nested(4, number(1, hook) + number(2, 0))
    return of_tables(NEW_CHAIN, text(1, TABLE) + text(3, name) + place + text(7, b"filter"))


def rule(name: bytes, interface: int, expressions: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Add these expressions to a chain, for packets whose `IN_NAME` or `OUT_NAME` is the node's link."""
    device = nested(3, attribute(1, INTERFACE.encode().ljust(16, b"\0")))
    whole = (
        (b"meta", number(2, interface) + number(1, 1)),
        (b"cmp", number(1, 1) + number(2, 0) + device),
        *expressions,
    )
    elements = (nested(1, text(1, kind) + nested(2, data)) for kind, data in whole)
    return of_tables(NEW_RULE, text(1, TABLE) + text(2, name) + nested(4, b"".join(elements)))


def opened() -> socket.socket:
    """A socket to the kernel's netfilter, in this process's network."""
    opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETFILTER)
    opened.settimeout(_PATIENCE)
    opened.bind((0, 0))
    return opened


def drop_new() -> None:
    """Have the node of the calling process drop what belongs to no connection that it has begun itself.

    Raises:
        OSError: the kernel cannot.
    """
    mask, none = (nested(kind, attribute(1, value)) for kind, value in ((4, _NEW), (3, bytes(4))))
    expressions = [
        (b"ct", number(1, 1) + number(2, 0)),  # its state
        (b"bitwise", number(1, 1) + number(2, 1) + number(3, 4) + mask + nested(5, attribute(1, bytes(4)))),
        (b"cmp", number(1, 1) + number(2, 1) + none),
        (b"immediate", number(1, 0) + nested(2, nested(2, number(1, 0)))),  # drop it
    ]
    name = b"nat"
    change([of_tables(NEW_TABLE, text(1, TABLE)), chain(name, INPUT), rule(name, IN_NAME, expressions)])


def of_tables(kind: int, body: bytes) -> bytes:
    """A message to the tables, which the kernel is to acknowledge."""
    return message(TABLES << 8 | kind, body, flags=REQUEST | _ACKNOWLEDGE | _CREATE)


def message(kind: int, body: bytes, *, family: int = _IPV4, resource: int = 0, flags: int = REQUEST) -> bytes:
    """A message with its header."""
    whole = FAMILY.pack(family, 0, resource) + body
    return _HEADER.pack(_HEADER.size + len(whole), kind, flags, 0, 0) + whole


def attribute(kind: int, data: bytes) -> bytes:
    """An attribute."""
    size = _ATTRIBUTE.size + len(data)
    return _ATTRIBUTE.pack(size, kind) + data + bytes(-size % 4)


def nested(kind: int, data: bytes) -> bytes:
    """An attribute whose data are others."""
    return attribute(kind | _NESTED, data)


def text(kind: int, text: bytes) -> bytes:
    """An attribute that is a text."""
    return attribute(kind, text + b"\0")


def number(kind: int, number: int) -> bytes:
    """An attribute that is a number of 32 bits."""
    return attribute(kind, number.to_bytes(4))


def answers(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The messages in what was received; an error is raised."""
    while data:
        size, kind, *_ = _HEADER.unpack_from(data)
        body = data[_HEADER.size : size]
        if kind == _ERROR and (code := -_CODE.unpack_from(body)[0]):
            raise OSError(code, f"nf_tables: {os.strerror(code)}")
        yield kind, body
        data = data[size + -size % 4 :]


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The kinds and data of attributes that follow each other."""
    while len(data) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(data)
        yield kind & _TYPE, data[_ATTRIBUTE.size : size]
        data = data[size + -size % 4 :]
