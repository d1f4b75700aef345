"""What is sent: compressors, and one-shot codecs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tacit.contracts.collectives import ReduceEncoded
from tacit.contracts.common import Payload, ScheduleState, Spans, State
from tacit.contracts.context import Context, Exchange, Outcome
from tacit.contracts.transmitted import Transmitted
from tacit.contracts.trials import check_like


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter in a flat tensor, seen as a matrix: its first dimension by all the others.

    Attributes:
        dims: how many dimensions the parameter has.
    """

    start: int
    rows: int
    columns: int
    dims: int = 2


class Momentum(NamedTuple):
    """Momentum as in `torch.optim.SGD`; or with a `freeze_step` as in `torch.optim.Adam`."""

    factor: float
    nesterov: bool = False
    freeze_step: int | None = None
    """Of Adam: the step from which on the compressor applies momentum, and the variance is kept."""
    refresh: int = 0
    """Of Adam: for how many steps the variance moves again from time to time; see `moving`."""

    @property
    def moving(self) -> Spans:
        """The (start, stop) of the steps in which Adam's variance moves, rising.

        First to `freeze_step`; then, for `refresh` steps each, from 1.5, 1.5^2, 1.5^3 ... times that on,
        where it has been kept as long before. So it is renewed ever more seldom (after 0/1 Adam: Lu et al.,
        ICLR 2023, arXiv 2202.06009, whose intervals double).
        """
        return () if self.freeze_step is None else _moving(self.freeze_step, self.refresh)

    def keeps_variance(self, step: int) -> bool:
        """Whether Adam's variance is kept in this step, and a momentum travels."""
        spans = self.moving
        i = bisect_right(spans, (step, math.inf)) - 1
        return i >= 0 and step >= spans[i][1]


LONGEST_TRAINING = 10**8
"""Steps behind which a variance is not renewed any more."""


@cache
def _moving(freeze_step: int, refresh: int) -> Spans:
    spans = [(0, freeze_step)]
    start = 1.5 * freeze_step
    while refresh and start < LONGEST_TRAINING:
        if start - spans[-1][1] >= refresh:
            spans.append((int(start), int(start) + refresh))
        start *= 1.5
    return tuple(spans)


class OneShotUse(NamedTuple):
    """The codec that encodes a whole tensor, without its wrappers."""

    codec: OneShot
    has_feedback: bool = False
    """Whether its error is added to the next round (error feedback)."""
    others: Spans = ()
    """Spans of the tensor that other compressors handle; rising."""
    has_mean_feedback: bool = False
    """Whether the error of a compressed mean is added to the next one, though that of payloads is not."""
    is_predicted: bool = False
    """Whether payloads are of errors of a prediction, which only the ranks can make."""

    @property
    def keeps_means(self) -> bool:
        """Whether a topology that compresses means keeps what they leave out."""
        return self.has_feedback or self.has_mean_feedback


