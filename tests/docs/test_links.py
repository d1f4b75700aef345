"""Links within the repository lead somewhere, anchors included."""

from pathlib import Path

from pages import EVERY, anchors, links, name

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
