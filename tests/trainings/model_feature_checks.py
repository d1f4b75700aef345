"""Every feature of models and scripts under every family of strategies: right, or refused by name."""

from __future__ import annotations

import json
import re
import sys
import traceback
from functools import partial
from typing import Any

import loopback_training
import pytest
import torch
import torch.distributed as dist
from model_features import FEATURES, STEPS, Feature, flat, optimizer_of, passes, rates
from rank_training import LONGEST
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from tacit.gradients.layerwise import planner

FAMILIES = {
    "synchronous": "dense",
    "rounded": "bf16",
    "sparse": "topk:ratio=0.1",
    "momentum corrected": "dgc:ratio=0.1",
    "Adam's momentum": "onebit-adam:freeze_step=2,refresh=1",
    "Adam's variance kept": "zeroone-adam:freeze_step=2,refresh=1",
    "signs, two phases": "efsign",
    "quantized": "qsgd:bits=8",
    "low rank": "powersgd",
    "lazy": "lag:xi=0.01",
    "votes": "signsgd",
    "delayed": "pipesgd",
    "fused": "fusion:megabytes=0.001",
    "prioritized": "priority:megabytes=0.001",
    "periodic": "localsgd:sync_every=2",
    "outer step": "diloco:sync_every=3",
    "fragments, late": "streaming-diloco:sync_every=4,fragments=2,fragment_sync_delay=1,bits=8",
    "elastic": "easgd:sync_every=2",
    "residual kept": "predictive:sync_every=2,ratio=0.2",
    "progress in few bits": "lowbit:sync_every=2",
    "predicted": "mp2:rescale=false,sync_every=2,budget=0.6,full_rounds=2,horizon=6",
    "by node": "ednncomm:sync_every=2",
    "by node, late": "daso:warmup_epochs=0,cooldown_epochs=0",
}
"""Family -> the algorithm that stands for it; parameter servers are in tests/stores."""
BY_NODE = {"by node", "by node, late"}
IN_TURNS = (
    *("rounded", "signs, two phases", "quantized", "votes"),
    *("sparse", "low rank", "lazy"),
    *("outer step", "elastic", "residual kept", "predicted"),
)
"""Codecs, those with residuals, and merges: within each line they see the same of models and scripts, so a
feature is trained with every third of them."""
LINEAR = {"synchronous", "rounded", "fused"}
GRADIENTS = {"synchronous", "rounded", "sparse", "momentum corrected", "signs, two phases", "quantized"}
GRADIENTS |= {"Adam's momentum", "low rank", "lazy", "votes", "delayed", "fused", "prioritized"}

ROUNDED = {"rounded": 3e-2, "by node, late": 5e-3}
"""The tolerance where what travels is rounded to bf16: the order of a sum then shows."""

REFUSED: dict[str, list[tuple[set[str], str]]] = {
    "thawed": [({*FAMILIES}, "first.weight was frozen when the session began and is trained now")],
    "re-assigned": [({"prioritized"}, "was changed after optimizer.step")],
    "sparse": [
        (GRADIENTS | BY_NODE | {"Adam's variance kept"}, "middle.rows.weight has sparse gradients, which")
    ],
    "accumulated, all synchronised": [
        (GRADIENTS - LINEAR - {"prioritized"} | {"Adam's variance kept"}, "a second backward in step "),
        ({"prioritized"}, "or add to it"),
    ],
    "used now and then": [({"delayed", "fused", "prioritized"}, "find_unused_parameters=True DDP ")],
    "scaled": [({"delayed", "fused", "prioritized"}, "train in bfloat16 without a scaler")],
    "clipped": [({"prioritized"}, "clip it")],
    "compiled inside": [({"prioritized"}, "is compiled")],
    "compiled outside": [({"prioritized"}, "is compiled")],
    "Adam": [({"momentum corrected"}, "attach 'lowbit', or with Adam or AdamW on DDP")],
    "rare rows": [({"momentum corrected"}, "attach 'lowbit', or with Adam or AdamW on DDP")],
}
"""Feature -> the families that refuse it, and what they say."""

KNOWN = {"steps_per_epoch": 3, "epochs": 2}


