"""A server's state on disk: replaced as a whole, so that there always is a whole one."""

from __future__ import annotations

import io
import logging
import os
import pickle
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tacit.errors import ConfigError
from tacit.transports.pairs import dumps, loads

_log = logging.getLogger("tacit")

VERSION = 1


class Kept:
    """The file that a server saves its state to, every so many seconds; None: nowhere.

    A disk that is full, or any other failure to write, is logged once and does not stop the server: the file
    stays as it was.
    """

    def __init__(self, path: Path | None, every: float) -> None:
        self._path, self._every = path, every
        self._last = time.monotonic()
        self._told = False

    def load(self) -> Mapping[str, Any] | None:
        """What was saved; None where there is no file.

        Raises:
            ConfigError: the file is none of a server, or cannot be read.
        """
        if self._path is None or not self._path.exists():
            return None
        try:
            saved = torch.load(self._path, weights_only=True)
            if saved["version"] != VERSION:
                raise ValueError(f"it is of version {saved['version']}, and this tacit reads {VERSION}")
            return {**saved, **loads(saved["about"])}
        except (
            OSError,
            RuntimeError,
            ValueError,
            KeyError,
            TypeError,
            EOFError,
            pickle.PickleError,
        ) as error:
            raise ConfigError(
                f"{self._path} is no checkpoint of a server that can be resumed ({error}): give another "
                "--checkpoint, or move it away"
            ) from error

    def save(self, state: Callable[[], Mapping[str, Any] | None], last: bool = False) -> None:
        """Save it, if it is time, or the last time."""
        now = time.monotonic()
        if self._path is None or not (last or now - self._last > self._every):
            return
        self._last = now
        found = state()
        if found is None:
            return
        about = {key: value for key, value in found.items() if key != "shards"}
        self._write(self._path, {"version": VERSION, "about": dumps(about), "shards": found["shards"]})

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
            unfinished.unlink(missing_ok=True)
            if not self._told:
                _log.error(
                    "the server's checkpoint %s cannot be written, and stays as it was; training goes on: %s",
                    *(path, error.strerror or error),
                )
            self._told = True
