"""What an evaluation of predictors says, on a terminal and on a page."""

import json
import re
from html import escape

from rich.console import Console
from unpacked import figures_of

from tacit_lab.reports.predictors import Evaluation, Judged, Path, page, table

ROWS = (
    Judged(
        name="<mine>.pt",
        errors={"convolution": 0.31, "linear": 0.27},
        held_out={"architecture, linear": 0.4},
        assembled=0.16,
        assembled_accuracy=0.9,
        loss=0.1554,
        accuracy=0.9468,
        within=True,
        operations=552,
        microseconds=0.12,
    ),
    Judged(name="linear", errors={"convolution": 0.6, "linear": 0.6}, within=False),
)
PATHS = (Path(title="0.weight", true=[0.0, 1.0], led={"<mine>.pt": [0.0, 0.9], "linear": [0.0, 1.2]}),)
TOLD = Evaluation(
    recipe="digits",
    workers=4,
    epochs=3,
    share=0.11,
    sync_every=1,
    seed=0,
    tolerance=0.02,
    loss=0.1582,
    accuracy=0.944,
    next_loss=0.2,
    next_accuracy=0.93,
    rows=ROWS,
    paths=PATHS,
)


def test_the_table_fits_a_terminal_and_says_what_its_columns_mean() -> None:
    console = Console(width=80, record=True, file=None, quiet=False)
    with console.capture() as caught:
        console.print(table(TOLD))
    text = caught.get()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    (mine,) = [line.split() for line in lines if line.startswith("<mine>.pt")][:1]
    assert mine == ["<mine>.pt", "0.310", "0.270", "0.1600", "0.1554", "0.9468", "yes", "552", "0.12"]
    (other,) = [line.split() for line in lines if line.startswith("linear") and "diverged" in line]
    assert other == ["linear", "0.600", "0.600", "–", "diverged", "–", "no", "–", "–"]
    words = " ".join(text.split())
    for name, meaning in TOLD.columns.items():
        assert f"{name}: {meaning}" in words
    assert "held out" in words


def test_the_page_draws_every_path_and_needs_no_network() -> None:
    text = page(TOLD)
    assert "<mine>" not in text
    assert escape("Within 2% of the full push's loss: <mine>.pt.") in text
    figures = figures_of(text)
    assert [trace["name"] for trace in figures["path-0"]["data"]] == ["true", "&lt;mine&gt;.pt", "linear"]
    assert figures["path-0"]["data"][1]["y"] == [0.0, 0.9]
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", text)


def test_json_has_the_numbers_and_not_the_paths() -> None:
    told = json.loads(json.dumps(TOLD.to_dict()))
    assert "paths" not in told
    assert [row["within"] for row in told["rows"]] == [True, False]
