"""The cost of a strategy on a cluster, extrapolated from measured costs on smaller ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tacit.errors import ConfigError
from tacit.planning.profile import BucketCost, LevelCost, Profile, StrategyCost
from tacit.planning.simulation.rehearsal import BucketScript, LevelScript, rehearse
from tacit.strategy import AnyStrategy

LARGEST = 8
"""The most nodes for which a strategy's cost is measured; for more it is extrapolated."""
_LEAVING = 0.4
"""The share of the main thread's work on a round before it is sent: reading the parameters."""


@dataclass(frozen=True)
class CostOf:
    """The cost of a level, for the buckets and messages of a rehearsal."""

    cost: LevelCost
    script: LevelScript

    def segments(self, i: int) -> tuple[float, ...]:
        """The seconds of bucket `i` before its first message, between messages, and after the last."""
        bucket = self.script.buckets[i]
        found = _scaled(self._nearest(bucket), bucket)
        return _repeated(found, len(bucket.messages) + 1)

    def launching(self, i: int) -> float:
        """The host's seconds to launch the exchange of bucket `i` on a GPU, whatever its size."""
        return self._nearest(self.script.buckets[i]).launching

    def _nearest(self, bucket: BucketScript) -> BucketCost:
        """The measured cost of the bucket of the most similar size."""
        return min(self.cost.buckets, key=lambda each: abs(each.numel - bucket.numel))

    def leaving(self, buckets: Sequence[int]) -> float:
        """The seconds of the main thread before a round of these buckets is sent."""
        return _LEAVING * self._main(buckets)

    def applying(self, buckets: Sequence[int]) -> float:
        """The seconds of the main thread to apply the answer."""
        return (1 - _LEAVING) * self._main(buckets)

    def _main(self, buckets: Sequence[int]) -> float:
        every = sum(each.numel for each in self.script.buckets)
        return self.cost.main * sum(self.script.buckets[i].numel for i in buckets) / max(every, 1)


def _scaled(cost: BucketCost, bucket: BucketScript) -> tuple[float, ...]:
    factor = bucket.numel / cost.numel if cost.numel else 1.0
    return tuple(factor * segment for segment in cost.segments)


def _repeated(segments: tuple[float, ...], count: int) -> tuple[float, ...]:
    """The segments, repeated in the middle to `count`: a larger cluster may need more messages."""
    if len(segments) == count:
        return segments
    if len(segments) < 3 or count < 3:
        return (sum(segments) / 2, *[0.0] * (count - 2), sum(segments) / 2) if count > 1 else (sum(segments),)
    middle = sum(segments[1:-1]) / (len(segments) - 2)
    return (segments[0], *[middle] * (count - 2), segments[-1])


def without_cost(strategy: AnyStrategy, profile: Profile, nodes: int, ranks: int) -> StrategyCost:
    """The cost of a strategy whose computing takes no time."""
    scripts = rehearse(strategy, profile, nodes, ranks)
    levels = [
        LevelCost(tuple(BucketCost(each.numel, (0.0,) * (len(each.messages) + 1)) for each in script.buckets))
        for script in scripts
    ]
    return StrategyCost(strategy.name, nodes, ranks, tuple(levels))


class CostLacking(ConfigError):
    """A profile does not have what a strategy costs. `why` says so without the command that measures it."""

    def __init__(self, why: str, how: str) -> None:
        super().__init__(f"{why}.\n{how}")
        self.why = why


def how_to_measure(profile: Profile, algorithms: Iterable[str], nodes: int, ranks: int) -> str:
    """A sentence with the command that measures these on the training's machine, and what the profile has.

    On two clusters with as many ranks a node, so that other numbers of nodes can be planned.
    """
    texts = dict.fromkeys([*(each.algorithm for each in profile.costs), *algorithms])
    sizes = {(each.nodes, each.ranks) for each in profile.costs}
    if sum(there == ranks for _, there in sizes) < 2:
        few = min(nodes, LARGEST)
        sizes |= {(few, ranks), (few // 2 if few > 3 else 2 * few, ranks)}
    layouts = ",".join(f"{count}x{each}" for each, count in sorted((each, count) for count, each in sizes))
    return (
        f"Measure it where it trains: tacit profile --algorithms {','.join(texts)} --cluster "
        f"local:{max(ranks, profile.ranks)} --layout {layouts} --out another.json -- train.py"
    )


def cost_on(profile: Profile, algorithm: str, nodes: int, ranks: int) -> StrategyCost:
    """The cost of a strategy on a cluster: measured, or extrapolated linearly from two smaller ones.

    Raises:
        CostLacking: the profile does not have it; the message has the command that measures it.
    """
    found = {
        each.nodes: each for each in profile.costs if each.algorithm == algorithm and each.ranks == ranks
    }
    if nodes in found:
        return found[nodes]
    few = sorted(found)[-2:]
    if len(few) < 2:
        known = [f"{each.nodes}x{each.ranks}" for each in profile.costs if each.algorithm == algorithm]
        why = (
            f"the profile lacks what {algorithm!r} costs on {nodes}x{ranks}, and has it for "
            f"{', '.join(known) or 'no cluster'}"
        )
        planned = sorted({each.ranks for each in profile.costs})
        if planned and ranks not in planned:
            why += f"; what it has is for {' or '.join(map(str, planned))} ranks a node"
        raise CostLacking(why, how_to_measure(profile, [algorithm], nodes, ranks))
    return _line(found[few[0]], found[few[1]], nodes)


def _line(one: StrategyCost, other: StrategyCost, nodes: int) -> StrategyCost:
    share = (nodes - one.nodes) / (other.nodes - one.nodes)
    levels = [
        LevelCost(
            tuple(
                BucketCost(
                    b.numel,
                    tuple(
                        max(0.0, s + share * (t - s))
                        for s, t in zip(_repeated(a.segments, len(b.segments)), b.segments, strict=True)
                    ),
                    max(0.0, a.launching + share * (b.launching - a.launching)),
                )
                for a, b in zip(first.buckets, second.buckets, strict=True)
            ),
            second.main,
            second.kept_bytes,
        )
        for first, second in zip(one.levels, other.levels, strict=True)
    ]
    return StrategyCost(one.algorithm, nodes, one.ranks, tuple(levels))
