"""`tacit run`: users' scripts, good and bad, as they are typed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from in_process_command import called
from tacit.algorithms import parse
from tacit.errors import ConfigError
from tacit.planning.profile import ParamReady, Profile, StepProfile
from tacit.planning.simulation.rehearsal import rehearse
from tacit.reporting import run_report
from tacit_lab import cli
from tacit_lab.cli.run.options import RunOptions, check
from tacit_lab.cli.run.result import MEANINGS, summarize
from tacit_lab.cluster import Cluster
from tacit_lab.testbed import Result

TACIT = [sys.executable, "-m", "tacit_lab", "run"]

# The scripts attach bf16 where any algorithm will do: others load compiled kernels.
# Torch aborts a process now and then that exits while a thread of Gloo still lets go of the last collective's
# tensors, whatever the exit code was to be: an exit handler gives it the time.
TRAIN = """
import atexit, sys, time, torch, torch.distributed as dist, tacit
from torch import nn
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
dist.init_process_group("gloo")
atexit.register(time.sleep, 0.5)
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(100, 100))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad(); model(torch.randn(4, 100)).square().mean().backward(); optimizer.step()
"""


class Ran:
    """A script that was run: what the command said and kept."""

    def __init__(
        self,
        folder: Path,
        text: str,
        *options: str,
        arguments: tuple[str, ...] = (),
        fresh: Collection[int] = (),
    ) -> None:
        script, out = folder / "train.py", folder / "out"
        script.write_text(text)
        where = () if "--cluster" in options else ("--cluster", "local:2")
        words = (*where, *options, "--out", str(out), "--", str(script), *arguments)
        done = called("run", *words, fresh=fresh)
        self.code, self.out, self.err = done.code, done.out, done.err
        self.kept: dict[str, Any] = json.loads((out / "run.json").read_text())
        assert left_behind(script) == []
        assert self.kept["exit_code"] == self.code


def left_behind(script: Path) -> list[str]:
    """The command lines of processes that still run this script."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            words = (process / "cmdline").read_bytes().split(b"\0") if process.name.isdigit() else []
        except OSError:
            continue
        if str(script).encode() in words:
            found.append(b" ".join(words).decode())
    return found


