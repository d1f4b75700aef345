"""Texts of `mp2` that meant what is `lowbit` now are refused, and its name alone says so once."""

import logging
import re

import pytest

import tacit
from cases import for_each
from tacit.algorithms.options import old_texts


@for_each(
    ("text", "now"),
    [
        ("mp2:bits=2,sync_every=2", "lowbit:bits=2,sync_every=2"),
        ("mp2:late=1", "lowbit:late=1"),
        ("mp2:entropy=true", "lowbit:entropy=true"),
        ("mp2:bound=0", "lowbit:bound=0"),
        ("mp2:variance=local", "lowbit:variance=local"),
        ("mp2:predictor=least-squares,sync_every=2", "lowbit:predictor=least-squares,sync_every=2"),
        ("mp2:form=quantized", "lowbit"),
        ("mp2:form=paper", "mp2"),
        ("mp2:form=paper,budget=0.2,predictor=own", "mp2:budget=0.2,predictor=own"),
        ("mp2:form=paper,bits=3", "lowbit:bits=3"),
        ("mp2:budget=0.2,bits=3", "lowbit:bits=3"),
    ],
)
def test_what_had_another_meaning_is_refused_with_what_to_write(text: str, now: str) -> None:
    says = "mp2 is the paper's method alone now, and what it was by default before is lowbit: write "
    with pytest.raises(tacit.ConfigError, match=re.escape(says + now) + "$"):
        tacit.parse(text)


def test_what_was_refused_before_and_is_not_now_is_taken_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    old_texts._say_once.cache_clear()
    tacit.parse("mp2:budget=0.2")
    tacit.parse("mp2:predictor=linear,sync_every=4")
    tacit.algorithms.mp2()
    assert not caplog.messages


@for_each("text", ["mp2", "mp2:sync_every=2"])
def test_what_has_another_meaning_says_so_once(text: str, caplog: pytest.LogCaptureFixture) -> None:
    old_texts._say_once.cache_clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tacit"):
        for _ in range(2):
            assert tacit.parse(text) != tacit.parse(text.replace("mp2", "lowbit"))
    (said,) = caplog.messages
    assert said.startswith("mp2 has another meaning than before")
    assert said.endswith("is lowbit")
