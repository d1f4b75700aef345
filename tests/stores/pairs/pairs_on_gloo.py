"""Ranks that average in pairs or groups: checks, or the text of an algorithm of which a rank is killed."""

import json
import logging
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from rank_training import (
    Checks,
    close_to,
    everywhere,
    flat,
    network,
    raises,
    same_on_all_ranks,
    sgd,
    steps,
    wrapped,
)
from torch import nn

import tacit
from tacit.errors import AttachError

CHECKS = Checks()
check = CHECKS.add


@check
def pairs_train_and_end_equal() -> None:
    for text, path in (
        ("adpsgd", "random pairs"),
        ("adpsgd:graph=ring,late=1", "random pairs"),
        ("adpsgd:sync_every=3,graph=exponential", "random pairs"),
        ("wagma:wait=false,group_size=4,global_every=4", "groups of a butterfly, all ranks every 4 rounds"),
    ):
        model = wrapped()
        optimizer = sgd(model)
        with tacit.attach(model, optimizer, text) as session:
            steps(model, optimizer, 10)
            assert not same_on_all_ranks(flat(model)), text
            session.sync()
            assert same_on_all_ranks(flat(model)), text
            steps(model, optimizer, 4, seed=1, micro=2)  # accumulated gradients are one step
            assert session.metrics()["steps"] == 14
            assert path in session.active_path
            assert session.footprint()["store"] == 4 * flat(model).numel()
            assert session.describe()
        assert same_on_all_ranks(flat(model)), text
        assert float((flat(model) - flat(network())).abs().max()) > 1e-3


@check
def one_step_and_a_meeting_is_the_mean_of_the_replicas() -> None:
    """The sum of the replicas stays whatever pairs are drawn, so their mean is that of steps alone."""
    model = wrapped()
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, "localsgd:sync_every=1"):
        steps(model, optimizer, 1)
    averaged = flat(model)
    model = wrapped()
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, "adpsgd"):
        steps(model, optimizer, 1)
    close_to(flat(model), averaged, 1e-6)


@check
def statistics_of_batchnorm_are_averaged_too() -> None:
    torch.manual_seed(0)
    model = wrapped(nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 5)))
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, "adpsgd") as session:
        steps(model, optimizer, 6)
        session.sync()
        found = model.module[1].running_var
        assert same_on_all_ranks(found)
        assert bool((found > 0).all())
        assert not torch.equal(found, torch.ones(30))


@check
def a_checkpoint_is_gone_on_from() -> None:
    model = wrapped()
    optimizer = sgd(model)
    session = tacit.attach(model, optimizer, "adpsgd")
    steps(model, optimizer, 5)
    session.sync()
    saved = session.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    at = flat(model)
    steps(model, optimizer, 5)
    model.load_state_dict(saved[1])
    session.load_state_dict(saved[0])
    close_to(flat(model), at, 0)
    assert session.session.step == 5
    steps(model, optimizer, 5)
    session.close()
    assert same_on_all_ranks(flat(model))


@check
def what_would_make_ranks_wait_or_be_wrong_is_refused() -> None:
    def refused(says: str, text: str = "adpsgd", model: nn.Module | None = None, **more: object) -> None:
        model = model or wrapped()
        raises(AttachError, lambda: tacit.attach(model, sgd(model), text, **more), says)

    refused("find_unused_parameters", model=wrapped(find_unused_parameters=True))
    refused("weight=2.0", weight=2.0)
    refused("nobody waits", scaler=torch.amp.GradScaler("cpu"))
    refused("servers=", servers=["127.0.0.1:1"])


@check
def groups_train_and_end_equal() -> None:
    for text in (
        "wagma:group_size=2,global_every=3",
        "prague:group_size=2",
        "wagma:late=1",
        "prague:group_size=4",
    ):
        model = wrapped()
        optimizer = sgd(model)
        with tacit.attach(model, optimizer, text):
            steps(model, optimizer, 5)
            if text != "prague:group_size=4":
                different = everywhere(flat(model))
                assert not all(torch.equal(different[0], each) for each in different), text
            else:
                assert same_on_all_ranks(flat(model))
        assert same_on_all_ranks(flat(model)), text


def a_rank_is_killed(text: str) -> None:
    """Rank 1 is killed after five steps; the others say what they saw, and how far they came."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tacit").addHandler(handler)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    model = wrapped()
    optimizer = sgd(model)
    found: dict[str, object] = {"kind": "", "says": ""}
    start = time.monotonic()
    try:
        with tacit.attach(model, optimizer, text, timeout=timedelta(seconds=8)) as session:
            steps(model, optimizer, 5)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            for seed in range(20 if "allow_lost" in text else 1000):
                steps(model, optimizer, 2, seed=seed)
                time.sleep(0.01)
    except Exception as error:
        found = {"kind": type(error).__name__, "says": str(error)}
    found |= {
        "steps": session.session.step,
        "sum": float(flat(model).double().sum()),
        "seconds": time.monotonic() - start,
        "log": said,
    }
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "checks":
        CHECKS.run()
    else:
        a_rank_is_killed(sys.argv[1])
