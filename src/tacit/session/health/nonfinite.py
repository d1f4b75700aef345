"""NaN and infinity in what is exchanged: who had it where, what becomes of the round, and what is raised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tacit.errors import NonFinite
from tacit.exchange.health import divide_, finite
from tacit.session.buckets import Bucket
from tacit.session.exchange_plan import SessionConfig
from tacit.session.health.device_notes import MEANS
from tacit.session.health.nonfinite_origin import Origin, beginnings, decode, encode

SCALER_HINT = ". With a GradScaler, write attach(..., scaler=scaler): such a step is then passed over"


class NonfiniteChecks:
    """Looks at what a session exchanges.

    Without a GradScaler, what is not finite is an error on all ranks. With one, the round is skipped on all.

    Attributes:
        scaled: whether there is a GradScaler.
    """

    def __init__(self, config: SessionConfig) -> None:
        self._config = config
        self._names: list[str] = []
        self._scale: Callable[[], float | Tensor] | None = None
        self.scaled = False
        self.begun = 0
        self._origin: Callable[[int], Origin | None] = lambda step: None

    def count_from(self, steps: int) -> None:
        """So many were taken before, with other strategies: errors count them too."""
        self.begun = steps

    def told(self, step: int) -> int:
        """The step as errors call it."""
        return self.begun + step

    def follow_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Number the parameters as they lie in these buckets, on all ranks alike."""
        self._names = [*dict.fromkeys(param.name for bucket in buckets for param in bucket.slices)]

    def use_scale(self, read: Callable[[], float | Tensor]) -> None:
        """A GradScaler puts this factor on all gradients. In stream order it is on the device."""
        self._scale, self.scaled = read, True

    def use_origin(self, origin: Callable[[int], Origin | None]) -> None:
        """Where what is not finite began on this rank, as seen from a step; None where that is not known."""
        self._origin = origin

    def scale_of(self, bucket: Bucket) -> float | Tensor:
        """What to divide a gradient by: residuals outlive the scaler's factor, and norms are not those of it.

        1 where what arrives scales with what is given: the factor is there to keep it from vanishing on its
        way.
        """
        if self._scale is None or all(each.scales for each in bucket.chosen):
            return 1.0
        return self._scale()

    # ---- where it began, as a number that ranks send each other -------------------------------------------

    def origin_code(self, step: int) -> int:
        """Where what is not finite began on this rank, for `origins_of`; 0 where that is not known."""
        began = self._origin(step)
        return 0 if began is None else encode(began, self._names)

    def parameter_code(self, step: int, name: str) -> int:
        """The same, where it is in this parameter now; never 0."""
        return encode(self._origin(step) or Origin(name), self._names)

    def mean_code(self, index: int, step: int) -> int:
        """In which of its `AllReduce`s this rank had it first (from 1 on; 0: in none), and where it began."""
        return 0 if not index else index + (MEANS + 1) * self.origin_code(step)

    def origins_of(self, codes: Sequence[float]) -> dict[int, Origin]:
        """By rank, of the ranks whose code is not 0."""
        each = zip(self._config.context.global_ranks, map(round, codes), strict=True)
        return {rank: decode(code, self._names) for rank, code in each if code > 0}

    # ---- what is looked at --------------------------------------------------------------------------------

    def divide(self, bucket: Bucket, x: Tensor, scale: float, step: int) -> int:
        """Divide `x` by the scale; 0 where it is finite, else the `parameter_code` of where it is not.

        Where a round can be skipped, `x` then becomes zeros, which no compressor minds.
        """
        finite_probe = torch.zeros((), dtype=torch.float32)
        divide_(x, scale, finite_probe)
        if bool(finite_probe.isfinite()):
            return 0
        broken = [finite(x[param.start : param.stop]) for param in bucket.slices].index(False)
        if self.scaled:
            x.zero_()
        return self.parameter_code(step, bucket.slices[broken].name)

    def skips_given(self, nonfinite_flags: Tensor, step: int) -> bool:
        """Whether the round is skipped, as a rank gave what is not finite; `nonfinite_flags`: which ranks.

        Raises:
            NonFinite: one did, and there is no scaler.
        """
        if not bool(nonfinite_flags.any()):
            return False
        if self.scaled:
            return True
        # Where replicas go on without each other, the flags are this rank's own: nobody has averaged them.
        times = 1 if self._config.independent else len(nonfinite_flags)
        found = self.origins_of([float(w) * times for w in nonfinite_flags])
        where = ", ".join(f"{began.name} on rank {rank}" for rank, began in found.items())
        raise self._error(where, step, "this rank has pushed nothing", found)

    def mean_error(self, bucket: Bucket, mean: Tensor, nonfinite_flags: Tensor, step: int) -> NonFinite:
        """For a mean that is not finite; `nonfinite_flags`: the mean of the ranks' `mean_code`s."""
        names = [param.name for param in bucket.slices if not finite(mean[param.start : param.stop])]
        # The first to have it: what others gave to later means came of the first.
        codes = [divmod(round(float(w) * len(nonfinite_flags)), MEANS + 1) for w in nonfinite_flags]
        first = min((index for _, index in codes if index), default=0)
        ranks = self._config.context.global_ranks
        blamed = {rank for rank, (_, index) in zip(ranks, codes, strict=True) if 0 < index <= first}
        began = self.origins_of([code for code, _ in codes])
        began = {rank: origin for rank, origin in began.items() if rank in blamed}
        if blamed and blamed == began.keys():
            names = [*dict.fromkeys(origin.name for origin in began.values())]
        who = ", ".join(map(str, sorted(blamed)))
        where = f"on rank {who}" if who else "summed over the ranks, each of which is finite"
        alone = "this rank has taken nothing of what came back"
        return self._error(f"{', '.join(names)} {where}", step, alone, began)

    def _error(self, where: str, step: int, alone: str, found: Mapping[int, Origin]) -> NonFinite:
        """`alone`: what is so where replicas go on without each other; `found`: where it began, by rank."""
        strategy, step = self._config.strategy, self.told(step)
        gradient = strategy.subject == "gradient"
        what = "the gradient of" if gradient else "the parameter"
        hint = SCALER_HINT if gradient and not strategy.late else ""
        so = alone if self._config.independent else "no rank has applied anything"
        return NonFinite(
            f"NaN or infinity in {what} {where}, in step {step}: {so} of this step. "
            f"{beginnings(found, step)}Lower the learning rate, clip the gradient, or look at the batch{hint}"
        )


def first_infinite(finite_probe: Tensor) -> int:
    """1 + the index of the first number that is not finite; 0 where all are."""
    broken = finite_probe.isfinite().logical_not().nonzero()
    return 1 + int(broken[0]) if len(broken) else 0
