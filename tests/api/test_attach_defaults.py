"""The strategy of `attach` and `from_env` where nothing is named."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

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


def test_a_rank_that_is_alone_trains_with_ddp(caplog: pytest.LogCaptureFixture) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with caplog.at_level(logging.WARNING, "tacit"), tacit.attach(model, optimizer) as session:
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            assert session.strategy == tacit.parse("ddp")
            assert session.metrics()["steps"] == 1
    finally:
        dist.destroy_process_group()
    assert [record.getMessage() for record in caplog.records] == [
        "'auto' has nothing to choose, as this rank is alone: training with plain DDP ('ddp')"
    ]
