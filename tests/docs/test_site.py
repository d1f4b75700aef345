"""The site is built as by `make docs`, where a broken link is an error; it fetches nothing from elsewhere."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from browser import NEEDS_CHROMIUM, titled
from pages import ROOT, SITE
from typer.core import TyperGroup as Group

import tacit
from tacit_lab.cli.application import app

FRAMES = """<!doctype html>
<body></body>
<script>
const pages = PAGES, width = WIDTH, height = HEIGHT, told = [];
const amiss = (page, inner) => {
  const root = inner.documentElement, found = [];
  if (root.scrollWidth > root.clientWidth) found.push("is wider than the screen");
  for (const box of inner.querySelectorAll(".md-typeset__scrollwrap")) {
    if (box.scrollWidth <= box.clientWidth + 1) continue;
    const hint = inner.defaultView.getComputedStyle(box, "::before").content;
    found.push(hint.includes("sideways") ? "has a table that says it scrolls" : "has a table that is cut");
  }
  if (page !== "index.html") return found;
  const ends = (each) => each.getBoundingClientRect();
  const [install, lines] = inner.querySelectorAll(".md-content pre");
  if (ends(install).bottom > height || ends(lines).bottom > height) found.push("begins too far down");
  const picture = ends(inner.querySelector(".md-content img"));
  if (picture.top < ends(lines).bottom) found.push("begins by a picture");
  return found;
};
const next = () => {
  const page = pages.shift();
  if (!page) return document.title = [...new Set(told)].join("; ") || "nothing amiss";
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: ${height}px; border: 0`;
  frame.src = page;
  frame.onload = () => {
    const inner = frame.contentDocument;
    const look = (left) => {
      const marked = inner.documentElement.dataset.tables === "marked";
      const found = marked ? amiss(page, inner) : ["is not marked"];
      const well = found.every((each) => each.includes("says it scrolls"));
      if (!well && left > 0) return setTimeout(look, 50, left - 1);
      told.push(...found.map((each) => `${page} ${each}`));
      frame.remove();
      next();
    };
    setTimeout(look, 100, 200);
  };
  document.body.append(frame);
};
next();
</script>"""
SEARCH = """<!doctype html>
<body></body>
<script>
const words = WORDS, told = [];
const next = () => {
  const word = words.shift();
  if (!word) return document.title = told.join("; ") || "nothing amiss";
  const frame = document.createElement("iframe");
  frame.src = `index.html?q=${word}`;
  frame.onload = () => {
    const look = (left) => {
      const found = frame.contentDocument.querySelectorAll(".md-search-result__link");
      const links = [...found].map((each) => each.href);
      if (!links.length && left > 0) return setTimeout(look, 50, left - 1);
      told.push(`${word}: ${links.map((each) => new URL(each).pathname.split("/").pop()).join(" ")}`);
      frame.remove();
      next();
    };
    look(200);
  };
  document.body.append(frame);
};
next();
</script>"""
WITH_TABLES = [
    "index.html",
    "how-to-choose.html",
    "peers.html",
    "scaling.html",
    "overhead.html",
    "support.html",
    "accuracy.html",
]


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
    text = (site / "api" / "tacit.html").read_text()
    for label in tacit.__all__:
        assert f'id="tacit.{label}"' in text or f"id=tacit.{label}" in text


def test_every_command_and_option_stands_on_its_page(site: Path) -> None:
    text = (site / "cli.html").read_text()
    assert "every command --&gt;" not in text

    def look(name: str, command: object) -> None:
        if isinstance(command, Group):
            for word, each in command.commands.items():
                look(f"{name} {word}", each)
            return
        part = text.split(f">{name}<", 1)[1].split("<h2", 1)[0]
        for each in command.params:
            words = each.opts if each.param_type_name == "option" else [each.metavar or each.name.upper()]
            for word in words:
                assert word == "--help" or f"<code>{word}" in part, f"{name} has no {word} on its page"

    look("tacit", typer.main.get_command(app))


def test_the_docstrings_stand_line_by_line(site: Path) -> None:
    text = (site / "papers" / "line-by-line.html").read_text()
    assert "momentum factor masking" in text
    assert "algorithms, line by line --&gt;" not in text


def amiss(site: Path, width: int, height: int) -> str:
    """What is amiss on a screen of this size, on the pages with the widest tables and on the first one."""
    frame = site / f"frame-{width}.html"
    words = {"PAGES": str(WITH_TABLES), "WIDTH": str(width), "HEIGHT": str(height)}
    frame.write_text(re.sub("PAGES|WIDTH|HEIGHT", lambda word: words[word[0]], FRAMES))
    said, _ = titled(frame)
    frame.unlink()
    return said


def browsing(test: Callable[..., None]) -> Callable[..., None]:
    for mark in NEEDS_CHROMIUM:
        test = mark(test)
    return test


@browsing
def test_at_1280_pixels_no_table_is_cut_and_the_first_screen_says_how_to_begin(site: Path) -> None:
    assert amiss(site, 1280, 800) == "nothing amiss"


@browsing
def test_on_a_phone_tables_that_scroll_say_so_and_the_first_screen_says_how_to_begin(site: Path) -> None:
    found = amiss(site, 390, 844).split("; ")
    assert "overhead.html has a table that says it scrolls" in found
    assert not [each for each in found if not each.endswith("says it scrolls")]


@browsing
def test_the_search_finds_from_a_folder_what_people_look_for(site: Path) -> None:
    frame = site / "search.html"
    frame.write_text(SEARCH.replace("WORDS", str(["cite", "changelog", "wandb"])))
    found = dict(each.split(": ") for each in titled(frame)[0].split("; "))
    frame.unlink()
    assert "citing.html" in found["cite"]
    assert "changes.html" in found["changelog"]
    assert found["wandb"]