class Compressor(ABC):
    """What is sent. A frozen dataclass of hyper-parameters: it holds no state and does no I/O."""

    shared: ClassVar[frozenset[str]] = frozenset()
    """State fields that are equal on all ranks of the axis; the others are rank-local."""
    hides_nonfinite: ClassVar[bool] = True
    """Whether a NaN or infinity of one rank may fail to reach the others through the payload."""
    shows_nonfinite: ClassVar[bool] = False
    """Whether an exchange finds NaN and infinity in its input, so that no check before it is needed.

    Either they show in the payload: some floating-point part of it then holds NaN, or a magnitude of 2^100 or
    more. Or the compressor calls `Context.look` before anything is sent, unless it has seen that all entries
    are finite, or that their sums with what it had kept are. Until then it changes none of them."""
    varies: ClassVar[bool] = False
    """Whether what it sends depends on the values, and is not known beforehand."""
    inline: ClassVar[bool] = False
    """Whether it costs so little that the thread of backward may do it."""
    linear: ClassVar[bool] = False
    """Whether it leaves nothing out and keeps no state, so that its input may already contain means."""
    scales: ClassVar[bool] = False
    """Whether c times `x` arrives as c times what `x` arrives as, and it has no state. A gradient is then
    sent with the factor of a GradScaler, so that it does not underflow in fp16."""

    @property
    def on_device(self) -> bool:
        """Whether an exchange never needs a value on the host, and makes its tensors on the device of `x`.

        On a GPU it is then launched without waiting. Otherwise it runs on the host, on copies.
        """
        return False

    @property
    def needs_server(self) -> bool:
        """Whether it works only with a parameter server that averages."""
        return False

    @abstractmethod
    def exempts(self, shape: torch.Size) -> bool:
        """Whether parameters of this shape stay dense by default."""

    def exempted(self) -> Compressor | None:
        """The compressor of the parameters that it exempts; None: they are sent densely."""
        return None

    @property
    def takes_momentum(self) -> Momentum | None:
        """The momentum that it applies, so that the optimizer must have none."""
        return None

    @property
    def changes(self) -> tuple[int, ...]:
        """The steps from which on payloads have other shapes; rising."""
        return ()

    def one_shot(self, step: int) -> OneShotUse | None:
        """The codec of the whole tensor in this step; None: an exchange takes several messages."""
        return None

    def for_model(self, matrices: tuple[Matrix, ...]) -> Compressor:
        """This compressor for a model with these parameters; most return themselves.

        Raises:
            ConfigError: it does not work for these parameters.
        """
        return self

    def for_training(self, schedule_state: ScheduleState) -> Compressor:
        """This compressor for a training with this schedule state; see `Rounds.needs`."""
        return self

    def ended(self, steps: int) -> str:
        """A warning for the user if training ends after this number of steps; "": none."""
        return ""

    def with_layout(self, matrices: tuple[Matrix, ...]) -> Compressor:
        """This compressor for a flat tensor in which these matrices lie."""
        return self

    def is_shared(self, field: str) -> bool:
        """Whether the state field is equal on all ranks of the axis."""
        return field in self.shared

    def widths(self, field: str) -> tuple[int, ...] | None:
        """How many elements of a state field belong to each matrix; None: as many as the parameter has."""
        return None

    @abstractmethod
    def init(self, like: Tensor) -> State:
        """The state before the first round, for a flat tensor like `like` (which may be on "meta")."""

    @abstractmethod
    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Average `x` (flat) with the peers, and write the mean to `ctx.out`.

        A generator: it yields requests and returns an `Outcome`. `x` is not changed unless it is `ctx.out`.
        Nothing in `state` is changed: new values are written to `ctx.spare`.
        """


class PartitionedCompressor(Compressor):
    """Several compressors, each for spans of its own."""

    @abstractmethod
    def inside(self) -> Mapping[str, tuple[Compressor, Spans | None]]:
        """Each of them and its spans, by the part of its context; None: all that the others leave."""


class MixingCompressor(Compressor):
    """Keeps where this replica stands among the others; for a `MixingTopology`.

    Its state is neither equal on all ranks nor an error that is still to be sent: it belongs together with
    that of the other ranks, which have made the same rounds. A checkpoint keeps it by rank. It begins anew,
    as of `init`, on all ranks at once: where replicas are made equal, and where a checkpoint goes on with
    another number of ranks. All is in units of the distance from the anchor, so that zeros stand for it.
    """

    fixed_graph: ClassVar[bool] = True
    """Whether it adds up what neighbours send, so that all rounds must be in the same graph."""


class WeighedCompressor(MixingCompressor):
    """A `MixingCompressor` that sends its weight too, so that a rank may get more than it gives."""

    @abstractmethod
    def counted_(self, x: Tensor, state: State) -> None:
        """Overwrite `x`, this replica's tensor, with its contribution where all replicas are made equal.

        They become the mean of the contributions, in place of the mean of the replicas.
        """


class OneShot(Compressor):
    """A compressor with one message a round: `encode`, one collective, `decode`."""

    additive: ClassVar[bool]
    """Whether the mean of payloads, entry by entry, decodes to the mean (answered by `AllReduce`)."""
    unbiased: ClassVar[bool] = False
    """Whether it is unbiased, but for clipping; it is then used without error feedback."""
    sliceable: ClassVar[bool] = False
    """Whether any slice of a tensor may be encoded by itself. False for codecs of rows or matrices, which
    topologies that slice refuse."""
    entrywise: ClassVar[bool] = False
    """Whether a payload is one tensor with one element for each entry, in order."""

    @abstractmethod
    def encode(self, x: Tensor, ctx: Context) -> Payload:
        """The payload of `x` (flat); its shapes depend on the shape of `x` alone."""

    @abstractmethod
    def decode_(self, payload: Payload, out: Tensor) -> None:
        """Overwrite `out` (flat) with the decoded payload."""

    @abstractmethod
    def decode_add_(self, payload: Payload, out: Tensor, weight: float) -> None:
        """Add `weight` times the decoded payload to `out`, without a dense copy of it."""

    @abstractmethod
    def sent(self, payload: Payload, x: Tensor) -> Transmitted:
        """What the peers decode from the payload of `x`; see `Transmitted`."""

    def of_sums(self, numel: int, peers: int) -> OneShot | None:
        """A codec that encodes the sum of `peers` payloads exactly, in fewer bytes than densely.

        None: there is none for tensors of `numel` elements.
        """
        return None

    def encode_with_feedback(
        self, x: Tensor, residual: Tensor, new_residual: Tensor, ctx: Context
    ) -> Payload | None:
        """`encode(x + residual)` in one pass; `new_residual` is overwritten by that sum less what is encoded.

        None where there is no such kernel: then nothing has been written. `x` and `residual` do not change.
        """
        return None

    def check(self, payload: Payload, out: Tensor) -> None:
        """Check in O(1) that the payload's parts have the sizes and types of a payload for `out`.

        Where a codec has no check of its own: those that it makes of a meta tensor.

        Raises:
            PayloadError: they do not; names what was received and what was expected.
        """
        check_like(self, payload, out)

    def decode_mean_(self, payloads: Sequence[Payload], out: Tensor) -> None:
        """Overwrite `out` with the mean of the decoded payloads, added in rank order."""
        for payload in payloads:
            self.check(payload, out)
        out.zero_()
        for payload in payloads:
            self.decode_add_(payload, out, 1 / len(payloads))

    def one_shot(self, step: int) -> OneShotUse:
        """This codec, without error feedback."""
        return OneShotUse(self)

    def init(self, like: Tensor) -> State:
        """No state; wrap it in `ErrorFeedback` to have a residual."""
        return {}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """One `ReduceEncoded`, which the topology answers."""
        mean, sent = yield ReduceEncoded(self, x, ctx)
        return Outcome(mean, sent, state)


class SparseEntries(OneShot):
    """A codec of some entries, whose positions are the last tensor of a payload (see `kernels.positions`)."""

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether the entries arrive as they are: a payload then is (values, positions)."""

    @abstractmethod
    def most(self, numel: int) -> int:
        """How many entries of a tensor of `numel` may be sent, for which there is room."""


