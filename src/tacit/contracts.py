"""The five questions of a communication strategy, and the messages between their answers.

*When* do replicas talk (`Rounds`), *what* do they say (`Compressor`), *with whom* and by which collective
(`Topology`), *how is it hidden* (`Overlap`), *how is the answer applied* (`Merge`). Compressors and
topologies do no I/O: they are generators that yield requests and are sent the answers, so one strategy runs
on every transport. CONTRIBUTING walks through a new one.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from operator import attrgetter
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from tacit.errors import ConfigError, Overflow

WORLD = "world"
"""The axis that holds every replica."""
NODE = "node"
"""The near axis: the replicas of one node."""
NET = "net"
"""The far axis: the replicas that hold the same place in their nodes."""
SERVER = "server"
"""The axis of a replica and the parameter servers, which stand outside of the world."""

Payload: TypeAlias = tuple[Tensor, ...]
"""What one message holds; the shapes follow from the shape of the bucket alone."""
State: TypeAlias = Mapping[str, Tensor]
"""Tensors only, so that any state can be saved, moved and compared."""
ScheduleState: TypeAlias = Mapping[str, float]
"""What a schedule remembers: numbers only."""
Spans: TypeAlias = tuple[tuple[int, int], ...]
"""One stretch (start, stop) of a flat tensor for each peer, in rank order; together they cover it once."""
Factors: TypeAlias = tuple[tuple[int, int, float], ...]
"""Stretches (start, stop) of a flat tensor, rising and disjoint, each with what it is to be multiplied by."""


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which state adds up small numbers round after round: of at least 32 bits."""
    return torch.promote_types(dtype, torch.float32)


def cut_factors(factors: Factors, start: int, stop: int) -> Factors:
    """Those of a stretch of the tensor, counted from its start."""
    cut = ((max(a, start) - start, min(b, stop) - start, factor) for a, b, factor in factors)
    return tuple((a, b, factor) for a, b, factor in cut if a < b)


# ---- requests -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Answer: the peers' mean, tensor by tensor. The payload itself may be overwritten with it.

    All tensors have one type, as a transport adds them up in one message. Put several types into a `Grouped`
    of one `AllReduce` each.

    Where `total` is given, the transport adds to it a sum over this rank's own payload, which it passes over
    anyway: finite if all entries are, and their sum does not overflow.
    """

    payload: Payload
    axis: str = ""
    finite_probe: Tensor | None = None

    def __post_init__(self) -> None:
        types = {tensor.dtype for tensor in self.payload}
        assert len(types) < 2, f"a Mean of {types}: put each type into a Mean of its own, inside a Together"


@dataclass(frozen=True, slots=True)
class AllGather:
    """Answer: every peer's payload, in rank order. All peers send equal shapes."""

    payload: Payload
    axis: str = ""


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Answer: `x` (flat), in which this rank's own stretch now is the peers' mean (reduce-scatter).

    The other stretches are unspecified afterwards. `total` is as in `AllReduce`.
    """

    x: Tensor
    spans: Spans
    axis: str = ""
    finite_probe: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AllGatherInto:
    """Answer: `x` (flat), with every stretch as the peer has it whose stretch it is (all-gather).

    Where one peer has the whole, it is a broadcast.
    """

    x: Tensor
    spans: Spans
    axis: str = ""


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Answer: what every peer has for this rank, in rank order (all-to-all).

    `payloads`: one for each peer, in rank order; all peers' for one rank have equal shapes.
    """

    payloads: tuple[Payload, ...]
    axis: str = ""


@dataclass(frozen=True, slots=True)
class Permute:
    """Answer: the payload of the peer that sends to this rank; None where none does.

    Two peers that send to each other swap; trees and gossip are made of it. All payloads have equal shapes,
    also that of a rank which only receives.

    `to`: for each peer, in rank order, the place of the one that gets its payload, or None; equal on all
    peers. Nobody gets two, nor what is its own.
    """

    payload: Payload
    to: tuple[int | None, ...]
    axis: str = ""

    def __post_init__(self) -> None:
        ends = [end for end in self.to if end is not None]
        assert len(ends) == len(set(ends)), f"to={self.to} gives somebody two payloads"
        assert all(
            end != i and end in range(len(self.to)) for i, end in enumerate(self.to) if end is not None
        )

    def comes_from(self, rank: int) -> int | None:
        """The place of the one that sends to `rank`."""
        return self.to.index(rank) if rank in self.to else None


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


