"""Faults that `tacit run` cannot make: ranks without a launcher, torchrun, servers by hand, hostile files.

Each kind is a row of `SCENES`: what is started, what breaks, and what all that are left must say in the end.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fault_runs import BOUND, RANK, START, TIMEOUT, Found, environment, left_behind, moment, processes, things
from tacit.links import Links
from tacit_lab.testbed.launch import free_port

_MEMORY = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
"""Where memory is limited: the first version of cgroups, and the second."""


class Skipped(Exception):
    """This machine cannot make such a fault; the text says why."""


@dataclass(frozen=True)
class Ended:
    """How a process ended that was started, and all that it printed."""

    code: int
    text: str


@dataclass
class Stage:
    """Where a scene is played: a folder, a mark that its processes bear, and what went wrong on it.

    Attributes:
        fault: when it came.
    """

    folder: Path
    mark: str
    env: dict[str, str]
    fault: float | None = None
    wrong: list[str] = field(default_factory=list)
    _started: list[tuple[subprocess.Popen[bytes], Path]] = field(default_factory=list)

    def start(self, *words: str, stdout: str = "", **env: str) -> subprocess.Popen[bytes]:
        """`python WORDS` with such an environment, whose output goes to `stdout`."""
        out = self.folder / f"out{uuid.uuid4().hex}"
        with out.open("wb") as stderr, Path(stdout or out).open("ab") as file:
            env = {**self.env, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **env}
            process = subprocess.Popen(
                [sys.executable, *words],
                env=env,
                cwd=self.folder,
                stdout=file,
                stderr=stderr,
                start_new_session=True,
            )
        self._started.append((process, out))
        return process

    def ended(self, seconds: float = TIMEOUT + BOUND) -> list[Ended]:
        """All that was started, once nothing of the stage runs any more, so long behind the fault at most."""
        begun = time.time()
        while left := processes(self.mark):
            self.fault = moment(self.folder)
            if time.time() - (self.fault or begun) > (seconds if self.fault else START):
                self.wrong.append(f"hang: {len(left)} processes, such as {next(iter(left.values()))[:80]}")
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)
        self.fault = moment(self.folder)
        found = [Ended(process.wait(), out.read_text(errors="replace")) for process, out in self._started]
        self._started.clear()
        return found

    def about(self, algorithm: str, fault: str = "none", rank: int = 1, step: int = 8, **more: Any) -> str:
        """What `fault_rank.py` is told."""
        told = {"algorithms": [algorithm], "kind": fault, "ranks": [rank], "step": step, "seed": 0}
        return json.dumps({**told, "folder": str(self.folder), "timeout": TIMEOUT, **more})

    def ranks(self, about: str, world: int, **env: str) -> None:
        """Start ranks by themselves: rank 0 has their store, and nobody ends the others if one fails."""
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
        for rank in range(world):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "GROUP_RANK": str(rank // 2)}
            self.start(str(RANK), about, **env, **own)

    def judge(self, found: Sequence[Ended], says: str, apart: Collection[int] = ()) -> None:
        """Note what is wrong with how ranks or commands ended, but those apart."""
        if not says:
            self.wrong += alike(sums_in(self.folder))
        for i, each in enumerate(found):
            if i not in apart:
                self.wrong += [f"{error} ({i} of {len(found)})" for error in misdeeds(each, says)]


def misdeeds(ended: Ended, says: str) -> list[str]:
    """What is wrong with an end: without an error if `says` is empty, else by one of tacit's own with it."""
    text = re.sub(r"^\[rank\d+\]: ?", "", ended.text, flags=re.MULTILINE)
    last = text.rpartition("Traceback (most recent call last):\n")[2] if "Traceback" in text else ""
    raised = re.search(r"^\S.*(?s:.*)", last, re.MULTILINE)
    error = raised[0].strip() if raised else ""
    if not says:
        return [f"exit code {ended.code}: {(error or ended.text)[-300:]}"] if ended.code else []
    if ended.code == 0:
        return [f"exit code 0 after a fault, instead of {says!r}"]
    if error and not error.startswith("tacit.errors."):
        return [f"wrong name: a raw error: {error[:300]}"]
    said = error or ended.text
    return [] if re.search(says, said) else [f"wrong name: {said[-300:]!r}, instead of {says!r}"]


def sums_in(folder: Path) -> dict[str, Any]:
    """What the ranks have left there, by rank."""
    return {
        file.stem.removeprefix("sums"): json.loads(file.read_text()) for file in folder.glob("sums*.json")
    }


def alike(sums: dict[str, Any]) -> list[str]:
    """What is wrong with them."""
    if not sums:
        return ["no rank came to the end"]
    return ["wrong result: replicas differ"] if len({json.dumps(each) for each in sums.values()}) > 1 else []


# ---- scenes -------------------------------------------------------------------------------------------


def by_themselves(
    stage: Stage,
    algorithm: str,
    fault: str,
    says: str,
    apart: Collection[int] = (1,),
    world: int = 3,
    **more: Any,
) -> None:
    """Ranks without a launcher, of which one breaks."""
    stage.ranks(stage.about(algorithm, fault, **more), world)
    stage.judge(stage.ended(), says, apart)