class OverflowShown(OneShot):
    """A codec whose payloads have no floating-point parts in which an overflow would show."""

    @abstractmethod
    def may_overflow(self, payload: Payload) -> bool:
        """Whether the payload shows that an entry may be infinite."""


class VariableLength(OneShot):
    """A codec whose payloads may be sent in fewer bytes, if the receiver learns their length."""

    varies: ClassVar[bool] = True

    @abstractmethod
    def longest(self, numel: int) -> int:
        """The most bytes of a message about `numel` entries."""

    @abstractmethod
    def shortened(self, payload: Payload, numel: int) -> Tensor:
        """The message (uint8) of a payload of `numel` entries, which does not change."""

    @abstractmethod
    def restore_(self, message: Tensor, numel: int, payload: Payload) -> None:
        """Overwrite `payload` with that of a message.

        Raises:
            PayloadError: it is none of `numel` entries, or damaged.
        """


class ServerAnswer(OneShot):
    """A codec of a server's answers that are more than the mean of what was pushed."""

    @abstractmethod
    def answer(self, mean: Tensor, memory: State | None, ctx: Context) -> tuple[Payload, State]:
        """The answer, and what the server remembers.

        Args:
            memory: of the last answer about this bucket; None before the first.
        """


@dataclass(frozen=True, slots=True)
class PayloadSpec:
    """The format of one payload of a message.

    Attributes:
        codec: decodes it; None: the payload is the entries themselves.
        numel: the number of elements that it encodes; `dtype`, their type.
        has_feedback: whether the sender adds its error to the next payload (error feedback).
        spans: the bucket's entries that it encodes; None: all of them.
    """

    codec: OneShot | None
    numel: int
    dtype: torch.dtype
    has_feedback: bool = False
    spans: Spans | None = None
