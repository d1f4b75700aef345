"""The entries of largest magnitude (Aji & Heafield 2017; with memory: Stich et al. 2018)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from tacit import checks
from tacit.compressors import ratio
from tacit.compressors.dense import Dense
from tacit.compressors.sparse_entries import Entries
from tacit.contracts import Context, OneShot, Payload
from tacit.errors import ConfigError
from tacit.kernels.entry_buffers import EntryBuffer, Selection
from tacit.kernels.payload_layout import position_bytes
from tacit.kernels.select import select_in_chunks, select_largest


@dataclass(frozen=True)
class TopK(Entries):
    """Send the k = ceil(ratio x n) entries of largest magnitude, to P - 1 peers.

    Bytes: those of k entries by `values`, and of k positions: the least of ceil(n / 8), 4 k, and w k +
    ceil((k + (n - 1) // 256^w) / 8) for w of 1 or 2; at 1 % 1.2 each, at 0.1 % 1.6. Exactly k are sent: of
    equal magnitudes the first ones.

    With `values=Sign()` this is sparse ternary compression (STC: Sattler et al. 2019): a bit an entry, and
    the mean of the chosen magnitudes.

    With `chunk=4096` it is SparseLoCo's choice (Sarfi et al. 2025, arXiv 2508.15706: 64 of each 4096): of
    each `chunk` entries in a row the ceil(ratio x chunk) largest; of what is left at the end as many, or all
    where they are fewer. k then is the sum of these.

    Differences from the papers: the choice is made over all tensors of a bucket as one row, not tensor by
    tensor; STC's positions are not Golomb-coded, and what comes back to a rank is not compressed again. Put
    `ErrorFeedback` around it, or what is not sent is lost.

    Attributes:
        ratio: the share of the entries that is sent, in (0, 1]. Smaller sends less and converges slower.
        values: the codec of the chosen entries, for example `BF16()`; by default they are exact.
        chunk: the number of entries among which each choice is made; None: all. Smaller ones spread what is
            sent more evenly over the layers, and miss more of the largest.
    """

    ratio: float = 0.01
    values: OneShot = Dense()
    chunk: int | None = None

    additive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        ratio.check(self.ratio)
        if self.chunk is not None:
            hint = "it is of how many entries each choice is made; write 4096, or None to choose among all"
            checks.whole("chunk", self.chunk, 1, None, hint)
        if not isinstance(self.values, OneShot):
            raise ConfigError(
                f"values={self.values!r} cannot encode entries: write a one-shot compressor without "
                "state, such as BF16() or Sign()"
            )

    def most(self, numel: int) -> int:
        """k, the number that is sent."""
        if self.chunk is None:
            return ratio.count(self.ratio, numel)
        whole, rest = divmod(numel, self.chunk)
        return whole * self._per_chunk + min(self._per_chunk, rest)

    @property
    def _per_chunk(self) -> int:
        return 0 if self.chunk is None else ratio.count(self.ratio, self.chunk)

    @property
    def on_device(self) -> bool:
        return self.values.on_device

    @property
    def shows_nonfinite(self) -> bool:  # type: ignore[override]
        return self.chunk is None

    def of_sums(self, numel: int, peers: int) -> TopK | None:
        """A `TopK` of as many entries as all payloads have together, if that takes fewer bytes than dense.

        None where values are not exact: they would be rounded a second time, and nobody owes that error. A
        server's `pull` asks for that, with error feedback. Where ranks meet in two phases, this is not used:
        means come back in as many entries as went, with the same values, and their error is owed.
        """
        count = min(numel, peers * self.most(numel))
        if not self.exact or 4 * count + position_bytes(numel, count) >= 4 * numel:
            return None
        return replace(self, ratio=count / numel, chunk=None)

    def choose(
        self,
        x: Tensor,
        most: int,
        room: EntryBuffer,
        residual: Tensor | None,
        new_residual: Tensor | None,
        look: Callable[[], None] | None,
    ) -> Selection:
        """The k largest, of all entries or of each chunk."""
        if self.chunk is None:
            return select_largest(x, most, room, residual, new_residual, look)
        return select_in_chunks(x, self._per_chunk, self.chunk, room, residual, new_residual)

    def write(self, values: Tensor, most: int, ctx: Context) -> Payload:
        if self.exact:
            return (values,)
        return self.values.encode(values, ctx.inside("values", out=values))

    def check_written(self, written: Payload, most: int, out: Tensor) -> None:
        """Expects the payload of `values` for k entries."""
        self.values.check(written, out.new_empty(most, device="meta"))

    def read(self, written: Payload, out: Tensor, weight: float) -> Tensor:
        self.values.decode_add_(written, out.zero_(), weight)
        return out

    @cached_property
    def exact(self) -> bool:
        return isinstance(self.values, Dense)
