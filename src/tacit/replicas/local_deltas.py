"""This rank's deltas, for merges that need them (`Merge.needs_local_delta`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tacit.kernels import deltas
from tacit.replicas.replica import Place, Replica, part_for
from tacit.strategy import Strategy

MINE = "local_delta"
"""The field of this rank's delta in a round under way: all of it, or the part that was not sent."""
GIVEN = "given_delta"
"""The field of this rank's whole delta at the start of a late round, if `MINE` is the part not sent."""
ASIDE = "unsent"
"""The field of what a replica at the anchor has not sent, until it is added again."""


class LocalDeltas:
    """This rank's delta of each bucket, and what is set aside while replicas are equal.

    Args:
        strategy: has the merge.
        replica: the parameters.
        anchors: the anchor of each bucket, in the wide type.
        flats: the tensor of each bucket that is exchanged.
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
        """The tensors from which the exchange subtracts what was sent; None if the merge does not need them.
        """
        self.outgoing = [
            unsent if unsent is not None else mine if mine is not None and mine.dtype == flat.dtype else flat
            for unsent, mine, flat in zip(self.unsent, self.mine, flats, strict=True)
        ]
        """The tensors that are exchanged: this rank's deltas themselves, if these must not be overwritten by
        the mean.
        """
        given = late and self._unsent
        self._given = [torch.zeros_like(anchor) if given else None for anchor in anchors]
        self._aside = [torch.zeros_like(anchor) if self.ends_at_anchor else None for anchor in anchors]
        self.is_aside = self.ends_at_anchor
        """Whether something may be set aside; True at first, as a checkpoint may bring it."""

    def fields(self) -> Mapping[str, Sequence[Tensor | None]]:
        """The fields of each bucket in a checkpoint, besides `MINE`."""
        return {GIVEN: self._given, ASIDE: self._aside}

    def leave(self, i: int, read: bool) -> None:
        """Record this rank's delta when a round starts.

        It is rounded to the type of `outgoing`; `read`: whether it is there already.
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
            torch.sub(exact, self._replica.widened(i, out), out=mine)  # what rounding left out is not sent
        else:
            mine.copy_(out)

    def reads_params(self, i: int) -> bool:
        """Whether `of_answer` needs the parameters."""
        return self._given[i] is not None

    def of_answer(self, i: int, places: Sequence[Place], params: Tensor) -> Tensor | None:
        """The merge's `local_delta` for an answer about these parameters of bucket `i`, now `params`."""
        whole, unsent, given = self.mine[i], self.unsent[i], self._given[i]
        if whole is None:
            return None
        mine = part_for(params, places, whole)
        if unsent is not None and unsent is not whole:
            mine.add_(self._replica.widened(i, part_for(params, places, unsent)))
        if given is not None:  # add the steps since
            anchor, before = (part_for(params, places, each) for each in (self._anchors[i], given))
            deltas.add_steps_(mine, params, anchor, before)
        return mine

    def put_aside(self) -> None:
        """Move the replica to the anchor, and set aside its difference."""
        for i, (anchor, aside) in enumerate(zip(self._anchors, self._aside, strict=True)):
            assert aside is not None
            torch.sub(self._replica.params(i), anchor, out=aside)
            self._replica.write(i, anchor)
        self.is_aside = True

    def forget(self) -> None:
        """Drop what is set aside, also by a checkpoint."""
        for aside in self._aside:
            if aside is not None:
                aside.zero_()

    def take_up(self) -> None:
        """Add what was set aside to the replica again."""
        for i, aside in enumerate(self._aside if self.is_aside else ()):
            assert aside is not None
            self._replica.write(i, self._replica.params(i).add_(aside))
            aside.zero_()
        self.is_aside = False
