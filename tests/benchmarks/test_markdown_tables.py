"""Where tables are put on pages."""

from pathlib import Path

import pytest

from markdown_tables import fill


def test_a_text_is_put_between_its_marks_and_a_page_without_them_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("above\n\n<!-- it.py -->\n\nold\n\n<!-- as far as here -->\n\nbelow\n")
    fill(page, "it.py", r"new \1")
    assert page.read_text() == "above\n\n<!-- it.py -->\n\nnew \\1\n\n<!-- as far as here -->\n\nbelow\n"
    with pytest.raises(SystemExit, match="has no place for it"):
        fill(page, "other.py", "new")
