"""What members have besides collectives: a connection to their store, and a long message to one of them."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from tacit.torch_compat import Store, TCPStore

_PIECE = 16 << 20
"""The bytes of one message of several."""


def connected(host: str, port: int, timeout: float) -> Store:
    """A connection to the members' store that nobody else uses.

    Raises:
        RuntimeError: there is none within `timeout` seconds.
    """
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))


def served(host: str, port: int) -> TCPStore:
    """A store that this process serves as long as the object lives; port 0 takes any free one.

    Raises:
        RuntimeError: the port is taken.
    """
    return TCPStore(host, port, is_master=True, wait_for_workers=False)


def send_to(to: int, message: bytes, group: dist.ProcessGroup) -> None:
    """Send bytes to a member, who calls `receive_from`."""
    dist.send(torch.tensor([len(message)]), group=group, group_dst=to)
    whole = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    for piece in torch.split(whole, _PIECE):
        dist.send(piece, group=group, group_dst=to)


def receive_from(source: int, group: dist.ProcessGroup) -> bytes:
    """The bytes that a member sends by `send_to`."""
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, group=group, group_src=source)
    whole = torch.empty(int(size), dtype=torch.uint8)
    for piece in torch.split(whole, _PIECE):
        dist.recv(piece, group=group, group_src=source)
    return whole.numpy().tobytes()
