"""A mean in two collectives: a reduce-scatter, and an all-gather that may leave later."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from torch import Tensor

from tacit.contracts import (
    AllGatherInto,
    Compressor,
    Context,
    Exchange,
    ReduceEncoded,
    ReduceScatter,
    Request,
    State,
    Transmitted,
)
from tacit.errors import ConfigError
from tacit.exchange.error_feedback import encoded, transmitted
from tacit.exchange.joined_requests import conducted
from tacit.topologies.on_axis import OnAxis


@dataclass(frozen=True)
class Decoupled(OnAxis):
    """Each rank adds up one span of the tensor for all, and then sends it to all (DeAR: Zhang et al. 2023).

    An all-reduce does the same; but here the two halves are separate requests, so that an overlap with
    `split` can have the second one wait until a forward pass needs it. A rank sends 2 (P - 1) / P bytes for
    each byte of the payload, as with an all-reduce. For payloads that add up: fp32, bf16, fp16.
    """

    on_device: ClassVar[bool] = True
    encodes_first: ClassVar[bool] = True

    def summary(self, compressors: Sequence[Compressor]) -> str:
        return "reduce-scatter and all-gather"

    def collectives(self, compressors: Sequence[Compressor]) -> str:
        return "a reduce-scatter and an all-gather"

    def check(self, compressor: Compressor) -> None:
        """Refuse payloads that do not add up."""
        super().check(compressor)
        one_shot = compressor.one_shot(0)
        if one_shot is None or not one_shot.codec.additive:
            raise ConfigError(
                f"{compressor} has payloads that do not add up, and {type(self).__name__}() adds them up on "
                "the way: write compressor=Dense() or BF16(), or topology=Flat()"
            )

    def conduct(self, x: Tensor, compressor: Compressor, state: State, ctx: Context) -> Exchange:
        """Every average that the compressor asks for goes by two collectives."""

        def reduce(request: ReduceEncoded) -> Generator[Request, Any, tuple[Tensor, Transmitted]]:
            codec, out, payload = request.codec, request.ctx.out, encoded(request)
            probe = None if ctx.finite_probe is None else ctx.finite_probe[:1]
            for part in payload:
                spans = _spans(part.numel(), ctx.peers)
                yield ReduceScatter(part.view(-1), spans, finite_probe=probe)
                yield AllGatherInto(part.view(-1), spans)
            codec.decode_(payload, out)
            return out, transmitted(request, payload)

        return conducted(compressor.exchange(x, state, ctx), self.axis, reduce, ctx.nonfinite_flags)


def _spans(numel: int, peers: int) -> tuple[tuple[int, int], ...]:
    cuts = [numel * i // peers for i in range(peers + 1)]
    return tuple(pairwise(cuts))
