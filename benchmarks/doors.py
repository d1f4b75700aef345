"""A GPT on two machines of two ranks: plain DDP, and FSDP2 in each machine with tacit between them.

    python benchmarks/doors.py              # about an hour; goes on where it was interrupted
    python benchmarks/doors.py --quick      # about 4 minutes: fewer blocks and steps, one seed, one rate
    python benchmarks/doors.py --only time  # one part: time, memory or loss
    python benchmarks/doors.py --table benchmarks/results/DATE-doors.json    # the tables as Markdown

A GPT of 10 million parameters learns to read Python's own library byte by byte: 2 samples of 128 bytes a rank
and step, AdamW, bf16 autocast with parameters and gradients in fp32, one thread a rank. All arms but `ddp`
shard it over the two ranks of a node.

* `time`: seconds a step on 2x2@100mbit, and the bytes that a node's interface sends. All arms interleaved.
* `memory`: how far a rank's memory rises above what it was before the model was made. A launch each.
* `loss`: on held-out files, nats a byte. What is trained does not depend on the links, so these are as fast
  as the machine's. `ddp` and `diloco` have the best of some learning rates, by the loss of a seed that is not
  counted, and more are tried where the best is at an end; others have that of `ddp`.

Arms: `ddp`, torch's; `near-only`, FSDP2 in each node and nothing between nodes, which is the limit; `dense`,
gradients in fp32 between nodes; `int4`, gradients in 4 bits with error feedback; `diloco`, parameters every
32 steps in 4 bits, by an outer optimizer; `localsgd`, their plain mean every 8 steps in 4 bits. `dense`
trains what `ddp` trains but for rounding, so it has no loss of its own.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kept import StateSlice
from launched import in_testbed, refuse_early
from markdown_tables import markdown
from paired import ROOT, add_table, commit, conclude, hardware, paired_ratio
from tacit_lab.intervals import Mean

ARMS = ("ddp", "near-only", "dense", "int4", "diloco", "localsgd")
TRAINED = ("ddp", "int4", "diloco", "localsgd")
SHAPED, FULL_SPEED = "2x2@100mbit", "2x2"
RATES, USUAL = (5e-4, 1e-3, 2e-3), 1e-3
SEARCHED = ("ddp", "diloco")
"""The arms with a rate of their own; others have that of `ddp`."""
SEEDS, CHOOSING = (0, 1, 2), 3
STEPS = 300
ROWS = ROOT / "tacit-out" / "doors-rows.jsonl"
PARTS = ("time", "memory", "loss")


# ---- in a rank ----------------------------------------------------------------------------------------


def rank_main(words: Sequence[str]) -> None:
    """What the launched process does."""
    import sharded_gpt

    part, *rest = words
    if part == "time":
        sharded_gpt.timed(int(rest[0]))
    elif part == "memory":
        sharded_gpt.memory(rest[0])
    else:
        sharded_gpt.losses(rest[0], int(rest[1]), float(rest[2]), int(rest[3]))


# ---- outside ------------------------------------------------------------------------------------------


class Launches:
    """Launches of ranks; what one has told is kept, and is not asked for again."""

    def __init__(self, kept: StateSlice) -> None:
        self._kept = kept

    def told(self, cluster: str, *words: object) -> Any:
        """What rank 0 of this launch tells, now or before an interruption."""
        asked = {"cluster": cluster, "words": [str(word) for word in words]}
        done = self._kept.find(asked)
        if done is None:
            found = in_testbed(cluster, [__file__, "--rank", *asked["words"]], timeout=1500)
            done = {**asked, "commit": commit(), "found": found}
            self._kept.keep(done)
        return done["found"]


def times(launches: Launches, blocks: int) -> list[dict[str, Any]]:
    """A row for each arm: seconds a step, in pairs with plain DDP and with the limit."""
    found = launches.told(SHAPED, "time", blocks)
    seconds = {arm: found[arm]["step_seconds"] for arm in ARMS}
    return [
        {
            "arm": arm,
            "step_ms": 1e3 * statistics.median(seconds[arm]),
            "blocks_ms": [1e3 * each for each in seconds[arm]],
            "speedup_over_ddp": paired_ratio(seconds["ddp"], seconds[arm]),
            "of_near_only": paired_ratio(seconds["near-only"], seconds[arm]),
            "mb_per_step_and_node": found[arm]["mb_per_step_and_node"],
            "parameters": found[arm]["parameters"],
        }
        for arm in ARMS
    ]


def memories(launches: Launches) -> list[dict[str, Any]]:
    """A row for each arm: its peak, and what of it is tacit's."""
    found = {arm: launches.told(FULL_SPEED, "memory", arm) for arm in ARMS}
    least = found["near-only"]["peak_mb"]
    return [{"arm": arm, **found[arm], "of_near_only": found[arm]["peak_mb"] / least} for arm in ARMS]


