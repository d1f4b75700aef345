"""Diagnoses of a user's script on an emulated cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from tacit.environment import ALGORITHM, DIAGNOSE
from tacit.planning.diagnosis import Diagnosis
from tacit.planning.live_diagnosis import DiagnoseRequest, needs
from tacit_lab.cluster import Cluster
from tacit_lab.first_steps import run_until_written

_MODULE = ("-m", "tacit.diagnose")


def of_script(
    cluster: Cluster,
    words: Sequence[str],
    algorithm: str | None = None,
    steps: int = 0,
    on_line: Callable[[int, str], None] | None = None,
) -> Diagnosis:
    """Run a script until its steps have been looked at, and end it.

    Args:
        words: the script and its arguments, as for torchrun.
        algorithm: what `tacit.from_env` returns in it.
        steps: how many are looked at; 0: as many as are enough.
        on_line: takes what the ranks print.

    Raises:
        TestbedError: it has ended before.
    """

    def variables(out: Path) -> dict[str, str]:
        request = DiagnoseRequest(str(out), steps, ends=True, logs=False)
        chosen = {} if algorithm is None else {ALGORITHM: algorithm}
        return {DIAGNOSE: json.dumps(asdict(request)), **chosen}

    unmet = f"there is no diagnosis: {needs(steps)}"
    return Diagnosis.from_json(run_until_written(cluster, [*_MODULE, *words], variables, unmet, on_line))
