"""The service of synchronous training: it averages what all workers push."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from tacit.contracts import OneShot, Payload, PayloadSpec, ReduceEncoded, State, state_dtype
from tacit.errors import PayloadError, PeerLost, TacitError
from tacit.exchange.error_feedback import encoded, withheld_
from tacit.stores.messages import Message
from tacit.stores.protocol import FrameKind
from tacit.stores.server.payloads import BufferWorkspace, check_payloads
from tacit.stores.service import (
    Reply,
    SavedState,
    Sender,
    Service,
    WorkerRecord,
    WorkerRecords,
    with_record,
    without_worker,
)


@dataclass(frozen=True)
class AveragingState:
    """The round under way.

    Attributes:
        records: the workers.
        pushed: for each worker that has pushed, its life and its message.
        number: the number of this round.
        owed: for each piece of the answer, the residual of the answers so far, in two buffers that swap.
        memory: for each piece of the answer that is more than a mean, the state that it is made from.
    """

    records: WorkerRecords
    pushed: Mapping[int, tuple[Sender, Message]] = field(default_factory=dict)
    number: int = 0
    new_residual: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    memory: Mapping[int, State] = field(default_factory=dict)


@dataclass(frozen=True)
class AveragingService(Service[AveragingState]):
    """Answers a round when all workers have pushed: all with the same bits, in any order of arrival.

    With error feedback, what an answer leaves out is added to the next one.

    Attributes:
        workers: the number of workers.
        name: the bucket's name; part of the seed of random numbers.
    """

    workers: int
    name: str = ""
    work: BufferWorkspace = field(default_factory=BufferWorkspace, compare=False, repr=False)

    enters_workers: ClassVar[bool] = False

    def start(self) -> AveragingState:
        return AveragingState((WorkerRecord(),) * self.workers)

    def on(
        self, sender: Sender, message: Message, state: AveragingState
    ) -> tuple[Sequence[Reply], AveragingState]:
        """Take a push, or let a worker enter."""
        match message.kind:
            case FrameKind.ENTER:
                record = state.records[sender.worker].entered(sender.incarnation)
                state = replace(state, records=with_record(state.records, sender.worker, record))
                return [Reply(sender, message.sequence, clock=record.clock)], state
            case FrameKind.PUSH:
                return self._push(sender, message, state)
            case FrameKind.MEET | FrameKind.PULL:
                return [Reply(sender, message.sequence)], state
        raise AssertionError(f"an averaging service was sent {message.kind.name}")

    def _push(
        self, sender: Sender, push: Message, state: AveragingState
    ) -> tuple[Sequence[Reply], AveragingState]:
        record = state.records[sender.worker]
        try:
            record.check(sender, push.sequence)
            check_payloads(push)
            self._check_others(sender, push, state)
        except TacitError as error:
            return [Reply(sender, push.sequence, refused=error)], state
        state = replace(
            state,
            records=with_record(state.records, sender.worker, replace(record, clock=push.sequence)),
            pushed={**state.pushed, sender.worker: (sender, push)},
        )
        return self._answered(state) if len(state.pushed) == self.workers else ((), state)

    def _check_others(self, sender: Sender, push: Message, state: AveragingState) -> None:
        lost = [record.why for record in state.records if not record.present]
        if lost:
            raise PeerLost(lost[0])
        for worker, (_, theirs) in state.pushed.items():
            if (theirs.pieces, theirs.pulls) != (push.pieces, push.pulls):
                raise PayloadError(
                    f"worker {sender.worker} pushes {_described(push)} of {self.name}, and worker {worker} "
                    f"{_described(theirs)}: give all workers the same strategy and the same model"
                )

    def _answered(self, state: AveragingState) -> tuple[Sequence[Reply], AveragingState]:
        to = [state.pushed[worker] for worker in sorted(state.pushed)]
        state = replace(state, pushed={}, number=state.number + 1)
        try:
            payloads, state = self._mean([push for _, push in to], state)
        except Exception as error:  # whose part of the mean cannot be read, nobody knows
            if not isinstance(error, TacitError):
                error = PayloadError(f"the mean of {self.name}: {type(error).__name__}: {error}")
            return [Reply(sender, push.sequence, refused=error) for sender, push in to], state
        replies = [Reply(sender, push.sequence, payloads) for sender, push in to]
        return replies, state

    def _mean(
        self, pushes: Sequence[Message], state: AveragingState
    ) -> tuple[tuple[Payload, ...], AveragingState]:
        payloads: list[Payload] = []
        new_residual, memory = dict(state.new_residual), dict(state.memory)
        for i, (piece, pull) in enumerate(zip(pushes[0].pieces, pushes[0].pulls, strict=True)):
            like = torch.empty(0, dtype=piece.dtype)
            mean = self.work.scratch(f"mean {i}", like, (piece.numel,), piece.dtype)
            _mean_(mean, piece, [push.payloads[i] for push in pushes])
            if pull.codec is None:
                payloads.append((mean,))
                continue
            ctx = self.work.context(mean, f"{self.name}/{i}", state.number).inside(f"pull{i}")
            if pull.codec.answers:
                payload, memory[i] = pull.codec.answer(mean, memory.get(i), ctx)
                payloads.append(payload)
            elif pull.has_feedback:
                before, after = new_residual.get(i) or _zeros(mean)
                if before.shape != mean.shape:
                    raise PayloadError(
                        f"the bucket of {self.name} has {len(mean)} entries, and the --checkpoint "
                        f"{len(before)}: give DDP the bucket_cap_mb that it had, or another --checkpoint"
                    )
                payload = encoded(ReduceEncoded(pull.codec, mean, ctx, before, after))
                if pull.codec.partial:
                    _as_long_(payload, pull.codec, piece, [push.payloads[i] for push in pushes], after)
                payloads.append(payload)
                new_residual[i] = after, before
            else:
                payloads.append(encoded(ReduceEncoded(pull.codec, mean, ctx)))
        return tuple(payloads), replace(state, new_residual=new_residual, memory=memory)

    def leave(
        self, sender: Sender, why: str, state: AveragingState
    ) -> tuple[Sequence[Reply], AveragingState]:
        """End the round: all waiting workers get an error that names the one that is gone."""
        records = without_worker(state.records, sender, why)
        if records is None:
            return (), state
        replies = [
            Reply(other, push.sequence, refused=PeerLost(why))
            for other, push in state.pushed.values()
            if other != sender
        ]
        return replies, replace(state, records=records, pushed={})

    def missing(self, state: AveragingState) -> set[int]:
        """Those that have not pushed, where others have."""
        return set(range(self.workers)) - state.pushed.keys() if state.pushed else set()

    def save(self, state: AveragingState) -> SavedState:
        """Whole rounds only."""
        new_residual = {i: new_residual.clone() for i, (new_residual, _) in state.new_residual.items()}
        memory = {i: {name: x.clone() for name, x in each.items()} for i, each in state.memory.items()}
        return {"number": state.number, "residuals": new_residual, "answers": memory}

    def load(self, saved: SavedState) -> AveragingState:
        """Go on after the last whole round."""
        wide = {i: each.to(state_dtype(each.dtype)) for i, each in saved["residuals"].items()}
        new_residual = {i: (each, torch.empty_like(each)) for i, each in wide.items()}
        records = (WorkerRecord(clock=saved["number"]),) * self.workers
        return AveragingState(
            records, number=saved["number"], new_residual=new_residual, memory=saved.get("answers", {})
        )

    def staleness(self, state: AveragingState) -> tuple[Mapping[int, int], int]:
        """No push is stale, and none comes late."""
        return {0: self.workers * state.number}, 0


def _mean_(mean: Tensor, piece: PayloadSpec, payloads: Sequence[Payload]) -> None:
    if piece.codec is not None:
        piece.codec.decode_mean_(payloads, mean)
        return
    torch.div(payloads[0][0].view(-1), len(payloads), out=mean)  # before the sum, which might overflow
    for (each,) in payloads[1:]:
        mean.add_(each.view(-1), alpha=1 / len(payloads))


def _as_long_(
    payload: Payload, codec: OneShot, piece: PayloadSpec, pushed: Sequence[Payload], new_residual: Tensor
) -> None:
    """Leave as many parts of the answer as the push has that has most; the rest is owed."""
    whole = tuple(map(torch.clone, payload))
    most = max(len(piece.codec.message_parts(each, piece.numel)) if piece.codec else 0 for each in pushed)
    left = codec.message_parts(payload, piece.numel)[:most]
    codec.restore_(torch.cat([payload[-1].new_empty(0), *left]), piece.numel, payload)
    withheld_(codec, whole, payload, new_residual, piece.dtype)


def _zeros(mean: Tensor) -> tuple[Tensor, Tensor]:
    dtype = state_dtype(mean.dtype)
    return torch.zeros_like(mean, dtype=dtype), torch.empty_like(mean, dtype=dtype)


def _described(push: Message) -> str:
    return ", ".join(f"{piece.numel} entries by {piece.codec or 'themselves'}" for piece in push.pieces)
