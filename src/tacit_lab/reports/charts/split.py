"""Where the seconds of each algorithm went: computing, and waiting for communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tacit_lab.records import CHOOSING, COMPUTE_ONLY, UNDER_CHURN, EndRecord, Record


@dataclass(frozen=True, kw_only=True)
class TimeSplit:
    """The seconds of one algorithm, in two parts.

    Attributes:
        algorithm: Its text.
        compute: Seconds that were not spent waiting.
        exposed: Seconds of communication that nothing hid.
        derived: The algorithm reports no exposed seconds; they are its total minus compute-only.
    """

    algorithm: str
    compute: float
    exposed: float
    derived: bool

    @property
    def total(self) -> float:
        """All seconds."""
        return self.compute + self.exposed


def split(records: Sequence[Record]) -> list[TimeSplit]:
    """Split every algorithm that finished, of several seeds the first; without numbers it is left out.

    Where replicas come and go nobody knows how long all of them have waited.
    """
    ended = [each for each in records if isinstance(each, EndRecord) and each.seed != CHOOSING]
    counted = [each for each in ended if not each.algorithm.endswith(UNDER_CHURN)]
    first = min((each.seed for each in counted), default=0)
    ends = {each.algorithm: each for each in counted if each.seed == first}
    limit = ends.pop(COMPUTE_ONLY, None)
    alone = limit.seconds if limit else None
    return [found for end in ends.values() if (found := _split(end, alone)) is not None]


def _split(end: EndRecord, alone: float | None) -> TimeSplit | None:
    if end.status != "ok" or end.seconds is None:
        return None
    reported = _reported(end)
    if reported is None and alone is None:
        return None
    exposed = end.seconds - (alone or 0) if reported is None else reported
    exposed = min(max(exposed, 0.0), end.seconds)
    return TimeSplit(
        algorithm=end.algorithm,
        compute=end.seconds - exposed,
        exposed=exposed,
        derived=reported is None,
    )


def _reported(end: EndRecord) -> float | None:
    """The exposed seconds that a session measured.

    Plain DDP runs without one and counts no rounds. `auto` begins with it, and measures and predicts between
    two steps, so its session has measured a part alone.
    """
    exposed, all_of_it = end.metrics.get("exposed_seconds"), "choice" not in end.metrics
    counted = bool(end.metrics.get("rounds")) and all_of_it
    return float(exposed) if counted and isinstance(exposed, int | float) else None
