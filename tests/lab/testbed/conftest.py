from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def programs() -> Path:
    return Path(__file__).parent / "programs"
