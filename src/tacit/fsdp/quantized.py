"""Weights and gradients of few bits inside a replica that FSDP2 shards, by FSDP2's custom collectives.

The papers on each rank, for the parameters that one `fully_shard` took:          here:
    ZeRO++ (Wang et al. 2023, arXiv 2306.10209):
      qwZ: w <- its int8 blocks, gathered before forward and backward     Gather: nearest levels
      qgZ: g <- its int4 blocks, to their owners at once, added in fp32   Scatter: levels at random
    LoCo (Xie et al. 2024, arXiv 2407.04480):
      q <- the levels of g + e;  e <- g + e - q, itself in 8 bits         Scatter, with `feedback`

Differences: one exchange among all ranks that share the replica, where qgZ goes by node first; hpZ is the
`reshard_after_forward=N` of `fully_shard`. LoCo's error is no moving average, is never reset, and does not
follow the learning rate. Biases and norms travel as they are: beside matrices their size would decide a
block's levels. Not SDP4Bit (Jia et al. 2024, arXiv 2410.15526), whose weights travel as differences to a copy
of the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tacit import checks
from tacit.contracts import seed_of
from tacit.errors import AttachError, ConfigError
from tacit.kernels.blockwise import add_blocks_, encode_blocks
from tacit.kernels.int8 import add_int8_, encode_int8
from tacit.kernels.levels import BY_LARGEST, add_levels_, quantize
from tacit.kernels.payload_layout import BLOCK, blocks_bytes, code_bytes
from tacit.model.torch_modes import shielded
from tacit.torch_fsdp import ReduceGroup
from tacit.transports.process_groups import gather_rows, swap_rows


class Rows:
    """How the entries of some ranks' shards of one module travel: a row for each rank, as flat bytes.

    The matrices of a row are joined, filled up with zeros to whole blocks of 512 entries, and become levels
    and a unit for each block: `bits` / 8 bytes an entry (0.2 where nearest levels have 2 bits), and 4 bytes a
    block at random, 2 to the nearest. Then come the vectors as they are. A block that holds a NaN or an
    infinity arrives as NaN.

    Args:
        widths: each parameter, with its entries in a row.
        bits: of a level, 2 to 8.
        at_random: whether entries are rounded up or down at random, so that they are right in the mean.
    """

    def __init__(self, widths: Sequence[tuple[Tensor, int]], bits: int, at_random: bool) -> None:
        self._bits, self._at_random = bits, at_random
        ends = [sum(width for _, width in widths[: i + 1]) for i in range(len(widths))]
        spans = [(p.ndim > 1, slice(end - width, end)) for (p, width), end in zip(widths, ends, strict=True)]
        self._matrices = [span for matrix, span in spans if matrix]
        self._vectors = [span for matrix, span in spans if not matrix]
        self.width = ends[-1]
        self._entries = sum(span.stop - span.start for span in self._matrices)
        self._blocks = -(-self._entries // BLOCK)
        self.filled = self._blocks * BLOCK
        """The entries of a row that are encoded, those that fill it up among them."""
        self._code_bytes = (code_bytes if at_random else blocks_bytes)(self.filled, bits)
        self._unit = torch.float32 if at_random else torch.bfloat16

    def nbytes(self, dtype: torch.dtype) -> int:
        """Of the message of a row of this type."""
        vectors = (self.width - self._entries) * dtype.itemsize
        return self._code_bytes + self._blocks * self._unit.itemsize + vectors

    def joined(self, rows: Tensor) -> Tensor:
        """The matrices of rows (n x width), filled up, in fp32: flat, n x `filled`."""
        joined = rows.new_zeros((len(rows), self.filled), dtype=torch.float32)
        at = 0
        for span in self._matrices:
            joined[:, at : (at := at + span.stop - span.start)] = rows[:, span]
        return joined.view(-1)

    def encode(
        self, rows: Tensor, seed: int = 0, residual: Tensor | None = None, new_residual: Tensor | None = None
    ) -> Tensor:
        """The bytes of each row (n x `width`), in n rows.

        Args:
            seed: of what is rounded at random.
            residual: flat, n x `filled`: added before, and what rounding leaves out is written to
                `new_residual`; not where it rounds at random.
        """
        n, x = len(rows), self.joined(rows)
        codes = x.new_empty(n * self._code_bytes, dtype=torch.uint8)
        units = x.new_empty(n * self._blocks, dtype=self._unit)
        if self._at_random:
            quantize(x, self._bits, BLOCK, BY_LARGEST, seed, codes, units)
        else:
            encode_blocks(x, self._bits, codes, units, residual, new_residual)
        largest = torch.linalg.vector_norm(x.view(-1, BLOCK), torch.inf, dim=1)
        units.masked_fill_(~largest.isfinite(), torch.nan)
        vectors = [rows[:, span].contiguous().view(torch.uint8) for span in self._vectors]
        parts = [codes.view(n, self._code_bytes), units.view(n, self._blocks).view(torch.uint8), *vectors]
        return torch.cat(parts, dim=1)

    def spread(self, messages: Tensor, out: Tensor) -> None:
        """Decode each message to its row of `out`."""
        codes, units, vectors = self._parts(messages, out.dtype)
        flat = torch.empty(len(out) * self.filled, dtype=torch.float32, device=out.device)
        self._add([(codes.reshape(-1), units.view(-1))], 1.0, flat)
        self._put(flat.view(len(out), -1), vectors, out)

    def add(self, messages: Tensor, weight: float, out: Tensor) -> None:
        """`weight` times the sum of all messages, added in fp32, to the flat `out`."""
        codes, units, vectors = self._parts(messages, out.dtype)
        flat = torch.empty(self.filled, dtype=torch.float32, device=out.device)
        self._add([*zip(codes, units, strict=True)], weight, flat)
        sums = vectors.to(torch.float32).sum(0, keepdim=True).mul_(weight)
        self._put(flat.view(1, -1), sums, out.view(1, -1))

    def _parts(self, messages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        ends = self._code_bytes, self._code_bytes + self._blocks * self._unit.itemsize
        codes, units, vectors = messages.tensor_split(ends, dim=1)
        return codes, _read(units, self._unit), _read(vectors, dtype)

    def _add(self, payloads: Sequence[Sequence[Tensor]], weight: float, flat: Tensor) -> None:
        if self._at_random:
            add_levels_(payloads, self._bits, BLOCK, weight, flat, fresh=True)
        else:
            add_blocks_(payloads, self._bits, weight, flat, fresh=True)

    def _put(self, flat: Tensor, vectors: Tensor, out: Tensor) -> None:
        for spans, given in ((self._matrices, flat), (self._vectors, vectors)):
            at = 0
            for span in spans:
                out[:, span] = given[:, at : (at := at + span.stop - span.start)]


def _read(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of bytes as numbers of a type; copied, as they may begin anywhere."""
    flat = rows.clone(memory_format=torch.contiguous_format).view(-1).view(dtype)
    return flat.view(len(rows), rows.shape[1] // dtype.itemsize)


@dataclass
class ShardBytes:
    """Bytes that this rank has sent in FSDP2's collectives: `sent`, and `whole` where nothing is quantized.

    By the formulas of ring collectives, and (P - 1) / P of an exchange between all.
    """

    sent: int = 0
    whole: int = 0

    def count(self, whole: int, sent: int) -> None:
        """Add what one collective has sent, and what FSDP2's would have."""
        self.whole += whole
        self.sent += sent


class _ShardCollective:
    """What both collectives share: which entries they know, and how FSDP2 would send them."""

    def __init__(self, rows: Rows, plain: Any, traffic: ShardBytes) -> None:
        self._rows, self._traffic = rows, traffic
        self.plain = plain

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what FSDP2 gives and gets: as without quantizing."""
        found: Tensor = self.plain.allocate(size, dtype=dtype, device=device)
        return found

    def _count(self, shard: Tensor, peers: int, message: int) -> None:
        """Count that each rank has sent others a message of so many bytes for one shard."""
        self._traffic.count((peers - 1) * shard.numel() * shard.element_size(), (peers - 1) * message)

    def _fits(self, shard: Tensor, peers: int) -> bool:
        """Whether there is somebody to send to, and one rank's shard has all the entries that are known.

        Not where some parameters had no gradient, where `reshard_after_forward=N` gathers among N ranks
        alone, or where what is gathered is of several types; nor where a message would not be shorter.
        """
        known = peers > 1 and shard.numel() == self._rows.width and shard.is_floating_point()
        fits = known and self._rows.nbytes(shard.dtype) < shard.numel() * shard.element_size()
        if not fits:
            self._count(shard, peers, shard.numel() * shard.element_size())
        return fits


class Gather(_ShardCollective):
    """FSDP2's all-gather of the parameters of one module, quantized.

    Every rank also takes its own shard as the others get it, so that all compute with the same weights, and
    in backward with the same as in forward.
    """

    @shielded
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather all ranks' `input_tensor` into `output_tensor`; it is there when this stream goes on."""
        peers = group.size()
        if not self._fits(input_tensor, peers):
            work: dist.Work | None = self.plain(
                output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op
            )
            return work
        mine = self._rows.encode(input_tensor.view(1, -1))
        self._count(input_tensor, peers, mine.numel())
        self._rows.spread(gather_rows(mine.view(-1), group), output_tensor.view(peers, -1))
        return None


class Scatter(_ShardCollective):
    """FSDP2's reduce-scatter of the gradients of one module, quantized.

    Args:
        group: which parameters these are.
        feedback: whether what rounding leaves out of a gradient is added to the next one.
        name: of the module, and of the session's seed: decides how entries are rounded at random.
    """

    def __init__(
        self, rows: Rows, plain: Any, traffic: ShardBytes, group: ReduceGroup, feedback: bool, name: str
    ) -> None:
        super().__init__(rows, plain, traffic)
        self._group, self._feedback, self._name = group, feedback, name
        self._calls = 0
        self.owed: tuple[Tensor, Tensor] | None = None
        """What rounding has left out, in 8 bits: levels, and units."""

    def forget(self) -> None:
        """Drop what is owed."""
        self.owed = None

    @shielded
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce this rank's part of all ranks' `input_tensor` into `output_tensor`."""
        peers = group.size()
        if not self._fits(output_tensor, peers):
            work: dist.Work | None = self.plain(
                output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op
            )
            return work
        leaving = self._encoded(input_tensor.view(peers, -1), group.rank())
        self._count(output_tensor, peers, leaving.shape[1])
        self._rows.add(swap_rows(leaving, group), self._weight(op, peers), output_tensor)
        return None

    def _encoded(self, rows: Tensor, rank: int) -> Tensor:
        self._calls += 1
        if not self._feedback:
            return self._rows.encode(rows, seed_of(self._name, self._calls, rank))
        numel = len(rows) * self._rows.filled
        residual = torch.zeros(numel, dtype=torch.float32, device=rows.device)
        if self.owed is None:
            levels = torch.empty(numel, dtype=torch.uint8, device=rows.device)
            self.owed = levels, residual.new_empty(numel // BLOCK)
        else:
            add_int8_([self.owed], 1.0, residual, fresh=True)
        left = torch.empty_like(residual)
        message = self._rows.encode(rows, 0, residual, left)
        # A NaN is in this step's gradient, where it can be seen; it must not be in all later ones.
        encode_int8(left.nan_to_num_(0.0, 0.0, 0.0), *self.owed)
        return message

    def _weight(self, op: Any, peers: int) -> float:
        """What the sum is multiplied by: FSDP2 takes means, sums, or sums by a factor of the user's."""
        if op == dist.ReduceOp.AVG:
            return 1 / peers
        factor = self._group.divide_factor
        return 1.0 if op == dist.ReduceOp.SUM or factor is None else 1 / factor


class QuantizedShards:
    """Weights and gradients of a sharded model that travel in few bits: see `quantize_shards`.

    Also a context manager, which closes it at its end.
    """

    def __init__(
        self, traffic: ShardBytes, groups: Sequence[ReduceGroup], scatters: Sequence[Scatter]
    ) -> None:
        self._traffic, self._groups, self._scatters = traffic, groups, scatters

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent in these collectives, without a network's headers."""
        return self._traffic.sent

    @property
    def whole(self) -> int:
        """Bytes that FSDP2 would have sent in their place."""
        return self._traffic.whole

    @property
    def owed_bytes(self) -> int:
        """Memory of what rounding has left out of gradients; 0 without `feedback`."""
        kept = [each.owed for each in self._scatters if each.owed is not None]
        return sum(tensor.nbytes for pair in kept for tensor in pair)

    def close(self) -> None:
        """Give FSDP2 its collectives back; what is owed is dropped. It may be called again."""
        for group in self._groups:
            for comm in (group.gathers_by, group.scatters_by):
                if isinstance(comm, _ShardCollective):
                    group.communicate(**{"gather" if isinstance(comm, Gather) else "scatter": comm.plain})
        for scatter in self._scatters:
            scatter.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@shielded
def quantize_shards(
    model: nn.Module,
    *,
    weights: int | None = 8,
    gradients: int | None = 8,
    feedback: bool = False,
    seed: int = 0,
) -> QuantizedShards:
    """Send the weights and gradients of a model that FSDP2 shards in few bits, among the ranks that share it.

    For a replica whose ranks are joined by a slow link; no mesh with a far axis is needed, and `attach` may
    join replicas beside it. Every rank of the model calls it alike, after `fully_shard`. Each rank keeps its
    own shard in full; evaluation computes with the quantized weights too, until it is closed. Biases and
    norms travel as they are, and so does what `reshard_after_forward=N` gathers again in backward.

    Args:
        model: sharded by `fully_shard`, or with sharded modules in it.
        weights: bits of an entry when parameters are gathered, 2 to 8, to the nearest of 2^bits - 1 levels of
            each 512 entries (ZeRO++: Wang et al. 2023, arXiv 2306.10209); None: as they are.
        gradients: bits of an entry when gradients are reduced, 2 to 8, rounded at random, so that means are
            right; None: as they are.
        feedback: whether what rounding leaves out of a gradient is added to the next one (LoCo: Xie et al.
            2024, arXiv 2407.04480). Then entries go to the nearest level, and each rank keeps a byte for each
            parameter of the whole model. A checkpoint does not have it.
        seed: decides how gradients are rounded at random.

    Returns:
        A handle with what was sent; `close` gives FSDP2 its collectives back.

    Raises:
        ConfigError: a number is out of range, or nothing is to be quantized.
        AttachError: the model has no sharded module, or one with collectives of its own; or this torch has no
            custom collectives.
    """
    for name, bits in (("weights", weights), ("gradients", gradients)):
        if bits is not None:
            checks.whole(name, bits, 2, 8, "it is the length of a level with its sign; write 8, or None")
    checks.flag("feedback", feedback)
    checks.whole("seed", seed, 0, None, "write 0")
    if weights is None and gradients is None:
        raise ConfigError(
            "weights=None and gradients=None leave everything as it is: write gradients=8, or leave the call "
            "out"
        )
    if feedback and gradients is None:
        raise ConfigError("feedback=True is for gradients, and gradients=None leaves them: write gradients=4")
    groups = [*ReduceGroup.all_of(model, frozen=True)]
    names = {id(p): name for name, p in model.named_parameters()}
    _check(groups, names)
    traffic, scatters = ShardBytes(), list[Scatter]()
    for group in groups:
        if weights is not None:
            rows = Rows(group.widths(frozen=True), weights, at_random=False)
            group.communicate(gather=Gather(rows, group.gathers_by, traffic))
        if gradients is not None and group.widths():
            rows = Rows(group.widths(), gradients, at_random=not feedback)
            name = f"{seed}|{_first(group, names)}"
            scatters.append(Scatter(rows, group.scatters_by, traffic, group, feedback, name))
            group.communicate(scatter=scatters[-1])
    return QuantizedShards(traffic, groups, scatters)


def _first(group: ReduceGroup, names: dict[int, str]) -> str:
    return next(names.get(id(p), "a parameter") for p, _ in group.widths(frozen=True))


def _check(groups: Sequence[ReduceGroup], names: dict[int, str]) -> None:
    if not groups:
        raise AttachError(
            "the model has no module that fully_shard took: call torch.distributed.fsdp.fully_shard first; "
            "for DDP attach a strategy such as 'int8'"
        )
    for group in groups:
        first = _first(group, names)
        if not group.takes_collectives:
            raise AttachError(
                f"{first} is of a module whose collectives this torch ({torch.__version__}) lets nobody "
                "choose: set_custom_all_gather and set_custom_reduce_scatter are of torch 2.13, and not for "
                "modules with parameters on several meshes"
            )
        if group.on_host:
            raise AttachError(f"{first} is offloaded to the CPU, which is not supported: leave it out")
        if not group.communicates_plainly:
            raise AttachError(
                f"{first} is of a module that has collectives of its own, by set_custom_all_gather, "
                "set_custom_reduce_scatter or an earlier quantize_shards: leave those out, or close that"
            )
