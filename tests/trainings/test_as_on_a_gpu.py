"""Models on the CPU that are exchanged as those on a GPU are, on real processes; one launch of four ranks."""

import pytest
from as_on_a_gpu_checks import CHECKS, CHOSEN, IN_STREAM
from rank_training import EMULATED

from rank_processes import Ended, assert_passed, ranks

WORLD = 4
BY_A_BARE_HOOK = {"the_bare_hook_is_late_too"}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(EMULATED, "1")
        return ranks("as_on_a_gpu_checks.py", WORLD, folder)


@pytest.mark.parametrize("name", CHECKS)
def test_as_on_a_gpu(name: str, ended: list[Ended]) -> None:
    assert_passed(name, ended)


def test_sessions_were_in_stream(ended: list[Ended]) -> None:
    chosen = {name for names in CHOSEN.values() for name in names.split()}
    for each in ended:
        paths = {entry["check"]: entry["paths"] for entry in each.said if "paths" in entry}
        for name in chosen:
            found: list[str] = paths[f"where {name} ran"]  # type: ignore[assignment]
            ours = [path for path in found if "untouched" not in path]
            assert bool(ours) != (name in BY_A_BARE_HOOK), name
            assert all(IN_STREAM in path for path in ours), f"{name}: {ours}"


def test_the_ranks_end_well(ended: list[Ended]) -> None:
    assert [each.code for each in ended] == [0] * WORLD
