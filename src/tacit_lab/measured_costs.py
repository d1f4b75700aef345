"""What algorithms cost that a saved profile lacks, measured here if the profile is of this processor."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from tacit.algorithms import parse
from tacit.errors import ConfigError, TacitError
from tacit.planning.cluster_prediction import refuse
from tacit.planning.profile import Profile
from tacit.planning.simulation.costs import cost_on
from tacit.planning.step_profiler import measurable
from tacit.planning.strategy_costs import measured_cost


def predictable(texts: Sequence[str]) -> list[str]:
    """The strategies whose cost can be measured."""
    found = []
    for text in texts:
        try:
            refuse(parse(text))
        except ConfigError:
            continue
        found.append(text)
    return found


def with_costs(profile: Profile, texts: Sequence[str], layouts: Sequence[tuple[int, int]]) -> Profile:
    """Measure here the costs that the profile does not have, if it is of this machine's processor.

    What cannot be measured stays away: whoever predicts it is told why.
    """
    torch.set_num_threads(profile.threads)
    found = []
    for text in predictable(texts):
        try:
            for nodes, ranks in layouts:
                cost_on(profile, text, nodes, ranks)
        except ConfigError:
            if not measurable(profile):
                continue
            with suppress(TacitError):
                found += [measured_cost(parse(text), profile, *layout) for layout in layouts]
    return profile.with_costs(found)
