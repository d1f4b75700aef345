"""Every attack of attacks.py on a parameter server, while a real training is under way that must not notice.

    python benchmarks/strangers.py              # 5 minutes, 12 on a slower machine
    python benchmarks/strangers.py --quick      # 1 to 5: each attack once, with fewer connections
    python benchmarks/strangers.py --only idle,impostor
    python benchmarks/strangers.py --quick --tls      # a server that speaks TLS, and asks for certificates

One training after the other, and in each of them one attack after the other, each from an address of its own:

* `ps`, by `tacit run`: two workers that wait for each other. Strangers, and peers that know the secret.
* `ps-async` and `ps-ssp`: a server and two workers started by hand, and the place of a third is free. Whoever
  knows the secret may take it, and does what no worker would; a rightful third worker comes when all is over.
  With --tls only these: whoever does more than send bytes has a certificate that the server takes.

Judged: the connections that are to be ended are; the server lives and needs no more than 256 MB more; it
answers whoever comes with the right secret; the workers train on; at the end all exit with 0 in time. What
all wait for has at each step the parameters that it has without an attack, to the bit: the training is made
once more, undisturbed. What goes on alone has its updates counted, none lost and none of somebody else, and a
loss that has fallen. A training that an attack ends is begun again for the attacks behind it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attacks
from attacks import ATTACKS, SPARED, Target
from fault_runs import MARK, processes
from markdown_tables import markdown
from paired import RESULTS, hardware
from tacit.environment import TLS, TLS_CERTIFICATE, TLS_KEY
from tacit.files import put
from tacit.stores import encoding, handshake
from tacit.stores.messages import RunSpec
from tacit.stores.protocol import FrameKind, Header
from tacit.stores.secret import Secret
from tacit.stores.server.allowed_types import ALLOWED_TYPES
from tacit.stores.tls import TlsWorker
from tacit_lab.certificates import make
from tacit_lab.testbed.launch import free_port

RANK = Path(__file__).with_name("strangers_rank.py")
START, GO_ON, END = 240.0, 60.0, 120.0
"""Seconds within which a training has begun, takes its next steps, has ended: on however busy a machine."""
MEGABYTES = 256
CALLED = Path("/tmp/tacit-was-called")
"""What is there if the server has unpickled what it was sent."""


@dataclass
class Row:
    """An attack, and what came of it.

    Attributes:
        steps: of the first worker, before it and after.
        said: why the server has closed connections of that address, as it says.
        wrong: in words; nothing where all is as it should be.
    """

    training: str
    attack: str
    seed: int
    opened: int = 0
    ended: int = 0
    steps: tuple[int, int] = (0, 0)
    said: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


# ---- a training ---------------------------------------------------------------------------------------


class Training:
    """Workers and a server as processes; gone when the block is left.

    Args:
        steps: how many; None: until it is told to end, and with a pause after each.
        alone: each worker is a world of its own, and the place of a third is free.
        tls: whether they speak TLS, and the server asks for certificates.
    """

    def __init__(self, algorithm: str, alone: bool, steps: int | None = None, tls: bool = False) -> None:
        self.algorithm, self.alone, self._steps, self._tls = algorithm, alone, steps, tls
        self._mark = uuid.uuid4().hex
        self._temporary = TemporaryDirectory(prefix="strangers-")
        self.folder = Path(self._temporary.name)
        self._running: list[subprocess.Popen[bytes]] = []
        self._read = 0

    def __enter__(self) -> Training:
        if self.alone:
            self._secret, self._port = secrets.token_hex(32), free_port()
            server = ["-m", "tacit.stores.server", "--workers", "3", "--port", str(self._port)]
            if self._tls:
                for name in ("hub", "mine"):
                    make(["127.0.0.1"], 30, self.folder / f"{name}.pem", self.folder / f"{name}.key")
                server += ["--tls", str(self.folder / "hub.pem"), str(self.folder / "hub.key")]
                server += ["--certificates", str(self.folder / "mine.pem")]
            self._start(server, TACIT_FOOTPRINT=str(self.folder))
            for worker in range(2):
                self.join(worker)
        else:
            words = ["run", "--cluster", "local:2", "--servers", "1", "--algorithm", self.algorithm]
            self._start(["-m", "tacit_lab", *words, "--out", str(self.folder / "out"), "--", *self._script()])
        return self

    def __exit__(self, *_: object) -> None:
        for pid in processes(self._mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._running:
            process.wait()
        self._temporary.cleanup()

    def _script(self) -> list[str]:
        return [str(RANK), str(self.folder), *([] if self._steps is None else [str(self._steps)])]

    def _start(self, words: Sequence[str], **env: str) -> None:
        if self.alone:
            env |= {"TACIT_SERVER_SECRET": self._secret, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        with (self.folder / "stderr").open("ab") as stderr:
            command = [sys.executable, "-u", *words]
            environment = os.environ | {MARK: self._mark} | env
            self._running.append(
                subprocess.Popen(
                    command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
                )
            )

    def join(self, worker: int) -> None:
        """Start a worker that is a world of its own."""
        self._start(
            ["-m", "torch.distributed.run", "--standalone", *self._script()],
            TACIT_SERVERS=f"127.0.0.1:{self._port}",
            TACIT_ALGORITHM=self.algorithm,
            TACIT_WORKER=str(worker),
            TACIT_WORKERS="3",
            **(self._certificates() if self._tls else {}),
        )

    def _certificates(self) -> dict[str, str]:
        """Of a worker: what it trusts, and what it shows."""
        files = {TLS: "hub.pem", TLS_CERTIFICATE: "mine.pem", TLS_KEY: "mine.key"}
        return {name: str(self.folder / file) for name, file in files.items()}

    def target(self, seconds: float, many: int) -> Target:
        """The server, once workers train.

        Raises:
            RuntimeError: they do not.
        """
        if not self.wait(START, lambda: all(self.steps(worker) > 2 for worker in range(2))):
            raise RuntimeError(f"the training has not begun: {self.text()[-2000:]}")
        door = json.loads((self.folder / "door.json").read_text())
        secret = Secret(door["secret"].encode())
        host, port = door["address"]
        run = encoding.read(door["run"].encode(), RunSpec, ALLOWED_TYPES)
        overheard = handshake.reply(secret, handshake.greeting())
        workers, free = (3, 2) if self.alone else (2, None)
        tls = None
        if self._tls:
            mine = self.folder / "mine.pem", self.folder / "mine.key"
            tls = TlsWorker(str(self.folder / "hub.pem"), *mine)
        return Target((host, port), secret, overheard, run, workers, free, seconds, many, tls=tls)

    def wait(self, seconds: float, what: Callable[[], bool]) -> bool:
        """Wait until it is so, or something that was started has ended, or for so long; whether it is so."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if what():
                return True
            if not self.lives:
                return what()
            time.sleep(0.05)
        return False

    @property
    def lives(self) -> bool:
        """Whether nothing that was started has ended."""
        return all(process.poll() is None for process in self._running)

    def log(self, worker: int) -> list[tuple[str, float]]:
        """The checksum and the loss of each step that a worker has taken."""
        file = self.folder / f"steps{worker}"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [(line.split()[0], float(line.split()[1])) for line in lines]

    def steps(self, worker: int) -> int:
        """How many that are."""
        return len(self.log(worker))

    def goes_on(self) -> bool:
        """Whether each worker takes two more steps."""
        now = [self.steps(worker) for worker in range(2)]
        return self.wait(GO_ON, lambda: all(self.steps(i) >= now[i] + 2 for i in range(2)))

    def server(self) -> int | None:
        """The server's process."""
        return next(
            (pid for pid, words in processes(self._mark).items() if "tacit.stores.server" in words), None
        )

    def text(self) -> str:
        """All that was said on stderr."""
        return (self.folder / "stderr").read_text(errors="replace")

    def said_of(self, address: str) -> list[str]:
        """Why the server has closed connections from there."""
        return reasons(self.text(), address)

    def finish(self) -> list[str]:
        """Let it end; what is wrong with how it does."""
        (self.folder / "end").touch()
        deadline = time.monotonic() + END
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        codes = [process.poll() for process in self._running]
        if any(codes):
            return [f"exit codes {codes}: {self.text()[-600:]}"]
        return [] if None not in codes else [f"it has not ended after {END:g} s: exit codes {codes}"]

    def ends(self) -> list[dict[str, Any]]:
        """What each worker has left at its end."""
        return [json.loads(file.read_text()) for file in sorted(self.folder.glob("end*.json"))]

    def counted(self) -> int:
        """How many pushes the server has counted."""
        file = next(iter(self.folder.rglob("server0.json")))
        facts = json.loads(file.read_text())
        return int(sum(facts["stale"].values()) + facts["late"])


