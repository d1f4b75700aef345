"""Every public name and every algorithm stands on the page that is for it."""

import re
from pathlib import Path

from pages import PAGES, ROOT, name, prose

import tacit
from cases import for_each
from tacit.algorithms.catalogue import ENTRIES

API = (ROOT / "docs" / "api.md").read_text()
PAPERS = ROOT / "docs" / "papers" / "index.md"
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in PAPERS.read_text().splitlines()
    if line.startswith("| `")
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
    if len(cells) == 4
}
FIGURES = [label for label, cells in ROWS.items() if "%" in cells[-1]]


def test_the_reference_has_every_public_name_and_no_other() -> None:
    assert sorted(re.findall(r"^::: tacit\.(\w+)$", API, re.MULTILINE)) == sorted(tacit.__all__)


def test_what_stands_in_the_reference_is_documented() -> None:
    from tacit import contracts

    for path in re.findall(r"^::: tacit\.contracts\.(\w+)$", API, re.MULTILINE):
        assert _told(getattr(contracts, path)), f"tacit.contracts.{path} has no docstring"
    for label in tacit.__all__:
        assert _told(getattr(tacit, label)), f"tacit.{label} has no docstring"


def _told(value: object) -> bool:
    """Whether somebody has written its docstring; dataclass makes one where nobody has."""
    return bool(value.__doc__) and not value.__doc__.startswith(f"{getattr(value, '__name__', '')}(")


def test_every_algorithm_has_a_row_in_the_papers() -> None:
    missing = sorted(ENTRIES.keys() - ROWS.keys())
    assert not missing, f"docs/papers/index.md has no row for {missing}"
    assert not ROWS.keys() - ENTRIES.keys()


@for_each("label", ENTRIES)
def test_a_row_names_the_catalogues_paper(label: str) -> None:
    for number in re.findall(r"arXiv (\S+?)(?:;|$)|doi (\S+)", ENTRIES[label].paper):
        assert "".join(number) in ROWS[label][0]


@for_each("label", FIGURES)
def test_a_figure_is_one_of_its_source(label: str) -> None:
    """Speedup and reduction stand in one row of the README's table (¹), or of the page on choosing."""
    speedup, less = re.findall(r"[\d.]+", ROWS[label][-1])[:2]
    readme = ROWS[label][-1].endswith("¹")
    source = (ROOT / "README.md").read_text() if readme else prose(ROOT / "docs" / "how-to-choose.md")
    start = rf"{label} " if readme else rf"\| `{label}` \|"
    rows = [re.findall(r"[\d.]+", row) for row in re.findall(rf"^{start}.*$", source, re.MULTILINE)]
    assert any({speedup, less} <= set(row) for row in rows), f"{speedup} and {less} are in none of {rows}"


def test_words_of_the_glossary_stand_once_and_in_order() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    words = re.findall(r"^\*\*(.+)\.\*\*$", text, re.MULTILINE)
    assert words == sorted(set(words), key=str.lower)


@for_each("page", PAGES, ids=name)
def test_no_page_waits_for_its_figures(page: Path) -> None:
    assert not re.findall(r"^[A-Z]+$", prose(page), re.MULTILINE)