def trained(
    launches: Launches, seeds: Sequence[int], rates: Sequence[float], steps: int
) -> list[dict[str, Any]]:
    """A row for each arm: its rate, its losses, and how far they are from plain DDP's, in per cent."""

    def loss(arm: str, seed: int, rate: float) -> float:
        found = launches.told(FULL_SPEED, "loss", arm, seed, rate, steps)["loss"]
        return math.inf if found is None else float(found)

    rows: list[dict[str, Any]] = []
    for arm in TRAINED:
        tried: dict[float, float] = {}
        rate = rows[0]["rate"] if rows else rates[0]
        if len(rates) > 1 and arm in SEARCHED:
            tried = searched(partial(loss, arm, CHOOSING), rates)
            rate = min(tried, key=lambda each: tried[each])
        losses = [loss(arm, seed, rate) for seed in seeds]
        base = rows[0]["losses"] if rows else losses
        gaps = [100 * (mine / ddps - 1) for mine, ddps in zip(losses, base, strict=True)]
        rows.append({"arm": arm, "rate": rate, "tried": tried, "losses": losses, **interval(gaps)})
    return rows


def searched(loss: Callable[[float], float], rates: Sequence[float]) -> dict[float, float]:
    """The losses of `rates`, and of up to four beyond them while the best is at an end."""
    tried = {rate: loss(rate) for rate in rates}
    while len(tried) < len(rates) + 4:
        best = min(tried, key=lambda each: tried[each])
        if min(tried) < best < max(tried):
            break
        further = best / 2 if best == min(tried) else 2 * best
        tried[further] = loss(further)
    return tried


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """The mean of some differences, and half of its 95 % interval; None of one."""
    mean = Mean.of(values)
    assert mean is not None
    return {"gap_percent": mean.mean, "gap_half": mean.half}


# ---- as text ------------------------------------------------------------------------------------------


def as_text(result: Mapping[str, Any]) -> str:
    """The parts that were measured, as Markdown tables."""
    parts = (("time", _times), ("memory", _memories), ("loss", _losses))
    return "\n\n".join(make(result[name]) for name, make in parts if result.get(name))


def _times(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("arm", "ms a step", "times as fast as ddp", "of near-only", "MB a step and node")
    return markdown(
        head,
        [
            (
                row["arm"],
                f"{row['step_ms']:.0f}",
                _ratio(row["speedup_over_ddp"]),
                _ratio(row["of_near_only"]),
                f"{row['mb_per_step_and_node']:.2f}",
            )
            for row in rows
        ],
    )


def _ratio(found: Mapping[str, float]) -> str:
    return f"{found['median']:.2f} ({found['q1']:.2f} to {found['q3']:.2f})"


def _memories(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("arm", "peak MB a rank", "of near-only", "of it tacit's")
    return markdown(
        head,
        [
            (row["arm"], f"{row['peak_mb']:.0f}", f"{row['of_near_only']:.2f}", f"{row['own_mb']:.1f}")
            for row in rows
        ],
    )


def _losses(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("arm", "rate", "losses", "above ddp, %")
    return markdown(
        head,
        [
            (
                row["arm"],
                f"{row['rate']:g}",
                ", ".join(f"{each:.3f}" for each in row["losses"]),
                f"{row['gap_percent']:+.2f}"
                + ("" if row["gap_half"] is None else f" ± {row['gap_half']:.2f}"),
            )
            for row in rows
        ],
    )


def main() -> None:
    """Measure, print, and with --save keep the result under benchmarks/results/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer blocks and steps, one seed, one rate")
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-doors.json")
    add_table(parser)
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank)
        return
    if options.table is not None:
        print(as_text(options.table))
        return
    refuse_early(SHAPED)
    quick, asked = options.quick, (options.only,) if options.only else PARTS
    kept = StateSlice(ROWS)
    launches = Launches(kept)
    result: dict[str, Any] = {"benchmark": "doors", "quick": quick, "hardware": hardware()}
    if "time" in asked:
        result["time"] = times(launches, 2 if quick else 6)
    if "memory" in asked:
        result["memory"] = memories(launches)
    if "loss" in asked:
        seeds, rates = ((0,), (USUAL,)) if quick else (SEEDS, RATES)
        result["loss"] = trained(launches, seeds, rates, 40 if quick else STEPS)
    conclude(result, as_text(result), options)
    kept.forget()


if __name__ == "__main__":
    main()
