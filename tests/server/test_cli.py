"""Servers by the command line: `tacit compare --servers`, `tacit run --servers`, and a server by hand."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tacit import records
from tacit.cluster import Cluster
from tacit.errors import ConfigError

TACIT = [sys.executable, "-m", "tacit.cli"]
SERVED = ("run", "--algorithm", "ps", "--servers", "2")
APART = ("run", "--algorithm", "ps-async", "--servers", "1")


def tacit(*words: str, cwd: Path, seconds: float = 500) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TACIT, *words], capture_output=True, text=True, timeout=seconds, cwd=cwd, env=os.environ | {}
    )


def test_a_cluster_with_servers_is_written_as_it_is_read() -> None:
    for text in ("4x1+2@100mbit", "local:3+1", "2x2+1"):
        assert str(Cluster.parse(text)) == text
    assert Cluster.parse("4x1+2@100mbit").servers == 2
    assert Cluster.parse("4x1+2").places == 6
    assert Cluster.parse("4x1").servers == 0
    with pytest.raises(ConfigError, match="cannot have -1 servers"):
        Cluster(1, 1, servers=-1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("compare", "--algorithms", "ps"),
            "ps needs a parameter server, and there is none",
        ),
        (("compare", "--algorithms", "ps", "--servers", "0"), "write --servers 1"),
        (("compare", "--algorithms", "ddp", "--servers", "1"), "1 servers would do nothing"),
        (("compare", "--algorithms", "ps", "--servers", "-1"), "--servers -1 cannot be"),
        (("compare", "--algorithms", "ps", "--servers", "1", "--cluster", "2x1+1"), "both say how many"),
        (("run", "--algorithm", "ps", "--", "train.py"), "write --servers 1"),
        (("run", "--algorithm", "ddp", "--servers", "1", "--", "train.py"), "would do nothing with"),
        (("run", "--checkpoint", "kept", "--", "train.py"), "--checkpoint kept is for parameter servers"),
        ((*SERVED, "--restarts", "1", "--", "train.py"), "those of ps do not: write --algorithm ps-async"),
        ((*APART, "--restarts", "-1", "--cluster", "2x1", "--", "train.py"), "must be 0 or more"),
        ((*APART, "--restarts", "1", "--cluster", "2x2", "--", "train.py"), "write --cluster 4x1"),
        ((*SERVED, "--checkpoint-every", "0", "--", "train.py"), "--checkpoint-every 0.0 must be more than"),
        ((*SERVED, "--checkpoint", "train.py", "--", "train.py"), "cannot write to --checkpoint train.py"),
        ((*SERVED, "--checkpoint", "three", "--", "train.py"), "holds server0.pt, server1.pt, server2.pt"),
    ],
)
def test_servers_that_cannot_be(words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "three").mkdir()
    for number in range(3):
        (tmp_path / "three" / f"server{number}.pt").touch()
    done = tacit(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())


def test_compare_counts_what_servers_did(tmp_path: Path) -> None:
    words = ["compare", "digits", "--cluster", "local:2", "--servers", "2", "--algorithms", "ps-topk,ps-ssp"]
    done = tacit(*words, "--epochs", "1", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ends = {
        each.algorithm: each
        for each in records.read(tmp_path / "out" / "records.jsonl")
        if isinstance(each, records.EndRecord)
    }
    for name in ("ps-topk", "ps-ssp"):
        served = ends[name].metrics["servers"]
        assert [each["server"] for each in served] == [0, 1]
        assert all(
            each["pushes"] > 0 and each["push_bytes"] > 0 and each["pull_bytes"] > 0 for each in served
        )
        assert sum(served[0]["stale"].values()) == served[0]["pushes"]
    assert ends["ps-topk"].metrics["push_bytes"] < 0.1 * ends["ps-ssp"].metrics["push_bytes"]
    assert (ends["ps-ssp"].accuracy or 0) > 0.8
    if (tmp_path / "out" / "report.html").exists():
        assert "Parameter servers" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.testbed
@pytest.mark.usefixtures("namespaces")
def test_in_the_testbed_a_server_has_a_link_of_its_own_whose_bytes_count(tmp_path: Path) -> None:
    words = ["compare", "digits", "--cluster", "2x1@1gbit", "--servers", "1", "--algorithms", "ps"]
    done = tacit(*words, "--epochs", "1", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (end,) = [
        each
        for each in records.read(tmp_path / "out" / "records.jsonl")
        if isinstance(each, records.EndRecord) and each.algorithm == "ps"
    ]
    (served,) = end.metrics["servers"]
    through = (served["push_bytes"] + served["pull_bytes"]) / 1e6
    assert end.mb_between_nodes is not None
    assert through < end.mb_between_nodes < 1.08 * through


SCRIPT = """
import torch, torch.distributed as dist, tacit
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with tacit.attach(model, optimizer, tacit.from_env()) as session:
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
dist.destroy_process_group()
"""


def test_a_script_runs_unchanged_with_servers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [
        "run",
        "--cluster",
        "local:2",
        "--servers",
        "2",
        "--algorithm",
        "ps-async",
        "--json",
        "--out",
        "o",
    ]
    done = tacit(*words, "--", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["status"] == "ok"
    assert told["ranks"][0]["sessions"][0]["metrics"]["push_bytes"] > 0
    assert [each["server"] for each in told["servers"]] == [0, 1]
    # Five steps of two workers, and what each pushes as it closes.
    assert all(each["pushes"] == 12 for each in told["servers"])


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


def test_a_run_goes_on_from_the_servers_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KEPT)
    kept = tmp_path / "kept"
    first, again = [
        tacit(*KEEPING, "--out", out, "--", "train.py", str(kept), cwd=tmp_path) for out in ("a", "b")
    ]
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert [file.name for file in sorted(kept.iterdir())] == ["server0.pt", "server1.pt"]
    assert "goes on from" not in first.stderr
    for number in range(2):
        assert f"server {number} goes on from {kept / f'server{number}.pt'}" in again.stderr
    (end,), began = said(first.stdout, "ended"), said(again.stdout, "began")
    assert end in began, "the first of the workers gets what the servers have, the other perhaps more"
    assert said(again.stdout, "ended") != {end}


def test_a_server_that_is_killed_is_named_and_the_next_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KEPT)
    kept = tmp_path / "kept"
    words = [*KEEPING, "--checkpoint-every", "0.1"]
    killed = tacit(*words, "--out", "a", "--", "train.py", str(kept), "kill", cwd=tmp_path)
    assert killed.returncode != 0
    told = json.loads((tmp_path / "a" / "run.json").read_text())
    assert "parameter server 1 was killed by SIGKILL" in told["error"]
    assert killed.stderr.count("ServerLost: server 1 (127.0.0.1:") >= 2, killed.stderr
    again = tacit(*words, "--out", "b", "--", "train.py", str(kept), cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert min(said(again.stdout, "began")) < max(said(killed.stdout, "began")) - 0.01, "some steps were kept"


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
    done = tacit(*words, "--json", "--out", "o", "--", "train.py", how, cwd=tmp_path)
    told = json.loads(done.stdout.splitlines()[-1])
    assert "worker 1, life 1, begins at " in done.stdout
    assert "life 1, begins at 0.0" not in done.stdout, "it begins with fresh parameters"
    # A third for each push, and what the worker that came back had pushed before counts too.
    ends = {int(who): float(x) for who, x in re.findall(r"worker (\d) ends at (\S+)", done.stdout)}
    assert all((30 + 30 + 10) / 3 - 0.01 < x < (30 + 30 + 10 + 30) / 3 + 0.01 for x in ends.values()), ends
    if how == "once":
        assert done.returncode == 0, done.stderr
        assert ends[1] == pytest.approx((30 + 30 + 10 + 30) / 3, abs=0.01)
        assert [each["rank"] for each in told["ranks"]] == [0, 1, 2]
        assert told["mb_between_nodes"] > 0
    else:
        assert done.returncode == 128 + 9
        assert told["error"] == "train.py failed: rank 1 was killed by SIGKILL (node 1)"
        assert ends.keys() == {0, 2}


def test_a_port_in_use_is_said_by_the_server(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "tacit.server", "--workers", "1", "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert done.returncode == 2
    assert f"port {port} cannot be opened, perhaps another server has it: give another --port" in done.stderr
