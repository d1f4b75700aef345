"""One replica of `elastic_peers.py`: `elastic_peer_rank.py PEER SEED PACE UNTIL`, a line of JSON a step."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from tacit_lab.recipes.bytes import Bytes

SYNC, TIMEOUT = 8, 5.0
"""Local steps in a round, and the seconds after which a peer gives up a message."""
HELD_OUT = 6_192
EVERY = 20


def torchft(model: torch.nn.Module, optimizer: Any, dense: bool) -> tuple[Any, Any, Callable[[], int]]:
    """torchft: DDP, or local SGD. Returns model, optimizer, and what says how many rounds were committed."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from torchft.local_sgd import LocalSGD

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    limit = timedelta(seconds=TIMEOUT)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        use_async_quorum=dense,
        timeout=limit,
        replica_id=f"replica{os.environ['TACIT_NODE']}",
        lighthouse_addr=f"http://{os.environ['TACIT_MEMBERS']}",
        hostname=os.environ["MASTER_ADDR"],
    )
    if dense:
        return DistributedDataParallel(manager, model), Optimizer(manager, optimizer), manager.current_step
    LocalSGD(manager, model, optimizer, SYNC).__enter__()
    return model, optimizer, manager.current_step


def hivemind(model: torch.nn.Module, optimizer: Any, batch: int) -> tuple[Any, Any, Callable[[], int]]:
    """hivemind: local updates, whose parameters are averaged. Returns as `torchft` does."""
    import hivemind

    at = f"/ip4/{os.environ['MASTER_ADDR']}/tcp/0"
    while not os.path.exists(os.environ["PEERS_AT"]):
        time.sleep(0.1)
    with open(os.environ["PEERS_AT"]) as file:
        peers = file.read().split()
    dht = hivemind.DHT(initial_peers=peers, host_maddrs=[at], start=True)
    averaged = hivemind.Optimizer(
        dht=dht,
        run_id="elastic",
        target_batch_size=batch * SYNC * 6,
        batch_size_per_step=batch,
        optimizer=optimizer,
        use_local_updates=True,
        matchmaking_time=2.0,
        averaging_timeout=TIMEOUT,
        load_state_timeout=TIMEOUT,
        tracker_opts={"min_refresh_period": 0.2, "default_refresh_period": 1.0},
    )
    averaged.load_state_from_peers()
    return model, averaged, lambda: averaged.local_epoch


def main() -> None:
    """Train until this time, a step each `PACE` seconds."""
    peer, seed, pace, until = sys.argv[1], *map(float, sys.argv[2:])
    recipe = Bytes(HELD_OUT)
    windows = recipe.data().train
    module = recipe.model(int(seed))
    plain = recipe.optimizer(module)
    if peer == "hivemind":
        model, optimizer, rounds = hivemind(module, plain, recipe.batch)
    else:
        model, optimizer, rounds = torchft(module, plain, peer == "torchft-dense")
    draw = torch.Generator().manual_seed(os.getpid())
    step = 0
    while time.time() < until:
        began, before = time.time(), rounds()
        tokens = windows[torch.randint(len(windows), (recipe.batch,), generator=draw)].long()
        optimizer.zero_grad()
        recipe.loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if peer != "torchft-dense" or rounds() > before:  # else it was not committed
            step += 1
            said = {"process": os.getpid(), "time": time.time(), "step": step, "round": rounds()}
        else:
            said = {"process": os.getpid(), "time": time.time(), "void": step}
        if "step" in said and step % EVERY == 0 and os.environ["TACIT_NODE"] == "0":
            said["loss"] = recipe.evaluate(module)[0]
        print(json.dumps(said), flush=True)
        time.sleep(max(0.0, began + pace - time.time()))
    os._exit(0)  # its threads would wait for those that have ended


if __name__ == "__main__":
    main()
