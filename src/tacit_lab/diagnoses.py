"""Diagnoses of a user's script on an emulated cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from tacit.algorithms import parse
from tacit.algorithms.auto import candidates
from tacit.environment import ALGORITHM, DIAGNOSE
from tacit.planning.candidates import fitting_texts
from tacit.planning.diagnosis import Diagnosis
from tacit.planning.live_diagnosis import DiagnoseRequest, needs
from tacit.planning.profile import Profile
from tacit_lab import cluster_plans
from tacit_lab.cluster import Cluster
from tacit_lab.first_steps import run_until_written
from tacit_lab.measured_costs import with_costs
from tacit_lab.profile_diagnoses import diagnosis_of
from tacit_lab.testbed import Testbed

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
    with Testbed(cluster) as bed:
        return Diagnosis.from_json(run_until_written(bed, [*_MODULE, *words], variables, unmet, on_line))


def sizes(path: Path) -> list[str]:
    """The clusters for which a saved profile has costs, such as 4x8."""
    return [*dict.fromkeys(f"{each.nodes}x{each.ranks}" for each in Profile.load(path).costs)]


def of_profile(path: Path, cluster: Cluster, algorithm: str) -> Diagnosis:
    """Diagnose the steps that a saved profile predicts for a cluster; see `profile_diagnoses`.

    What algorithms cost that the profile lacks is measured here, if it is of this machine's processor.

    Raises:
        ConfigError: the file holds no profile, or one of a sharded model, or not what the algorithm costs on
            such a cluster.
    """
    profile = Profile.load(path)
    profile.check_whole()
    others, _ = fitting_texts(candidates("feedback"), profile, asked=False)
    layouts = cluster_plans.layouts(cluster.nodes, cluster.ranks_per_node)
    profile = with_costs(profile, [*dict.fromkeys((algorithm, *others))], layouts)
    return diagnosis_of(profile, cluster_plans.of_cluster(cluster, profile), parse(algorithm))
