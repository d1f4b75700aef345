"""The command line called in this process, which has imported torch: a command of its own would anew."""

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO
from unittest.mock import patch

import pytest

from forked_testbeds import forked_testbeds
from forks import Done
from tacit_lab import cli


def called(*words: str, cwd: Path | str = ".", fresh: Collection[int] = ()) -> Done:
    """As `tacit WORDS` in a shell; what it starts are forks, but for ranks that are to be `fresh`."""
    with TemporaryFile("w+", encoding="utf-8") as out, TemporaryFile("w+", encoding="utf-8") as err:
        with (
            chdir(cwd),
            forked_testbeds(fresh),
            patch.object(sys, "argv", ["tacit", *words]),
            _redirected(1, "stdout", out),
            _redirected(2, "stderr", err),
            pytest.raises(SystemExit) as end,
        ):
            cli.main()
        code = end.value.code
        assert isinstance(code, int), code
        return Done(code, *(_text(file) for file in (out, err)))


@contextmanager
def _redirected(number: int, name: str, file: IO[str]) -> Iterator[None]:
    """The stream of this name, and the file of this number that processes inherit."""
    getattr(sys, name).flush()
    saved = os.dup(number)
    os.dup2(file.fileno(), number)
    try:
        with open(number, "w", encoding="utf-8", closefd=False) as stream, patch.object(sys, name, stream):
            yield
    finally:
        os.dup2(saved, number)
        os.close(saved)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
