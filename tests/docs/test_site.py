"""The site is built as by `make docs`, where a broken link is an error; it fetches nothing from elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, SITE

import tacit


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    for page in SITE:
        assert (site / page.relative_to(ROOT / "docs")).with_suffix(".html").is_file()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"?([^\s\">]+)", text)
        loaded += re.findall(
            r"<link[^>]*rel=\"?(?:stylesheet|preconnect|icon)\"?[^>]*href=\"?([^\s\">]+)", text
        )
        loaded += re.findall(r"<link[^>]*href=\"?([^\s\">]+)[^>]*rel=\"?(?:stylesheet|preconnect|icon)", text)
        assert loaded
        assert not [each for each in loaded if "//" in each]


def test_what_pages_link_to_outside_the_folder_is_there(site: Path) -> None:
    assert (site / "repository" / "README.md.txt").read_text() == (ROOT / "README.md").read_text()
    assert "repository/README.md.txt" in (site / "index.html").read_text()


def test_the_reference_shows_every_public_name(site: Path) -> None:
    text = (site / "api.html").read_text()
    for label in tacit.__all__:
        assert f'id="tacit.{label}"' in text or f"id=tacit.{label}" in text


def test_the_docstrings_stand_line_by_line(site: Path) -> None:
    text = (site / "papers" / "line-by-line.html").read_text()
    assert "momentum factor masking" in text
    assert "algorithms, line by line --&gt;" not in text
