"""Train a predictor on recorded trainings, and judge predictors by others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import l1_loss, mse_loss

from tacit import checks
from tacit.predictors import Predictor, files
from tacit.predictors.mp2 import DEPTH, LIMIT, Network, normalised
from tacit.recipes.record import Layer

__all__ = ["Score", "Windows", "evaluate", "table", "train", "windows"]

LOSSES = {"l1": l1_loss, "mse": mse_loss}


class Windows(NamedTuple):
    """Stretches of recorded motion: `past` (4, n), what followed, `true` (n,), and `trend` (n,)."""

    past: Tensor
    trend: Tensor
    true: Tensor


def windows(layer: Layer, first: int = 0) -> Windows:
    """All stretches of one layer that begin with round `first` or later; n is rounds times elements."""
    changes, trends = layer.changes[first:], layer.trends[first:]
    rounds = len(changes) - DEPTH
    past = torch.stack([changes[i : i + rounds].flatten() for i in range(DEPTH)])
    trend = trends[DEPTH:].unsqueeze(1).expand(rounds, changes.shape[1]).flatten()
    return Windows(past, trend, changes[DEPTH:].flatten())


def train(
    layers: Sequence[Layer],
    *,
    width: int = 4,
    steps: int = 3000,
    batch: int = 4096,
    lr: float = 3e-3,
    loss: str = "l1",
    seed: int = 0,
) -> files.Weights:
    """MP²'s network for each kind of layer that was recorded.

    Every layer, large or small, is drawn from equally often, and every element of it in its own units. lr
    falls to zero, as a cosine.

    Args:
        width: channels; see `tacit.predictors.mp2.Network`.
        loss: "l1" or "mse", between delta and the true change in the same units, within +-5.
    """
    checks.word("loss", loss, tuple(LOSSES))
    weights: files.Weights = {}
    for kind in dict.fromkeys(layer.kind for layer in layers):
        shown = [_shown(windows(layer)) for layer in layers if layer.kind == kind and _moves(layer)]
        if not shown:
            continue
        torch.manual_seed(seed)
        network = Network(width)
        _fit(network, shown, steps=steps, batch=batch, lr=lr, loss=loss, seed=seed)
        weights[kind] = {name: p.detach().clone() for name, p in network.named_parameters()}
    return weights


def _moves(layer: Layer) -> bool:
    return len(layer.changes) > DEPTH and bool(layer.changes[:-1].any())


def _shown(w: Windows) -> tuple[Tensor, Tensor]:
    """Inputs (2, 4, n) and targets (n,), without elements that have not moved."""
    x, size = normalised(w.past, w.trend)
    moved = size > 0
    return x[:, :, moved], (w.true[moved] / size[moved]).clamp(-LIMIT, LIMIT)


def _fit(
    network: Network,
    shown: Sequence[tuple[Tensor, Tensor]],
    *,
    steps: int,
    batch: int,
    lr: float,
    loss: str,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    each = max(1, batch // len(shown))
    for _ in range(steps):
        picks = [torch.randint(len(y), (each,), generator=generator) for _, y in shown]
        x = torch.cat([x[:, :, pick] for (x, _), pick in zip(shown, picks, strict=True)], 2)
        y = torch.cat([y[pick] for (_, y), pick in zip(shown, picks, strict=True)])
        optimizer.zero_grad()
        LOSSES[loss](network(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()


class Score(NamedTuple):
    """How far predictions were from what happened, as a share of how far "no change" is; below 1 is better.

    Attributes:
        absolute: mean absolute error. `squared`: root of the mean squared error.
    """

    predictor: str
    kind: str
    absolute: float
    squared: float


def evaluate(predictors: Mapping[str, Predictor], layers: Iterable[Layer]) -> list[Score]:
    """Open loop: each change from the true ones before it. Every layer counts alike."""
    layers = [layer for layer in layers if _moves(layer)]
    scores = []
    for name, predictor in predictors.items():
        for kind in dict.fromkeys(layer.kind for layer in layers):
            errors = [_errors(predictor, layer) for layer in layers if layer.kind == kind]
            absolute, squared = (sum(each) / len(errors) for each in zip(*errors, strict=True))
            scores.append(Score(name, kind, absolute, squared))
    return scores


def _errors(predictor: Predictor, layer: Layer) -> tuple[float, float]:
    w = windows(layer)
    guess = predictor.change(w.past, w.trend, layer.kind)
    least = torch.finfo(torch.float32).tiny
    return (
        float((guess - w.true).abs().sum() / w.true.abs().sum().clamp(min=least)),
        float((guess - w.true).norm() / w.true.norm().clamp(min=least)),
    )


def table(scores: Sequence[Score]) -> str:
    """The scores as a table in Markdown."""
    lines = ["| predictor | layers | mean absolute error / no change | RMS error / no change |"]
    lines.append("|---|---|---|---|")
    lines += [f"| {s.predictor} | {s.kind} | {s.absolute:.3f} | {s.squared:.3f} |" for s in scores]
    return "\n".join(lines)
