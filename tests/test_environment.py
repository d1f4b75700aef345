"""Every environment variable of tacit is named once."""

import ast
import re
from pathlib import Path

from tacit import environment
from tacit_lab.testbed import rank

SRC = Path(environment.__file__).parents[1]
NAMES = {name: value for name, value in vars(environment).items() if name.isupper()}


def literals(path: Path) -> set[str]:
    """The texts in a file that are the name of a variable, and nothing else."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if text.startswith("TACIT_") and text.isidentifier()}


def test_a_constant_has_the_name_of_its_variable() -> None:
    assert {f"TACIT_{name}": value for name, value in NAMES.items()} == {v: v for v in NAMES.values()}
    assert "TACIT_ALGORITHM" in NAMES.values()


def test_no_other_file_spells_a_name_out() -> None:
    found = {path.relative_to(SRC).as_posix(): literals(path) for path in SRC.rglob("*.py")}
    spelt = {path: names for path, names in found.items() if names}
    assert spelt.pop("tacit/environment.py") == set(NAMES.values())
    # It runs without site packages, so it cannot import the names.
    assert spelt.pop("tacit_lab/testbed/rank.py") == {rank.RESTORE, rank.WORKER}
    assert not spelt
    assert (rank.RESTORE, rank.WORKER) == (environment.RESTORE, environment.WORKER)


def test_every_variable_is_used() -> None:
    words = "\n".join(
        path.read_text(encoding="utf-8") for path in SRC.rglob("*.py") if path.name != "environment.py"
    )
    assert not [name for name in NAMES if not re.search(rf"\b(?<!TACIT_){name}\b", words)]
