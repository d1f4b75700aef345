"""Each row of the table of compressors under every topology that takes it, in fp32, and in bf16 or fp64."""

import pytest
import torch
from table import TABLE

from tacit.compressors import MeanFeedback, Partition
from tacit.testing import check_compressor

SHAPES = {"weight": (24, 18), "bias": (24,), "last": (7, 24)}
ROWS = {
    name: row
    for name, row in TABLE.items()
    if not isinstance(row.compressor, Partition | MeanFeedback)
    and not getattr(row.compressor, "matrices", ())
}
"""But those that are laid out for one tensor already: a session does that itself. And but `MeanFeedback`,
which is for merges that keep what is not sent: `algorithms/test_common_point.py` has its law."""


def obeys(name: str, *dtypes: torch.dtype) -> None:
    row = ROWS[name]
    checked = check_compressor(
        row.compressor,
        dtypes=dtypes,
        worlds=(4,),
        shapes=SHAPES,
        conserves=row.conserves and not row.steps,
    )
    assert any(text.startswith("Flat") for text in checked.accepted)
    for why in checked.refused.values():
        assert "write" in why or "leave" in why, "a refusal says what to write instead"


@pytest.mark.parametrize("name", ROWS)
def test_a_row_obeys_under_every_topology(name: str) -> None:
    obeys(name, torch.float32)


@pytest.mark.parametrize("name", ROWS)
def test_in_other_types_too(name: str) -> None:
    """In turns, as topologies do not know what is in a row; `test_any_input` has each row in all types."""
    place = [*ROWS].index(name)
    obeys(name, (torch.bfloat16, torch.float64)[(place + place // 2) % 2])  # X and X + ef follow each other
