"""All that docs/gpus.md says of a GPU, or has not run, in one call: the most telling first, within a time.

    python benchmarks/gpu.py --minutes 12             # one GPU; a second call goes on where it stopped
    python benchmarks/gpu.py --dry                    # what would run, in which order, for how long
    python benchmarks/gpu.py --cpu                    # that every check works, small, on a CPU
    python benchmarks/gpu.py --only kernels,steps     # the checks whose names begin so
    python benchmarks/gpu.py --table FILE             # what a record holds, and which goals it meets

One rank of NCCL launches its collectives too, so that all launches are there. What one GPU cannot show, NCCL
between machines, is not claimed. Each check runs in a process that others share until one fails; what came of
it is a line of the record, so a call that is cut short loses only the check under way. A check that failed
runs again in the next call, after those that have not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import gpu_auto
import gpu_kernels
import gpu_profile
import gpu_replicas
import gpu_steps
import gpu_suites
from gpu_checks import CPU, CUDA, Check, Row, Setting
from paired import ROOT, hardware
from runs import append, lines
from tacit.kernels.dispatch import emulated_device
from tacit.transports import torch_distributed as transport

CHECKS: Sequence[Check] = (
    *gpu_steps.FIRST_STEPS,
    gpu_kernels.FIRST,
    gpu_suites.FIRST,
    gpu_steps.WIRE,
    gpu_auto.CHECK,
    gpu_auto.CLOCK,
    *gpu_kernels.CHECKS,
    *gpu_profile.CHECKS,
    *gpu_suites.CHECKS,
    *gpu_steps.MORE_STEPS,
    *gpu_replicas.CHECKS,
    *gpu_steps.LATER_STEPS,
)
"""The most telling first; behind the trainings, which fill the time, what a second call does."""
RECORD = ROOT / "build" / "gpu.jsonl"
MEMORY = (
    "Steps, wire, auto, clock and profile need about 40 GiB of the GPU: plain DDP took 31,147 MiB of\n"
    "an H100, and at most six models are there, of 1.4 GiB each."
)
PATIENCE = 3.0
"""How many times as long as it should take a check may take, before its process is ended."""
BEGINNING = 15
"""Seconds that a process takes to begin."""


# ---- the process in which checks run ------------------------------------------------------------------


@contextlib.contextmanager
def world_of_one(device: torch.device) -> Iterator[None]:
    """One rank that launches its collectives."""
    transport.ALONE_TOO = True
    if device == CPU:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    else:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1, device_id=device)
    try:
        yield
    finally:
        transport.ALONE_TOO = False
        dist.destroy_process_group()


def run(check: Check, setting: Setting) -> Row:
    """Run it; on a CPU its tensors are treated as a GPU's."""
    with emulated_device() if setting.device == CPU else contextlib.nullcontext():
        return check.run(setting)


def serve(asked: Connection, device: torch.device) -> None:
    """Run checks by their names; the first that fails ends the process, as it may have spoilt the device."""
    with world_of_one(device):
        while True:
            name, seconds, found = asked.recv()
            try:
                asked.send(run(named(name), Setting(device, seconds, found)))
            except Exception:
                asked.send({"error": traceback.format_exc()})
                return


