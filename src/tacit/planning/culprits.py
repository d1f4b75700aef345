"""The known reasons for slow steps: the signs of each, its cost, and what to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import fmean, median, median_low

from tacit.algorithms.auto import accuracy_hint
from tacit.links import LOSSY
from tacit.planning.diagnosis import Diagnosis, Facts, Finding, Shares, in_ms, shares, typical

WORTH = 0.03
"""The least share of the step that is reported as a finding."""
_SLOWER, _OFTEN = 1.15, 0.6
"""A rank is slow if its work takes this much longer than the others', in this share of the periods."""
_MUCH = 0.1
_SEVERAL = 1.3
"""How many times the rate of one stream several must have together, to be worth it."""
_FASTER = 1.5
_NEARER = 2.0
"""How many times the rate between nodes links inside a node must have, for exchanges by node to be faster."""
_BUCKET_BYTES, _GPU_BUCKET_BYTES = 25 << 20, 100 << 20
"""DDP's default; and what is worth a try on a GPU, where each bucket costs launches."""
_TINY_BYTES, _SEVERAL_BUCKETS = 1 << 20, 4
"""This many buckets smaller than DDP's first one are reported, even if the planner predicts no gain."""
_PAUSED = 0.006
"""The share of waiting for links that each node with BBR costs: the median of five pairs of runs with cubic
and with BBR, on 4 and on 8 nodes, where it was 0.002 to 0.013 (dev/log, 2026-11-25)."""
_OVER_PCIE = 1.2
"""The rate of a ring inside a node, in rates of copies to the host, up to which it goes by PCIe."""
_BEHIND = 0.95
"""A host that launches a pass in this share of the GPU's time for it leaves it nothing to be behind with."""
_HOW_TO_COPY = "pin_memory=True, and batch.to(device, non_blocking=True)"
_HOW_TO_LOAD = "more worker processes (num_workers=), prefetch_factor=, or data that is decoded beforehand"


def diagnosed(facts: Facts, notes: Iterable[str] = ()) -> Diagnosis:
    """The diagnosis of measured steps: their parts, and the findings, the costliest first.

    Args:
        notes: what could not be measured.
    """
    taken = shares(facts)
    # The planner may predict a longer wait than was measured. No change saves more than is waited, but larger
    # buckets, which save work as well.
    least = (facts.predicted or 0.0) * taken.limit / facts.seconds
    bounded = {
        name: took if name == "large buckets" else max(took, least) for name, took in facts.changes.items()
    }
    facts = replace(facts, changes=bounded)
    found = [finding for rule in _RULES for finding in rule(facts, taken)]
    found.sort(key=lambda each: -each.seconds)
    return Diagnosis(
        algorithm=facts.algorithm,
        steps=len(facts.ranks[0].wall),
        ranks=len(facts.ranks),
        seconds=facts.seconds,
        parts=taken.parts,
        limit=taken.limit,
        findings=tuple(found),
        traffic=_traffic(facts),
        notes=tuple(notes),
        passes=max(each.passes for each in facts.ranks),
    )


def _slow_rank(facts: Facts, taken: Shares) -> Iterable[Finding]:
    own = facts.own
    slowest = Counter(max(range(len(row)), key=row.__getitem__) for row in own)
    which, times = slowest.most_common(1)[0]
    mine = median(row[which] for row in own)
    others = [median(row[i] for row in own) for i in range(len(facts.ranks)) if i != which]
    if not others or times < _OFTEN * len(own) or mine < _SLOWER * median(others):
        return
    behind = fmean(max(row) - median_low(row) if row[which] == max(row) else 0.0 for row in own)
    costs = min(behind, taken.parts["slow rank"] * len(facts.ranks) / len(others))  # what the others wait
    if costs < WORTH * facts.seconds:
        return
    rank = facts.ranks[which]
    more = {part: rank.parts.get(part, 0.0) - typical(facts, part) for part in rank.parts}
    part = max(more, key=more.__getitem__)
    explained = sum(each for each in more.values() if each > 0) >= (mine - median(others)) / 2
    why = (
        f"what takes longer is mainly {_PARTS[part]}, by {in_ms(more[part])}"
        if explained
        else "the parts of its work do not take so much longer, as where a processor does other work, too"
    )
    says = (
        f"rank {rank.rank} (node {rank.node}, {rank.host}) takes {in_ms(mine)} a step by itself, and the "
        f"others {in_ms(median(others))}; {why}"
    )
    if explained and part == "loading":
        yield Finding("data loader", says, f"on that node: {_HOW_TO_LOAD}", costs)
    else:
        yield Finding(
            "slow rank",
            says,
            "see what else runs on that machine, and whether its processor is as fast as the others'; give "
            "that rank a smaller share of the batch, or average replicas less often ('localsgd')",
            costs,
        )


