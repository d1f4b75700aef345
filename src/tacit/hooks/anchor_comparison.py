"""Ranks compare the bits of the anchors: all that replicas exchange counts from there."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tacit.contracts import AnchorMerge, Request
from tacit.errors import RoundError, of_ranks
from tacit.exchange.combinators import gather
from tacit.hooks.outside_writes import lost_at_servers
from tacit.hooks.replica import Replica
from tacit.session import Session

EVERY = 64
"""Rounds from one comparison to the next."""
_CHUNK = 1 << 16
"""Entries that are added up at once."""
_BITS = {4: torch.int32, 8: torch.int64}


class AnchorComparison:
    """Has ranks compare their anchors in the first round; in every 64th, where the result is these.

    Each rank sends one number of 8 bytes, which follows from all bits of its anchors; only where these
    numbers differ, one for each parameter too. Where servers keep the parameters, workers have anchors of
    their own, and nothing is compared.

    Args:
        session: whose ranks compare.
        anchors: of its buckets, in fp32 or fp64; read when a comparison is due.
    """

    def __init__(self, session: Session, anchors: Sequence[Tensor]) -> None:
        strategy = session.strategy
        self._session, self._anchors = session, anchors
        self._compares = not strategy.independent
        self._again = isinstance(strategy.merge, AnchorMerge)
        self._rounds = 0

    def before_round(self) -> None:
        """To be called as a round leaves, on all ranks.

        Raises:
            RoundError: anchors differ, on all ranks; names the parameters and the ranks. Nothing has left.
        """
        due = self._compares and self._rounds % EVERY == 0 and (self._again or self._rounds == 0)
        self._rounds += 1
        if due:
            self._session.ask(partial(self._talk, self._session.step, self._sums()), "anchors")

    def of_replicas(self, replica: Replica, written: bool = False) -> tuple[bool, bool]:
        """Whether any replica was `written` from outside, and whether all have the same bits.

        A collective call; not where servers or stores say what replicas are, where a write is an error.

        Raises:
            AttachError: this one was written, and those do not know of it.
        """
        session = self._session
        if session.strategy.independent:
            if written:
                raise lost_at_servers(session.strategy.name)
            return False, True
        sums = [sum_ for i, _ in enumerate(session.buckets) for sum_ in _weighed(replica.params(i))]
        bits = zlib.crc32(repr(torch.stack(sums).tolist() if sums else []).encode())
        mine = torch.tensor([int(written), bits])
        every = torch.stack(session.ask(partial(gather, mine, session.strategy.topology.scope), "replicas"))
        return bool(every[:, 0].any()), bool((every[:, 1] == bits).all())

    def _sums(self) -> dict[str, int]:
        """Of each parameter, a number that follows from its bits and their places."""
        chunks = {name: _weighed(x) for name, x in self._parameters()}
        parts = [sum_ for each in chunks.values() for sum_ in each]
        found = iter(torch.stack(parts).tolist() if parts else ())
        return {name: zlib.crc32(repr([next(found) for _ in each]).encode()) for name, each in chunks.items()}

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        for bucket, anchor in zip(self._session.buckets, self._anchors, strict=True):
            for param in bucket.slices:
                yield param.name, anchor[param.start : param.stop]

    def _talk(self, step: int, sums: dict[str, int]) -> Generator[Request, Any, None]:
        scope = self._session.strategy.topology.scope
        whole = torch.tensor([zlib.crc32(repr([*sums.values()]).encode())])
        every = torch.stack((yield from gather(whole, scope)))
        if bool((every == every[0]).all()):
            return
        each = torch.stack((yield from gather(torch.tensor([*sums.values()]), scope)))
        apart = (each != each[0]).nonzero().tolist()
        known_as = self._session.context.global_ranks
        ranks = {known_as[place] for place, _ in apart}
        names = [name for i, name in enumerate(sums) if i in {column for _, column in apart}]
        more = f" and {len(names) - 1} other parameters" if len(names) > 1 else ""
        step = self._session.nonfinite.told(step)
        raise RoundError(
            f"in step {step} the common point of {names[0]}{more} has other bits on "
            f"{of_ranks(sorted(ranks))} than on rank {known_as[0]}, and no rank has sent "
            "anything of this step: load checkpoints of one moment on all ranks, and give all of them the "
            "same versions of tacit and torch"
        )


def _weighed(x: Tensor) -> list[Tensor]:
    """The bits as integers, times odd numbers that tell their places, added up in chunks; exact, mod 2^64."""
    weights = 2 * torch.arange(min(_CHUNK, len(x)), device=x.device) + 1
    bits = x.view(_BITS[x.element_size()])
    chunks = [bits[at : at + _CHUNK] for at in range(0, len(bits), _CHUNK)]
    return [(chunk * weights[: len(chunk)]).sum() for chunk in chunks]
