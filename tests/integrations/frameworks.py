"""Ranks that are forked from a process which has imported the frameworks, as that takes seconds."""

import ctypes
import gc
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pages import ROOT, blocks
from rank_training import Checks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import tacit
from rank_processes import Ended, Processes, store_of_a_launcher

HERE = Path(__file__).resolve().parent
PAGE = ROOT / "docs" / "frameworks.md"
WORLD = 2
SHARDED = "fsdp_checks.py"
"""The script that has two nodes of two ranks."""
LAUNCHER = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RUN_ID": "tests"}
STEPS = 8
"""Of the optimizer, in each run."""
PR_SET_PDEATHSIG = 1


def launched(script: str, *names: str) -> list[Ended]:
    """Run a script of this folder, which calls `run`: how its ranks have ended, and itself."""
    store, ranks = store_of_a_launcher(), range(2 * WORLD if script == SHARDED else WORLD)
    with tempfile.TemporaryDirectory() as folder, Processes() as processes:
        env = LAUNCHER | {"MASTER_PORT": store.port, "PYTHONWARNINGS": ""}
        process = processes.start(str(HERE / script), folder, *names, **env)
        launcher_text = processes.ended(process, 280).text
        texts = [*(_read(Path(folder) / f"{rank}.txt") for rank in ranks), launcher_text]
    codes = [-1 if "exit code 0" not in each.splitlines()[-1:] else 0 for each in texts]
    return [Ended(code, _said(each), each) for code, each in zip(codes, texts, strict=True)]


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _said(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"check"')]


def run(checks: Checks, alone: Checks, nodes: int = 1) -> None:
    """Fork the ranks, which run `checks`; and run those for one process in this one."""
    folder, *names = sys.argv[1:]
    os.chdir(folder)  # frameworks make folders where they are
    gc.freeze()  # Accelerate has everything collected at each end of a training: a quarter of the time
    ranks = range(nodes * WORLD)
    children = [_forked(rank, len(ranks), Path(folder), checks, names) for rank in ranks]
    for child in children:
        os.waitpid(child, 0)
    for name in (*LAUNCHER, "MASTER_PORT"):
        del os.environ[name]
    for name in alone:
        if not names or name in names:
            print(json.dumps({"check": name, "error": _error(alone[name])}), flush=True)
    print("exit code 0", flush=True)


def _error(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return None


def _forked(rank: int, world: int, folder: Path, checks: Checks, names: Sequence[str]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody else would end it
    try:
        with open(folder / f"{rank}.txt", "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        node, local = divmod(rank, WORLD)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(node)}
        os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(WORLD)}
        checks.run([name for name in checks if not names or name in names])
        code = 0
    except BaseException:
        traceback.print_exc()
    print(f"exit code {code}", flush=True)
    os._exit(code)


def run_page(word: str, old: str = "", new: str = "") -> None:
    """Run the block of the page about frameworks that has this word, on all ranks in one new folder.

    `old`, `new`: what a reader changes in it.
    """
    (block,) = (each.text for each in blocks(PAGE) if each.language == "python" and word in each.text)
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder, 0)
        os.chdir(folder[0])
        try:
            assert old in block
            text = block.replace(old, new)
            exec(compile(text, f"{PAGE.name}: {word}", "exec"), {"__name__": "__main__"})
            dist.barrier()
        finally:
            os.chdir(before)


# ---- what is trained ----------------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 40), nn.ReLU(), nn.BatchNorm1d(40), nn.Linear(40, 40), nn.Linear(40, 5)
    )


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Of this rank's own."""
    data = torch.Generator().manual_seed(dist.get_rank())
    return [
        (torch.randn(8, 20, generator=data), torch.randint(0, 5, (8,), generator=data)) for _ in range(count)
    ]


def optimizer_of(algorithm: str, net: nn.Module) -> torch.optim.Optimizer:
    """DGC takes SGD's momentum; others have an optimizer whose state differs by replica."""
    if algorithm.startswith("dgc"):
        return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(net.parameters(), lr=0.01)


GRADIENT, PROGRESS = "dgc:ratio=0.1", "diloco:sync_every=3,bits=4"
EXACT = "topk:ratio=0.1"


def plain_losses(
    algorithm: str,
    net: nn.Module,
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor],
    autocast: AbstractContextManager[object],
    micro: int,
    clip: float | None,
) -> Tensor:
    """Train `net` with `tacit.attach` in a loop of its own: the losses of all passes, `micro` to a step."""
    model, losses = DistributedDataParallel(net), []
    optimizer = optimizer_of(algorithm, net)
    with tacit.attach(model, optimizer, algorithm):
        for i, (x, y) in enumerate(batches(STEPS * micro)):
            last = i % micro == micro - 1
            with nullcontext() if last else model.no_sync():
                with autocast:
                    loss = loss_of(model, x, y)
                (loss / micro).backward()
            losses.append(loss.detach())
            if last:
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return torch.stack(losses)


def accelerated_loop(
    with_it: Any,
    net: nn.Module,
    optimizer: Optimizer,
    algorithm: str,
    micro: int,
    clip: float | None,
    save: Path | None,
    load: Path | None,
) -> tuple[Tensor, nn.Module]:
    """Train by an `Accelerator`: the losses of all passes, and the model that it has prepared.

    Args:
        save: where the state is saved after the fourth pass; `load`: what such a run goes on from.
    """
    from tacit.integrations import accelerate  # pytest imports this module, and need not import that one

    model, prepared = with_it.prepare(net, optimizer)
    losses = []
    with accelerate.attach(with_it, model, prepared, algorithm):
        if load is not None:
            with_it.load_state(load)
        for i, (x, y) in enumerate(batches(STEPS * micro)):
            if load is not None and i < 4:
                continue
            with with_it.accumulate(model):
                loss = model(x, y)["loss"]
                with_it.backward(loss)
                if clip is not None and with_it.sync_gradients:
                    with_it.clip_grad_norm_(model.parameters(), clip)
                prepared.step()
                prepared.zero_grad()
            losses.append(loss.detach())
            if i == 3 and save is not None:
                with_it.save_state(save)
    return torch.stack(losses), model
