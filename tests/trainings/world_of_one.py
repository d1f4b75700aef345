"""A world of one rank."""

import json

import torch
import torch.distributed as dist
from gloo_checks import flat, sgd, steps, wrapped

import tacit

dist.init_process_group("gloo")
base = None
for algorithm in ("ddp", "dense", "topk:ratio=1.0", "localsgd"):
    model = wrapped()
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, algorithm) as session:
        steps(model, optimizer, 6)
    assert 'tacit_steps{rank="0"} 6\n' in session.metrics_text()
    base = flat(model) if base is None else base
    same = torch.allclose(flat(model), base, atol=1e-6)
    print(json.dumps({"algorithm": algorithm, "bytes": session.metrics()["bytes_out"], "same_as_ddp": same}))
dist.destroy_process_group()
