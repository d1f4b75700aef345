"""Hundreds of short trainings in which something breaks: who ends, when, naming whom, and what is left.

    python benchmarks/faults.py                  # hours; goes on where it was stopped
    python benchmarks/faults.py --quick          # 37 trials: 12 faults, two layouts, all scenes
    python benchmarks/faults.py --only faults    # or worlds, or scenes
    python benchmarks/fault_members.py           # 300 faults among members that come and go: by themselves

* `worlds`: every family of algorithms on 1 to 8 ranks, in every layout on nodes, without a fault.
* `faults`: one fault a trial, of kinds that end a training (a rank is killed, freezes, exits, raises, has a
  NaN, ends early, is cut off; the launcher, a server, the supervisor or the command is killed) and of kinds
  that must not (a rank freezes for 3 s or is slow, a link is down for 2 s, the disk is full, the folder of
  results is gone).
* `scenes`: what one run of `tacit run` cannot have, each kind once. Ranks without a launcher die as they
  attach and close, or with the store that all use; FSDP2; torchrun, one of its nodes or a server is killed,
  and comes back; limits of memory; forked children; damaged states and files; commands that cannot be. What
  cannot be made on a machine is told as skipped, with the reason.

Judged: all ends within the process group's time-out and ten seconds (and the seconds in which the command
ends the other nodes); the summary names the rank that had the fault; no process, interface, namespace or
folder is left; where the fault was of the second sort, all parameters are those of the run without it, to the
bit. In a scene every rank that is left has to name the fault, by an error of tacit's own. Needs root, for
links and disks. Trials are drawn from --seed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fault_runs import Found, judge, made
from fault_scenes import ENDING, SCENES, played
from fault_trials import FATAL, Trial, faults, worlds
from kept import StateSlice, fingerprint
from paired import RESULTS, hardware, save

OWN = ("faults.py", "fault_rank.py", "fault_runs.py", "fault_scenes.py", "fault_trials.py")
QUICK = {"1x7": "server", "3x2": "server, bounded"}
"""Layouts of the short form, and the one family of servers that is trained in each."""


class Campaign:
    """Trials, of which those that are kept are not made again."""

    def __init__(self, kept: StateSlice, code: str, mixed: bool = False) -> None:
        self._kept, self._code, self._mixed = kept, code, mixed
        self._plain: dict[str, Found] = {}

    def judged(self, trial: Trial) -> dict[str, Any]:
        """Its row."""
        about = {"trial": trial.key, "code_of": self._code}
        row = self._kept.find(about)
        if row is None and self._mixed:
            row = self._kept.find({"trial": trial.key})
            row = None if row is None or row["found"]["wrong"] else row
        if row is None and trial.kind in SCENES:
            row = {**about, "found": played(trial.kind).row}
            self._kept.keep(row)
        if row is None:
            found = made(trial)
            found.wrong = judge(trial, found, self._undisturbed(trial))
            row = {**about, "found": found.row}
            self._kept.keep(row)
        return row

    def _undisturbed(self, trial: Trial) -> Found | None:
        """The same training without a fault, where what it ends with is to be compared."""
        if trial.kind == "none" or trial.kind in FATAL:
            return None
        same = trial.undisturbed
        key = json.dumps(same.key)
        if key not in self._plain:
            row = self.judged(same)
            self._plain[key] = Found(**row["found"])
        return self._plain[key]


def rows_of(trials: Sequence[Trial], campaign: Campaign, jobs: int) -> list[dict[str, Any]]:
    """Make all trials, so many at a time."""
    rows = []
    with ThreadPoolExecutor(jobs) as pool:
        for i, row in enumerate(pool.map(campaign.judged, trials), 1):
            trial, found = row["trial"], row["found"]
            family = "+".join(trial["families"])[:20]
            skipped = found.get("skipped") and f"skipped: {found['skipped']}"
            said = "; ".join(found["wrong"]) or skipped or "ok"
            what = f"{trial['kind']:24} {family:20} {trial['cluster']:4} ranks {trial['ranks']}"
            print(f"{i:4}/{len(trials)} {what} {found['seconds']:6.1f} s  {said}", flush=True)
            rows.append(row)
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is counted of the trials."""
    wrong = [each for row in rows for each in row["found"]["wrong"]]
    skipped = {row["trial"]["kind"]: row["found"]["skipped"] for row in rows if row["found"].get("skipped")}
    ending = [
        row
        for row in rows
        if row["trial"]["kind"] in {*FATAL, *ENDING} and row["trial"]["kind"] not in skipped
    ]
    misnamed = sum(any("wrong name" in each for each in row["found"]["wrong"]) for row in rows)
    return {
        "trials": len(rows) - len(skipped),
        "skipped": skipped,
        "code": dict(Counter(row["code_of"] for row in rows)),
        "faults": sum(row["trial"]["kind"] != "none" for row in rows),
        "kinds": dict(sorted(Counter(row["trial"]["kind"] for row in rows).items())),
        "hangs": sum(each.startswith(("hang", "the command had")) for each in wrong),
        "wrong results": sum(each.startswith("wrong result") for each in wrong),
        "leftovers": sum(each.startswith("left behind") for each in wrong),
        "misnamed": misnamed,
        "right rank named": 1 - misnamed / len(ending) if ending else None,
        "other faults": sum(
            not each.startswith(("hang", "the command had", "wrong", "left behind")) for each in wrong
        ),
    }


def is_quick(world: Trial) -> bool:
    """Whether the short form has it."""
    return world.cluster in QUICK and (len(world.families) > 1 or world.families[0] == QUICK[world.cluster])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=320, help="how many faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time; with more, times mean less")
    parser.add_argument("--only", choices=("worlds", "faults", "scenes"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--mixed", action="store_true", help="take what other code did right, too, and say so"
    )
    parser.add_argument("--kept", type=Path, default=RESULTS / "faults-trials.jsonl", help="where rows are")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    options = parser.parse_args()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # so in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.geteuid() != 0:
        parser.error("links and disks are broken by root only: run it as root, in a container, say")
    trials: list[Trial] = []
    if options.only in (None, "worlds"):
        plain = list(worlds(options.seed))
        trials += [each for each in plain if not options.quick or is_quick(each)]
    if options.only in (None, "faults"):
        drawn = faults(options.count, options.seed)
        trials += drawn[:12] if options.quick else drawn
    if options.only in (None, "scenes"):
        trials += [Trial(-1, (), "", kind) for kind in SCENES]
    campaign = Campaign(StateSlice(options.kept), fingerprint(*OWN), options.mixed)
    rows = rows_of(trials, campaign, options.jobs)
    counted = summary(rows)
    print(json.dumps(counted, indent=1))
    if options.save:
        result = {"hardware": hardware(), "seed": options.seed, "summary": counted, "rows": rows}
        print(save("faults-quick" if options.quick else "faults", result))


if __name__ == "__main__":
    main()
