"""How many bytes a node's interface has exchanged with each other node, counted by the kernel's nf_tables.

In a node's network namespace two sets grow by themselves, keyed by the address of the other end: what is
sent is counted before it is queued, and what is received when it has come. What the node's ranks send to
each other never reaches the interface, and is not counted. A packet costs a look into a hash table. The few
netlink messages are written here with the standard library alone, as each rank's processes read by them.

A packet is counted with the 14 bytes of its Ethernet header, as the interface's own counter does it. What
that counts beside is ARP; and a packet that the shaper dropped is counted here each time that it was sent.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from tacit_lab.testbed.network.nodes import INTERFACE, address

_TABLE, _SENT, _RECEIVED = b"tacit", b"sent", b"received"
_ETHERNET = 14
_MOST_PEERS = 4096

_NETFILTER, _TABLES, _IPV4 = 12, 10, 2
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NEW_TABLE, _NEW_CHAIN, _NEW_RULE, _NEW_SET, _GET_ELEMENTS = 0, 3, 6, 9, 13
_ERROR, _DONE = 2, 3
_REQUEST, _ACKNOWLEDGE, _DUMP, _CREATE = 1, 4, 0x300, 0x400
_NESTED, _TYPE = 0x8000, 0x3FFF
_INPUT, _OUTPUT = 1, 3
_IN_NAME, _OUT_NAME = 6, 7
_SOURCE, _DESTINATION = 12, 16
"""Where the addresses are in a header of IPv4."""
_GROWS_BY_RULES = 0x20
_HEADER, _FAMILY, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("!BBH"), struct.Struct("=HH")
_CODE = struct.Struct("=i")
_PATIENCE = 5.0


class PeerBytes(NamedTuple):
    """Bytes that a node has sent to each other one, and received from each, by the numbers of the nodes."""

    sent: dict[int, int]
    received: dict[int, int]


def begin() -> None:
    """Count from now on what the `INTERFACE` of this process's network namespace carries, be it there or not.

    Raises:
        OSError: the kernel lacks nf_tables, or this process may not use them.
    """
    table = _text(1, _TABLE)
    messages = [
        _message(_BATCH_BEGIN, b"", family=0, resource=_TABLES),
        _of_tables(_NEW_TABLE, table),
        *(
            each
            for number, (name, hook, interface, offset) in enumerate(
                ((_SENT, _OUTPUT, _OUT_NAME, _DESTINATION), (_RECEIVED, _INPUT, _IN_NAME, _SOURCE)), start=1
            )
            for each in (
                _of_tables(_NEW_SET, table + _set(name, number)),
                _of_tables(_NEW_CHAIN, table + _chain(name, hook)),
                _of_tables(_NEW_RULE, table + _rule(name, number, interface, offset)),
            )
        ),
        _message(_BATCH_END, b"", family=0, resource=_TABLES),
    ]
    with _opened() as tables:
        tables.send(b"".join(messages))
        waiting = len(messages) - 2  # the batch's own two are not answered
        while waiting:
            waiting -= len([*_answers(tables.recv(1 << 16))])


def read() -> PeerBytes | None:
    """What has been counted in this process's network namespace; None where nothing counts."""
    try:
        return PeerBytes(_elements(_SENT), _elements(_RECEIVED))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EPERM, errno.EPROTONOSUPPORT, errno.EOPNOTSUPP):
            return None
        raise


def _elements(name: bytes) -> dict[int, int]:
    request = _message(
        _TABLES << 8 | _GET_ELEMENTS, _text(1, _TABLE) + _text(2, name), flags=_REQUEST | _DUMP
    )
    found: dict[int, int] = {}
    with _opened() as tables:
        tables.send(request)
        while True:
            for kind, body in _answers(tables.recv(1 << 16)):
                if kind == _DONE:
                    return found
                found |= dict(_counts(body[_FAMILY.size :]))


