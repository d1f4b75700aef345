"""Replicas at a server that keeps the parameters: what a worker has is what the server thinks that it has."""

from __future__ import annotations

import torch
from served_replicas import ServedCrew

from cases import for_each
from tacit.algorithms import parse

SIZES = {"a": 40, "b": 3}


ALGORITHMS = [
    *("ps-async", "ps-async:pull=int8", "ps-ssp:push=topk,pull=sign", "ps-ssp:pull=qsgd"),
    "async-diloco:sync_every=2,delay=2,bits=4",
]


@for_each("dtype", [torch.float32, torch.bfloat16], ids=str)
@for_each("text", ALGORITHMS)
def test_a_server_knows_what_its_workers_have(text: str, dtype: torch.dtype) -> None:
    assert_a_server_knows(text, dtype)


@for_each("dtype", [torch.float16, torch.float64], ids=str)
@for_each("text", ALGORITHMS)
def test_in_other_types_too(text: str, dtype: torch.dtype) -> None:
    assert_a_server_knows(text, dtype)


def assert_a_server_knows(text: str, dtype: torch.dtype) -> None:
    """To the bit, also where the parameters have fewer bits than the anchor."""
    (level,) = parse(text).levels
    crew = ServedCrew(level, 3, sizes=SIZES, dtype=dtype)
    crew.enter()
    for _ in range(5):
        crew.train(4)
        for rank, replica in enumerate(crew.replicas):
            kept = replica.progress.saved_state()
            for name in SIZES:
                taken = crew.server.states[f"{name}/0"].taken[rank]
                assert torch.equal(kept[name, "anchor"].tensor, taken.to(kept[name, "anchor"].tensor.dtype))
    crew.close()
