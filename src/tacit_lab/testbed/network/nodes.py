"""The names and addresses of a testbed's nodes."""

from __future__ import annotations

INTERFACE = "eth0"
"""The name of a node's only link, the same on every node."""

PREFIX = 16
"""How many leading bits the addresses of all nodes share."""

SWITCH = "10.77.255.254"
"""The IPv4 address of the switch, where there is a background load, which it takes, or a store of members."""


def address(node: int) -> str:
    """The IPv4 address of a node, valid inside its testbed only."""
    high, low = divmod(node + 1, 256)
    return f"10.77.{high}.{low}"


def mac(node: int) -> str:
    """The Ethernet address of a node's link: its IPv4 address behind two bytes."""
    return "02:00:" + ":".join(f"{int(part):02x}" for part in address(node).split("."))


def hostname(node: int) -> str:
    """The host name that programs on the node see."""
    return f"node{node}"


def hosts(count: int) -> str:
    """The hosts file of a testbed, so that no name is ever looked up outside of it."""
    names = {"127.0.0.1": "localhost", SWITCH: "switch"} | {
        address(node): hostname(node) for node in range(count)
    }
    # Sockets that serve IPv6 too see IPv4 peers under their mapped addresses.
    return "".join(f"{address} {name}\n::ffff:{address} {name}\n" for address, name in names.items())
