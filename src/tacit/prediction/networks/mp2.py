"""MP²'s network: convolution, channel attention, max pooling (Liu et al., Computer Networks 255, 2024).

The paper has published no more of it than these three words, and that it was trained on a "hierarchical
parameter dataset" of samples from ordinary trainings. Inputs, shapes and loss are ours. It is shown the last
two changes of each element that all ranks have heard of, the older one first:

    s = mean |change|                                  of the two
    in    (3, 2): change / s; 1 / age in rounds; log2 of the layer's root mean square now / then, within +-5
    conv 3 to `width` channels, ReLU; conv 3, ReLU     along the two changes, with zeros beyond the ends
    each channel times sigmoid(B ReLU(A mean(channel)))     squeeze and excite, through `width` / 4
    maximum of the two; one linear layer -> delta, within +-5
    predicted change = delta s

The last layer begins as zeros, so that what is untrained predicts no change.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from tacit import checks
from tacit.errors import ConfigError
from tacit.kernels.mp2_network import compile_for_host, packed_weights, predict_changes, predict_received
from tacit.kernels.reference.mp2_network import TAPS, matrix_of
from tacit.prediction.networks import weight_files
from tacit.prediction.predictor import KINDS, Predictor, Received, Seen

DEPTH, INPUTS = TAPS, 3
LIMIT = 5.0
"""Normalised changes are clipped to this; and log2 ratios of a layer's size."""
FLOPS = 900
"""The most operations an element: on a CPU wider networks take longer than the bytes that they save."""
SHIPPED = Path(__file__).parent / "mp2.pt"

SHAPES = {
    "first.weight": (-1, 3, 3),
    "first.bias": (-1,),
    "second.weight": (-1, -1, 3),
    "second.bias": (-1,),
    "squeeze.weight": (-1, -1),
    "squeeze.bias": (-1,),
    "excite.weight": (-1, -1),
    "excite.bias": (-1,),
    "last.weight": (1, -1),
    "last.bias": (1,),
}


