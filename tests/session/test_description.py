"""What a session says of itself: a sentence, and the detail behind it."""

import re

import pytest
import torch

import tacit
from cases import for_each
from tacit.algorithms import ALGORITHMS, parse
from tacit.session import Session, Training
from tacit.session.description import one_line
from tacit.strategy import Strategy
from tacit.topologies import Flat, TwoPhase
from tacit.transports.loopback import Loopback, LoopbackTransport

NAMED = {f"{i}.{name}": torch.zeros(size) for i in range(3) for name, size in (("w", (64, 64)), ("b", (64,)))}
LOTS = [[f"{i}.w", f"{i}.b"] for i in range(3)]
KNOWN = {"steps_per_epoch": 100.0, "epochs": 10.0}
AXES = {"node": [[0, 1], [2, 3]], "net": [[0, 2], [1, 3]], "server": [[0, 1, 2, 3]]}
WITHOUT_NUMBA = (
    "4 ranks by gloo, kernels: plain torch on cpu (numba cannot be imported: No module named 'numba')"
)


def session(strategy: Strategy) -> Session:
    return Session(
        strategy.for_training(KNOWN),
        NAMED,
        LoopbackTransport(Loopback(4, AXES), 0),
        LOTS,
        training=Training(schedule_state=KNOWN),
    )


@for_each("name", [name for name in ALGORITHMS if name != "ddp"])
def test_every_algorithm_says_in_one_sentence_what_is_at_work(name: str) -> None:
    told = one_line(name, [session(level).summary for level in parse(name).levels], WITHOUT_NUMBA)
    assert len(told) <= 200
    assert "\n" not in told
    assert told.startswith(f"{name} ")
    assert told.endswith("kernels: plain torch on cpu (numba cannot be imported: No module named 'numba')")
    assert " over " in told


def test_what_is_too_long_is_shortened_and_the_kernels_stay() -> None:
    name = "daso:" + ",".join(f"key_{i}={i}" for i in range(50))
    told = one_line(name, [session(level).summary for level in parse("daso").levels], WITHOUT_NUMBA)
    assert len(told) <= 200
    assert told.startswith("daso:key_0")
    assert told.endswith(WITHOUT_NUMBA)


def test_the_sentence_in_full() -> None:
    assert session(parse("topk")).summary == "over all-gather, error feedback; 3 buckets of 16.6 kB"
    told = "parameters every 32 steps over two phases, 5 steps late; 3 buckets of 16.6 kB"
    assert session(parse("streaming-diloco")).summary == told
    near, far = parse("ednncomm").levels
    assert session(near).summary == "over all-reduce in each node; 3 buckets of 16.6 kB"
    assert (
        session(far).summary == "parameters every epoch over all-reduce between nodes; 3 buckets of 16.6 kB"
    )


@pytest.mark.parametrize("compressor", [tacit.QSGD(bits=2), tacit.QSGD(bits=4), tacit.TernGrad()])
def test_the_detail_has_the_numbers_that_auto_decided_by(compressor: tacit.QSGD | tacit.TernGrad) -> None:
    at_work = session(Strategy(compressor=compressor))
    choice, told = at_work.choice, "\n".join(at_work.describe())
    row = r"^  (\w+)\(axis='world'\): ([\d,]+) bytes sent, .*: ([\d,]+)$"
    found = {
        name: [int(n.replace(",", "")) for n in numbers] for name, *numbers in re.findall(row, told, re.M)
    }
    assert found == {
        type(each).__name__: [choice.sent[each], round(choice.weighed[each])] for each in (Flat(), TwoPhase())
    }
    sent, weighed = ({name: pair[i] for name, pair in found.items()} for i in (0, 1))
    chosen = min(weighed, key=lambda name: weighed[name])
    assert f"topology: {chosen}(axis='world'), chosen" in told
    assert at_work.strategy.topology == {"Flat": Flat(), "TwoPhase": TwoPhase()}[chosen]
    assert weighed["TwoPhase"] > sent["TwoPhase"]


def test_every_bucket_and_its_compressors_stand_in_the_detail() -> None:
    at_work = session(parse("topk"))
    told = at_work.describe()
    assert told[0] == f"strategy: {at_work.strategy}"
    assert told[1] == "topology: Flat(axis='world'), as the strategy names it"
    for i, cost in enumerate(at_work.store.costs):
        start = told.index(f"bucket {i}: 2 parameters, 16.6 kB of torch.float32")
        assert told[start + 1].startswith(f"  sends at most {cost.sent['world']:,} bytes")
        codec = "TopK(ratio=0.01, values=Dense(), chunk=None)"
        assert f"  ErrorFeedback(inner={codec}, rescale=True, decay=1.0): {i}.w" in told
        assert f"  Dense(): {i}.b" in told


def test_what_predicts_each_matrix_stands_in_the_detail() -> None:
    told = session(parse("mp2:rescale=false,sync_every=4,predictor=linear")).describe()
    for i in range(3):
        assert f"  predicted: {i}.w (64x64, linear) by Linear()" in told
    assert not [line for line in session(parse("topk")).describe() if "predicted" in line]