@dataclass(frozen=True, slots=True)
class PushPull:
    """Answer: what the server has for this worker, a payload for each of `pulls`.

    Attributes:
        payloads: what is pushed, each as `pieces` says; with `do="pull"` nothing.
        pulls: how the answer is read.
        do: "push", and be answered; "pull" only; "meet": be answered when all workers have come so far.
        lr: the learning rate of this step, for a server that applies what is pushed.
    """

    payloads: tuple[Payload, ...]
    pieces: tuple[PayloadSpec, ...]
    pulls: tuple[PayloadSpec, ...]
    do: Literal["push", "pull", "meet"] = "push"
    lr: float = 0.0
    axis: str = SERVER


@dataclass(frozen=True, slots=True)
class ReduceEncoded:
    """Answer, given by the topology and never by a transport: `(mean, sent)`; the mean is in `ctx.out`.

    The topology encodes, all at once or stretch by stretch. With error feedback, `residual`, multiplied as
    `ctx.rescale` says, is added to `x`, and `owed` in the end holds all of the sum that did not arrive. Both
    may be of a wider type than `x`, which is the type that travels.
    """

    codec: OneShot
    x: Tensor
    ctx: Context
    residual: Tensor | None = None
    new_residual: Tensor | None = None

    def encode(self, start: int = 0, stop: int | None = None, part: str = "") -> Payload:
        """The payload of a stretch, which is taken off what is owed.

        The buffers of different parts are different ones. `x` must be what it was until all is encoded.
        """
        ctx = self.ctx.inside(part) if part else self.ctx
        x = self.x[start:stop]
        if self.residual is None or self.new_residual is None:
            return self._checked(self.codec.encode(x, ctx), x)
        residual, new_residual = self.residual[start:stop], self.new_residual[start:stop]
        factors = self.ctx.rescale and cut_factors(self.ctx.rescale, start, start + x.numel())
        payload = None
        if not factors and new_residual.dtype == x.dtype:
            payload = self.codec.encode_with_feedback(x, residual, new_residual, ctx)
        if payload is None:
            add_rescaled(x, residual, factors, new_residual)
            payload = self._encode_sum(new_residual, x, ctx)
        return self._checked(payload, new_residual)

    def _encode_sum(self, new_residual: Tensor, x: Tensor, ctx: Context) -> Payload:
        """Encode what is owed, in the type of `x`, and take it off."""
        if new_residual.dtype == x.dtype:
            payload = self.codec.encode(new_residual, ctx)
            self.codec.sent(payload, new_residual).subtract_from_(new_residual)
            return payload
        given = ctx.scratch("given", x, x.shape, x.dtype).copy_(new_residual)
        payload = self.codec.encode(given, ctx)
        self.codec.decode_(payload, given)
        new_residual.sub_(given)
        return payload

    def _checked(self, payload: Payload, given: Tensor) -> Payload:
        """Nobody sees in the mean what a payload swallows: where there is cause, it is looked for here."""
        if given.is_meta or not self.codec.hides_nonfinite:
            return payload
        parts = [part for part in payload if part.is_floating_point()]
        if self.ctx.health is not None:
            if given.dtype.itemsize < 4 or not parts:
                parts.append(given)  # else what is infinite in it shows in the payload
            for part in parts:
                note_magnitude(part, self.ctx.health)
        elif self.codec.extreme(payload):
            for tensor in (given, *parts):
                refuse_overflow(tensor, self.ctx)
        return payload

    def sent(self, payload: Payload) -> Transmitted:
        """What the peers saw of `x`, all at once."""
        sent = self.codec.sent(payload, self.x)
        if self.residual is None or self.new_residual is None:
            return sent
        return lasting(sent, self.x, self.residual, self.new_residual, self.ctx.rescale)