_PARTS = {
    "loading": "waiting for its data loader",
    "data": "work between steps",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer's step",
}


def _loader(facts: Facts, _: Shares) -> Iterable[Finding]:
    loading, working = typical(facts, "loading"), typical(facts, "data")
    if any(each.passes > 1 for each in facts.ranks):
        return  # with accumulation it includes the other passes
    if loading >= WORTH * facts.seconds:
        says = f"each rank waits {in_ms(loading)} a step for its data"
        how = f"{_HOW_TO_LOAD}; {_HOW_TO_COPY}" if facts.gpu else _HOW_TO_LOAD
        yield Finding("data loader", says, how, loading)
    if working >= _MUCH * facts.seconds:
        says = (
            f"the training thread itself works {in_ms(working)} between the optimizer's step and the next "
            "forward pass"
        )
        advice = "have worker processes load and transform the data (num_workers=), and log less often"
        yield Finding("data loader", says, advice, working)


def _links(facts: Facts, _: Shares) -> Iterable[Finding]:
    if facts.links is None or not facts.links.slow():
        return
    slow = facts.links.slow()
    rate = min(facts.links.rate[i][j] or 0.0 for i, j in slow)
    others = median(facts.links.between(facts.links.rate, slow))
    common = set.intersection(*(set(pair) for pair in slow))
    where = (
        f"the link of node {min(common)} ({facts.links.hosts[min(common)]})"
        if len(common) == 1
        else "the link from " + ", ".join(f"node {i} to node {j}" for i, j in slow[:4])
    )
    says = f"{where} carries {_mbit(rate)}, and the others {_mbit(others)}: all wait for it"
    costs = facts.saved("even links")
    if costs >= WORTH * facts.seconds:
        yield Finding(
            "slow link", says, "look at that cable, port and interface, or train without that node", costs
        )


def _threads(facts: Facts, taken: Shares) -> Iterable[Finding]:
    crowded = {
        machine: sum(each.threads for each in facts.ranks if each.machine == machine)
        for machine in {each.machine for each in facts.ranks}
    }
    for machine, threads in crowded.items():
        here = [each for each in facts.ranks if each.machine == machine]
        if threads > here[0].cores and max(each.threads for each in here) > 1:
            yield Finding(
                "threads",
                f"{len(here)} ranks compute with {here[0].threads} threads each on {here[0].cores} cores of "
                f"{here[0].host}, and get in each other's way",
                f"export OMP_NUM_THREADS={max(1, here[0].cores // len(here))} before torchrun, or "
                "torch.set_num_threads",
                facts.threads_gain * taken.parts["computing"],
            )
            return


def _unused(facts: Facts, _: Shares) -> Iterable[Finding]:
    if facts.searched and not facts.unused:
        yield Finding(
            "unused parameters",
            "DDP looks for unused parameters after every forward pass, and every parameter had a gradient",
            "DistributedDataParallel(..., find_unused_parameters=False)",
        )


def _views(facts: Facts, _: Shares) -> Iterable[Finding]:
    if facts.copying:
        yield Finding(
            "bucket views",
            "gradients are copied into DDP's buckets and back",
            "DistributedDataParallel(..., gradient_as_bucket_view=True), which also saves their memory",
            facts.copying,
        )


def _flat_ring(facts: Facts, _: Shares) -> Iterable[Finding]:
    costs = facts.saved("by node")
    if facts.links is None or costs < WORTH * facts.seconds:
        return
    far = median(facts.links.between(facts.links.rate))
    near = [facts.links.rate[i][i] for i in range(len(facts.links.hosts))]
    inside = median(rate for rate in near if rate is not None) if any(near) else 0.0
    if inside < _NEARER * far:
        return
    yield Finding(
        "flat ring",
        f"every rank exchanges with ranks of other nodes, over links of {_mbit(far)}, while ranks of a node "
        f"reach each other with {_mbit(inside)}",
        "average inside the nodes first: attach(model, optimizer, 'dense:topology=hierarchical'), or an "
        "algorithm by node",
        costs,
    )