# ---- what cannot be -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no script was given: write for example tacit run"),
        (["--"], "no script was given"),
        (["--", "nope.py"], "there is no script 'nope.py'"),
        (["--", "."], "there is no script '.'"),
        (["--", "--lr", "0.1"], "'--lr' is in the place of the script"),
        (["--", "-m"], "no module was given after -m"),
        (["--", "-m", "nope.train"], "there is no module 'nope.train'"),
        (["--", "half.py"], "half.py is no Python program, line 2: '(' was never closed"),
        (["--", "null.py"], "null.py "),
        (["--algorithm", "topc", "--", __file__], "unknown algorithm 'topc'. Did you mean 'topk'"),
        (["--algorithm", "topk:ratio=2", "--", __file__], "ratio"),
        (["--cluster", "2x", "--", __file__], "'2x'"),
        (["--timeout", "0", "--", __file__], "--timeout 0.0 must be more than 0"),
        (["--timeout", "nan", "--", __file__], "--timeout nan must be more than 0"),
        (["--lr", "0.1", "--", __file__], "No such option: --lr"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_built(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "half.py").write_text("import tacit\ntrain(")
    (tmp_path / "null.py").write_bytes(b"\0")
    monkeypatch.setattr("tacit_lab.cli.run.command._run", None)  # calling it would be another error
    monkeypatch.setattr(sys, "argv", ["tacit", "run", "--out", str(tmp_path / "out"), *words])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_an_algorithm_in_the_environment_is_not_silently_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {"script": [__file__], "cluster": "local:2", "timeout": None}
    monkeypatch.setenv("TACIT_ALGORITHM", "bf16")
    with pytest.raises(ConfigError, match=r"TACIT_ALGORITHM=bf16 is set.* --algorithm bf16, or unset it"):
        check(**words, algorithm=None, out=tmp_path / "a")
    assert check(**words, algorithm="topk", out=tmp_path / "b").algorithm == "topk"
    monkeypatch.setenv("TACIT_ALGORITHM", "ddp")
    assert check(**words, algorithm=None, out=tmp_path / "c").algorithm == "ddp"


def test_a_folder_of_another_run_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json").write_text("{}")
    for out, message in ((tmp_path, "another run"), (tmp_path / "run.json", "cannot write")):
        monkeypatch.setattr(sys, "argv", ["tacit", "run", "--out", str(out), "--", __file__])
        with pytest.raises(SystemExit, match="2"):
            cli.main()
        assert message in capsys.readouterr().err
    assert (tmp_path / "run.json").read_text() == "{}"


# ---- good scripts -------------------------------------------------------------------------------------


def test_a_script_that_attaches_and_never_closes(
    tmp_path: Path, read_curves: Callable[[Path], dict[str, list[tuple[int, float]]]]
) -> None:
    script = """
session = tacit.attach(model, optimizer, tacit.from_env())
train(6)
print(f"rank {rank} says", *sys.argv[1:])
print("to stderr", file=sys.stderr)
"""
    words = ("--algorithm", "topk:ratio=0.1", "--tensorboard", str(tmp_path / "curves"), "--json")
    ran = Ran(tmp_path, TRAIN + script, *words, arguments=("--lr", "0.1", "--json"), fresh=(0,))
    assert ran.code == 0, ran.err
    *printed, last = ran.out.splitlines()
    assert sorted(printed) == ["rank 0 says --lr 0.1 --json", "rank 1 says --lr 0.1 --json"]
    assert ran.err.count("to stderr\n") == 2
    assert json.loads(last) == ran.kept
    assert (ran.kept["status"], ran.kept["algorithm"]) == ("ok", "topk:ratio=0.1")
    assert ran.kept["attached"] == ["topk:ratio=0.1"]
    sessions = [session for rank in ran.kept["ranks"] for session in rank["sessions"]]
    assert [(each["closed"], each["metrics"]["rounds"]) for each in sessions] == [(True, 6)] * 2
    sent = [each["metrics"]["bytes_out"] + each["metrics"]["closing_bytes_out"] for each in sessions]
    assert ran.kept["mb_by_formulas"] == sum(sent) / 1e6 > 0
    closing = sum(each["metrics"]["closing_bytes_out"] for each in sessions) / 1e6
    assert ran.kept["mb_in_closing"] == closing
    assert f"summed: in rounds {ran.kept['mb_by_formulas'] - closing:.2f}, closing {closing:.2f}" in ran.err
    shares = [each["metrics"]["compute_share"] for each in sessions]
    assert ran.kept["compute_share"] == pytest.approx(sum(shares) / 2)
    assert ran.kept["mb_between_nodes"] is None
    for name in MEANINGS:
        assert f"  {name} " in ran.err
    assert read_curves(tmp_path / "curves" / "topk:ratio=0.1")["tacit/rounds"][-1] == (6, 6.0)


@pytest.mark.usefixtures("namespaces")
def test_a_script_without_tacit_and_the_bytes_between_its_nodes(tmp_path: Path) -> None:
    script = """
import os, sys, torch, torch.distributed as dist
print(os.environ["TACIT_ALGORITHM"])
dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(1_000_000))
dist.destroy_process_group()
assert "tacit" not in sys.modules or os.environ["RANK"] == "1", "rank 1 is a fork of the tests"
"""
    ran = Ran(tmp_path, script, "--cluster", "2x1@1gbit", fresh=(0,))
    assert ran.code == 0, ran.err
    assert ran.out == "ddp\nddp\n"
    payload = 2 * 3 * 4.0  # two nodes, three times, 4 MB each
    assert payload <= ran.kept["mb_between_nodes"] <= 1.08 * payload
    (none, there), (back, nothing) = ran.kept["traffic"]
    assert (none, nothing) == (0, 0)
    assert there + back == pytest.approx(1e6 * ran.kept["mb_between_nodes"], rel=0.05)
    assert "  MB from each node (row) to each other (column):\n" in ran.err
    assert f"    0         {0:6.1f}{there / 1e6:6.1f}\n" in ran.err
    assert ran.kept["ranks"] == []
    assert ran.kept["compute_share"] is ran.kept["mb_by_formulas"] is None


COUNTED = ("dense", "int8", "topk:ratio=0.05", "topk:ratio=0.5", "efsign", "powersgd", "lowbit")
"""Every collective, in messages of 1 to 100 kB."""


@pytest.mark.usefixtures("namespaces")
def test_what_crosses_between_nodes_of_two_ranks_is_what_the_planner_counts(tmp_path: Path) -> None:
    """By the interfaces: the formulas of `metrics()` do not say on which link a byte goes."""
    script = """
import json, os
from tacit_lab.testbed.network.counters import transmitted
model = DistributedDataParallel(nn.Linear(400, 250, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad(); model(torch.randn(4, 400)).square().mean().backward(); optimizer.step()
def sent():
    dist.barrier()
    time.sleep(0.05)
    now = transmitted(os.environ["TACIT_INTERFACE"])
    dist.barrier()
    return now
for algorithm in json.loads(sys.argv[1]):
    with tacit.attach(model, optimizer, algorithm):
        train(4)
        before = sent()
        train(8)
        now = sent()
    if rank in (0, 2):
        print(json.dumps([algorithm, rank, now - before]))
"""
    words = ("--cluster", "2x2@1gbit")
    ran = Ran(tmp_path, TRAIN + script, *words, arguments=(json.dumps(COUNTED),))
    assert ran.code == 0, ran.err
    found = [json.loads(line) for line in ran.out.splitlines()]
    for algorithm in COUNTED:
        expected = crossing(algorithm, (250, 400))
        mine = [sent / 8 for name, _, sent in found if name == algorithm]
        assert len(mine) == 2
        for sent in mine:  # with headers, acknowledgements, and what ranks tell each other beside
            assert expected <= sent <= 1.05 * expected + 12_000, algorithm


def crossing(algorithm: str, shape: tuple[int, int]) -> int:
    """Bytes that leave a node of two in a step of a model of one matrix, by the planner."""
    parameter = ParamReady("module.weight", shape, "float32", 0.0)
    profile = Profile(StepProfile(0, 0, 1, 0, (parameter,)), 25 << 20, 1, 1, 4, 0, 0, 0, 0)
    (level,) = rehearse(parse(algorithm), profile, 2, 2)
    return sum(each.crossing for bucket in level.buckets for each in bucket.messages)


# ---- an algorithm without effect ----------------------------------------------------------------------


def test_a_script_that_never_calls_tacit_is_told_the_two_lines(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "print('done')", "--algorithm", "topk")
    assert ran.code == 2
    assert ran.out == "done\ndone\n"
    assert "never called tacit, so --algorithm topk had no effect" in ran.err
    assert "    import tacit\n    with tacit.attach(model, optimizer, tacit.from_env()):" in ran.err
    assert ran.kept["status"] == "failed"


def test_a_script_that_reads_the_algorithm_and_attaches_nothing_is_told_too(tmp_path: Path) -> None:
    words = ("--algorithm", "topk", "--cluster", "local:1")
    ran = Ran(tmp_path, "import tacit\ntacit.from_env()\n", *words)
    assert (ran.code, ran.kept["status"]) == (2, "failed")
    assert "train.py attached nothing, so --algorithm topk had no effect. Write in it:" in ran.err


@pytest.mark.parametrize(
    ("called", "attached", "error"),
    [
        (["from_env"], [], "attached nothing"),
        (["from_env", "attach"], [], None),  # left by os._exit, so without numbers
        (["from_env", "attach"], ["custom"], None),
        (["from_env", "attach"], ["topk"], None),
        (["attach"], ["topk"], None),
        (["attach"], ["bf16"], "attached bf16 instead"),
        (["attach"], [], "attached nothing"),
        ([], [], "never called tacit"),
    ],
)
def test_another_algorithm_than_asked_for_is_no_success(
    called: list[str], attached: list[str], error: str | None, tmp_path: Path
) -> None:
    asked = RunOptions(
        script=("train.py",),
        cluster=Cluster.parse("local:1"),
        strategy=parse("topk"),
        timeout=None,
        folder=tmp_path,
    )
    numbers = {"rounds": 0, "bytes_out": 0, "compute_share": 1.0}
    sessions = [{"strategy": name, "closed": True, "metrics": numbers} for name in attached]
    asked.footprint.mkdir()
    (asked.footprint / "rank0.json").write_text(
        json.dumps({"rank": 0, "called": called, "sessions": sessions})
    )
    came = summarize(asked, Result(0, (), timed_out=False, seconds=1.0))
    assert (came.exit_code, came.status) == ((2, "failed") if error else (0, "ok"))
    assert (error or "") in (came.error or "")
    assert came.compute_share is None  # no round was counted: 1.0 would be a claim


def test_curves_that_nobody_draws_are_no_success(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "print('done')", "--tensorboard", str(tmp_path / "curves"))
    assert ran.code == 2
    assert "train.py attached nothing, so --tensorboard had no effect" in ran.err


def test_a_profile_adds_up(tmp_path: Path) -> None:
    text = (
        TRAIN
        + "with tacit.attach(model, optimizer, tacit.from_env()): train(12)\ndist.destroy_process_group()"
    )
    ran = Ran(tmp_path, text, "--algorithm", "bf16", "--profile")
    assert ran.code == 0, ran.err
    profile = ran.kept["profile"]
    assert (profile["ranks"], profile["steps"], profile["first"]) == (2, 6, 7)
    assert sum(row["ms"] for row in profile["rows"]) == pytest.approx(profile["cpu_ms"])
    stages = {row["stage"] for row in profile["rows"] if row["thread"] == "main"}
    assert {"forward", "backward", "optimizer", "DDP's hook"} <= stages
    assert "Processor time in ms a rank and step (mean of 2 ranks, steps 7 to 12)" in ran.err
    assert "thread                    stage" in ran.err


def test_a_profile_of_nothing_is_no_success(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "print('done')", "--profile")
    assert ran.code == 2
    assert "train.py wrote no profile, so --profile had no effect: have an optimizer" in ran.err
    assert ran.kept["profile"] is None


def test_plain_ddp_needs_nothing_attached(tmp_path: Path) -> None:
    asked = check(script=[__file__], cluster="local:1", algorithm="ddp", timeout=None, out=tmp_path / "out")
    (asked.footprint / "rank0.json").write_text('{"rank": 0, "called": ["from_env"], "sessions": []}')
    came = summarize(asked, Result(0, (), timed_out=False, seconds=1.0))
    assert (came.exit_code, came.error) == (0, None)


# ---- bad scripts --------------------------------------------------------------------------------------


def test_attaching_twice_shows_the_error(tmp_path: Path) -> None:
    script = """
tacit.attach(model, optimizer, "bf16")
tacit.attach(model, optimizer, "bf16")
"""
    ran = Ran(tmp_path, TRAIN + script, "--algorithm", "bf16")
    assert ran.code == 1
    error = "tacit.errors.AttachError: 'bf16' is attached to this model already: close it first"
    assert ran.err.count(error) == 1
    lines = [line for line in ran.err.splitlines() if line]
    assert lines[0].endswith("train.py failed: ranks 0 and 1 ended with exit code 1")
    assert lines[1].endswith('train.py", line 16, in <module>')
    assert lines[lines.index(error) + 1] == "Whole tracebacks: errors/rank0.txt, errors/rank1.txt"
    assert len(lines) <= 12
    for rank in (0, 1):
        whole = (tmp_path / "out" / "errors" / f"rank{rank}.txt").read_text()
        assert whole.startswith("Traceback (most recent call last):")
        assert whole.endswith(error + "\n")


def test_a_text_that_is_no_algorithm_is_named_with_its_variable(tmp_path: Path) -> None:
    script = """
import os, tacit
os.environ["MY_ALGORITHM"] = "topk:ratoi=0.1"
tacit.from_env("MY_ALGORITHM")
"""
    ran = Ran(tmp_path, script, "--cluster", "local:1")
    assert ran.code == 1
    summary = ran.err[ran.err.index("\ntacit: ") :]
    assert "ConfigError: environment variable MY_ALGORITHM='topk:ratoi=0.1': unknown parameter" in summary
    assert "Did you mean 'ratio'" in summary


IN_TRAINING = """
import atexit, time
with tacit.attach(model, optimizer, tacit.from_env()):
    train(3)
    if rank == 1:
        atexit.register(time.sleep, 1)  # torchrun ends rank 0 once rank 1 is gone: let rank 0 speak first
        raise ValueError("a bad batch")
    train(1000000)
"""
BEFORE = """
if rank == 1:
    raise ValueError("a bad batch")
tacit.attach(model, optimizer, tacit.from_env())
"""


@pytest.mark.parametrize(("script", "cluster"), [(IN_TRAINING, "local:2"), (BEFORE, "2x1@1gbit")])
def test_an_exception_on_one_rank_ends_all_and_comes_first(
    tmp_path: Path, request: pytest.FixtureRequest, script: str, cluster: str
) -> None:
    if not cluster.startswith("local"):
        request.getfixturevalue("namespaces")
    ran = Ran(tmp_path, TRAIN + script, "--algorithm", "bf16", "--json", "--cluster", cluster)
    assert ran.code == 1
    summary = ran.err[ran.err.index("\ntacit: ") :].splitlines()
    node = 0 if cluster == "local:2" else 1
    assert summary[1].endswith(f"failed: rank 1 ended with exit code 1 (node {node})")
    assert summary[2].lstrip().startswith("File ")
    assert "ValueError: a bad batch" in summary
    assert ran.err.count("a bad batch") == (3 if script == IN_TRAINING else 2), (
        "the line, the error, the other"
    )
    told = json.loads(ran.out.splitlines()[-1])
    assert (told["status"], told["exit_code"]) == ("failed", 1)
    assert told["failures"][0]["rank"] == 1
    trace = told["failures"][0]["traceback"]
    assert trace.endswith("ValueError: a bad batch")
    assert (tmp_path / "out" / "errors" / "rank1.txt").read_text() == trace + "\n"
    assert told["errors"][0]["ranks"] == [1]


FROZEN = """
with tacit.attach(model, optimizer, tacit.from_env(), timeout=timedelta(seconds=4)):
    train(3)
    if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
    train(1000000)
"""
PLAIN = """
if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
train(1000000)
"""


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (FROZEN, "rank 1 froze: it did not answer in round 3 (node 0)"),
        (PLAIN, "rank 1 froze: it was stopped, and answered nobody (node 0)"),
    ],
)
def test_a_rank_that_freezes_is_named_and_not_a_survivor(tmp_path: Path, script: str, said: str) -> None:
    text = TRAIN.replace('"gloo"', '"gloo", timeout=timedelta(seconds=4)')
    text = "import os, signal\nfrom datetime import timedelta\n" + text
    started = time.monotonic()
    ran = Ran(tmp_path, text + script, "--algorithm", "bf16" if script == FROZEN else "ddp")
    assert ran.code == 1
    assert f"train.py failed: {said}" in ran.err
    assert ran.kept["failures"][0]["rank"] == 1
    assert time.monotonic() - started < 60, "torchrun waits half a minute for what is stopped"