def flops(width: int) -> int:
    """Floating-point operations an element, multiplications and additions; 4 of 6 taps are not padding."""
    hidden = max(1, width // 4)
    return 2 * 4 * width * (INPUTS + width) + 4 * width * hidden + (2 + 2 + 1) * width + 2 * width


class MP2Network(nn.Module):
    """One kind's network; (3, 2, n) -> (n,), both normalised.

    Args:
        width: channels, 4 to 8 as a rule. More follow finer patterns, and cost as their square.
    """

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        checks.whole("width", width, 1, None, "4 to 8 are usual")
        if flops(width) > FLOPS:
            raise ConfigError(
                f"width={width} costs {flops(width)} operations an element, more than {FLOPS}: write 8 or "
                "less"
            )
        hidden = max(1, width // 4)
        self.first = nn.Conv1d(INPUTS, width, 3, padding=1)
        self.second = nn.Conv1d(width, width, 3, padding=1)
        self.squeeze = nn.Linear(width, hidden)
        self.excite = nn.Linear(hidden, width)
        self.last = nn.Linear(width, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        """delta (n,) of the input (3, 2, n)."""
        return run(dict(self.named_parameters()), x)


def run(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """The network with these weights.

    Elements lie side by side in memory, and a convolution over two changes is one small matrix: a fourth of
    the time, or less, that torch's takes for millions of signals so short.
    """
    x = _convolved(weights["first.weight"], weights["first.bias"], x)
    x = _convolved(weights["second.weight"], weights["second.bias"], x)
    gate = torch.addmm(weights["squeeze.bias"].unsqueeze(1), weights["squeeze.weight"], x.mean(1)).relu_()
    gate = torch.addmm(weights["excite.bias"].unsqueeze(1), weights["excite.weight"], gate).sigmoid_()
    x = x * gate.unsqueeze(1)
    x = torch.maximum(x[:, 0], x[:, 1])
    return torch.addmm(weights["last.bias"].unsqueeze(1), weights["last.weight"], x).squeeze(0)


def _convolved(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """ReLU of the convolution of (channels, 2, n), as a matrix: its columns answer one impulse each."""
    x = torch.addmm(bias.repeat_interleave(DEPTH).unsqueeze(1), matrix_of(weight), x.flatten(0, 1))
    return x.relu_().view(-1, DEPTH, x.shape[1])


def normalised(seen: Seen) -> tuple[Tensor, Tensor]:
    """The network's input for two changes of each of n elements.

    Returns:
        The input, (3, 2, n) in fp32, and s, (n,), in whose units it is; s is 0 where nothing has changed.
    """
    changes = seen.changes.float()
    size = (changes.abs() / DEPTH).sum(0)
    x = changes.new_empty(INPUTS, *changes.shape)
    torch.div(changes, torch.where(size > 0, size, 1.0), out=x[0])
    torch.reciprocal(seen.ages, out=x[1])
    torch.log2(seen.swings, out=x[2]).clamp_(-LIMIT, LIMIT)
    return x, size


@dataclass(frozen=True)
class MP2(Predictor):
    """The trained network of each kind. Kinds that the file does not hold are predicted not to change.

    Attributes:
        file: the path of trained weights; "": those that come with tacit.
    """

    file: str = ""

    on_device: ClassVar[bool] = True

    def kinds(self) -> tuple[str, ...]:
        """The kinds with weights in the file."""
        return tuple(_weights(self.file))

    def prepare(self, device: torch.device) -> None:
        """Copy the weights, which the host waits for; on the host compile what predicts."""
        if device.type == "cpu":
            compile_for_host()
        for kind in self.kinds():
            _packed(self.file, kind, device)

    @property
    def operations(self) -> int:
        """Those of the widest network."""
        return max(flops(len(named["first.bias"])) for named in _weights(self.file).values())

    def change(self, seen: Seen, kind: str) -> Tensor:
        """delta s, in the units of the changes."""
        seen = seen.newest(DEPTH)
        out = torch.zeros_like(seen.changes[-1])
        if trained := _packed(self.file, kind, out.device):
            predict_changes(seen.changes, _once(seen.ages), _log(_once(seen.swings)), *trained, LIMIT, out)
        return out

    def write_received(self, received: Received, kind: str, out: Tensor, scale: float = 1.0) -> None:
        """See `Predictor.write_received`; of fp32 on the host in one pass."""
        trained, sizes = _packed(self.file, kind, out.device), _log(received.ratios)
        if not (trained and predict_received(*received[:4], sizes, *trained, LIMIT, scale, out)):
            super().write_received(received, kind, out, scale)


def _log(swings: Tensor) -> Tensor:
    return swings.log2().clamp_(-LIMIT, LIMIT)


def _once(each: Tensor) -> Tensor:
    """(k, n), or (k, 1) of what is the same for all elements."""
    return each if each.stride(1) else each[:, :1]


@cache
def _packed(file: str, kind: str, device: torch.device) -> tuple[Tensor, int] | None:
    """The weights of a kind in one vector, and their network's width; None where the file has none."""
    named = _weights(file).get(kind)
    return None if named is None else (packed_weights(named).to(device), len(named["first.bias"]))


@cache
def _weights(file: str) -> weight_files.Weights:
    weights = weight_files.read(file or SHIPPED, "mp2", SHAPES, KINDS)
    for kind, named in weights.items():
        with torch.device("meta"):  # torch's initial values would move the script's random numbers
            network = MP2Network(len(named["first.bias"]))
        fits = {k: p.shape for k, p in network.named_parameters()}
        for name, tensor in named.items():
            if tensor.shape != fits[name]:
                raise ConfigError(
                    f"{file or SHIPPED} is damaged: {kind}.{name} has shape {tuple(tensor.shape)}, and the "
                    f"others need {tuple(fits[name])}"
                )
    return weights
