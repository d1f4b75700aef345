"""Every public name and every algorithm stands on the page that is for it."""

import ast
import importlib
import inspect
import re
import runpy
from pathlib import Path
from types import ModuleType

from pages import LOG, PAGES, ROOT, name, prose

import tacit
from cases import for_each
from tacit import environment, errors
from tacit.algorithms.registry import ENTRIES

API = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
REFERENCE = re.findall(r"^::: (tacit(?:\.\w+)+)$", API, re.MULTILINE)
PAPERS = ROOT / "docs" / "papers" / "index.md"
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in PAPERS.read_text().splitlines()
    if line.startswith("| `")
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
    if len(cells) == 3
}


def test_the_reference_has_every_public_name_and_no_other() -> None:
    top = {label for label in REFERENCE if label.count(".") == 1}
    assert top == {f"tacit.{label}" for label in tacit.__all__}
    answers = ("compressors", "contracts", "merges", "optim", "overlap", "rounds", "topologies")
    public = {f"tacit.{each}.{label}" for each in answers for label in getattr(tacit, each).__all__}
    shown = {label for label in REFERENCE if label.split(".")[1] in answers}
    assert shown == public | {"tacit.compressors.Part"}
    assert len(REFERENCE) == len(set(REFERENCE))
    others = {label.split(".")[1] for label in {*REFERENCE} - top - shown}
    assert others == {"algorithms", "links", "prediction", "testing"}


def test_what_stands_in_the_reference_is_documented() -> None:
    for path in REFERENCE:
        home, _, label = path.rpartition(".")
        module = importlib.import_module(home)
        value = getattr(module, label)
        plain = not isinstance(value, type) and not hasattr(inspect.unwrap(value), "__code__")
        told = _told_below(module, label) if plain else _told(value)
        assert told, f"{path} has no docstring"


def test_every_class_that_a_page_names_is_public() -> None:
    ours = {
        each.name
        for path in (ROOT / "src" / "tacit").rglob("*.py")
        for each in ast.parse(path.read_text()).body
        if isinstance(each, ast.ClassDef)
    }
    named = {label for page in PAGES for label in re.findall(r"`(?:tacit\.)?([A-Z]\w+)\b", page.read_text())}
    doors = {"Tacit", "AllRanks", "ParallelismConfig"}  # their modules import frameworks
    public = {*tacit.__all__, *doors}.union(*(dir(getattr(tacit, each)) for each in tacit.SUBMODULES))
    assert len(named & ours) > 40
    assert not (named & ours) - public


def _told(value: object) -> bool:
    """Whether somebody has written its docstring; dataclass makes one where nobody has."""
    return bool(value.__doc__) and not value.__doc__.startswith(f"{getattr(value, '__name__', '')}(")


def _told_below(module: ModuleType, label: str) -> bool:
    """Whether a constant, or a type by another name, has a docstring: in the line below it."""
    here = Path(module.__file__ or "")
    texts = (each.read_text() for each in (here.parent.glob("*.py") if here.stem == "__init__" else [here]))
    return any(re.search(rf'^{label}\b.* = .*\n"""', text, re.MULTILINE) for text in texts)


@for_each("maker", ["algorithms_page", "support_page"])
def test_a_page_is_made_of_the_algorithms(maker: str) -> None:
    made = runpy.run_path(str(ROOT / "dev" / f"{maker}.py"))
    assert made["page"]() == made["PAGE"].read_text(), f"run python dev/{maker}.py"


def test_every_error_and_every_variable_has_its_place() -> None:
    ours = {name for name in dir(errors) if isinstance(getattr(errors, name), type)} & {*errors.__all__}
    rows = re.findall(r"^\|[ ·]*`(\w+)` \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert ours - {"TacitError"} <= {*rows}
    assert all(issubclass(getattr(errors, name), errors.TacitError) for name in rows)
    known = {value for name, value in vars(environment).items() if name.isupper()}
    assert known == {*re.findall(r"\bTACIT_[A-Z_]+", (ROOT / "docs" / "environment.md").read_text())}


def test_every_algorithm_has_a_row_in_the_papers() -> None:
    missing = sorted(ENTRIES.keys() - ROWS.keys())
    assert not missing, f"docs/papers/index.md has no row for {missing}"
    assert not ROWS.keys() - ENTRIES.keys()


@for_each("label", ENTRIES)
def test_a_row_names_the_algorithms_paper(label: str) -> None:
    for number in re.findall(r"arXiv (\S+?)(?:;|$)|doi (\S+)", ENTRIES[label].paper):
        assert "".join(number) in ROWS[label][0]


def test_words_of_the_glossary_stand_once_and_in_order() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    words = re.findall(r"^\*\*(.+)\.\*\*$", text, re.MULTILINE)
    assert words == sorted(set(words), key=str.lower)
    assert len(words) <= 25, "the field's words need no entry"


def test_contributing_and_the_entries_of_the_log_are_short() -> None:
    assert (ROOT / "CONTRIBUTING.md").stat().st_size <= 6 << 10
    entries = [entry for page in LOG for entry in page.read_text().split("\n## ")[1:]]
    assert not [each.partition("\n")[0] for each in entries if len(re.findall(r"^.*\S", each, re.M)) > 15]


@for_each("page", PAGES, ids=name)
def test_no_page_waits_for_its_figures(page: Path) -> None:
    assert not re.findall(r"^[A-Z]+$", prose(page), re.MULTILINE)
