"""What members that come and go would achieve, by how long they train between two rounds: a formula.

N replicas fail at random, each every M seconds in the mean, so that l = N / M fail in a second. Who fails is
known to be gone d seconds later: the members' `silence`, and what they take to agree. A round ends once
nobody has failed in the last d seconds. After T seconds of training the last failure is a seconds ago, by
chance, and where that is less than m = min(T, d), the wait is (exp(l d) - exp(l a)) / l in the
mean. So after every T seconds of training all wait for

    W = exp(l d) (1 - exp(-l m)) / l - m

seconds in the mean. Of rounds that take x = (T + W) / M lives, a replica ends the share x / (exp(x) - 1):

    goodput = T / (T + W) * x / (exp(x) - 1)

Left out: the time of the exchange, which `tacit plan` has by itself, and the time of joining.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_LONGEST = 100.0
"""Of so many lives a round is never ended; and exp of more would overflow."""
PERIODS = (1, 4, 16, 64, 256, 1024)
"""Steps between two rounds for which it is told."""


@dataclass(frozen=True)
class ChurnPlan:
    """Members that fail at random.

    Attributes:
        replicas: how many.
        between: seconds between two failures of the same one, in the mean.
        step: seconds of a step.
        silence: seconds from a failure until the others know.
    """

    replicas: int
    between: float
    step: float
    silence: float = 5.0

    def waits(self, steps: int) -> float:
        """Seconds that a round waits until it is known who is there, after so many steps; in the mean."""
        failures = self.replicas / self.between
        known, trained = failures * self.silence, min(steps * self.step, self.silence)
        if known > _LONGEST:
            return math.inf
        return math.exp(known) * -math.expm1(-failures * trained) / failures - trained

    def goodput(self, steps: int) -> float:
        """The share of the replicas' time that is useful with so many steps between two rounds, 0..1."""
        trains, waits = steps * self.step, self.waits(steps)
        if math.isinf(waits):
            return 0.0
        life = (trains + waits) / self.between
        return trains / (trains + waits) * (life / math.expm1(life) if life < _LONGEST else 0.0)

    def staleness(self, steps: int) -> float:
        """Steps since the last round at which a replica computes its gradients, in the mean."""
        return (steps - 1) / 2

    def to_json(self) -> list[dict[str, float | None]]:
        """The rows of the table; None stands for a wait without end."""
        return [
            {
                "sync_every": steps,
                "waits": None if math.isinf(waits := self.waits(steps)) else waits,
                "staleness": self.staleness(steps),
                "goodput": self.goodput(steps),
            }
            for steps in PERIODS
        ]

    def lines(self) -> list[str]:
        """A table by the steps between two rounds."""
        head = (
            f"{self.replicas} members, each fails every {self.between:g} s and is given up after "
            f"{self.silence:g} s, steps of {1e3 * self.step:.1f} ms:"
        )
        rows = [
            f"{steps:>11}{_seconds(self.waits(steps)):>11}{self.staleness(steps):>11.1f}"
            f"{self.goodput(steps):>11.1%}"
            for steps in PERIODS
        ]
        return [head, f"{'sync_every':>11}{'waits s':>11}{'steps old':>11}{'goodput':>11}", *rows]


def _seconds(value: float) -> str:
    return "for ever" if math.isinf(value) else f"{value:.2f}"
