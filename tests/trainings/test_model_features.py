"""Features of models and scripts by families of strategies, on real ranks: right, or refused by name."""

import pytest
from model_feature_checks import BY_NODE, FAMILIES, REFUSED
from model_features import FEATURES

from rank_processes import Ended, ranks

WORLDS = {2: ["ddp", *(family for family in FAMILIES if family not in BY_NODE)], 4: sorted(BY_NODE)}
"""World -> the families that train there: those by node on two nodes of two ranks."""


@pytest.fixture(scope="module", params=WORLDS)
def ended(request: pytest.FixtureRequest) -> list[Ended]:
    return ranks("model_feature_checks.py", request.param, ";".join(WORLDS[request.param]), seconds=560)


@pytest.mark.parametrize("name", FEATURES)
def test_every_family_is_right_or_refuses_by_name(name: str, ended: list[Ended]) -> None:
    said = {each["feature"]: each["wrong"] for each in ended[0].said}
    assert name in said, f"the ranks did not get there:\n{ended[0].text[-3000:]}"
    wrong: dict[str, str] = said[name]  # type: ignore[assignment]
    assert not wrong, "\n".join(f"{family}: {error}" for family, error in wrong.items())


def test_the_ranks_end_well(ended: list[Ended]) -> None:
    assert [each.code for each in ended] == [0] * len(ended)


def test_what_is_refused_is_in_the_table() -> None:
    assert REFUSED.keys() <= FEATURES.keys()
    assert all(families <= FAMILIES.keys() for each in REFUSED.values() for families, _ in each)
