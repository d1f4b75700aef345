"""What the beginning of a period does with errors: those of a round are for another try."""

import pytest

from tacit.api.member_changes import MembersChange, begun
from tacit.errors import CheckpointError


def failing(error: Exception) -> str:
    raise error


def test_one_that_is_gone_is_no_error_and_another_is() -> None:
    assert begun(lambda: "state", 3) == "state"
    assert begun(lambda: failing(MembersChange("somebody has arrived")), 3) is None
    assert begun(lambda: failing(RuntimeError("Connection closed by peer")), 3) is None
    with pytest.raises(CheckpointError):
        begun(lambda: failing(CheckpointError("another model")), 3)
