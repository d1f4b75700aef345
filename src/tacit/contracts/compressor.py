"""What is sent: compressors, one-shot codecs, and the requests of exchanges, some of which name a codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tacit.contracts.collectives import AllGather, AllGatherInto, AllReduce, AllToAll, Permute, ReduceScatter
from tacit.contracts.common import SERVER, Matrix, Momentum, Payload, Read, ScheduleState, Spans, State
from tacit.contracts.context import Context, NoMemory
from tacit.contracts.transmitted import Transmitted
from tacit.errors import ConfigError, PayloadError, first_line

# ---- requests -----------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class PushPull:
    """Answer: the server's payloads for this worker, one for each of `pulls`.

    Attributes:
        payloads: what is pushed, in the formats of `pieces`; empty with `do="pull"`, and where nothing is
            pushed before all meet.
        pulls: the formats of the answer.
        do: "push": push and pull. "pull": pull only. "meet": pull once all workers have asked (a barrier).
        lr: the learning rate of this step, for a server that applies what is pushed.
        seconds: after so many no more parts of what is `partial` are sent; its payloads are overwritten by
            what has left. None: all is sent.
    """

    payloads: tuple[Payload, ...]
    pieces: tuple[PayloadSpec, ...]
    pulls: tuple[PayloadSpec, ...]
    do: Literal["push", "pull", "meet"] = "push"
    lr: float = 0.0
    seconds: float | None = None
    axis: str = SERVER


@dataclass(frozen=True, slots=True)
class ReduceEncoded:
    """Answer, by the topology and never by a transport: `(mean, transmitted)`; the mean is in `ctx.out`.

    The topology encodes `x` whole, or span by span (`exchange.error_feedback.encoded`).

    Attributes:
        codec: encodes and decodes.
        x: the tensor to be averaged; flat, in the type that is sent.
        residual: with error feedback, the error of earlier payloads, of the shape of `x`. It is multiplied by
            the factors of `ctx.rescale` and added to `x`. May be of a wider type.
        new_residual: of the type of `residual`; overwritten by that sum less what this payload encodes.
        has_mean_feedback: whether the error of a compressed mean is added to the next mean.
    """

    codec: OneShot
    x: Tensor
    ctx: Context
    residual: Tensor | None = None
    new_residual: Tensor | None = None
    has_mean_feedback: bool = False


@dataclass(frozen=True, slots=True)
class Grouped:
    """Several independent requests. Answer: their answers, in order.

    Messages of the same kind that result from them are sent as one.
    """

    requests: tuple[Request, ...]


Collective: TypeAlias = AllReduce | AllGather | ReduceScatter | AllGatherInto | AllToAll | Permute | PushPull
"""The requests that a transport answers."""


def staged_on(kind: str, axis: str) -> str:
    """The name under which stages of this class of requests are counted: the axis, or one for `Permute`.

    A `Permute` needs no separate process group, however many follow each other.
    """
    return f"{axis}/Permute" if kind == Permute.__name__ else axis


def stage_of(request: Collective) -> str:
    """The name under which the stages of this request are counted; see `staged_on`."""
    return f"{request.axis}/Permute" if isinstance(request, Permute) else request.axis


Request: TypeAlias = "Collective | ReduceEncoded | Grouped | Read"
"""What an exchange may yield."""


class Outcome(NamedTuple):
    """The result of an exchange."""

    mean: Tensor
    """The mean over the peers, of the shape of the exchanged tensor."""
    sent: Transmitted
    state: State
    """The new state. The session keeps it only if the whole round succeeds."""
    finite: bool = False
    """Whether the mean is known to be finite, without a look at it."""


Exchange: TypeAlias = Generator[Request, Any, Outcome]
"""What a compressor's `exchange` returns: it yields requests, and is sent the answer to each."""