@dataclass(frozen=True, slots=True)
class Grouped:
    """Several requests at once, given to the topology as some are `ReduceEncoded`. Answer: theirs, in order.

    Like messages among what they become travel as one.
    """

    requests: tuple[Request, ...]


Collective: TypeAlias = AllReduce | AllGather | ReduceScatter | AllGatherInto | AllToAll | Permute | PushPull
"""What a transport can answer."""
Request: TypeAlias = "Collective | ReduceEncoded | Grouped"


# ---- what was sent ------------------------------------------------------------------------------------


class Transmitted(ABC):
    """What this rank contributed to a round, as its peers saw it."""

    @abstractmethod
    def subtract_from_(self, new_residual: Tensor) -> None:
        """Subtract it from `owed` (flat, the tensor that was to be sent), in place."""

    @abstractmethod
    def dense(self, like: Tensor) -> Tensor:
        """It as a new tensor of the shape of `like`; for tests and diagnostics, not for the hot path."""

    def clear_(self, x: Tensor) -> None:
        """Zero `x` (flat) wherever something other than zero was sent, or entries were chosen to be."""
        x.masked_fill_(self.dense(x).ne(0), 0.0)


_PIECE = 1 << 14
"""Entries that are copied at a time where a whole copy would be allocated: 64 KiB of fp32."""


@dataclass(frozen=True, slots=True)
class Exact(Transmitted):
    """All of `x` arrived, to the last bit."""

    x: Tensor

    def subtract_from_(self, new_residual: Tensor) -> None:
        """Leave nothing owed."""
        new_residual.zero_()

    def dense(self, like: Tensor) -> Tensor:
        """A copy of `x`."""
        return self.x.clone().view_as(like)


@dataclass(frozen=True, slots=True)
class Rounded(Transmitted):
    """`x` arrived, rounded to `dtype`."""

    x: Tensor
    dtype: torch.dtype

    def subtract_from_(self, new_residual: Tensor) -> None:
        """Leave the rounding error owed."""
        step = _PIECE if new_residual.is_cpu else max(1, new_residual.numel())
        for start in range(0, new_residual.numel(), step):
            piece = slice(start, start + step)
            new_residual[piece] -= self.x[piece].to(self.dtype).to(new_residual.dtype)

    def dense(self, like: Tensor) -> Tensor:
        """`x` after a round trip through `dtype`."""
        return self.x.to(self.dtype).to(like.dtype).view_as(like)


@dataclass(frozen=True, slots=True)
class Sparse(Transmitted):
    """The entries `values` at the flat positions `index` arrived, exactly; no position twice."""

    index: Tensor
    values: Tensor

    def subtract_from_(self, new_residual: Tensor) -> None:
        """Leave everything but those entries owed."""
        new_residual.index_add_(0, self.index, self.values, alpha=-1)

    def clear_(self, x: Tensor) -> None:
        """Zero those entries."""
        x.index_fill_(0, self.index.long(), 0.0)

    def dense(self, like: Tensor) -> Tensor:
        """Zeros with those entries."""
        return torch.zeros_like(like).index_add_(0, self.index, self.values)


@dataclass(frozen=True, slots=True)
class Decoded(Transmitted):
    """What the codec makes of the payload arrived; for payloads that no collective overwrites."""

    codec: OneShot
    payload: Payload

    def subtract_from_(self, new_residual: Tensor) -> None:
        """Leave owed what the payload does not say."""
        self.codec.decode_add_(self.payload, new_residual, -1.0)

    def dense(self, like: Tensor) -> Tensor:
        """The payload, decoded."""
        whole = torch.empty_like(like)
        self.codec.decode_(self.payload, whole)
        return whole


@dataclass(frozen=True, slots=True)
class Difference(Transmitted):
    """What was given and was owed before, less what is owed now.

    Attributes:
        factors: what `before` was multiplied by before it was added.
    """

    x: Tensor
    before: Tensor
    after: Tensor
    factors: Factors = ()

    def subtract_from_(self, new_residual: Tensor) -> None:
        """Leave owed what is still owed beyond it."""
        new_residual.sub_(self.x).sub_(self._before()).add_(self.after)

    def dense(self, like: Tensor) -> Tensor:
        """The difference."""
        return (self.x + self._before() - self.after).to(like.dtype)

    def _before(self) -> Tensor:
        if not self.factors:
            return self.before
        return add_rescaled(None, self.before, self.factors, torch.empty_like(self.before))


