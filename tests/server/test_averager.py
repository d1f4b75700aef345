"""The service of synchronous training: the mean, whatever the order, and named failures."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from services import BACK, PIECE, N, World, push
from torch import Tensor

from tacit.compressors import BF16, Sign, TopK
from tacit.contracts import Context, Message, Piece, Sender
from tacit.errors import PayloadError, PeerLost
from tacit.server.averager import Averager
from tacit.server.desks import Push, Work

P = 3


def world(**options: object) -> World:
    made = World(Averager(P, "lot"), P)
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


def sparse(x: Tensor, codec: TopK, pull: Piece) -> Push:
    context = Context(out=x.clone(), work=Work(), peers=P)
    return Push((codec.encode(x, context),), (Piece(codec, len(x), x.dtype),), (pull,))


def test_the_union_of_what_was_pushed_comes_back_in_full() -> None:
    n, codec = 400, TopK(ratio=0.01)
    union = codec.of_sums(n, P)
    assert union == TopK(ratio=P * 4 / n)
    made, mean = world(), torch.zeros(n)
    service, state, replies = made.service, made.state, []
    for i in range(P):
        x = torch.randn(n, generator=torch.Generator().manual_seed(i))
        each = sparse(x, codec, Piece(union, n, torch.float32))
        codec.decode_add_(each.payloads[0], mean, 1 / P)
        replies, state = service.on(Sender(i, 1), Message(1, each), state)
    assert len(replies) == P
    out = torch.empty(n)
    union.decode_(replies[0].payloads[0], out)
    assert torch.allclose(out, mean, atol=1e-7)


@pytest.mark.parametrize("codec", [Sign(), TopK(ratio=0.2), BF16()], ids=str)
def test_what_an_answer_does_not_say_is_in_the_next(codec) -> None:
    """The sum of all answers and what is still owed is the sum of all means."""
    made = world()
    said, meant = torch.zeros(N), torch.zeros(N)
    pull = Piece(codec, N, torch.float32, owes=True)
    for step, i in itertools.product(range(7), range(P)):
        x = gradients(step)[i]
        meant += x / P
        replies, made.state = made.service.on(
            Sender(i, 1), Message(step + 1, Push(((x,),), (PIECE,), (pull,))), made.state
        )
        if replies:
            codec.decode_add_(replies[0].payloads[0], said, 1.0)
    owed, _ = made.state.owed[0]
    assert torch.allclose(said + owed, meant, atol=1e-5)


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
    other = Push(((torch.ones(N),),), (Piece(None, N, torch.float32),), (BACK,))
    (reply,), after = made.service.on(made.workers[1].sender, Message(1, other), made.state)
    assert isinstance(reply.refused, PayloadError)
    assert "give all workers the same strategy" in str(reply.refused)
    assert after is made.state


def test_a_push_twice_is_counted_once() -> None:
    made = world()
    made.push(0, torch.ones(N))
    (reply,), after = made.service.on(made.workers[0].sender, Message(1, push(torch.ones(N))), made.state)
    assert "each is taken once" in str(reply.refused)
    assert after is made.state


def test_a_restarted_server_owes_what_it_owed() -> None:
    made = world()
    pull = Piece(Sign(), N, torch.float32, owes=True)
    for i in range(P):
        each = Push(((gradients(0)[i],),), (PIECE,), (pull,))
        _, made.state = made.service.on(Sender(i, 1), Message(1, each), made.state)
    again = made.service.load(made.service.save(made.state))
    assert torch.equal(again.owed[0][0], made.state.owed[0][0])
    assert {desk.clock for desk in again.desks} == {1}
