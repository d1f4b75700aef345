"""The doors to frameworks, against the real packages on two or four ranks; one launch for each script."""

import ast
import functools

import pytest
from frameworks import HERE, launched

from rank_processes import Ended
from tacit.integrations.managed import imported

SCRIPTS = sorted(file.name for file in HERE.glob("*_checks.py"))


def checks(script: str) -> list[tuple[str, bool]]:
    """Their names, and whether each is for one process; without importing a framework."""
    found = []
    for node in ast.parse((HERE / script).read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            (mark,) = map(ast.unparse, node.decorator_list)
            assert mark in ("check", "ALONE.add"), node.name
            found.append((node.name, mark == "ALONE.add"))
    return found


@functools.cache
def ended(script: str) -> list[Ended]:
    return launched(script)


@pytest.mark.parametrize(
    ("script", "name", "alone"), [(script, *each) for script in SCRIPTS for each in checks(script)]
)
def test_it_holds(script: str, name: str, alone: bool) -> None:
    for where in ended(script)[-1:] if alone else ended(script)[:-1]:
        said = {entry["check"]: entry["error"] for entry in where.said}
        assert name in said, f"it did not get there:\n{where.text[-3000:]}"
        assert said[name] is None, said[name]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_processes_end_well(script: str) -> None:
    assert [each.code for each in ended(script)] == [0] * len(ended(script)), ended(script)[-1].text[-3000:]


def test_a_framework_that_is_not_there_is_named_with_what_installs_it() -> None:
    with pytest.raises(
        ModuleNotFoundError, match=r"absent is not installed: pip install 'absent\[torch\]>=5'"
    ):
        imported("absent.callbacks", "absent[torch]>=5")
