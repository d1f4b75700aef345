"""Compiled models of several buckets, which torch's DDPOptimizer cuts at their borders, on real ranks."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch._dynamo
from rank_training import Checks, close_to, flat, same_on_all_ranks, sgd, steps
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from tacit.kernels.dispatch import emulated_device

GRADIENTS, PROGRESS = "powersgd", "diloco:sync_every=2"
CHECKS = Checks()


class Net(nn.Module):
    """Of a class of its own: DDP around a bare `nn.Sequential` is not compiled at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(20, 500), nn.Linear(500, 600), nn.Linear(600, 500)
        self.last = nn.Linear(500, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.third(self.second(self.first(x).relu()).relu()).relu())
        return y


def trained(algorithm: str, around: Callable[[nn.Module], nn.Module]) -> Tensor:
    """The parameters after six steps, in which buckets settle on DDP's buckets."""
    model = DDP(Net(), bucket_cap_mb=1, gradient_as_bucket_view=True)  # less is refused by DDPOptimizer
    optimizer, forward = sgd(model), around(model)
    with tacit.attach(forward, optimizer, algorithm) as session:  # type: ignore[arg-type]
        steps(forward, optimizer, 6)  # type: ignore[arg-type]
        if algorithm != PROGRESS:
            assert len(session.session.buckets) > 1
    assert same_on_all_ranks(flat(model))
    return flat(model)


def compiled(algorithm: str, emulated: bool) -> None:
    pieces = 0

    def counting(module: fx.GraphModule, inputs: Any) -> Any:
        nonlocal pieces
        pieces += 1
        return lookup_backend("aot_eager")(module, inputs)

    def around(model: nn.Module) -> nn.Module:
        return torch.compile(model, backend=counting)  # type: ignore[return-value]

    torch._dynamo.reset()
    with emulated_device() if emulated else nullcontext(), torch._dynamo.config.patch(optimize_ddp=True):
        found = trained(algorithm, around)
        assert pieces > 1, "DDPOptimizer has cut nothing"
        close_to(found, trained(algorithm, lambda model: model))


CHECKS["gradients on the CPU"] = partial(compiled, GRADIENTS, False)
CHECKS["gradients as on a GPU"] = partial(compiled, GRADIENTS, True)
CHECKS["progress on the CPU"] = partial(compiled, PROGRESS, False)

if __name__ == "__main__":
    CHECKS.run()
