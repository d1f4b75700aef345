"""What `auto` chooses, and plans predict, over emulated wires, against what was measured there; of `gpu.py`.

The planner is told the wire, of which one rank alone measures nothing; the rest is as in a training: steps,
kernels and launches are measured on the GPU, where nothing waits for a wire. The wire of the table is in
tacit's messages alone, so plain DDP counts as `dense`, which sends the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import tacit
from gpu_checks import Check, Row, Setting, verdict
from gpu_steps import GBIT, PEERS, WIRED, Training, training, wired
from made_up_gpu import WIRED as SENT_AS
from made_up_gpu import compared
from paired import ROOT
from tacit.algorithms import parse
from tacit.api.auto import AutoSession
from tacit.attaching.arguments import model_of
from tacit.environment import STEP_PROFILE
from tacit.levels.spec import AttachSpec
from tacit.planning import gpu_profiler, planner, step_profiler
from tacit.planning.candidates import CandidateCheck
from tacit.planning.decider import Choice
from tacit.planning.profile import GpuLinks, Profile
from tacit.strategy import AutoStrategy

MEASURED = {
    "ddp": "dense",
    "dense": "dense",
    "topk:ratio=0.01": "topk",
    "powersgd": "powersgd",
}
"""What `auto` chooses among, by what was measured for it: it sends the same from one rank as from several."""
WITHIN = 1.05
"""How many times as long as the best of the table a step with the chosen one may take."""
PROFILE = ROOT / "build" / "gpu-profile.json"
"""Where the profile is kept: `tacit plan` and `tacit diagnose` read it."""
OFF = 0.15
"""The most by which a predicted step may differ from the measured one."""


@contextlib.contextmanager
def told(gbit: float) -> Iterator[None]:
    """Have the planner know the emulated wire, and choose among the measured ones."""
    links = GpuLinks(rate=gbit * 1e9 / 8)
    with (
        patch.object(planner, "layout", lambda options: [[rank] for rank in range(PEERS)]),
        patch.object(gpu_profiler, "gpu_links", lambda options, device: links),
        patch.object(CandidateCheck, "texts", lambda self, accept: [*MEASURED]),
    ):
        yield


def chosen(each: Training) -> Choice:
    """What `auto` chooses after its first steps; `attach` would say that one rank has nothing to choose."""
    strategy = parse("auto:accept=feedback,watch=none")
    assert isinstance(strategy, AutoStrategy)
    model, optimizers = model_of(each.model, None, None), [each.optimizer]
    spec = AttachSpec(model=model, optimizers=optimizers, strategy=strategy)
    session = AutoSession(spec, strategy, planner.Planner())
    try:
        for _ in range(40):
            each.step()
            if session.choice is not None:
                return session.choice
        raise AssertionError("nothing was chosen in 40 steps")
    finally:
        session.close()


def choices(setting: Setting) -> Row:
    """What is chosen at each rate, and how long choosing took; on a CPU nothing, as it has no events."""
    if setting.small:
        return {"rows": []}
    table = setting.found.get("wire") or wired(setting, [*dict.fromkeys(MEASURED.values())], GBIT)
    rows, verdicts = [], []
    for gbit in GBIT:
        measured = {
            row["algorithm"]: row["ms"]
            for row in table["rows"]
            if row["gbit"] == gbit and row["algorithm"] in MEASURED.values()
        }
        with told(gbit):
            each, begun = training(None, setting.device), time.perf_counter()
            choice = chosen(each)
            took = time.perf_counter() - begun
        best = min(measured, key=measured.__getitem__)
        ratio = measured[MEASURED[choice.algorithm]] / measured[best]
        predicted = {text: seconds and 1e3 * seconds for text, seconds in choice.considered}
        rows.append({"gbit": gbit, "chosen": choice.algorithm, "predicted_ms": predicted, "choosing_s": took})
        print(
            f"at {gbit:g} Gbit/s auto chooses {choice.algorithm} after {took:.1f} s, and predicts "
            f"{1e3 * choice.seconds:.1f} ms; the best is {best}, {measured[best]:.1f} ms",
            flush=True,
        )
        verdicts.append(verdict(f"auto at {gbit:g} Gbit/s: its step, of the best's", ratio, WITHIN))
    return {"rows": rows, "verdicts": verdicts}


def taken(each: Training, algorithms: list[str], out: Path) -> Profile:
    """The profile that a session takes of this training, with what these algorithms cost among `PEERS`.

    Args:
        each: without a session.
        out: where it is saved.
    """
    request = {"out": str(out), "algorithms": [*algorithms], "layouts": [(PEERS // 2, 1), (PEERS, 1)]}
    with (
        patch.dict(os.environ, {STEP_PROFILE: json.dumps(request)}),
        patch.object(step_profiler, "_TAKEN", []),
    ):
        each.session = tacit.attach(each.model, each.optimizer, "dense")
        for _ in range(step_profiler.SKIPPED + step_profiler.STEPS + 1):
            each.step()
        each.close()
    return Profile.load(out)


def foretold(setting: Setting) -> Row:
    """What plans by a profile of this GPU predict over the wire, against the measured steps; it is kept."""
    if setting.small:
        return {"rows": []}
    table = setting.found.get("wire") or wired(setting, WIRED, GBIT)
    algorithms = ["ddp", *(SENT_AS.get(each, each) for each in WIRED)]
    PROFILE.parent.mkdir(exist_ok=True)
    profile = taken(training(None, setting.device), algorithms, PROFILE)
    rows, verdicts = [], []
    measured = [each | {"peers": table["peers"]} for each in table["rows"]]
    for algorithm, gbit, predicted, real in compared(profile, measured):
        row: Row = {"algorithm": algorithm, "gbit": gbit, "predicted_ms": 1e3 * predicted, "ms": 1e3 * real}
        rows.append(row)
        print(f"{algorithm:12} at {gbit:g} Gbit/s: predicted {1e3 * predicted:.1f} ms, {1e3 * real:.1f}")
        off = abs(predicted / real - 1)
        verdicts.append(verdict(f"{algorithm} at {gbit:g} Gbit/s: predicted step, off by", off, OFF))
    return {"profile": json.loads(PROFILE.read_text()), "rows": rows, "verdicts": verdicts}


CHECK = Check("auto", 24, "what auto chooses at 1, 10 and 100 Gbit/s, against the best of `wire`", choices)
CLOCK = Check("clock", 20, "a profile of this GPU, kept; what plans by it predict, against `wire`", foretold)
