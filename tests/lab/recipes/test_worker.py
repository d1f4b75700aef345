from __future__ import annotations

import pytest

from tacit_lab import recipes
from tacit_lab.recipes.training import Task
from tacit_lab.recipes.worker import time_limit


def limit(cluster: str) -> float:
    recipe = recipes.get("digits")
    task = Task(strategy=None, epochs=1, seed=0, target=0.9, cluster=cluster, shaped=True)
    return time_limit(60.0, task, recipe).total_seconds()


def test_a_silent_peer_has_the_time_that_a_model_takes_where_packets_are_lost() -> None:
    bits = 32 * sum(each.numel() for each in recipes.get("digits").model(0).parameters())
    assert limit("4x1@100mbit,100ms") == limit("local:4") == 60
    assert limit("4x1@100mbit,100ms,1%loss") == pytest.approx(60 + 4 * bits / 0.71e6, rel=0.01)
