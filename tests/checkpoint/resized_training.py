"""Trains on real processes and saves; or loads what another number of them saved, and goes on."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo_checks import BY_NODE, everywhere, flat, same_on_all_ranks, sgd, steps, wrapped
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import tacit

ALGORITHMS: dict[str, str | tacit.Strategy] = {
    "topk": "topk:ratio=0.1",
    "efsign": "efsign",
    "powersgd": "powersgd",
    "pipesgd": "pipesgd:compressor=bf16",
    "lag": "lag",
    "mp2": "mp2:rescale=false,sync_every=2,full_rounds=1",
    "ednncomm": "ednncomm:sync_every=4",
    "sparse slices": BY_NODE["sparse slices"],
    "low rank slices": BY_NODE["low rank slices"],
}


def new_residual(session: tacit.Attached) -> float:
    """What the mean still has to receive, added up."""
    mine = session.levels[0].session
    units = len(session.levels[0].transport.nodes) if mine.context.by_node else dist.get_world_size()
    total = torch.zeros(1, dtype=torch.float64)
    for (name, field), kept in mine.store.named_state().items():
        if field.endswith("residual"):
            total += kept.tensor.double().sum() / units
        elif name.endswith("weight"):  # what the second phase says of biases, which are dense, is nobody's
            total += kept.tensor.double().sum() if field.startswith("topology.") else 0.0
    return float(sum(everywhere(total)))


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    for name, algorithm in ALGORITHMS.items():
        model = wrapped()
        optimizer = sgd(model)
        with tacit.attach(model, optimizer, algorithm) as session:
            if mode == "save":
                steps(model, optimizer, 6)
                session.sync()
                torch.save(model.module.state_dict(), folder / f"{name} model.pt")
                torch.save(session.state_dict(), folder / f"{name} {rank}.pt")
                dcp.save({"session": session}, checkpoint_id=folder / name)
            else:
                if mode == "files":
                    states = [torch.load(folder / f"{name} {r}.pt") for r in range(4)]
                    state = tacit.join_states(states)
                else:
                    dcp_to_torch_save(folder / name, folder / f"whole {rank}.pt")
                    state = torch.load(folder / f"whole {rank}.pt")["session"]
                model.module.load_state_dict(torch.load(folder / f"{name} model.pt"))
                session.load_state_dict(state)
            found = {"name": name, "owed": new_residual(session), "rounds": session.metrics()["steps"]}
            steps(model, optimizer, 4, seed=1)
            session.sync()
            found["equal"] = same_on_all_ranks(flat(model))
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
