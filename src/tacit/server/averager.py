"""The service of synchronous training: it averages what all workers push."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tacit.contracts import (
    Message,
    Payload,
    PayloadSpec,
    ReduceEncoded,
    Reply,
    Sender,
    Service,
    State,
    state_dtype,
)
from tacit.errors import PayloadError, PeerLost, TacitError
from tacit.exchange.error_feedback import encoded
from tacit.server.desks import Desk, Desks, Enter, Gone, Meet, Push, Saved, Work, changed, check, leaves


@dataclass(frozen=True)
class Round:
    """The round under way.

    Attributes:
        desks: the workers.
        pushed: who has pushed, and what.
        number: of this round.
        owed: of each piece of the answer what the last ones have not said, in two buffers that change places.
        memory: of each piece of the answer that is more than a mean, what it is made from.
    """

    desks: Desks
    pushed: Mapping[int, tuple[Sender, int, Push]] = field(default_factory=dict)
    number: int = 0
    new_residual: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    memory: Mapping[int, State] = field(default_factory=dict)


@dataclass(frozen=True)
class Averager(Service[Round]):
    """Answers a round when all have pushed: all with the same bits, in whatever order they came.

    With error feedback in the answer, what it does not say is owed to the next one.

    Attributes:
        workers: how many there are.
        name: of the bucket; part of the seed of what is drawn.
    """

    workers: int
    name: str = ""
    work: Work = field(default_factory=Work, compare=False, repr=False)

    def start(self) -> Round:
        """All workers are expected."""
        return Round((Desk(),) * self.workers)

    def on(self, sender: Sender, message: Message, state: Round) -> tuple[Sequence[Reply], Round]:
        """Take a push, or learn that a worker is there or gone."""
        match message.content:
            case Enter():
                desk = replace(
                    state.desks[sender.worker], incarnation=sender.incarnation, present=True, why=""
                )
                state = replace(state, desks=changed(state.desks, sender.worker, desk))
                return [Reply(sender, message.sequence, facts={"clock": desk.clock})], state
            case Push() as push:
                return self._push(sender, message, push, state)
            case Meet():
                return [Reply(sender, message.sequence)], state
            case Gone(why):
                return self._gone(sender, why, state)
        raise AssertionError(f"an averager was sent {message.content}")

    def _push(
        self, sender: Sender, message: Message, push: Push, state: Round
    ) -> tuple[Sequence[Reply], Round]:
        desk = state.desks[sender.worker]
        try:
            desk.check(sender, message)
            check(push, self.work)
            self._check_others(sender, push, state)
        except TacitError as error:
            return [Reply(sender, message.sequence, refused=error)], state
        state = replace(
            state,
            desks=changed(state.desks, sender.worker, replace(desk, clock=message.sequence)),
            pushed={**state.pushed, sender.worker: (sender, message.sequence, push)},
        )
        return self._answered(state) if len(state.pushed) == self.workers else ((), state)

    def _check_others(self, sender: Sender, push: Push, state: Round) -> None:
        lost = [desk.why for desk in state.desks if not desk.present]
        if lost:
            raise PeerLost(lost[0])
        for worker, (_, _, theirs) in state.pushed.items():
            if (theirs.pieces, theirs.pulls) != (push.pieces, push.pulls):
                raise PayloadError(
                    f"worker {sender.worker} pushes {_words(push)} of {self.name}, and worker {worker} "
                    f"{_words(theirs)}: give all workers the same strategy and the same model"
                )

    def _answered(self, state: Round) -> tuple[Sequence[Reply], Round]:
        to = [state.pushed[worker] for worker in sorted(state.pushed)]
        state = replace(state, pushed={}, number=state.number + 1)
        try:
            payloads, state = self._mean([push for _, _, push in to], state)
        except Exception as error:  # of a mean nobody knows whose part of it cannot be read
            if not isinstance(error, TacitError):
                error = PayloadError(f"the mean of {self.name}: {type(error).__name__}: {error}")
            return [Reply(sender, sequence, refused=error) for sender, sequence, _ in to], state
        replies = [Reply(sender, sequence, payloads) for sender, sequence, _ in to]
        return replies, state

    def _mean(self, pushes: Sequence[Push], state: Round) -> tuple[tuple[Payload, ...], Round]:
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
            told = pull.codec.answer(mean, memory.get(i), ctx)
            if told is not None:
                payload, memory[i] = told
                payloads.append(payload)
            elif pull.has_feedback:
                before, after = new_residual.get(i) or _nothing(mean)
                if before.shape != mean.shape:
                    raise PayloadError(
                        f"the bucket of {self.name} has {len(mean)} entries, and the --checkpoint "
                        f"{len(before)}: give DDP the bucket_cap_mb that it had, or another --checkpoint"
                    )
                payloads.append(encoded(ReduceEncoded(pull.codec, mean, ctx, before, after)))
                new_residual[i] = after, before
            else:
                payloads.append(encoded(ReduceEncoded(pull.codec, mean, ctx)))
        return tuple(payloads), replace(state, new_residual=new_residual, memory=memory)

    def _gone(self, sender: Sender, why: str, state: Round) -> tuple[Sequence[Reply], Round]:
        """Nobody can go on: all that wait are told who is gone."""
        desks = leaves(state.desks, sender, why)
        if desks is None:
            return (), state
        replies = [
            Reply(other, sequence, refused=PeerLost(why))
            for other, sequence, _ in state.pushed.values()
            if other != sender
        ]
        return replies, replace(state, desks=desks, pushed={})

    # ---- for the host ---------------------------------------------------------------------------------

    def missing(self, state: Round) -> set[int]:
        """For whom the others wait."""
        return set(range(self.workers)) - state.pushed.keys() if state.pushed else set()

    def save(self, state: Round) -> Saved:
        """What a restarted server needs: whole rounds only."""
        new_residual = {i: new_residual.clone() for i, (new_residual, _) in state.new_residual.items()}
        memory = {i: {name: x.clone() for name, x in each.items()} for i, each in state.memory.items()}
        return {"number": state.number, "owed": new_residual, "memory": memory}

    def load(self, saved: Mapping[str, Any]) -> Round:
        """Go on behind the last whole round."""
        wide = {i: each.to(state_dtype(each.dtype)) for i, each in saved["owed"].items()}
        new_residual = {i: (each, torch.empty_like(each)) for i, each in wide.items()}
        desks = (Desk(clock=saved["number"]),) * self.workers
        return Round(desks, number=saved["number"], new_residual=new_residual, memory=saved.get("memory", {}))

    def facts(self, state: Round) -> Mapping[str, Any]:
        """What it can tell of the rounds."""
        return {"stale": {0: self.workers * state.number}, "late": 0}


def _mean_(mean: Tensor, piece: PayloadSpec, payloads: Sequence[Payload]) -> None:
    if piece.codec is not None:
        piece.codec.decode_mean_(payloads, mean)
        return
    torch.div(payloads[0][0].view(-1), len(payloads), out=mean)  # before the sum, which might overflow
    for (each,) in payloads[1:]:
        mean.add_(each.view(-1), alpha=1 / len(payloads))


def _nothing(mean: Tensor) -> tuple[Tensor, Tensor]:
    kind = state_dtype(mean.dtype)
    return torch.zeros_like(mean, dtype=kind), torch.empty_like(mean, dtype=kind)


def _words(push: Push) -> str:
    return ", ".join(f"{piece.numel} entries by {piece.codec or 'themselves'}" for piece in push.pieces)