def lasting(
    sent: Transmitted, x: Tensor, before: Tensor, after: Tensor, factors: Factors = ()
) -> Transmitted:
    """`sent`, where it speaks of a tensor that has since become what is owed `after`."""
    return Difference(x, before, after, factors) if isinstance(sent, Exact | Rounded) else sent


def add_rescaled(x: Tensor | None, residual: Tensor, factors: Factors, out: Tensor) -> Tensor:
    """`x` plus what was owed, multiplied as `factors` say, in `out`; without `x`, that alone."""
    if not factors and x is not None and x.dtype == out.dtype:
        return torch.add(x, residual, out=out)
    out.copy_(residual)
    for start, stop, factor in factors:
        out[start:stop].mul_(factor)
    return out if x is None else out.add_(x)


EXTREME = 2.0**100
"""No training has magnitudes of 1e30: where a payload shows one, overflow is looked for, entry by entry."""


def extreme(x: Tensor) -> bool:
    """Whether it holds NaN, or a magnitude of 2^100 or more."""
    if not x.numel():
        return False
    low, high = (float(each) for each in x.aminmax())
    return not (low > -EXTREME and high < EXTREME)


OVERFLOWN = 3.3e38
"""A magnitude from which on something overflowed: codecs cap their scales at 3.4e38."""


def measure_(x: Tensor, out: Tensor) -> None:
    """Write the largest magnitude in `x` to `out` (one fp32 number, where `x` is): NaN or infinite if one is.

    One launch on a GPU, and nothing is waited for.
    """
    if not x.numel():
        out.zero_()
    elif x.dtype == torch.float64:
        out.copy_(torch.linalg.vector_norm(x.reshape(-1), torch.inf).view(out.shape))
    else:
        at = out.view(())
        torch.linalg.vector_norm(x.reshape(-1), torch.inf, dtype=torch.float32, out=at)


def note_magnitude(x: Tensor, health: Tensor) -> None:
    """Have `health` (one fp32 number, where `x` is) be at least the largest magnitude in `x`; NaN stays."""
    found = health.new_empty(health.shape)
    measure_(x, found)
    torch.maximum(health, found, out=health)


def refuse_overflow(x: Tensor, ctx: Context) -> None:
    """Refuse NaN and infinity in what was made of finite entries; where there is `ctx.health`, note it there.

    Raises:
        Overflow: names the bucket.
    """
    if x.is_meta:
        return
    if ctx.health is not None:
        note_magnitude(x, ctx.health)
        return
    if bool(x.sum().isfinite()) or bool(x.isfinite().all()):
        return
    if not ctx.knows_of_nonfinite:  # else a rank gave what is not finite, and says so
        raise overflow(ctx.name, ctx.step, x.dtype)


def overflow(name: str, step: int, dtype: torch.dtype, where: str = "") -> Overflow:
    """The error for a bucket in which finite entries became infinite; `where`: " of rank 1", if known."""
    return Overflow(
        f"in the bucket of {name}, in step {step}, finite entries{where} became too large to be sent or kept "
        f"as residual: beyond {torch.finfo(dtype).max:.3g}, the largest {dtype}. Nothing of this step has "
        "been applied or kept. Lower the learning rate, or put Clip around the compressor"
    )


class Outcome(NamedTuple):
    """How an exchange ended."""

    mean: Tensor
    """What the peers agreed on, of the shape of the exchanged tensor."""
    sent: Transmitted
    state: State
    """The new state; the session keeps it only if the whole round succeeds."""


Exchange: TypeAlias = Generator[Request, Any, Outcome]


# ---- what an exchange is told -------------------------------------------------------------------------


class Workspace(Protocol):
    """Hands out buffers that were allocated before the hot path."""

    def spare(self, field: str, like: Tensor) -> Tensor:
        """The second buffer of the state field; swapped with the first when the round is committed."""

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A buffer on the device of `like`, unchanged until the end of the exchange."""


class AxisRank(NamedTuple):
    """A rank's place on an axis."""

    rank: int = 0
    peers: int = 1


