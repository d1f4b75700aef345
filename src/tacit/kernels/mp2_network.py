"""MP²'s network for each element, in one pass; see `prediction.mp2_network` for what it computes.

Its arithmetic is additions, multiplications and divisions that round alike on every processor and GPU, as all
ranks have to predict the same bits. It differs by rounding from the network that is trained, which multiplies
matrices.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tacit.kernels.dispatch import numba_kernels, numba_takes_fp32, run_triton, triton_takes, warm_up
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
    if numba_takes_fp32(packed):
        _by_numba(*arguments)
    elif not (triton_takes(out, changes) and run_triton("mp2_network.predict", *arguments)):
        reference.predict_changes(*arguments)


def _by_numba(
    changes: Tensor, ages: Tensor, log_swings: Tensor, packed: Tensor, width: int, limit: float, out: Tensor
) -> None:
    """Of other types than fp32 by a copy."""
    changes, ages, log_swings = (each.float().contiguous() for each in (changes, ages, log_swings))
    found = out if out.dtype == torch.float32 and out.is_contiguous() else torch.empty_like(changes[0])
    varies = [int(each.shape[1] > 1) for each in (ages, log_swings)]
    kernel = numba_kernels("mp2_network").predict
    kernel(
        *(changes.data_ptr(), ages.data_ptr(), varies[0], log_swings.data_ptr(), varies[1], out.numel()),
        *(packed.data_ptr(), len(packed), width, limit, found.data_ptr()),
    )
    if found is not out:
        out.copy_(found)


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
    if not numba_takes_fp32(before, last, out):
        return False
    kernel = numba_kernels("mp2_network").predict_received
    kernel(
        *(before.data_ptr(), last.data_ptr(), age.data_ptr(), gap.data_ptr(), out.numel()),
        *(log_swings.data_ptr(), len(log_swings) - 1),
        *(packed.data_ptr(), len(packed), width, limit, scale, out.data_ptr()),
    )
    return True


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
