"""Train MP²'s networks on recorded layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tacit import checks
from tacit.errors import ConfigError
from tacit.predictors import files
from tacit.predictors.mp2 import LIMIT, Network, normalised
from tacit.recipes.prediction.layers import Layer
from tacit.recipes.prediction.motions import Guess, Motion, Windows, motions, period_of, roll_out

__all__ = ["LOOPS", "LOSSES", "train"]

LOOPS = ("closed", "open")
LOSSES = ("l1", "mse")


def train(
    layers: Sequence[Layer],
    *,
    width: int = 4,
    steps: int = 3000,
    batch: int = 4096,
    lr: float = 3e-3,
    loss: str = "l1",
    loop: str = "closed",
    share: float = 0.11,
    repetitions: int = 5,
    seed: int = 0,
    tell: Callable[[str], None] = lambda line: None,
) -> files.Weights:
    """A network for each kind of layer that was recorded.

    What is learnt is always the true next change; `loop` says from which past:

    * "open": the true changes before it. In use a predictor never sees such a past, since most of it is
      what it has itself predicted.
    * "closed": the past as the closed loop makes it. After each of `repetitions` parts of the training the
      network, as it is then, predicts along the recorded motion, of which each element is sent in one round
      of 1 / `share` only (`roll_out`); from then on it learns from those histories and the recorded answers,
      in halves. So it meets its own errors (DAgger: Ross, Gordon & Bagnell, AISTATS 2011). Vectors, which
      `compressors.Predicted` sends whole, learn from true changes.

    Every layer, large or small, is drawn from equally often. lr falls to zero, as a cosine.

    Args:
        width: channels; see `tacit.predictors.mp2.Network`.
        loss: "l1" or "mse", between delta and the true change in the same units, within +-5.
        tell: is told how training goes, a line now and then.

    Raises:
        ConfigError: a parameter cannot be, or no layer is long enough.
    """
    checks.word("loss", loss, LOSSES)
    checks.word("loop", loop, LOOPS)
    checks.whole("steps", steps, 1, None, "3000 are usual")
    checks.whole("repetitions", repetitions, 1, None, "5 are usual")
    period = period_of(share)
    weights: files.Weights = {}
    for kind in dict.fromkeys(layer.kind for layer in layers):
        found = motions(layers, kind)
        if not found:
            continue
        torch.manual_seed(seed)
        network = Network(width)
        times = repetitions if loop == "closed" and kind != "vector" else 1
        fit = _Fit(network, found, steps, batch, lr, loss, seed)
        error = fit.run(times, period, follow=loop == "closed")
        tell(f"{kind}: error {error:.3f} in units of an element's usual change")
        weights[kind] = {name: p.detach().clone() for name, p in network.named_parameters()}
    if not weights:
        raise ConfigError("no recorded layer moves for long enough to learn from: record more rounds")
    return weights


class _Fit:
    """One network's training."""

    def __init__(
        self,
        network: Network,
        found: Sequence[Motion],
        steps: int,
        batch: int,
        lr: float,
        loss: str,
        seed: int,
    ) -> None:
        self._network, self._motions, self._steps, self._seed = network, found, steps, seed
        self._squared = loss == "mse"
        self._optimizer = torch.optim.Adam(network.parameters(), lr=lr)
        self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, steps)
        self._generator = torch.Generator().manual_seed(seed)
        layers = sum(len(each.starts) for each in found)
        self._counts = [max(1, batch * len(each.starts) // layers) for each in found]

    def run(self, times: int, period: int, *, follow: bool) -> float:
        """Train in so many parts, each on what the network did after the one before; the last mean error."""
        histories = [[each.answers if follow else each.changes] for each in self._motions]
        taken, error = 0, 0.0
        for part in range(times):
            stop = self._steps * (part + 1) // times
            error = self._learn(stop - taken, histories)
            taken = stop
            if part + 1 < times:
                guess = _of(self._network)
                histories = [
                    [each.answers, roll_out(guess, each, period, self._seed + part)] for each in self._motions
                ]
        return error

    def _learn(self, steps: int, histories: Sequence[Sequence[Tensor]]) -> float:
        last = torch.zeros(())
        for _ in range(steps):
            x, y = self._drawn(histories)
            error = self._network(x) - y
            loss = error.square().mean() if self._squared else error.abs().mean()
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            self._schedule.step()
            last = last.lerp(error.detach().abs().mean(), 0.1)
        return float(last)

    def _drawn(self, histories: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
        """Inputs (2, depth, n) and targets (n,), without elements that have not moved."""
        drawn = [
            motion.draw(history, max(1, count // len(each)), self._generator)
            for motion, each, count in zip(self._motions, histories, self._counts, strict=True)
            for history in each
        ]
        w = Windows(*(torch.cat(parts, -1) for parts in zip(*drawn, strict=True)))
        x, size = normalised(w.past, w.trend)
        moved = size > 0
        return x[:, :, moved], (w.true[moved] / size[moved]).clamp(-LIMIT, LIMIT)


def _of(network: Network) -> Guess:
    def guess(past: Tensor, trend: Tensor) -> Tensor:
        with torch.no_grad():
            x, size = normalised(past, trend)
            delta: Tensor = network(x)
            return delta.clamp_(-LIMIT, LIMIT) * size

    return guess
