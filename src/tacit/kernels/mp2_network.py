"""MP²'s network for each element, in one pass; see `prediction.mp2_network` for what it computes.

Its arithmetic is additions, multiplications and divisions that round alike on every processor and GPU, as all
ranks have to predict the same bits. It differs by rounding from the network that is trained, which multiplies
matrices.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tacit.kernels.dispatch import HALVES, kernel, warm_up
from tacit.kernels.reference.mp2_network import matrix_of


@kernel("out", "changes", numba=(*HALVES, torch.float64))
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


@kernel("before", "last", "out", triton=())
def predict_received(
    before: Tensor,
    last: Tensor,
    age: Tensor,
    gap: Tensor,
    log_swings: Tensor,
    packed: Tensor,
    width: int,
    limit: float,
    scale: float,
    out: Tensor,
) -> bool:
    """Overwrite `out`, (n,), fp32, with `scale` times the predicted changes, where numba can.

    Args:
        before: (n,), fp32: of each entry the change received before the last one; `last`: the last one. They
            count where both ages are above 0, else as 0.
        age: (n,), int16: for how many rounds `last` has been the last one; `gap`: for how many `before` was.
        log_swings: (rounds + 1,), fp32: of the layer, for each age; older ones count as the last.
        packed: as for `predict_changes`, and so are `width` and `limit`.

    Returns:
        Whether it has: on the host, compiled, of fp32.
    """
    return False


def compile_for_host() -> None:
    """Compile now what runs on the host."""
    warm_up("mp2_network")


def packed_weights(named: Mapping[str, Tensor]) -> Tensor:
    """All weights in one vector of fp32, the convolutions as matrices; channels as rows."""
    parts = [matrix_of(named["first.weight"]), named["first.bias"]]
    parts += [matrix_of(named["second.weight"]), named["second.bias"]]
    parts += [
        named[f"{layer}.{each}"] for layer in ("squeeze", "excite", "last") for each in ("weight", "bias")
    ]
    return torch.cat([each.reshape(-1).float() for each in parts])
