"""Links within the repository lead somewhere, anchors included."""

import re
from pathlib import Path

from pages import EVERY, ROOT, anchors, links, name

from cases import for_each

RELATIVE = [
    (page, link)
    for page in EVERY
    for link in links(page)
    if not link.startswith(("http://", "https://", "mailto:"))
]


def test_links_are_found() -> None:
    assert {"README.md", "docs/index.md"} <= {name(page) for page, _ in RELATIVE}


@for_each(("page", "link"), RELATIVE, ids=lambda each: str(each).rpartition("/")[2])
def test_a_link_leads_somewhere(page: Path, link: str) -> None:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    assert target.is_file(), f"{name(page)} links to {link}, which is no file"
    if anchor:
        assert anchor in anchors(target), f"{name(page)} links to {link}; there are {sorted(anchors(target))}"


def test_the_architecture_names_every_room_and_files_that_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    homes = (ROOT, ROOT / "src" / "tacit", ROOT / "src" / "tacit_lab")
    named = set(re.findall(r"[\w/]+/[a-z]\w+\.py", text))
    assert len(named) > 60
    missing = sorted(path for path in named if not any((home / path).is_file() for home in homes))
    assert not missing, "docs/architecture.md names files that are not there: say where they went"
    rooms = {path.parent.name for path in (ROOT / "src").glob("tacit*/*/__init__.py")}
    unnamed = {room for room in rooms if f"`{room}`" not in text}
    assert not unnamed, "docs/architecture.md has no row for these rooms"
