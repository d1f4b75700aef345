"""A small model on a GPU, the same on the CPU, and data for both."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from in_stream import IN_STREAM

CUDA = torch.device("cuda", 0)


class Layers(nn.Sequential):
    """A class of our own: of torch's, `torch.compile` around DDP compiles nothing."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


def network(device: torch.device = CUDA, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 5)
    return Layers(*layers).to(device, dtype)


def wrapped(model: nn.Module | None = None, **options: object) -> DDP:
    return DDP(model or network(), gradient_as_bucket_view=True, **{"bucket_cap_mb": 0.2, **options})


def batches(count: int, rank: int = 0, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [
        (torch.randn(8, 20, generator=generator), torch.randint(0, 5, (8,), generator=generator))
        for _ in range(count)
    ]


def on(device: torch.device, data: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(device), y.to(device)) for x, y in data]


def sgd(model: nn.Module, momentum: float = 0.9) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)


BY_ADAM = [
    "onebit-adam:freeze_step=4",
    "zeroone-adam:freeze_step=3,refresh=1,sync_every=2",
    "zeroone-adam:freeze_step=3,refresh=1,sync_every=2,gradient_bits=4",
    "lowbit",
    "lowbit:sync_every=2",
    "localsgd:sync_every=3,variance=scaled",
]
"""What changes Adam's variance, or is for Adam alone."""
ONLY_BY_ADAM = "onebit-adam", "zeroone-adam"

NEVER_RUN = [
    text
    for text in IN_STREAM
    if text.partition(":")[0]
    in (
        "gtopk", "threshold", "uneven", "fusion", "priority", "dear", "gossip", "sgp", "gossip-pga", "choco",
        "dcd", "deepsqueeze", "wagma", "prague", "noloco", "gradient-tracking", "natural-dithering", "sparta",
    )
]  # fmt: skip
"""Written where there was no GPU."""


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))


def steps(
    model: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    data: list[tuple[Tensor, Tensor]],
    observe: Callable[[Tensor], None] | None = None,
) -> None:
    for x, y in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if observe is not None:
            observe(loss.detach())
        loss.backward()
        optimizer.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def trained(
    algorithm: str | tacit.Strategy,
    count: int = 10,
    device: torch.device = CUDA,
    momentum: float = 0.9,
    bucket_cap_mb: float = 0.2,
    made: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    **known: object,
) -> Tensor:
    """The parameters after training, on the CPU; `made`: the optimizer, SGD if left out."""
    model = wrapped(network(device), bucket_cap_mb=bucket_cap_mb)
    optimizer = sgd(model, momentum) if made is None else made(model)
    with tacit.attach(model, optimizer, algorithm, **known) as session:  # type: ignore[arg-type]
        steps(model, optimizer, on(device, batches(count)), session.observe)
    return flat(model).cpu()