def with_little_memory(stage: Stage) -> None:
    """A rank in a cgroup with 64 MiB more than it has."""
    version = next((each for each in _MEMORY if (each / "cgroup.procs").exists()), None)
    if version is None:
        raise Skipped("no cgroup that limits memory can be made here")
    own = version / f"tacit-fault-{stage.mark}"
    try:
        own.mkdir()
        limit = "memory.max" if version == _MEMORY[1] else "memory.limit_in_bytes"
        (own / limit).write_text(str(2**26))
    except OSError as error:
        raise Skipped(f"no cgroup that limits memory can be made here: {error}") from None
    try:
        stage.ranks(stage.about("topk:ratio=0.1", "cgroup"), 3, FAULT_CGROUP=str(own))
        found = stage.ended()
        if found[1].code != -signal.SIGKILL:
            raise Skipped(f"this machine does not enforce a cgroup's limit: exit code {found[1].code}")
        stage.judge(found, "rank 1 did not answer", (1,))
    finally:
        own.rmdir()


def orphans(stage: Stage) -> None:
    """Torchrun is killed: its ranks train to the end, or say what has gone, and none stays."""
    about = stage.about("topk:ratio=0.1", "kill torchrun")
    stage.start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(RANK), about)
    (launcher,) = stage.ended()
    remove_logs(stage)
    if not sums_in(stage.folder):
        stage.judge([Ended(1, launcher.text)], "store|rank")
    else:
        stage.judge([], "")


def remove_logs(stage: Stage) -> None:
    """Of a torchrun that was killed: its own."""
    for folder in (stage.folder / "tmp").glob("torchelastic_*"):
        shutil.rmtree(folder)


def a_node_leaves(stage: Stage) -> None:
    """`torchrun --nnodes 1:2`: one of two nodes is gone at once, and the other trains again, alone."""
    words = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "1"]
    words += ["--rdzv-conf", "last_call_timeout=5"]
    about = stage.about("topk:ratio=0.1", "kill node")
    for _ in range(2):
        stage.start("-m", "torch.distributed.run", *words, str(RANK), about)
        time.sleep(1)
    found = stage.ended(90)
    remove_logs(stage)
    killed = [i for i, each in enumerate(found) if each.code == -signal.SIGKILL]
    if len(killed) != 1:
        stage.wrong.append(f"the fault did not come: {[each.code for each in found]}")
    stage.judge(found, "", killed)
    if "rank 1" not in found[1 - killed[0]].text:
        stage.wrong.append(f"wrong name: {found[1 - killed[0]].text[-300:]!r}")


def a_server_comes_back(stage: Stage) -> None:
    """A server is killed; started again it goes on from its file; with one flipped bit there, it refuses."""
    port, file = free_port(), stage.folder / "server.pt"
    env = {"TACIT_SERVER_SECRET": uuid.uuid4().hex}
    words = ["-m", "tacit.stores.server", "--workers", "2", "--port", str(port), "--checkpoint", str(file)]
    words += ["--every", "0.1"]
    for fault, says in (("kill server by hand", "server 0"), ("none", "")):
        server = stage.start(*words, **env)
        (stage.folder / "server.pid").write_text(str(server.pid))
        stage.ranks(stage.about("ps-async", fault), 2, TACIT_SERVERS=f"127.0.0.1:{port}", **env)
        found = stage.ended()
        stage.judge(found[1:], says)
        (stage.folder / "fault").unlink(missing_ok=True)
    stage.judge(found[:1], "")
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1 << 5
    file.write_bytes(whole)
    stage.start(*words, **env)
    stage.judge(stage.ended(), "checksum|damaged")


def commands(stage: Stage, *rows: tuple[str, Sequence[str]]) -> None:
    """Commands that cannot be: each says so in a line of its own, and has made no folder."""
    for i, (_, words) in enumerate(rows):
        stage.start("-m", "tacit_lab", *(each.format(folder=stage.folder, number=i) for each in words))
    for (says, _), each in zip(rows, stage.ended(), strict=True):
        stage.judge([each], says)
        if each.code != 2:
            stage.wrong.append(f"exit code {each.code}, where a command cannot be")
    if any(stage.folder.glob("made*")):
        stage.wrong.append("left behind: the folder of a command that cannot be")


def hostile_files(stage: Stage) -> None:
    """Measured links and profiles that are damaged, too deep, or of another kind."""
    matrix = ((None, 12345.0), (12345.0, None))
    nodes, each = ("a", "b"), ((0,), (1,))
    good = Links(nodes, each, matrix, matrix, matrix, matrix, 2, "gloo", "2026-01-01").to_json()
    texts = {"bit": good.replace("12345.0", "12355.0", 1), "deep": "[" * 100_000, "none": "\0\xff"}
    texts["huge"] = good.replace("[0]", f"[{10**30}]", 1)
    rows: list[tuple[str, Sequence[str]]] = []
    for name, text in texts.items():
        (stage.folder / name).write_text(text, "latin-1")
        rows.append((f"{name}.*tacit probe", ("plan", "digits", "--links", f"{{folder}}/{name}")))
        rows.append((f"{name}.*tacit profile", ("plan", "--profile", f"{{folder}}/{name}")))
    commands(stage, *rows)


