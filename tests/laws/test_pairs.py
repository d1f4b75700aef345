"""Each row of the table of compressors under every topology that takes it, in fp32, bf16 and fp64."""

from typing import Any

import pytest
from table import TABLE

from tacit.testing import check_compressor

SHAPES = {"weight": (24, 18), "bias": (24,), "last": (7, 24)}
ROWS: dict[str, Any] = {name: row.compressor for name, row in TABLE.items()}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_obeys_under_every_topology(name: str) -> None:
    checked = check_compressor(ROWS[name], worlds=(4,), shapes=SHAPES)
    assert any(text.startswith("Flat") for text in checked.accepted)
    for why in checked.refused.values():
        assert "write" in why or "leave" in why, "a refusal says what to write instead"
