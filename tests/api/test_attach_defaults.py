"""What `attach` and `from_env` take where nothing is named."""

import logging

import pytest

import tacit
from tacit.environment import ALGORITHM


def test_from_env_says_once_that_nothing_is_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("ONE_VARIABLE", raising=False)
    with caplog.at_level(logging.WARNING, "tacit"):
        assert [tacit.from_env("ONE_VARIABLE").name for _ in range(3)] == ["ddp"] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "ONE_VARIABLE is not set: training with plain DDP ('ddp')"
    ]


def test_from_env_says_nothing_where_ddp_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ALGORITHM, "ddp")
    with caplog.at_level(logging.WARNING, "tacit"):
        assert tacit.from_env().name == "ddp"
    assert not caplog.records
