"""Makes one trial of the fault campaign by `tacit run`, and judges how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fault_trials import APART, FAMILIES, FATAL, LINKS, TRANSIENT, Trial

TIMEOUT = 8.0
"""Seconds that the process group waits for a peer."""
BOUND = 10.0
"""Seconds beyond it after which no rank may still be there."""
TEARDOWN = 8.0
"""Seconds that `tacit run` gives the other nodes to end by themselves once one has failed."""
START = 150.0
"""Seconds after which a trial whose fault has not come yet has failed to start, on however busy a machine."""
MARK = "FAULT_RUNS_MARK"
RANK = Path(__file__).with_name("fault_rank.py")


@dataclass
class Found:
    """What came of a trial.

    Attributes:
        code: the command's exit code; None if it had to be killed.
        seconds: from the fault (without one, from the start) to the command's end.
        named: the ranks that the summary names first; `summary`: that line.
        sums: by rank and algorithm, the checksum of its parameters at the end.
        left: what the trial has left behind.
        wrong: what is wrong, in words; nothing where all is as it should be.
        skipped: why there can be no such fault on this machine.
    """

    code: int | None = None
    seconds: float = 0.0
    named: list[int] = field(default_factory=list)
    summary: str = ""
    sums: dict[str, dict[str, int]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    skipped: str = ""

    @property
    def row(self) -> dict[str, Any]:
        """For a file of JSON lines."""
        return {**asdict(self), "seconds": round(self.seconds, 1)}


def made(trial: Trial) -> Found:
    """Run it, and look what it has left."""
    mark, before = uuid.uuid4().hex, things()
    with TemporaryDirectory(prefix="fault-trial-") as folder, disk(trial, Path(folder)) as out:
        found = _run(trial, Path(folder), out, mark)
        found.sums = {
            file.stem.removeprefix("sums"): json.loads(file.read_text())
            for file in Path(folder).glob("sums*.json")
        }
        found.left = left_behind(mark, before, Path(folder, "tmp"))
        for pid in processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return found


@contextlib.contextmanager
def disk(trial: Trial, folder: Path) -> Iterator[Path]:
    """Where the command is to write: on a disk of 16 KiB where it is to be full."""
    out = folder / "disk" / "out"
    out.parent.mkdir()
    if trial.kind != "full disk":
        yield out
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(out.parent)], check=True)
    try:
        (out.parent / "filler").write_bytes(b"x" * 8192)
        yield out
    finally:
        subprocess.run(["umount", str(out.parent)], check=True)


def _run(trial: Trial, folder: Path, out: Path, mark: str) -> Found:
    cluster = trial.cluster + (f"+{trial.servers}" if trial.servers else "")
    words = ["--cluster", f"{cluster}@1gbit", "--algorithm", FAMILIES[trial.families[0]], "--out", str(out)]
    argv = [sys.executable, "-m", "tacit_lab", "run", *words, "--", str(RANK)]
    argv.append(json.dumps(trial.about(str(folder), TIMEOUT)))
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        command = subprocess.Popen(
            argv, stdout=stdout, stderr=stderr, env=environment(folder, mark), start_new_session=True
        )
        begun = time.time()
        code, fault = _followed(command, trial, folder, out, mark, begun)
    text = (folder / "stderr").read_text(errors="replace")
    found = Found(code, time.time() - (begun if fault is None else fault))
    said = [line for line in text.splitlines() if line.startswith("tacit: ")]
    found.summary = said[0] if said else ""
    found.named = [int(each) for each in re.findall(r"\brank (\d+)", found.summary)[:1]]
    if trial.kind != "none" and fault is None:
        found.wrong.append(f"the fault did not come; the last lines: {text[-600:]}")
    return found


def environment(folder: Path, mark: str) -> dict[str, str]:
    """Whatever is made for a while is made in the trial's own folder, where it is found if it stays."""
    temporary = folder / "tmp"
    temporary.mkdir()
    return {**os.environ, MARK: mark, "TMPDIR": str(temporary)}


def _followed(
    command: subprocess.Popen[bytes], trial: Trial, folder: Path, out: Path, mark: str, begun: float
) -> tuple[int | None, float | None]:
    """How the command ended, and when the fault came."""
    fault, done = None, False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return command.wait(0.2), fault or moment(folder)
        fault = fault or moment(folder)
        if fault is not None and not done:
            _from_outside(trial, command, out, mark)
            done = True
        since = time.time() - (fault or begun)
        if since > (TIMEOUT + BOUND + TEARDOWN + 30 if fault else START):
            command.kill()
            command.wait()
            return None, fault


def moment(folder: Path) -> float | None:
    """When the fault came that a rank has told of there."""
    file = folder / "fault"
    text = file.read_text() if file.exists() else ""
    return float(text) if text else None


