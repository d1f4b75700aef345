"""Runs that torch.distributed.checkpoint stops and resumes, as the pages say: model, optimizer, session."""

import io
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tacit

SHARDED = {
    "topk:ratio=0.1": "adamw",
    "diloco:sync_every=4": "adamw, sync",
    "streaming-diloco:sync_every=4,fragments=2,fragment_sync_delay=3,bits=4": "adamw",
    "lowbit": "adamw",
    "gossip": "sgd",
}
"""On FSDP2: with which optimizer, and whether replicas are made equal before they are saved."""
REPLICATED = {
    "dense": "sgd",
    "powersgd": "adamw",
    "onebit-adam:freeze_step=3": "adamw",
    "zeroone-adam:freeze_step=3,refresh=1": "adamw",
    "localsgd:sync_every=4": "adamw, sync",
    "localsgd:sync_every=4,momentum=averaged": "adamw",
    "diloco:sync_every=5": "sgd",
    "lowbit:sync_every=4": "sgd, sync",
    "noloco:sync_every=4": "adamw",
    "desloc:sync_every=4": "adamw, sync",
    "easgd:sync_every=4": "sgd",
}

Begin = Callable[[Callable[[nn.Module], torch.optim.Optimizer]], tuple[nn.Module, Any, tacit.Attached]]


def optimizer_of(kind: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    if kind.startswith("adamw"):
        return lambda net: torch.optim.AdamW(net.parameters(), lr=0.003)
    return lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def ends(
    begin: Begin, train: Callable[[nn.Module, Any, range], None], kind: str, by: str = "dcp"
) -> tuple[list[Tensor], list[Tensor]]:
    """What this rank has of parameters and buffers after a run without a stop, and after one with it.

    `by`: "dcp", or "rank 0": whose model and optimizer all ranks load, beside a session of their own.
    """
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    net, optimizer, session = begin(optimizer_of(kind))
    with session:
        train(net, optimizer, range(6))
        if "sync" in kind:
            session.sync()
        if by == "dcp":
            model, moments = get_state_dict(net, optimizer)
            dcp.save({"model": model, "optimizer": moments, "tacit": session}, checkpoint_id=path[0])
        else:
            torch.save(session.state_dict(), own := io.BytesIO())
            if dist.get_rank() == 0:
                torch.save((net.state_dict(), optimizer.state_dict()), f"{path[0]}/0.pt")
            dist.barrier()
        train(net, optimizer, range(6, 11))
        never = kept(net)
    net, optimizer, session = begin(optimizer_of(kind))
    with session:
        if by == "dcp":
            model, moments = get_state_dict(net, optimizer)
            dcp.load({"model": model, "optimizer": moments, "tacit": session}, checkpoint_id=path[0])
            set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=moments)
        else:
            own.seek(0)
            session.load_state_dict(torch.load(own))
            for each, state in zip((net, optimizer), torch.load(f"{path[0]}/0.pt"), strict=True):
                each.load_state_dict(state)
        train(net, optimizer, range(6, 11))
        return never, kept(net)


def kept(net: nn.Module) -> list[Tensor]:
    """Parameters and buffers, or this rank's shards of them."""
    each: list[Any] = [*net.parameters(), *net.buffers()]
    return [(x.to_local() if hasattr(x, "to_local") else x).detach().clone() for x in each]


def goes_on(*run: Any) -> bool:
    never, stopped = ends(*run)
    return all(torch.equal(a, b) for a, b in zip(never, stopped, strict=True))
