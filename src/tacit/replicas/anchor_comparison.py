"""Ranks compare the bits of their anchors, from which all deltas are counted."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.contracts import Request
from tacit.errors import RoundError, of_ranks
from tacit.exchange.joined_requests import gather
from tacit.replicas.outside_writes import lost_at_servers
from tacit.replicas.replica import Replica
from tacit.session import Session

EVERY = 64
"""The number of rounds from one comparison to the next."""
_CHUNK = 1 << 16
"""The number of entries that are added up at once."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class AnchorComparison:
    """Compares the anchors of all ranks in the first round, and in every 64th if replicas move to the anchor.

    Each rank sends a checksum of 8 bytes over all bits of its anchors; only if these differ, one for each
    parameter. With servers that keep the parameters each worker has another anchor, and nothing is compared.

    Args:
        session: its ranks compare.
        anchors: the anchors of its buckets, in fp32 or fp64; read when a comparison is due.

    Attributes:
        due_at: the number of the round before which the next comparison is, from 0; None: there is none.
    """

    def __init__(self, session: Session, anchors: Sequence[Tensor]) -> None:
        strategy = session.strategy
        self._session, self._anchors = session, anchors
        self._again = strategy.merge.ends_at_anchor
        self.due_at: int | None = None if strategy.independent else 0

    def before_round(self) -> None:
        """Compare, before round `due_at` is sent; on all ranks.

        Raises:
            RoundError: anchors differ; all ranks raise it, and it names parameters and ranks. Nothing has
                been sent.
        """
        assert self.due_at is not None
        self.due_at = self.due_at + EVERY if self._again else None
        sums = Checksums(self._parameters())
        self._session.ask(partial(self._talk, self._session.step, sums), "anchors")

    def of_replicas(self, replica: Replica, written: bool = False) -> tuple[bool, bool]:
        """Whether any replica was `written` from outside, and whether all have the same bits.

        A collective call, but none if servers or stores keep the parameters.

        Raises:
            AttachError: this replica was written, and a server or store keeps its parameters.
        """
        session = self._session
        if session.strategy.independent:
            if written:
                raise lost_at_servers(session.strategy.name)
            return False, True
        bits = Checksums((str(i), replica.params(i)) for i, _ in enumerate(session.buckets)).whole()
        mine = torch.cat((torch.tensor([int(written)]), bits))
        every = torch.stack(session.ask(partial(gather, mine, session.strategy.topology.scope), "replicas"))
        return bool(every[:, 0].any()), bool((every[:, 1:] == bits).all())

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        for bucket, anchor in zip(self._session.buckets, self._anchors, strict=True):
            for param in bucket.slices:
                yield param.name, anchor[param.start : param.stop]

    def _talk(self, step: int, sums: Checksums) -> Generator[Request, Any, None]:
        context = self._session.context
        if alike((yield from gather(sums.whole(), context.topology.scope))):
            return
        apart = sums.differing((yield from gather(sums.each(), context.topology.scope)))
        step = self._session.nonfinite.global_step(step)
        raise RoundError(
            f"in step {step} the common point of {apart.named} has other bits on "
            f"{apart.on(context.global_ranks)}, and no rank has sent "
            "anything of this step: load checkpoints of one moment on all ranks, and give all of them the "
            "same versions of tacit and torch"
        )


class DifferingTensors(NamedTuple):
    """The tensors of which some peers have other bits than the first peer.

    Attributes:
        names: the names of these tensors, at least one.
        places: the indices of these peers.
    """

    names: Sequence[str]
    places: Sequence[int]

    @property
    def named(self) -> str:
        """The tensors' names for a sentence."""
        more = len(self.names) - 1
        return f"{self.names[0]} and {more} other parameters" if more else self.names[0]

    def on(self, ranks: Sequence[int]) -> str:
        """The peers for a sentence, by their `ranks`: "rank 1 than on rank 0"."""
        return f"{of_ranks(ranks[place] for place in self.places)} than on rank {ranks[0]}"


class Checksums(dict[str, int]):
    """The checksum of each flat tensor, by its name: it depends on all bits and their order."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        chunks = {name: _weighed(x) for name, x in tensors}
        parts = [sum_ for each in chunks.values() for sum_ in each]
        found = iter(torch.stack(parts).tolist() if parts else ())
        super().__init__(
            (name, zlib.crc32(repr([next(found) for _ in each]).encode())) for name, each in chunks.items()
        )

    def whole(self) -> Tensor:
        """One checksum of all tensors (8 bytes), which ranks compare first."""
        return torch.tensor([zlib.crc32(repr([*self.values()]).encode())])

    def each(self) -> Tensor:
        """The checksums of all tensors, which ranks compare if `whole` differs."""
        return torch.tensor([*self.values()])

    def differing(self, every: Sequence[Tensor]) -> DifferingTensors:
        """The tensors that differ, from `each` of every peer."""
        others = torch.stack([*every]) != every[0]
        names = [name for name, differs in zip(self, others.any(0).tolist(), strict=True) if differs]
        return DifferingTensors(names, others.any(1).nonzero().flatten().tolist())


def alike(every: Sequence[Tensor]) -> bool:
    """Whether all peers have the same numbers."""
    return all(torch.equal(each, every[0]) for each in every)


def _weighed(x: Tensor) -> list[Tensor]:
    """The bits as integers, times odd weights that depend on their positions, summed in chunks, mod 2^64."""
    weights = 2 * torch.arange(min(_CHUNK, len(x)), device=x.device) + 1
    bits = x.view(_BITS[x.element_size()])
    chunks = [bits[at : at + _CHUNK] for at in range(0, len(bits), _CHUNK)]
    return [(chunk * weights[: len(chunk)]).sum() for chunk in chunks]