def test_a_rank_that_leaves_early_is_named(tmp_path: Path) -> None:
    script = """
with tacit.attach(model, optimizer, tacit.from_env()):
    train(3)
    if rank == 1: sys.exit(0)
    train(1000000)
"""
    ran = Ran(tmp_path, TRAIN + script, "--algorithm", "bf16")
    assert ran.code == 1
    assert "failed: rank 1 left early: it has left in round 3: SystemExit: 0 (node 0)" in ran.err


def test_a_supervisor_that_is_killed_leaves_a_record_and_no_folder(tmp_path: Path) -> None:
    script, out, temporary = tmp_path / "train.py", tmp_path / "out", tmp_path / "tmp"
    script.write_text("print('up', flush=True)\nimport time; time.sleep(1000)\n")
    temporary.mkdir()
    command = [*TACIT, "--cluster", "local:1", "--out", str(out), "--", str(script)]
    env = {**os.environ, "TMPDIR": str(temporary)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert len(list(temporary.glob("tacit-*"))) == 1
        (supervisor,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        launchers = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        os.kill(int(supervisor), signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert "the supervisor of the testbed was killed" in err
    kept = json.loads((out / "run.json").read_text())
    assert (kept["status"], kept["exit_code"]) == ("failed", 1)
    assert "supervisor" in kept["error"]
    assert list(temporary.glob("tacit-*")) == []
    for launcher in launchers:
        assert not Path(f"/proc/{launcher}").exists() or "Z" in Path(f"/proc/{launcher}/stat").read_text()
    assert left_behind(script) == []


@pytest.mark.parametrize(("end", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_the_exit_code_is_that_of_the_rank_that_failed_first(tmp_path: Path, end: str, code: int) -> None:
    script = f"import os, sys, time\nif os.environ['RANK'] == '1': {end}\ntime.sleep(1000)\n"
    assert Ran(tmp_path, script, "--algorithm", "topk").code == code


def test_the_time_limit(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "import time; time.sleep(1000)", "--timeout", "4")
    assert ran.code == 124
    assert "was stopped after 4 s, see --timeout" in ran.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_tears_everything_down(tmp_path: Path, number: signal.Signals) -> None:
    """Sent to the whole process group, as a terminal does with Ctrl-C; and again, as the impatient do."""
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text("import time\nprint('up')\ntime.sleep(1000)\n")
    command = [*TACIT, "--cluster", "local:2", "--out", str(out), "--", str(script)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline(), process.stdout.readline()] == ["up\n", "up\n"]
        for _ in range(2):
            os.killpg(process.pid, number)
            time.sleep(0.2)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"stopped by {number.name}" in err
    assert "Traceback" not in err
    assert left_behind(script) == []
    assert json.loads((out / "run.json").read_text())["status"] == "interrupted"


# ---- the footprint ------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a rank that has called nothing yet."""
    for name in ("_CALLED", "_OPEN", "_CLOSED"):
        monkeypatch.setattr(run_report, name, [])
    monkeypatch.setenv("RANK", "3")
    return


@pytest.mark.usefixtures("fresh")
def test_a_call_leaves_its_footprint_even_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tacit

    monkeypatch.setenv("TACIT_FOOTPRINT", str(tmp_path))
    monkeypatch.setenv("TACIT_ALGORITHM", "topc")
    for _ in range(2):
        with pytest.raises(tacit.ConfigError):
            tacit.from_env()
    with pytest.raises(tacit.AttachError):
        tacit.attach(None, None, "ddp")  # type: ignore[arg-type]
    assert [file.name for file in tmp_path.iterdir()] == ["rank3.json"]
    told = json.loads((tmp_path / "rank3.json").read_text())
    assert told == {"rank": 3, "called": ["from_env", "attach"], "sessions": []}


@pytest.mark.usefixtures("fresh")
def test_without_the_variable_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tacit

    monkeypatch.delenv("TACIT_FOOTPRINT", raising=False)
    monkeypatch.delenv("TACIT_ALGORITHM", raising=False)
    monkeypatch.chdir(tmp_path)
    assert tacit.from_env().subject == "nothing"
    assert run_report._CALLED == []
    assert os.listdir(tmp_path) == []
