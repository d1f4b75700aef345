"""`tacit diagnose`: a script that knows nothing of tacit, and one that does."""

from pathlib import Path

import pytest

from forks import COMMAND, ran
from in_process_command import called
from tacit.planning.diagnosis import PARTS, Diagnosis

EXAMPLE = Path(__file__).parents[3] / "examples" / "01_ddp_topk.py"
PLAIN = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64), gradient_as_bucket_view=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
print("to the end")
dist.destroy_process_group()
"""


def test_a_script_that_knows_nothing_of_tacit(tmp_path: Path) -> None:
    script, saved = tmp_path / "plain.py", tmp_path / "diagnosis.json"
    script.write_text(PLAIN)
    done = called(
        "diagnose", "--cluster", "local:2", "--steps", "4", "--out", str(saved), "--", str(script), "50"
    )
    assert done.code == 0, done.err
    found = Diagnosis.from_json(saved.read_text())
    assert (found.algorithm, found.steps, found.ranks) == ("ddp", 4, 2)
    assert [*found.parts] == [*PARTS]
    assert "bucket views" in [each.kind for each in found.findings]
    assert "ddp on 2 ranks: a step takes" in done.out
    assert "to the end" not in done.err, "it ends behind the diagnosis"


def test_a_script_that_ends_before(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    done = called("diagnose", "--cluster", "local:2", "--", str(script), "3")
    assert done.code == 1
    assert "27 steps or more" in done.err
    assert "to the end" in done.err


@pytest.mark.parametrize(("steps", "code"), [(3, 1), (50, 0)])
def test_a_script_under_torchrun(steps: int, code: int, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    torchrun = ("torchrun", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
    words = ("-m", "tacit.diagnose", "--steps", "4", str(script), str(steps))
    done = ran("-u", COMMAND, *torchrun, *words)
    assert done.code == code, done.err
    early = "tacit.diagnose: there is no diagnosis, as the script has ended: it must train"
    assert (early in done.err) == bool(code)
    assert ("ddp on 2 ranks: a step takes" in done.err) == (not code)
    assert "not saved" not in done.err


def test_a_script_with_a_session_of_its_own() -> None:
    words = ("--algorithm", "powersgd", "--steps", "3", "--json", "--", str(EXAMPLE))
    done = called("diagnose", "--cluster", "local:2", *words)
    assert done.code == 0, done.err
    assert Diagnosis.from_json(done.out).algorithm == "powersgd"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "by one of the two"),
        (("--steps", "1", "--", "train.py"), "--steps 1"),
        (("--cluster", "4x1@fast", "--", "train.py"), "4x1@fast"),
        (("--out", "/nowhere/one.json", "--", "train.py"), "--out /nowhere/one.json"),
    ],
)
def test_what_cannot_be_is_refused(words: tuple[str, ...], said: str) -> None:
    done = called("diagnose", *words)
    assert done.code == 2
    assert said in done.err
