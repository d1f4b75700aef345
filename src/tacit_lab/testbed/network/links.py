"""Builds the network of a testbed: a namespace for each node, a bridge between them, shaped links.

Works on the network namespace of the calling process, which becomes the switch: it must be a fresh one.
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tacit.errors import TestbedError, installing
from tacit_lab.cluster import Cluster
from tacit_lab.impairment import Impairment
from tacit_lab.testbed.network import nftables, peers
from tacit_lab.testbed.network.linux import Clone, join, unshare
from tacit_lab.testbed.network.nodes import INTERFACE, PREFIX, SWITCH, address, mac
from tacit_lab.testbed.network.relay import Relay, needed

_OWN_NETWORK = "/proc/self/ns/net"
_BURST_SECONDS = 0.004  # what the slowest kernel clock (HZ=250) lets through between two ticks
_LEAST_BURST = 16 << 10
_QUEUE_SECONDS = 0.05
_LEAST_QUEUE = 256 << 10
_CONGESTION_CONTROLS = ("cubic", "reno")
_HANDLE_NETEM, _HANDLE_TBF = "1:", "2:"
_LOOPBACK = 1
_BRIDGE = "switch"
_LACKING = (errno.ENOENT, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Fabric:
    """The switch of a testbed and its nodes.

    Attributes:
        nodes: The network namespace of each node, as open files.
        relay: What delays its packets; None where there is no latency, or the kernel does it.
    """

    nodes: list[int]
    relay: Relay | None = None


def build(cluster: Cluster) -> Fabric:
    """Make the network of a cluster."""
    try:
        from pyroute2 import IPRoute
    except ImportError as error:
        raise TestbedError(
            f"the testbed builds its network with pyroute2, which cannot be imported ({error}). "
            f"Install it: {installing('testbed')}."
        ) from error
    switch = os.open(_OWN_NETWORK, os.O_RDONLY)
    with ExitStack() as stack:
        hub = stack.enter_context(IPRoute())
        bridge = _add(hub, _BRIDGE, kind="bridge")
        if cluster.loaded:
            _address(hub)
        relayed = needed(cluster) and (cluster.sites > 1 or not _has_netem(hub))
        relay = Relay(hub, bridge, cluster) if relayed else None
        nodes = []
        for node in range(cluster.places):
            unshare(Clone.NETWORK)
            _prepare_network()
            with suppress(OSError):  # where the kernel cannot count so, it is not known who sent to whom
                peers.begin()
            if cluster.impairment_of(node).nat:
                _hide()
            nodes.append(os.open(_OWN_NETWORK, os.O_RDONLY))
            inside = stack.enter_context(IPRoute())
            join(switch, Clone.NETWORK)
            _connect(hub, bridge, inside, nodes[-1], node, cluster, relay)
    os.close(switch)
    return Fabric(nodes, relay)


def address_switch() -> None:
    """Give the switch its address, in the network of the calling process; again does nothing."""
    from pyroute2 import IPRoute

    with IPRoute() as hub:
        if not hub.get_addr(address=SWITCH):
            _address(hub)


def _address(hub: Any) -> None:
    # torch's store connects to itself, which goes by lo.
    hub.link("set", index=hub.link_lookup(ifname="lo")[0], state="up")
    hub.addr("add", index=hub.link_lookup(ifname=_BRIDGE)[0], address=SWITCH, prefixlen=PREFIX)


def _hide() -> None:
    """Have the node of the calling process be as behind a NAT."""
    try:
        nftables.drop_new()
    except OSError as error:
        raise TestbedError(
            f"this kernel cannot emulate a NAT, as it does not follow connections (nf_conntrack): {error}. "
            "Leave nat out of the cluster."
        ) from error


def _connect(
    hub: Any, bridge: int, inside: Any, namespace: int, node: int, cluster: Cluster, relay: Relay | None
) -> None:
    """Join one node to the switch, by a link that is shaped at both ends."""
    port_name = f"port{node}"
    peer = {"ifname": INTERFACE, "net_ns_fd": namespace, "address": mac(node)}
    port = _add(hub, port_name, kind="veth", peer=peer, up=False)
    hub.link("set", index=port, master=bridge, state="up")
    link = inside.link_lookup(ifname=INTERFACE)[0]
    inside.addr("add", index=link, address=address(node), prefixlen=PREFIX)
    inside.link("set", index=inside.link_lookup(ifname="lo")[0], state="up")
    rate, impairment = cluster.rate_of(node), cluster.impairment_of(node)
    for routes, end in ((hub, port), (inside, link)):
        routes.link("set", index=end, mtu=impairment.mtu)
    inside.link("set", index=link, state="up", **_packets(rate))
    place, latency = dict[str, str](), cluster.latency_of(node)
    if relay is not None:
        relay.intercept(port, node)
    elif latency or impairment.of_single_packets:
        place["parent"] = _impair(inside, link, rate, latency, impairment)
    _shape(inside, link, rate, **place)
    _shape(hub, port, rate)


def _has_netem(hub: Any) -> bool:
    """Whether the kernel can delay packets; tried where none are."""
    try:
        hub.tc("add", "netem", _LOOPBACK, delay=1000)
    except Exception as error:
        if getattr(error, "code", None) in _LACKING:
            return False
        raise
    return True


def _add(routes: Any, name: str, *, up: bool = True, **link: Any) -> int:
    try:
        routes.link("add", ifname=name, **link)
    except Exception as error:
        raise _explained(error, f"make a {link['kind']}", link["kind"]) from error
    index = int(routes.link_lookup(ifname=name)[0])
    if up:
        routes.link("set", index=index, state="up")
    return index


def _impair(routes: Any, link: int, rate: float | None, latency: float, impairment: Impairment) -> str:
    """Have the kernel delay and lose what an interface sends. Returns where to shape it."""
    if impairment.of_single_packets:
        routes.link("set", index=link, gso_max_segs=1)
    options = {
        "delay": round(latency * 1e6),
        "jitter": round(impairment.jitter * 1e6),
        "loss": 100 * impairment.loss,
        "limit": 1000 + int((rate or 10e9) / 8 * (latency + impairment.jitter) / 500),
    }
    _queue(routes, "netem", link, "emulate latency", handle=_HANDLE_NETEM, **options)
    return _HANDLE_NETEM


def _shape(routes: Any, link: int, rate: float | None, **place: str) -> None:
    """Have an interface send no faster than the rate."""
    if rate is not None:
        options = {"handle": _HANDLE_TBF, "rate": int(rate / 8), "burst": burst(rate), "limit": _limit(rate)}
        _queue(routes, "tbf", link, "shape links", **options, **place)


def burst(rate: float) -> int:
    """How many bytes a link that was idle lets through at once."""
    return max(_LEAST_BURST, int(rate / 8 * _BURST_SECONDS))


def _packets(rate: float | None) -> dict[str, int]:
    """Segments that travel as one packet must pass the shaper as one, with the headers of each added."""
    return {} if rate is None else {"gso_max_size": min(int(burst(rate) * 0.9), 1 << 16)}


def _limit(rate: float) -> int:
    """How many bytes may wait for a link before some are dropped."""
    return max(_LEAST_QUEUE, int(rate / 8 * _QUEUE_SECONDS)) + burst(rate)


def _queue(routes: Any, kind: str, link: int, purpose: str, **options: Any) -> None:
    try:
        routes.tc("add", kind, link, **options)
    except Exception as error:
        raise _explained(error, purpose, f"sch_{kind}") from error


def _explained(error: Exception, purpose: str, module: str) -> TestbedError:
    code = getattr(error, "code", None)
    if code in _LACKING:
        return TestbedError(
            f"this kernel cannot {purpose}: it lacks the module {module}. "
            "Use a kernel that has it, or plain local processes: --cluster local:N."
        )
    return TestbedError(f"the kernel refused to {purpose} ({module}): {error}")


def _prepare_network() -> None:
    """Set what all nodes have in common, in this process's network namespace, whatever the machine has.

    No IPv6: it would announce itself, and so be counted. And the congestion control that Linux has by
    default. With BBR, which some machines have, each connection sends next to nothing for 200 ms every ten
    seconds; among many ranks there is one at that in nearly every step, and all wait for it.
    """
    setting = Path("/proc/sys/net/ipv6/conf/all/disable_ipv6")
    if setting.exists():
        setting.write_text("1")
    for control in _CONGESTION_CONTROLS:
        with suppress(OSError):  # without privileges only some are permitted
            Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(control)
            break