def _small_buckets(facts: Facts, _: Shares) -> Iterable[Finding]:
    costs = facts.saved("large buckets")
    tiny = 0 < facts.bucket_bytes < _TINY_BYTES and facts.buckets >= _SEVERAL_BUCKETS
    large = _BUCKET_BYTES if facts.gpu is None else _GPU_BUCKET_BYTES
    if facts.bucket_bytes < large and (tiny or costs >= WORTH * facts.seconds):
        yield Finding(
            "small buckets",
            f"a round takes {facts.buckets} buckets of at most {facts.bucket_bytes / 2**20:.2g} MiB, and "
            f"each costs latency and {'launches' if facts.gpu else 'processor time'}",
            f"DistributedDataParallel(..., bucket_cap_mb={large >> 20})",
            costs,
        )


def _large_buckets(facts: Facts, _: Shares) -> Iterable[Finding]:
    """A bucket is sent when its last gradient is there: with few large ones most bytes may be sent last."""
    costs = facts.saved("smaller buckets")
    if costs >= WORTH * facts.seconds:
        yield Finding(
            "large buckets",
            f"gradients leave in {facts.buckets} buckets of at most {facts.bucket_bytes / 2**20:.3g} MiB, "
            "most of them when little of backward is left to hide them",
            "DistributedDataParallel(..., bucket_cap_mb=10)",
            costs,
        )


def _slow_interface(facts: Facts, taken: Shares) -> Iterable[Finding]:
    for each in facts.ranks:
        if each.faster and each.rate and (each.faster_rate or 0.0) >= _FASTER * each.rate:
            waited = taken.parts["links"]
            yield Finding(
                "slow interface",
                f"node {each.node} ({each.host}) sends by {each.interface}, which says {_mbit(each.rate)}, "
                f"and has {each.faster}, which says {_mbit(each.faster_rate or 0.0)}",
                f"export GLOO_SOCKET_IFNAME={each.faster} and NCCL_SOCKET_IFNAME={each.faster} on all nodes",
                waited * (1 - each.rate / (each.faster_rate or each.rate)),
            )
            return


def _connections(facts: Facts, _: Shares) -> Iterable[Finding]:
    """Gloo hands collectives to its connections in turns, so DDP needs smaller buckets, too."""
    links = facts.links
    if links is None or len(links.hosts) < 2 or facts.connections > 1 or _by_nccl(facts):
        return
    gains = [
        (several / one, i, j)
        for i, row in enumerate(links.rate)
        for j, one in enumerate(row)
        if i != j and one and (several := links.rate_of_flows[i][j])
    ]
    gain, i, j = max(gains)
    costs = facts.saved("several streams")
    if gain < _SEVERAL or (facts.predicted is not None and costs < WORTH * facts.seconds):
        return
    named = facts.ranks[0].interface or "eth0"
    yield Finding(
        "connections",
        f"from node {i} to node {j} one stream carries {_mbit(links.rate[i][j] or 0.0)}, and {links.flows} "
        f"together {_mbit(links.rate_of_flows[i][j] or 0.0)}",
        "export TACIT_CONNECTIONS=4 on all ranks, where tacit averages all numbers ('dense'); in plain DDP "
        f"GLOO_SOCKET_IFNAME={','.join([named] * 4)}, and DistributedDataParallel(..., bucket_cap_mb=4)",
        costs,
    )


def _losses(facts: Facts, _: Shares) -> Iterable[Finding]:
    worst = max(facts.ranks, key=lambda each: each.resent)
    if worst.resent > LOSSY and worst.congestion_control != "bbr":
        by = f" by {worst.congestion_control}" * bool(worst.congestion_control)
        yield Finding(
            "lost packets",
            f"node {worst.node} ({worst.host}) sent {100 * worst.resent:.2g} % of its segments again, as "
            f"they were lost on the way, and TCP slows down for each{by}",
            "sysctl -w net.core.default_qdisc=fq net.ipv4.tcp_congestion_control=bbr on all nodes, or "
            "several connections; if it is a cable, mend that",
        )


