"""What a paper takes of a comparison: LaTeX, CSV, BibTeX, figures."""

import csv
import io
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from sample_records import ALONE, DDP, HEAD, TOPK, comparison

from tacit.algorithms.registry import ALGORITHMS, ENTRIES
from tacit.errors import ConfigError
from tacit_lab import records, reports
from tacit_lab.reports import paper

WHOLE = comparison(DDP, replace(TOPK, mb_between_nodes=None), ALONE)


def seeds() -> list[records.Record]:
    found = []
    for seed, accuracy in ((0, 0.9), (1, 0.8)):
        found += [replace(each, seed=seed) for each in comparison(DDP)]
        found += [replace(each, seed=seed) for each in comparison(replace(TOPK, accuracy=accuracy))]
    return found


def test_the_csv_has_every_number_and_nothing_where_there_is_none() -> None:
    ddp, topk = csv.DictReader(io.StringIO(paper.to_csv(reports.compare(WHOLE))))
    assert (float(ddp["seconds"]), float(ddp["mb_between_nodes"])) == (60.0, 1000.0)
    assert (topk["mb_between_nodes"], topk["gap_half"], topk["status"]) == ("", "", "ok")
    (_, topk) = csv.DictReader(io.StringIO(paper.to_csv(reports.compare(seeds()))))
    assert float(topk["gap"]) == pytest.approx(0.85 - 0.98)
    assert float(topk["gap_half"]) > 0.1


def test_the_table_says_how_it_was_made_and_cites() -> None:
    found = [record for record in WHOLE if isinstance(record, records.RunRecord)]
    text = paper.to_latex(reports.compare(WHOLE), found, "tacit compare digits --epochs 2")
    assert "% command: tacit compare digits --epochs 2\n" in text
    assert "% torch: 2.13.0\n% tacit: 0.1\n% cpu: A Processor\n" in text
    assert r"\texttt{topk:ratio=0.01}~\cite{arxiv-1704.05021,arxiv-1809.07599} & 0.9720 & 10.0" in text
    assert "6.00$\\times$ & -- & -- & 30.0\\%" in text
    assert not re.search(r"(?<!\\)[_#&%]\w", re.sub("%.*", "", text.replace("\\%", "")).replace(" & ", ""))


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX here")
def test_latex_takes_it(tmp_path: Path) -> None:
    found = [record for record in WHOLE if isinstance(record, records.RunRecord)]
    table = paper.to_latex(reports.compare(WHOLE), found, "")
    whole = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{table}\end{{document}}"
    (tmp_path / "t.tex").write_text(whole)
    subprocess.run(["pdflatex", "-halt-on-error", "t.tex"], cwd=tmp_path, check=True, capture_output=True)


def test_every_method_has_an_entry() -> None:
    text = paper.to_bibtex(ENTRIES)
    assert len(re.findall(r"^@", text, re.MULTILINE)) > 50
    assert text.count("{") == text.count("}")
    assert not re.findall("^%", text, re.MULTILINE), "it would name a method without one"
    keys = re.findall(r"^@\w+\{([^,]+),$", text, re.MULTILINE)
    assert len(keys) == len(set(keys))
    years = re.findall(r"year = \{20(\d\d)\},\n  eprint = \{(\d\d)", text)
    assert len(years) > 40
    assert all(year == of_number for year, of_number in years)


def test_tacit_is_cited_as_its_citation_file_says() -> None:
    text = paper.to_bibtex([])
    stated = (Path(__file__).resolve().parents[3] / "CITATION.cff").read_text()
    for key in ("title", "version"):
        (value,) = re.findall(rf'^{key}: "?([^"\n]*)', stated, re.MULTILINE)
        assert f"  {key} = {{{value}}}" in text.replace("{{", "{").replace("}}", "}")


def test_ddp_is_cited_by_its_own_paper() -> None:
    assert "{arxiv-2006.15704," in paper.to_bibtex(["ddp"])
    assert paper.cited("ddp") == r"\texttt{ddp}~\cite{arxiv-2006.15704}"


def test_a_method_of_ones_own_is_cited_by_the_number_of_its_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    assert paper.to_bibtex(["unheard-of:ratio=1"]) == paper.to_bibtex([])
    monkeypatch.setitem(ALGORITHMS, "mine", ALGORITHMS["topk"])
    monkeypatch.setitem(ENTRIES, "mine", replace(ENTRIES["topk"], paper="Doe 2026, arXiv 2601.00001"))
    assert paper.cited("mine:ratio=1") == r"\texttt{mine:ratio=1}~\cite{arxiv-2601.00001}"
    assert "@misc{arxiv-2601.00001,\n  note = {Doe 2026, arXiv 2601.00001}," in paper.to_bibtex(["mine"])
    monkeypatch.setitem(ENTRIES, "mine", replace(ENTRIES["topk"], paper="mine"))
    assert "% mine: mine\n" in paper.to_bibtex(["mine"])


def test_the_legend_lies_over_no_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    paper.draw(reports.compare(WHOLE), WHOLE, tmp_path / "curves.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ddp", "topk:ratio=0.01"]
    assert not any(legend.overlaps(axes.get_window_extent()) for axes in figure.axes)


@pytest.mark.parametrize("ending", ["png", "pdf"])
def test_the_curves_are_drawn(tmp_path: Path, ending: str) -> None:
    target = tmp_path / f"curves.{ending}"
    for found in (WHOLE, seeds(), [replace(HEAD, epochs=None, target=None), replace(DDP, accuracy=None)]):
        paper.draw(reports.compare(found), found, target)
        assert target.read_bytes()[:4] in (b"\x89PNG", b"%PDF")


def test_a_format_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot draw .*curves.doc: "):
        paper.draw(reports.compare(WHOLE), WHOLE, tmp_path / "curves.doc")
    with pytest.raises(ConfigError, match=r"cannot write .*curves.png: No such file"):
        paper.draw(reports.compare(WHOLE), WHOLE, tmp_path / "no" / "curves.png")
