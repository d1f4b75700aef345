"""Writes the trajectories of torchft's DiLoCo, which the tests hold ours to.

    python -m venv /tmp/torchft && /tmp/torchft/bin/pip install torch==2.13.0 numpy
    /tmp/torchft/bin/pip install torchft-nightly==2026.10.26
    /tmp/torchft/bin/python tests/golden/torchft_diloco.py > tests/golden/torchft_diloco.json

What runs is torchft's own code (`torchft.local_sgd.DiLoCo`) on every replica, each in a thread of its own;
only its Manager is replaced, by one that averages over the threads and commits every time.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import threading
import types

import torch
from torch import Tensor, nn

SIZES = {"a": 7, "b": 3, "c": 5, "d": 6}
LR, PEERS, STEPS = 0.1, 3, 26
CASES = {
    "diloco": {"sync_every": 5, "fragments": [["a", "b", "c", "d"]], "lr": 0.7, "momentum": 0.9},
    "streaming": {
        "sync_every": 8,
        "fragments": [["c", "d"], ["a", "b"]],
        "lr": 0.4,
        "momentum": 0.9,
        "fragment_sync_delay": 2,
        "fragment_update_alpha": 0.5,
    },
}


def gradient(x: Tensor, rank: int, step: int) -> Tensor:
    """As in tests/replicas/replica_threads.py."""
    return x - torch.sin(torch.arange(len(x)) * (1.0 + rank) + 0.1 * step)


class Threads:
    """What a torchft Manager is asked for, among threads."""

    _use_async_quorum = False

    def __init__(self, rank: int, shared: dict[str, object], barrier: threading.Barrier) -> None:
        self.rank, self.shared, self.barrier = rank, shared, barrier
        self.step = 0

    def allreduce(self, x: Tensor, should_quantize: bool = False) -> object:
        self.shared[self.rank] = x.clone()
        self.barrier.wait()
        mean = torch.stack([self.shared[r] for r in range(PEERS)]).mean(0)
        self.barrier.wait()
        x.copy_(mean)
        return types.SimpleNamespace(wait=lambda: None)

    def should_commit(self) -> bool:
        self.step += 1
        return True

    def current_step(self) -> int:
        return self.step

    def start_quorum(self) -> None: ...

    def allow_state_dict_read(self) -> None: ...

    def disallow_state_dict_read(self) -> None: ...

    def register_state_dict_fn(self, *_: object) -> None: ...


class Fragment(nn.Module):
    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, p in parameters.items():
            self.register_parameter(name, p)


def run(
    case: dict[str, object], rank: int, shared: dict[str, object], barrier: threading.Barrier
) -> list[list[float]]:
    from torchft.local_sgd import DiLoCo

    options = dict(case)
    named = {name: nn.Parameter(torch.ones(size)) for name, size in SIZES.items()}
    parts = [Fragment({name: named[name] for name in names}) for names in options.pop("fragments")]
    lr, momentum = options.pop("lr"), options.pop("momentum")
    outer = [torch.optim.SGD(part.parameters(), lr=lr, momentum=momentum, nesterov=True) for part in parts]
    inner = torch.optim.SGD(named.values(), lr=LR)
    trace = []
    with DiLoCo(Threads(rank, shared, barrier), parts, inner, outer, **options) as diloco:
        # A fragment of torchft's leaves this many steps before its turn is over; ours leaves at its end.
        diloco._local_step = -int(options.get("fragment_sync_delay", 0))
        for step in range(STEPS):
            whole = torch.cat([p.detach() for p in named.values()])
            found, start = gradient(whole, rank, step), 0
            for p in named.values():
                p.grad = found[start : start + len(p)].clone()
                start += len(p)
            inner.step()
            trace.append([round(float(v), 8) for p in named.values() for v in p.detach()])
    return trace


def main() -> None:
    found: dict[str, object] = {"torchft-nightly": importlib.metadata.version("torchft-nightly")}
    for name, case in CASES.items():
        shared: dict[str, object] = {}
        barrier = threading.Barrier(PEERS, timeout=30)
        traces: dict[int, list[list[float]]] = {}

        def work(rank: int) -> None:
            traces[rank] = run(case, rank, shared, barrier)  # noqa: B023

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(PEERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found[name] = {"case": case, "trace": [traces[rank] for rank in range(PEERS)]}
    json.dump(found, sys.stdout)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
