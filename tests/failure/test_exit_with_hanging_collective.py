"""What hangs in Gloo after a failure neither aborts a process at its end nor holds it up."""

import pytest

from rank_processes import ranks


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_with_a_collective_that_a_peer_left_out_end_well(world: int) -> None:
    ended = ranks("hanging_rank.py", world, fresh=range(world))
    assert [each.code for each in ended] == [0] * world, "\n".join(each.text for each in ended)
