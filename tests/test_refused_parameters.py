"""Whatever cannot be as a parameter is refused where it is given, by an error that names it."""

import dataclasses
import math
import types
import typing
from typing import Any, Literal

import pytest
import torch

import tacit.compressors
from cases import for_each
from tacit import algorithms
from tacit.algorithms.options.text import parameters
from tacit.compressors import (
    EF21,
    AdamMomentum,
    ByteCoded,
    Cascade,
    Clip,
    Dense,
    DifferenceCopy,
    ErrorFeedback,
    InParts,
    Int8,
    MeanFeedback,
    MomentumCorrection,
    Partition,
    PublicCopy,
    Scheduled,
    SignOfMean,
    Squeezed,
    Threshold,
    TopK,
)
from tacit.compressors.wrappers import Part
from tacit.contracts import Compressor, Matrix
from tacit.errors import ConfigError
from tacit.prediction import Nowcast, PredictiveCoding
from tacit.strategy import Strategy

NEEDY = {
    "ByteCoded": ByteCoded(Int8()),
    "InParts": InParts(TopK()),
    "Clip": Clip(Dense(), 1.0),
    "ErrorFeedback": ErrorFeedback(Dense()),
    "MeanFeedback": MeanFeedback(Dense()),
    "AdamMomentum": AdamMomentum(Dense(), Dense()),
    "MomentumCorrection": MomentumCorrection(Dense()),
    "EF21": EF21(Dense()),
    "SignOfMean": SignOfMean(Dense()),
    "Nowcast": Nowcast(Dense()),
    "DifferenceCopy": DifferenceCopy(Dense()),
    "PublicCopy": PublicCopy(Dense()),
    "Squeezed": Squeezed(Dense()),
    "Scheduled": Scheduled(((3, Dense()),), Dense()),
    "PredictiveCoding": PredictiveCoding(Dense()),
    "Partition": Partition(Dense(), (Part(Dense(), ((0, 5),)),)),
    "Cascade": Cascade(Dense(), Dense()),
    "Threshold": Threshold(tau=0.1),
}
"""What cannot be made without being given something."""

NUMBERS = ("1", [1], {}, 1j, torch.ones(1), True, False, math.nan, math.inf, -math.inf, -1)


def bad(kind: Any) -> list[object]:
    """What is not of the declared type, or never in range."""
    origin, words = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        kinds = [k for k in words if k is not type(None)]
        found = bad(kinds[0])
        return [each for each in found if each is not None or type(None) not in words]
    if origin is Literal:
        return ["nonsense", 7, -1, True, 512.5, b"x", ["x"]]
    if kind is float:
        return [*NUMBERS, None]
    if kind is int:
        return [*NUMBERS, None, 2.5, 4.0, 0]
    if kind is bool:
        return [1, 0, "yes", None, 1.0]
    if isinstance(kind, type) and issubclass(kind, Compressor):
        return [None, "topk", TopK, 5, ()]
    return [None, 5, "x", [], (5,), ("x", 3)]  # tuples of what the class says


MAY_BE_NONE = (
    "warmup_steps",
    "fragment_sync_delay",
    "patience",
    "warmup_epochs",
    "cooldown_epochs",
    "full_rounds",
    "drops",
    "late",
    "backup_workers",
    "bound",
    "refresh",
)
"""Parameters of algorithms of which 0 is a value: none."""


def bad_fields(made: Compressor) -> list[tuple[str, object]]:
    hints = typing.get_type_hints(type(made))
    return [
        (each.name, given)
        for each in dataclasses.fields(made)  # type: ignore[arg-type]
        for given in bad(hints[each.name])
        if each.name not in ("full_steps", "drops", "refresh") or given != 0 or given is False
    ]


@pytest.mark.parametrize("name", tacit.compressors.__all__)
def test_a_compressor_refuses_what_cannot_be(name: str) -> None:
    made = NEEDY.get(name) or getattr(tacit.compressors, name)()
    values = bad_fields(made)
    if not values:
        return

    @for_each(("field", "given"), values)
    def refuses(field: str, given: object) -> None:
        with pytest.raises(ConfigError) as told:
            dataclasses.replace(made, **{field: given})
        shown = given.__name__ if isinstance(given, type) else repr(given)
        assert field in str(told.value)
        assert shown in str(told.value)

    refuses()


