"""What replicas that mix with some others are held to, whoever these are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from replica_threads import LR, SIZES, Crew, Replica, gradient
from torch import Tensor

from tacit.errors import NonFinite
from tacit.topologies import Gossip, Groups

N = sum(SIZES.values())


def matrix(topology: Gossip | Groups, peers: int, round_index: int = 0) -> Tensor:
    return torch.tensor(topology.rows(peers, round_index), dtype=torch.float64)


def mixed_by_hand(
    topology: Gossip | Groups, peers: int, steps: int, every: int = 1, late: int = 0
) -> list[list[Tensor]]:
    """The papers' lines: step, then mix; late, the mix of the step before is put under this one."""
    x = torch.ones(peers, N, dtype=torch.float64)
    rounds, way, trace = 0, None, []
    for t in range(steps):
        x = torch.stack([each - LR * gradient(each, i, t) for i, each in enumerate(x)])
        if way is not None:
            x, way = x + way, None
        if (t + 1) % every == 0:
            meets = topology.global_every and (rounds + 1) % topology.global_every == 0
            w = torch.full((peers, peers), 1 / peers).double() if meets else matrix(topology, peers, rounds)
            rounds += 1
            if late:
                way = w @ x - x
            else:
                x = w @ x
        trace.append([*x])
    return trace


def assert_followed(
    trace: Sequence[Sequence[Tensor]], want: Sequence[Sequence[Tensor] | Tensor], atol: float
) -> None:
    """Each rank's replica, step by step, is what was worked out for that step and rank."""
    for rank, steps in enumerate(trace):
        assert len(steps) == len(want)
        for step, found in enumerate(steps):
            assert torch.allclose(found.double(), want[step][rank], atol=atol), (rank, step)


def synced(crew: Crew) -> Tensor:
    """What all replicas are behind a sync, which makes them equal to the bit."""
    crew.sync()
    flats = [replica.flat for replica in crew.replicas]
    assert all(torch.equal(flats[0], each) for each in flats), "sync() makes replicas equal"
    return flats[0]


def assert_resumed(text: str) -> None:
    """A run that is saved and loaded goes on bit for bit."""
    whole = Crew(text, peers=4).train(12)
    first = Crew(text, peers=4)
    first.train(7)
    saved = first.save()
    second = Crew(text, peers=4)
    second.each(lambda rank, replica: replica.load(saved[rank]))
    rest = second.train(5)
    assert all(torch.equal(a[-1], b[-1]) for a, b in zip(whole, rest, strict=True)), text


def assert_nan_named(text: str, peers: int) -> None:
    """A NaN of one rank is an error on all of them, which names it and the parameter."""
    crew = Crew(text, peers=peers)
    errors: list[str] = []

    def work(rank: int, replica: Replica) -> None:
        if rank == 3:
            replica.named["b"][1] = float("nan")
        try:
            replica.progress.after_step()
        except NonFinite as error:
            errors.append(str(error))

    crew.each(work)
    assert len(errors) == peers
    assert all("b on rank 3" in each for each in errors), errors[0]