def _counts(body: bytes) -> Iterator[tuple[int, int]]:
    """The nodes of a message of elements, and their bytes."""
    for _, element in _attributes(dict(_attributes(body)).get(3, b"")):
        parts = dict(_attributes(element))
        key = dict(_attributes(parts[1]))[1]
        expression = parts[7] if 7 in parts else next(inner for _, inner in _attributes(parts[11]))
        counted = dict(_attributes(dict(_attributes(expression))[2]))
        nbytes, packets = (int.from_bytes(counted[each]) for each in (1, 2))
        node = _node_at(key)
        if node is not None:
            yield node, nbytes + _ETHERNET * packets


def _node_at(key: bytes) -> int | None:
    """The node that has this address; None for others, such as a broadcast's."""
    node = int.from_bytes(key[2:4]) - 1
    return node if node >= 0 and socket.inet_ntoa(key) == address(node) else None


# ---- what is asked for --------------------------------------------------------------------------------


def _set(name: bytes, number: int) -> bytes:
    size = _nested(9, _number(1, _MOST_PEERS))
    return _text(2, name) + _number(3, _GROWS_BY_RULES) + _number(5, 4) + size + _number(10, number)


def _chain(name: bytes, hook: int) -> bytes:
    return _text(3, name) + _nested(4, _number(1, hook) + _number(2, 0)) + _text(7, b"filter")


def _rule(name: bytes, number: int, interface: int, offset: int) -> bytes:
    """If it is the interface: load the address, and count in the set's element of it."""
    device = _nested(3, _attribute(1, INTERFACE.encode().ljust(16, b"\0")))
    counter = _nested(7, _text(1, b"counter") + _nested(2, b""))
    expressions = (
        (b"meta", _number(2, interface) + _number(1, 1)),
        (b"cmp", _number(1, 1) + _number(2, 0) + device),
        (b"payload", _number(1, 1) + _number(2, 1) + _number(3, offset) + _number(4, 4)),
        (b"dynset", _text(1, name) + _number(2, number) + _number(3, 0) + _number(4, 1) + counter),
    )
    elements = (_nested(1, _text(1, kind) + _nested(2, data)) for kind, data in expressions)
    return _text(2, name) + _nested(4, b"".join(elements))


# ---- netlink ------------------------------------------------------------------------------------------


def _opened() -> socket.socket:
    opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETFILTER)
    opened.settimeout(_PATIENCE)
    opened.bind((0, 0))
    return opened


def _of_tables(kind: int, body: bytes) -> bytes:
    return _message(_TABLES << 8 | kind, body, flags=_REQUEST | _ACKNOWLEDGE | _CREATE)


def _message(
    kind: int, body: bytes, *, family: int = _IPV4, resource: int = 0, flags: int = _REQUEST
) -> bytes:
    whole = _FAMILY.pack(family, 0, resource) + body
    return _HEADER.pack(_HEADER.size + len(whole), kind, flags, 0, 0) + whole


def _attribute(kind: int, data: bytes) -> bytes:
    size = _ATTRIBUTE.size + len(data)
    return _ATTRIBUTE.pack(size, kind) + data + bytes(-size % 4)


def _nested(kind: int, data: bytes) -> bytes:
    return _attribute(kind | _NESTED, data)


def _text(kind: int, text: bytes) -> bytes:
    return _attribute(kind, text + b"\0")


def _number(kind: int, number: int) -> bytes:
    return _attribute(kind, number.to_bytes(4))


def _answers(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The messages in what was received; an error is raised."""
    while data:
        size, kind, *_ = _HEADER.unpack_from(data)
        body = data[_HEADER.size : size]
        if kind == _ERROR and (code := -_CODE.unpack_from(body)[0]):
            raise OSError(code, f"nf_tables: {os.strerror(code)}")
        yield kind, body
        data = data[size + -size % 4 :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(data)
        yield kind & _TYPE, data[_ATTRIBUTE.size : size]
        data = data[size + -size % 4 :]
