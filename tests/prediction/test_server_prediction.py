"""A server that predicts what workers did not push: the same as where all ranks predict."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from laws import Bench, Peers, tensors
from torch import Tensor

import tacit
from tacit.compressors import BF16, Clip
from tacit.contracts import Context, Matrix, Outcome, PayloadSpec, PushPull, State
from tacit.errors import ConfigError, PayloadError, RoundError
from tacit.prediction import Predicted, Pulled
from tacit.prediction.extrapolation import Exponential
from tacit.prediction.predictor import Predictor, Seen
from tacit.prediction.server_prediction import NOTES
from tacit.stores import encoding
from tacit.stores.messages import Message
from tacit.stores.protocol import FrameKind
from tacit.stores.server.allowed_types import ALLOWED_TYPES
from tacit.stores.server.averaging_service import AveragingService, AveragingState
from tacit.stores.service import Sender
from tacit.topologies import Flat, Star

P, N = 3, 1000
MATRICES = (Matrix(0, 20, 30), Matrix(600, 16, 20, 4), Matrix(920, 80, 1, 1))


def pulled(**options: Any) -> Pulled:
    settled = Pulled(
        budget=0.3, predictor=Exponential(), full_steps=2, horizon=10**6, whole_below=1, matrices=MATRICES
    )
    return replace(settled, **options)


def mirrored(pulled: Pulled) -> Predicted:
    return Predicted(**{field.name: getattr(pulled, field.name) for field in fields(Predicted)})


class Served:
    """Workers whose messages a server without a network answers."""

    def __init__(self, compressor: Pulled, service: AveragingService, state: AveragingState) -> None:
        self.compressor, self.service, self.server = compressor, service, state
        self.states: list[State] = [compressor.init(torch.empty(N)) for _ in range(P)]
        self.round, self.bytes = 0, (0, 0)
        self.refused: list[Exception | None] = []

    @classmethod
    def begun(cls, compressor: Pulled) -> "Served":
        service = AveragingService(P, "lot")
        state = service.start()
        for i in range(P):
            _, state = service.on(Sender(i, 1), Message(FrameKind.ENTER), state)
        return cls(compressor, service, state)

    def exchange(self, xs: Sequence[Tensor], lr: float = 0.1, spoilt: int | None = None) -> list[Outcome]:
        """`spoilt`: which of the first worker's notes is NaN."""
        contexts = [
            Context(
                torch.empty(N), Bench(), P, i, round=self.round, step=self.round, lr=lr, name="lot", seed=7
            )
            for i in range(P)
        ]
        talks = [
            Star().conduct(x, self.compressor, state, ctx)
            for x, state, ctx in zip(xs, self.states, contexts, strict=True)
        ]
        replies: Sequence[Any] = ()
        for i, talk in enumerate(talks):
            ask = next(talk)
            assert isinstance(ask, PushPull)
            if spoilt is not None and i == 0:
                ask.payloads[0][0][len(ask.payloads[0][0]) - NOTES + spoilt] = math.nan
            forms = travelled(ask.pieces), travelled(ask.pulls)
            message = Message(FrameKind.PUSH, self.round + 1, ask.payloads, *forms, ask.lr)
            replies, self.server = self.service.on(Sender(i, 1), message, self.server)
        self.round += 1
        self.refused = [reply.refused for reply in replies]
        for error in filter(None, self.refused):
            raise error
        outcomes = [_ended(talk, reply.payloads) for talk, reply in zip(talks, replies, strict=True)]
        self.states = [outcome.state for outcome in outcomes]
        pushed = sum(part.numel() for payload in ask.payloads for part in payload)
        self.bytes = (4 * pushed, 4 * sum(part.numel() for part in replies[0].payloads[0]))
        return outcomes


def travelled(pieces: tuple[PayloadSpec, ...]) -> tuple[PayloadSpec, ...]:
    found: tuple[PayloadSpec, ...] = encoding.read(
        encoding.write(pieces), tuple[PayloadSpec, ...], ALLOWED_TYPES
    )
    return found


def _ended(talk: Any, payloads: object) -> Outcome:
    with pytest.raises(StopIteration) as end:
        talk.send(payloads)
    outcome: Outcome = end.value.value
    return outcome


@pytest.mark.parametrize("subset", ["rotating", "random", "layers"])
def test_workers_pull_what_they_would_have_come_to_together(subset: str) -> None:
    compressor = pulled(subset=subset)
    served, peers = Served.begun(compressor), Stepping(mirrored(compressor), P, N)
    for r in range(12):
        xs = tensors(P, N, seed=r)
        ours = served.exchange([x.clone() for x in xs])
        theirs = peers.exchange(xs)
        torch.testing.assert_close(ours[0].mean, theirs[0].mean, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(ours[0].mean, other.mean) for other in ours[1:])
        for mine, other, x in zip(ours, theirs, xs, strict=True):
            seen = mine.sent.dense(x)
            torch.testing.assert_close(seen, other.sent.dense(x), rtol=1e-5, atol=1e-6)
        pushed, back = served.bytes
        sent = N if r < 2 else len(compressor.entries_of_round(False, at(r)).where)
        assert (pushed, back) == (4 * (sent + 3), 4 * N)
    assert served.states[0].keys() == {"rates"}


