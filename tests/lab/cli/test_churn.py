"""Replicas that are killed and frozen while they train, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from in_process_command import called
from tacit_lab import records
from tacit_lab.records import ChurnRecord, EndRecord, RunRecord
from tacit_lab.reports import compare, page

SCRIPT = """
import time, torch, torch.distributed as dist, tacit
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session = tacit.attach(model, optimizer, tacit.from_env(), MEMBERS)
began = time.monotonic()
while getattr(session, "step", 0) < 400 and time.monotonic() - began < LIMIT:
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
session.close()
"""


@pytest.mark.usefixtures("namespaces")
def test_a_recipe_is_trained_to_its_end_and_the_page_shows_what_happened(tmp_path: Path) -> None:
    words = ["compare", "digits", "--cluster", "3x1@1gbit", "--algorithms", "lowbit", "--epochs", "12"]
    undisturbed = called(*words, "--out", "a", "--timeout", "200", cwd=tmp_path)
    assert undisturbed.code == 0, undisturbed.err
    by_hub = ["--churn", "3s", "--servers", "1"]
    done = called(*words, *by_hub, "--out", "a", "--timeout", "300", cwd=tmp_path)
    assert done.code == 0, done.err
    found = [*records.read(tmp_path / "a" / "records.jsonl")]
    (churn,) = (each for each in found if isinstance(each, ChurnRecord))
    (end,) = (each for each in found if isinstance(each, EndRecord) and each.key == churn.key)
    (head,) = (each for each in found if isinstance(each, RunRecord) and each.key == churn.key)
    assert (head.churn, head.world_size, end.status, end.steps) == (3.0, 3, "ok", 360)
    assert end.accuracy is not None
    assert end.accuracy > 0.9
    assert end.mb_between_nodes is not None

    went = [(node, how) for _, node, how in churn.went]
    assert went[0][1] in ("killed", "frozen")
    assert {how for _, how in went} <= {"killed", "frozen", "back"}
    assert max(count for _, count in churn.members) == 3
    assert churn.rounds[-1][1] > 100
    assert churn.useful > 0  # and may be more than steps times replicas, as some are taken alone
    row = next(each for each in compare(found).rows if each.algorithm == "lowbit by a hub under churn")
    assert row.goodput is not None
    assert row.goodput > 0  # beside seconds of another run
    assert "goodput" in done.out
    drawn = page(found)
    assert "Replicas that come and go" in drawn
    assert "churn-members-0" in drawn


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("attaches", [True, False])
def test_a_script_is_told_if_it_has_no_members(tmp_path: Path, attaches: bool) -> None:
    members = "members=tacit.Members(silence=1.0)" if attaches else ""
    text = SCRIPT.replace("MEMBERS", members).replace("LIMIT", "300" if attaches else "1")
    (tmp_path / "train.py").write_text(text)
    run = ["run", "--cluster", "3x1", "--churn", "5s", "--algorithm", "lowbit", "--timeout", "300"]
    done = called(*run, "--out", "a", "--", "train.py", cwd=tmp_path)
    told = json.loads((tmp_path / "a" / "run.json").read_text())
    if attaches:
        assert done.code == 0, done.err
        assert "replicas that came and went: " in done.err
        assert told["churn"][0]["what"] in ("killed", "frozen")
        assert told["mb_between_nodes"] > 0
    else:
        assert done.code == 2
        assert "train.py attached no members, so each of its replicas trained alone" in told["error"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--churn", "0s"], "--churn '0s' must be a time above 0 with its unit"),
        (["--churn", "20"], "with its unit (ms, s, min, h), e.g. --churn 20s"),
        (["--churn", "20s", "--cluster", "2x2"], "use a cluster with one rank a node, such as 4x1"),
        (["--churn", "20s", "--cluster", "local:4"], "use a cluster with one rank a node, such as 4x1"),
        (["--churn", "20s", "--cluster", "1x1"], "use a cluster of 2 nodes or more"),
        (["--churn", "20s", "--algorithms", "ddp"], "'ddp' is not for members that come and go"),
        (["--churn", "20s", "--algorithms", "lowbit,auto"], "'auto' does not choose for members"),
        (["--churn", "20s", "--algorithms", "dgc"], "'dgc' takes the optimizer's momentum over"),
        (["--churn", "20s", "--algorithms", "lowbit,compute-only"], "leave it out"),
        (["--churn", "20s", "--replicas", "in-process"], "has no processes to kill: leave out --churn 20s"),
        (["--churn", "20s", "--tensorboard", "curves"], "draws curves of replicas that stay"),
        (["--churn", "20s", "--", "train.py"], "write tacit run --churn 20s -- train.py"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "train.py").touch()
    cluster = [] if "--cluster" in words else ["--cluster", "3x1"]
    algorithms = [] if "--algorithms" in words else ["--algorithms", "lowbit"]
    done = called("compare", *cluster, *algorithms, *words, cwd=tmp_path)
    assert done.code == 2
    assert message in " ".join(done.err.split())
    assert not (tmp_path / "tacit-out").exists()