# ---- compressors --------------------------------------------------------------------------------------


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
    """Whether payloads encode the error of a prediction, which only the ranks can make."""

    @property
    def keeps_means(self) -> bool:
        """Whether a topology that compresses means adds their error to the next ones."""
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
    are finite, or that their sums with its residual are. Until then it changes none of them."""
    varies: ClassVar[bool] = False
    """Whether the number of bytes that it sends depends on the values, and is not known beforehand."""
    inline: ClassVar[bool] = False
    """Whether it costs so little that the thread of backward may do it."""
    linear: ClassVar[bool] = False
    """Whether it leaves nothing out and keeps no state, so that its input may already contain means."""
    scales: ClassVar[bool] = False
    """Whether c times `x` arrives as c times what `x` arrives as, and it has no state. A gradient is then
    sent with the factor of a GradScaler, so that it does not underflow in fp16."""
    weighed: ClassVar[bool] = False
    """Whether each rank also sends a weight, as in push-sum, so that it may receive more than it gives; see
    `counted_`."""

    sent_lasts: ClassVar[bool] = False
    """Whether `Outcome.sent` is as good once the mean has overwritten `x`, until the next exchange: as it
    follows from the payload alone."""
    adds_residual: ClassVar[bool] = False
    """Whether it has `exchange_with_feedback`."""

    @property
    def on_device(self) -> bool:
        """Whether an exchange takes values to the host by `Read` alone, and makes its tensors where `x` is.

        On a GPU it is then launched without any other wait. Otherwise it runs on the host, on copies.
        """
        return False

    @property
    def needs_server(self) -> bool:
        """Whether it works only with a parameter server that averages."""
        return False

    def exempts(self, shape: torch.Size) -> bool:
        """Whether parameters of this shape stay dense by default: biases and norms, which are few.

        Training is sensitive to them, and their scale differs from that of weights.
        """
        return len(shape) < 2

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

    def inside(self) -> Mapping[str, tuple[Compressor, Spans | None]]:
        """The compressors inside it with their spans, by part of the context; None: all other entries."""
        return {}

    def counted_(self, x: Tensor, state: State) -> None:
        """Overwrite `x`, this replica's tensor, with its contribution where all replicas are made equal.

        The replicas become the mean of the contributions. Most compressors leave `x` as it is.
        """
        return

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

    def exchange_with_feedback(
        self, x: Tensor, residual: Tensor, new_residual: Tensor, state: State, ctx: Context
    ) -> Exchange:
        """Average `x` + `residual`, and set `new_residual` to that sum less what this rank has contributed.

        All three are of one type. Only for a compressor that `adds_residual`.
        """
        raise NotImplementedError


class OneShot(Compressor):
    """A compressor with one message a round: `encode`, one collective, `decode`."""

    additive: ClassVar[bool]
    """Whether the mean of payloads, entry by entry, decodes to the mean of the tensors (they travel by
    `AllReduce`)."""
    unbiased: ClassVar[bool] = False
    """Whether what is decoded is unbiased, except for clipping; it is then used without error feedback."""
    sliceable: ClassVar[bool] = False
    """Whether any slice of a tensor may be encoded by itself. False for codecs of rows or matrices, which
    topologies that slice refuse."""
    entrywise: ClassVar[bool] = False
    """Whether a payload is one tensor with one element for each entry, in order."""
    partial: ClassVar[bool] = False
    """Whether its message, which `varies`, is made of `message_parts`, of which the last may be left out."""
    answers: ClassVar[bool] = False
    """Whether a server's answer is more than the mean of what was pushed; it is made by `answer`."""

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

    def check(self, payload: Payload, out: Tensor) -> None:
        """Check in O(1) that the payload's parts have the sizes and types of a payload for `out`.

        By default, compared with those that the codec makes of a meta tensor.

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

    def block_sizes(self, numel: int) -> tuple[int, ...] | None:
        """The elements of each part of a payload, if it encodes each block of 512 entries by itself.

        Then the payload of some blocks is a stretch of that of all, and one call encodes every slice of a
        tensor. None: it does not.
        """
        return None

    def exact_entries(self, numel: int) -> int | None:
        """How many exact entries a payload of (values, packed positions) has; None: its format is another."""
        return None

    def may_overflow(self, payload: Payload) -> bool:
        """Whether a payload without floating-point parts, which would show it, may hold an infinite entry."""
        return False

    def longest(self, payload: Payload, numel: int) -> int:
        """If it `varies`: the most bytes of a message of `numel` entries, with payloads like this one."""
        raise NotImplementedError

    def shortened(self, payload: Payload, numel: int) -> Tensor:
        """If it `varies`: the message (uint8) of a payload of `numel` entries, which does not change."""
        raise NotImplementedError

    def shortened_on_device(self, payload: Payload, numel: int) -> tuple[Tensor, Tensor]:
        """If it `varies` on a device: as `shortened`, in as many bytes as the `longest`; and its length."""
        raise NotImplementedError

    def message_parts(self, payload: Payload, numel: int) -> list[Tensor]:
        """If it is `partial`: the parts of a payload's message, the weightiest first."""
        return [self.shortened(payload, numel)]

    def restore_(self, message: Tensor, numel: int, payload: Payload) -> None:
        """If it `varies`: overwrite `payload` with the payload that a message holds.

        Raises:
            PayloadError: the message is damaged, or of another number of entries.
        """
        raise NotImplementedError

    def restore_on_device_(self, messages: Tensor, lengths: Tensor, numel: int, payloads: Payload) -> None:
        """As `restore_`, of several at once: all tensors have a row for each; NaN where one is damaged."""
        raise NotImplementedError

    def answer(self, mean: Tensor, memory: State | None, ctx: Context) -> tuple[Payload, State]:
        """If it `answers`: the payload of the server's answer, and the server's new memory.

        Args:
            memory: of the last answer about this bucket; None before the first.
        """
        raise NotImplementedError

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


