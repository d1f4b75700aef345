"""The named strategies: what is known of each, and the strategy that its text form stands for.

`@algorithm` registers a function where it is defined; `algorithms/__init__.py` has them in the order of
`tacit list`. What is not asked for is not loaded.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from importlib import import_module
from typing import Any, Literal, TypeAlias, TypeVar

from tacit import checks
from tacit.algorithms.options.text import split_text, typed
from tacit.contracts import Compressor
from tacit.environment import IMPORT
from tacit.errors import ConfigError, unknown
from tacit.exports import homes, load_all
from tacit.strategy import AnyStrategy

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


ALGORITHMS: dict[str, Callable[..., AnyStrategy]]
"""Name -> the function that makes the strategy; its typed parameters are the algorithm's. Loads all."""

ENTRIES: dict[str, Entry]
"""Name -> facts, in the order of `tacit list`, which has baselines last. Loads all."""

_BY_PAPER = {"3lc": "three-lc", "1bit-sgd": "onebit", "1bit-adam": "onebit-adam", "01-adam": "zeroone-adam"}
"""Names of papers that no function can have, and that of the algorithm here."""
_builds: dict[str, Callable[..., AnyStrategy]] = {}
_entries: dict[str, Entry] = {}


def __getattr__(name: str) -> Any:
    if name not in ("ALGORITHMS", "ENTRIES"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _load_all()
    return _builds if name == "ALGORITHMS" else _entries


def _rows() -> dict[str, str]:
    """The names of tacit's own, each with the module that registers it, in the order of `tacit list`."""
    found = homes(__name__.rpartition(".")[0]).items()
    return {name.replace("_", "-"): module for name, module in found if module != __name__}


def _load_all() -> None:
    load_all(__name__.rpartition(".")[0])
    order = known()
    for table in (_builds, _entries):
        if (names := sorted(table, key=order.index)) != [*table]:
            for name in names:
                table[name] = table.pop(name)  # type: ignore[assignment]


def _build(name: str) -> Callable[..., AnyStrategy]:
    """The function of an algorithm that is known."""
    if name not in _builds:
        import_module(_rows()[name])
    return _builds[name]


def algorithm(
    *, family: Family, paper: str, compresses: bool, changes: str, instead: str = ""
) -> Callable[[Build], Build]:
    """Register the decorated function, which makes a strategy, as the algorithm of its name.

    The text form and `tacit list` then know it: `streaming_diloco` as `streaming-diloco`, and so what it
    returns is called. It may stand in a user's script too.

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
        there = _builds[name].__module__ if name in _builds else _rows().get(name, build.__module__)
        if name in _builds or there != build.__module__:
            raise ConfigError(
                f"{build.__module__}.{build.__name__} cannot be the algorithm {name!r}, as "
                f"{there} has one of that name: give the function another name"
            )

        @wraps(build)
        def named(*args: Any, **kwargs: Any) -> AnyStrategy:
            made = build(*args, **kwargs)
            return replace(made, name=name) if isinstance(made, AnyStrategy) else made

        _builds[name] = named
        _entries[name] = Entry(family, paper, compresses, changes, instead)
        return named  # type: ignore[return-value]

    return register


def known() -> list[str]:
    """The names of all algorithms, in the order of `tacit list`; those of one's own come last.

    Raises:
        ConfigError: a module of one's own cannot be imported; see `own_modules`.
    """
    from tacit import own_modules  # not where one of tacit's own is named

    own_modules.load_all()
    return list(dict.fromkeys([*_rows(), *_builds]))


def canonical(text: str) -> str:
    """The text of an algorithm, by its name here where its paper calls it otherwise."""
    name, colon, rest = text.strip().partition(":")
    return f"{_BY_PAPER.get(name.strip(), name)}{colon}{rest}"


def parse(text: str) -> AnyStrategy:
    """The strategy of a text such as `"topk:ratio=0.01"`.

    Raises:
        ConfigError: unknown algorithm or parameter, or a value that cannot be; says what to write.
    """
    text = canonical(text)
    name, pairs = split_text(text)
    if name.endswith(")"):
        first, _, rest = name.partition("(")
        raise ConfigError(
            f"{text!r} is written as a call: write {':'.join(filter(None, (first, rest[:-1])))}"
        )
    if not name:
        raise ConfigError(f"{text!r} names no algorithm: write one of {', '.join(known())}")
    if name not in _rows() and name not in _builds and name not in known():
        error = unknown("algorithm", name, known())
        raise ConfigError(f"{error} One of your own is known after --import FILE, or by {IMPORT}")
    if name == "mp2":
        from tacit.algorithms.options.old_texts import check_mp2

        check_mp2(pairs)
    build = _build(name)
    made: object = build(**typed(name, build, pairs))
    if not isinstance(made, AnyStrategy):
        raise ConfigError(
            f"{build.__module__}.{build.__name__} has returned {made!r} as the algorithm {name!r}, and that "
            "is no strategy: return a tacit.Strategy(...)"
        )
    return replace(made, name=text)


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