@dataclass(frozen=True, slots=True)
class Context:
    """Where and when an exchange takes place.

    Attributes:
        out: where the mean is to be written; flat, of the exchanged tensor's shape. May be that tensor.
        peers: the number of ranks on the axis where compressors meet; `rank` counts from 0 among them.
        near: this rank's place among the ranks of its node; for topologies by node.
        spans: which stretch each rank of the node takes care of; for topologies by node.
        word: numbers to be averaged over all replicas along the way; for topologies. The first `replicas` of
            them, one a replica, tell of a NaN.
        total: to be added up as `AllReduce` says, over what this rank itself gives, a number for each
        `AllReduce`; see
            `exchanges.watched`. For topologies.
        share: of the model's elements, how much travels in this exchange.
        step: attempts of the optimizer so far; `round`: finished rounds so far.
        lr: the largest learning rate of a group that holds any of the parameters; 0 where no optimizer is
            known.
        alike: whether all ranks of the node give the same tensor; for topologies by node.
        turn: whose turn it is, counted up by one from round to round; for topologies that take turns.
        name: of the bucket that travels; part of every random seed, as `seed` is.
        rescale: what is to become of what is owed of `x`, before it is added, as the learning rate has
            changed. replicas: how many ranks `word` tells of; 0: it tells of nothing else.
        health: where the exchange runs on a device and the host does not wait for it: one number there, the
            largest magnitude of what may overflow on the way. None: the host looks, and overflow is an error
            at once.
    """

    out: Tensor
    work: Workspace
    peers: int
    rank: int = 0
    near: AxisRank = AxisRank()
    spans: Spans = ()
    nonfinite_flags: Tensor | None = None
    finite_probe: Tensor | None = None
    share: float = 1.0
    step: int = 0
    round: int = 0
    lr: float = 0.0
    replicated_in_node: bool = False
    round_index: int = 0
    name: str = ""
    seed: int = 0
    prefix: str = ""
    rescale: Factors = ()
    replicas: int = 0
    health: Tensor | None = None

    @property
    def knows_of_nonfinite(self) -> bool:
        """Whether a rank is known to have given something that is not finite."""
        return self.nonfinite_flags is not None and bool(self.nonfinite_flags[: self.replicas or None].any())

    def spare(self, field: str, like: Tensor) -> Tensor:
        """The second buffer of the state field `field`, of the shape of `like` (the first)."""
        return self.work.spare(self.prefix + field, like)

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A preallocated buffer; what it holds at first is unspecified."""
        return self.work.scratch(self.prefix + key, like, shape, dtype)

    def rng(self, *salt: object) -> torch.Generator:
        """Random numbers equal on all peers; different by rank where the rank is part of the salt."""
        return torch.Generator().manual_seed(zlib.crc32(self._salted(salt)))

    def draw(self, *salt: object) -> int:
        """A seed of 62 bits, for kernels that draw by themselves; equal and different as `rng`."""
        return int.from_bytes(blake2b(self._salted(salt), digest_size=8).digest()) >> 2

    def _salted(self, salt: tuple[object, ...]) -> bytes:
        return "|".join(map(str, (self.seed, self.round, self.name, self.prefix, *salt))).encode()

    def inside(self, part: str, out: Tensor | None = None, of: float = 1.0) -> Context:
        """The context of a part of this exchange, with a share `of` its elements.

        Its state fields and buffers begin with `part.`.
        """
        values = list(_FIELDS(self))  # in the hot path: dataclasses.replace takes twice as long
        values[_OUT] = self.out if out is None else out
        values[_SHARE] *= of
        values[_PREFIX] += f"{part}."
        return Context(*values)


_NAMES = [field.name for field in fields(Context)]
_FIELDS = attrgetter(*_NAMES)
_OUT, _SHARE, _PREFIX = map(_NAMES.index, ("out", "share", "prefix"))


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


# ---- the five questions -------------------------------------------------------------------------------


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

    def places(self) -> Mapping[str, Spans]:
        """Where those inside it speak that see some stretches only, by the part of their context."""
        return {}

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


class OneShot(Compressor):
    """A compressor that speaks once: `encode`, one collective, `decode`."""

    additive: ClassVar[bool]
    """Whether payloads may be averaged on the way, entry by entry (answered by `AllReduce`)."""
    unbiased: ClassVar[bool] = False
    """Whether what arrives is right in the mean, but for clipping: then it is used without error feedback."""
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

    def whole_entries(self, numel: int) -> int | None:
        """How many entries a payload of a tensor of `numel` says as they are, where it says nothing else.

        It then is (values, positions as `kernels.positions` packs so many). None: payloads are otherwise.
        """
        return None

    def of_sums(self, numel: int, peers: int) -> OneShot | None:
        """What says a sum of so many payloads of tensors of `numel` in full, and shorter than densely.

        None: nothing does.
        """
        return None

    def answer(
        self, mean: Tensor, schedule_state: State | None, ctx: Context
    ) -> tuple[Payload, State] | None:
        """What a server says where it answers with more than a mean, and what it remembers; None: `encode`.

        Args:
            memory: of the last answer about this bucket; None before the first.
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

    def extreme(self, payload: Payload) -> bool:
        """Whether the payload shows that an entry may be infinite, or soon; so that others need no look."""
        return any(part.is_floating_point() and extreme(part) for part in payload)

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


