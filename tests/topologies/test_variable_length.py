"""Payloads whose length follows from their values, between ranks: the same bits arrive, in fewer bytes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from cases import for_each
from tacit.algorithms import parse
from tacit.compressors import (
    BF16,
    QSGD,
    Blockwise,
    ByteCoded,
    EntropyCoded,
    ErrorFeedback,
    Int8,
    ThreeLC,
    TopK,
)
from tacit.contracts import Compressor, Context, Exchange, OneShot, Payload, Read, Request, State, Topology
from tacit.errors import ConfigError, PayloadError
from tacit.exchange.joined_requests import answered
from tacit.kernels.dispatch import emulated_device
from tacit.session import Session
from tacit.strategy import Strategy
from tacit.testing.ranks import FreshBuffers
from tacit.topologies import Auto, Flat, Hierarchical, TwoPhase, variable_length
from tacit.transports.loopback import Loopback, LoopbackTransport
from tacit.transports.message_layout import counted

NAMED = {"a": torch.zeros(100, 70), "b": torch.zeros(70), "c": torch.zeros(41, 50)}
TAKE = [
    (Loopback(2), Flat()),
    (Loopback(3), Flat()),
    (Loopback(2), TwoPhase()),
    (Loopback(4), TwoPhase()),
    (Loopback(7), TwoPhase()),
    (Loopback(4), Auto()),
    (Loopback.of_nodes(3, 2), Hierarchical(far=TwoPhase("net"))),
]


def looked_up(request: Request) -> Generator[Request, Any, Any]:
    """The host looks, where it would wait for a device."""
    return request.numbers.tolist() if isinstance(request, Read) else (yield request)


class Group:
    """Ranks that average the same numbers again and again."""

    def __init__(
        self, net: Loopback, topology: Topology, compressor: Compressor, named: Mapping[str, Tensor] = NAMED
    ) -> None:
        self.net, self.sent = net, 0
        self.transports = [LoopbackTransport(net, rank) for rank in range(net.world)]
        strategy = Strategy(compressor=ErrorFeedback(compressor), topology=topology)
        self.sessions = [Session(strategy, named, transport, [[*named]]) for transport in self.transports]

    def round(self, seed: int, scale: float = 1.0) -> list[Tensor]:
        """What was agreed on."""
        generator = torch.Generator().manual_seed(seed)
        found = []
        for i, bucket in enumerate(self.sessions[0].buckets):
            xs = [
                torch.randn(bucket.numel, generator=generator) * scale ** (rank + 1)
                for rank, _ in enumerate(self.sessions)
            ]
            exchanges = [
                answered(counted(session.open(i, x), transport.place), looked_up)
                for session, transport, x in zip(self.sessions, self.transports, xs, strict=True)
            ]
            for session, (outcome, sent) in zip(self.sessions, self.net.run(exchanges), strict=True):
                session.complete(i, outcome)
                self.sent += sent
            assert all(torch.equal(x, xs[0]) for x in xs)
            found.append(xs[0])
        return found


@for_each(("net", "topology"), TAKE)
@for_each("bits", [2, 3])
@for_each("scale", [1.0, 3.0])
def test_the_same_bits_arrive_in_fewer_bytes(
    net: Loopback, topology: Topology, bits: int, scale: float
) -> None:
    """Also where ranks send messages of other lengths than their peers."""
    plain, coded = (Group(net, topology, each) for each in (Blockwise(bits), EntropyCoded(bits)))
    for seed in range(3):
        for a, b in zip(plain.round(seed, scale), coded.round(seed, scale), strict=True):
            assert torch.equal(a, b)
    assert coded.sent < plain.sent


@for_each(("net", "topology"), TAKE)
@for_each("codec", [Int8(), QSGD(), BF16(), TopK(0.1), TopK(0.1, values=QSGD(3))])
def test_any_codecs_bytes_are_coded_and_the_same_bits_arrive(
    net: Loopback, topology: Topology, codec: OneShot
) -> None:
    named = {"w": torch.zeros(300, 290)}
    # As all-reduces add up in another order, of what is additive the same numbers must be gathered.
    plain = Group(net, topology, Gathered() if codec == BF16() else codec, named)
    coded = Group(net, topology, ByteCoded(codec), named)
    for seed in range(3):
        for a, b in zip(plain.round(seed, 3.0), coded.round(seed, 3.0), strict=True):
            assert torch.equal(a, b)
    assert coded.sent < plain.sent


@for_each("place", [nullcontext, emulated_device])
def test_many_peers_send_a_rank_its_own_lengths_alone(
    place: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    peers, rounds = 7, 2
    few, many = (Group(Loopback(peers), TwoPhase(), EntropyCoded(2)) for _ in range(2))
    means = [few.round(seed, 3.0) for seed in range(rounds)]
    with monkeypatch.context() as patch, place():
        patch.setattr(variable_length, "RIDES_ALONG", 0)
        for seed, mean in enumerate(means):
            assert all(map(torch.equal, many.round(seed, 3.0), mean))
    assert few.sent - many.sent == rounds * peers * (peers - 1) * 4 * (peers - 2)


def test_on_a_device_kernels_find_lengths_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    found, restore = list[bool](), ByteCoded.restore_on_device_

    def watched(codec: ByteCoded, messages: Tensor, lengths: Tensor, numel: int, payloads: Payload) -> None:
        found.append(messages.is_contiguous() and lengths.is_contiguous())
        restore(codec, messages, lengths, numel, payloads)

    monkeypatch.setattr(ByteCoded, "restore_on_device_", watched)
    with emulated_device():
        Group(Loopback(3), TwoPhase(), ByteCoded(Int8()), {"w": torch.zeros(100, 70)}).round(0)
    assert found == [True] * 6


class Gathered(BF16):
    """BF16 that does not add up on the way."""

    additive: ClassVar[bool] = False


@for_each("inner", [ByteCoded(Int8()), EntropyCoded(), ErrorFeedback(Int8()), 3])
def test_what_has_no_payload_of_a_known_length_cannot_be_coded(inner: Any) -> None:
    with pytest.raises(ConfigError, match=r"is no codec with payloads of a known length.*such as Int8\(\)"):
        ByteCoded(inner)


@for_each("codec", [ByteCoded(BF16()), ByteCoded(Int8()), ByteCoded(TopK(0.1)), ThreeLC()])
def test_on_a_device_what_is_damaged_is_nan(codec: OneShot) -> None:
    """And the bytes are the host's, and what is right comes back."""
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    payload = codec.encode(x, Context(out=x, work=FreshBuffers(), peers=1))
    message = codec.shortened(payload, 3000)
    with emulated_device():
        longer, length = codec.shortened_on_device(payload, 3000)
        assert torch.equal(longer[: int(length)], message)
        back = tuple(torch.full((3, *each.shape), 7, dtype=each.dtype) for each in payload)
        lengths = torch.tensor([0, -1, 1], dtype=torch.int32) + length
        codec.restore_on_device_(torch.cat((message, message[-1:])).repeat(3, 1), lengths, 3000, back)
        right, *wrong = zip(*back, strict=True)
        assert all(torch.equal(a, b) for a, b in zip(right, payload, strict=True))
        for each in wrong:
            out = torch.zeros(3000)
            codec.decode_(each, out)
            assert out.isnan().any()


