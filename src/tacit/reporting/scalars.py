"""Curves: a session's numbers by step, for TensorBoard, Weights & Biases, MLflow, or a logger like theirs."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import Any, Protocol

from tacit import files
from tacit.errors import ConfigError, installing

FLUSH_SECONDS = 5
"""Seconds that a scalar may wait before it is on disk."""


class ScalarWriter(Protocol):
    """A writer of curves, such as `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Note the value that the curve `tag` has at this step."""


class MetricsRun(Protocol):
    """A run that takes all values of a step at once, such as `wandb.init()`, or an `Accelerator`."""

    def log(self, values: dict[str, float], /, *, step: int) -> object:
        """Note the values that these curves have at this step."""


class MetricsLogger(Protocol):
    """A logger such as the module `mlflow`, or one of Lightning's."""

    def log_metrics(self, metrics: dict[str, float], /, *, step: int) -> object:
        """Note the values that these curves have at this step."""


class Measured(Protocol):
    """A session, or anything else with numbers."""

    def metrics(self) -> Mapping[str, Any]:
        """The numbers, by name."""


def log_metrics(
    tracker: ScalarWriter | MetricsLogger | MetricsRun, session: Measured, step: int, prefix: str = "tacit"
) -> None:
    """Give every number of `session.metrics()` to a tracker of experiments, as `prefix/name` at `step`.

    Sums count from the session's start on this rank; one rank's curves are enough.

    Args:
        tracker: a `SummaryWriter` of TensorBoard, the run that `wandb.init()` returns, the module `mlflow`, a
            logger of Lightning, or anything else with `add_scalar`, `log_metrics` or `log` as these have it.
        session: what `tacit.attach` returned.
        step: the number of the step, of your own counting.
        prefix: stands before each name.

    Raises:
        ConfigError: the tracker has none of the three methods.
    """
    values = {f"{prefix}/{name}": value for name, value in session.metrics().items()}
    if hasattr(tracker, "add_scalar"):
        for name, value in values.items():
            tracker.add_scalar(name, value, step)
    elif hasattr(tracker, "log_metrics"):
        tracker.log_metrics(values, step=step)
    elif hasattr(tracker, "log"):
        tracker.log(values, step=step)
    else:
        raise ConfigError(
            f"log_metrics cannot write to {type(tracker).__name__}: give a tracker with add_scalar "
            "(TensorBoard's SummaryWriter), log_metrics (the module mlflow, Lightning's loggers) or log "
            "(the run of wandb.init())"
        )


def check(root: Path, names: Iterable[str]) -> None:
    """Check that runs of these names can write their curves below `root`.

    Raises:
        ConfigError: TensorBoard's package is missing, no folder can be there, or there are curves of such a
            run already.
    """
    check_installed()
    files.folder(root, "--tensorboard")
    for name in names:
        if _taken(root, name):
            raise ConfigError(
                f"{_folder(root, name)} holds the curves of another run, and two in one folder are drawn as "
                "one: give another --tensorboard"
            )


def check_installed() -> None:
    """Check that TensorBoard's package is there.

    Raises:
        ConfigError: TensorBoard's package is missing.
    """
    if find_spec("tensorboard") is None:
        raise ConfigError(f"curves need the package tensorboard: {installing('tensorboard')}")


def open_writer(root: Path, name: str) -> Any:
    """A `SummaryWriter` in a separate folder below `root`: TensorBoard draws such curves into one chart.

    Raises:
        ConfigError: TensorBoard's package is missing.
    """
    check_installed()
    from torch.utils.tensorboard import SummaryWriter

    _hush_threads()
    return SummaryWriter(str(_folder(root, name)), flush_secs=FLUSH_SECONDS)


@cache
def _hush_threads() -> None:
    """Let TensorBoard's threads print no traceback of a disk that is full.

    The next call of the writer raises the same error, where it can be handled.
    """
    others = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        of_writer = type(args.thread).__module__.startswith("tensorboard.")
        if not (of_writer and isinstance(args.exc_value, OSError)):
            others(args)

    threading.excepthook = hook


def free(root: Path, name: str) -> str:
    """The name, or where it has curves already, the first of `name.2`, `name.3` and so on that has none."""
    names = chain([name], (f"{name}.{i}" for i in count(2)))
    return next(each for each in names if not _taken(root, each))


def _taken(root: Path, name: str) -> bool:
    return any(_folder(root, name).glob("events.out.tfevents.*"))


def _folder(root: Path, name: str) -> Path:
    return root / name.replace("/", "_")