class Options(NamedTuple):
    """What a session may choose its topology from: the first, unless another's bytes are worth it."""

    topologies: tuple[Topology, ...]
    because: str = ""
    """Why there is but one, where more were asked for."""
    prices: tuple[float, ...] = ()
    """What a byte by each of them counts for, as what it brings may be worth less; all alike if empty."""


class Topology(ABC):
    """WITH WHOM, by which collective.

    Attributes:
        scope: the axis of all replicas that agree in a round.
        meets: the axis on which compressors meet.
    """

    scope: str = WORLD
    meets: str = WORLD

    @property
    def on_device(self) -> bool:
        """As of a compressor: whether conducting never needs a value on the host."""
        return False

    @property
    def independent(self) -> bool:
        """Whether each replica goes on without the others, so that none of them is asked anything."""
        return False

    @property
    def keeps_buckets(self) -> bool:
        """Whether buckets stay as they are cut at first, as somebody else keeps state bucket by bucket."""
        return False

    def admit(self, subject: str, rounds: Rounds, merge: Merge, overlap: Overlap) -> None:
        """Raise a `ConfigError` that says what to write, if it cannot work with these answers; most can."""
        return

    def agree(self, x: Tensor) -> Generator[Request, Any, None] | None:
        """What makes all replicas equal after a round out of turn: overwrites `x` by their anchor.

        None: the round has done so.
        """
        return None

    def spans(self, edges: Sequence[int] | range, near: AxisRank) -> Spans:
        """Which stretch of a tensor each rank of the node hands to its compressor; one alone: the whole.

        `edges`: where it may be cut, rising, from 0 to its number of elements.
        """
        return ((0, edges[-1]),)

    def options(self, compressors: Iterable[Compressor]) -> Options:
        """What a session with these compressors chooses from."""
        return Options((self,))

    def check(self, compressor: Compressor) -> None:
        """Raise a `ConfigError` that says what to write, if it cannot serve this compressor; most can."""
        if compressor.needs_server:
            raise ConfigError(
                f"{compressor} asks a server that averages, and answers as it says itself, which {self} has "
                "not: write topology=Star()"
            )

    def fields(self, compressor: Compressor) -> tuple[str, ...]:
        """Its own state for a parameter with this compressor; see `keeps`.

        Raises:
            ConfigError: it cannot be used with this compressor.
        """
        return ()

    def keeps(self, numel: int, compressor: Compressor, here: AxisRank) -> Mapping[str, tuple[int, int]]:
        """State of its own: field -> the stretch of a tensor of `numel` elements that it is about.

        `here`: this rank's place where compressors meet; the stretches of all ranks there cover the tensor
        once. The fields begin with "topology.", start as zeros, are zeros where `OneShotUse.others` speak,
        are in units of the mean, and stand in the state beside the compressor's.
        """
        return {}

    @abstractmethod
    def conduct(self, x: Tensor, compressor: Compressor, state: State, ctx: Context) -> Exchange:
        """Run the compressor's exchange; stamp its requests with an axis and answer its `ReduceEncoded`.

        The compressor and its state are those of this rank's stretch of `x`. Averages `ctx.word` over the
        scope and adds up `ctx.total`, where they are given.
        """