@for_each(
    "text",
    [
        "int8:entropy=true",
        "qsgd:bits=2,entropy=true",
        "bf16:entropy=true",
        "topk:entropy=true,values=int8",
        "ps:push=bf16,pull=int8,entropy=true",
        "ps-topk:entropy=true",
    ],
)
def test_texts_that_ask_for_it(text: str) -> None:
    (strategy,) = parse(text).levels
    assert isinstance(strategy, Strategy)
    one_shot = strategy.compressor.one_shot(0)
    assert one_shot is not None
    assert isinstance(one_shot.codec, ByteCoded)
    with pytest.raises(ConfigError, match="entropy"):
        parse(text.replace("entropy=true", "entropy=3"))


def test_progress_that_all_gather_takes_one_round_trip() -> None:
    kinds = {}
    for text in ("lowbit:topology=two-phase", "lowbit:topology=all-gather"):
        transport = LoopbackTransport(Loopback(4), 0)
        session = Session(parse(text).levels[0], {"w": torch.zeros(130, 90)}, transport, [["w"]])
        (cost,) = session.store.costs
        kinds[text] = [each.kind for each in cost.messages]
    assert kinds == {
        "lowbit:topology=two-phase": ["AllToAll", "AllGather"],
        "lowbit:topology=all-gather": ["AllGather"],
    }