class Worker:
    """A process that is started when one is needed, and ended where a check fails or does not end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process: Any = None
        self._asking: Any = None

    @property
    def begun(self) -> bool:
        """Whether the process is there."""
        return self._process is not None

    def run(self, check: Check, seconds: float, found: Mapping[str, Row]) -> Row:
        """What a check returns; with "error" if it failed or has not ended in time."""
        if not self.begun:
            spawn = multiprocessing.get_context("spawn")
            self._asking, asked = spawn.Pipe()
            self._process = spawn.Process(target=serve, args=(asked, self._device), daemon=True)
            self._process.start()
            asked.close()
        self._asking.send((check.name, seconds, found))
        row: Row = {"error": f"it had not ended after {seconds:.0f} s"}
        if self._asking.poll(seconds + BEGINNING):
            try:
                row = self._asking.recv()
            except EOFError:
                self._process.join()
                row = {"error": f"its process ended by itself, with {self._process.exitcode}"}
        if "error" in row:
            self.end()
        return row

    def end(self) -> None:
        """Kill the process."""
        if self.begun:
            self._process.kill()
            self._process.join()
            self._process = None


def named(name: str) -> Check:
    """The check of this name."""
    (found,) = (each for each in CHECKS if each.name == name)
    return found


# ---- the record ---------------------------------------------------------------------------------------


def entry(line: str) -> Row:
    """A line of a record; one that is none raises a ValueError, KeyError or TypeError."""
    row: Row = json.loads(line)
    return {"check": row["check"], "device": row["device"], **row}


def check_record(path: Path) -> None:
    """Raise a ValueError if this file is no record."""
    if not path.is_file():
        raise ValueError(f"there is no such file: write a record of gpu.py, such as {RECORD}")
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            entry(line)
            return
    raise ValueError(
        "no line of it is a check's result, so it is no record of gpu.py, which has a JSON object for each "
        f"check in a line: write one, such as {RECORD} (the .json files of benchmarks/results are none)"
    )


def recorded(path: Path, device: str) -> dict[str, Row]:
    """What a record holds of this device: by check, the last row, but no failure in place of a success.

    What was skipped is not in it, and so runs in the next call.
    """
    found: dict[str, Row] = {}
    for row in lines(path, entry):
        if "skipped" in row.get("found", ()):
            continue
        kept = found.get(row["check"])
        if row["device"] == device and (kept is None or "error" in kept or "error" not in row):
            found[row["check"]] = row
    return found


def in_order(checks: Sequence[Check], found: Mapping[str, Row]) -> list[Check]:
    """What is left to run: what has not, then what failed."""
    failed = [each for each in checks if "error" in found.get(each.name, ())]
    return [each for each in checks if each.name not in found] + failed


def chosen(only: str | None) -> list[Check]:
    """The checks whose names begin with one of these words; with what they are compared with, `wire`.

    Raises:
        ValueError: no check's name begins with one of them.
    """
    words = only.split(",") if only else [""]
    for word in words:
        if not any(each.name.startswith(word) for each in CHECKS):
            names = ", ".join(dict.fromkeys(each.name.partition(":")[0] for each in CHECKS))
            raise ValueError(f"no check's name begins with {word!r}: the parts are {names}")
    found = [each for each in CHECKS if each.name.startswith(tuple(words))]
    if gpu_auto.CHECK in found or gpu_auto.CLOCK in found:
        found.append(gpu_steps.WIRE)
    return [each for each in CHECKS if each in found]


def needs(checks: Sequence[Check], record: Path) -> str:
    """What to know before these checks run."""
    told = [
        f"The first check begins after some {BEGINNING} s. The record, a line for each check: {record}.",
        MEMORY,
    ]
    if gpu_suites.FIRST in checks:
        told.append(gpu_suites.NEEDS)
    if gpu_auto.CHECK in checks or gpu_auto.CLOCK in checks:
        told.append(
            "auto and clock are compared with what `wire` found, so it runs, too, if the record lacks it."
        )
    return "\n".join(told)


def plan(checks: Sequence[Check], minutes: float) -> str:
    """What would run in this time, in order."""
    left, told, filled = 60 * minutes - BEGINNING, [], False
    for each in checks:
        fits = each.seconds <= left and (each.fills or not filled)
        filled = filled or (each.fills and fits)
        left -= each.seconds if fits else 0
        at = f"{60 * minutes - left:5.0f} s" if fits else "no time"
        took = f"{each.seconds:>3} s{'+' if each.fills else ' '}"
        told.append(f"{at:>8}  {took}  {each.name:28} {each.shows}")
    whole = BEGINNING + sum(each.seconds for each in checks)
    head = f"ended by  takes  {len(checks)} checks, {whole / 60:.1f} minutes in all; +: what time is left"
    return "\n".join([head, *told])


def told(row: Row) -> str:
    """A row's goals, in lines, as far as they are a GPU's; what went wrong, if it failed."""
    if "error" in row:
        return f"FAILED {row['check']}: {row['error'].strip().splitlines()[-1]}"
    if row["device"] == CPU.type:
        return f"works  {row['check']}"
    if "skipped" in row["found"]:
        return f"skipped {row['check']}: {row['found']['skipped']}"
    words = []
    for each in row["found"].get("verdicts", ()):
        figure = f"{each['is']:.4g}" if isinstance(each["is"], float) else each["is"]
        goal = f", at most {each['goal']:g}" if "goal" in each else ""
        words.append(f"{'met   ' if each['met'] else 'MISSED'} {each['what']} {figure}{goal}")
    return "\n".join(words)


def table(found: Mapping[str, Row]) -> str:
    """All goals of a record, and what has not run."""
    missing = [each.name for each in CHECKS if each.name not in found]
    last = [f"not run: {', '.join(missing)}"] if missing else []
    return "\n".join([text for row in found.values() if (text := told(row))] + last)


# ---- all of it ----------------------------------------------------------------------------------------


def carry_out(checks: Sequence[Check], minutes: float, record: Path, device: torch.device) -> bool:
    """Run what is left, in order, as long as there is time; whether nothing failed."""
    end = time.monotonic() + 60 * minutes
    where = machine(device)
    found = recorded(record, where["device"])
    worker, well = Worker(device), True
    for each in in_order(checks, found):
        left = end - time.monotonic() - (0 if worker.begun else BEGINNING)
        if each.seconds > left:
            print(f"{each.name}: not begun, it takes {each.seconds} s and {max(0, left):.0f} are left")
            continue
        seconds = left if each.fills else min(PATIENCE * each.seconds, left)
        ended = {name: row["found"] for name, row in found.items() if "error" not in row}
        begun = time.monotonic()
        row = worker.run(each, seconds, ended)
        kept = {"check": each.name, "took": time.monotonic() - begun, **where}
        kept |= {"error": row["error"]} if "error" in row else {"found": row}
        append(record, json.dumps(kept))
        found[each.name] = kept
        well = well and "error" not in row
        if text := told(kept):
            print(text, flush=True)
    worker.end()
    return well


def machine(device: torch.device) -> dict[str, Any]:
    """The GPU, the versions and the code that figures belong to."""
    if device == CPU:
        return {"device": CPU.type, **hardware()}
    import triton

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "device": torch.cuda.get_device_properties(0).name,
        **hardware(),
        "driver": subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "triton": triton.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=12.0, help="of the machine, in all")
    parser.add_argument("--only", metavar="NAME,...", help="the checks whose names begin so")
    parser.add_argument("--dry", action="store_true", help="print what would run, and for how long")
    parser.add_argument("--cpu", action="store_true", help="run each check small, on a CPU")
    parser.add_argument("--record", type=Path, default=RECORD, metavar="FILE", help="where results are kept")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print what a record holds, and no more")
    options = parser.parse_args()
    try:
        checks = chosen(options.only)
    except ValueError as error:
        parser.error(f"--only {options.only}: {error}")
    device = CPU if options.cpu else CUDA
    if options.table:
        try:
            check_record(options.table)
        except ValueError as error:
            parser.error(f"--table {options.table}: {error}")
        for name in dict.fromkeys(row["device"] for row in lines(options.table, entry)):
            print(f"{name}\n{table(recorded(options.table, name))}")
        return 0
    if options.dry:
        print(f"{plan(checks, options.minutes)}\n\n{needs(checks, options.record)}")
        return 0
    if not options.cpu and not torch.cuda.is_available():
        parser.error("torch sees no GPU here: write --dry to see what would run, or --cpu to try it")
    return 0 if carry_out(checks, options.minutes, options.record, device) else 1


if __name__ == "__main__":
    sys.exit(main())
