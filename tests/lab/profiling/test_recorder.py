"""The recorder in a process that trains, and the stages that it times in tacit."""

import json
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path

import pytest
import torch

from forks import ran
from tacit_lab.profiling import instruments
from tacit_lab.profiling.profile import ENDED, RankProfile
from tacit_lab.profiling.recorder import ProfileRecorder


def trained(recorder: ProfileRecorder, steps: int) -> RankProfile | None:
    """A profile of so many steps beside a thread that works too; a second optimizer makes none of them."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    end, turn = threading.Event(), threading.Event()

    def work() -> None:
        while not end.is_set():
            with recorder.clock.within("beside"):
                sum(range(1000))
            turn.set()

    thread = threading.Thread(target=work, name="tacit-lane")
    thread.start()
    with recorder.watching():
        for _ in range(steps):
            with recorder.clock.within("forward"):
                loss = model(torch.ones(8, 64)).sum()
            loss.backward()
            optimizer.step()
            other.step()
            turn.clear()
            turn.wait()  # so that both threads work in every step
    end.set()
    thread.join()
    return recorder.profile(3)


def test_all_that_a_process_uses_is_in_the_rows() -> None:
    profile = trained(ProfileRecorder(skipped=2, most=4), steps=12)
    assert profile is not None
    assert (profile.rank, profile.first, profile.steps) == (3, 4, 4)
    by_name = {thread.name: thread for thread in profile.threads}
    assert {"forward", "optimizer", "the profile itself"} <= by_name["main"].totals().keys()
    # Numbered, where sessions of other tests have left lanes of theirs.
    lanes = [thread.totals() for name, thread in by_name.items() if name.startswith("tacit: lane")]
    assert [each["beside"] > 0 for each in lanes if "beside" in each] == [True]
    for step in range(4):
        named = sum(sum(thread.stages[step].values()) for thread in profile.threads)
        assert named <= profile.process_ns[step] * 1.5 + 5e6  # clocks are read one after the other
    assert sum(row.ms for row in profile.rows()) == pytest.approx(sum(profile.process_ns) / 4e6, rel=1e-9)
    ended = [row.ms for row in profile.rows() if row.thread == ENDED]
    assert ended == [
        pytest.approx(sum(profile.process_ns) / 4e6 - sum(t.cpu_ns for t in profile.threads) / 4e6)
    ]
    assert profile.timing_ns > 0
    assert RankProfile.from_json(profile.to_json()) == profile


def test_few_steps_are_measured_from_their_middle_on() -> None:
    assert trained(ProfileRecorder(), steps=1) is None
    two = trained(ProfileRecorder(), steps=2)
    assert two is not None
    assert (two.first, two.steps) == (2, 1)
    five = trained(ProfileRecorder(), steps=5)
    assert five is not None
    assert (five.first, five.steps) == (4, 2)


def test_every_stage_names_what_is_there() -> None:
    for path in instruments.FUNCTIONS:
        home, _, name = path.rpartition(".")
        assert callable(getattr(import_module(f"tacit.{home}"), name)), path
    for path in instruments.METHODS:
        home, class_, name = path.rsplit(".", 2)
        assert name in vars(getattr(import_module(f"tacit.{home}"), class_)), path
    for kinds in (instruments.OVERRIDDEN, instruments.GENERATORS):
        for kind, names in kinds.items():
            assert all(hasattr(kind, name) for name in names), kind


SCRIPT = """
import json, sys, torch
from tacit_lab.profiling import instruments
from tacit_lab.profiling.stages import StageClock
clock = StageClock()
instruments.replace(clock)
from tacit.compressors import ErrorFeedback, TopK
from tacit.testing import check_compressor
check_compressor(ErrorFeedback(TopK(0.01)))
stages = sorted({stage for thread in clock.threads.values() for stage in thread.totals})
print(json.dumps(stages))
assert all(not thread.nested for thread in clock.threads.values())
"""


def test_stages_of_an_exchange_are_timed_and_change_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stages = json.loads(done.stdout)
    wanted = {
        "encode",
        "decode",
        "error feedback",
        "look for overflow",
        "exchange of ErrorFeedback",
        "topology Flat",
    }
    assert wanted <= {*stages}
    assert "kernel select.select_largest" in stages


def test_a_profile_is_written_however_the_script_ends(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\nassert sys.argv[1:] == ['--lr', '1']\nassert __name__ == '__main__'\n"
        "w = torch.zeros(3, requires_grad=True)\no = torch.optim.SGD([w], lr=1)\n"
        "for _ in range(4):\n    w.sum().backward()\n    o.step()\nsys.exit(3)\n"
    )
    words = ("-m", "tacit_lab.profiling.script", str(script), "--lr", "1")
    done = ran(*words, TACIT_PROFILE=str(tmp_path), RANK="1")
    assert done.code == 3, done.err
    profile = RankProfile.from_json((tmp_path / "profile1.json").read_text())
    assert profile.steps == 2
    assert {"backward", "optimizer"} <= profile.threads[0].totals().keys()