class Rounds(ABC):
    """WHEN. Pure in (step, memory), so that every rank decides alike."""

    needs: ClassVar[frozenset[str]] = frozenset()
    """What must be known of the training: "steps_per_epoch", "epochs". It stands in the memory."""
    late: ClassVar[bool] = False
    """Whether `lands` says when answers are applied. A round then leaves before the answer that lands with it
    is applied."""
    follows: ClassVar[bool] = False
    """Whether it goes by what the rounds of the farthest level remember."""

    @property
    def observed_metrics(self) -> frozenset[str]:
        """The facts that `observe` is to be told: "loss", "drift", "transfer"."""
        return frozenset()

    @property
    def parts(self) -> int:
        """How many parts the model is cut into, each with rounds of its own."""
        return 1

    def start(self, step: int = 0) -> ScheduleState:
        """What is remembered before the step with which it begins."""
        return {}

    @abstractmethod
    def due(self, step: int, schedule_state: ScheduleState, part: int = 0) -> bool:
        """Whether a round of the part follows the attempt number `step` (counted from 0) of the optimizer."""

    def inactive(self, step: int, schedule_state: ScheduleState) -> bool:
        """Whether another level still keeps the replicas equal in this step: there is nothing to do."""
        return False

    def apply_at(self, step: int, schedule_state: ScheduleState) -> int:
        """The step after which the answer of the round of `step` is applied, where it is `late`."""
        return step

    def round_index(self, step: int, schedule_state: ScheduleState) -> int | None:
        """Whose turn the round of `step` is; None: of the next one."""
        return None

    def phases(self, schedule_state: ScheduleState) -> tuple[tuple[int, bool], ...]:
        """Stretches of steps in which all answers come at once (False), or late (True); the last goes on.

        None where there is no such difference.
        """
        return ()

    def diverged_in_node(self, step: int, schedule_state: ScheduleState) -> bool:
        """Whether replicas of one node may differ after this step, as the nearest level does not meet."""
        return False

    def asks(self, step: int, schedule_state: ScheduleState) -> bool:
        """Whether `observe` is to be called after the round of `step`."""
        return bool(self.observed_metrics)

    def observe(self, schedule_state: ScheduleState, facts: ScheduleState) -> ScheduleState:
        """What is remembered after a step in which a round left, where it `asks`.

        `facts` are means over the ranks: "step", which the round followed; "lr"; "loss", of the steps since
        the facts before; "drift", the mean squared distance of a replica from the mean of all, before the
        round. Of "transfer", for how many steps a late round was on its way, the largest is taken.
        """
        return schedule_state


class Overlap(ABC):
    """HOW HIDDEN."""

    @abstractmethod
    def apply_at(self, step: int) -> int:
        """The step after which the answer of the round of `step` is applied."""


class Application(NamedTuple):
    """Where and when an answer is applied."""

    peers: int = 1
    lag: int = 0
    """How many steps were taken since the round left."""
    lr: float = 0.0
    """The learning rate: of these parameters where the merge goes `by_rate`, else the largest of any."""
    parties: int = 1
    """How many have met: the replicas, or where they meet by node, the nodes."""


