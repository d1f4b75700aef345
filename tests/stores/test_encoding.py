"""What servers are told: it comes back as it was, and nothing else is ever built, called or imported."""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table import TABLE

from cases import for_each
from tacit.compressors import QSGD, Dense, ErrorFeedback, Int8, TopK
from tacit.contracts import Compressor, Matrix, PayloadSpec
from tacit.errors import ConfigError, PayloadError, TacitError
from tacit.prediction.extrapolation import Exponential
from tacit.prediction.networks.mp2 import MP2
from tacit.prediction.server_prediction import Pushed, ServerPrediction
from tacit.stores import encoding
from tacit.stores.messages import Hello, MessageSpec, RunSpec, ServerStats
from tacit.stores.server.allowed_types import ALLOWED_TYPES, with_modules
from tacit.topologies import Asynchronous, StaleSynchronous, Star, Synchronous

PIECE = PayloadSpec(TopK(ratio=0.25), 12, torch.bfloat16, True, ((0, 5), (6, 13)))
STARS = [
    Star(),
    Star(Synchronous(1), ErrorFeedback(Int8())),
    Star(Asynchronous(), QSGD(bits=2), "server", 0.04),
    Star(StaleSynchronous(7), by_staleness=True),
]


def again(value: Any, as_type: Any) -> Any:
    return encoding.read(encoding.write(value), as_type, ALLOWED_TYPES)


@pytest.mark.parametrize("star", STARS, ids=str)
def test_all_that_a_worker_says_comes_back_as_it_was(star: Star) -> None:
    model = (("a.weight", (3, 4), "float32", 0), ("b", (), "bfloat16", None))
    run = RunSpec(star, ({"kind": "Adam", "betas": (0.9, 0.999), "nesterov": True},), model)
    hello = Hello(1, 4, 0, "process", 12.5, run)
    found = again(hello, Hello)
    assert found.run.star == star
    assert found.run.model == model
    assert found.run.optimizers == run.optimizers
    assert found == hello
    declared = MessageSpec("a.weight/0", (PIECE,), (PIECE, PayloadSpec(None, 3, torch.float64)), PIECE)
    assert again(declared, MessageSpec) == declared


def test_every_public_compressor_comes_back_as_it_was() -> None:
    for row in TABLE.values():
        assert again(row.compressor, Compressor) == row.compressor


def test_what_a_server_predicts_by_comes_back_as_it_was() -> None:
    from tacit.prediction import Predicted

    by = Predicted(predictor=MP2(file="some.pt"), matrices=(Matrix(0, 3, 4), Matrix(12, 2, 2, 4)))
    codec = ServerPrediction(by, 16, 7, "a.weight", "")
    piece = PayloadSpec(Pushed(codec), 16, torch.float32)
    assert again(piece, PayloadSpec) == piece
    assert again(Exponential(), object) == Exponential()


def test_counts_come_back_with_their_numbers() -> None:
    facts = {"server": 1, "stale": {0: 3, 12: 1}, "busy_seconds": 0.25, "transmitted": None}
    assert again(facts, ServerStats) == facts


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_come_back_to_the_last_bit(x: float) -> None:
    assert again(x, float) == x


def said(name: str, **fields: object) -> bytes:
    return json.dumps({"is": name, **fields}).encode()


CALLED: list[object] = []


class Spy(Dense):
    """A user's own: nobody but its own process knows of it."""

    def __init__(self) -> None:
        CALLED.append(self)


NAMES = [
    "os.system",
    "builtins.eval",
    "subprocess.Popen",
    "tacit_lab.testbed.testbed.Testbed",
    "tacit.Testbed",
    "tacit.stores.server.process.ServerProcess",
    "tacit.compressors.topk.torch",
    "tacit.compressors.topk.TopK",
    "tacit.Message",
    "antigravity.anything",
    f"{Spy.__module__}.{Spy.__qualname__}",
    "",
    "." * 1000,
]


@for_each("name", NAMES)
def test_what_is_not_public_is_neither_built_nor_imported(name: str) -> None:
    before = set(sys.modules)
    with pytest.raises(
        ConfigError, match="a parameter server can read only tacit's compressors and those of modules"
    ):
        encoding.read(said(name), Compressor, ALLOWED_TYPES)
    assert set(sys.modules) == before
    assert not CALLED


def test_a_compressor_of_the_users_own_is_told_and_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"\.Spy is none of them: use one of tacit\.compressors, or start .* --import"
    ):
        encoding.read(encoding.write(Spy.__new__(Spy)), Compressor, ALLOWED_TYPES)
    with pytest.raises(ConfigError, match=r"builtins\.object is not: use one"):
        encoding.write(object())


