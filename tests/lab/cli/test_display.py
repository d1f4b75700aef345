import io
from dataclasses import replace

from rich.console import Console

from tacit_lab.cli.compare import display
from tacit_lab.recipes.progress import Progress

FIRST = Progress(algorithm="topk", epoch=0, step=1, steps=20, seconds=0.1, loss=2.3, accuracy=None, mb=None)
ENDED = replace(FIRST, epoch=1, step=10, seconds=3.0, loss=0.25, accuracy=0.9, mb=12.34)


def shown(console: Console, *messages: Progress) -> str:
    with display.open_display(console, ["ddp", "topk"]) as screen:
        screen.started("topk", "training 2 of 3")
        for message in messages:
            screen.advanced(message)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_there_is_a_line_for_each_epoch() -> None:
    text = shown(Console(file=io.StringIO(), width=80), FIRST, ENDED, replace(ENDED, step=11))
    assert text.splitlines() == [
        "topk: launching, training 2 of 3",
        "topk: step 10/20, loss 0.250  accuracy 0.900  3.0 s  12.3 MB",
    ]


def test_long_epochs_also_have_lines_within_them() -> None:
    display.Lines.EVERY, before = 0.0, display.Lines.EVERY
    try:
        text = shown(Console(file=io.StringIO()), FIRST)
    finally:
        display.Lines.EVERY = before
    assert "step 1/20, loss 2.300  accuracy –  0.1 s  – MB" in text


def test_on_a_terminal_every_algorithm_has_a_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    final = shown(console, FIRST, ENDED).splitlines()
    assert any("ddp" in line for line in final)
    assert any("topk" in line and "accuracy 0.900" in line and "12.3 MB" in line for line in final)
