"""Makes docs/algorithms.md of what the algorithms say of themselves: python dev/algorithms_page.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"
MARKER = "<!-- made by dev/algorithms_page.py -->\n"


def page() -> str:
    """The whole page: what stands above the marker, and the tables."""
    from tacit_lab.algorithm_facts import by_family

    above, marker, _ = PAGE.read_text().partition(MARKER)
    tables = [line for family, names in by_family().items() for line in section(family, names)]
    return "\n".join([above + marker, *tables])


def section(family: str, names: Sequence[str]) -> Iterator[str]:
    """A family's heading, and a row for each of its algorithms."""
    from tacit.algorithms.registry import ENTRIES
    from tacit_lab.algorithm_facts import parameters_of

    head = "| algorithm | what it changes | parameters |\n|---|---|---|"
    first = next((name for name in names if ENTRIES[name].instead), None)
    yield f"## {family.capitalize()}" + ("" if first == names[0] else f"\n\n{head}")
    for name in names:
        entry = ENTRIES[name]
        if name == first:
            yield f"\nBaselines of the survey, to compare with:\n\n{head}"
        baseline = f" *Take `{entry.instead}`.*" if entry.instead else ""
        given = ", ".join(
            f"`{each.name}`"
            + ("" if each.required else f" = {'none' if each.default is None else each.default}")
            for each in parameters_of(name)
        )
        yield f"| `{name}` | {entry.changes}{baseline} | {given} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page())
