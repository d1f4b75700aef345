"""MP²'s network for each element, on a GPU in one pass; see `prediction.mp2_network` for what it computes.

Its arithmetic is additions, multiplications and divisions that round alike on every GPU, as all ranks have to
predict the same bits. It differs by rounding from the network on a CPU, which multiplies matrices.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tacit.kernels.dispatch import run_triton, triton_takes
from tacit.kernels.reference import mp2_network as reference
from tacit.kernels.reference.mp2_network import matrix_of


def predict_changes(
    changes: Tensor, ages: Tensor, log_swings: Tensor, packed: Tensor, width: int, limit: float, out: Tensor
) -> None:
    """Overwrite `out`, (n,), with the predicted changes.

    Args:
        changes: (2, n), of the type of `out`; the newest last.
        ages: (2, n) or (2, 1), fp32.
        log_swings: (2, n) or (2, 1), fp32, within +-`limit`.
        packed: the weights, by `packed_weights`.
        width: of the network, in channels.
        limit: of a predicted change, in units of the mean magnitude of both changes.
    """
    arguments = (changes, ages, log_swings, packed, width, limit, out)
    if not (triton_takes(out, changes) and run_triton("mp2_network.predict", *arguments)):
        reference.predict_changes(*arguments)


def packed_weights(named: Mapping[str, Tensor]) -> Tensor:
    """All weights in one vector of fp32, the convolutions as matrices; channels as rows."""
    parts = [matrix_of(named["first.weight"]), named["first.bias"]]
    parts += [matrix_of(named["second.weight"]), named["second.bias"]]
    parts += [
        named[f"{layer}.{each}"] for layer in ("squeeze", "excite", "last") for each in ("weight", "bias")
    ]
    return torch.cat([each.reshape(-1).float() for each in parts])
