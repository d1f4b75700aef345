"""How fast a cluster that one may not have would run each strategy, from the fastest on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tacit.algorithms import known, parse
from tacit.algorithms.auto import shaped
from tacit.algorithms.registry import ENTRIES
from tacit.errors import ConfigError, TacitError
from tacit.planning.cluster_prediction import BASE, Prediction, computing, predict
from tacit.planning.profile import Profile
from tacit.planning.simulation.clock import Network
from tacit.planning.simulation.costs import LARGEST, CostLacking, how_to_measure, without_cost
from tacit.planning.simulation.networks import LATENCY, between_gpus, of_ring
from tacit.strategy import AnyStrategy
from tacit.transports.process_groups import connections
from tacit_lab.cluster import Cluster

CANDIDATES = (
    "ddp",
    "bf16",
    "int8",
    "efsign",
    "topk",
    "dgc",
    "powersgd",
    "lowbit",
    "localsgd",
    "diloco:bits=4",
    "streaming-diloco",
    "ednncomm",
    "daso",
)
"""The default candidates: one of each kind that is worth a try on slow links."""
FOR_ADAM = ("onebit-adam", "zeroone-adam")
"""The others, where it is known that the optimizer is Adam."""
_UNPLANNED = ("parameter server", "automatic")
WINDOW = 2.6e6
"""The bytes that a connection of Gloo carries in a round trip, with Linux's buffers (docs/network.md)."""
FRAMES = 1448 / 1514
"""The share of a link's bytes that is payload: TCP with time stamps, in Ethernet frames of 1,500 bytes."""


@dataclass(frozen=True)
class ClusterPlan:
    """Predictions for one cluster.

    Attributes:
        predictions: from the fastest on.
        refused: by algorithm, why it could not be predicted.
        compute: seconds of a step if communication cost nothing.
        where: the GPU or the processor that the profile is of.
        kind: what computes, and by what DDP exchanges; `optimizer`: what steps, "" if that is not known.
        unweighed: what is planned by default, and is not in the profile.
        line: the clusters by which costs are extrapolated, such as "4x8 and 8x8"; "": none is.
        measuring: how to measure the costs that the profile lacks; none if it lacks none.
    """

    network: Network
    predictions: tuple[Prediction, ...]
    refused: Mapping[str, str]
    compute: float
    where: str
    measuring: str = ""
    kind: str = ""
    optimizer: str = ""
    unweighed: tuple[str, ...] = ()
    line: str = ""

    @property
    def base(self) -> Prediction | None:
        """Plain DDP, if it was asked for."""
        return next((each for each in self.predictions if each.algorithm == BASE), None)

    def speedup(self, prediction: Prediction) -> float | None:
        """How many times as fast as DDP."""
        return None if self.base is None else self.base.seconds / prediction.seconds


def every_algorithm() -> list[str]:
    """All algorithms that need no server, by their defaults."""
    return [name for name in known() if ENTRIES[name].family not in _UNPLANNED]


def told_apart(texts: Iterable[str]) -> list[str]:
    """The first text of each strategy, of which one may have several: `topk` is `topk:ratio=0.01`."""
    first: dict[AnyStrategy, str] = {}
    for text in texts:
        first.setdefault(parse(text), text)
    return [*first.values()]


