"""Profiles of trainings, taken in processes of the testbed: of a script of the user's, or of a recipe."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from tacit.environment import ALGORITHM, STEP_PROFILE
from tacit.errors import TestbedError
from tacit.planning.profile import Profile
from tacit_lab.first_steps import run_until_written
from tacit_lab.testbed import Testbed

_QUIET = "localsgd:sync_every=1000000"
"""Trains as DDP would, and sends nothing meanwhile."""


def of_script(
    bed: Testbed,
    words: Sequence[str],
    algorithms: Sequence[str],
    layouts: Sequence[tuple[int, int]],
    on_line: Callable[[int, str], None] | None = None,
    asked: bool = True,
) -> Profile:
    """Run a script until it has been profiled, and end it.

    Args:
        bed: where it runs; it is up.
        words: the script and its arguments, as for torchrun.
        algorithms: the strategies whose cost is measured, for clusters of `layouts`.
        on_line: takes what the ranks print.
        asked: whether the user has named the algorithms; see `ProfileRequest`.

    Raises:
        TestbedError: it has ended before.
    """

    def variables(out: Path) -> dict[str, str]:
        wanted = {"algorithms": [*algorithms], "layouts": [*layouts], "asked": asked}
        request = {"out": str(out), "ends": True, **wanted}
        return {STEP_PROFILE: json.dumps(request), ALGORITHM: _QUIET}

    needs = (
        "there is no profile: it must attach tacit to its model, with its optimizer, and take 20 steps or "
        "more"
    )
    return Profile.from_json(run_until_written(bed, words, variables, needs, on_line))


def of_recipe(
    bed: Testbed,
    words: Sequence[str],
    algorithms: Sequence[str],
    layouts: Sequence[tuple[int, int]],
    asked: bool = True,
) -> Profile:
    """Profile a recipe, as `of_script` does; `words` are its name and its choices, as options."""
    worker = ["-m", "tacit_lab.recipes.worker", *words, "--algorithm", _QUIET]
    lines: list[str] = []
    try:
        return of_script(
            bed,
            worker,
            algorithms,
            layouts,
            lambda _, line: lines.append(line),
            asked,
        )
    except TestbedError as error:
        raise TestbedError(f"{error}\n" + "\n".join(lines)[-2000:]) from None
