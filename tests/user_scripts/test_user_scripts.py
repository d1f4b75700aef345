"""Features of people's scripts by families of strategies, on two real ranks: right, or the sentence.

A row of the table in `all_rows.py` runs with one family, the next row with the next; `--all` runs each with
every family that can have it: `pytest tests/user_scripts --all -k pruning`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from all_rows import TABLE
from user_script import FAMILIES

from forks import Fork

Ran = Callable[[str, str], dict[str, Any]]
PENDING: dict[tuple[str, str], str] = {}
"""Row and family -> why it is wrong still. It only gets shorter."""


@pytest.fixture(scope="module")
def ran() -> Iterator[Ran]:
    """Runs a row with a family."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    words = [sys.executable, str(Path(__file__).with_name("row_ranks.py"))]
    with (
        tempfile.TemporaryFile("w+") as told,
        Fork(words, env=os.environ | {}, stderr=told, **pipes) as process,
    ):

        def run(name: str, family: str) -> dict[str, Any]:
            begin = told.tell()
            print(json.dumps([name, family]), file=process.stdin, flush=True)
            line = process.stdout.readline()
            told.seek(begin)
            text = told.read()
            assert line, f"who runs the rows has ended:\n{text}"
            return {**json.loads(line), "log": text}

        yield run
        process.stdin.close()


def wrong(name: str, family: str, ran: Ran) -> str:
    """What is wrong with it; empty where nothing is."""
    found = ran(name, family)
    ranks, words = found["ranks"], TABLE[name].words(family)
    if None in ranks:
        lost = [rank for rank, each in enumerate(ranks) if each is None]
        others = "\n".join(each["trace"] for each in ranks if each is not None)
        return f"ranks {lost} did not end, after {found['seconds']:.0f} s:\n{others}{found['log']}"
    errors = [each["error"] for each in ranks]
    if words is None:
        return "\n".join(f"rank {rank}:\n{each['trace']}" for rank, each in enumerate(ranks) if each["trace"])
    raw = [each["trace"] for each in ranks if each["trace"] and not each["ours"]]
    if (raw and not TABLE[name].torch) or (None in errors and any(errors)):
        return f"not refused on all ranks alike with {words!r}:\n" + "\n".join(
            each["trace"] for each in ranks
        )
    heard = [text for each in ranks for text in (each["error"], *each["said"]) if text]
    return "" if any(words in text for text in heard) else f"nobody has said {words!r}, but {heard}"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TABLE)
def test_it_is_right_or_refused_by_name(name: str, ran: Ran, request: pytest.FixtureRequest) -> None:
    families = TABLE[name].families
    if not request.config.getoption("--all", default=False):
        families = [families[[*TABLE].index(name) % len(families)]]
    errors = {family: wrong(name, family, ran) for family in families}
    mended = [family for family in families if (name, family) in PENDING and not errors[family]]
    assert not mended, f"right now, and in PENDING still: {mended}"
    told = [f"== {family} ==\n{errors[family]}" for family in families if errors[family]]
    new = [family for family in families if errors[family] and (name, family) not in PENDING]
    assert not new, "\n".join(told)
    if told:
        pytest.xfail("; ".join(PENDING[name, family] for family in families if errors[family]))


def test_the_table_names_families_that_there_are() -> None:
    named = {
        family
        for row in TABLE.values()
        for families in (*row.says.values(), row.without)
        for family in families
    }
    assert named <= {*FAMILIES, *(family for row in TABLE.values() for family in row.also)}
    assert PENDING.keys() <= {(name, family) for name, row in TABLE.items() for family in row.families}
