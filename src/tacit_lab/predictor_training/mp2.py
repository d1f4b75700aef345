"""Train MP²'s networks on recorded layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tacit import checks
from tacit.errors import ConfigError
from tacit.prediction.networks import weight_files
from tacit.prediction.networks.mp2 import LIMIT, MP2Network, normalised
from tacit.prediction.predictor import Seen
from tacit_lab.predictor_training.layers import Layer
from tacit_lab.predictor_training.trajectories import Motion, motions, reach

LOSSES = ("l1", "mse")


def train(
    layers: Sequence[Layer],
    *,
    width: int = 4,
    steps: int = 3000,
    batch: int = 4096,
    lr: float = 3e-3,
    loss: str = "l1",
    share: float = 0.4,
    seed: int = 0,
    tell: Callable[[str], None] = lambda line: None,
) -> weight_files.Weights:
    """A network for each kind of layer that was recorded.

    What is learnt is the true next change, from the last two changes that would have been heard of where a
    share of the elements takes turns (`motions.when`). Vectors, which `compressors.Predicted` sends whole,
    learn from the changes of the last two rounds.

    Every layer, large or small, is drawn from equally often. lr falls to zero, as a cosine.

    Args:
        width: channels; see `tacit.prediction.networks.mp2.MP2Network`.
        loss: "l1" or "mse", between delta and the true change in the same units, within +-5.
        share: of the elements that a round sends.
        tell: gets a line about the training now and then.

    Raises:
        ConfigError: a parameter cannot be, or no layer is long enough.
    """
    checks.one_of("loss", loss, LOSSES)
    checks.whole("steps", steps, 1, None, "3000 are usual")
    reach(share)
    weights: weight_files.Weights = {}
    for kind in dict.fromkeys(layer.kind for layer in layers):
        sent = 1.0 if kind == "vector" else share
        found = motions(layers, kind, sent)
        if not found:
            continue
        torch.manual_seed(seed)
        network = MP2Network(width)
        error = _Fit(network, found, sent, steps, batch, lr, loss, seed).run()
        tell(f"{kind}: error {error:.3f} in units of an element's usual change")
        weights[kind] = {name: p.detach().clone() for name, p in network.named_parameters()}
    if not weights:
        raise ConfigError("no recorded layer moves for long enough to learn from: record more rounds")
    return weights


class _Fit:
    """One network's training."""

    def __init__(
        self,
        network: MP2Network,
        found: Sequence[Motion],
        share: float,
        steps: int,
        batch: int,
        lr: float,
        loss: str,
        seed: int,
    ) -> None:
        self._network, self._motions, self._share, self._steps = network, found, share, steps
        self._squared = loss == "mse"
        self._optimizer = torch.optim.Adam(network.parameters(), lr=lr)
        self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, steps)
        self._generator = torch.Generator().manual_seed(seed)
        layers = sum(len(each.starts) for each in found)
        self._counts = [max(1, batch * len(each.starts) // layers) for each in found]

    def run(self) -> float:
        """The last mean error."""
        last = torch.zeros(())
        for _ in range(self._steps):
            x, y = self._drawn()
            error = self._network(x) - y
            loss = error.square().mean() if self._squared else error.abs().mean()
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            self._schedule.step()
            last = last.lerp(error.detach().abs().mean(), 0.1)
        return float(last)

    def _drawn(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets (n,), without elements that have not moved."""
        drawn = [
            motion.draw(self._share, count, self._generator)
            for motion, count in zip(self._motions, self._counts, strict=True)
        ]
        seen = Seen(*(torch.cat(parts, -1) for parts in zip(*(each.seen for each in drawn), strict=True)))
        true = torch.cat([each.true for each in drawn])
        x, size = normalised(seen)
        moved = size > 0
        return x[:, :, moved], (true[moved] / size[moved]).clamp(-LIMIT, LIMIT)
