"""WNN, the weight nowcaster (Jang et al., ICML 2023): five values, and the one five steps later.

On the values w1 .. w5 of an element at the ends of five periods:

    r = max - min + 1e-8;  x = (w - w1) / (r + 1e-5) / 2          |x| <= 1/2
    streams: x, and its four differences; each: Dense 64, activation network, Dense 32, LeakyReLU 0.3
    activation network:  z = ReLU(Z h);  A z + (B z) exp((C z) h)
    delta = tanh(Dense 1 of both streams)
    forecast = (x5 + delta) (r + 1e-5) 2 + w1                      five periods after w5

The authors' weights carry no licence, so those that come with tacit are trained by us, for the same network:
see `files.note_of`. Their code adds delta of a bias to the raw value, and their PyTorch version has another
slope in LeakyReLU; both are slips, and are not repeated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from tacit.prediction.networks import weight_files
from tacit.prediction.predictor import KINDS, Predictor, Seen

AHEAD = 5
"""How many values it is shown, and how many periods after the last one the forecast is for."""
SLOPE = 0.3
SHIPPED = Path(__file__).parent / "wnn.pt"


class WNNStream(nn.Module):
    """One of the two streams; (n, length) -> (n, 32)."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.wide = nn.Linear(length, 64)
        self.z = nn.Linear(64, 8)
        self.a, self.b, self.c = nn.Linear(8, 64), nn.Linear(8, 64), nn.Linear(8, 64)
        self.narrow = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Dense, activation network, Dense."""
        h = self.wide(x)
        z = self.z(h).relu()
        h = self.a(z) + self.b(z) * torch.exp(self.c(z) * h)
        return leaky_relu(self.narrow(h), SLOPE)


class WNNNetwork(nn.Module):
    """One kind's network. The last layer begins as zeros: what is untrained forecasts the last value."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.steps = WNNStream(5), WNNStream(4)
        self.last = nn.Linear(64, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        """delta (n,) of normalised values (n, 5)."""
        both = torch.cat((self.values(x), self.steps(x.diff(dim=1))), 1)
        return torch.tanh(self.last(both)).squeeze(1)


def _empty() -> WNNNetwork:
    """A network without memory: torch's initial values would advance the script's random numbers."""
    with torch.device("meta"):
        return WNNNetwork()


SHAPES = {name: tuple(p.shape) for name, p in _empty().named_parameters()}


def normalised(values: Tensor) -> tuple[Tensor, Tensor]:
    """x (n, 5) of values (5, n), and the unit (n,), so that values are w1 + unit x."""
    unit = (values.amax(0) - values.amin(0) + 1e-8 + 1e-5) * 2
    return ((values - values[0]) / unit).t(), unit


def forecast(values: Tensor, network: nn.Module) -> Tensor:
    """The values (n,) five periods after the last of `values` (5, n)."""
    x, unit = normalised(values)
    with torch.no_grad():
        delta: Tensor = network(x)
    return (x[:, -1] + delta) * unit + values[0]


@dataclass(frozen=True)
class WNN(Predictor):
    """A fifth of the way to WNN's forecast: it is for five periods after the last.

    The paper forecasts once in five epochs, from the ends of epochs; rounds that are many steps apart are
    more like these than single steps, whose noise it takes for motion. Where fewer than four changes are
    known, it is shown four that lead from the first of them to the last in equal steps.

    Attributes:
        file: the path of trained weights, made by `files.write` for the network "wnn"; "": those that come
            with tacit.
    """

    file: str = ""

    depth: ClassVar[int] = AHEAD - 1

    def kinds(self) -> tuple[str, ...]:
        """The kinds that it has a network for."""
        return tuple(networks(self.file))

    @property
    def operations(self) -> int:
        """A product and a sum for each weight, and about four for each of the 64 activations of a stream."""
        return 2 * sum(math.prod(shape) for shape in SHAPES.values()) + 2 * 4 * 64

    def change(self, seen: Seen, kind: str) -> Tensor:
        """(forecast - last value) / 5; no change for kinds without weights, and of what never moved."""
        network, past = networks(self.file).get(kind), _even(seen.changes.float())
        if network is None:
            return torch.zeros_like(seen.changes[-1])
        values = torch.cat((past.new_zeros(1, past.shape[1]), past.cumsum(0)))
        change = (forecast(values, network) - values[-1]) / AHEAD
        return change.masked_fill_(~past.any(0), 0.0).to(seen.changes.dtype)


def _even(changes: Tensor) -> Tensor:
    """Four changes."""
    if len(changes) == AHEAD - 1:
        return changes
    weights = torch.linspace(0, 1, AHEAD - 1, dtype=torch.float32).unsqueeze(1)
    return torch.lerp(changes[-2].expand(AHEAD - 1, -1), changes[-1].expand(AHEAD - 1, -1), weights)


@cache
def networks(file: str) -> dict[str, WNNNetwork]:
    """The network of each kind in the file, or of what comes with tacit.

    Raises:
        ConfigError: there is none, or it is not one for WNN.
    """
    found: dict[str, WNNNetwork] = {}
    for kind, weights in weight_files.read(file or SHIPPED, "wnn", SHAPES, KINDS).items():
        found[kind] = _empty()
        found[kind].load_state_dict(weights, assign=True)
        found[kind].eval()
    return found
