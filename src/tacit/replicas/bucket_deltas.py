"""This rank's delta of each bucket in a round, and how the answer is applied to anchor and parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from tacit.contracts import NODE, Application, State, Transmitted
from tacit.exchange.joined_requests import average_
from tacit.kernels import deltas
from tacit.merges import LocalResidual
from tacit.replicas import narrow_anchors
from tacit.replicas.narrow_anchors import is_narrow
from tacit.replicas.replica import Replica, Run, largest_of_types, wide, wide_like
from tacit.session import Session
from tacit.topologies import Flat, TwoPhase

MINE = "local_delta"
"""The field of this rank's delta in a round under way: all of it, or the part that was not sent."""
GIVEN = "given_delta"
"""The field of this rank's whole delta at the start of a late round, if `MINE` is the part not sent."""
ASIDE = "unsent"
"""The field of what a replica at the anchor has not sent, until it is added again; zeros otherwise."""


class BucketDeltas:
    """Lets the merge apply answers, to the parameters in place if that is possible.

    Args:
        session: its strategy has the merge.
        replica: the parameters.
        anchors: the anchor of each bucket, in the wide type, or in bf16.
        flats: the tensor of each bucket that is exchanged; its mean, once that is there.
        variances: names of buffers that are never below 0, and may be so at a server.

    What a replica keeps and has not sent is computed twice where that is possible: parameters less anchor
    when a round starts, which the mean then overwrites, and again when the mean is applied.

    Attributes:
        states: the merge's state of each bucket.
        mine: this rank's delta of each bucket, for merges that need it (`Merge.needs_local_delta`).
        unsent: the tensors from which the exchange subtracts what was sent; None if the merge does not need
            them.
        outgoing: the tensors that are exchanged: this rank's deltas themselves, if these must not be
            overwritten by the mean.
        is_aside: whether something may be set aside; True at first, as a checkpoint may bring it.
    """

    def __init__(
        self,
        session: Session,
        replica: Replica,
        anchors: Sequence[Tensor],
        flats: Sequence[Tensor],
        variances: Collection[str],
    ) -> None:
        merge, late = session.strategy.merge, session.strategy.late
        self._session, self._replica, self._anchors, self._flats = session, replica, anchors, flats
        self._merge, self._variances = merge, variances
        self._narrow = [*map(is_narrow, anchors)]
        deltas.prepare()
        keeps = merge.needs_local_delta in (("always", "late") if late else ("always",))
        kinds = [wide(flat.dtype) for flat in flats]
        self._again = [
            _computes_again(session) and bucket.compressor.sent_lasts and flat.dtype == kind
            for bucket, flat, kind in zip(session.buckets, flats, kinds, strict=True)
        ]
        self.mine = [
            torch.zeros_like(flat, dtype=kind) if keeps and not again else None
            for flat, kind, again in zip(flats, kinds, self._again, strict=True)
        ]
        self.unsent = [
            None if again or not merge.keeps_unsent
            else mine if flat.dtype == kind else torch.zeros_like(flat)
            for again, flat, mine, kind in zip(self._again, flats, self.mine, kinds, strict=True)
        ]  # fmt: skip
        self.outgoing = [
            unsent if unsent is not None else mine if mine is not None and mine.dtype == flat.dtype else flat
            for unsent, mine, flat in zip(self.unsent, self.mine, flats, strict=True)
        ]
        given = late and merge.keeps_unsent
        self._given = [
            torch.zeros_like(flat, dtype=kind) if given else None
            for flat, kind in zip(flats, kinds, strict=True)
        ]
        self.is_aside = merge.ends_at_anchor
        self._aside = [  # in what is of no use between two rounds
            flat if again else torch.zeros_like(flat, dtype=kind) if late or mine is None else mine
            for again, flat, kind, mine in zip(self._again, flats, kinds, self.mine, strict=True)
            if self.is_aside
        ]
        self.states: list[State] = [merge.init(anchor) for anchor in anchors]
        largest = largest_of_types(session.buckets) if session.schedule.leaves_first else {}
        self._before = {dtype: wide_like(bucket) for dtype, bucket in largest.items()}
        self._reads_at_once = given or merge.reads_params == "always"
        self._reads_late = given or merge.reads_params != "never"

    def fields(self) -> Mapping[str, Sequence[Tensor | None]]:
        """The fields of each bucket in a checkpoint, besides `MINE`."""
        if not self.is_aside:
            self.forget()
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

    # ---- an answer ------------------------------------------------------------------------------------

    def apply(
        self,
        i: int,
        at: Application,
        rates: Mapping[str, float],
        diverged_in_node: bool,
        leaves: bool,
        sent: Transmitted | None,
        step: int,
    ) -> None:
        """Apply the answer about bucket `i`.

        Args:
            step: the one that the round followed.
            sent: what this rank contributed; None: the round was complete before a checkpoint.
            rates: the learning rate of each parameter, for a merge that depends on it.
            diverged_in_node: whether the replicas of a node may differ; they are averaged first.
            leaves: whether the next round sends the delta from before this answer; it is written to what is
                sent.
        """
        anchor, before = self._anchors[i], None
        if self._again[i]:
            assert sent is not None, "answers that come late are not applied so"
            move = narrow_anchors.move_anchor_ if self._narrow[i] else deltas.move_anchor_
            self._replica.apply_kept(i, anchor, self._flats[i], sent.subtract_from_, move)
            return
        if leaves:
            before = self._before[self._session.buckets[i].dtype][: len(anchor)]
            before.copy_(self._replica.params(i))
        reads = (self._reads_late if at.lag else self._reads_at_once) or diverged_in_node or at.peers == 1
        entrywise = self._merge.entrywise and not diverged_in_node
        for run, params in self._replica.overwritten(i, reads, entrywise):
            if diverged_in_node:
                self._average_in_node(i, params)
            if self._narrow[i]:
                self._apply_narrow(i, run, params, at, step)
            else:
                self._apply(i, run, params, at, rates)
        if before is not None:
            deltas.subtract(before, anchor, self.outgoing[i])

    def _average_in_node(self, i: int, params: Tensor) -> None:
        """Overwrite `params` with the mean of the replicas of this node, which differ."""
        anchor = self._anchors[i]
        delta = self._replica.narrowed(i, params.sub_(anchor))
        self._session.ask(partial(average_, delta, NODE), "node", of=delta)
        torch.add(anchor, self._replica.widened(i, delta), out=params)

    def _apply(self, i: int, run: Run, params: Tensor, at: Application, rates: Mapping[str, float]) -> None:
        """Let the merge apply the answer to these parameters; if learning rates matter, rate by rate."""
        anchor, mine = run.of(self._anchors[i], params), self._of_answer(i, run, params)
        mean = self._replica.widened(i, run.of(self._flats[i], params))
        state = self.states[i] and {field: run.of(each, params) for field, each in self.states[i].items()}
        if not self._merge.by_learning_rate:
            self._merge.apply_(params, anchor, mean, mine, state, at)
        else:
            for lr, some in groupby(run.params, lambda param: rates.get(param.name, 0.0)):
                here = run.within([*some])
                self._merge.apply_(
                    params[here],
                    anchor[here],
                    mean[here],
                    None if mine is None else mine[here],
                    {field: each[here] for field, each in state.items()},
                    at._replace(lr=lr),
                )
        for param in run.params if self._variances else ():
            if param.name in self._variances:
                params[run.within([param])].clamp_(min=0.0)

    def _apply_narrow(self, i: int, run: Run, params: Tensor, at: Application, step: int) -> None:
        """`_apply` by an anchor in bf16."""
        state = {field: each[run.here] for field, each in self.states[i].items()}
        mine = self._of_answer(i, run, params)
        mean = self._replica.widened(i, self._flats[i][run.here])
        given = self._anchors[i][run.here], mean, None if mine is None else mine.view(-1), state, at
        salt = self._session.context.training.seed, step, self._session.buckets[i].name, run.here.start
        narrow_anchors.apply_(self._merge, params, *given, salt)

    def _of_answer(self, i: int, run: Run, params: Tensor) -> Tensor | None:
        """The merge's `local_delta` for an answer about these parameters of bucket `i`, now `params`."""
        whole, unsent, given = self.mine[i], self.unsent[i], self._given[i]
        if whole is None:
            return None
        mine = run.of(whole, params)
        if unsent is not None and unsent is not whole:
            mine.add_(self._replica.widened(i, run.of(unsent, params)))
        if given is not None:  # add the steps since
            deltas.add_steps_(mine, params, run.of(self._anchors[i], params), run.of(given, params))
        return mine

    # ---- what is set aside while replicas are equal ----------------------------------------------------

    def put_aside(self) -> None:
        """Move the replica to the anchor, and set aside its difference."""
        for i, (anchor, aside) in enumerate(zip(self._anchors, self._aside, strict=True)):
            torch.sub(self._replica.params(i), anchor, out=aside)
            self._replica.write(i, anchor)
        self.is_aside = True

    def forget(self) -> None:
        """Drop what is set aside, also by a checkpoint."""
        for aside in self._aside:
            aside.zero_()

    def take_up(self) -> None:
        """Add what was set aside to the replica again."""
        for i, aside in enumerate(self._aside if self.is_aside else ()):
            self._replica.write(i, self._replica.params(i).add_(aside))
            aside.zero_()
        self.is_aside = False


def _computes_again(session: Session) -> bool:
    """Whether a replica's new parameters follow from the mean, and from what it sent, all in one tensor."""
    strategy = session.strategy
    plain = type(strategy.merge).apply_ is LocalResidual.apply_ and not strategy.merge.by_learning_rate
    return plain and not strategy.late and type(strategy.topology) in (Flat, TwoPhase)
