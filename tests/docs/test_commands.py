"""What the pages tell a reader to type exists: commands, options, algorithms, clusters, scripts.

Nothing is run.
"""

import functools
import re
import shlex
from pathlib import Path
from typing import Any

import typer
from pages import EVERY, ROOT, inline, name, shell_lines
from typer.core import TyperGroup as Group

from cases import for_each
from tacit.algorithms import ALGORITHMS, parse
from tacit_lab import recipes
from tacit_lab.algorithm_facts import parameters_of
from tacit_lab.cli.application import app
from tacit_lab.cli.parsing import split_algorithms
from tacit_lab.cluster import Cluster

DATED = "dev/log/"
"""Pages of what was, also when `mp2` was the name of what is `lowbit` now."""
LINES = sorted({(name(page), line) for page in EVERY for line in shell_lines(page)})
TACIT = [
    (page, line)
    for page, line in LINES
    if re.match(r"tacit [a-z-]", line) and not ("mp2" in line and page.startswith(DATED))
]
MAKE = [(page, line) for page, line in LINES if re.match(r"make [a-z]+\b", line)]
PYTHON = [(page, line) for page, line in LINES if re.match(r"(python|pytest) ", line)]
TEXTS = [
    (name(page), text)
    for page in EVERY
    for text in inline(page)
    if text.partition(":")[0] in ALGORITHMS and re.fullmatch(r"[\w-]+:\w+=[^=]*(,\w+=[^=]*)*", text)
    if not (text.startswith("mp2") and name(page).startswith(DATED))
]


def typed(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def test_commands_are_found() -> None:
    pages = {page for page, _ in TACIT}
    assert {"README.md", "docs/getting-started.md", "docs/recipes.md"} <= pages
    assert MAKE
    assert PYTHON
    assert TEXTS


@functools.cache
def commands() -> Any:
    """As `tacit` has them."""
    return typer.main.get_command(app)


@for_each(("page", "line"), TACIT)
def test_a_command_can_be_read(page: str, line: str) -> None:
    words = typed(line)[1:]
    group = commands()
    if words[0].startswith("--"):
        assert words[0] in {option for each in group.params for option in each.opts} | {"--help"}
        return
    command = group.commands[words[0]]
    if len(words) == 1:
        return  # the name alone, in a sentence
    if isinstance(command, Group):
        words = words[1:]
        assert words[0] in command.commands
        command = command.commands[words[0]]
    context = command.make_context(words[0], words[1:])  # refuses what is no option, or of another type
    given = context.params
    if "..." in words:
        return
    if given.get("algorithms"):
        for text in split_algorithms(given["algorithms"]):
            if not (given.get("modules") and text.partition(":")[0] == "mine"):
                parse(text)
    if given.get("algorithm"):
        parse(given["algorithm"])
    if given.get("cluster"):
        Cluster.parse(given["cluster"])
    what = given.get("what") or []
    if len(what) == 1 and not what[0].endswith(".py"):
        assert what[0] in recipes.known()
    else:
        _scripts_exist(what)
    if given.get("recipe"):
        assert given["recipe"] in [*recipes.known(), "made-up"]
    _scripts_exist(given.get("script") or [])


@for_each(("page", "line"), MAKE)
def test_make_has_that_target(page: str, line: str) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert typed(line)[1] in targets


@for_each(("page", "line"), PYTHON)
def test_a_script_is_there_and_has_the_options(page: str, line: str) -> None:
    words = typed(line)
    _scripts_exist(words)
    if re.match(r"benchmarks/\w+\.py", words[1]) and not page.startswith(DATED):
        known = (ROOT / words[1]).read_text()
        assert [each for each in words[2:] if each.startswith("--") and f'"{each}"' not in known] == []


@for_each(("page", "text"), TEXTS)
def test_a_text_of_an_algorithm_can_be_read(page: str, text: str) -> None:
    label, _, rest = text.partition(":")
    given = [piece for piece in rest.split(",") if not piece.endswith("=")]  # `dgc:warmup_steps=` names one
    parse(f"{label}:{','.join(given)}" if given else label)
    known = {each.name for each in parameters_of(label)}
    assert {piece.partition("=")[0] for piece in rest.split(",")} <= known


def _scripts_exist(words: list[str]) -> None:
    for word in words:
        if Path(word).suffix == ".py" and "/" in word:
            assert (ROOT / word).is_file(), f"{word} is not there"
