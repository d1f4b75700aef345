"""The checks for classes from outside find what is wrong, and say where."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tacit.algorithms import known, parse
from tacit.compressors import (
    Dense,
    ErrorFeedback,
    MomentumCorrection,
    PowerSGD,
    QuantizedPowerSGD,
    Sign,
    TopK,
)
from tacit.contracts import (
    Application,
    Context,
    Decoded,
    Exact,
    Exchange,
    Merge,
    OneShot,
    Payload,
    Rounds,
    ScheduleState,
    State,
    Sync,
    Transmitted,
)
from tacit.errors import ConfigError, PayloadError
from tacit.merges import (
    Average,
    CommonPoint,
    EagerStep,
    Elastic,
    LocalResidual,
    OuterStep,
    ServerParams,
    SlowMo,
    StaleMean,
)
from tacit.strategy import Strategy
from tacit.testing import check_compressor, check_merge, check_rounds, check_topology
from tacit.testing.ranks import RanksInProcess
from tacit.topologies import Auto, Flat, Hierarchical, Star, TwoPhase

FEW: dict[str, Any] = {"worlds": (1, 3), "dtypes": (torch.float32,)}


@dataclass(frozen=True)
class Half(OneShot):
    """Half precision, as somebody may write it; right as it is."""

    additive: ClassVar[bool] = False
    sliceable: ClassVar[bool] = True

    def exempts(self, shape: torch.Size) -> bool:
        return False

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        return (x.to(torch.float16),)

    def decode_(self, payload: Payload, out: Tensor) -> None:
        out.copy_(payload[0])

    def decode_add_(self, payload: Payload, out: Tensor, weight: float) -> None:
        out.add_(payload[0].to(out.dtype), alpha=weight)

    def sent(self, payload: Payload, x: Tensor) -> Transmitted:
        return Decoded(self, payload)


@dataclass(frozen=True)
class Whole(Half):
    """As above, of tensors of this many entries only: a codec that sees the shape of what it is given."""

    sliceable: ClassVar[bool] = False
    numel: int = 24 * 18 + 24 + 8 * 6 * 3 * 3 + 7 * 24

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        return (x.view(self.numel, 1).flatten().to(torch.float16),)


@dataclass(frozen=True)
class ByRank(Half):
    """Decodes otherwise on the first rank."""

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        outcome = yield from super().exchange(x, state, ctx)
        ctx.out.add_(ctx.rank == 0)
        return outcome


@dataclass(frozen=True)
class Spoils(Half):
    """Changes what it is given."""

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        return (x.mul_(0.5).to(torch.float16),)


@dataclass(frozen=True)
class Forgets(Half):
    """Says that all of it arrived, and sends a half."""

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        return ((x * 0.5).to(torch.float16),)

    def sent(self, payload: Payload, x: Tensor) -> Transmitted:
        return Exact(x)


@dataclass(frozen=True)
class Blind(Half):
    """Makes zeros of NaN, and says that it shows them."""

    hides_nonfinite: ClassVar[bool] = False

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        return (x.nan_to_num(0.0).to(torch.float16),)


@dataclass(frozen=True)
class AddsUp(Half):
    """Decodes on top of what is there."""

    def decode_(self, payload: Payload, out: Tensor) -> None:
        out.nan_to_num_(0.0, 0.0, 0.0).add_(payload[0])


@dataclass(frozen=True)
class Fails(Half):
    """Raises an error of its own on meta tensors, as a session is made."""

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        return (torch.cat([] if x.is_meta else [x]),)


@dataclass(frozen=True)
class Bare(Half):
    """Forgets that a payload is a tuple."""

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        return x.to(torch.float16)  # type: ignore[return-value]


@dataclass(frozen=True)
class Looks(Half):
    """Asks for a value."""

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        return (x.div(max(1.0, float(x.abs().max()))).to(torch.float16),)


@dataclass(frozen=True)
class Varies(Half):
    """As long as there are positive entries."""

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        return ((x if x.is_meta else x[x > 0]).to(torch.float16),)


@dataclass(frozen=True)
class AsItIs(Half):
    """Sends what it is given: no copy, where that is of this type already."""

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        return torch.ones_like(x, dtype=torch.int8), x.to(torch.float32)[1:]

    def decode_(self, payload: Payload, out: Tensor) -> None:
        out[0] = 0
        out[1:] = payload[1]


@dataclass(frozen=True)
class AsItIsInTraining(AsItIs):
    """As above, and not where it is tried."""

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        return super().encode(x.clone() if x.is_meta else x, ctx)


@dataclass(frozen=True)
class Nothing(Half):
    """Returns no payload."""

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        return None  # type: ignore[return-value]


@dataclass(frozen=True)
class Dwindles(Half):
    """Sends less after some steps."""

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        return (x[: x.numel() // (1 + ctx.step // 50)].half(),)


@dataclass(frozen=True)
class Shorter(Half):
    """Other shapes than on meta tensors."""

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        return ((x if x.is_meta else x[:-1]).to(torch.float16),)


def test_what_is_right_passes_everywhere() -> None:
    checked = check_compressor(ErrorFeedback(Half()))
    assert len(checked.accepted) == 5
    assert not checked.refused
    assert len(check_topology(TwoPhase(), compressors=[Half(), Dense()], **FEW).accepted) == 2


@pytest.mark.parametrize(
    ("compressor", "found"),
    [
        (ByRank(), "ranks have got different means"),
        (Spoils(), "has changed"),
        (ErrorFeedback(Forgets()), "has neither arrived nor is in a residual"),
        (Blind(), "was not seen: hides_nonfinite must be True"),
        (AddsUp(), r"decode_\(\) does not overwrite"),
        (Fails(), r"Fails\(\), .*it has raised a ValueError"),
        (Bare(), r"encode of Bare\(\) has returned a Tensor, where a tuple of tensors belongs"),
        (Looks(), r"Looks\(\) cannot be tried on meta tensors, .* Where x.is_meta, look at no value"),
        (Dwindles(), "other shapes after 100 steps: write Scheduled"),
        (ErrorFeedback(Varies()), r"a payload of Varies\(\) for .* entries is .* fill what varies up"),
    ],
    ids=["by rank", "spoils", "forgets", "blind", "adds up", "fails", "bare", "looks", "dwindles", "varies"],
)
def test_what_is_wrong_is_found_and_named(compressor: Any, found: str) -> None:
    with pytest.raises(AssertionError, match=found):
        check_compressor(compressor, topologies=[Flat()], **FEW)


def test_a_session_refuses_a_codec_that_cannot_be_tried_on_meta_tensors() -> None:
    for codec, says in ((Bare(), "has returned a Tensor"), (Looks(), "Where x.is_meta, look at no value")):
        for topology in (Flat(), Star()):
            with pytest.raises(ConfigError, match=says):
                RanksInProcess(Strategy(compressor=codec, topology=topology), 2, torch.float32, {"w": (9, 5)})


def in_process(codec: OneShot) -> RanksInProcess:
    return RanksInProcess(Strategy(compressor=ErrorFeedback(codec)), 2, torch.float32, {"w": (9, 5)})


def test_a_session_refuses_payloads_that_error_feedback_would_overwrite_or_that_are_none() -> None:
    for codec, says in (
        (AsItIs(), r"part 1 of what encode of AsItIs\(\) .* x.to\(dtype, copy=True\)"),
        (Nothing(), r"encode of Nothing\(\) has returned a NoneType, where a tuple"),
    ):
        with pytest.raises(ConfigError, match=says):
            in_process(codec)
    with pytest.raises(PayloadError, match=r"a payload of Shorter\(\) .* where x is a meta tensor"):
        in_process(Shorter())
    trained = in_process(AsItIsInTraining())
    with pytest.raises(ConfigError, match="shares memory with the x that it was given"):
        trained.exchange(trained.tensors(0))


def test_a_codec_with_a_list_is_refused() -> None:
    @dataclass(frozen=True)
    class Listed(Half):
        sizes: Any = ()

    assert check_compressor(Listed((1,)), topologies=[Flat()], **FEW).accepted
    for make in (ErrorFeedback, lambda codec: Strategy(compressor=codec)):
        with pytest.raises(ConfigError, match=r"unhashable type: 'list'.*a tuple in place of a list"):
            make(Listed([1]))


def test_a_codec_that_is_not_sliceable_is_refused_where_it_would_be_sliced() -> None:
    checked = check_compressor(ErrorFeedback(Whole()), topologies=[Flat(), TwoPhase(), Auto(), Star()], **FEW)
    assert len(checked.accepted) == 3
    (why,) = checked.refused.values()
    assert "is not sliceable" in why
    with pytest.raises(ConfigError, match=r"write topology=Flat\(\); or.* write sliceable = True in Whole"):
        Strategy(compressor=Whole(), topology=TwoPhase())


def test_a_codec_that_is_not_sliceable_gets_whole_parameters_in_a_hierarchy() -> None:
    @dataclass(frozen=True)
    class Rows(Half):
        sliceable: ClassVar[bool] = False

        def encode(self, x: Tensor, ctx: Context) -> Payload:
            assert x.numel() in {0, 432, 456, 600, 888, 1056} or x.is_meta, f"a piece of {x.numel()} entries"
            return super().encode(x, ctx)

    shapes = {"weight": (24, 18), "bias": (24,), "deep": (8, 6, 3, 3), "last": (7, 24)}
    checked = check_compressor(
        Rows(), topologies=[Hierarchical(far=Flat(axis="net"))], worlds=(2, 4), shapes=shapes
    )
    assert len(checked.accepted) == 1


@dataclass(frozen=True)
class Leaks(Merge):
    """Lets a rank's own parameters flow into the anchor."""

    def apply_(
        self,
        params: Tensor,
        anchor: Tensor,
        mean: Tensor,
        local_delta: Tensor | None,
        state: State,
        at: Application,
    ) -> None:
        anchor.copy_(params)


