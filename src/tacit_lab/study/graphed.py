"""Losses and gradients of several networks on one GPU, by one CUDA graph with a branch for each network.

A small network's kernels take microseconds, and launching one takes longer than running it. In a graph they
are launched together, and those of different networks run beside each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tacit.torch_compat import copy_each_

Pair = tuple[Tensor, Tensor]
WARM_UP = 3
"""Passes before the graph is recorded, in which libraries choose their kernels and take their memory."""


class GraphedGradients:
    """Writes each network's gradients into its `grad` fields, which stay where they are.

    Args:
        networks: on one GPU; what a pass changes in their buffers, a replay changes too.
        loss: of (outputs, targets).
        like: a batch for each network, of the shapes and types that all batches have.
    """

    def __init__(
        self,
        networks: Sequence[nn.Module],
        loss: Callable[[Tensor, Tensor], Tensor],
        like: Sequence[Pair],
    ) -> None:
        self._networks, self._loss = networks, loss
        self._trained = [[p for p in each.parameters() if p.requires_grad] for each in networks]
        device = self._trained[0][0].device
        self._given = [(x.to(device), y.to(device)) for x, y in like]
        self._gradients = [[torch.zeros_like(p) for p in params] for params in self._trained]
        for params, gradients in zip(self._trained, self._gradients, strict=True):
            for p, gradient in zip(params, gradients, strict=True):
                p.grad = gradient
        cuda: Any = torch.cuda
        self._streams = [cuda.Stream(device) for _ in networks]
        self._graph, self._losses = self._recorded()

    def __call__(self, batches: Sequence[Pair]) -> Tensor:
        """The losses, one a network."""
        for mine, theirs in zip(self._given, batches, strict=True):
            for here, there in zip(mine, theirs, strict=True):
                here.copy_(there)
        self._graph.replay()
        return self._losses.clone()

    def _recorded(self) -> tuple[Any, Tensor]:
        """The graph, and where it leaves the losses; buffers are as before."""
        buffers = [buffer for each in self._networks for buffer in each.buffers()]
        before = [buffer.clone() for buffer in buffers]
        for _ in range(WARM_UP):
            self._pass()
        torch.cuda.synchronize()
        cuda: Any = torch.cuda
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, capture_error_mode="thread_local"):  # other threads compile kernels meanwhile
            losses = self._pass()
        for buffer, old in zip(buffers, before, strict=True):
            buffer.copy_(old)
        return graph, losses

    def _pass(self) -> Tensor:
        """Each network on a stream of its own, between what came before and what comes behind."""
        cuda: Any = torch.cuda
        here, losses = cuda.current_stream(), []
        each = self._streams, self._networks, self._trained, self._gradients, self._given
        for stream, network, params, gradients, (x, y) in zip(*each, strict=True):
            stream.wait_stream(here)
            with cuda.stream(stream):
                loss = self._loss(network(x), y)
                # Not `backward`: gradients would be added on the stream of whoever first used a parameter.
                copy_each_(gradients, [*torch.autograd.grad(loss, params)])
                losses.append(loss.detach())
        for stream in self._streams:
            here.wait_stream(stream)
        return torch.stack(losses)
