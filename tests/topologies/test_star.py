"""A star as a value: what it refuses, and what travels; numbers over Gloo are in tests/stores."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

import tacit
from cases import for_each
from tacit.algorithms import parse
from tacit.compressors import Dense
from tacit.contracts import SERVER, AxisRank, Compressor, Matrix, PushPull
from tacit.errors import ConfigError
from tacit.rounds import Every
from tacit.session.buckets import make_buckets
from tacit.strategy import Levels, Strategy
from tacit.topologies import Asynchronous, DelayedNesterov, Flat, Star, Synchronous
from tacit.transports.meter import DryRun, like, run_dry

ASYNC = Star(Asynchronous())


@dataclass(frozen=True)
class RowWise(Dense):
    """Is told where rows lie."""

    matrices: tuple[Matrix, ...] = ()

    def with_layout(self, matrices: tuple[Matrix, ...]) -> "RowWise":
        return replace(self, matrices=matrices)


@for_each(
    ("make", "says"),
    [
        (lambda: Star("soon"), "consistency='soon' is not known: write Synchronous()"),
        (lambda: Star(Asynchronous), "consistency=<class"),
        (lambda: Synchronous(-1), "backup_workers=-1 is not a whole number, 0 or more"),
        (lambda: tacit.StaleSynchronous(1.5), "bound=1.5 is not a whole number"),
        (lambda: Star(optimizer="nobody"), "unknown optimizer 'nobody'"),
        (lambda: Star(compensation=0.1), "would do nothing, as no push is stale"),
        (lambda: Star(by_staleness=True), "would do nothing, as no push is stale"),
        (lambda: Star(Asynchronous(), compensation=0.1), "write optimizer='server'"),
        (lambda: Star(pull=tacit.PowerSGD()), "is not one-shot"),
        (
            lambda: Star(deadline=0),
            "deadline=0 is not a finite number above 0: write the seconds after which",
        ),
        (lambda: Star(Asynchronous(), deadline=0.3), "not possible: leave it out, or write Synchronous"),
        (
            lambda: Strategy(compressor=tacit.ErrorFeedback(tacit.TopK()), topology=Star(deadline=0.3)),
            r"must be the least, and must not be lost: write ErrorFeedback\(InParts",
        ),
        (lambda: parse("ps-topk:deadline=0.3,values=bf16"), "exact entries are sent in parts of one size"),
        (lambda: Star(pull="int8"), "pull='int8' is no compressor"),
        (lambda: Star(pull=RowWise()), "goes by where rows lie, which a server does not know"),
        (lambda: Strategy(topology=ASYNC), "takes delta; write subject='delta'"),
        (
            lambda: Strategy(topology=Star(optimizer="server"), subject="delta", merge=tacit.ServerParams()),
            "takes gradient; write subject='gradient'",
        ),
        (
            lambda: Strategy(topology=ASYNC, subject="delta", merge=tacit.Average()),
            r"merge=Average\(\) does not fit .* write merge=ServerParams\(whole=True\)",
        ),
        (
            lambda: Strategy(
                topology=Star(Asynchronous(), pull=tacit.BF16()), subject="delta", merge=tacit.ServerParams()
            ),
            r"write merge=ServerParams\(whole=False\)",
        ),
        (
            lambda: Strategy(subject="delta", merge=tacit.ServerParams()),
            r"write merge=Average\(\), or topology",
        ),
        (
            lambda: Strategy(
                topology=ASYNC, subject="delta", merge=tacit.ServerParams(), compressor=tacit.PowerSGD()
            ),
            "sends several messages a round",
        ),
        (
            lambda: Levels(
                (
                    Strategy(topology=Flat("node")),
                    replace(parse("ps-async").levels[0], name="x"),
                )
            ),
            "cannot be one of several levels",
        ),
        (
            lambda: Strategy(topology=Star(Asynchronous(), optimizer="server"), overlap=tacit.Delayed(1)),
            "the next step starts from the server's answer",
        ),
        (
            lambda: Strategy(
                topology=ASYNC, subject="delta", merge=tacit.ServerParams(), rounds=tacit.AdaComm(8, 100)
            ),
            "need measurements of all workers",
        ),
        (
            lambda: Strategy(
                topology=ASYNC, subject="delta", merge=tacit.ServerParams(), rounds=Every(2), momentum="reset"
            ),
            "as nobody waits for others to average with",
        ),
        (lambda: parse("ps-async:sync_every=4,optimizer=server"), "would lose gradients"),
        (lambda: Star(outer=DelayedNesterov()), "as the server steps by each push as it comes: write Asynch"),
        (lambda: Star(Asynchronous(), by_staleness=True, outer=DelayedNesterov()), "leave by_staleness out"),
        (lambda: parse("async-diloco:delay=0"), "delay=0 is not a whole number"),
        (lambda: DelayedNesterov(lr=0.0), "lr=0.0 is not"),
        (lambda: DelayedNesterov(momentum=1.0), "momentum=1.0 is not"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.parametrize(
    "text", ["ps", "ps-topk:ratio=0.02", "ps-dgc:ratio=0.02", "ps-async:push=topk", "async-diloco"]
)
def test_the_bytes_of_a_push_are_the_payloads_and_the_union_fits_the_answer(text: str) -> None:
    (strategy,) = parse(text).levels
    named = {"a": torch.zeros(300, 40), "b": torch.zeros(40)}

    def policy(_: str, p: torch.Tensor) -> Compressor:
        exempt = strategy.compressor.exempts(p.shape)
        return (strategy.compressor.exempted() or tacit.Dense()) if exempt else strategy.compressor

    (bucket,) = make_buckets([["b", "a"]], named, policy)
    asked: list[PushPull] = []

    def watched(talk):
        answer = None
        while True:
            try:
                request = talk.send(answer)
            except StopIteration as end:
                return end.value
            asked.append(request)
            answer = yield request

    x = bucket.like()
    work = DryRun()
    told = bucket.compressor.hides_nonfinite or strategy.independent
    flags = tacit.contracts.flags(torch.empty(4, device="meta")) if told else None
    ctx = tacit.contracts.Context(out=x, work=work, peers=4, nonfinite_flags=flags, name="b")
    talk = strategy.topology.conduct(x, bucket.compressor, bucket.compressor.init(x), ctx)
    _, cost = run_dry(watched(talk), lambda axis: AxisRank(0, 4))
    (ask,) = asked
    sent = sum(part.numel() * part.element_size() for payload in ask.payloads for part in payload)
    assert cost.sent == {SERVER: sent}
    assert cost.stages == {SERVER: 1}
    answered = sum(part.nbytes for piece in ask.pulls for part in like(piece))
    dense = 4 * bucket.numel
    if "topk" in text and text.startswith("ps-topk"):
        assert sent < 0.1 * dense
        assert sent < answered < 4 * sent + 64
    elif text in ("ps", "async-diloco"):
        assert (sent, answered) == (dense, dense)
