from itertools import groupby

import pytest

from cases import for_each
from tacit import algorithms
from tacit.algorithms import ALGORITHMS, algorithm, known, parse
from tacit.algorithms.registry import ENTRIES
from tacit.compressors import (
    BF16,
    QSGD,
    Dense,
    ErrorFeedback,
    MajoritySign,
    MomentumCorrection,
    Scheduled,
    Sign,
    TopK,
)
from tacit.contracts import Compressor, Sync, Topology
from tacit.errors import ConfigError
from tacit.exports import homes
from tacit.merges import Average
from tacit.overlap import Bucketwise, Delayed
from tacit.rounds import Every, EveryStep
from tacit.strategy import Strategy
from tacit.topologies import Auto, Flat, Star, TwoPhase


def test_the_text_form_makes_a_value() -> None:
    assert parse("topk:ratio=0.05") == Strategy(compressor=ErrorFeedback(TopK(ratio=0.05)), topology=Flat())
    assert parse(" localsgd:sync_every=4 ").rounds == Every(4)
    assert parse("topk") == parse("topk:ratio=0.01")
    assert hash(parse("topk")) == hash(parse("topk:ratio=0.01"))
    assert parse("topk:ratio=0.5").name == "topk:ratio=0.5"


@for_each("name", known())
def test_every_algorithm_works_by_its_name_alone(name: str) -> None:
    strategy = parse(name)
    assert strategy.name == name
    assert ALGORITHMS[name].__doc__


def test_the_order_is_that_of_the_rows_and_families_stand_together() -> None:
    assert [name.replace("-", "_") for name in known()] == [*homes("tacit.algorithms")][4:]
    families = [family for family, _ in groupby(entry.family for entry in ENTRIES.values())]
    assert len(families) == len(set(families))


def test_algorithms_are_functions_of_the_package() -> None:
    assert algorithms.dgc(ratio=0.01) == parse("dgc:ratio=0.01")
    assert algorithms.streaming_diloco() == parse("streaming-diloco")
    for name in known():
        assert getattr(algorithms, name.replace("-", "_")) is ALGORITHMS[name]


def test_a_script_registers_an_algorithm_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tacit.algorithms.registry._builds", dict(ALGORITHMS))
    monkeypatch.setattr("tacit.algorithms.registry._entries", dict(ENTRIES))

    @algorithm(family="periodic", paper="none", compresses=False, changes="nothing")
    def every_third(sync_every: int = 3) -> Strategy:
        return Strategy(subject="delta", rounds=Every(sync_every), merge=Average())

    assert parse("every-third").rounds == Every(3)
    assert parse("every-third:sync_every=4") == every_third(4)
    with pytest.raises(ConfigError, match=r"cannot be the algorithm 'every-third'.*another name"):
        algorithm(family="lazy", paper="none", compresses=False, changes="nothing")(every_third)
    with pytest.raises(ConfigError, match=r"unknown family 'odd'.*Known: .*lazy"):
        algorithm(family="odd", paper="none", compresses=False, changes="nothing")  # type: ignore[arg-type]

    def untyped(first, second: int = 3) -> Strategy: ...  # type: ignore[no-untyped-def,empty-body]

    def listed(names: list[str]) -> Strategy: ...  # type: ignore[empty-body]

    def number() -> Strategy:
        return 3  # type: ignore[return-value]

    for made, says in (
        (untyped, "'first' of .*untyped is of no type, .*: write int, float, bool, str or a Literal"),
        (listed, "'names' of .*listed is a list, by which"),
        (number, r"number has returned 3 as the algorithm 'number', .*: return a tacit.Strategy\(...\)"),
    ):
        algorithm(family="lazy", paper="none", compresses=False, changes="nothing")(made)
        with pytest.raises(ConfigError, match=says):
            parse(made.__name__)


OWING = ErrorFeedback(TopK(ratio=0.001))


@pytest.mark.parametrize(
    ("text", "compressor"),
    [
        ("topk", ErrorFeedback(TopK(ratio=0.01, values=Dense()))),
        ("topk:values=qsgd", ErrorFeedback(TopK(values=QSGD()))),
        ("topk:values=qsgd,bits=2", ErrorFeedback(TopK(values=QSGD(bits=2)))),
        ("dgc", MomentumCorrection(OWING)),
        ("dgc:values=bf16", MomentumCorrection(ErrorFeedback(TopK(ratio=0.001, values=BF16())))),
        ("ps-topk:values=sign,chunk=512", ErrorFeedback(TopK(values=Sign(), chunk=512))),
        ("ps-dgc:values=bf16", MomentumCorrection(ErrorFeedback(TopK(ratio=0.001, values=BF16())))),
        ("gtopk", OWING),
        (
            "gtopk:warmup_steps=4",
            Scheduled(
                tuple((1, ErrorFeedback(TopK(ratio=4.0**-power))) for power in (1, 2, 3, 4)), then=OWING
            ),
        ),
        ("qsgd:scale=norm", QSGD(scale="norm")),
        ("localsgd:bits=16", BF16()),
        ("ps:push=topk,ratio=0.5", ErrorFeedback(TopK(ratio=0.5))),
        ("ps-async:push=qsgd,bits=8", QSGD(bits=8)),
        ("ps-ssp:push=topk", ErrorFeedback(TopK())),
    ],
)
def test_how_entries_are_written_can_be_told(text: str, compressor: Compressor) -> None:
    assert parse(text).levels[-1].compressor == compressor


