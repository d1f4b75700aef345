"""Record how single parameters move in ordinary trainings: what predictors learn from, and are judged by.

MP² (Liu et al. 2024) learns from a "hierarchical parameter dataset", samples of a model's layers over
ordinary distributed trainings. Here one process stands for all workers: with SGD the mean of their steps is
the step of the mean gradient, momentum included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn

from tacit.errors import ConfigError
from tacit.predictors import KINDS
from tacit.recipes.recipe import Batch

__all__ = ["Layer", "load", "record", "save"]

VERSION = 1


@dataclass(frozen=True)
class Layer:
    """Some elements of one parameter over a training, each round one step of the optimizer.

    Attributes:
        run: which training; data sets are split by it.
        name: of the parameter; `depth`: how many came before it, as a share of all.
        kind: one of `tacit.predictors.KINDS`.
        changes: shape (rounds, elements), by how much each moved.
        trends: shape (rounds,), the mean change over a random part of the layer: what ranks know online.
        lr: shape (rounds,).
    """

    run: str
    name: str
    kind: str
    shape: tuple[int, ...]
    depth: float
    changes: Tensor
    trends: Tensor
    lr: Tensor


def record(
    run: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    *,
    loss: nn.Module,
    elements: int = 256,
    share: float = 0.11,
    seed: int = 0,
) -> list[Layer]:
    """Train the model on the batches, and record up to `elements` elements of each parameter.

    Args:
        share: of which part of a layer the trend is the mean.
        seed: decides which elements, and of which part the trend is.
    """
    generator = torch.Generator().manual_seed(seed)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    chosen = [torch.randperm(p.numel(), generator=generator)[:elements] for _, p in named]
    changes: list[list[Tensor]] = [[] for _ in named]
    trends: list[list[Tensor]] = [[] for _ in named]
    lr: list[float] = []
    for inputs, targets in batches:
        before = [p.detach().clone().view(-1) for _, p in named]
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
        lr.append(float(optimizer.param_groups[0]["lr"]))
        for i, (_, p) in enumerate(named):
            moved = p.detach().view(-1) - before[i]
            some = torch.rand(moved.numel(), generator=generator) < share
            changes[i].append(moved[chosen[i]])
            trends[i].append((moved[some] if bool(some.any()) else moved).mean())
    kinds = _kinds(model)
    return [
        Layer(
            run,
            name,
            kinds[name],
            tuple(p.shape),
            i / len(named),
            torch.stack(changes[i]),
            torch.stack(trends[i]),
            torch.tensor(lr),
        )
        for i, (name, p) in enumerate(named)
    ]


def _kinds(model: nn.Module) -> dict[str, str]:
    kinds: dict[str, str] = {}
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(prefix=prefix, recurse=False):
            if p.dim() < 2:
                kinds[name] = "vector"
            elif isinstance(module, nn.Embedding):
                kinds[name] = "embedding"
            else:
                kinds[name] = "convolution" if p.dim() > 2 else "linear"
    return kinds


def save(path: str | Path, layers: Sequence[Layer]) -> None:
    """Write a data set."""
    rows = [asdict(layer) for layer in layers]
    torch.save({"format": "tacit-record", "version": VERSION, "layers": rows}, path)


def load(path: str | Path) -> list[Layer]:
    """Read a data set.

    Raises:
        ConfigError: it is none, or of another version.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what the damage brings forth
        raise ConfigError(f"{path} cannot be read as a record of trainings: record it anew") from error
    if not isinstance(content, dict) or content.get("format") != "tacit-record":
        raise ConfigError(f"{path} holds no record of trainings: write the path of one")
    if content.get("version") != VERSION:
        raise ConfigError(
            f"{path} is of version {content.get('version')}, and this tacit reads version {VERSION}: record "
            "it anew"
        )
    names = {field.name for field in fields(Layer)}
    for row in content["layers"]:
        if set(row) != names or row["kind"] not in KINDS:
            raise ConfigError(f"{path} is damaged: a layer should hold {', '.join(sorted(names))}")
    return [Layer(**row) for row in content["layers"]]
