"""The default: the session picks by predicted bytes, what a second compression loses, and latency."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from tacit import checks
from tacit.contracts import Compressor, Context, Exchange, LinkRates, Options, State
from tacit.errors import ConfigError
from tacit.topologies.flat import Flat, two_sided
from tacit.topologies.on_axis import OnAxis


@dataclass(frozen=True)
class Auto(OnAxis):
    """`Flat` or `TwoPhase`; the session decides once, when it is attached.

    Decided by the bytes that the busiest rank sends in a round, predicted by a dry run. Those of `TwoPhase`
    are weighted by what a second compression loses (`topologies.recompression`): 1.0 for `Int8`, 1.6 for
    signs, 2 for `TernGrad`, 12 for the largest hundredth of the entries, and 1.0 for what is under
    `MeanFeedback`. A tie, and one or two ranks, go to `Flat`. It is `Flat` too where both are the same, as
    payloads are additive or the compressor needs several messages; and where the error of a second
    compression would be lost: for a compressor, such as a vote, that is neither unbiased nor under
    `ErrorFeedback`. `session.active_path` reports the choice, and the bytes of each.

    Latency is weighed where `latency` and `rate` are given, or links are measured (`attach(probe=True)`):
    `TwoPhase` has two messages for one, and each takes the way there and back, in which a link could carry
    `2 * latency * rate` bits.

    Unbiased compressors (`QSGD`, `TernGrad`, `Natural`) stay right in the mean when the mean is compressed
    too, and grow noisier: what the second rounding adds is not averaged over the ranks. Write `Flat()` to
    have one rounding.

    Attributes:
        axis: as of `Flat`.
        at_servers: use parameter servers (`Star()`) if the launcher has started some.
        latency: seconds of a small message between ranks, one way.
        rate: bit/s of a rank's link; None: not known, and latency is not weighed.
    """

    takes_variable_length: ClassVar[bool] = True

    at_servers: bool = False
    latency: float = 0.0
    rate: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.flag("at_servers", self.at_servers)
        checks.real("latency", self.latency, "write seconds one way, such as 0.03", least=0)
        if self.rate is not None:
            checks.real("rate", self.rate, "write bit/s, such as 1e8, or leave it out", above=0)
        elif self.latency:
            raise ConfigError(
                f"latency={self.latency} has no rate to be weighed against bytes: write Auto(latency=0.03, "
                "rate=1e8), or leave it out"
            )

    @property
    def uses_rates(self) -> bool:
        return self.rate is None

    def for_rates(self, links: LinkRates) -> Auto:
        """This topology with the latency and the rate of the slowest of these links."""
        return replace(self, latency=links.latency, rate=min(links.of_nodes()))

    @property
    def on_device(self) -> bool:
        """Whether `Flat` and `TwoPhase` both are, and no server is used."""
        return not self.at_servers

    def without_servers(self) -> Auto:
        return replace(self, at_servers=False)

    def collectives(self, compressors: Sequence[Compressor]) -> str:
        """Both topologies, if there is a choice."""
        if len(self.options(compressors).topologies) > 1:
            return "all-gather, or where it is worth it by two phases, which compress the mean too"
        return Flat(self.axis).collectives(compressors)

    def options(self, compressors: Iterable[Compressor]) -> Options:
        """`Flat` first, then `TwoPhase` if it can send less."""
        from tacit.topologies.recompression import price
        from tacit.topologies.two_phase import TwoPhase

        flat, two_phase = Flat(self.axis), TwoPhase(self.axis)
        compressors = list(compressors)
        sides = [side for each in compressors for side in two_sided(each) if side is not None]
        if not sides:
            return Options((flat,), "payloads are additive, or an exchange takes several messages")
        for side in sides:
            if not side.codec.sliceable:
                return Options((flat,), f"{side.codec} is not sliceable")
            if not (side.keeps_means or side.codec.unbiased):
                return Options((flat,), f"no residual keeps what a second {side.codec} would lose")
        try:
            for each in compressors:
                two_phase.fields(each)
        except ConfigError as misfit:
            return Options((flat,), str(misfit))
        last = [side for side in (two_sided(each)[-1] for each in compressors) if side is not None]
        trip = 2 * self.latency * (self.rate or 0.0) / 8
        prices = (1.0, max(map(price, last), default=1.0))
        return Options((flat, two_phase), prices=prices, delays=(trip, 2 * trip))

    def conduct(self, x: Tensor, compressor: Compressor, state: State, ctx: Context) -> Exchange:
        """Not called: a session uses the topology that it has chosen."""
        raise AssertionError("Auto() is resolved by a session: call Flat() or TwoPhase()")
