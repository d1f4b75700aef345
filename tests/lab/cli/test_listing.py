"""`tacit list`, and the facts that it tells."""

import json
import re
from typing import Literal, get_args

import pytest

from in_process_command import called
from tacit import algorithms
from tacit.algorithms import registry
from tacit.compressors import Dense, OuterMix, Tracking
from tacit.contracts import WORLD
from tacit.prediction import Nowcast
from tacit.strategy import Strategy
from tacit.topologies import Star
from tacit_lab import algorithm_facts as facts
from tacit_lab.parameter_meanings import BY_ALGORITHM, BY_NAME


def test_every_algorithm_has_an_entry_and_no_entry_is_stale() -> None:
    assert list(registry.ENTRIES) == algorithms.known()


@pytest.mark.parametrize("name", algorithms.known())
def test_an_entry_says_what_the_strategy_does(name: str) -> None:
    entry = registry.ENTRIES[name]
    assert entry.family in get_args(registry.Family)
    assert "20" in entry.paper
    required = [each.name for each in facts.parameters_of(name) if each.required]
    if not required:
        levels = algorithms.parse(name).levels
        # A leap is no message, and what is mixed is sent whole.
        whole = (OuterMix, Tracking)
        said = [
            each.inner if isinstance(each, Nowcast) else Dense() if isinstance(each, whole) else each
            for each in (level.compressor for level in levels)
        ]
        assert entry.compresses == any(compressor != Dense() for compressor in said)
        by_node = any(level.topology.scope != WORLD or level.topology.meets != WORLD for level in levels)
        assert (entry.family == "hierarchical") == by_node
        served = isinstance(levels[-1].topology, Star)
        assert (entry.family == "parameter server") == served
        alone = levels[-1].subject == "delta" and not (by_node or served)
        assert (entry.family in ("periodic", "gossip", "predictive")) == alone


def example(ratio: float, rank: int | None = None, way: Literal["a", "b"] = "a") -> Strategy:
    raise NotImplementedError


def test_parameters_are_told_as_they_are_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(algorithms.ALGORITHMS, "example", example)
    assert facts.parameters_of("example") == [
        facts.Parameter("ratio", "float", None, True),
        facts.Parameter("rank", "int | None", None, False),
        facts.Parameter("way", "'a' | 'b'", "a", False),
    ]


def test_every_parameter_has_a_meaning_and_no_meaning_is_stale() -> None:
    told = {
        name: {each.name: each.meaning for each in facts.parameters_of(name)} for name in algorithms.known()
    }
    assert all(meaning for each in told.values() for meaning in each.values())
    for name, own in BY_ALGORITHM.items():
        assert set(own) <= set(told[name])
    general = {(key, meaning) for each in told.values() for key, meaning in each.items()}
    assert set(BY_NAME.items()) <= general


def test_json_lists_what_is_known() -> None:
    done = called("list", "--json")
    assert done.code == 0, done.err
    told = {each["name"]: each for each in json.loads(done.out)}
    assert list(told) == algorithms.known()
    for each in told.values():
        assert set(each) == {
            "name",
            "paper",
            "family",
            "compresses",
            "changes",
            "instead",
            "collective",
            "parameters",
            "accuracy",
        }
    assert told["topk"]["compresses"] is True
    assert told["localsgd"]["family"] == "periodic"
    assert told["ddp"]["collective"] == "DDP's own all-reduce"
    assert told["bf16"]["collective"] == told["powersgd"]["collective"] == "all-reduce"
    assert told["signsgd"]["collective"] == "all-gather"
    for name in ("int8", "qsgd"):
        assert told[name]["collective"].startswith("all-gather, or where it is worth it by two phases")
    for name in ("topk", "dgc", "sign"):
        assert told[name]["collective"] == "all-gather"
    for name in ("stc", "efsign", "onebit"):
        assert told[name]["collective"] == "two phases, which compress the mean too"
    assert told["topk"]["parameters"][0] == {
        "name": "ratio",
        "type": "float",
        "default": 0.01,
        "required": False,
        "meaning": "the share of the entries that travels, above 0 to 1",
    }
    # What is told can be typed: every default is accepted behind the colon.
    for name, each in told.items():
        given = [f"{p['name']}={p['default']}" for p in each["parameters"] if not p["required"]]
        if len(given) == len(each["parameters"]):
            algorithms.parse(":".join(filter(None, (name, ",".join(given)))))


def test_one_algorithm_is_described_with_its_parameters() -> None:
    done = called("list", "topk")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("topk: only the largest entries travel")
    assert (
        "  ratio=0.01                  the share of the entries that travels, above 0 to 1 (float)" in lines
    )
    assert "  bits=None                   of values=qsgd, 2 to 8; None: 4 (int | None)" in lines
    assert any(line.startswith("  ") and "ratio=0.03" in line for line in lines)
    assert [each["name"] for each in json.loads(called("list", "ps", "--json").out)] == ["ps"]
    unknown = called("list", "tokp")
    assert unknown.code == 2
    assert "Did you mean 'topk'" in unknown.err


def test_one_family_alone_and_names_of_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = facts.by_family()["low rank"]
    assert {each["name"] for each in json.loads(called("list", "--family", "low rank", "--json").out)} == {
        *names
    }
    table = called("list", "--family", "low rank").out
    assert "  powersgd " in table
    assert "  topk " not in table
    assert called("list", "3lc").out == called("list", "three-lc").out
    assert algorithms.parse("3lc") == algorithms.parse("three-lc")
    assert "Did you mean 'sparsification'" in called("list", "--family", "sparse").err
    assert "leave one of them out" in called("list", "topk", "--family", "gossip").err


def test_the_table_fits_80_columns_and_has_all_by_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = called("list")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 4 * len(algorithms.known())
    assert "[bold]" not in done.out
    families = {
        line.strip(): at for at, line in enumerate(lines) if line.strip() in get_args(registry.Family)
    }
    assert set(families) == set(get_args(registry.Family))
    for name, entry in registry.ENTRIES.items():
        (at,) = (at for at, line in enumerate(lines) if line.startswith(f"  {name} "))
        assert max((begin, family) for family, begin in families.items() if begin < at)[1] == entry.family
    words = " ".join(done.out.split())
    assert "take qsgd" in words
    assert re.search(r"topk .* [-+]\d+\.\d\d ± \d+\.\d\d cifar10", done.out)
    assert "tacit list NAME" in words
