"""Makes docs/algorithms.md of what the algorithms say of themselves: python dev/algorithms_page.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"
MARKER = "<!-- made by dev/algorithms_page.py -->\n"


def page() -> str:
    """The whole page: what stands above the marker, and the tables."""
    from tacit.algorithms.registry import Family

    above, marker, _ = PAGE.read_text().partition(MARKER)
    return "\n".join([above + marker, *(line for family in get_args(Family) for line in section(family))])


def section(family: str) -> Iterator[str]:
    """A family's heading, and a row for each of its algorithms, baselines last."""
    from tacit.algorithms.registry import ENTRIES
    from tacit_lab.algorithm_facts import parameters_of

    yield f"## {family.capitalize()}\n\n| algorithm | what it changes | parameters |\n|---|---|---|"
    members = [name for name, entry in ENTRIES.items() if entry.family == family]
    for name in sorted(members, key=lambda name: bool(ENTRIES[name].instead)):
        entry = ENTRIES[name]
        baseline = f" *Baseline: take `{entry.instead}`.*" if entry.instead else ""
        given = ", ".join(
            f"`{each.name}`"
            + ("" if each.required else f" = {'none' if each.default is None else each.default}")
            for each in parameters_of(name)
        )
        yield f"| `{name}` | {entry.changes}{baseline} | {given} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page())
