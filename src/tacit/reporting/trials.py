"""What `tacit compare` asks of a script that it trains, and what the script reports to it.

The ranks print marked lines of JSON on file descriptor 1, each in one write, so that those of several ranks
do not mix. Without the environment variable `TACIT_TRIAL`, which `tacit compare` sets, nothing is printed.
"""

from __future__ import annotations

import json
import os
from operator import index
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from tacit import files
from tacit.environment import FOOTPRINT, INTERFACE, TRIAL
from tacit.errors import ConfigError
from tacit.levels.spec import AttachSpec
from tacit.model.trained_model import locals_of
from tacit.stores.server.counters import transmitted_bytes
from tacit.timelines import Timeline, now

MARK = "@tacit-trial "
"""How a line begins that is for the command."""


class TrialSettings(NamedTuple):
    """What one training of a comparison differs in from the others.

    Attributes:
        seed: for the initial weights and the order of the data.
        rate: what the script's learning rate is multiplied by.
        steps: how long to train, under `tacit study`; None: as long as the script likes.
    """

    seed: int = 0
    rate: float = 1.0
    steps: int | None = None


class Traced(Protocol):
    """An attached session."""

    @property
    def options(self) -> AttachSpec:
        """The model, and what else it works on."""

    def timeline(self) -> Timeline:
        """When this rank computed and waited."""


def trial() -> TrialSettings:
    """The seed and the factor on the learning rate that `tacit compare --seeds --rates` asks for.

    Elsewhere the seed is 0 and the factor 1. Under `tacit study` there is a number of steps too:

        asked = tacit.trial()
        torch.manual_seed(asked.seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * asked.rate)
        for step in range(asked.steps or 1000):
    """
    if TRIAL not in os.environ:
        return TrialSettings()
    _tell("asked")
    return TrialSettings(**json.loads(os.environ[TRIAL]))


def report(
    step: int,
    *,
    loss: Tensor | float | None = None,
    accuracy: Tensor | float | None = None,
    validation: Tensor | float | None = None,
) -> None:
    """Report to `tacit compare` how a script's training is going. Elsewhere it does nothing.

    Call it on every rank, with the same names each time; the command takes the mean over the ranks. It is no
    collective call.

    Args:
        step: how many steps have been taken.
        loss: the lower the better, on held-out data where there is some.
        accuracy: a share, 0..1, on held-out data.
        validation: what learning rates are chosen by, the higher the better, on data that neither training
            nor the other two numbers use; without it the accuracy, or else minus the loss.

    Raises:
        ConfigError: under `tacit compare`, if a number is not possible, or none is given.
    """
    if TRIAL not in os.environ:
        return
    if isinstance(step, bool) or not hasattr(step, "__index__") or step < 0:
        raise ConfigError(f"tacit.report was called with step={step!r}: write how many steps have been taken")
    given = {"loss": loss, "accuracy": accuracy, "validation": validation}
    numbers = {name: _number(name, value) for name, value in given.items() if value is not None}
    if not numbers:
        raise ConfigError("tacit.report was called without a number: write loss=, accuracy= or both")
    if "accuracy" in numbers and not 0 <= numbers["accuracy"] <= 1:
        raise ConfigError(f"tacit.report was called with accuracy={accuracy}: write a share from 0 to 1")
    _tell("report", step=index(step), numbers=numbers)


def _number(name: str, value: Tensor | float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"tacit.report was called with {name}={value!r:.60}: write a number, or a tensor of one entry"
        ) from None


def began(session: Traced) -> None:
    """Report that a script has attached a session, and with which weights it begins."""
    session.timeline()  # what has to be asked for is noted from now on
    named = session.options.named
    _tell(
        "began",
        parameters=sum(each.numel() for each in named.values()),
        weights=sum(float(each.detach().double().sum()) for each in locals_of(named).values()),
    )


def ended(session: Traced) -> None:
    """Report that it has closed a session, and write down when this rank computed and waited."""
    _tell("ended")
    folder = Path(os.environ[FOOTPRINT])
    with files.spared(f"the timelines are not kept in {folder}"):
        files.put(folder / f"timeline{_rank()}.jsonl", session.timeline().to_json() + "\n")


def _tell(kind: str, **facts: Any) -> None:
    interface = os.environ.get(INTERFACE)
    sent = transmitted_bytes(interface) if interface else None
    said = {"kind": kind, "rank": _rank(), "at": now(), "sent": sent, **facts}
    os.write(1, f"{MARK}{json.dumps(said)}\n".encode())


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
