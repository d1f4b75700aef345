"""Replicas that take the mix of their neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tacit.contracts import Application, Merge, State


@dataclass(frozen=True)
class Mix(Merge):
    """Each replica takes the mix of its own and its neighbours' parameters (D-PSGD: Lian et al. 2017).

    The anchor stays where the replicas were last equal. What is mixed are the deltas from there; as the
    weights of a mix add up to 1, that is the mix of the parameters. Where the answer is applied late, the
    steps that a replica has taken meanwhile are added to it (overlapped SGP: Assran et al. 2019).
    """

    mixes: ClassVar[bool] = True
    entrywise: ClassVar[bool] = True
    reads_params: ClassVar[Literal["late"]] = "late"

    @property
    def meets(self) -> bool:
        """False: replicas are equal in the mean only."""
        return False

    def apply_(
        self,
        params: Tensor,
        anchor: Tensor,
        mean: Tensor,
        local_delta: Tensor | None,
        state: State,
        at: Application,
    ) -> None:
        """`anchor + mean`; late, `params + mean - local_delta`. One replica alone stays as it is."""
        if at.peers == 1:
            return
        if at.lag == 0 or local_delta is None:
            torch.add(anchor, mean, out=params)
        else:
            params.add_(mean).sub_(local_delta)
