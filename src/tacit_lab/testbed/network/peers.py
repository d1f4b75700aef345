"""How many bytes a node's interface has exchanged with each other node, counted by the kernel's nf_tables.

In a node's network namespace two sets grow by themselves, keyed by the address of the other end: what is
sent is counted before it is queued, and what is received when it has come. What the node's ranks send to
each other never reaches the interface, and is not counted. A packet costs a look into a hash table.

A packet is counted with the 14 bytes of its Ethernet header, as the interface's own counter does it. What
that counts beside is ARP; and a packet that the shaper dropped is counted here each time that it was sent.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import NamedTuple

from tacit_lab.testbed.network import nftables as nft
from tacit_lab.testbed.network.nodes import address

_SENT, _RECEIVED = b"sent", b"received"
_ETHERNET = 14
_MOST_PEERS = 4096
_SOURCE, _DESTINATION = 12, 16
"""Where the addresses are in a header of IPv4."""
_GROWS_BY_RULES = 0x20


class PeerBytes(NamedTuple):
    """Bytes that a node has sent to each other one, and received from each, by the numbers of the nodes."""

    sent: dict[int, int]
    received: dict[int, int]


def begin() -> None:
    """Count from now on what the `INTERFACE` of this process's network namespace carries, be it there or not.

    Raises:
        OSError: the kernel lacks nf_tables, or this process may not use them.
    """
    both = ((_SENT, nft.OUTPUT, nft.OUT_NAME, _DESTINATION), (_RECEIVED, nft.INPUT, nft.IN_NAME, _SOURCE))
    messages = [nft.of_tables(nft.NEW_TABLE, nft.text(1, nft.TABLE))]
    for count, (name, hook, interface, offset) in enumerate(both, start=1):
        counted = nft.rule(name, interface, _counted(name, count, offset))
        messages += [_set(name, count), nft.chain(name, hook), counted]
    nft.change(messages)


def read() -> PeerBytes | None:
    """What has been counted in this process's network namespace; None where nothing counts."""
    try:
        return PeerBytes(_elements(_SENT), _elements(_RECEIVED))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EPERM, errno.EPROTONOSUPPORT, errno.EOPNOTSUPP):
            return None
        raise


def _elements(name: bytes) -> dict[int, int]:
    request = nft.message(
        nft.TABLES << 8 | nft.GET_ELEMENTS,
        nft.text(1, nft.TABLE) + nft.text(2, name),
        flags=nft.REQUEST | nft.DUMP,
    )
    found: dict[int, int] = {}
    with nft.opened() as tables:
        tables.send(request)
        while True:
            for kind, body in nft.answers(tables.recv(1 << 16)):
                if kind == nft.DONE:
                    return found
                found |= dict(_counts(body[nft.FAMILY.size :]))


def _counts(body: bytes) -> Iterator[tuple[int, int]]:
    """The nodes of a message of elements, and their bytes."""
    for _, element in nft.attributes(dict(nft.attributes(body)).get(3, b"")):
        parts = dict(nft.attributes(element))
        key = dict(nft.attributes(parts[1]))[1]
        expression = parts[7] if 7 in parts else next(inner for _, inner in nft.attributes(parts[11]))
        counted = dict(nft.attributes(dict(nft.attributes(expression))[2]))
        nbytes, packets = (int.from_bytes(counted[each]) for each in (1, 2))
        node = _node_at(key)
        if node is not None:
            yield node, nbytes + _ETHERNET * packets


def _node_at(key: bytes) -> int | None:
    """The node that has this address; None for others, such as a broadcast's."""
    node = int.from_bytes(key[2:4]) - 1
    return node if node >= 0 and socket.inet_ntoa(key) == address(node) else None


def _set(name: bytes, count: int) -> bytes:
    size = nft.nested(9, nft.number(1, _MOST_PEERS))
    about = (
        nft.text(2, name) + nft.number(3, _GROWS_BY_RULES) + nft.number(5, 4) + size + nft.number(10, count)
    )
    return nft.of_tables(nft.NEW_SET, nft.text(1, nft.TABLE) + about)


def _counted(name: bytes, count: int, offset: int) -> list[tuple[bytes, bytes]]:
    """Load the address, and count in the set's element of it."""
    counter = nft.nested(7, nft.text(1, b"counter") + nft.nested(2, b""))
    return [
        (b"payload", nft.number(1, 1) + nft.number(2, 1) + nft.number(3, offset) + nft.number(4, 4)),
        (b"dynset", nft.text(1, name) + nft.number(2, count) + nft.number(3, 0) + nft.number(4, 1) + counter),
    ]
