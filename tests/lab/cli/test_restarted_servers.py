"""What servers keep, and workers that come back, from the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from in_process_command import called

KEPT = """
import json, os, signal, sys, time, torch, torch.distributed as dist, tacit
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel as DDP

def kill_a_server():
    files = [Path(sys.argv[1], f"server{i}.pt") for i in range(2)]
    while not all(file.exists() for file in files):
        time.sleep(0.05)
    for process in Path("/proc").glob("[0-9]*"):
        if str(files[1]).encode() in (process / "cmdline").read_bytes().split(b"\\0"):
            os.kill(int(process.name), signal.SIGKILL)

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
total = lambda: sum(float(p.detach().double().sum()) for p in model.parameters())
with tacit.attach(model, optimizer, tacit.from_env()) as session:
    print(json.dumps({"began": total(), "rank": dist.get_rank()}), flush=True)
    for step in range(200 if "kill" in sys.argv else 5):
        if step == 5 and dist.get_rank() == 0 and "kill" in sys.argv:
            kill_a_server()
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.02)
print(json.dumps({"ended": total(), "rank": dist.get_rank()}), flush=True)
dist.destroy_process_group()
"""


def said(text: str, what: str) -> set[float]:
    told = [json.loads(line) for line in text.splitlines() if line.startswith('{"')]
    return {each[what] for each in told if what in each}


KEEPING = ["run", "--cluster", "local:2", "--servers", "2", "--algorithm", "ps-async", "--checkpoint", "kept"]


def test_after_a_server_was_killed_and_after_a_good_end_the_next_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KEPT)
    kept = tmp_path / "kept"
    words = [*KEEPING, "--checkpoint-every", "0.1"]
    killed, first, again = [
        called(*words, "--out", out, "--", "train.py", str(kept), *more, cwd=tmp_path)
        for out, *more in (("a", "kill"), ("b",), ("c",))
    ]
    assert killed.code != 0
    told = json.loads((tmp_path / "a" / "run.json").read_text())
    assert "parameter server 1 was killed by SIGKILL" in told["error"]
    assert "ServerLost: server 1 (127.0.0.1:" in killed.err
    assert "goes on from" not in killed.err
    assert (first.code, again.code) == (0, 0), first.err + again.err
    assert min(said(first.out, "began")) < max(said(killed.out, "began")) - 0.01, "some steps were kept"
    assert [file.name for file in sorted(kept.iterdir())] == ["server0.pt", "server1.pt"]
    for number in range(2):
        assert f"server {number} goes on from {kept / f'server{number}.pt'}" in again.err
    (end,), began = said(first.out, "ended"), said(again.out, "began")
    assert end in began, "the first of the workers gets what the servers have, the other perhaps more"
    assert said(again.out, "ended") != {end}


FALLS = """
import os, signal, sys, time, torch, torch.distributed as dist, tacit
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
me, life = int(os.environ["TACIT_WORKER"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = DDP(torch.nn.Linear(8, 4, bias=False), gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
(p,) = model.parameters()
torch.nn.init.zeros_(p)
with tacit.attach(model, optimizer, tacit.from_env()) as session:
    print(f"worker {me}, life {life}, begins at {float(p.max())}", flush=True)
    assert os.environ["TACIT_WORKERS"] == "3"
    for step in range(30):
        if (me, life, step) == (1, 0, 10) or (me == 1 and sys.argv[1] == "always" and step == 10):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(1, 8)).sum().backward()
        p.grad.fill_(-1.0)
        optimizer.step()
        time.sleep(0.05)
print(f"worker {me} ends at {float(p.max())}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.testbed
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("how", ["once", "always"])
def test_in_the_testbed_a_worker_that_dies_comes_back_while_others_go_on(tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(FALLS)
    words = ["run", "--cluster", "3x1", "--servers", "1", "--algorithm", "ps-async", "--restarts", "1"]
    done = called(*words, "--json", "--out", "o", "--", "train.py", how, cwd=tmp_path)
    told = json.loads(done.out.splitlines()[-1])
    assert "worker 1, life 1, begins at " in done.out
    assert "life 1, begins at 0.0" not in done.out, "it begins with fresh parameters"
    # A third for each push, and what the worker that came back had pushed before counts too.
    ends = {int(who): float(x) for who, x in re.findall(r"worker (\d) ends at (\S+)", done.out)}
    assert all((30 + 30 + 10) / 3 - 0.01 < x < (30 + 30 + 10 + 30) / 3 + 0.01 for x in ends.values()), ends
    if how == "once":
        assert done.code == 0, done.err
        assert ends[1] == pytest.approx((30 + 30 + 10 + 30) / 3, abs=0.01)
        assert [each["rank"] for each in told["ranks"]] == [0, 1, 2]
        assert told["mb_between_nodes"] > 0
    else:
        assert done.code == 128 + 9
        assert told["error"] == "train.py failed: rank 1 was killed by SIGKILL (node 1)"
        assert ends.keys() == {0, 2}
