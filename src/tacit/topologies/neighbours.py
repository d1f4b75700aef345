"""The weighted sum of what a few other ranks send."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from tacit.contracts import (
    WORLD,
    Compressor,
    Context,
    Exchange,
    MixingTopology,
    Permute,
    ReduceEncoded,
    Request,
    State,
    Transmitted,
)
from tacit.exchange.error_feedback import encoded, transmitted
from tacit.exchange.joined_requests import conducted
from tacit.topologies.mixing import Mixing


@dataclass(frozen=True)
class NeighbourTopology(MixingTopology):
    """Base of topologies in which a rank's answer is answer_i = sum_j W_ij x_j.

    W may differ from round to round. Messages are described by steps: each rank sends to the rank at this
    distance.
    """

    on_device: ClassVar[bool] = True
    encodes_first: ClassVar[bool] = True

    def collectives(self, compressors: Sequence[Compressor]) -> str:
        return "messages to neighbours"

    def fields(self, compressor: Compressor) -> tuple[str, ...]:
        """No fields; refuses the compressor of any parameter that `check` refuses."""
        self.check(compressor)
        return ()

    def check_ranks(self, peers: int) -> None:
        self.steps(peers, 0)

    def conduct(self, x: Tensor, compressor: Compressor, state: State, ctx: Context) -> Exchange:
        """Every tensor that the compressor asks to average is mixed with those of this round's neighbours."""
        exchange = compressor.exchange(x, state, ctx)
        return conducted(exchange, WORLD, self.mixing(ctx), ctx.nonfinite_flags)

    @abstractmethod
    def steps(self, peers: int, round_index: int, seed: int = 0) -> tuple[int, ...]:
        """The distances in ranks to which ranks send in this round; rising.

        Raises:
            ConfigError: it does not work with this number of ranks.
        """

    @abstractmethod
    def ends(self, peers: int, step: int, round_index: int, seed: int = 0) -> tuple[int | None, ...]:
        """For each rank, the one at distance `step`, if that receives from it."""

    @abstractmethod
    def weight(self, i: int, j: int, peers: int, parties: int) -> float:
        """W_ij, if at most `parties` ranks are mixed, this one included."""

    def mixing(self, ctx: Context) -> Mixing:
        """The function that answers with the weighted sum of this rank's and its neighbours' tensors."""
        me, peers = ctx.rank, ctx.peers
        steps = self.steps(peers, ctx.round, ctx.seed)
        parties = 1 + len(steps)

        def mix(request: ReduceEncoded) -> Generator[Request, Any, tuple[Tensor, Transmitted]]:
            codec, out, work, payload = request.codec, request.ctx.out, request.ctx, encoded(request)
            mixed, theirs = (work.scratch(name, out, out.shape, out.dtype) for name in ("mixed", "theirs"))
            codec.decode_(payload, mixed)
            mixed.mul_(self.weight(me, me, peers, parties))
            for step in steps:
                answer = yield Permute(payload, self.ends(peers, step, ctx.round, ctx.seed))
                if answer is not None:
                    codec.decode_(answer, theirs)
                    mixed.add_(theirs, alpha=self.weight(me, (me - step) % peers, peers, parties))
            out.copy_(mixed)
            return out, transmitted(request, payload)

        return mix