class Merge(ABC):
    """HOW APPLIED. A frozen dataclass of hyper-parameters; its state is equal on all ranks.

    It is for what is trained: buffers are no subject of it, as a step beyond their mean may be no value that
    they can have.
    """

    by_rate: ClassVar[bool] = False
    """Whether it goes by the learning rate, and so is given parameters of one rate at a time."""
    sees_local_delta: ClassVar[bool] = False
    """Whether `mine` must be kept, even if the answer comes at once."""
    needs_local_delta: ClassVar[bool] = True
    """Whether `mine` must be kept where the answer comes late."""
    keeps_unsent: ClassVar[bool] = False
    """Whether `mine` is to be only what of this rank's progress its peers have not seen."""

    @property
    def meets(self) -> bool:
        """Whether an answer that comes at once leaves all replicas at the anchor."""
        return True

    def init(self, like: Tensor) -> State:
        """The state before the first round, for a flat tensor like `like`: one element for each of its."""
        return {}

    @abstractmethod
    def apply_(
        self, now: Tensor, then: Tensor, mean: Tensor, mine: Tensor | None, state: State, at: Application
    ) -> None:
        """Apply an answer to a bucket, in place. All tensors are flat and of its shape.

        They are of its type, or of float32 where that is one of two bytes: what is below a unit in the last
        place of a parameter then adds up in the anchor and in the state.

        Args:
            now: this rank's parameters; overwritten.
            then: the anchor, equal on all ranks; overwritten by the next one, equal on all ranks too.
            mean: the peers' mean progress, `now - then` as it was when the round left. May be overwritten.
            mine: this rank's own progress then. None where the answer comes at once and `sees_mine` is false,
                or where `needs_mine` is.
            state: as `init` made it; overwritten.
            at: where and when.
        """

    def consolidate_(self, then: Tensor, mean: Tensor) -> None:
        """Overwrite the anchor, which every replica then becomes, where they are to agree out of turn.

        At the end, say, or before an evaluation: the mean of the replicas, with no outer step.
        """
        then.add_(mean)


class Posted(Protocol):
    """A request on its way."""

    def on_done(self, call: Callable[[], None]) -> None:
        """Have `call` called, from any thread, once there is an answer or a failure."""

    def answer(self) -> Any:
        """The answer; raises what went wrong. Only after the call of `on_done`."""


class Transport(Protocol):
    """The only contract with effects."""

    @property
    def nodes(self) -> Sequence[Sequence[int]]:
        """Which replicas share a node; empty where nobody needs to know."""

    def open(self, stages: Mapping[str, int]) -> None:
        """Be ready for exchanges that speak so many times on each axis. A collective call."""

    def ranks(self, axis: str) -> Sequence[int]:
        """Which replicas share the axis with this one, in order; counted from 0 over all replicas."""

    def place(self, axis: str) -> AxisRank:
        """This rank's place on the axis."""

    def post(self, request: Collective, stage: int, param: str) -> Posted:
        """Start a collective.

        All members of the axis post the requests of one `stage` (the how-manieth request of its exchange on
        that axis) in the same order. `slot` names the exchange: no two requests of one slot, axis and stage
        are under way at once.
        """


# ---- where there is no lockstep -----------------------------------------------------------------------


class Sender(NamedTuple):
    """One life of a worker."""

    worker: int
    incarnation: int
    """1 for its first process, and one more each time that it comes back."""


@dataclass(frozen=True, slots=True)
class Message:
    """What a service is sent.

    Attributes:
        sequence: counts a worker's messages of this kind of content from 1, over all of its lives.
        content: what the service understands.
    """

    sequence: int
    content: object


@dataclass(frozen=True, slots=True)
class Reply:
    """What a service answers: to one message, at once or when a later one has come.

    Attributes:
        to: whose message it answers; `sequence` is that message's.
        payloads: the answer.
        refused: why there is none; None where there is one.
        facts: numbers that go along.
    """

    to: Sender
    sequence: int
    payloads: tuple[Payload, ...] = ()
    refused: Exception | None = None
    facts: Mapping[str, int] = field(default_factory=dict)


S = TypeVar("S")


class Service(ABC, Generic[S]):
    """The passive side where there is no lockstep: a frozen dataclass of what it does, with no state inside.

    Atomic per message: a message that is refused has changed nothing. Whoever calls takes one message after
    the other, in whatever order they come; so a run is repeated by repeating its order of messages.
    """

    @abstractmethod
    def start(self) -> S:
        """The state before the first message."""

    @abstractmethod
    def on(self, sender: Sender, message: Message, state: S) -> tuple[Sequence[Reply], S]:
        """Take one message: the replies that are due now, perhaps to earlier messages, and the new state.

        The tensors in `state` may be overwritten, so a state is used once. What a reply's payloads hold is
        good until the next message of the one that it is for.
        """