def test_what_a_server_answers_can_be_told() -> None:
    for name in ("ps", "ps-async", "ps-ssp"):
        topology = parse(f"{name}:pull=qsgd,bits=2").topology
        assert isinstance(topology, Star)
        assert topology.pull == QSGD(bits=2)
    assert parse("ednncomm:bits=4").levels[-1].compressor == QSGD(bits=4)
    assert parse("ednncomm").levels[-1].compressor == Dense()


@pytest.mark.parametrize("name", ["localsgd", "ednncomm", "streaming-diloco"])
def test_rounds_may_be_in_fragments_and_late(name: str) -> None:
    late = parse(f"{name}:sync_every=32,fragments=4,fragment_sync_delay=2").levels[-1]
    assert (late.rounds, late.overlap) == (Every(32, fragments=4), Delayed(2))
    blocking = parse(f"{name}:sync_every=32,fragments=1,fragment_sync_delay=0").levels[-1]
    assert (blocking.rounds, blocking.overlap) == (Every(32), Bucketwise())


@pytest.mark.parametrize("name", ["signsgd", "pipesgd", "localsgd", "diloco", "streaming-diloco"])
@pytest.mark.parametrize(
    ("way", "topology"), [("auto", Auto()), ("all-gather", Flat()), ("two-phase", TwoPhase())]
)
def test_the_collective_can_be_told(name: str, way: str, topology: Topology) -> None:
    assert parse(f"{name}:topology={way}").topology == topology
    assert parse(name).topology == Auto()
    assert parse("signsgd").compressor == MajoritySign()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no algorithm"),
        ("tokp", r"unknown algorithm 'tokp'\. Did you mean 'topk' or 'gtopk'\? One of your own is known"),
        ("TopK", "Did you mean 'topk'"),
        ("nothing-like-it", "unknown algorithm 'nothing-like-it'. Known: .*localsgd"),
        ("topk:ratoi=0.1", "unknown parameter of topk 'ratoi'.*Did you mean 'ratio'"),
        ("topk:ratio", "not a parameter.*topk:ratio=0.01"),
        ("topk:ratio=", "not a parameter"),
        ("topk:", "not a parameter"),
        ("topk:ratio=1,ratio=2", "stands twice"),
        ("topk:ratio=much", "topk:ratio=much is not of type float: write a number"),
        ("topk(ratio=0.01)", "is written as a call: write topk:ratio=0.01"),
        ("topk ratio=0.01", "a space for the colon: write topk:ratio=0.01"),
        ("topk()", "written as a call: write topk"),
        ("topk:ratio=0.01;values=int8", "commas part parameters: write topk:ratio=0.01,values=int8"),
        ("topk:ratio=0", r"not in \(0, 1\]"),
        ("topk:ratio=1.5", r"not in \(0, 1\]"),
        ("topk:ratio=nan", r"not in \(0, 1\]"),
        ("localsgd:sync_every=2.5", "not of type int: write a whole number"),
        ("localsgd:sync_every=0", "write 1 or more"),
        ("sign:ratio=0.1", "Known: topology"),
        ("topk:bits=2", "bits=2 is for values='qsgd', not 'fp32': leave one of them out"),
        ("dgc:values=sign,bits=2", "bits=2 is for values='qsgd', not 'sign'"),
        ("ps-topk:values=qsgd,bits=9", "bits=9 is not a whole number, from 2 to 8"),
        ("dgc:values=fp8", "unknown value of dgc:values 'fp8'.*Known: .*bf16"),
        ("signsgd:topology=flat", "unknown value of signsgd:topology 'flat'.*all-gather"),
        ("localsgd:bits=9", r"bits=9 is not possible: write 32 \(fp32\)"),
        ("ps:ratio=0.1", "ratio=0.1 is for push='topk' or pull='topk', and they are 'dense' and 'dense'"),
        ("ps-async:push=topk,bits=2", "bits=2 is for push='qsgd' or pull='qsgd'"),
        ("ps-ssp:push=topk,ratio=2", r"ratio=2.0 is not in \(0, 1\]"),
    ],
)
def test_a_wrong_text_says_what_to_write(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(text)


def test_answers_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"would lose gradients.*subject='delta'"):
        Strategy(rounds=Every(4))
    with pytest.raises(ConfigError, match=r"write merge=Average\(\)"):
        Strategy(subject="delta", rounds=EveryStep())
    with pytest.raises(ConfigError, match=r"write merge=Replace\(\)"):
        Strategy(merge=Average())


def test_what_stands_beside_the_parameters_is_the_periodic_strategies() -> None:
    there = parse("localsgd:momentum=averaged,buffers=local").levels[-1]
    assert (there.momentum, there.buffers) == ("averaged", "local")
    near, far = parse("ednncomm:sync_every=4,momentum=reset,buffers=local").levels
    assert (near.momentum, near.buffers) == ("local", "averaged")
    assert (far.momentum, far.buffers) == ("reset", "local")
    with pytest.raises(
        ConfigError, match=r"momentum='reset' with subject='gradient' would do nothing.*Leave"
    ):
        Strategy(momentum="reset")
    with pytest.raises(ConfigError, match=r"buffers='local' with subject='nothing' would do nothing"):
        Strategy(subject="nothing", buffers="local")
    with pytest.raises(ConfigError, match=r"unknown momentum 'mean'.*Known: averaged, local, reset"):
        Strategy(subject="delta", merge=Average(), momentum="mean")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"unknown value of localsgd:buffers 'reset'"):
        parse("localsgd:buffers=reset")


def test_periods_are_pure() -> None:
    assert [s for s in range(12) if Every(4).at(s, {})] == [3, 7, 11]
    assert all(EveryStep().at(s, {}) == Sync(s) for s in range(5))
