"""How a step grows with the number of nodes: DDP and gossip, in the testbed and by the planner's clock.

`python benchmarks/order.py --only gossip` runs it. A rank computes next to nothing (one sample through two
layers of 1.05 million parameters), and links carry 50 Mbit/s, so that a step is what its messages take. In
the testbed 4 and 8 nodes share the machine's cores; by the clock there are 4, 8 and 16, and each has cores of
its own. Promised: from 4 to 8 nodes in the testbed, and from 4 to 16 by the clock, the step of a graph in
which a rank has as many neighbours in each of them takes within 10 % of the same time.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launched import in_testbed, tell

MBIT = 50
TESTBED, CLOCK = (4, 8), (4, 8, 16)
ARMS = ("ddp", "gossip:graph=ring", "sgp", "gossip:graph=exponential")
CONSTANT = ("gossip:graph=ring", "sgp")
"""Those in which a rank has as many neighbours however many ranks there are."""
PROMISED = 0.1
_STEPS, _BLOCKS, _WARM = 2, 5, 5


def rank_main(nodes: str, quick: bool) -> None:
    """Time the arms on so many nodes, and take what the clock needs; rank 0 tells."""
    from torch.nn.parallel import DistributedDataParallel

    from arms import Blocks, Trainer, ranks, timed
    from scaling import small_work
    from tacit.algorithms import parse
    from tacit.levels.spec import AttachSpec
    from tacit.planning.step_profiler import SKIPPED, STEPS, take
    from tacit.planning.step_timer import StepTimer
    from tacit.planning.strategy_costs import measured_cost

    with ranks() as rank:
        trainer = Trainer("noop", work=small_work())
        replica = trainer.model
        assert isinstance(replica, DistributedDataParallel)
        timer = StepTimer(replica.module, [trainer.optimizer], dict(replica.module.named_parameters()))
        for _ in range(SKIPPED + STEPS + 1):
            trainer.step()
        timer.close()
        spec = AttachSpec(model=replica, optimizers=[trainer.optimizer], strategy=parse("dense"))
        profile = take(timer, spec)
        costs = [measured_cost(parse(arm), profile, count, 1) for count in CLOCK for arm in ARMS]
        trainers = {arm: Trainer(arm, work=small_work()) for arm in ARMS}
        for each in trainers.values():
            each.steps(_WARM)
        blocks = {arm: Blocks(each, _STEPS) for arm, each in trainers.items()}
        seconds = timed(blocks, 2 if quick else _BLOCKS)
        if rank == 0:
            megabytes = {arm: each.megabytes for arm, each in blocks.items()}
            told = profile.with_costs(costs).to_json()
            tell({"profile": told, "seconds": seconds, "megabytes": megabytes})
        for each in trainers.values():
            each.close()


def rows(quick: bool, script: str) -> list[dict[str, Any]]:
    """A row an arm and number of nodes. `script`: what calls `rank_main` in a rank."""
    found = []
    profile = None
    for nodes in TESTBED:
        words = [script, "--only", "gossip", "--rank", str(nodes), *(["--quick"] if quick else [])]
        told = in_testbed(f"{nodes}x1@{MBIT}mbit", words, timeout=900)
        profile = profile or told["profile"]
        found += [_row("testbed", nodes, arm, told["seconds"][arm], told["megabytes"][arm]) for arm in ARMS]
    found += [_by_clock(profile, nodes, arm) for nodes in CLOCK for arm in ARMS]
    for row in found:
        print(_line(row), file=sys.stderr, flush=True)
    return found


def _by_clock(profile: Any, nodes: int, arm: str) -> dict[str, Any]:
    from tacit.algorithms import parse
    from tacit.planning.cluster_prediction import predict
    from tacit.planning.profile import Profile
    from tacit_lab.cluster_plans import described

    taken = Profile.from_json(profile)
    network = described(nodes, 1, [1e6 * MBIT] * nodes, 0.0, taken)
    predicted = predict(parse(arm), taken, network)
    return _row("clock", nodes, arm, [predicted.seconds], predicted.bytes_out / 1e6)


def _row(how: str, nodes: int, arm: str, seconds: Sequence[float], megabytes: float) -> dict[str, Any]:
    ms = [1e3 * each for each in seconds]
    return {
        "how": how,
        "nodes": nodes,
        "arm": arm,
        "ms": statistics.median(ms),
        "blocks_ms": ms,
        "megabytes": megabytes,
    }


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['how']:8} {row['nodes']:3} nodes {row['arm']:26} {row['ms']:8.1f} ms "
        f"{row['megabytes']:7.2f} MB a node"
    )


def verdicts(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By how much a step on the most nodes takes longer than on the fewest."""
    grown = []
    for how, counts in (("testbed", TESTBED), ("clock", CLOCK)):
        for arm in ARMS:
            ms = {row["nodes"]: row["ms"] for row in found if (row["how"], row["arm"]) == (how, arm)}
            more = ms[counts[-1]] / ms[counts[0]] - 1
            met = abs(more) <= PROMISED if arm in CONSTANT else None
            grown.append({"what": f"{arm}, {counts[0]} to {counts[-1]} nodes, {how}", "is": more, "met": met})
    return grown


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """The rows, as the documents show them."""
    columns = [("testbed", nodes) for nodes in TESTBED] + [("clock", nodes) for nodes in CLOCK]
    head = [
        f"| arm | {' | '.join(f'{nodes} nodes, {how}' for how, nodes in columns)} |",
        f"|---|{'---:|' * len(columns)}",
    ]
    ms = {(row["how"], row["nodes"], row["arm"]): row["ms"] for row in found}
    lines = [f"| `{arm}` | {' | '.join(f'{ms[*each, arm]:.0f}' for each in columns)} |" for arm in ARMS]
    return "\n".join([*head, *lines])
