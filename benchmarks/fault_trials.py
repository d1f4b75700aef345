"""Which faults are tried on which trainings, drawn from a seed: a campaign can go on where it stopped."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

FAMILIES = {
    "ddp": "ddp",
    "synchronous": "dense",
    "sparse": "topk:ratio=0.1",
    "momentum corrected": "dgc:ratio=0.05",
    "signs, two phases": "efsign",
    "quantized": "qsgd",
    "low rank": "powersgd",
    "lazy": "lag",
    "votes": "signsgd",
    "scheduled": "fusion:megabytes=0.1",
    "delayed": "pipesgd",
    "periodic": "localsgd:sync_every=3",
    "adaptive": "adacomm:sync_every=3,interval=4",
    "elastic": "easgd:sync_every=3",
    "outer step": "diloco:sync_every=4",
    "fragments, late": "streaming-diloco:sync_every=4,fragments=2,fragment_sync_delay=1",
    "by node": "ednncomm:sync_every=4",
    "by node, late": "daso",
    "predicted": "mp2:rescale=false,sync_every=2,budget=0.6,full_rounds=4,horizon=16",
    "residual kept": "predictive:sync_every=2",
    "neighbours": "sgp",
    "neighbours, late": "gossip:graph=ring,sync_every=2,late=1",
    "server": "ps",
    "server, bounded": "ps-ssp:bound=2",
    "server, async": "ps-async",
}
"""Family -> the algorithm that stands for it."""
SERVED = {"server", "server, bounded", "server, async"}
APART = {"server, bounded", "server, async"}
"""Where nobody waits for all, so that no two runs are equal, and one that ends early harms nobody."""

Where = Literal["rank", "outside", "disk"]
FATAL: dict[str, Where] = {
    "kill": "rank",
    "freeze": "rank",
    "exit": "rank",
    "raise": "rank",
    "segfault": "rank",
    "nan": "rank",
    "early end": "rank",
    "link down": "rank",
    "kill launcher": "outside",
    "kill server": "outside",
    "kill supervisor": "outside",
    "kill command": "outside",
    "interrupt command": "outside",
}
TRANSIENT: dict[str, Where] = {
    "freeze 3 s": "rank",
    "slow": "rank",
    "link 2 s": "rank",
    "full disk": "disk",
    "folder gone": "disk",
}
"""After these a training is to end as if nothing had been."""
KINDS = {**FATAL, **TRANSIENT}
LINKS = ("link down", "link 2 s")
WORLDS = (*3 * ("2x1", "3x1", "2x2", "1x4"), "1x3", "5x1", "3x2", "7x1", "4x2", "2x4")
"""What is drawn from: mostly small ones, which take fewer seconds."""
LAYOUTS = tuple(f"{nodes}x{ranks}" for nodes in range(1, 9) for ranks in range(1, 9) if nodes * ranks <= 8)
"""Every way to lay out up to eight ranks on nodes of as many each."""


@dataclass(frozen=True)
class Trial:
    """One run of the command.

    Attributes:
        families: whose algorithms are trained, one after the other.
        kind: of the fault; "none" for a run without.
        ranks: which ranks have it; those of one node share its link.
        step: before which step it comes, counted from 0.
    """

    number: int
    families: tuple[str, ...]
    cluster: str
    kind: str = "none"
    ranks: tuple[int, ...] = ()
    step: int = -1
    seed: int = 0

    @property
    def key(self) -> dict[str, Any]:
        """What tells it from others."""
        return {**asdict(self), "families": list(self.families), "ranks": list(self.ranks)}

    @property
    def undisturbed(self) -> Trial:
        """The same training without a fault."""
        return Trial(-1, self.families, self.cluster, seed=self.seed)

    @property
    def servers(self) -> int:
        """How many parameter servers it needs."""
        return int(bool(SERVED & {*self.families}))

    @property
    def world(self) -> int:
        """How many ranks there are."""
        nodes, ranks = map(int, self.cluster.split("x"))
        return nodes * ranks

    def about(self, folder: str, timeout: float) -> dict[str, Any]:
        """What `fault_rank.py` is told."""
        return {
            "algorithms": [FAMILIES[each] for each in self.families],
            "kind": self.kind,
            "ranks": list(self.ranks),
            "step": self.step,
            "seed": self.seed,
            "folder": folder,
            "timeout": timeout,
        }


def worlds(seed: int) -> Iterator[Trial]:
    """Every family in every layout, without a fault; a launch trains all that need no server."""
    plain = tuple(each for each in FAMILIES if each not in SERVED)
    for cluster in LAYOUTS:
        for families in (plain, *((each,) for each in FAMILIES if each in SERVED)):
            yield Trial(-1, families, cluster, seed=seed)


def faults(count: int, seed: int) -> list[Trial]:
    """So many faults: all kinds and all families as often as each other, as far as they go together."""
    draw = random.Random(seed)
    kinds: list[str] = []
    families: list[str] = []
    trials: list[Trial] = []
    while len(trials) < count:
        kinds = kinds or draw.sample(sorted(KINDS), len(KINDS))
        families = families or draw.sample(sorted(FAMILIES), len(FAMILIES))
        kind = kinds.pop()
        fitting = [each for each in families if fits(kind, each)]
        if not fitting:
            fitting = [each for each in sorted(FAMILIES) if fits(kind, each)]
            draw.shuffle(fitting)
        family = fitting[0]
        if family in families:
            families.remove(family)
        trials.append(_drawn(len(trials), family, kind, draw, seed))
    return trials


def fits(kind: str, family: str) -> bool:
    """Whether there is such a fault in such a training."""
    if kind == "kill server":
        return family in SERVED
    if kind == "early end":
        return family not in APART
    return not (kind == "nan" and family == "ddp")  # DDP does not look


def _drawn(number: int, family: str, kind: str, draw: random.Random, seed: int) -> Trial:
    # A link between nodes can only be cut where there are several.
    possible = [each for each in WORLDS if kind not in LINKS or not each.startswith("1x")]
    cluster = draw.choice(possible)
    nodes, per = map(int, cluster.split("x"))
    step = draw.randrange(1, 15)
    if KINDS[kind] != "rank":
        return Trial(number, (family,), cluster, kind, (0,), step, seed)
    # The store lives on the first node: a link that is cut there cuts everybody off from it, too.
    rank = draw.randrange(nodes * per)
    if kind in LINKS:
        node = rank // per
        return Trial(number, (family,), cluster, kind, (node * per,), step, seed)
    return Trial(number, (family,), cluster, kind, (rank,), step, seed)
