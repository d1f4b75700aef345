"""How growth is told from measurements."""

import pytest

from scaling import exponent, growth


def row(arm: str, ranks: int, value: float, ranks_per_node: int = 1) -> dict[str, object]:
    return {
        "ladder": "flat", "arm": arm, "ranks": ranks, "ranks_per_node": ranks_per_node, "step_ms": value,
        "beyond_ms": value - 1.0, "mb_per_rank": 3.0, "mb_by_servers": 0.0,
    }  # fmt: skip


def test_the_exponent_of_a_power_is_found() -> None:
    assert exponent({ranks: 5.0 * ranks**0.75 for ranks in (2, 4, 8, 16)}) == pytest.approx(0.75)
    assert exponent({2: 7.0, 16: 7.0}) == pytest.approx(0.0)
    assert exponent({2: 7.0}) is None
    assert exponent({2: 0.0, 4: 1.0}) is None


def test_growth_is_of_clusters_with_equal_nodes() -> None:
    rows = [row("ddp", ranks, float(ranks)) for ranks in (2, 4, 8)]
    (found,) = growth([*rows, row("ddp", 16, 1000.0, ranks_per_node=4)])
    assert found["ranks"] == [2, 4, 8]
    assert found["step_ms"] == pytest.approx(1.0)
    assert found["mb_per_rank"] == pytest.approx(0.0)
    assert found["mb_by_servers"] is None
