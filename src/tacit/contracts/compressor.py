"""WHAT is sent: compressors, and codecs that encode once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tacit.contracts.collectives import ReduceEncoded
from tacit.contracts.common import Payload, ScheduleState, Spans, State
from tacit.contracts.context import Context, Exchange, Outcome
from tacit.contracts.transmitted import Transmitted


@dataclass(frozen=True, slots=True)
class Matrix:
    """Where a parameter lies in a flat tensor, as a matrix: its first dimension by all the others.

    Attributes:
        dims: how many dimensions the parameter has.
    """

    start: int
    rows: int
    columns: int
    dims: int = 2


class Momentum(NamedTuple):
    """Momentum as torch's SGD has it."""

    factor: float
    nesterov: bool = False


class OneShotUse(NamedTuple):
    """What speaks once of a whole tensor, inside all wrappers."""

    codec: OneShot
    has_feedback: bool = False
    """Whether what it does not say is owed (error feedback)."""
    others: Spans = ()
    """Stretches of the tensor of which other compressors speak; rising."""


class Compressor(ABC):
    """WHAT is said. A frozen dataclass of hyper-parameters: no state inside, no I/O inside."""

    shared: ClassVar[frozenset[str]] = frozenset()
    """State fields that are equal on all ranks of the exchanged axis; the others are rank-local."""
    hides_nonfinite: ClassVar[bool] = True
    """Whether a NaN or infinity of one rank may fail to reach the others through the payload."""
    inline: ClassVar[bool] = False
    """Whether it costs so little that backward's own thread may do it."""
    linear: ClassVar[bool] = False
    """Whether nothing is left out or remembered, so that a sum that holds means may be given to it."""
    scales: ClassVar[bool] = False
    """Whether a multiple of what is given makes the same multiple of what arrives, and nothing is remembered:
    a gradient may then come with the factor of a GradScaler, which keeps it from vanishing in fp16."""

    @property
    def on_device(self) -> bool:
        """Whether an exchange never needs a value on the host, and makes its tensors on the device of `x`.

        On a GPU it can then be launched without waiting. What is not, runs on the host, on copies.
        """
        return False

    @property
    def needs_server(self) -> bool:
        """Whether only a parameter server that averages can give it what it asks for."""
        return False

    @abstractmethod
    def exempts(self, shape: torch.Size) -> bool:
        """Whether parameters of this shape stay dense by default."""

    def exempted(self) -> Compressor | None:
        """What handles the parameters that it exempts; None: they travel densely."""
        return None

    @property
    def takes_momentum(self) -> Momentum | None:
        """The momentum that it has in itself, so that the optimizer must have none."""
        return None

    @property
    def changes(self) -> tuple[int, ...]:
        """The steps from which on payloads have other shapes than before, rising."""
        return ()

    def one_shot(self, step: int) -> OneShotUse | None:
        """What speaks once of the whole tensor in this step; None: it has a conversation of its own."""
        return None

    def for_model(self, matrices: tuple[Matrix, ...]) -> Compressor:
        """The same compressor, told of all parameters of the model that it is for; most do not care.

        Raises:
            ConfigError: for these it cannot keep what it promises.
        """
        return self

    def for_training(self, schedule_state: ScheduleState) -> Compressor:
        """The same compressor, told what is known of the training (`Rounds.needs`); most do not care."""
        return self

    def ended(self, steps: int) -> str:
        """What the user should know of a training that ends after so many steps; "": all is as planned."""
        return ""

    def with_layout(self, matrices: tuple[Matrix, ...]) -> Compressor:
        """The same compressor, told where matrices lie in the flat tensor; most do not care."""
        return self

    def is_shared(self, field: str) -> bool:
        """Whether the state field is equal on all ranks of the exchanged axis."""
        return field in self.shared

    def widths(self, field: str) -> tuple[int, ...] | None:
        """How many elements of a state field belong to each matrix; None: as many as the parameter has."""
        return None

    @abstractmethod
    def init(self, like: Tensor) -> State:
        """The state before the first round, for a flat tensor like `like` (which may be on meta)."""

    @abstractmethod
    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Agree with the peers on a mean of `x` (flat), written to `ctx.out`.

        `x` is left as it is unless it is `ctx.out` itself. Nothing in `state` is changed.
        """


class PartitionedCompressor(Compressor):
    """Several compressors, each for stretches of its own."""

    @abstractmethod
    def inside(self) -> Mapping[str, tuple[Compressor, Spans | None]]:
        """Each of them and its stretches, by the part of its context; None: all that the others leave."""


class OneShot(Compressor):
    """A compressor that speaks once: `encode`, one collective, `decode`."""

    additive: ClassVar[bool]
    """Whether payloads may be averaged on the way, entry by entry (answered by `AllReduce`)."""
    unbiased: ClassVar[bool] = False
    """Whether what arrives is right in the mean, but for clipping: then it is used without error feedback."""
    sliceable: ClassVar[bool] = False
    """Whether any stretch of a tensor may be encoded by itself. Topologies that slice refuse it otherwise; a
    codec that sees rows or matrices says no."""
    entrywise: ClassVar[bool] = False
    """Whether a payload is one tensor that says entry after entry, so that a stretch of it says a stretch."""

    @abstractmethod
    def encode(self, x: Tensor, ctx: Context) -> Payload:
        """What travels; its shapes depend on the shape of `x` alone."""

    @abstractmethod
    def decode_(self, payload: Payload, out: Tensor) -> None:
        """Overwrite `out` with what the payload says."""

    @abstractmethod
    def decode_add_(self, payload: Payload, out: Tensor, weight: float) -> None:
        """Add `weight` times what the payload says to `out`, without a dense copy of it."""

    @abstractmethod
    def sent(self, payload: Payload, x: Tensor) -> Transmitted:
        """What the peers saw of `x`."""

    def of_sums(self, numel: int, peers: int) -> OneShot | None:
        """What says a sum of so many payloads of tensors of `numel` in full, and shorter than densely.

        None: nothing does.
        """
        return None

    def encode_with_feedback(
        self, x: Tensor, residual: Tensor, new_residual: Tensor, ctx: Context
    ) -> Payload | None:
        """`encode(x + residual)`, leaving in `owed` what of the sum the payload does not say; in one pass.

        None where there is no such kernel: then nothing has been written. `x` and `residual` are left alone.
        """
        return None

    def check(self, payload: Payload, out: Tensor) -> None:
        """Refuse a payload whose parts are not of the sizes and types that `out` needs; O(1).

        Raises:
            PayloadError: says what is there, and what was expected.
        """

    def decode_mean_(self, payloads: Sequence[Payload], out: Tensor) -> None:
        """Overwrite `out` with the mean of what the peers' payloads say, in rank order."""
        for payload in payloads:
            self.check(payload, out)
        out.zero_()
        for payload in payloads:
            self.decode_add_(payload, out, 1 / len(payloads))

    def one_shot(self, step: int) -> OneShotUse:
        """Itself, which owes nothing."""
        return OneShotUse(self)

    def init(self, like: Tensor) -> State:
        """Speaking once needs no memory; wrap it in `ErrorFeedback` to have one."""
        return {}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Encode, let the topology reduce, and report what was sent."""
        mean, sent = yield ReduceEncoded(self, x, ctx)
        return Outcome(mean, sent, state)


class SparseEntries(OneShot):
    """Says some entries, whose positions are the last tensor of a payload (see `kernels.positions`)."""

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether the entries arrive as they are: a payload then is (values, positions)."""

    @abstractmethod
    def most(self, numel: int) -> int:
        """How many entries of a tensor of `numel` may be sent, for which there is room."""


class OverflowShown(OneShot):
    """Its payloads have no floating-point parts by which an overflow shows."""

    @abstractmethod
    def may_overflow(self, payload: Payload) -> bool:
        """Whether the payload shows that an entry may be infinite."""


class ServerAnswer(OneShot):
    """What a server says where it answers with more than a mean."""

    @abstractmethod
    def answer(self, mean: Tensor, memory: State | None, ctx: Context) -> tuple[Payload, State]:
        """The answer, and what the server remembers.

        Args:
            memory: of the last answer about this bucket; None before the first.
        """


@dataclass(frozen=True, slots=True)
class PayloadSpec:
    """How one payload of a message is read.

    Attributes:
        codec: decodes it; None: the entries as they are.
        numel: how many elements it speaks of; `dtype`, their type.
        owes: whether who sends it adds to the next one what this one does not say (error feedback).
        spans: which of the bucket's entries these are; None: all of them.
    """

    codec: OneShot | None
    numel: int
    dtype: torch.dtype
    has_feedback: bool = False
    spans: Spans | None = None
