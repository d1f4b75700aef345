"""The wheel, and an environment that has it."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from clean_environment import Environment, new_environment

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    """The wheel and the source distribution, built as for a release."""
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(REPOSITORY)]
    ended = subprocess.run(build, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return sorted(out.iterdir())


@pytest.fixture(scope="session")
def wheel(distributions: Sequence[Path]) -> Path:
    return next(each for each in distributions if each.suffix == ".whl")


@pytest.fixture
def empty(tmp_path: Path) -> Environment:
    """An environment without tacit."""
    return new_environment(tmp_path)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    """An environment with tacit's wheel."""
    made = new_environment(tmp_path_factory.mktemp("installed"))
    made.install(wheel)
    return made
