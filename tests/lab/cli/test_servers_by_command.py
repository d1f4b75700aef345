"""Servers by the command line: `tacit compare --servers`, `tacit run --servers`, and a server by hand."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path

import pytest

from forks import COMMAND, ran
from in_process_command import called
from tacit.errors import ConfigError
from tacit_lab import cli, records
from tacit_lab.cluster import Cluster

SERVED = ("run", "--algorithm", "ps", "--servers", "2")
APART = ("run", "--algorithm", "ps-async", "--servers", "1")


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
        (("compare", "--algorithms", "ps", "--servers", "-1"), "--servers -1 is not possible"),
        (
            ("compare", "--algorithms", "ps", "--servers", "1", "--cluster", "2x1+1"),
            "both have the number of servers",
        ),
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
def test_servers_that_cannot_be(
    words: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "three").mkdir()
    for number in range(3):
        (tmp_path / "three" / f"server{number}.pt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TACIT_ALGORITHM", raising=False)
    monkeypatch.setattr(sys, "argv", ["tacit", *words])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert says in " ".join(capsys.readouterr().err.split())


def test_compare_counts_what_servers_did(tmp_path: Path) -> None:
    words = ["compare", "digits", "--cluster", "local:2", "--servers", "2", "--algorithms", "ps-topk,ps-ssp"]
    done = called(*words, "--epochs", "1", "--out", "out", cwd=tmp_path)
    assert done.code == 0, done.err
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
    done = called(*words, "--epochs", "1", "--out", "out", cwd=tmp_path)
    assert done.code == 0, done.err
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
    done = ran("-u", COMMAND, "tacit", *words, "--", "train.py", cwd=tmp_path)
    assert done.code == 0, done.err
    told = json.loads(done.out.splitlines()[-1])
    assert told["status"] == "ok"
    assert told["ranks"][0]["sessions"][0]["metrics"]["push_bytes"] > 0
    assert [each["server"] for each in told["servers"]] == [0, 1]
    # Five steps of two workers, and what each pushes as it closes.
    assert all(each["pushes"] == 12 for each in told["servers"])


OWN = "from my_codecs import OneScale\n" + SCRIPT.replace(
    "tacit.from_env()",
    "tacit.Strategy(compressor=tacit.ErrorFeedback(OneScale()), topology=tacit.Star())",
)


def test_servers_read_a_compressor_that_lies_beside_the_script(tmp_path: Path) -> None:
    home = tmp_path / "elsewhere"
    home.mkdir()
    shutil.copy(Path(__file__).parents[2] / "stores" / "server" / "my_codecs.py", home)
    (home / "train.py").write_text(OWN)
    words = ["run", "--cluster", "local:2", "--servers", "1", "--json", "--out", "o"]
    own = ("--import", "my_codecs", "--", "elsewhere/train.py")
    done = ran("-u", COMMAND, "tacit", *words, *own, cwd=tmp_path)
    assert done.code == 0, done.err
    told = json.loads(done.out.splitlines()[-1])
    assert told["ranks"][0]["sessions"][0]["metrics"]["push_bytes"] > 0
    for name, says in (
        ("no_codecs", "--import 'no_codecs' is no module that Python finds in"),
        ("my codecs", "write for example --import my_codecs"),
    ):
        done = called(*words, "--import", name, "--", "elsewhere/train.py", cwd=tmp_path)
        assert done.code == 2
        assert says in " ".join(done.err.split())


def test_a_port_in_use_is_said_by_the_server(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ("-m", "tacit.stores.server", "--workers", "1", "--port", str(port))
        done = ran(*words, TACIT_SERVER_SECRET="a secret of the tests")
    assert done.code == 2
    assert f"port {port} of 127.0.0.1 cannot be opened, perhaps another server has it: give" in done.err
