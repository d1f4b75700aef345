"""Features of models and scripts by families of strategies, on four real ranks: right, or refused by name."""

import pytest
from feature_checks import FAMILIES, REFUSED
from features import FEATURES
from launching import Ended, ranks

WORLD = 4


@pytest.fixture(scope="module")
def ended() -> list[Ended]:
    return ranks("feature_checks.py", WORLD, "0", "1", seconds=560)


@pytest.mark.parametrize("name", FEATURES)
def test_every_family_is_right_or_refuses_by_name(name: str, ended: list[Ended]) -> None:
    said = {each["feature"]: each["wrong"] for each in ended[0].said}
    assert name in said, f"the ranks did not get there:\n{ended[0].text[-3000:]}"
    wrong: dict[str, str] = said[name]  # type: ignore[assignment]
    assert not wrong, "\n".join(f"{family}: {error}" for family, error in wrong.items())


def test_the_ranks_end_well(ended: list[Ended]) -> None:
    assert [each.code for each in ended] == [0] * WORLD


def test_what_is_refused_is_in_the_table() -> None:
    assert REFUSED.keys() <= FEATURES.keys()
    assert all(families <= FAMILIES.keys() for families, _ in REFUSED.values())
