"""A session that a framework's callback opens and closes."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tacit.algorithms.registry import strategy_of
from tacit.api.attach import attach
from tacit.api.attached import Attached
from tacit.errors import AttachError, ConfigError, TacitError
from tacit.strategy import AnyStrategy

_GIVEN = ("model", "optimizer", "strategy", "scaler")
"""What `attach` gets of the framework."""


def imported(module: str, pip: str) -> Any:
    """A framework's module.

    Args:
        module: its name.
        pip: what pip installs it by.

    Raises:
        ModuleNotFoundError: it is not installed; says how to install it.
    """
    package = module.partition(".")[0]
    if find_spec(package) is None:
        raise ModuleNotFoundError(f"{package} is not installed: pip install '{pip}'", name=package)
    return import_module(module)


def require(package: str, installed: str, least: str) -> None:
    """Refuse a framework that is too old.

    Args:
        package: its name.
        installed: its version.
        least: the first version that is known to work.

    Raises:
        AttachError: says which is needed.
    """
    if _numbers(installed) < _numbers(least):
        raise AttachError(
            f"{package} {installed} is installed, and tacit needs {least} or a later one: "
            f"pip install '{package}>={least}'"
        )


def _numbers(version: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", version)[:2]]


class ManagedSession:
    """What callbacks do alike: opens a session, looks whether its hooks are called, and closes it.

    Args:
        strategy: a value, or its text form.
        options: of `attach`, but for those that the framework knows.

    Raises:
        ConfigError: the text is no strategy, or an option is none.

    Attributes:
        options: of `attach`, as given.
        session: while it is open.
        looked: whether it was seen that torch calls its hooks.
    """

    def __init__(self, strategy: AnyStrategy | str, options: dict[str, Any]) -> None:
        self.strategy = strategy_of(strategy)
        known = [name for name in inspect.signature(attach).parameters if name not in _GIVEN]
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"{name}= is no option here: the framework gives model, optimizer and scaler; "
                    f"others are {', '.join(known)}"
                )
        self.options = options
        self.looked = False
        self.session: Attached | None = None

    @property
    def names_replicas(self) -> bool:
        """Whether the user says which ranks have the same shards, by `mesh=` or `group=`."""
        return bool({"mesh", "group"} & self.options.keys())

    def open(
        self, model: nn.Module, optimizers: Any, scaler: Any, mesh: DeviceMesh | None = None
    ) -> Attached:
        """Attach. A collective call.

        `mesh`: of a sharded model's replicas, unless the user gave one.
        """
        options = {"scaler": scaler, "mesh": mesh} | self.options
        self.session = attach(model, optimizers, self.strategy, **options)
        self.looked = False
        return self.session

    def stepped(self) -> None:
        """Check after every step: raises if torch has not called the hooks in the first one."""
        if self.session is not None and not self.looked:
            self.looked = True
            self.session.check_called()

    def sync(self) -> None:
        """Make replicas equal, if a session is open and they step alone. A collective call."""
        if self.session is not None and self.session.options.periodic:
            self.session.sync()

    def close(self) -> None:
        """Close the session, if one is open."""
        session, self.session = self.session, None
        if session is not None:
            session.close()

    def fail(self, error: BaseException) -> None:
        """Let go of the session without the other ranks; which of them was lost is noted at the error."""
        session, self.session = self.session, None
        if session is None:
            return
        try:
            session.__exit__(type(error), error, error.__traceback__)
        except TacitError as lost:
            error.add_note(f"{type(lost).__name__}: {lost}")
