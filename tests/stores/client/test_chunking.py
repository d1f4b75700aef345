"""A long push in chunking: what comes back is what comes back of a whole one, bit by bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from worker_threads import each, join

from tacit.compressors import BF16, Dense, Sign
from tacit.contracts import OneShot, Payload, PayloadSpec, PushPull
from tacit.errors import PeerLost
from tacit.stores.client import chunking
from tacit.stores.client.server_connection import ServerClient
from tacit.stores.server.process import ServerProcess

LONG = 1_500_001
MODEL = tuple((name, (LONG,), "float32", None) for name in "ab")


def asked(x: Tensor, codec: OneShot, back: OneShot | None = None) -> PushPull:
    """A push of a long tensor between two short ones."""
    piece, word = PayloadSpec(codec, x.numel(), x.dtype), PayloadSpec(None, 3, torch.float32)
    payload = (x.to(torch.bfloat16),) if codec == BF16() else (x,)
    short = (torch.ones(3) * x[0],)
    pull = PayloadSpec(back, x.numel(), x.dtype)
    return PushPull((short, payload, short), (word, piece, word), (word, pull, word))


@pytest.mark.parametrize("n", [524_288, LONG, 40_000_000])
def test_stretches_cover_a_piece_once(n: int) -> None:
    piece = PayloadSpec(Dense(), n, torch.float32)
    spans = chunking.spans(piece)
    assert spans[0][0] == 0
    assert spans[-1][1] == n
    assert all(a < b for a, b in spans)
    assert all(left[1] == right[0] for left, right in pairwise(spans))
    assert 2 <= len(spans) <= 16


@pytest.mark.parametrize(
    ("n", "codec", "back"), [(500_000, Dense(), None), (LONG, Sign(), None), (LONG, Dense(), Sign())], ids=str
)
def test_what_is_short_or_compressed_is_not_cut(n: int, codec: OneShot, back: OneShot | None) -> None:
    assert chunking.long_piece(asked(torch.zeros(n), codec, back)) is None


@pytest.mark.parametrize(("codec", "back"), [(Dense(), None), (BF16(), None), (Dense(), BF16())], ids=str)
def test_it_comes_back_as_if_it_were_whole(
    serve: Callable[..., ServerProcess], codec: OneShot, back: OneShot | None
) -> None:
    host, steps = serve(2), 3

    def work(worker: int, post: str, key: str, server: ServerClient) -> list[tuple[Payload, ...]]:
        found = []
        for step in range(steps):
            x = torch.sin(torch.arange(LONG) * (0.001 + worker) + step)
            posted = getattr(server, post)(asked(x, codec, back), key)
            done: list[int] = []
            called = threading.Event()
            posted.on_done(lambda done=done, called=called: (done.append(1), called.set()))
            assert called.wait(60)
            assert done == [1]
            found.append(tuple(tuple(part.clone() for part in payload) for payload in posted.answer()))
        return found

    servers = each(lambda: join(host, 0, model=MODEL), lambda: join(host, 1, model=MODEL))
    long = each(*[lambda i=i, s=s: work(i, "post_long", "a/0", s) for i, s in enumerate(servers)])
    whole = each(*[lambda i=i, s=s: work(i, "post", "b/0", s) for i, s in enumerate(servers)])
    for mine, theirs in zip(long[0], whole[0], strict=True):
        assert [len(payload) for payload in mine] == [1, 1, 1]
        for part, other in zip(mine, theirs, strict=True):
            assert torch.equal(part[0], other[0])
    assert host.counters.pushes == 2 * steps * (
        len(chunking.spans(PayloadSpec(Dense(), LONG, torch.float32))) + 2
    )


def test_a_peer_that_is_gone_is_named_once(serve: Callable[..., ServerProcess]) -> None:
    host = serve(2, timeout=1.5)
    servers = [join(host, i, model=MODEL) for i in range(2)]
    posted = servers[0].post_long(asked(torch.ones(LONG), Dense()), "a/0")
    called = threading.Event()
    posted.on_done(called.set)
    assert called.wait(60)
    with pytest.raises(PeerLost, match="rank 1 was silent"):
        posted.answer()
