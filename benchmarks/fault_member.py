"""A member of `fault_members.py`: trains for as long as the campaign says, and writes what it ends with."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler

import tacit
from tacit.api.members import MemberSession

PACE = 0.02
SAMPLES, BATCH = 4096, 16


def train(store: str, algorithm: str, folder: str, reached: Any, last: Any) -> None:
    """Train as a member, in a process of its own.

    Args:
        reached: a shared number: the largest step that a member has reached.
        last: a shared number: the step after which all close.
    """
    me = Path(folder) / str(os.getpid())
    with me.with_suffix(".err").open("w", buffering=1) as file, contextlib.redirect_stderr(file):
        os.dup2(file.fileno(), 2)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        torch.manual_seed(os.getpid())  # so what is equal was taken from others
        network = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 4))
        model = DistributedDataParallel(network)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        members = tacit.Members(store=store, silence=2.0, patience=60.0)
        session = tacit.attach(model, optimizer, algorithm, members=members)
        assert isinstance(session, MemberSession)
        data = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(5))
        labels = data[:, :4].argmax(1)
        sampler = tacit.MemberSampler(data, session.members)
        first = float("nan")
        me.with_suffix(".begun").touch()
        while session.step < last.value:
            for batch in BatchSampler(sampler, BATCH, drop_last=False):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(data[batch]), labels[batch])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                first = float(loss.detach()) if first != first else first
                reached.value = max(reached.value, session.step)
                time.sleep(PACE)
                if session.step >= last.value:
                    break
        session.close()
        sums = [float(each.double().sum()) for each in network.state_dict().values()]
        end = {"sums": sums, "step": session.step, "members": session.metrics()["members"], "first": first}
        with torch.no_grad():
            end["loss"] = float(nn.functional.cross_entropy(network(data), labels))
        me.with_suffix(".json").write_text(json.dumps(end))
        dist.destroy_process_group()