def reasons(text: str, address: str) -> list[str]:
    """Why a server has closed connections from an address, each reason once."""
    lines = [line for line in text.splitlines() if re.search(rf"\b{re.escape(address)}\b", line)]
    found = [re.split(r" (?:was|were) closed(?:, the last \([^)]*\))?: ", line) for line in lines]
    why = [re.sub(r"\d{4,}", "N", each[1])[:160] for each in found if len(each) > 1]
    return [*dict.fromkeys(why)]


# ---- one attack ---------------------------------------------------------------------------------------


def attacked(training: Training, name: str, target: Target, seed: int) -> Row:
    """Make an attack, and look how the server and its workers are."""
    row = Row(training.algorithm, name, seed)
    pid, before = training.server(), training.steps(0)
    memory = _peak(pid)
    try:
        seen = ATTACKS[name].run(target, random.Random(f"{seed} {name}"))
        row.opened, row.ended = seen.opened, int(seen.ended)
    except OSError as error:
        row.wrong.append(f"the attack itself failed: {error}")
    goes_on, answers = training.goes_on(), answered(replace(target, source=None))
    row.steps = before, training.steps(0)
    assert target.source is not None
    row.said = training.said_of(target.source)
    row.wrong += judge(row, training.server() == pid, goes_on, answers, _peak(pid) - memory)
    return row


