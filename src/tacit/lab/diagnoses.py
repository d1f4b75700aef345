"""Diagnoses of a user's script on an emulated cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from tacit.environment import ALGORITHM, DIAGNOSE
from tacit.errors import TestbedError
from tacit.foresight.diagnosis import Diagnosis
from tacit.hooks.diagnosing import SETTLING, STEPS, DiagnoseRequest
from tacit.lab.cluster import Cluster
from tacit.lab.testbed import Testbed

__all__ = ["of_script"]

_SECONDS = 1200.0
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
    with TemporaryDirectory() as folder:
        out = Path(folder) / "diagnosis.json"
        request = DiagnoseRequest(str(out), steps, ends=True, tells=False)
        variables = {DIAGNOSE: json.dumps(asdict(request))}
        if algorithm is not None:
            variables[ALGORITHM] = algorithm
        with Testbed(cluster) as bed:
            result = bed.run([*_MODULE, *words], env=variables, on_line=on_line, timeout=_SECONDS)
        if not out.exists():
            needed = SETTLING + (steps or STEPS) + 2
            raise TestbedError(
                f"the script has ended with code {result.returncode}, and nothing was found out: it must "
                "train a model of DistributedDataParallel, or attach tacit with its optimizer, and take "
                f"{needed} steps or more"
            )
        return Diagnosis.from_json(out.read_text())
