"""Checkpoints of version 3, which tacit wrote with other names: they load, and go on bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ranks
from version3 import CASES, unpacked

import tacit
from tacit.checkpoint.old_checkpoints import CLASSES, FIELDS, KEYS, renewed, strategy_text
from tacit.errors import CheckpointError

FILE = Path(__file__).resolve().parent / "version3.json"
WORLD = 4


@pytest.fixture(scope="module")
def saved() -> dict[str, dict[str, Any]]:
    """By case, the joined state that version 3 saved."""
    return {case: unpacked(each)["state"] for case, each in json.loads(FILE.read_text()).items()}


def test_they_go_on_bit_for_bit_as_they_did_then(saved: dict[str, dict[str, Any]]) -> None:
    ended = ranks("version3.py", WORLD, "read", str(FILE))
    for rank, each in enumerate(ended):
        assert each.code == 0, each.text[-3000:]
        # Signs travel otherwise since: where a block has zeros, zeros stay zeros.
        expected = {case: (case != "onebit", 4) for case in CASES}
        assert {said["case"]: (said["same"], said["version"]) for said in each.said} == expected, (
            f"rank {rank}"
        )
    keys: dict[str, set[str]] = {}
    for each in ended:
        for said in each.said:
            new = {key for key in said["keys"] if not key.rpartition("/")[2].startswith("own")}  # type: ignore[attr-defined]
            keys.setdefault(str(said["case"]), set()).update(new)
    assert {case: set(renewed(state)) for case, state in saved.items()} == keys


def test_each_old_name_is_in_what_was_saved(saved: dict[str, dict[str, Any]]) -> None:
    keys = {key for state in saved.values() for key in state}
    assert keys >= KEYS.keys()
    assert {key.rpartition("/")[2] for key in keys} >= FIELDS.keys()
    assert any(json.loads(state["under way"])[-1] for state in saved.values())
    texts = " ".join(state["strategy"] for state in saved.values())
    assert {name for name in CLASSES if f"{name}(" in texts} >= {"Inside", "Keep", "Phases"}


def test_the_tensors_are_the_same(saved: dict[str, dict[str, Any]]) -> None:
    for state in saved.values():
        new = renewed(state)
        assert len(new) == len(state)
        assert [id(each) for each in new.values() if torch.is_tensor(each)] == [
            id(each) for each in state.values() if torch.is_tensor(each)
        ]
        assert renewed(new) == new


def test_a_strategys_text_gets_the_present_names() -> None:
    old = (
        "Strategy(subject='progress', rounds=Inside(schedule=Cycling(period=4)), compressor=Then("
        "first=Select(main=TopK(ratio=0.1)), second=Phases(phases=(), then=Dense())), merge=Keep(), "
        "then=Adopt(whole=True), name='progress')"
    )
    assert strategy_text(old) == (
        "Strategy(subject='delta', rounds=NodeRounds(schedule=Cycling(period=4)), compressor=Cascade("
        "first=Partition(main=TopK(ratio=0.1)), second=Scheduled(phases=(), then=Dense())), "
        "merge=LocalResidual(), then=ServerParams(whole=True), name='progress')"
    )
    assert strategy_text(["Inside(x)", "Every(sync_every=4)"]) == ["NodeRounds(x)", "Every(sync_every=4)"]
    assert all(hasattr(tacit, name) for name in CLASSES.values())


def test_a_predictor_of_before_rescaling_is_one_that_does_not() -> None:
    (level,) = tacit.parse("mp2:form=paper,rescale=false,sync_every=4").levels
    assert renewed({"version": 4, "strategy": repr(level).replace(", rescale=False", "")})[
        "strategy"
    ] == repr(level)


def test_a_strategy_of_before_variances_is_one_that_leaves_them() -> None:
    (level,) = tacit.parse("mp2:variance=local").levels
    text = repr(level)
    assert ", variance='local'" in text
    assert renewed({"version": 4, "strategy": text.replace(", variance='local'", "")})["strategy"] == text
    assert strategy_text(text.replace(", variance='local'", "")) == text


def test_states_of_both_versions_are_joined_by_the_present_names(saved: dict[str, dict[str, Any]]) -> None:
    old = saved["diloco"]
    one = {key: each for key, each in old.items() if not key.startswith(("rank2/", "rank3/"))}
    other = {key: each for key, each in renewed(old).items() if not key.startswith(("rank0/", "rank1/"))}
    assert tacit.join_states([one, other]).keys() == renewed(old).keys()


@pytest.mark.parametrize(
    ("version", "says"),
    [
        (2, "is of version 2, and this tacit reads versions 3 and 4: train on with"),
        (5, "reads up to 4: update"),
    ],
)
def test_other_versions_are_refused(version: int, says: str, saved: dict[str, dict[str, Any]]) -> None:
    from test_resize import STRATEGIES, Run

    new = Run(STRATEGIES["topk"], 2, 2)
    with pytest.raises(CheckpointError, match=says):
        new.load(saved["topk"] | {"version": version})