def at(round_: int) -> Context:
    return Context(torch.empty(N), Bench(), P, round=round_, name="lot", seed=7)


class Stepping(Peers):
    """Peers of the seed, steps and learning rate that workers have here."""

    def _context(self, rank: int, out: Tensor) -> Context:
        return replace(super()._context(rank, out), seed=7, step=self.round, lr=0.1)


def test_a_fallen_learning_rate_has_everything_pushed_once() -> None:
    served = Served.begun(pulled(drops=1, horizon=1000))
    pushed = []
    for lr in (0.1, 0.1, 0.1, 0.04, 0.04, 0.04, 0.01, 0.01):
        served.exchange(tensors(P, N), lr)
        pushed.append(served.bytes[0] == 4 * (N + 3))
    assert pushed == [True, True, False, False, True, False, False, False]


def test_a_restarted_server_goes_on_where_it_was() -> None:
    ours, never = (Served.begun(pulled()) for _ in range(2))
    for r in range(7):
        for each in (ours, never):
            each.exchange(tensors(P, N, seed=r))
    again = ours.service.load(ours.service.save(ours.server))
    resumed = Served(ours.compressor, AveragingService(P, "lot"), again)
    for i in range(P):
        _, resumed.server = resumed.service.on(Sender(i, 1), Message(FrameKind.ENTER), resumed.server)
    resumed.states, resumed.round = ours.states, ours.round
    for r in range(7, 10):
        xs = tensors(P, N, seed=r)
        assert torch.equal(resumed.exchange(xs)[0].mean, never.exchange(xs)[0].mean)


def test_a_server_without_the_workers_past_says_so() -> None:
    ours = Served.begun(pulled())
    for r in range(5):
        ours.exchange(tensors(P, N, seed=r))
    ours.server = replace(ours.server, memory={})
    with pytest.raises(RoundError, match="the workers are in round 5, and the server has had 0 rounds"):
        ours.exchange(tensors(P, N))


@pytest.mark.parametrize("note", range(NOTES))
def test_notes_that_are_no_numbers_are_refused_for_all(note: int) -> None:
    served = Served.begun(pulled())
    served.exchange(tensors(P, N))
    before = served.server.memory
    with pytest.raises(PayloadError, match="a worker's notes on the bucket of lot are no finite numbers"):
        served.exchange(tensors(P, N), spoilt=note)
    assert [type(each) for each in served.refused] == [PayloadError] * P
    assert all(record.present for record in served.server.records)
    assert served.server.memory is before


def test_what_cannot_be_is_refused() -> None:
    for topology in (Flat(), tacit.Star(pull=BF16()), tacit.Star(optimizer="server")):
        for compressor in (pulled(), Clip(pulled(), 1.0)):
            with pytest.raises(ConfigError):
                tacit.Strategy(
                    subject="delta", compressor=compressor, topology=topology, merge=tacit.Average()
                )
    with pytest.raises(ConfigError, match="needs a parameter server that averages"):
        tacit.Strategy(subject="delta", compressor=pulled(), merge=tacit.Average())
    for options in ({"values": BF16()}, {"subset": "magnitude"}):
        with pytest.raises(ConfigError, match="cannot be pushed to a server that predicts"):
            pulled(**options)
    with pytest.raises(ConfigError, match="keep them in fp32"):
        next(pulled().exchange(torch.zeros(N, dtype=torch.bfloat16), {}, at(0)))


class Foreign(Predictor):
    """Not tacit's own, and no dataclass."""

    def change(self, seen: Seen, kind: str) -> Tensor:
        return seen.changes[-1]


@dataclass(frozen=True)
class ForeignValues(Foreign):
    """Not tacit's own."""


@pytest.mark.parametrize(
    ("predictor", "says"),
    [
        (Foreign(), "a parameter server can read only compressors and predictors that are dataclasses"),
        (
            ForeignValues(),
            r"can read only tacit's compressors .*\.ForeignValues is none of them: .* --import",
        ),
    ],
)
def test_a_server_is_told_of_tacits_predictors_only(predictor: Predictor, says: str) -> None:
    talk = Star().conduct(torch.zeros(N), pulled(predictor=predictor), pulled().init(torch.zeros(N)), at(0))
    with pytest.raises(ConfigError, match=says):
        travelled(next(talk).pieces)
