"""A server's state on disk: replaced as a whole, so that there always is a whole one."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tacit.errors import ConfigError
from tacit.transports.pairs import dumps, loads

_log = logging.getLogger("tacit")

VERSION = 2
_UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.PickleError)


class Kept:
    """The file that a server saves its state to, every so many seconds; None: nowhere.

    The state is copied between two messages, and written by a thread of its own. A disk that is full, or any
    other failure to write, is logged once and does not stop the server: the file stays as it was.

    Args:
        workers: how many there are; a checkpoint knows each of them.

    Raises:
        ConfigError: the folder that the file is to be in is not there.
    """

    def __init__(self, path: Path | None, every: float, workers: int) -> None:
        if path is not None and not path.parent.is_dir():
            raise ConfigError(
                f"--checkpoint {path} cannot be written, as there is no folder {path.parent}: make it, or "
                "give another file"
            )
        self._path, self._every, self._workers = path, every, workers
        self._last = time.monotonic()
        self._told = False
        self._writing: threading.Thread | None = None

    def load(self) -> Mapping[str, Any] | None:
        """What was saved; None where there is no file.

        Raises:
            ConfigError: the file is none of a server, cannot be read, or is of another number of workers.
        """
        if self._path is None or not self._path.exists():
            return None
        try:
            saved = torch.load(self._path, weights_only=True)
            if saved["version"] != VERSION:
                raise ValueError(f"it is of version {saved['version']}, and this tacit reads {VERSION}")
            found = {**saved, **loads(saved["about"])}
        except _UNREADABLE as error:
            raise ConfigError(
                f"{self._path} is no checkpoint of a server that can be resumed ({error}): give another "
                "--checkpoint, or move it away"
            ) from error
        if found["workers"] != self._workers:
            raise ConfigError(
                f"{self._path} is of a run of {found['workers']} workers, and there are {self._workers}: run "
                f"{found['workers']}, or give another --checkpoint"
            )
        return found

    def save(self, state: Callable[[], Mapping[str, Any] | None], last: bool = False) -> None:
        """Save it, if it is time and the last time is over; `last`: now, and wait until it is written."""
        if self._path is None:
            return
        if last:
            self._join()
        elif time.monotonic() - self._last <= self._every or self._busy:
            return
        found = state()
        self._last = time.monotonic()
        if found is None:
            return
        about = {key: value for key, value in found.items() if key != "shards"} | {"workers": self._workers}
        told = {"version": VERSION, "about": dumps(about), "shards": found["shards"]}
        self._writing = threading.Thread(target=self._write, args=(self._path, told), name="tacit-save")
        self._writing.start()
        if last:
            self._join()

    @property
    def _busy(self) -> bool:
        return self._writing is not None and self._writing.is_alive()

    def _join(self) -> None:
        if self._writing is not None:
            self._writing.join()

    def _write(self, path: Path, told: Mapping[str, Any]) -> None:
        unfinished = path.with_name(path.name + ".part")
        whole = io.BytesIO()
        torch.save(told, whole)
        try:
            with unfinished.open("wb") as file:
                file.write(whole.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            if not self._told:
                _log.error(
                    "the checkpoint %s cannot be written, and stays as it was; training goes on: %s",
                    *(path, error.strerror or error),
                )
            self._told = True
