"""What is told of every algorithm: where it comes from, what family it is of, and what it changes."""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass
from inspect import Parameter as Declared
from typing import Any, Literal, TypeAlias

from tacit.algorithms import ALGORITHMS
from tacit.strategy import parameters

Family: TypeAlias = Literal["synchronous", "quantization", "sparsification", "low rank", "periodic"]


@dataclass(frozen=True)
class Entry:
    """One algorithm's facts.

    Attributes:
        family: What kind of answer it is.
        paper: Where it was published.
        compresses: Whether what travels in a round is smaller than the gradient.
        changes: What differs from plain DDP, in a line.
    """

    family: Family
    paper: str
    compresses: bool
    changes: str


@dataclass(frozen=True)
class Parameter:
    """One parameter of an algorithm's text form; `default` is None where it is required."""

    name: str
    type: str
    default: Any
    required: bool


_SURVEY = "survey: Ouyang et al. 2020, arXiv 2003.03009"

ENTRIES: dict[str, Entry] = {
    "ddp": Entry("synchronous", _SURVEY, False, "nothing: PyTorch's own DDP, the baseline"),
    "dense": Entry("synchronous", _SURVEY, False, "nothing in the result: DDP's exchange, made by tacit"),
    "bf16": Entry("quantization", _SURVEY, True, "gradients travel as bfloat16: half the bytes"),
    "sign": Entry(
        "quantization",
        "EF-signSGD: Karimireddy et al. 2019, arXiv 1901.09847",
        True,
        "one bit an entry and one magnitude; the rest is owed (error feedback)",
    ),
    "topk": Entry(
        "sparsification",
        "Aji & Heafield 2017, arXiv 1704.05021; Stich et al. 2018, arXiv 1809.07599",
        True,
        "only the largest entries travel; the rest is owed (error feedback)",
    ),
    "randomk": Entry(
        "sparsification",
        "Stich et al. 2018, arXiv 1809.07599",
        True,
        "only entries drawn by lot travel, the same on all ranks; the rest is owed (error feedback)",
    ),
    "powersgd": Entry(
        "low rank",
        "PowerSGD: Vogels et al. 2019, arXiv 1905.13727",
        True,
        "each matrix travels as a product of two thin ones; the rest is owed (error feedback)",
    ),
    "localsgd": Entry(
        "periodic",
        "Stich 2019, arXiv 1805.09767",
        False,
        "no gradient travels; the replicas are averaged every few steps",
    ),
}
"""Name -> facts; a test holds it to the table of algorithms."""


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
    if isinstance(kind, types.UnionType):
        return " | ".join(_written(each) for each in kind.__args__)
    if typing.get_origin(kind) is Literal:
        return " | ".join(repr(each) for each in kind.__args__)
    return "None" if kind is type(None) else str(kind.__name__)
