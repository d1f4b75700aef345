"""TensorBoard curves of a script's sessions while they train, for `tacit run --tensorboard`.

If the environment variable `TACIT_TENSORBOARD` names a folder, rank 0 writes the numbers of every session
into it once a second, each session as a separate run; else nothing happens. If the folder cannot be written,
a note says so once, and the script goes on.
"""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import AbstractContextManager
from pathlib import Path

from tacit import files
from tacit.environment import TENSORBOARD
from tacit.reporting import scalars
from tacit.reporting.run_report import Counted
from tacit.transports.process_groups import rank_in

SECONDS = 1.0

_OPEN: dict[Counted, _CurveWriter] = {}


class _CurveWriter:
    """Writes a session's numbers from a thread, and once more as it is closed."""

    def __init__(self, session: Counted, root: Path) -> None:
        self._session, self.process = session, os.getpid()
        self._writer = scalars.open_writer(root, scalars.free(root, session.strategy.name))
        self._step = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tacit-curves", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(SECONDS):
            with _spared():
                self._write()

    def _write(self) -> None:
        step = int(self._session.metrics()["steps"])
        if step > self._step:
            self._step = step
            scalars.log_metrics(self._writer, self._session, step)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        with _spared():
            self._write()
            self._writer.close()


def began(session: Counted) -> None:
    """Write this session's curves from now on.

    Raises:
        ConfigError: TensorBoard's package is missing.
    """
    if TENSORBOARD not in os.environ:
        return
    root = Path(os.environ[TENSORBOARD])
    scalars.check_installed()  # on all ranks, so that none waits for one that has ended
    if rank_in() == 0:
        with _spared():
            _OPEN[session] = _CurveWriter(session, root)


def _spared() -> AbstractContextManager[None]:
    return files.spared(f"curves are not drawn any more in {os.environ.get(TENSORBOARD)}")


def ended(session: Counted) -> None:
    """Write the last points of a session that was closed."""
    if session in _OPEN:
        _OPEN.pop(session).close()


@atexit.register
def _end_all() -> None:
    for session in [each for each, writer in _OPEN.items() if writer.process == os.getpid()]:
        ended(session)
