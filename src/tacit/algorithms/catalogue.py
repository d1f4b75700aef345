"""What is told of every algorithm: where it comes from, what family it is of, and what it changes."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from inspect import Parameter as Declared
from typing import Any, Literal, TypeAlias

from tacit.algorithms import ALGORITHMS, parse
from tacit.compressors.dense import Dense
from tacit.strategy import Strategy, alternatives, parameters
from tacit.topologies import Auto, Flat, Hierarchical, Star, TwoPhase

Family: TypeAlias = Literal[
    "synchronous",
    "quantization",
    "sparsification",
    "low rank",
    "lazy",
    "delayed",
    "periodic",
    "hierarchical",
    "parameter server",
    "predictive",
]


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
    "fp16": Entry("quantization", _SURVEY, True, "gradients travel in half precision: half the bytes"),
    "fp8": Entry(
        "quantization",
        "FP8 formats: Micikevicius et al. 2022, arXiv 2209.05433",
        True,
        "a byte an entry, in 8-bit floating point; the rest is sent later (error feedback)",
    ),
    "int8": Entry(
        "quantization",
        "after Dettmers 2016, arXiv 1511.04561",
        True,
        "a byte an entry, in equal steps of a block's range; the rest is sent later (error feedback)",
    ),
    "sign": Entry(
        "quantization",
        "EF-signSGD: Karimireddy et al. 2019, arXiv 1901.09847",
        True,
        "one bit an entry and one magnitude; the rest is sent later (error feedback)",
    ),
    "efsign": Entry(
        "quantization",
        "dist-EF-blockSGD: Zheng et al. 2019, arXiv 1905.10936",
        True,
        "one bit an entry and a magnitude for each 512; the rest is sent later (error feedback)",
    ),
    "onebit": Entry(
        "quantization",
        "1-bit SGD: Seide et al. 2014, doi 10.21437/Interspeech.2014-274",
        True,
        "one bit an entry, and two means for each 512; the rest is sent later (error feedback)",
    ),
    "signsgd": Entry(
        "quantization",
        "Bernstein et al. 2018, arXiv 1802.04434",
        True,
        "ranks vote on the sign of every entry; each moves by lr, so lr must be small",
    ),
    "qsgd": Entry(
        "quantization",
        "QSGD: Alistarh et al. 2017, arXiv 1610.02132",
        True,
        "a few levels an entry, rounded at random so that the mean is right; no residual is kept",
    ),
    "terngrad": Entry(
        "quantization",
        "TernGrad: Wen et al. 2017, arXiv 1705.07878",
        True,
        "plus, minus or nothing, at random; no residual is kept",
    ),
    "natural": Entry(
        "quantization",
        "Natural compression: Horvath et al. 2022, arXiv 1905.10988",
        True,
        "sign and a power of two for each entry, at random: 9 bits; no residual is kept",
    ),
    "topk": Entry(
        "sparsification",
        "Aji & Heafield 2017, arXiv 1704.05021; Stich et al. 2018, arXiv 1809.07599",
        True,
        "only the largest entries travel; the rest is sent later (error feedback)",
    ),
    "gtopk": Entry(
        "sparsification",
        "gTop-k: Shi et al. 2019, arXiv 1901.04359",
        True,
        "of all ranks' largest entries only the largest are kept, in log2 P swaps; the rest is sent later",
    ),
    "dgc": Entry(
        "sparsification",
        "DGC: Lin et al. 2018, arXiv 1712.01887",
        True,
        "only the largest entries of the accumulated momentum travel; the optimizer's is taken over",
    ),
    "randomk": Entry(
        "sparsification",
        "Stich et al. 2018, arXiv 1809.07599",
        True,
        "only entries drawn at random travel, the same on all ranks; the rest is sent later (error feedback)",
    ),
    "threshold": Entry(
        "sparsification",
        "Strom, Interspeech 2015",
        True,
        "entries that reach a threshold travel as plus or minus it; the rest is sent later (error feedback)",
    ),
    "stc": Entry(
        "sparsification",
        "STC: Sattler et al. 2019, arXiv 1903.02891",
        True,
        "only the largest entries travel, as signs with one magnitude; the rest is sent later",
    ),
    "powersgd": Entry(
        "low rank",
        "PowerSGD: Vogels et al. 2019, arXiv 1905.13727",
        True,
        "each matrix travels as a product of two thin ones; the rest is sent later (error feedback)",
    ),
    "lag": Entry(
        "lazy",
        "LAG: Chen et al. 2018, arXiv 1805.09965",
        True,
        "gradients stand, and do not travel, until they have changed enough; for large batches",
    ),
    "pipesgd": Entry(
        "delayed",
        "Pipe-SGD: Li et al. 2018, arXiv 1811.03619",
        False,
        "gradients travel during the next step, which applies the mean of the step before it",
    ),
    "localsgd": Entry(
        "periodic",
        "Stich 2019, arXiv 1805.09767",
        False,
        "no gradient travels; the replicas are averaged every few steps",
    ),
    "postlocal": Entry(
        "periodic",
        "Post-local SGD: Lin et al. 2020, arXiv 1808.07217",
        False,
        "synchronous up to a step; from then on the replicas are averaged every few steps",
    ),
    "adacomm": Entry(
        "periodic",
        "AdaComm: Wang & Joshi 2019, arXiv 1810.08313",
        False,
        "the replicas are averaged every few steps, and more often as the loss falls",
    ),
    "easgd": Entry(
        "periodic",
        "EASGD: Zhang et al. 2015, arXiv 1412.6651",
        False,
        "replicas stay apart; they and a centre pull at each other every few steps",
    ),
    "slowmo": Entry(
        "periodic",
        "SlowMo: Wang et al. 2020, arXiv 1910.00643",
        False,
        "the replicas are averaged every few steps, with momentum over the averages",
    ),
    "diloco": Entry(
        "periodic",
        "DiLoCo: Douillard et al. 2023, arXiv 2311.08105",
        False,
        "an outer optimizer steps by the replicas' mean progress, every few dozen steps",
    ),
    "streaming-diloco": Entry(
        "periodic",
        "Streaming DiLoCo: Douillard et al. 2025, arXiv 2501.18512",
        True,
        "DiLoCo in fragments that take turns, travel in 4 bits, and land some steps late",
    ),
    "overlap-localsgd": Entry(
        "periodic",
        "Overlap-Local-SGD: Wang et al. 2020, arXiv 2002.09539",
        False,
        "replicas are pulled to an anchor that is averaged while they train on",
    ),
    "odsgd": Entry(
        "periodic",
        "OD-SGD: Xu et al. 2020, arXiv 2005.06728",
        False,
        "each replica steps at once by its own gradient; the others' follow one step late",
    ),
    "ednncomm": Entry(
        "hierarchical",
        "eDNNcomm: Moreno-Alvarez et al. 2023, doi 10.1109/TNNLS.2023.3309735",
        False,
        "gradients are averaged inside each node; between nodes, the parameters, once an epoch",
    ),
    "daso": Entry(
        "hierarchical",
        "DASO: Coquelin et al. 2021, arXiv 2104.05588",
        False,
        "gradients are averaged inside each node; between nodes the parameters, every few steps and late",
    ),
    "ps": Entry(
        "parameter server",
        "Li et al. 2014, OSDI; backup workers: Chen et al. 2016, arXiv 1604.00981",
        False,
        "a server averages the gradients of all workers, in every step",
    ),
    "ps-async": Entry(
        "parameter server",
        "Downpour SGD: Dean et al. 2012, NIPS",
        False,
        "a server keeps the parameters; workers push their steps and pull, and wait for nobody",
    ),
    "ps-ssp": Entry(
        "parameter server",
        "SSP: Ho et al. 2013, NIPS",
        False,
        "a server keeps the parameters; no worker is more than a few steps ahead of the slowest",
    ),
    "ps-topk": Entry(
        "parameter server",
        "Aji & Heafield 2017, arXiv 1704.05021; Stich et al. 2018, arXiv 1809.07599",
        True,
        "topk where a server averages: the union of the largest entries comes back",
    ),
    "ps-dgc": Entry(
        "parameter server",
        "DGC: Lin et al. 2018, arXiv 1712.01887",
        True,
        "dgc where a server averages: the union of the largest entries comes back",
    ),
    "mp2": Entry(
        "predictive",
        "MP2: Liu et al., Computer Networks 255, 2024, 110883",
        True,
        "a moving part of the progress travels; every rank predicts the rest, all alike",
    ),
    "wnn": Entry(
        "predictive",
        "WNN: Jang et al., ICML 2023",
        False,
        "after five periods all replicas leap five ahead, so that training may end earlier",
    ),
    "predictive": Entry(
        "predictive",
        "ours; compressed differences: EF21, arXiv 2106.05203; DIANA, arXiv 1901.09269",
        True,
        "the largest of what the last round's progress does not foretell; each replica keeps its rest",
    ),
}
"""Name -> facts; a test holds it to the table of algorithms."""


def way_of(name: str) -> str:
    """By which collectives an algorithm's messages travel, as it is by its name alone.

    Where the choice is the session's, both ways are named.
    """
    if any(each.required for each in parameters_of(name)):
        return "what its parameters say"
    return "; ".join(dict.fromkeys(map(_way, parse(name).levels)))


def _way(level: Strategy) -> str:
    if level.subject == "nothing":
        return "DDP's own all-reduce"
    if isinstance(level.topology, Star):
        return "push and pull, by parameter servers"
    if not isinstance(level.topology, Auto | Flat | Hierarchical | TwoPhase):
        return f"{level.topology}"
    options = level.topology.options([level.compressor, level.compressor.exempted() or Dense()])
    if len(options.topologies) > 1:
        return "all-gather, or where it is worth it by two phases, which compress the mean too"
    if isinstance(level.topology, TwoPhase):
        return "two phases, which compress the mean too"
    one_shot = level.compressor.one_shot(0)
    return "all-reduce" if one_shot is None or one_shot.codec.additive else "all-gather"


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