class Shortened(Average):
    """Goes by the norm of the mean, which is another one in each stretch."""

    entrywise = True
    reads_params = "always"

    def apply_(self, params: Tensor, anchor: Tensor, mean: Tensor, *rest: Any) -> None:
        anchor.add_(mean / (1 + mean.norm()))
        params.copy_(anchor)


class ReadsParams(Average):
    reads_params = "never"

    def apply_(self, params: Tensor, anchor: Tensor, mean: Tensor, *rest: Any) -> None:
        anchor.add_(mean)
        params.lerp_(anchor, 0.5)


class SaysNothing(Average):
    def apply_(self, *given: Any) -> None:
        super().apply_(*given)


def test_merges() -> None:
    steps = OuterStep(), OuterStep(local=0.5), OuterStep(momentum=0.0), EagerStep(), SlowMo()
    apart = LocalResidual(), CommonPoint(), Elastic(), StaleMean(), ServerParams(), ServerParams(whole=False)
    for merge in (Average(), *steps, *apart):
        assert merge.entrywise
        check_merge(merge)
    with pytest.raises(AssertionError, match="the anchors of ranks differ"):
        check_merge(Leaks())
    for lies in (Shortened(), ReadsParams()):
        with pytest.raises(AssertionError, match="it reads the parameters, or is not entrywise, and says it"):
            check_merge(lies)
    assert not SaysNothing.entrywise
    assert SaysNothing.reads_params == "always"