def judge(row: Row, server: bool, goes_on: bool, answers: bool, memory: float) -> list[str]:
    """What is wrong with how an attack ended; `memory`: in MB, that the server has needed more."""
    wrong = []
    if not row.opened:
        wrong.append("nothing was delivered")
    if row.attack not in SPARED and row.ended != row.opened:
        wrong.append(f"{row.opened - row.ended} of {row.opened} connections are still open")
    if not server:
        wrong.append("the server is gone")
    if not goes_on:
        wrong.append("the workers do not train on")
    if not answers:
        wrong.append("nobody is let in any more")
    if memory > MEGABYTES:
        wrong.append(f"the server has needed {memory:.0f} MB more")
    if CALLED.exists():
        wrong.append("what was sent has been run")
    return wrong


def answered(target: Target) -> bool:
    """Whether a server answers a HELLO of somebody who knows the secret: it says that the place is taken."""
    try:
        with attacks.inside(target) as line:
            line.settimeout(attacks.PATIENCE)
            line.sendall(attacks.framed(attacks.hello(target, target.workers)))
            header = Header(*attacks.FORM.unpack(attacks.exactly(line, attacks.FORM.size)))
            return bool(header.kind == FrameKind.MISFIT)
    except OSError:
        return False


def _peak(pid: int | None) -> float:
    """The most memory that a process has had, in MB."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text()
        return int(text.split("VmHWM:")[1].split()[0]) / 1024
    return 0.0


# ---- a training under attack --------------------------------------------------------------------------


def trainings(
    algorithm: str, names: Sequence[str], seed: int, seconds: float, many: int, tls: bool
) -> Iterator[Row]:
    """One training, or a second one where an attack has ended the first."""
    alone, rest = algorithm != "ps", list(names)
    while rest:
        with Training(algorithm, alone, tls=tls) as training:
            target = training.target(seconds, many)
            rows: list[Row] = []
            while rest and training.lives:
                name = rest.pop(0)
                source = f"127.0.{1 + len(rows) // 200}.{1 + len(rows) % 200}"
                rows.append(attacked(training, name, replace(target, source=source), seed))
            yield from _ended(training, rows)


def _ended(training: Training, rows: list[Row]) -> list[Row]:
    """Let a training end, and give each attack what came of it."""
    whole = training.lives
    if whole and training.alone:
        training.join(2)
        if not training.wait(START, lambda: training.steps(2) > 2):
            rows[-1].wrong.append("a rightful worker that comes late is not let in")
    wrong = training.finish()
    if wrong:
        rows[-1].wrong += wrong
        return rows
    if training.alone:
        wrong = wrong_alone(training.ends(), training.counted(), [training.log(i) for i in range(3)])
        rows[-1].wrong += [f"of the whole training: {each}" for each in wrong]
        return rows
    logs = [[each for each, _ in training.log(worker)] for worker in range(2)]
    with Training(training.algorithm, alone=False, steps=len(logs[0])) as undisturbed:
        twin = undisturbed.finish()
        if twin:
            raise RuntimeError(f"the undisturbed training failed: {twin}")
        blame(rows, logs, [[each for each, _ in undisturbed.log(worker)] for worker in range(2)])
    return rows


def blame(rows: Sequence[Row], logs: Sequence[Sequence[str]], plain: Sequence[Sequence[str]]) -> None:
    """Where a step has other parameters than without attacks, say so of the last attack that began before."""
    assert rows
    if any(len(log) != len(each) for log, each in zip(logs, plain, strict=True)):
        rows[-1].wrong.append(f"{[len(log) for log in logs]} steps, without attacks {len(plain[0])}")
    steps = [
        i
        for log, each in zip(logs, plain, strict=True)
        for i, pair in enumerate(zip(log, each, strict=False))
        if pair[0] != pair[1]
    ]
    if steps:
        before = [row for row in rows if row.steps[0] <= min(steps)]
        (before or rows)[-1 if before else 0].wrong.append(
            f"wrong result: from step {min(steps)} on parameters are not what they are without attacks"
        )


def wrong_alone(
    ends: Sequence[Mapping[str, Any]], counted: int, logs: Sequence[Sequence[tuple[str, float]]]
) -> list[str]:
    """What is wrong where nobody waits: each step and each closing is a push, and the loss falls."""
    wrong = []
    if len(ends) != len(logs):
        wrong.append(f"{len(ends)} of {len(logs)} workers came to the end")
    pushed = sum(end["steps"] + 1 for end in ends)
    if counted != pushed:
        wrong.append(f"{pushed} pushes were made, and the server has counted {counted}")
    for worker, log in enumerate(logs):
        few = max(1, min(20, len(log) // 4))
        first = sum(loss for _, loss in logs[0][:few]) / few
        last = sum(loss for _, loss in log[-few:]) / few
        if not last < first:
            wrong.append(f"worker {worker} ends with a loss of {last:.2f}, and they began with {first:.2f}")
    return wrong


# ---- what is written ----------------------------------------------------------------------------------


def page(rows: Sequence[Row], words: str) -> str:
    """The table, as Markdown."""
    bad = sum(bool(row.wrong) for row in rows)
    named = {row.attack for row in rows}
    lines = [
        "# Attacks on a parameter server",
        "",
        f"`python benchmarks/strangers.py`: {len(named)} attacks, made {len(rows)} times, {bad} times with "
        f"something wrong. {words}",
        "",
        "Each was made while a training was under way, from an address of its own. What the server said is "
        "why it has closed connections from there; of what is not said it had nothing to close.",
        "",
    ]
    titles = {"stranger": "without the secret", "insider": "with it", "worker": "in a worker's place"}
    cells = []
    for row in rows:
        known = ATTACKS[row.attack]
        cells.append(
            (
                row.training,
                row.attack,
                f"{known.words} ({titles[known.who]})",
                f"{row.opened}",
                f"{row.ended}",
                f"{row.steps[0]}..{row.steps[1]}",
                "; ".join(row.said) or "nothing",
                "; ".join(row.wrong) or "ok",
            )
        )
    head = (
        "training",
        "attack",
        "what was sent",
        "connections",
        "ended by it",
        "steps",
        "the server",
        "verdict",
    )
    return "\n".join(
        [*lines, markdown(head, [[" ".join(each.split()) for each in row] for row in cells]), ""]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each attack once, with fewer connections")
    parser.add_argument("--tls", action="store_true", help="behind TLS and certificates of the workers")
    parser.add_argument("--only", default="", metavar="NAMES", help="these attacks, with commas between")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    options = parser.parse_args()
    CALLED.unlink(missing_ok=True)
    known = attacks.named(options.only)
    outside = [name for name, each in known.items() if each.who != "worker"]
    inside = [name for name, each in known.items() if each.who == "worker"]
    seconds, many = (1.0, 200) if options.quick else (2.0, 1000)
    plan = [("ps", outside, options.seed), ("ps-async", inside, options.seed)]
    if not options.quick:
        every = [*inside, *outside]
        plan = [("ps", outside, options.seed), ("ps", outside, options.seed + 1)]
        plan += [("ps-async", every, options.seed), ("ps-ssp", outside, options.seed)]
    if options.tls:
        plan = [("ps-async", [*inside, *outside], options.seed)]
    rows = []
    for algorithm, names, seed in plan:
        for row in trainings(algorithm, names, seed, seconds, many, options.tls) if names else ():
            print(f"{row.training:9} {row.attack:16} {'; '.join(row.wrong) or 'ok'}", flush=True)
            rows.append(row)
    machine = hardware()
    words = (
        f"{date.today().isoformat()}, at {machine['commit']}, seed {options.seed}; {machine['cpu']}, "
        f"{machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}, torch "
        f"{machine['torch']}."
    )
    if options.save:
        name = "strangers" + "-tls" * options.tls + "-quick" * options.quick
        path = RESULTS / f"{date.today().isoformat()}-{name}.md"
        put(path, page(rows, words))
        print(path)
    bad = sum(bool(row.wrong) for row in rows)
    print(f"{len(rows)} attacks, {bad} with something wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