def _congestion_control(facts: Facts, taken: Shares) -> Iterable[Finding]:
    """BBR pauses each connection for 200 ms every ten seconds, and all other ranks wait."""
    nodes = len({each.node for each in facts.ranks if each.congestion_control == "bbr"})
    costs = taken.parts["links"] * min(1.0, _PAUSED * nodes)
    if costs >= WORTH * facts.seconds and max(each.resent for each in facts.ranks) <= LOSSY:
        yield Finding(
            "congestion control",
            f"TCP goes by BBR on {nodes} nodes, where each connection sends next to nothing for 200 ms "
            "every ten seconds, and all others wait for it",
            "sysctl -w net.ipv4.tcp_congestion_control=cubic on all nodes, if the network loses few packets",
            costs,
        )


def _launches(facts: Facts, _: Shares) -> Iterable[Finding]:
    """A GPU that is never behind the host waits for it."""
    launching = median_low(each.launching for each in facts.ranks)
    forward = typical(facts, "forward")
    queued = median_low(each.queued for each in facts.ranks)
    costs = max(0.0, forward + typical(facts, "backward") - queued) if queued else 0.0
    if launching >= _BEHIND * forward > 0 and (not queued or costs >= WORTH * facts.seconds):
        yield Finding(
            "launches",
            f"the host takes {in_ms(launching)} to launch a forward pass, and the GPU is done with it after "
            f"{in_ms(forward)}: it waits for the host",
            'a larger batch, torch.compile(model), or torch.compile(model, mode="reduce-overhead")',
            costs,
        )


def _switches(facts: Facts, _: Shares) -> Iterable[Finding]:
    """What is off, and would make products or convolutions faster."""
    if facts.gpu is None:
        return
    computing = typical(facts, "forward") + typical(facts, "backward")
    for kind, gain, says, advice in (
        (
            "TF32",
            facts.gpu.tf32_gain,
            "products of float32 matrices run without TF32, which saves {:.0f} % of one here",
            'torch.set_float32_matmul_precision("high"), or autocast',
        ),
        (
            "channels last",
            facts.gpu.channels_last_gain,
            "convolutions run on images laid out by channels, and the largest one saves {:.0f} % by pixels",
            "model.to(memory_format=torch.channels_last), and the same for the images",
        ),
    ):
        if gain * computing >= WORTH * facts.seconds:
            said = f"{says.format(100 * gain)}; of a step, at most what is said"
            yield Finding(kind, said, advice, gain * computing)


def _by_nccl(facts: Facts) -> bool:
    return facts.gpu is not None and facts.gpu.by_nccl


def _nccl_sockets(facts: Facts, _: Shares) -> Iterable[Finding]:
    """NCCL by TCP has one socket between two machines, where no cloud's own network is found."""
    gpu, links = facts.gpu, facts.links
    if gpu is None or not gpu.links.rate or links is None or len(links.hosts) < 2 or facts.sockets > 1:
        return
    several = median(links.between(links.rate_of_flows)) / 8
    costs = facts.saved("NCCL's sockets")
    if several >= _SEVERAL * gpu.links.rate and costs >= WORTH * facts.seconds:
        yield Finding(
            "NCCL's sockets",
            f"NCCL's ring carries {_mbit(8 * gpu.links.rate)} between nodes, and {links.flows} streams of "
            f"TCP {_mbit(8 * several)}",
            "export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4 on all nodes",
            costs,
        )


def _nvlink(facts: Facts, _: Shares) -> Iterable[Finding]:
    """Through PCIe a GPU reaches its neighbour no faster than the host."""
    gpu, costs = facts.gpu, facts.saved("NVLink")
    if gpu is None or not gpu.links.near_rate or costs < WORTH * facts.seconds:
        return
    if gpu.links.near_rate <= _OVER_PCIE * min(gpu.down, gpu.up):
        yield Finding(
            "PCIe",
            f"the GPUs of a node reach each other with {gpu.links.near_rate / 1e9:.1f} GB/s, and the host "
            f"with {min(gpu.down, gpu.up) / 1e9:.1f}: they go by PCIe. NVLink saves at most what is said",
            "nvidia-smi topo -m shows NV between GPUs that have NVLink: take such ones for a rank's node; if "
            "they have it, unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL; if not, an algorithm that sends less",
            costs,
        )


