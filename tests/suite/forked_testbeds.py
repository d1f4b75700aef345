"""Testbeds, and trainings beside each other, whose processes are forks."""

import os
import subprocess
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from forks import Fork
from tacit_lab.testbed import testbed

BED = str(Path(__file__).with_name("forked_testbed_init.py"))
SPAWN = str(Path(__file__).with_name("forked_spawn.py"))
ALL = range(8)
_spawn = util.spawnv_passfds  # type: ignore[attr-defined]


def _forked(path: bytes, args: Sequence[str | bytes], passed: Sequence[int]) -> int:
    """As `multiprocessing` begins a process, whose helpers are its own."""
    *_, code, mark = map(os.fsdecode, args)
    if mark != "--multiprocessing-fork":
        number: int = _spawn(path, args, passed)
        return number
    process = Fork([os.fsdecode(path), SPAWN, mark, code], pass_fds=passed)
    process.returncode = 0  # it is waited for by its number, and not by this object
    return process.pid


@contextmanager
def forked_testbeds(fresh: Collection[int] = ()) -> Iterator[None]:
    """Testbeds that begin meanwhile are forks of a process that has imported torch, as is all in them.

    And so are processes that `multiprocessing` spawns.

    Args:
        fresh: ranks that are interpreters of their own nevertheless, and have a hash seed of their own.
    """

    def begun(argv: list[str], *, env: dict[str, str], **given: Any) -> Fork:
        python, *_ = argv
        arguments = argv[argv.index("tacit_lab.testbed.init") + 1 :]
        return Fork([python, BED, *arguments], env=env | {"FRESH": ",".join(map(str, fresh))}, **given)

    with (
        patch.object(testbed, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": begun})),
        patch.object(util, "spawnv_passfds", _forked),
    ):
        yield