# ---- trials on meta tensors, which have shapes and no values: by them tacit finds out what is sent -----


@contextmanager
def on_meta(compressor: object) -> Iterator[None]:
    """Turn the failure of a compressor on meta tensors, in the block, into an error that says what to do.

    Raises:
        ConfigError: names it.
    """
    try:
        yield
    except (RuntimeError, TypeError) as error:  # what torch raises where a value is asked for
        raise ConfigError(
            f"{compressor} cannot be tried on meta tensors, which have shapes and no values, and by which "
            f"tacit finds out what is sent: {first_line(error)}. Where x.is_meta, look at no value, and "
            "return a payload of the shapes that you always return"
        ) from error


def formed(codec: OneShot, payload: Payload, x: Tensor, apart_from: Tensor | None = None) -> Payload:
    """What `encode` has returned of `x`; with other parts than peers expect, a collective ends the process.

    Args:
        apart_from: what was encoded, where it is overwritten before the payload has left.

    Raises:
        ConfigError: it is no tuple of tensors, or one of them lies in `apart_from`.
        PayloadError: its parts have other sizes or types.
    """
    whole = isinstance(payload, tuple)
    for part in payload if whole else ():  # in the hot path, where a generator takes longer
        whole = whole and isinstance(part, Tensor)
    if not whole:
        raise ConfigError(
            f"encode of {codec} has returned a {type(payload).__name__}, where a tuple of tensors belongs: "
            "of a single one write `return (codes,)`"
        )
    if apart_from is not None:
        for i, part in enumerate(payload):
            if _lies_in(part, apart_from):
                raise ConfigError(
                    f"part {i} of what encode of {codec} has returned shares memory with the x that it was "
                    "given, from which error feedback subtracts what is sent, before it is sent: return a "
                    "copy, such as x.to(dtype, copy=True), or write into ctx.scratch(...)"
                )
    if not x.is_meta:
        codec.check(payload, x)
    return payload


def _lies_in(part: Tensor, x: Tensor) -> bool:
    if part.is_meta:  # on the meta device all addresses are 0
        return part.untyped_storage() is x.untyped_storage()
    start = x.data_ptr()
    return start <= part.data_ptr() < start + x.numel() * x.element_size()


@lru_cache(1 << 10)
def payload_like(codec: OneShot, numel: int, dtype: torch.dtype) -> Payload:
    """A payload of `numel` entries, as meta tensors.

    Raises:
        ConfigError: the codec cannot be tried on them.
    """
    x = torch.empty(numel, dtype=dtype, device="meta")
    with on_meta(codec):
        return formed(codec, codec.encode(x, Context(out=x, work=NoMemory(), peers=1)), x)


def check_like(codec: OneShot, payload: Payload, out: Tensor) -> None:
    """Check that a payload's parts have the sizes and types that the codec gives a meta tensor like `out`.

    Raises:
        PayloadError: they are not.
    """
    wanted = payload_like(codec, out.numel(), out.dtype)
    if _form(payload) != _form(wanted):
        raise PayloadError(
            f"a payload of {codec} for {out.numel()} entries is {_form(payload)}, and {_form(wanted)} where "
            "x is a meta tensor: its shapes must follow from the shape of x alone, on every rank and in "
            "every step; fill what varies up to a fixed length, or write Scheduled for what follows the step"
        )


def _form(payload: Payload) -> list[str]:
    return [f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}" for part in payload]