def _from_outside(trial: Trial, command: subprocess.Popen[bytes], out: Path, mark: str) -> None:
    if trial.kind == "kill command":
        command.kill()
    elif trial.kind == "interrupt command":
        command.send_signal(signal.SIGINT)
    elif trial.kind == "folder gone":
        shutil.rmtree(out)
    elif trial.kind in _VICTIMS:
        victims = [
            pid
            for pid, words in processes(mark).items()
            if any(word in words for word in _VICTIMS[trial.kind])
        ]
        os.kill(min(victims), signal.SIGKILL)


_VICTIMS = {
    "kill launcher": ("(pt_elastic)", "torch.distributed.run"),
    "kill server": ("tacit.stores.server",),
    "kill supervisor": ("tacit_lab.testbed.init",),
}


# ---- what is left -------------------------------------------------------------------------------------


def processes(mark: str) -> dict[int, str]:
    """The processes of a trial, wherever they have gone, with their names and command lines."""
    found = {}
    needle = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(entry.name)] = f"({(entry / 'comm').read_text().strip()}) {words}"
    return found


def things() -> set[str]:
    """What a run may leave on the machine: interfaces, named namespaces."""
    links = {f"interface {each.name}" for each in Path("/sys/class/net").iterdir()}
    named = Path("/run/netns")
    spaces = {f"namespace {each.name}" for each in named.iterdir()} if named.is_dir() else set()
    return links | spaces


def left_behind(mark: str, before: set[str], temporary: Path) -> list[str]:
    """What is there ten seconds after the command has ended: processes that were killed need a moment."""
    for _ in range(50):
        left = [f"process {words[:80]}" for words in processes(mark).values()]
        if not left:
            break
        time.sleep(0.2)
    # Torch makes a folder for its compiler when an optimizer is made, with tacit or without.
    folders = (each for each in temporary.iterdir() if not each.name.startswith("torchinductor_"))
    return [*left, *sorted(things() - before), *(f"folder {each.name}" for each in folders)]


# ---- judgement ----------------------------------------------------------------------------------------


def judge(trial: Trial, found: Found, undisturbed: Found | None) -> list[str]:
    """What is wrong with how a trial ended; `undisturbed`: how the same training ends without a fault."""
    wrong = list(found.wrong)
    wrong += [f"left behind: {each}" for each in found.left]
    limit = TIMEOUT + BOUND + TEARDOWN
    if trial.kind in FATAL and (found.code is None or found.seconds > limit):
        wrong.append(f"hang: not over {found.seconds:.0f} s after the fault, {limit:.0f} s at most")
    if found.code is None:
        wrong.append("the command had to be killed")
    elif trial.kind in FATAL and trial.kind != "kill command":
        wrong += _ended_badly(trial, found)
    elif trial.kind in TRANSIENT or trial.kind == "none":
        wrong += _ended_well(trial, found, undisturbed)
    return wrong


def _ended_badly(trial: Trial, found: Found) -> list[str]:
    family = trial.families[0]
    if trial.kind == "early end" and family in APART:
        return [] if found.code == 0 else [f"exit code {found.code}, where nobody needs the others"]
    wrong = ["exit code 0 after a fault"] if found.code == 0 else []
    if trial.kind == "interrupt command":
        return wrong if found.code == 130 else [*wrong, f"exit code {found.code} after an interrupt"]
    who = {"kill server": "server", "kill supervisor": "supervisor"}.get(trial.kind)
    if who is not None:
        right = who in found.summary
    elif trial.kind in LINKS or trial.kind == "kill launcher":
        node = _node(trial)
        right = f"node {node}" in found.summary or any(_of_node(trial, rank) == node for rank in found.named)
    else:
        right = found.named == list(trial.ranks)
    return wrong if right else [*wrong, f"wrong name: {found.summary[:200]!r}"]


def _node(trial: Trial) -> int:
    return _of_node(trial, trial.ranks[0])


def _of_node(trial: Trial, rank: int) -> int:
    return rank // int(trial.cluster.split("x")[1])


def _ended_well(trial: Trial, found: Found, undisturbed: Found | None) -> list[str]:
    wrong = [f"exit code {found.code}: {found.summary[:300]}"] if found.code else []
    if len(found.sums) != trial.world:
        return [*wrong, f"{len(found.sums)} of {trial.world} ranks came to the end"]
    for family in trial.families:
        algorithm = FAMILIES[family]
        sums = {each[algorithm] for each in found.sums.values()}
        if len(sums) > 1:
            wrong.append(f"wrong result: replicas of {algorithm} differ")
        if undisturbed is not None and family not in APART:
            expected = {each[algorithm] for each in undisturbed.sums.values()}
            if sums != expected:
                wrong.append(f"wrong result: {algorithm} is not what it is without the fault")
    return wrong
