"""What the laws share: exchanges of one compressor among P ranks of a loopback."""

import torch
from torch import Tensor

from tacit.contracts import Compressor, Context, Exchange, Outcome, State, Topology
from tacit.testing.ranks import FreshBuffers as Bench
from tacit.topologies import Flat
from tacit.transports.loopback import Loopback

FLAT = Flat()


class Peers:
    """P ranks that exchange tensors by one compressor, round after round."""

    def __init__(
        self,
        compressor: Compressor,
        peers: int,
        numel: int,
        topology: Topology = FLAT,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.compressor = compressor
        self.topology = topology
        self.net = Loopback(peers)
        like = torch.empty(numel, dtype=dtype)
        self.states: list[State] = [compressor.init(like) for _ in range(peers)]
        self.round = self.step = 0

    def exchange(self, xs: list[Tensor], in_place: bool = False, step: int = 0) -> list[Outcome]:
        """One round, in this step; `in_place`: the mean overwrites `xs`."""
        self.step = step
        outs = xs if in_place else [torch.full_like(x, torch.nan) for x in xs]
        outcomes = self.net.run(
            [
                self.conduct(x, state, self._context(rank, out))
                for rank, (x, state, out) in enumerate(zip(xs, self.states, outs, strict=True))
            ]
        )
        self.states = [outcome.state for outcome in outcomes]
        self.round += 1
        return outcomes

    def conduct(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """A rank's exchange."""
        return self.topology.conduct(x, self.compressor, state, ctx)

    def _context(self, rank: int, out: Tensor) -> Context:
        where = {"peers": len(self.states), "rank": rank, "step": self.step, "round": self.round}
        return Context(out=out, work=Bench(), name="lot", **where)


def tensors(peers: int, numel: int, seed: int = 0) -> list[Tensor]:
    """One tensor a rank; heavy-tailed, as gradients are."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) ** 3 for _ in range(peers)]