def test_topologies() -> None:
    compressors = [
        Dense(),
        ErrorFeedback(TopK(ratio=0.1)),
        ErrorFeedback(Sign()),
        ErrorFeedback(PowerSGD(rank=1)),
        ErrorFeedback(QuantizedPowerSGD(rank=1)),
    ]
    compressors.append(MomentumCorrection(TopK(ratio=0.1)))
    for topology in (Flat(), TwoPhase(), Hierarchical()):
        assert len(check_topology(topology, compressors=compressors, **FEW).accepted) == len(compressors)


class Moody(Rounds):
    """Remembers outside of the state."""

    def __init__(self) -> None:
        self.asked = 0

    def at(self, step: int, schedule_state: ScheduleState, part: int = 0) -> Sync | None:
        self.asked += 1
        return Sync(step) if self.asked % 2 else None


class Early(Rounds):
    def at(self, step: int, schedule_state: ScheduleState, part: int = 0) -> Sync | None:
        return Sync(step - 1)


class Silent(Rounds):
    fragments = 2

    def at(self, step: int, schedule_state: ScheduleState, part: int = 0) -> Sync | None:
        return Sync(step) if part == 0 else None


def test_the_rounds_of_every_algorithm_obey() -> None:
    for name in known():
        levels = parse(name).levels
        told = {
            "steps_per_epoch": 10.0,
            "epochs": 50.0,
            **levels[-1].rounds.start(),
        }
        for level in levels:
            assert check_rounds(level.rounds, known=told) > 0


@pytest.mark.parametrize(
    ("rounds", "found"),
    [
        (Moody(), "asked twice, they answer otherwise"),
        (Early(), "before the round has left"),
        (Silent(), r"no round of the parts \[1\]"),
    ],
    ids=["moody", "early", "silent"],
)
def test_what_is_wrong_with_rounds_is_found(rounds: Rounds, found: str) -> None:
    with pytest.raises(AssertionError, match=found):
        check_rounds(rounds)
