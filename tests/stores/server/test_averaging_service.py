"""The service of synchronous training: the mean, whatever the order, and named failures."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled_service import BACK, PIECE, N, World, push
from torch import Tensor

from tacit.compressors import BF16, Dense, Sign, TopK
from tacit.contracts import Context, Payload, PayloadSpec
from tacit.errors import PayloadError, PeerLost
from tacit.stores.messages import Message
from tacit.stores.protocol import FrameKind
from tacit.stores.server.averaging_service import AveragingService
from tacit.stores.server.payloads import BufferWorkspace
from tacit.stores.service import Sender

P = 3


def pushed(
    payloads: tuple[Payload, ...],
    pieces: tuple[PayloadSpec, ...],
    pulls: tuple[PayloadSpec, ...],
    sequence: int = 1,
) -> Message:
    return Message(FrameKind.PUSH, sequence, payloads, pieces, pulls)


def world(**options: object) -> World:
    made = World(AveragingService(P, "bucket"), P)
    for i in range(P):
        made.enter(i)
    return made


def gradients(step: int) -> list[Tensor]:
    return [torch.sin(torch.arange(N) * (1.0 + i) + step) for i in range(P)]


@settings(deadline=None)
@given(orders=st.lists(st.permutations(range(P)), min_size=1, max_size=5))
def test_all_get_the_mean_with_the_same_bits_whatever_the_order(orders: list[list[int]]) -> None:
    made = world()
    for step, order in enumerate(orders):
        given_ = gradients(step)
        for i in order[:-1]:
            made.push(i, given_[i])
            assert made.workers[i].busy, "answered before all had pushed"
        made.push(order[-1], given_[order[-1]])
        mean = given_[0] / P
        for each in given_[1:]:
            mean.add_(each, alpha=1 / P)
        for worker in made.workers:
            assert torch.equal(worker.has, made.workers[0].has)
            assert torch.allclose(worker.has, mean, atol=1e-7)


def sparse(x: Tensor, codec: TopK, pull: PayloadSpec) -> Message:
    context = Context(out=x.clone(), work=BufferWorkspace(), peers=P)
    return pushed((codec.encode(x, context),), (PayloadSpec(codec, len(x), x.dtype),), (pull,))


def test_the_union_of_what_was_pushed_comes_back_in_full() -> None:
    n, codec = 400, TopK(ratio=0.01)
    union = codec.of_sums(n, P)
    assert union == TopK(ratio=P * 4 / n)
    made, mean = world(), torch.zeros(n)
    service, state, replies = made.service, made.state, []
    for i in range(P):
        x = torch.randn(n, generator=torch.Generator().manual_seed(i))
        each = sparse(x, codec, PayloadSpec(union, n, torch.float32))
        codec.decode_add_(each.payloads[0], mean, 1 / P)
        replies, state = service.on(Sender(i, 1), each, state)
    assert len(replies) == P
    out = torch.empty(n)
    union.decode_(replies[0].payloads[0], out)
    assert torch.allclose(out, mean, atol=1e-7)


@pytest.mark.parametrize("codec", [Sign(), TopK(ratio=0.2), BF16()], ids=str)
def test_what_an_answer_does_not_say_is_in_the_next(codec) -> None:
    """The sum of all answers and what is still owed is the sum of all means."""
    made = world()
    said, meant = torch.zeros(N), torch.zeros(N)
    pull = PayloadSpec(codec, N, torch.float32, has_feedback=True)
    for step, i in itertools.product(range(7), range(P)):
        x = gradients(step)[i]
        meant += x / P
        replies, made.state = made.service.on(
            Sender(i, 1), pushed(((x,),), (PIECE,), (pull,), step + 1), made.state
        )
        if replies:
            codec.decode_add_(replies[0].payloads[0], said, 1.0)
    new_residual, _ = made.state.new_residual[0]
    assert torch.allclose(said + new_residual, meant, atol=1e-5)


def test_when_a_worker_is_gone_all_that_wait_are_told() -> None:
    made = world()
    made.push(0, torch.ones(N))
    made.kill(2)
    (error,) = made.workers[0].refused
    assert isinstance(error, PeerLost)
    assert str(error) == "rank 2 is gone"
    made.push(1, torch.ones(N))
    assert [str(each) for each in made.workers[1].refused] == ["rank 2 is gone"]


def test_two_strategies_in_one_round_are_refused() -> None:
    made = world()
    made.push(0, torch.ones(N))
    other = pushed(((torch.ones(N),),), (PayloadSpec(None, N, torch.float32),), (BACK,))
    (reply,), after = made.service.on(made.workers[1].sender, other, made.state)
    assert isinstance(reply.refused, PayloadError)
    assert "give all workers the same strategy" in str(reply.refused)
    assert after is made.state


def test_a_push_twice_is_counted_once() -> None:
    made = world()
    made.push(0, torch.ones(N))
    (reply,), after = made.service.on(made.workers[0].sender, push(torch.ones(N)), made.state)
    assert "each is taken once" in str(reply.refused)
    assert after is made.state


def test_a_restarted_server_owes_what_it_owed() -> None:
    made = world()
    pull = PayloadSpec(Sign(), N, torch.float32, has_feedback=True)
    for i in range(P):
        each = pushed(((gradients(0)[i],),), (PIECE,), (pull,))
        _, made.state = made.service.on(Sender(i, 1), each, made.state)
    again = made.service.load(made.service.save(made.state))
    assert torch.equal(again.new_residual[0][0], made.state.new_residual[0][0])
    assert {record.clock for record in again.records} == {1}


def test_what_is_owed_of_means_in_bf16_adds_up() -> None:
    """A mean of 1 that is never said: in bf16, 256 and 1 are 256."""
    made, rounds = world(), 300
    pull, piece = (
        PayloadSpec(TopK(ratio=0.1), N, torch.bfloat16, has_feedback=True),
        PayloadSpec(Dense(), N, torch.bfloat16),
    )
    x = torch.tensor([3000.0, *[0.0] * (N - 2), 3.0], dtype=torch.bfloat16)
    for step, i in itertools.product(range(1, rounds + 1), range(P)):
        each = pushed(((x if i == 0 else torch.zeros_like(x),),), (piece,), (pull,), step)
        replies, made.state = made.service.on(Sender(i, 1), each, made.state)
        assert not any(reply.refused for reply in replies)
    new_residual, _ = made.state.new_residual[0]
    assert float(new_residual[-1]) == pytest.approx(rounds, rel=1e-3)  # a third of 3 is not quite 1
    saved = made.service.save(made.state)
    assert torch.equal(made.service.load(saved).new_residual[0][0], new_residual)
    old = made.service.load({**saved, "residuals": {0: new_residual.bfloat16()}})
    assert [each.dtype for each in old.new_residual[0]] == [torch.float32, torch.float32]


@dataclass(frozen=True)
class Faulty(Dense):
    """Whose means come to nothing."""

    def decode_mean_(self, payloads: Sequence[Payload], out: Tensor) -> None:
        raise ZeroDivisionError("a fault of its own")


def test_a_mean_that_fails_is_refused_for_all_and_nobody_is_to_blame() -> None:
    made, piece = world(), PayloadSpec(Faulty(), N, torch.float32)
    for i in range(P):
        each = pushed(((torch.ones(N),),), (piece,), (BACK,))
        replies, made.state = made.service.on(Sender(i, 1), each, made.state)
    assert [reply.to.worker for reply in replies] == [*range(P)]
    for reply in replies:
        assert isinstance(reply.refused, PayloadError)
        assert str(reply.refused) == "the mean of bucket: ZeroDivisionError: a fault of its own"
    assert all(record.present for record in made.state.records)
    for i in range(P):
        replies, made.state = made.service.on(Sender(i, 1), push(torch.ones(N), sequence=2), made.state)
    assert all(torch.equal(reply.payloads[0][0], torch.ones(N)) for reply in replies)