def outputs(stage: Stage) -> None:
    """A command whose output takes nothing, or ASCII alone, and one that is interrupted at once."""
    stage.start("-m", "tacit_lab", "list", stdout="/dev/full")
    stage.start("-m", "tacit_lab", "list", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    interrupted = stage.start("-m", "tacit_lab", "list")
    time.sleep(0.3)
    interrupted.send_signal(signal.SIGINT)
    full, ascii_only, early = stage.ended()
    stage.judge([full], "[Nn]o space left")
    if ascii_only.code or "Traceback" in ascii_only.text:
        stage.wrong += [f"ASCII alone: {ascii_only.text[-200:]!r}"]
    if early.code not in (0, 130, -signal.SIGINT) or "Traceback" in early.text:
        stage.wrong += [f"interrupted at once: {early.code}, {early.text[-200:]!r}"]


GONE = "rank 1 did not answer"
SCENES: dict[str, Callable[[Stage], None]] = {
    "killed attaching": lambda stage: by_themselves(
        stage, "topk", "none", GONE, where="tacit.attaching.agreement.gathered"
    ),
    "killed attaching, pairs": lambda stage: by_themselves(
        stage, "adpsgd", "none", GONE, where="tacit.stores.pairs.joining._Door.missing"
    ),
    "killed closing": lambda stage: by_themselves(stage, "topk", "kill", "rank 1", step=16),
    "raise, store": lambda stage: by_themselves(stage, "topk", "raise", "rank 0 has left", (0,), rank=0),
    "killed, store": lambda stage: by_themselves(stage, "topk", "kill", "rank 0", (0,), rank=0),
    "nan, late": lambda stage: by_themselves(stage, "pipesgd", "nan", "NonFinite.* rank 1", ()),
    "early end, pairs": lambda stage: by_themselves(
        stage, "wagma:wait=false", "early end", "UnevenData.*rank 1.* 8 steps", (), 2
    ),
    "nan, auto": lambda stage: by_themselves(stage, "auto", "nan", "NonFinite.* step 8", ()),
    "damaged states": lambda stage: by_themselves(stage, "topk", "damaged states", "", (), 1, rank=0),
    "forked child": lambda stage: by_themselves(stage, "topk", "fork", "", ()),
    "nonsense": lambda stage: by_themselves(stage, "topk", "nonsense", "", ()),
    "killed, FSDP2": lambda stage: by_themselves(stage, "topk", "kill", "rank 1", world=4, sharded=True),
    "raise, FSDP2": lambda stage: by_themselves(
        stage, "localsgd:sync_every=3", "raise", "rank 1", world=4, sharded=True
    ),
    "memory of a cgroup": with_little_memory,
    "address space": lambda stage: by_themselves(
        stage, "topk", "address space", "rank 1 has left.*RuntimeError"
    ),
    "torchrun killed": orphans,
    "torchrun --nnodes 1:2": a_node_leaves,
    "server killed, restarted": a_server_comes_back,
    "clusters, links, digits": lambda stage: commands(
        stage,
        (
            "unknown topology 'torus-99.*Known",
            ("plan", "digits", "--algorithms", f"dense:topology=torus-{'9' * 5000}x2"),
        ),
        *(
            (says, ("run", "--cluster", cluster, "--out", "{folder}/made{number}", "--", str(RANK)))
            for cluster, says in (
                ("2x1@0.001kbit", "a link of 0.001kbit cannot be emulated.*write 1kbit"),
                ("2x1@35gbit", "a link of 35gbit cannot be emulated.*34gbit"),
                ("2x1@1gbit,4000s", "a latency of 4000s cannot be emulated.*240s"),
                ("2x1@1gbit,0.1us", "a latency of 0.1us cannot be emulated.*write 1us"),
                ("2x1@nanmbit", "cannot read 'nanmbit' as a number with a unit"),
                ("999999x999999", "cannot have 999,998,000,001 ranks: write up to"),
                (f"{'9' * 5000}x1", "cannot read '99.*as NODESxRANKS.*Write for example"),
            )
        ),
    ),
    "files": hostile_files,
    "outputs": outputs,
}
"""Kind -> how it is played. Whoever is apart need not say what the others say."""
ENDING = {kind for kind in SCENES if kind not in ("damaged states", "forked child", "nonsense", "outputs")}
"""Those in which somebody is to be named."""


def played(kind: str) -> Found:
    """Play a scene, and judge it."""
    mark, before = uuid.uuid4().hex, things()
    begun = time.time()
    with TemporaryDirectory(prefix="fault-scene-") as folder:
        stage = Stage(Path(folder), mark, environment(Path(folder), mark))
        found = Found(0)
        try:
            SCENES[kind](stage)
        except Skipped as why:
            found.skipped = str(why)
        found.seconds = time.time() - (stage.fault or begun)
        found.wrong = stage.wrong
        found.wrong += [f"left behind: {each}" for each in left_behind(mark, before, Path(folder, "tmp"))]
    return found
