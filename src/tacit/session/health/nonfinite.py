"""NaN and infinity in exchanged tensors: which rank had them in which parameter, and which error is raised.

Every rank reports what it finds in numbers, the nonfinite flags, which are averaged with the round. 0 means
that
all was finite. Any other number is a code: it says in which parameter a NaN was first seen on that rank, and
how many steps ago (`nonfinite_origin`). So all ranks raise the same error, or skip the same round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tacit.errors import NonFinite
from tacit.exchange.finite_checks import divide_, finite
from tacit.session.buckets import Bucket
from tacit.session.health.device_notes import MEANS
from tacit.session.health.nonfinite_origin import Origin, beginnings, decode, encode
from tacit.session.session_context import SessionContext

SCALER_HINT = ". With a GradScaler, write attach(..., scaler=scaler): such a step is then passed over"


class NonfiniteChecks:
    """Checks the tensors and means of a session for NaN and infinity.

    Without a GradScaler, either is an error on all ranks. With one, all ranks skip the round.

    Attributes:
        scaled: whether there is a GradScaler.
    """

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._names: list[str] = []
        self._scale: Callable[[], float | Tensor] | None = None
        self.scaled = False
        self.begun = 0
        self._origin: Callable[[int], Origin | None] = lambda step: None

    def count_from(self, steps: int) -> None:
        """Set the number of steps before this session, with other strategies: errors count them too."""
        self.begun = steps

    def global_step(self, step: int) -> int:
        """The number of a step for errors: those before this session, with other strategies, count too."""
        return self.begun + step

    def follow_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Number the parameters, for codes, in the order of these buckets, which all ranks share."""
        self._names = [*dict.fromkeys(param.name for bucket in buckets for param in bucket.slices)]

    def use_scale(self, read: Callable[[], float | Tensor]) -> None:
        """Set the function that reads the GradScaler's factor; in stream order that is a tensor on the
        device.
        """
        self._scale, self.scaled = read, True

    def use_origin(self, origin: Callable[[int], Origin | None]) -> None:
        """Set the function of a step that says where NaN began on this rank; None: unknown."""
        self._origin = origin

    def scale_of(self, bucket: Bucket) -> float | Tensor:
        """The number to divide a gradient by before it is encoded: the GradScaler's factor, or 1.

        It is divided out, as residuals stay when the factor changes, and norms are those of the gradient. It
        is 1
        if the compressors only scale with their input (`Compressor.scales`): the factor then keeps small
        gradients from underflowing on the way.
        """
        if self._scale is None or all(each.scales for each in bucket.chosen):
            return 1.0
        return self._scale()

    # ---- codes: where a NaN began, as a number that ranks send each other -------------------------------

    def origin_code(self, step: int) -> int:
        """The code for where NaN began on this rank, before `step`; 0 if that is not known."""
        began = self._origin(step)
        return 0 if began is None else encode(began, self._names)

    def parameter_code(self, step: int, name: str) -> int:
        """The code for where NaN began, if this parameter now holds it: by default here. Never 0."""
        return encode(self._origin(step) or Origin(name), self._names)

    def mean_code(self, index: int, step: int) -> int:
        """A code for a NaN that shows only in a mean; 0: this rank's input was finite.

        Args:
            index: the `AllReduce` of the exchange to which this rank first gave a NaN, from 1 on; 0: to none.
            step: the present step.
        """
        return 0 if not index else index + (MEANS + 1) * self.origin_code(step)

    def origins_of(self, codes: Sequence[float]) -> dict[int, Origin]:
        """Decode one code a rank. Returns by rank where NaN began, without the ranks whose code is 0."""
        each = zip(self._context.global_ranks, map(round, codes), strict=True)
        return {rank: decode(code, self._names) for rank, code in each if code > 0}

    # ---- checks -----------------------------------------------------------------------------------------

    def divide(self, bucket: Bucket, x: Tensor, scale: float, step: int) -> int:
        """Divide `x` (flat, the bucket's gradients) by the scale, in place, and check it.

        With a GradScaler, `x` is zeroed if it is not finite: the round will be skipped, and compressors need
        finite input.

        Returns:
            0 if `x` is finite, else the `parameter_code` of its first parameter that is not.
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
        """Whether the round is skipped, as the input of a rank was not finite.

        Args:
            nonfinite_flags: the mean of the ranks' flags: one number a rank, its code over the number of
                ranks.
            step: the present step.

        Raises:
            NonFinite: a rank's input was not finite, and there is no GradScaler.
        """
        if not bool(nonfinite_flags.any()):
            return False
        if self.scaled:
            return True
        # Where replicas do not wait for each other, the flags are not averaged: they are this rank's.
        times = 1 if self._context.strategy.independent else len(nonfinite_flags)
        raise self.error_of([float(w) * times for w in nonfinite_flags], step)

    def error_of(self, codes: Sequence[float], step: int) -> NonFinite:
        """The error of the ranks' `parameter_code`s."""
        found = self.origins_of(codes)
        where = ", ".join(f"{began.name} on rank {rank}" for rank, began in found.items())
        where = where or "summed over the ranks, each of which is finite"
        return self._error(where, step, "this rank has pushed nothing", found)

    def mean_error(self, bucket: Bucket, mean: Tensor, nonfinite_flags: Tensor, step: int) -> NonFinite:
        """The error for a mean that is not finite. `nonfinite_flags`: the mean of the ranks' `mean_code`s."""
        names = [param.name for param in bucket.slices if not finite(mean[param.start : param.stop])]
        # Only ranks with NaN in the earliest mean are blamed: later ones may follow from that mean.
        codes = [divmod(round(float(w) * len(nonfinite_flags)), MEANS + 1) for w in nonfinite_flags]
        first = min((index for _, index in codes if index), default=0)
        ranks = self._context.global_ranks
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
        """The error. `alone`: its end where replicas do not wait for each other; `found`: origins by rank."""
        strategy, step = self._context.strategy, self.global_step(step)
        gradient = strategy.subject == "gradient"
        what = "the gradient of" if gradient else "the parameter"
        hint = SCALER_HINT if gradient and not strategy.late else ""
        so = alone if self._context.strategy.independent else "no rank has applied anything"
        return NonFinite(
            f"NaN or infinity in {what} {where}, in step {step}: {so} of this step. "
            f"{beginnings(found, step)}Lower the learning rate, clip the gradient, or look at the batch{hint}"
        )


def first_infinite(finite_probe: Tensor) -> int:
    """1 + the index of the first entry that is not finite; 0 if all are."""
    broken = finite_probe.isfinite().logical_not().nonzero()
    return 1 + int(broken[0]) if len(broken) else 0