def _idle_interfaces(facts: Facts, _: Shares) -> Iterable[Finding]:
    fewest = min(facts.ranks, key=lambda each: len(each.idle))
    costs = facts.saved("all interfaces")
    if fewest.idle and fewest.rate and costs >= WORTH * facts.seconds:
        names = ",".join([fewest.interface, *fewest.idle])
        yield Finding(
            "idle interfaces",
            f"node {fewest.node} ({fewest.host}) sends by {fewest.interface} alone, and has "
            f"{' and '.join(fewest.idle)}, which say {_mbit(fewest.rate)}, too",
            f"export NCCL_SOCKET_IFNAME={names} and NCCL_CROSS_NIC=1"
            if _by_nccl(facts)
            else f"export GLOO_SOCKET_IFNAME={names}, with DistributedDataParallel(..., bucket_cap_mb=4)",
            costs,
        )


def _exchange(facts: Facts, taken: Shares) -> Iterable[Finding]:
    """What waiting costs on GPUs, where the planner predicts nothing."""
    costs = taken.parts["links"]
    if facts.ranks[0].gpu and facts.predicted is None and costs >= WORTH * facts.seconds:
        yield Finding(
            "links",
            f"from the last gradient to the optimizer's step {in_ms(costs)} pass, in which gradients are "
            "exchanged, or clipped and unscaled",
            "an algorithm that sends less, such as attach(model, optimizer, 'lowbit'); compare seconds of a "
            "step under TACIT_ALGORITHM=ddp and others",
            costs,
        )


def _strategy(facts: Facts, taken: Shares) -> Iterable[Finding]:
    """The cost of the exchange, if another strategy would be faster."""
    costs = facts.saved("strategy")
    if costs < WORTH * facts.seconds or not facts.best:
        return
    says = (
        f"a step waits {in_ms(taken.parts['links'])} for links and {in_ms(taken.parts['encoding'])} for "
        f"encoding; {facts.best} is predicted to take {in_ms(facts.seconds - costs)} a step"
    )
    kind = "encoding" if taken.parts["encoding"] > taken.parts["links"] else "links"
    advice = f'attach(model, optimizer, "{facts.best}")'
    name = facts.best.partition(":")[0]
    if name in _FREEZE_STEP:
        text = f"{facts.best}{',' if ':' in facts.best else ':'}freeze_step=N"
        advice = f'attach(model, optimizer, "{text}"), where N is {_FREEZE_STEP[name]}'
    if hint := accuracy_hint(facts.best):
        advice += f". {hint}"
    yield Finding(kind, says, advice, costs)


_FREEZE_STEP = {
    "onebit-adam": "a fifth of the training's steps",
    "zeroone-adam": "3 / (1 - beta2), 3000 with torch's default, which must be a small part of the training",
}
"""What a user must set, as the default is right for no other training."""


_RULES: tuple[Callable[[Facts, Shares], Iterable[Finding]], ...] = (
    _slow_rank,
    _loader,
    _links,
    _threads,
    _unused,
    _views,
    _flat_ring,
    _small_buckets,
    _large_buckets,
    _slow_interface,
    _connections,
    _losses,
    _congestion_control,
    _launches,
    _switches,
    _nccl_sockets,
    _nvlink,
    _idle_interfaces,
    _exchange,
    _strategy,
)


def _traffic(facts: Facts) -> str:
    busiest = max(facts.ranks, key=lambda each: each.sent)
    if not busiest.sent:
        return ""
    rate = 8 * busiest.sent / facts.seconds
    told = (
        f"Node {busiest.node} sends {busiest.sent / 1e6:.2f} MB a step by {busiest.interface}, "
        f"{_mbit(rate)} on average"
    )
    rows = () if facts.links is None else facts.links.rate
    rates = [(rate, i, j) for i, row in enumerate(rows) for j, rate in enumerate(row) if rate and i != j]
    if not rates:
        return told + "."
    carries, i, j = min(rates)
    return (
        f"{told}: {100 * rate / carries:.0f} % of what the slowest link carries, from node {i} to node {j}, "
        f"{_mbit(carries)} as measured."
    )


def _mbit(rate: float) -> str:
    return f"{rate / 1e6:.0f} Mbit/s"
