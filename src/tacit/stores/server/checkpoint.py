"""A server's checkpoint: one file, which is replaced as a whole, so that there always is a whole one."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import torch
from torch import Tensor

from tacit import described
from tacit.described import Positive, Whole
from tacit.errors import ConfigError, TacitError
from tacit.files import output, put, sweep
from tacit.stores import encoding
from tacit.stores.messages import RunSpec
from tacit.stores.server.allowed_types import AllowedTypes
from tacit.stores.service import SavedState

_log = logging.getLogger("tacit")

VERSION = 4


class SavedAverages(TypedDict):
    """What `AveragingService.save` gives."""

    number: Whole
    residuals: dict[int, Tensor]
    answers: NotRequired[dict[int, dict[str, Tensor]]]


class SavedParameters(TypedDict):
    """What `ParameterService.save` gives."""

    x: NotRequired[Tensor]
    version: Whole
    clocks: list[Whole]
    optimizer: dict[str, Tensor]
    stale: dict[int, Whole]
    late: Whole


class _File(TypedDict):
    version: Literal[4]
    workers: Positive
    run: bytes
    buckets: dict[str, Any]


class ServerSnapshot(NamedTuple):
    """What a server knows.

    Attributes:
        run: what all workers have in common.
        buckets: of each bucket, by its key, what its service has saved.
    """

    run: RunSpec
    buckets: Mapping[str, SavedState]


class CheckpointFile:
    """The file to which a server saves its state at intervals; None: it saves nothing.

    The state is copied between two messages, and written by a separate thread. A disk that is full, or any
    other failure to write, is logged once and does not stop the server: the file stays as it was.

    Args:
        given: the file, and the seconds between two saves.
        workers: the number of workers, which a checkpoint has, too.
        allowed: the classes that workers may name, and the file too.

    Raises:
        ConfigError: the folder that the file is to be in is not there, or there is no regular file.
    """

    def __init__(self, given: tuple[Path, float] | None, workers: int, allowed: AllowedTypes) -> None:
        path, every = given or (None, 0.0)
        if path is not None and not path.parent.is_dir():
            raise ConfigError(
                f"--checkpoint {path} cannot be written, as there is no folder {path.parent}: make it, or "
                "give another file"
            )
        self._path = path and output(path, "--checkpoint")
        if self._path is not None:
            sweep(self._path)
        self._every, self._workers, self._allowed = every, workers, allowed
        self._last = time.monotonic()
        self._logged = False
        self._writing: threading.Thread | None = None

    def load(self) -> ServerSnapshot | None:
        """What was saved; None where there is no file.

        Raises:
            ConfigError: the file is none of a server, cannot be read, or is of another number of workers.
        """
        if self._path is None or not self._path.exists():
            return None
        try:
            saved = described.load(self._path)
            version = saved.get("version") if isinstance(saved, dict) else None
            if version != VERSION:
                raise ValueError(f"it is of version {version}, and this tacit reads version {VERSION}")
            saved = described.read(saved, _File)
            workers, run = saved["workers"], encoding.read(saved["run"], RunSpec, self._allowed)
            buckets = {key: _read(key, bucket, workers) for key, bucket in saved["buckets"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, TacitError) as error:
            raise ConfigError(
                f"{self._path} is no checkpoint of a server that can be resumed ({error}): give another "
                "--checkpoint, or move it away"
            ) from error
        if workers != self._workers:
            raise ConfigError(
                f"{self._path} is of a run of {workers} workers, and there are {self._workers}: run "
                f"{workers}, or give another --checkpoint"
            )
        return ServerSnapshot(run, buckets)

    def save(self, state: Callable[[], ServerSnapshot | None], last: bool = False) -> None:
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
            "run": encoding.write(found.run),
            "buckets": found.buckets,
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
            if not self._logged:
                _log.error(
                    "the checkpoint %s cannot be written, and stays as it was; training goes on: %s",
                    *(path, getattr(error.__cause__, "strerror", None) or error),
                )
            self._logged = True


def _read(key: str, bucket: Any, workers: int) -> SavedState:
    """Read the saved state of a service, before a worker connects.

    Raises:
        ValueError: it is something else; the message names the bucket.
    """
    averages = isinstance(bucket, Mapping) and not bucket.keys().isdisjoint(("number", "residuals"))
    kind = SavedAverages if averages else SavedParameters
    found: SavedState = described.read(bucket, kind, f"what it has of {key!r}")
    if len(found.get("clocks", [0] * workers)) != workers:
        raise ValueError(f"what it has of {key!r} is not of {workers} workers")
    if "x" in found:
        for name, each in found["optimizer"].items():
            described.tensor(each, f"{name} of {key!r}", found["x"].shape if each.dim() else ())
    return found