@for_each(
    ("make", "says"),
    [
        (lambda: TopK(ratio=1.0001), r"ratio=1.0001 is not in \(0, 1\]: .*write 0.01"),
        (lambda: TopK(ratio=0), r"ratio=0 is not in \(0, 1\]"),
        (lambda: Threshold(tau=0.0), "tau=0.0 is not a finite number above 0"),
        (lambda: Threshold(tau=1.0, capacity=2), r"capacity=2 is not in \(0, 1\]"),
        (lambda: Clip(Dense(), 0), "max_norm=0 is not a finite number above 0"),
        (lambda: MomentumCorrection(Dense(), momentum=1.0), r"momentum=1.0 is not in \(0, 1\)"),
        (lambda: tacit.compressors.Blockwise(bits=1), "bits=1 is not a whole number, from 2 to 8: .*write 3"),
        (lambda: tacit.compressors.Blockwise(bits=9), "bits=9 is not a whole number, from 2 to 8: .*write 3"),
        (lambda: tacit.compressors.QSGD(bits=99), "bits=99 is not a whole number, from 2 to 8: .*write 4"),
        (lambda: tacit.compressors.QSGD(bucket=1 << 17), "bucket=131072 is not a power of two"),
        (lambda: tacit.compressors.TernGrad(clip=0.99), "clip=0.99 is not a finite number, 1 or more"),
        (lambda: tacit.compressors.PowerSGD(rank=0), "rank=0 is not a whole number, 1 or more"),
        (lambda: ErrorFeedback(TopK), "inner=TopK is no compressor: write a value"),
        (lambda: Part(Dense(), ((0, 10), (5, 20))), r"spans=\(\(0, 10\), \(5, 20\)\) overlap"),
        (lambda: Strategy(compressor="topk"), "compressor='topk' is no compressor"),
        (lambda: Strategy(rounds=8), r"rounds=8 is no Rounds: .*Every\(8\)"),
        (lambda: Strategy(subject="parameters"), "unknown subject 'parameters'"),
    ],
)
def test_the_error_says_the_range(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def bad_parameters(name: str) -> list[tuple[str, object]]:
    return [
        (key, given)
        for key, (kind, _) in parameters(algorithms.ALGORITHMS[name]).items()
        for given in bad(kind)
        if not (key in MAY_BE_NONE and given == 0 and given is not False)
    ]


@pytest.mark.parametrize("name", [name for name in algorithms.known() if bad_parameters(name)])
def test_an_algorithm_refuses_what_cannot_be(name: str) -> None:
    @for_each(("key", "given"), bad_parameters(name))
    def refuses(key: str, given: object) -> None:
        with pytest.raises(ConfigError) as told:
            algorithms.ALGORITHMS[name](**{key: given})
        assert f"{key}={given!r}" in str(told.value) or f"unknown {key} {given!r}" in str(told.value)

    refuses()


@for_each("text", ["nan", "inf", "-inf", "-1", "1e400", "x", "None", "[1]", "0x8", "1j"])
@pytest.mark.parametrize("name", algorithms.known())
def test_a_text_that_cannot_be_is_refused(name: str, text: str) -> None:
    for key, (kind, _) in parameters(algorithms.ALGORITHMS[name]).items():
        if text == "None" and type(None) in typing.get_args(kind):
            continue
        with pytest.raises(ConfigError) as told:
            algorithms.parse(f"{name}:{key}={text}")
        assert key in str(told.value)
        assert text.lstrip("-1") in str(told.value) or "inf" in str(told.value)


@for_each(
    ("text", "says"),
    [
        ("qsgd:bits=99", "bits=99 is not a whole number, from 2 to 8"),
        ("qsgd:bucket=100", "bucket=100 is not a power of two"),
        ("powersgd:rank=0", "rank=0 is not a whole number, 1 or more"),
        ("powersgd:min_compression_rate=0", "min_compression_rate=0.0 is not a finite number above 0"),
        ("dgc:momentum=1", r"momentum=1.0 is not in \(0, 1\)"),
        ("dgc:max_norm=0", "max_norm=0.0 is not a finite number above 0"),
        ("terngrad:clip=0.5", "clip=0.5 is not a finite number, 1 or more"),
        ("threshold:tau=0", "tau=0.0 is not a finite number above 0"),
        ("fp8:format=e4m4", "unknown value of fp8:format 'e4m4'"),
        ("ednncomm:sync_every=0", "sync_every=0 is not possible: write 1 or more"),
        ("ednncomm:fragments=4", "from 1 to 1: with sync_every='auto' there is no period"),
        ("ednncomm:sync_every=4,fragments=8", "fragments=8 do not fit into sync_every=4 steps"),
        ("localsgd:sync_every=4,fragment_sync_delay=5", r"write Delayed\(steps=4\) at most"),
        ("localsgd:fragment_sync_delay=-1", "fragment_sync_delay=-1 is not a whole number, 0 or more"),
    ],
)
def test_a_text_out_of_range_says_the_range(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        algorithms.parse(text)


def test_matrices_are_not_for_users() -> None:
    assert tacit.compressors.PowerSGD(matrices=(Matrix(0, 2, 2),)).matrices