def layouts(nodes: int, ranks: int) -> list[tuple[int, int]]:
    """The clusters on which to measure what a strategy costs on one of this size."""
    return [(nodes, ranks)] if nodes <= LARGEST else [(LARGEST // 2, ranks), (LARGEST, ranks)]


def shapes_worth_a_look(profile: Profile, network: Network) -> list[str]:
    """The shapes of an all-reduce that would be faster than a ring here, if their computing cost nothing."""

    def least(text: str) -> float:
        strategy = parse(text)
        free = without_cost(strategy, profile, network.nodes, network.ranks)
        return predict(strategy, profile.with_costs([free]), network).seconds

    by_node = ["dense:topology=hierarchical"] if network.nodes > 1 and network.ranks > 1 else []
    texts = [*shaped(network.nodes, network.ranks), *by_node]
    ring = least("dense") if texts else 0.0
    return [text for text in texts if least(text) < ring]


def plan(
    profile: Profile,
    network: Network,
    texts: Sequence[str],
    memory: float | None = None,
    unfit: Mapping[str, str] | None = None,
) -> ClusterPlan:
    """Predict every candidate.

    Args:
        texts: the texts of the strategies.
        memory: bytes that a rank may use; None: without limit.
        unfit: the reasons why others do not fit the optimizer.

    Raises:
        ConfigError: none of them can be predicted; the message has the reasons of the first.
    """
    found: list[Prediction] = []
    refused = dict(unfit or {})
    lacking = []
    for text in texts:
        try:
            prediction = predict(parse(text), profile, network)
            if memory is not None and prediction.memory > memory:
                raise ConfigError(
                    f"it needs {prediction.memory / 1e9:.2f} GB of a rank, of {memory / 1e9:.2f} GB given"
                )
            found.append(prediction)
        except CostLacking as error:
            refused[text] = error.why
            lacking.append(text)
        except TacitError as error:
            refused[text] = str(error)
    measuring = how_to_measure(profile, lacking, network.nodes, network.ranks) if lacking else ""
    if not found:
        whys = [f"{name}: {why}" for name, why in refused.items()] or ["no algorithm was given"]
        if len(whys) > 2:
            whys[2:] = [f"and so on, of {len(whys)} in all"]
        told = f"nothing can be predicted: {'; '.join(whys)}"
        raise ConfigError("\n".join(filter(None, (told, measuring))))
    found.sort(key=lambda each: each.seconds)
    where = profile.processor if profile.gpu is None else profile.gpu.name
    return ClusterPlan(
        network,
        tuple(found),
        refused,
        computing(profile, network),
        where,
        measuring,
        kind=profile.kind,
        optimizer=profile.stepped_by,
        line=_line(profile, network),
    )


def _line(profile: Profile, network: Network) -> str:
    """The two clusters by which costs are extrapolated to this one; none, if they were measured on it."""
    counts = sorted({each.nodes for each in profile.costs if each.ranks == network.ranks})
    if network.nodes in counts:
        return ""
    return " and ".join(f"{count}x{network.ranks}" for count in counts[-2:])


def described(
    nodes: int,
    ranks: int,
    rates: Sequence[float | None],
    latency: float,
    profile: Profile,
    *,
    cores: float | None = None,
    emulated: bool = False,
    pace: float = math.inf,
) -> Network:
    """A cluster by its description.

    Args:
        rates: bit/s of the nodes' links; None: as fast as the processors.
        latency: seconds that a link adds, one way.
        cores: of each node; None: as many as its ranks can use.
        emulated: whether all nodes are on the machine of the profile, as in the testbed.
        pace: bytes a second of one connection, where packets are lost.
    """
    slowest = min((rate for rate in rates if rate is not None), default=math.inf)
    uneven = len({*rates}) > 1
    own = ranks * (profile.threads + 1) if cores is None else cores
    most, one = slowest * FRAMES / 8, min(pace, WINDOW / (2 * latency) if latency else math.inf)
    return replace(
        between_gpus(of_ring(nodes, ranks, min(most, one), latency + LATENCY, profile), profile),
        cores=profile.cores if emulated else own,
        sharing=nodes * ranks if emulated else ranks,
        rates=tuple(min((rate or math.inf) * FRAMES / 8, one) for rate in rates) if uneven else (),
        connections=min(connections(), most / min(most, one)) if math.isfinite(most) else 1.0,
    )


def without_rate(network: Network) -> str:
    """A few words where the links between nodes have no limit, as a cluster without a rate has; else none."""
    if network.nodes == 1 or network.rate < math.inf:
        return ""
    return f"no rate is given, so links have no limit: write {network.nodes}x{network.ranks}@10gbit, say"


def of_cluster(
    shape: Cluster, profile: Profile, *, cores: float | None = None, emulated: bool = False
) -> Network:
    """A cluster by its text; see `described`."""
    rates = [shape.free_rate_of(node) for node in range(shape.nodes)]
    return described(
        *(shape.nodes, shape.ranks_per_node, rates, shape.most_latency, profile),
        cores=cores,
        emulated=emulated,
        pace=shape.pace,
    )