def test_biases_alone_are_summed_directly_among_few_ranks() -> None:
    """As in a fragment of biases, for which ranks would take all hops of a ring."""
    found = {}
    for peers, rows in ((4, 100), (17, 100), (4, 5000)):
        transport = LoopbackTransport(Loopback(peers), 0)
        session = Session(
            Strategy(compressor=QSGD(), topology=TwoPhase()), {"b": torch.zeros(rows)}, transport, [["b"]]
        )
        (cost,) = session.store.costs
        found[peers, rows] = [each.kind for each in cost.messages]
    assert found == {(4, 100): ["AllGather"], (17, 100): ["AllReduce"], (4, 5000): ["AllReduce"]}


def test_what_travels_as_it_is_is_not_coded() -> None:
    with pytest.raises(ConfigError, match="write push='bf16'"):
        parse("ps:entropy=true")
    with pytest.raises(ConfigError, match="do not add up"):
        Session(
            parse("bf16:entropy=true,topology=ring").levels[0],  # type: ignore[arg-type]
            NAMED,
            LoopbackTransport(Loopback(4), 0),
            [["c", "b", "a"]],
        )


@for_each(("bits", "share"), [(2, 0.34), (3, 0.69)])
def test_of_a_large_tensor_little_more_is_sent_than_its_entropy(bits: int, share: float) -> None:
    """Of normally distributed numbers 0.6 and 2.0 bits an entry, where packed ones take 1.6 and 3."""
    named = {"w": torch.zeros(400, 500)}
    plain, coded = (
        Group(Loopback(4), TwoPhase(), codec, named) for codec in (Blockwise(bits), EntropyCoded(bits))
    )
    for group in (plain, coded):
        group.round(0)
    assert 0.95 * share < coded.sent / plain.sent < share


def test_numbers_that_cannot_be_shortened_arrive_too() -> None:
    """A tensor of few entries, whose table would be longer than its codes."""
    x = torch.randn(30)
    done = []
    for codec in (Blockwise(3), EntropyCoded(3)):
        net = Loopback(3)
        sessions = [
            Session(
                Strategy(compressor=codec, topology=Flat()),
                {"w": torch.zeros(6, 5)},
                LoopbackTransport(net, rank),
                [["w"]],
            )
            for rank in range(3)
        ]
        mine = [x * (rank + 1) for rank in range(3)]
        net.run([session.open(0, each) for session, each in zip(sessions, mine, strict=True)])
        done.append(mine[0])
    assert torch.equal(*done)


def test_a_peers_message_that_is_damaged_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shortened = EntropyCoded.shortened

    def damaged(self: EntropyCoded, payload: Payload, numel: int) -> Tensor:
        message = shortened(self, payload, numel)
        message[-1] ^= 255
        return message

    monkeypatch.setattr(EntropyCoded, "shortened", damaged)
    with pytest.raises(PayloadError, match="damaged"):
        Group(Loopback(4), TwoPhase(), EntropyCoded(3)).round(0)


class Outsider(Topology):
    """One that gives payloads to others as they are."""

    def conduct(self, x: Tensor, compressor: Compressor, state: State, ctx: Context) -> Exchange:
        return Flat().conduct(x, compressor, state, ctx)


def test_a_topology_that_does_not_say_that_it_takes_them_is_refused() -> None:
    (strategy,) = parse("lowbit:entropy=true").levels
    with pytest.raises(ConfigError, match=r"payloads of a known length there: write topology=Auto\(\), or"):
        Session(
            replace(strategy, topology=Outsider()),
            NAMED,
            LoopbackTransport(Loopback(4), 0),
            [["c", "b", "a"]],
        )
