"""Testbeds whose processes are forks."""

import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from forks import Fork
from tacit_lab.testbed import testbed

BED = str(Path(__file__).with_name("forked_testbed_init.py"))
ALL = range(8)


@contextmanager
def forked_testbeds(fresh: Collection[int] = ()) -> Iterator[None]:
    """Testbeds that begin meanwhile are forks of a process that has imported torch, as is all in them.

    Args:
        fresh: ranks that are interpreters of their own nevertheless, and have a hash seed of their own.
    """

    def begun(argv: list[str], *, env: dict[str, str], **given: Any) -> Fork:
        python, *_ = argv
        arguments = argv[argv.index("tacit_lab.testbed.init") + 1 :]
        return Fork([python, BED, *arguments], env=env | {"FRESH": ",".join(map(str, fresh))}, **given)

    with patch.object(testbed, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": begun})):
        yield