def train(feature: Feature, algorithm: str) -> tuple[Tensor, list[list[list[str]]]]:
    """What this rank has after its steps, and the lots of each of them."""
    net = feature.net()
    ddp = DDP(net, **{"bucket_cap_mb": feature.cap, **feature.ddp})
    forward = feature.around(ddp)
    optimizer = optimizer_of(feature, algorithm, net)
    first = [group["lr"] for group in optimizer.param_groups]
    data = torch.Generator().manual_seed(dist.get_rank())
    scaler = GradScaler("cpu", init_scale=2.0**10, enabled=feature.scaled)
    layouts = []
    session = tacit.attach(forward, optimizer, algorithm, scaler=scaler, **KNOWN)  # type: ignore[arg-type]
    try:
        for step in range(STEPS):
            rates(feature, optimizer, first, step)
            optimizer.zero_grad()
            session.observe(passes(feature, forward, ddp, data, scaler.scale))
            layouts.append([[slot.name for slot in bucket.slices] for bucket in session.session.buckets])
            if feature.clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), feature.clip)
            scaler.step(optimizer)
            scaler.update()
            feature.after(net, step)
        session.flush()  # steps that are put off are taken
        found = flat(net)
    except BaseException:
        session._leave()
        raise
    session.close()
    return found, layouts


def check(name: str, family: str, turn: int) -> None:
    """Right, or refused; who has the turn compares with the form in one process."""
    feature, algorithm = FEATURES[name], FAMILIES[family]
    for families, says in REFUSED.get(name, []):
        if family in families:
            with pytest.raises(tacit.AttachError, match=re.escape(says)):
                train(feature, algorithm)
            return
    found, layouts = train(feature, algorithm)
    peers, rank = dist.get_world_size(), dist.get_rank()
    everyone = [torch.empty_like(found) for _ in range(peers)] if rank == turn % peers else None
    dist.gather(found, everyone, dst=turn % peers)
    if everyone is None:
        return
    assert bool(found.isfinite().all())
    if family in LINEAR - {"rounded"} | {"prioritized"}:
        expected = loopback_training.trained(feature, "dense", peers // 2, 2, layouts, **KNOWN)
    else:
        expected = loopback_training.trained(feature, algorithm, peers // 2, 2, layouts, **KNOWN)
    start = flat(feature.net())
    for i, (theirs, ours) in enumerate(zip(everyone, expected, strict=True)):
        far = float((ours - start).abs().max())
        assert max(far, float((theirs - start).abs().max())) <= feature.most
        off = float((theirs - ours).abs().max())
        assert off <= max(feature.tolerance, ROUNDED.get(family, 0.0)) * far, (
            f"rank {i} is {off:.2g} off, where it moved by {far:.2g}"
        )


def wanted(name: str, family: str) -> bool:
    """Whether the feature runs with the family: in turns, but wherever it is refused."""
    if family not in IN_TURNS or any(family in families for families, _ in REFUSED.get(name, [])):
        return True
    return ([*FEATURES].index(name) + IN_TURNS.index(family)) % 3 == 0


def ddp_equals_dense(name: str) -> None:
    """Plain DDP, and the same exchange made by tacit, end alike."""
    feature = FEATURES[name]
    if any("synchronous" in families for families, _ in REFUSED.get(name, [])):
        return
    (plain, _), (ours, _) = train(feature, "ddp"), train(feature, "dense")
    far = float((plain - flat(feature.net())).abs().max())
    off = float((plain - ours).abs().max())
    assert off <= (feature.tolerance if feature.tolerance > 1e-2 else 1e-6) * far, (
        f"dense is {off:.2g} off DDP, of {far:.2g}"
    )


def main(families: list[str]) -> None:
    torch.set_num_threads(1)
    planner.SKIPPED, planner.SEEN = 1, 2  # the last steps go by the plan
    dist.init_process_group("gloo", timeout=LONGEST)
    turn = 0
    for name in FEATURES:
        wrong: dict[str, Any] = {}
        for family in filter(partial(wanted, name), families):
            turn += 1
            error = None
            try:
                ddp_equals_dense(name) if family == "ddp" else check(name, family, turn)
            except Exception:
                error = traceback.format_exc()
            all_: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(all_, error)
            first = next((each for each in all_ if each is not None), None)
            if first is not None:
                wrong[family] = first
        if dist.get_rank() == 0:
            print(json.dumps({"feature": name, "wrong": wrong}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1].split(";"))
