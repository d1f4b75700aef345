"""Descriptions of a strategy at work for users: one sentence, and the details."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from tacit.session.buckets import Bucket
from tacit.session.topology_choice import TopologyChoice
from tacit.strategy import Strategy

if TYPE_CHECKING:
    from tacit.prediction.predictor import Predictor

MOST = 200
"""The most characters of the sentence."""


def sentence(strategy: Strategy, buckets: Sequence[Bucket], has_feedback: bool) -> str:
    """A few words on what is sent, when, with whom and in how many messages.

    `has_feedback`: whether there is error feedback.
    """
    compressors = [each for bucket in buckets for each in bucket.chosen]
    what = f"parameters {strategy.rounds.summary} " if strategy.subject == "delta" else ""
    parts = [f"{what}over {strategy.topology.summary(compressors)}"]
    if strategy.overlap.steps:
        parts.append(f"{_count(strategy.overlap.steps, 'step')} late")
    if has_feedback:
        parts.append("error feedback")
    return f"{', '.join(parts)}; {_buckets(buckets)}"


def one_line(name: str, levels: Sequence[str], rest: str) -> str:
    """The sentence of all levels; if it is too long it is shortened, first the strategy's name."""
    text = " | ".join(levels)
    if len(f"{name} {text}; {rest}") > MOST:
        name = _cut(name, max(MOST - len(f" {text}; {rest}"), 30))
    text = _cut(text, max(MOST - len(f"{name} ; {rest}"), 30))
    return _cut(f"{name} {text}; {rest}", MOST)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _buckets(buckets: Sequence[Bucket]) -> str:
    sizes = [_size(bucket) for bucket in buckets]
    count, each = _count(len(buckets), "bucket"), {_bytes(size) for size in sizes}
    return f"{count} of {each.pop()}" if len(each) == 1 else f"{count}, together {_bytes(sum(sizes))}"


def _size(bucket: Bucket) -> int:
    return bucket.numel * bucket.dtype.itemsize


def _bytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


# ---- the detail ---------------------------------------------------------------------------------------


def detail(
    strategy: Strategy, choice: TopologyChoice, buckets: Sequence[Bucket], sent: Sequence[int]
) -> Iterator[str]:
    """Lines: the level's strategy as a value, why its topology was chosen, and each bucket.

    `sent`: for each bucket, the most bytes that this rank sends in a round.
    """
    yield f"strategy: {strategy}"
    yield from _chosen(choice)
    for i, (bucket, out) in enumerate(zip(buckets, sent, strict=True)):
        parameters, size = _count(len(bucket.slices), "parameter"), _bytes(_size(bucket))
        yield f"bucket {i}: {parameters}, {size} of {bucket.dtype}"
        yield f"  sends at most {out:,} bytes a rank and round, by {choice.topology}"
        for compressor in dict.fromkeys(bucket.chosen):
            pairs = zip(bucket.slices, bucket.chosen, strict=True)
            names = [param.name for param, chosen in pairs if chosen == compressor]
            yield f"  {compressor}: {', '.join(names)}"
        for param, compressor in zip(bucket.slices, bucket.chosen, strict=True):
            predictor = _predictor(compressor)
            if predictor is not None:
                from tacit.prediction.predictor import kind_of

                shape = "x".join(map(str, param.shape))
                yield f"  predicted: {param.name} ({shape}, {kind_of(len(param.shape))}) by {predictor}"


def _chosen(choice: TopologyChoice) -> Iterator[str]:
    if not choice.sent:
        yield f"topology: {choice.topology}, as {choice.because or 'the strategy names it'}"
        return
    yield f"topology: {choice.topology}, chosen by the bytes of the busiest rank in a round"
    for topology, weighed in choice.weighed.items():
        late = f", plus {choice.delays[topology]:,.0f} for latency" if choice.delays[topology] else ""
        yield (
            f"  {topology}: {choice.sent[topology]:,} bytes sent, times {choice.prices[topology]:.3g} for "
            f"what a second compression loses{late}: {weighed:,.0f}"
        )
    if choice.few:
        yield "  with one or two ranks the first is taken, whatever the bytes"


def _predictor(value: Any) -> Predictor | None:
    """The predictor inside a compressor, at any depth."""
    from tacit.prediction.predictor import Predictor

    if isinstance(value, Predictor):
        return value
    if not is_dataclass(value):
        return None
    found = (_predictor(getattr(value, each.name)) for each in fields(value))
    return next((each for each in found if each is not None), None)
