"""How long a training stands still where torchrun starts it again, on one machine.

    python benchmarks/restarts.py --save    # about five minutes
    python benchmarks/restarts.py --quick   # each once

It runs `examples/13_elastic.py`, a rank a torchrun or two, and tells the seconds until the next step:

* `rank`: from the kill (SIGKILL) of one of two ranks of one torchrun.
* `machine`: from the kill of the second of two torchruns of `--nnodes 1:2`, with its rank; the first goes on.
* `back`: from the start of that torchrun, until two ranks train again.

torchrun gives up another one that has not written to its store for three times `keep_alive_interval`, and
waits `last_call_timeout` for more machines where there are fewer than the most.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paired import ROOT, conclude, hardware

EXAMPLE = ROOT / "examples" / "13_elastic.py"
STEPS = 10**7
RENDEZVOUS = "last_call_timeout=5,keep_alive_interval=2"  # seconds; 30 and 5 if nothing is said
ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A torchrun of the example."""
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "10", *words, str(EXAMPLE)]
    return subprocess.Popen(
        [*command, str(STEPS), str(folder / "checkpoints")],
        env=os.environ | ENV,
        stdout=subprocess.PIPE,
        stderr=(folder / "errors").open("a"),
        text=True,
    )


def ranks_of(launcher: subprocess.Popen[str]) -> list[int]:
    """Its processes, in the order in which they were started."""
    return [*map(int, Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split())]


def kill(launcher: subprocess.Popen[str]) -> None:
    """End it and its ranks at once, as where a machine loses its power."""
    ranks = ranks_of(launcher) if launcher.poll() is None else []
    for each in (launcher.pid, *ranks):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    launcher.wait()


@contextmanager
def scene() -> Iterator[Path]:
    """A folder for checkpoints, and for what torchrun says of errors."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def next_step(launcher: subprocess.Popen[str], folder: Path, ranks: int) -> int:
    """Waits for the first step of so many ranks; returns its number."""
    assert launcher.stdout is not None
    for line in launcher.stdout:
        words = line.split()
        if words[:2] == ["from", "step"] and int(words[4]) == ranks:
            return int(words[2])
    raise RuntimeError(f"torchrun has ended: {(folder / 'errors').read_text()[-2000:]}")


def saved(folder: Path) -> int:
    """The step of the last checkpoint."""
    return int((folder / "checkpoints" / "latest").read_text().split("-")[0])


def goes_on(launcher: subprocess.Popen[str], folder: Path, ranks: int, before: int) -> float:
    """Seconds from now until the next step, which is the one after the last checkpoint."""
    began = time.monotonic()
    step = next_step(launcher, folder, ranks)
    seconds = time.monotonic() - began
    if step < before:
        raise RuntimeError(f"it goes on from step {step}, and had saved step {before}")
    return seconds


def trained(folder: Path) -> int:
    """Waits until there are some checkpoints more; returns the step of the last one."""
    first = saved(folder) if (folder / "checkpoints" / "latest").exists() else 0
    while not (folder / "checkpoints" / "latest").exists() or saved(folder) < first + 30:
        time.sleep(0.05)
    return saved(folder)


def of_a_rank(times: int) -> list[float]:
    """Rank 1 dies again and again."""
    found = []
    with scene() as folder:
        launcher = started(folder, "--standalone", "--nproc-per-node", "2")
        next_step(launcher, folder, 2)
        for _ in range(times):
            before = trained(folder)
            os.kill(ranks_of(launcher)[1], signal.SIGKILL)
            found.append(goes_on(launcher, folder, 2, before))
        kill(launcher)
    return found


def of_a_machine(times: int, port: int) -> tuple[list[float], list[float]]:
    """The second torchrun dies, and is started again when the first has gone on alone."""
    words = ["--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "1"]
    words += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", RENDEZVOUS]
    alone, both = list[float](), list[float]()
    with scene() as folder:
        first = started(folder, *words)
        time.sleep(2)  # who makes the store is to live
        second = started(folder, *words)
        next_step(first, folder, 2)
        for _ in range(times):
            before = trained(folder)
            kill(second)
            alone.append(goes_on(first, folder, 1, before))
            before = trained(folder)
            second = started(folder, *words)
            both.append(goes_on(first, folder, 2, before))
        kill(second)
        kill(first)
    return alone, both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="each once")
    parser.add_argument("--port", type=int, default=29471, help="of the rendezvous, by default 29471")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    options = parser.parse_args()
    times = 1 if options.quick else 3
    found = {"rank": of_a_rank(times)}
    found["machine"], found["back"] = of_a_machine(times, options.port)
    rows = {name: [round(each, 1) for each in seconds] for name, seconds in found.items()}
    lines = (f"{name:8s} {statistics.median(each):5.1f} s of {each}" for name, each in rows.items())
    result = {"benchmark": "restarts", "quick": options.quick, "hardware": hardware(), "seconds": rows}
    conclude(result | {"rendezvous": RENDEZVOUS}, "\n".join(lines), options)


if __name__ == "__main__":
    main()
