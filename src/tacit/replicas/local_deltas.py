"""What of the replicas' progress is this rank's own, where a merge asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tacit.kernels import deltas
from tacit.replicas.replica import Place, Replica, beside
from tacit.strategy import Strategy

MINE = "local_delta"
"""This rank's own part of a round that is under way: all of it, or what the peers have not seen."""
GIVEN = "given_delta"
"""All that this rank had where a late round left, if `MINE` is what the peers have not seen."""
ASIDE = "unsent"
"""What a replica that stands at the anchor has not sent, until it takes it up again."""


class LocalDeltas:
    """This rank's own part of each bucket's rounds, and what is put aside where replicas are to agree.

    Args:
        strategy: whose merge asks for it.
        replica: the parameters.
        anchors: of each bucket, in the wide type.
        flats: of each bucket, what is exchanged.
    """

    def __init__(
        self, strategy: Strategy, replica: Replica, anchors: Sequence[Tensor], flats: Sequence[Tensor]
    ) -> None:
        merge, late = strategy.merge, strategy.late
        keeps = merge.needs_local_delta in (("always", "late") if late else ("always",))
        self._unsent = merge.keeps_unsent
        self.ends_at_anchor = merge.ends_at_anchor
        self._replica, self._anchors = replica, anchors
        deltas.prepare()
        self.mine = [torch.zeros_like(anchor) if keeps else None for anchor in anchors]
        self.unsent = [
            None if not self._unsent else mine if flat.dtype == anchor.dtype else torch.zeros_like(flat)
            for flat, mine, anchor in zip(flats, self.mine, anchors, strict=True)
        ]
        """Of which the exchange subtracts what was sent; None where the merge does not ask for it."""
        self.outgoing = [
            unsent if unsent is not None else mine if mine is not None and mine.dtype == flat.dtype else flat
            for unsent, mine, flat in zip(self.unsent, self.mine, flats, strict=True)
        ]
        """What is exchanged. Where this rank's own part is kept, it is that, and no mean overwrites it."""
        given = late and self._unsent
        self._given = [torch.zeros_like(anchor) if given else None for anchor in anchors]
        self._aside = [torch.zeros_like(anchor) if self.ends_at_anchor else None for anchor in anchors]
        self.is_aside = self.ends_at_anchor
        """Whether something may be aside: as it may come with a checkpoint, it may be so at first."""

    def fields(self) -> Mapping[str, Sequence[Tensor | None]]:
        """What a checkpoint keeps of each bucket, beside `MINE`."""
        return {GIVEN: self._given, ASIDE: self._aside}

    def leave(self, i: int, read: bool) -> None:
        """Keep this rank's part of a round that leaves, how far it is from the anchor.

        That is rounded to what is in `outgoing`; `read`: whether it is there already.
        """
        mine, given, out = self.mine[i], self._given[i], self.outgoing[i]
        if read:
            exact = out
            if given is not None:
                given.copy_(out)
        else:
            exact = self._replica.progress(i, self._anchors[i], out, given)
        if mine is None or mine is out:
            return
        if out is self.unsent[i]:
            torch.sub(exact, self._replica.widened(i, out), out=mine)  # rounding keeps it back
        else:
            mine.copy_(out)

    def reads_params(self, i: int) -> bool:
        """Whether `of_answer` needs the parameters."""
        return self._given[i] is not None

    def of_answer(self, i: int, places: Sequence[Place], params: Tensor) -> Tensor | None:
        """What the merge is given with an answer about these parameters of bucket `i`, which are `params`."""
        whole, unsent, given = self.mine[i], self.unsent[i], self._given[i]
        if whole is None:
            return None
        mine = beside(params, places, whole)
        if unsent is not None and unsent is not whole:
            mine.add_(self._replica.widened(i, beside(params, places, unsent)))
        if given is not None:  # the steps since
            anchor, before = (beside(params, places, each) for each in (self._anchors[i], given))
            deltas.add_steps_(mine, params, anchor, before)
        return mine

    def put_aside(self) -> None:
        """Put the replica at the anchor, and keep what it has beside it."""
        for i, (anchor, aside) in enumerate(zip(self._anchors, self._aside, strict=True)):
            assert aside is not None
            torch.sub(self._replica.params(i), anchor, out=aside)
            self._replica.write(i, anchor)
        self.is_aside = True

    def forget(self) -> None:
        """Have nothing aside, whatever a checkpoint says."""
        for aside in self._aside:
            if aside is not None:
                aside.zero_()

    def take_up(self) -> None:
        """Add what was put aside to the replica again."""
        for i, aside in enumerate(self._aside if self.is_aside else ()):
            assert aside is not None
            self._replica.write(i, self._replica.params(i).add_(aside))
            aside.zero_()
        self.is_aside = False
