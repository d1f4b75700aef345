import pytest

from cases import for_each
from tacit.algorithms import ALGORITHMS, known, parse
from tacit.compressors import ErrorFeedback, TopK
from tacit.errors import ConfigError
from tacit.merges import Average
from tacit.rounds import Every, EveryStep
from tacit.strategy import Strategy
from tacit.topologies import Flat


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


@for_each(
    ("text", "says"),
    [
        ("", "names no algorithm"),
        ("tokp", "unknown algorithm 'tokp'.*Did you mean 'topk'.*Known:.*localsgd"),
        ("topk:ratoi=0.1", "unknown parameter of topk 'ratoi'.*Did you mean 'ratio'"),
        ("topk:ratio", "not a parameter.*topk:ratio=0.01"),
        ("topk:ratio=", "not a parameter"),
        ("topk:", "not a parameter"),
        ("topk:ratio=1,ratio=2", "stands twice"),
        ("topk:ratio=much", "topk:ratio=much is not of type float: write a number"),
        ("topk:ratio=0", r"not in \(0, 1\]"),
        ("topk:ratio=1.5", r"not in \(0, 1\]"),
        ("topk:ratio=nan", r"not in \(0, 1\]"),
        ("localsgd:sync_every=2.5", "not of type int: write a whole number"),
        ("localsgd:sync_every=0", "write 1 or more"),
        ("bf16:ratio=0.1", "bf16 takes no parameters"),
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
    assert [s for s in range(12) if Every(4).due(s, {})] == [3, 7, 11]
    assert all(EveryStep().due(s, {}) for s in range(5))