OPERATORS = """
from dataclasses import dataclass

from tacit.compressors import BF16, Dense


@dataclass(frozen=True)
class Halved(Dense):
    times: int = 1


class Note:
    pass
"""


def test_what_the_operator_imports_may_be_named_and_nothing_else_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "operators_codecs.py").write_text(OPERATORS)
    with pytest.raises(ConfigError, match="--import"):
        encoding.read(said("operators_codecs.Halved", times=2), Compressor, ALLOWED_TYPES)
    allowed = with_modules(["operators_codecs"])
    found = encoding.read(said("operators_codecs.Halved", times=2), Compressor, allowed)
    assert type(found).__name__ == "Halved"
    assert found.times == 2
    assert again(Dense(), Compressor) == encoding.read(encoding.write(Dense()), Compressor, allowed)
    for name in ("operators_codecs.Note", "operators_codecs.dataclass", "operators_codecs.BF16"):
        with pytest.raises(ConfigError, match=r"operators_codecs.* is none of them"):
            encoding.read(said(name), Compressor, allowed)
    assert len(allowed) == len(ALLOWED_TYPES) + 1


def test_a_module_that_cannot_be_imported_or_has_no_compressor_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_codecs.py").write_text("1 / 0")
    for name, says in {
        "no_such_codecs": "--import no_such_codecs cannot be imported .ModuleNotFoundError",
        "broken_codecs": "--import broken_codecs cannot be imported .ZeroDivisionError",
        "json": "--import json has no compressor",
    }.items():
        with pytest.raises(ConfigError, match=says):
            with_modules([name])


TOPK = "tacit.TopK"
DENSE = {"is": "tacit.Dense"}


@for_each(
    ("text", "says"),
    [
        (b"", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (pickle.dumps({"worker": 1}), "no JSON"),
        (b"[" * 200_000, "no JSON"),
        (b'{"a":' * 50_000, "no JSON"),
        (b"NaN", "no finite number"),
        (b"-Infinity", "no finite number"),
        (b"9" * 100_000, "no JSON"),
        (b"1e999", "belongs"),
        (b"null", "belongs"),
        (b"{}", "belongs"),
        (b'{"is": 5}', "belongs"),
        (said(TOPK), "of another version"),
        (said(TOPK, ratio=0.1, values=DENSE, more=1), "of another version"),
        (said(TOPK, ratio="x", values=DENSE, chunk=None), "where float belongs"),
        (said(TOPK, ratio=True, values=DENSE, chunk=None), "where float belongs"),
        (said(TOPK, ratio=1e999, values=DENSE, chunk=None), "no finite number"),
        (said(TOPK, ratio=-1, values=DENSE, chunk=None), "ratio=-1"),
        (said("tacit.Synchronous", backup_workers=0), "where Compressor belongs"),
        (said("tacit.MP2", file=""), "where Compressor belongs"),
    ],
    ids=str,
)
def test_what_is_malformed_is_refused(text: bytes, says: str) -> None:
    with pytest.raises(TacitError, match=says):
        encoding.read(text, Compressor, ALLOWED_TYPES)


@for_each(
    ("plain", "as_type"),
    [
        ([1, 2, 3], tuple[int, int]),
        ([1, "2"], tuple[int, ...]),
        ({"1": 2}, tuple[int, ...]),
        ({"x": 1}, dict[int, int]),
        ({"-1": 1}, dict[int, int]),
        ({"9" * 30: 1}, dict[int, int]),
        ("float33", torch.dtype),
        (["float32"], torch.dtype),
        (1.0, int),
        (False, int),
        (0, bool),
        (None, int),
        ("x" * 10**6, int),
    ],
    ids=lambda x: str(x)[:20],
)
def test_each_value_is_of_its_declared_type(plain: object, as_type: Any) -> None:
    with pytest.raises(PayloadError) as error:
        encoding.read(json.dumps(plain).encode(), as_type, ALLOWED_TYPES)
    assert len(str(error.value)) < 300


leaves = st.none() | st.booleans() | st.floats() | st.text()
nested = st.recursive(leaves, lambda x: st.lists(x) | st.dictionaries(st.text() | st.just("is"), x))


@given(nested)
def test_whatever_is_sent_is_read_or_refused(plain: object) -> None:
    text = json.dumps(plain).encode()
    for as_type in (Hello, MessageSpec, Compressor, ServerStats):
        with contextlib.suppress(TacitError):
            encoding.read(text, as_type, ALLOWED_TYPES)
