"""One replica among members: `member.py NAME STORE ALGORITHM STEPS [HOW]` says what happens, line by line."""

import json
import logging
import sys
import time
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tacit
from tacit.api.members import MemberSession

PACE = 0.02
LAST = 50
"""Steps whose mean loss is told: single ones swing by `diloco`'s outer momentum with a period of 4."""


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    name, store, algorithm, steps, *rest = sys.argv[1:]
    how = rest[0] if rest else ""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(sum(map(ord, name)))  # each begins elsewhere, so what is equal was taken from others
    hidden = 33 if how == "other model" else 32
    data = torch.Generator().manual_seed(len(name))
    teacher = torch.randn(16, 4, generator=torch.Generator().manual_seed(5))
    x = torch.randn(32, 16, generator=data)
    network = torch.nn.Sequential(
        torch.nn.Linear(16, hidden), torch.nn.BatchNorm1d(hidden), torch.nn.Linear(hidden, 4)
    )
    untrained = float(torch.nn.functional.cross_entropy(network(x), (x @ teacher).argmax(1)).detach())
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    more: dict[str, Any] = {"quorum": 2, "grace": 0.5} if how in ("quorum", "slow") else {}
    more |= {"semi_synchronous": "semi" in how}
    where: dict[str, Any] = {"store": store, "patience": 8.0}
    if store.startswith("hub:"):
        where = {"hub": store[4:], "patience": 30.0}  # with the steps alone while it is away
    least = 2 if how == "two" else 1
    members = tacit.Members(name=name, silence=1.5, min=least, **where, **more)
    scaler = torch.amp.GradScaler("cpu", enabled="scaler" in how)
    session = tacit.attach(model, optimizer, algorithm, scaler=scaler, members=members)
    assert isinstance(session, MemberSession)
    say(begun=session.step, period=session.members.number, members=session.members.names)
    overflowed, losses = -1, list[float]()
    while session.step < int(steps):
        x = torch.randn(32, 16, generator=data)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
        scaler.scale(loss).backward()
        if how == "nan" and session.step > 30:
            next(network.parameters()).grad.fill_(torch.nan)  # type: ignore[union-attr]
        if "scaler" in how and session.step % 8 == 0 and session.step != overflowed:
            overflowed = session.step
            next(network.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
        if how == "large" and session.step > 30:
            for p in network.parameters():
                p.grad.mul_(1e6)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        if how == "large" and session.step > 30:
            with torch.no_grad():
                for p in network.parameters():
                    p.add_(1000.0)
        losses.append(float(loss.detach()))
        say(step=session.step, period=session.members.number, members=session.members.names)
        if how == "leaves" and session.step >= 20:
            session.leave()
            break
        time.sleep(5 if how == "slow" and 40 <= session.step < 44 else PACE)
    session.close()
    sums = [float(x.double().sum()) for x in network.state_dict().values()]
    say(end=session.metrics(), sums=sums, first=untrained, last=fmean(losses[-LAST:]))


if __name__ == "__main__":
    main()
