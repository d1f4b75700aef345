"""Train WNN's networks (Jang et al., ICML 2023) on recorded layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tacit import checks
from tacit.errors import ConfigError
from tacit.prediction.networks import weight_files
from tacit.prediction.networks.wnn import AHEAD, WNNNetwork, WNNStream, normalised
from tacit_lab.predictor_training.layers import Layer
from tacit_lab.predictor_training.trajectories import Motion, elements, motions

VALUES = 5
"""That the network is shown."""
ON_WEIGHTS, ON_BIASES = 1e-6, 0.1
"""What the sum of the magnitudes of each stream's outer layers is multiplied by, in the authors' code."""
SCALE = 0.1
"""Of Keras's VarianceScaling, by which those layers are drawn."""


class _Run(NamedTuple):
    """Values (periods, N) of some layers, and which element is the first of each layer, and how many."""

    values: Tensor
    starts: Tensor
    counts: Tensor


def train(
    layers: Sequence[Layer],
    *,
    period: int = 4,
    steps: int = 3000,
    batch: int = 4096,
    lr: float = 1e-3,
    seed: int = 0,
    tell: Callable[[str], None] = lambda line: None,
) -> weight_files.Weights:
    """A network for each kind of layer, from the values at the ends of periods of so many recorded rounds.

    Five of these in a row are the input, and the one five periods later is to be predicted. As in the paper:
    mean absolute error of the normalised forecast, Adam, the outer layers of each stream drawn small, and
    their weights and biases kept small by an L1 penalty. The paper's periods are epochs, and their histories
    true.

    Raises:
        ConfigError: a parameter cannot be, or no layer's record is so long.
    """
    least = (VALUES - 1 + AHEAD) * period
    checks.whole("period", period, 1, None, "4 is usual: recorded rounds between two values")
    checks.whole("steps", steps, 1, None, "3000 are usual")
    weights: weight_files.Weights = {}
    for kind in dict.fromkeys(layer.kind for layer in layers):
        runs = [_run(each, period) for each in motions(layers, kind) if len(each.changes) >= least]
        if not runs:
            continue
        network = _drawn_small(seed)
        error = _fit(network, runs, steps=steps, batch=batch, lr=lr, seed=seed)
        tell(f"{kind}: error {error:.3f} in units of twice the values' range")
        weights[kind] = {name: p.detach().clone() for name, p in network.named_parameters()}
    if not weights:
        raise ConfigError(
            f"period={period} needs records of {least} rounds or more in a row, and there are none: write "
            "less, or record more rounds in fewer phases"
        )
    return weights


def _run(motion: Motion, period: int) -> _Run:
    """From the place before the first round on; every `period`-th place."""
    start = motion.changes.new_zeros(1, motion.changes.shape[1])
    values = torch.cat((start, motion.changes)).cumsum(0)[::period]
    return _Run(values, motion.starts, motion.counts)


def _drawn_small(seed: int) -> WNNNetwork:
    torch.manual_seed(seed)
    network = WNNNetwork()
    for layer in _outer(network):
        bound = math.sqrt(3 * SCALE / layer.in_features)
        nn.init.uniform_(layer.weight, -bound, bound)
        nn.init.zeros_(layer.bias)
    return network


def _outer(network: WNNNetwork) -> list[nn.Linear]:
    streams: tuple[WNNStream, ...] = (network.values, network.steps)
    return [layer for stream in streams for layer in (stream.wide, stream.narrow)]


def _fit(network: WNNNetwork, runs: Sequence[_Run], *, steps: int, batch: int, lr: float, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    layers = sum(len(run.starts) for run in runs)
    counts = [max(1, batch * len(run.starts) // layers) for run in runs]
    last = torch.zeros(())
    for _ in range(steps):
        drawn = [_draw(run, count, generator) for run, count in zip(runs, counts, strict=True)]
        values, later = (torch.cat(parts, -1) for parts in zip(*drawn, strict=True))
        x, unit = normalised(values)
        target = (later - values[0]) / unit
        error = (x[:, -1] + network(x) - target).abs().mean()
        optimizer.zero_grad()
        (error + _penalty(network)).backward()
        optimizer.step()
        schedule.step()
        last = last.lerp(error.detach(), 0.1)
    return float(last)


def _penalty(network: WNNNetwork) -> Tensor:
    layers = _outer(network)
    weights = torch.stack([layer.weight.abs().sum() for layer in layers]).sum()
    biases = torch.stack([layer.bias.abs().sum() for layer in layers]).sum()
    return ON_WEIGHTS * weights + ON_BIASES * biases


def _draw(run: _Run, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Values (5, count) at the ends of five periods, and that (count,) five periods later."""
    element = elements(run.starts, run.counts, count, generator)
    at = torch.randint(len(run.values) - (VALUES - 1 + AHEAD), (count,), generator=generator)
    values = torch.stack([run.values[at + i, element] for i in range(VALUES)])
    return values, run.values[at + VALUES - 1 + AHEAD, element]
