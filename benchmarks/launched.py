"""Scripts run on every rank of an emulated cluster: what their ranks tell, and why they failed."""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tacit_lab.testbed import Result, Testbed
    from tacit_lab.testbed.launch import Serving

_MARK = "RESULT "
KEPT_LINES = 400
_LONGEST = 300


def refuse_early(cluster: str) -> None:
    """Raise SystemExit, saying why, unless there can be such a cluster here."""
    with _testbed(cluster):
        pass


@contextmanager
def _testbed(cluster: str) -> Iterator[Testbed]:
    from tacit.errors import TestbedError
    from tacit_lab.cluster import Cluster
    from tacit_lab.testbed import Testbed

    try:
        with Testbed(Cluster.parse(cluster)) as bed:
            yield bed
    except TestbedError as error:
        raise SystemExit(f"{cluster}: {error}") from error


def tell(found: object) -> None:
    """Print, on one rank, what `in_testbed` is to give."""
    print(_MARK + json.dumps(found), flush=True)


def in_testbed(
    cluster: str, argv: Sequence[str], *, servers: Serving | None = None, timeout: float | None = None
) -> Any:
    """Run a script on every rank of an emulated cluster, and give what one of them `tell`s.

    `servers`, `timeout`: as of `Testbed.run`.

    Raises:
        SystemExit: there can be no such cluster here, a rank failed, or none told anything.
    """
    lines: deque[str] = deque(maxlen=KEPT_LINES)

    def listen(node: int, line: str) -> None:
        lines.append(f"node {node}: {line}")
        if line.strip():
            print(lines[-1], file=sys.stderr)

    result, found = heard(cluster, argv, listen, servers=servers, timeout=timeout)
    if result.returncode or not found:
        raise SystemExit(f"{Path(argv[0]).name} on {cluster}: {last_words(result, [*lines], timeout)}")
    if result.relayed is not None:
        print(result.relayed, file=sys.stderr)
    return found[0]


def heard(
    cluster: str,
    argv: Sequence[str],
    on_line: Callable[[int, str], None],
    *,
    env: Mapping[str, str] = MappingProxyType({}),
    servers: Serving | None = None,
    timeout: float | None = None,
) -> tuple[Result, list[Any]]:
    """Run a script on every rank of an emulated cluster: how it ended, and what its ranks told.

    `on_line` gets the node and the line of all else that they print; the rest is as of `Testbed.run`.

    Raises:
        SystemExit: there can be no such cluster here.
    """
    found: list[Any] = []

    def listen(node: int, line: str) -> None:
        if line.startswith(_MARK):
            found.append(json.loads(line.removeprefix(_MARK)))
        else:
            on_line(node, line)

    with _testbed(cluster) as bed:
        result = bed.run([*argv], on_line=listen, env=env, servers=servers, timeout=timeout)
    return result, found


def last_words(result: Result, lines: Sequence[str], timeout: float | None = None) -> str:
    """Why a run failed: the exception of the rank that failed first, or else how it ended."""
    if result.timed_out:
        return (
            "was not done in time, and was ended"
            if timeout is None
            else (f"was not done after {timeout:.0f} s, and was ended")
        )
    if not result.failures:
        return "ended without a result"
    first = result.failures[0]
    if first.traceback:
        return raised(first.traceback)[:_LONGEST]
    head = f"node {first.node}: "
    said = [line.removeprefix(head).strip() for line in lines if line.startswith(head)]
    aborted = [line for line in said if line.startswith("what():")]
    return f"{first}: {aborted[0]}"[:_LONGEST] if aborted else str(first)


def raised(traceback: str) -> str:
    """The exception of a traceback; and where it was raised, if it says nothing."""
    written = [line.strip() for line in traceback.splitlines() if line.strip()]
    last = ([line for line in written if re.match(r"[\w.]*(Error|Exception)\b", line)] or written)[-1]
    # torch says so once for each callback on the way.
    last = re.sub(r"(RuntimeError: Got the following error when running the callback: )+", "", last)
    frames = re.findall(r'File "(.*)", line (\d+), in (.*)', traceback)
    if ":" in last or not frames:
        return last
    file, line, function = frames[-1]
    return f"{last}, in {function} ({Path(file).name}:{line})"
