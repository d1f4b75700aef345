"""The facts of `tacit list` about algorithms: their parameters, collectives, and cost in accuracy.

Accuracy is as `benchmarks/accuracy.py` measures it; docs/accuracy.md says how.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
import typing
from dataclasses import dataclass
from functools import cache
from inspect import Parameter as Declared
from pathlib import Path
from typing import Any, Literal

from tacit import algorithms
from tacit.algorithms import ALGORITHMS
from tacit.algorithms.options.text import alternatives, parameters
from tacit.algorithms.registry import ENTRIES, Family
from tacit.compressors import Dense
from tacit.strategy import Strategy
from tacit_lab.parameter_meanings import meaning

_FILE = Path(__file__).with_name("accuracy.json")


@dataclass(frozen=True)
class Parameter:
    """One parameter of an algorithm's text form.

    Attributes:
        default: None where it is required.
        meaning: of an algorithm of the user's own by the `Args:` of its docstring, if it has one; else "".
    """

    name: str
    type: str
    default: Any
    required: bool
    meaning: str = ""


def by_family() -> dict[str, list[str]]:
    """The names of the algorithms of each family, the baselines of the survey last."""
    ordered = sorted(ENTRIES, key=lambda name: bool(ENTRIES[name].instead))
    return {
        family: [name for name in ordered if ENTRIES[name].family == family]
        for family in typing.get_args(Family)
    }


def collective_of(name: str) -> str:
    """The collectives of an algorithm with its default parameters.

    If the session chooses the topology, both choices are named.
    """
    if any(each.required for each in parameters_of(name)):
        return "what its parameters say"
    return "; ".join(dict.fromkeys(map(_collective, ALGORITHMS[name]().levels)))


def _collective(level: Strategy) -> str:
    if level.subject == "nothing":
        return "DDP's own all-reduce"
    return level.topology.collectives([level.compressor, level.compressor.exempted() or Dense()])


def parameters_of(name: str) -> list[Parameter]:
    """The parameters of an algorithm's text form, in order."""
    build = ALGORITHMS[name]
    ours, told = is_ours(name), _args(inspect.getdoc(build) or "")
    return [
        Parameter(
            key,
            _written(kind),
            None if default is Declared.empty else default,
            default is Declared.empty,
            meaning(name, key) if ours else told.get(key, ""),
        )
        for key, (kind, default) in parameters(build).items()
    ]


def is_ours(name: str) -> bool:
    """Whether an algorithm is tacit's, not one of the user's own."""
    return ALGORITHMS[name].__module__.startswith(f"{algorithms.__name__}.")


def summary_of(name: str) -> str:
    """The first line of an algorithm's docstring; "" without one."""
    return (inspect.getdoc(ALGORITHMS[name]) or "").partition("\n")[0]


def _args(docstring: str) -> dict[str, str]:
    """What the section `Args:` of a docstring, as Google writes it, says of each parameter."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", docstring, re.MULTILINE)
    if section is None:
        return {}
    text = textwrap.dedent(section[1])
    found = re.findall(r"^(\w+)(?: \([^)\n]*\))?:(.*(?:\n[ \t]+.*)*)", text, re.MULTILINE)
    return {name: " ".join(said.split()).rstrip(".") for name, said in found}


def _written(kind: Any) -> str:
    """A type as it is written: `int`, `float | None`, or the words that may stand there."""
    if len(alternatives(kind)) > 1:
        return " | ".join(_written(each) for each in alternatives(kind))
    if typing.get_origin(kind) is Literal:
        return " | ".join(repr(each) for each in kind.__args__)
    return "None" if kind is type(None) else str(kind.__name__)


@dataclass(frozen=True)
class MeasuredGap:
    """The accuracy of trainings with an algorithm, minus that of plain training with equal seeds.

    Attributes:
        algorithm: the name; `attached`: the whole text that was attached.
        task: what was trained, by its name on the page; `steps`: for how long.
        bytes: of plain training's, as a share.
        gap: the mean difference of accuracies in 0..1; `half`: half the width of its 95 % interval, None for
            one seed; `seeds`: how many.
    """

    algorithm: str
    attached: str
    task: str
    steps: int
    bytes: float
    gap: float
    half: float | None
    seeds: int


@cache
def gaps() -> tuple[MeasuredGap, ...]:
    """All that was measured, of each algorithm and task the longest training."""
    return tuple(MeasuredGap(**each) for each in json.loads(_FILE.read_text()))


def gaps_of(name: str) -> list[MeasuredGap]:
    """Those of one algorithm."""
    return [each for each in gaps() if each.algorithm == name]
