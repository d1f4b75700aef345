"""A server's state on disk: replaced as a whole, so that there always is a whole one."""

from __future__ import annotations

import io
import logging
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tacit.errors import ConfigError, TacitError
from tacit.files import output, put, sweep
from tacit.server.words import KNOWN
from tacit.transports import told
from tacit.transports.messages import About

_log = logging.getLogger("tacit")

VERSION = 3
_UNREADABLE = (
    *(OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, EOFError, pickle.PickleError),
    TacitError,
)


class Saved(NamedTuple):
    """What a server knows.

    Attributes:
        about: what all workers have in common.
        shards: of each bucket, by its key, what its service has saved.
    """

    about: About
    shards: Mapping[str, Mapping[str, Any]]


class StateSlice:
    """The file that a server saves its state to, every so many seconds; None: nowhere.

    The state is copied between two messages, and written by a thread of its own. A disk that is full, or any
    other failure to write, is logged once and does not stop the server: the file stays as it was.

    Args:
        workers: how many there are; a checkpoint knows each of them.

    Raises:
        ConfigError: the folder that the file is to be in is not there, or there is no regular file.
    """

    def __init__(self, path: Path | None, every: float, workers: int) -> None:
        if path is not None and not path.parent.is_dir():
            raise ConfigError(
                f"--checkpoint {path} cannot be written, as there is no folder {path.parent}: make it, or "
                "give another file"
            )
        self._path = path and output(path, "--checkpoint")
        if self._path is not None:
            sweep(self._path)
        self._every, self._workers = every, workers
        self._last = time.monotonic()
        self._told = False
        self._writing: threading.Thread | None = None

    def load(self) -> Saved | None:
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
            workers, found = saved["workers"], Saved(told.read(saved["about"], About, KNOWN), saved["shards"])
            for key, shard in found.shards.items():
                _check(key, shard, workers)
        except _UNREADABLE as error:
            raise ConfigError(
                f"{self._path} is no checkpoint of a server that can be resumed ({error}): give another "
                "--checkpoint, or move it away"
            ) from error
        if workers != self._workers:
            raise ConfigError(
                f"{self._path} is of a run of {workers} workers, and there are {self._workers}: run "
                f"{workers}, or give another --checkpoint"
            )
        return found

    def save(self, state: Callable[[], Saved | None], last: bool = False) -> None:
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
        whole = {
            "version": VERSION,
            "workers": self._workers,
            "about": told.write(found.about),
            "shards": found.shards,
        }
        self._writing = threading.Thread(target=self._write, args=(self._path, whole), name="tacit-save")
        self._writing.start()
        if last:
            self._join()

    @property
    def _busy(self) -> bool:
        return self._writing is not None and self._writing.is_alive()

    def _join(self) -> None:
        if self._writing is not None:
            self._writing.join()

    def _write(self, path: Path, whole: Mapping[str, Any]) -> None:
        packed = io.BytesIO()
        torch.save(whole, packed)
        try:
            put(path, packed.getvalue(), durable=True)
        except ConfigError as error:
            if not self._told:
                _log.error(
                    "the checkpoint %s cannot be written, and stays as it was; training goes on: %s",
                    *(path, getattr(error.__cause__, "strerror", None) or error),
                )
            self._told = True


def _check(key: object, shard: object, workers: int) -> None:
    """Refuse what no service has saved, before a worker comes.

    Raises:
        ValueError: says of which bucket.
    """
    if not isinstance(shard, Mapping):
        raise ValueError(f"what it has of {key!r} is no state of a server")
    kinds = _AVERAGES if "number" in shard else _KEEPS
    if not isinstance(key, str) or not all(isinstance(shard.get(name), kinds[name]) for name in kinds):
        raise ValueError(f"what it has of {key!r} is no state of a server")
    clocks = shard.get("clocks", [0] * workers)
    if len(clocks) != workers or not all(isinstance(each, int) for each in clocks):
        raise ValueError(f"what it has of {key!r} is not of {workers} workers")
    if not isinstance(shard.get("x", torch.empty(0)), torch.Tensor):
        raise ValueError(f"the parameters of {key!r} are no tensor")


_AVERAGES = {"number": int, "owed": dict}
_KEEPS = {"version": int, "clocks": list, "rule": dict, "stale": dict, "late": int}
"""What a service saves, whether it averages or keeps the parameters."""
