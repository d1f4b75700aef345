"""The model's buffers where a server steps: no gradient moves them.

Each worker's forward passes change them (BatchNorm's statistics), and a server keeps their mean. At `sync`
and when a session closes, all workers push the change of their buffers since the last time. The server adds 1
/ P of each, and the workers take the result.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from tacit.contracts import PayloadSpec, Posted, PushPull
from tacit.session.buckets import group_names
from tacit.stores.client.transport import ServerGroup


def homes_of(names: Sequence[str], servers: int) -> dict[str, int]:
    """Which server has which buffer: each in turn, as they are small and may be fewer than servers."""
    return {name: i % servers for i, name in enumerate(names)}


class ServerBuffers:
    """The floating-point buffers of a model, and their values at the servers.

    Args:
        module: has the buffers, which are looked up each time, as a module may replace one.
        names: the names of those that are averaged.
        servers: the connections to the servers.
        homes: buffer -> the number of its server.
        cap: the most bytes of a message.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        servers: ServerGroup,
        homes: Mapping[str, int],
        cap: int,
    ) -> None:
        self._module, self._servers = module, servers
        buffers = self._buffers()
        each = dict.fromkeys(homes[name] for name in names)
        self._buckets = [
            bucket
            for home in each
            for bucket in group_names([name for name in names if homes[name] == home], buffers, cap)
        ]
        self._have = [self._flat(bucket) for bucket in self._buckets]

    def enter(self) -> None:
        """Overwrite the buffers by those that the servers have."""
        for bucket, have in zip(self._buckets, self._have, strict=True):
            have.copy_(self._servers.server_of(bucket[0]).enter(have, f"{bucket[0]}/0", _whole(have)))
            self._write(bucket, have)

    def average(self) -> None:
        """Overwrite the buffers by the mean of all workers'. A collective call.

        Raises:
            RoundError: a server is gone.
        """
        asked: list[Posted] = []
        for bucket, have in zip(self._buckets, self._have, strict=True):
            now = self._flat(bucket)
            # What has not moved may be infinite, as a mask is: of that the difference would be no number.
            moved = torch.where(now == have, torch.zeros_like(now), now - have)
            ask = PushPull(((moved,),), (_whole(have),), (_whole(have),))
            asked.append(self._servers.server_of(bucket[0]).post(ask, f"{bucket[0]}/0"))
        for each in asked:
            _answer(each)
        for bucket, have in zip(self._buckets, self._have, strict=True):
            meet = PushPull((), (), (_whole(have),), do="meet")
            ((whole,),) = _answer(self._servers.server_of(bucket[0]).post(meet, f"{bucket[0]}/0"))
            have.copy_(whole)
            self._write(bucket, have)

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer.detach() for name, buffer in self._module.named_buffers()}

    def _flat(self, bucket: Sequence[str]) -> Tensor:
        buffers = self._buffers()
        return torch.cat([buffers[name].reshape(-1).cpu() for name in bucket])

    def _write(self, bucket: Sequence[str], flat: Tensor) -> None:
        buffers, at = self._buffers(), 0
        for name in bucket:
            buffer = buffers[name]
            buffer.copy_(flat[at : at + buffer.numel()].view_as(buffer))
            at += buffer.numel()


def _whole(x: Tensor) -> PayloadSpec:
    return PayloadSpec(None, x.numel(), x.dtype)


def _answer(posted: Posted) -> tuple[tuple[Tensor, ...], ...]:
    """Wait for the answer, and return it."""
    done = threading.Event()
    posted.on_done(done.set)
    done.wait()
    found: tuple[tuple[Tensor, ...], ...] = posted.answer()
    return found
