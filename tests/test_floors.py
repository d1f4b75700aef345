"""Imports point down: a module imports only lower floors, and siblings on a floor leave each other alone."""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src" / "tacit"
FLOORS = [
    {"errors", "environment", "contracts", "checks", "files", "json_lines", "kernels", "ranges", "timelines"},
    {
        "rounds",
        "compressors",
        "topologies",
        "overlap",
        "merges",
        "exchange",
        "transports",
        "prediction",
        "optim",
    },
    {"strategy"},
    {"algorithms", "session"},
    {"parameter_server"},
    {"hooks", "testing"},
    {"lab"},
    {"cli"},
]
# Everything may use the errors. A check knows what a compressor is. Compressors and topologies combine
# exchanges, and what is predicted is sent by compressors.
BENEATH = {
    "checks": {"contracts"},
    "timelines": {"json_lines"},
    "compressors": {"exchange"},
    "topologies": {"exchange"},
    "transports": {"exchange"},
    "prediction": {"compressors", "exchange"},
}
FLOOR = {name: i for i, names in enumerate(FLOORS) for name in names}
MODULES = sorted(p for p in SRC.rglob("*.py") if p != SRC / "__init__.py")


def part(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: write the import in full"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("tacit.")} & FLOOR.keys()


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_down(path: Path) -> None:
    here = part(path)
    assert here in FLOOR, f"{here} stands on no floor: add it to FLOORS"
    for other in imports(path) - {here, "errors"} - BENEATH.get(here, set()):
        assert FLOOR[other] < FLOOR[here], f"{here} (floor {FLOOR[here]}) imports {other} ({FLOOR[other]})"
