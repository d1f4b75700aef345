import pytest

from tacit_lab.recipes.progress import Progress

PROGRESS = Progress(
    algorithm="topk:ratio=0.1", epoch=1, step=3, steps=10, seconds=1.5, loss=0.5, accuracy=None, mb=None
)


def test_a_message_survives_the_way_through_a_line() -> None:
    assert "\n" not in PROGRESS.to_line()
    assert Progress.from_line(PROGRESS.to_line()) == PROGRESS
    assert Progress.from_line(f"[rank0]: {PROGRESS.to_line()}") == PROGRESS


@pytest.mark.parametrize("line", ["", "loss 0.5", PROGRESS.to_line()[:-5], PROGRESS.to_line() + "Traceback"])
def test_other_lines_and_broken_ones_hold_no_message(line: str) -> None:
    assert Progress.from_line(line) is None
