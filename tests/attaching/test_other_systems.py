"""Training needs nothing that Linux alone has; an older torch is refused by a sentence."""

import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"

WITHOUT_LINUX = """
import os, socket, sys
import torch, torch.distributed as dist

for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None  # as on Windows
for name in ("MSG_DONTWAIT", "MSG_NOSIGNAL", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "AF_UNIX"):
    delattr(socket, name)
del os.sched_getaffinity
import tacit

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for algorithm in ("topk:ratio=0.1", "lowbit", "powersgd", "fusion", "gossip"):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(40, 40))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tacit.attach(model, optimizer, algorithm):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(3, 40)).square().mean().backward()
            optimizer.step()
dist.destroy_process_group()
"""


def test_training_needs_nothing_of_linux() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_LINUX], check=True, env={"PYTHONPATH": str(SOURCES)})


def test_an_older_torch_is_told_what_is_needed() -> None:
    older = "torch.__version__ = torch.torch_version.TorchVersion('2.8.1+cpu')"
    ran = subprocess.run(
        [sys.executable, "-c", f"import torch; {older}\nimport tacit; tacit.attach"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(SOURCES)},
    )
    needed = "tacit needs torch 2.9 or newer, and this is 2.8.1+cpu: pip install 'torch>=2.9'"
    assert ran.stderr.splitlines()[-1] == f"ImportError: {needed}"
