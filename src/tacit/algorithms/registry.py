"""The named strategies: what is known of each, and the strategy that its text form stands for.

`@algorithm` registers a function where it is defined; `algorithms/__init__.py` imports them in the order of
`tacit list`.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import Parameter as Declared
from typing import Any, Literal, TypeAlias, TypeVar

from tacit import checks
from tacit.algorithms.old_texts import check_mp2
from tacit.algorithms.text import alternatives, parameters, split_text, typed
from tacit.compressors.dense import Dense
from tacit.contracts import Compressor
from tacit.errors import ConfigError, unknown
from tacit.strategy import AnyStrategy, Strategy

Family: TypeAlias = Literal[
    "synchronous",
    "automatic",
    "quantization",
    "sparsification",
    "low rank",
    "lazy",
    "scheduled",
    "delayed",
    "periodic",
    "hierarchical",
    "gossip",
    "parameter server",
    "predictive",
]
Build = TypeVar("Build", bound=Callable[..., AnyStrategy])


@dataclass(frozen=True)
class Entry:
    """One algorithm's facts.

    Attributes:
        family: What kind of answer it is.
        paper: Where it was published.
        compresses: Whether what travels in a round is smaller than the gradient.
        changes: What differs from plain DDP, in a line.
        instead: What to take in its place, where it is here as a baseline of the survey; "" where it is not.
    """

    family: Family
    paper: str
    compresses: bool
    changes: str
    instead: str = ""


@dataclass(frozen=True)
class Parameter:
    """One parameter of an algorithm's text form; `default` is None where it is required."""

    name: str
    type: str
    default: Any
    required: bool


ALGORITHMS: dict[str, Callable[..., AnyStrategy]] = {}
"""Name -> the function that makes the strategy; its typed parameters are the algorithm's."""

ENTRIES: dict[str, Entry] = {}
"""Name -> facts, in the order of `tacit list`, which has baselines last."""


def algorithm(
    *, family: Family, paper: str, compresses: bool, changes: str, instead: str = ""
) -> Callable[[Build], Build]:
    """Register the decorated function, which makes a strategy, as the algorithm of its name.

    The text form and `tacit list` then know it: `streaming_diloco` as `streaming-diloco`. The function itself
    stays as it is. It may stand in a user's script too.

    Args:
        family: What kind of answer it is; one of `Family`.
        paper: Authors, year, and the arXiv number or DOI.
        compresses: Whether what travels in a round is smaller than the gradient.
        changes: What differs from plain DDP, in a line.
        instead: What to take in its place, where it is a baseline only; `tacit list` has these last.

    Raises:
        ConfigError: The family is unknown, or another function has the name.
    """
    checks.one_of("family", family, typing.get_args(Family))

    def register(build: Build) -> Build:
        name = build.__name__.replace("_", "-")
        if name in ALGORITHMS:
            raise ConfigError(
                f"{build.__module__}.{build.__name__} cannot be the algorithm {name!r}, as "
                f"{ALGORITHMS[name].__module__} has one of that name: give the function another name"
            )
        ALGORITHMS[name] = build
        ENTRIES[name] = Entry(family, paper, compresses, changes, instead)
        return build

    return register


def known() -> list[str]:
    """The names of all algorithms, in the order of `tacit list`."""
    return list(ALGORITHMS)


def parse(text: str) -> AnyStrategy:
    """The strategy of a text such as `"topk:ratio=0.01"`.

    Raises:
        ConfigError: unknown algorithm or parameter, or a value that cannot be; says what to write.
    """
    name, pairs = split_text(text)
    if name.endswith(")"):
        first, _, rest = name.partition("(")
        raise ConfigError(
            f"{text!r} is written as a call: write {':'.join(filter(None, (first, rest[:-1])))}"
        )
    if not name:
        raise ConfigError(f"{text!r} names no algorithm: write one of {', '.join(known())}")
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, known())
    if name == "mp2":
        check_mp2(pairs)
    build = ALGORITHMS[name]
    made: object = build(**typed(name, build, pairs))
    if not isinstance(made, AnyStrategy):
        raise ConfigError(
            f"{build.__module__}.{build.__name__} has returned {made!r} as the algorithm {name!r}, and that "
            "is no strategy: return a tacit.Strategy(...)"
        )
    return replace(made, name=text.strip())


def strategy_of(given: object) -> AnyStrategy:
    """A strategy as it was given: itself, or that of its text form.

    Raises:
        ConfigError: it is neither; says what to write.
    """
    if isinstance(given, str):
        return parse(given)
    if isinstance(given, AnyStrategy):
        return given
    raise ConfigError(
        f"{given!r} is no strategy: write "
        + (
            f"tacit.Strategy(compressor={given!r}), as a compressor is one part of a strategy"
            if isinstance(given, Compressor)
            else "a text such as 'topk:ratio=0.01', or a tacit.Strategy(...)"
        )
    )


def collective_of(name: str) -> str:
    """By which collectives an algorithm's messages travel, as it is by its name alone.

    Where the choice is the session's, both ways are named.
    """
    if any(each.required for each in parameters_of(name)):
        return "what its parameters say"
    return "; ".join(dict.fromkeys(map(_collective, ALGORITHMS[name]().levels)))


def _collective(level: Strategy) -> str:
    if level.subject == "nothing":
        return "DDP's own all-reduce"
    return level.topology.collectives([level.compressor, level.compressor.exempted() or Dense()])


def parameters_of(name: str) -> list[Parameter]:
    """What may stand behind the colon of an algorithm's text form, in order."""
    return [
        Parameter(
            key, _written(kind), None if default is Declared.empty else default, default is Declared.empty
        )
        for key, (kind, default) in parameters(ALGORITHMS[name]).items()
    ]


def _written(kind: Any) -> str:
    """A type as it is written: `int`, `float | None`, or the words that may stand there."""
    if len(alternatives(kind)) > 1:
        return " | ".join(_written(each) for each in alternatives(kind))
    if typing.get_origin(kind) is Literal:
        return " | ".join(repr(each) for each in kind.__args__)
    return "None" if kind is type(None) else str(kind.__name__)
