"""Who looks on while a session trains, where an environment variable asks for it: launchers set them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tacit.environment import DIAGNOSE, FOOTPRINT, STEP_PROFILE, TENSORBOARD, TRIAL

_REPORTS = {
    FOOTPRINT: "tacit.reporting.run_report",
    TENSORBOARD: "tacit.reporting.tensorboard",
    TRIAL: "tacit.reporting.trials",
}
_STUDIES = {STEP_PROFILE: "tacit.planning.step_profiler", DIAGNOSE: "tacit.planning.live_diagnosis"}
"""By their variables; each has `began(session)`, and reports `ended(session)`. None is loaded for nothing."""


def called(function: str) -> None:
    """Report that the script calls this function of tacit, before it can fail."""
    if FOOTPRINT in os.environ:
        import_module(_REPORTS[FOOTPRINT]).called(function)


def began(session: object) -> None:
    """Notify the requested observers of a session that is at work."""
    for each in _asked_for(_REPORTS) + _asked_for(_STUDIES):
        each.began(session)


def ended(session: object) -> None:
    """Notify them that it was closed."""
    for each in _asked_for(_REPORTS):
        each.ended(session)


def _asked_for(modules: Mapping[str, str]) -> list[Any]:
    return [import_module(module) for variable, module in modules.items() if variable in os.environ]
