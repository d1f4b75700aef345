"""Signals as one exception, but those that whoever started the command has had ignored."""

import signal
from collections.abc import Iterator

import pytest

from tacit_lab.cli.interrupts import Interrupted, interruptible

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.fixture(autouse=True)
def _as_started() -> Iterator[None]:
    before = handlers()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)  # type: ignore[arg-type]


@pytest.mark.parametrize("ignored", SIGNALS, ids=lambda number: number.name)
def test_what_was_ignored_stays_so_and_the_others_interrupt(ignored: signal.Signals) -> None:
    """`nohup` has SIGHUP ignored, and a shell SIGINT for what it starts in the background."""
    signal.signal(ignored, signal.SIG_IGN)
    before = handlers()
    with interruptible():
        signal.raise_signal(ignored)
    assert handlers() == before
    for number in SIGNALS:
        if number == ignored:
            continue
        with pytest.raises(Interrupted, match=f"stopped by {number.name}") as told, interruptible():
            signal.raise_signal(number)
        assert told.value.code == 128 + number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN if each == ignored else signal.SIG_DFL)


def test_what_comes_after_the_first_disturbs_nothing_on_the_way_out() -> None:
    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            for number in SIGNALS:
                signal.raise_signal(number)

    with pytest.raises(Interrupted, match="stopped by SIGTERM"), interruptible():
        work()
    assert handlers() == [signal.SIG_IGN] * 3
