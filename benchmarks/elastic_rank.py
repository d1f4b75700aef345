"""One replica of `elastic.py`: `elastic_rank.py ALGORITHM SEED PACE STEPS SILENCE`, a line of JSON a step."""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import count

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler

import tacit
from tacit.api.members import MemberSession
from tacit_lab.recipes.bytes import Bytes

EVERY = 20
"""Steps from one judgement to the next; the member of rank 0 judges."""
HELD_OUT = 6_192


def main() -> None:
    """Train until the members have taken so many steps, one each `PACE` seconds."""
    algorithm, seed, pace, steps, silence = sys.argv[1], *map(float, sys.argv[2:])
    dist.init_process_group("gloo")  # of this replica alone
    recipe = Bytes(HELD_OUT)
    windows = recipe.data().train
    model = DistributedDataParallel(recipe.model(int(seed)))
    optimizer = recipe.optimizer(model)
    members = tacit.Members(silence=silence)
    session = tacit.attach(model, optimizer, algorithm, members=members, seed=int(seed))
    assert isinstance(session, MemberSession)
    sampler = tacit.MemberSampler(windows, session.members, seed=int(seed))
    batches = (batch for _ in count() for batch in BatchSampler(sampler, recipe.batch, drop_last=True))
    for batch in batches:
        began = time.time()
        if session.step >= steps:
            break
        tokens = windows[batch].long()
        optimizer.zero_grad()
        recipe.loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        said = {
            "process": os.getpid(),
            "time": time.time(),
            "step": session.step,
            "round": session.metrics()["rounds"],
        }
        if session.step % EVERY == 0 and session.members.place == 0:
            said["loss"] = recipe.evaluate(model.module)[0]
        print(json.dumps(said), flush=True)
        time.sleep(max(0.0, began + pace - time.time()))
    session.close()
    sums = [float(each.double().sum()) for each in model.module.parameters()]
    loss = recipe.evaluate(model.module)[0]
    print(json.dumps({"process": os.getpid(), "sums": sums, "loss": loss}), flush=True)


if __name__ == "__main__":
    main()
