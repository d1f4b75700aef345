"""Timelines of runs that never were, with round numbers."""

from dataclasses import replace

from tacit.timelines import Change, Exchange, Span, Step, Timeline

STEPS = 40
"""Of 0.1 s each; a near round takes 0.04 s, and is hidden for half of it."""


def near(step: int, shift: float) -> Exchange:
    at = shift + step / 10
    return Exchange(0, step, step, at + 0.02, at + 0.06, 4000, False, (Span(at + 0.04, at + 0.06),))


def far(step: int, shift: float) -> Exchange:
    at = shift + step / 10
    return Exchange(1, step, step // 8, at + 0.07, at + 0.1, 90_000, False, (Span(at + 0.07, at + 0.1),))


def run(algorithm: str, ranks: int = 4) -> list[Timeline]:
    """Of two levels, the far one every eighth step; each rank is 1 ms behind the one before it."""
    return [
        Timeline(
            algorithm=algorithm,
            rank=rank,
            origin=1000.0,
            levels=("near", "far"),
            steps=tuple(Step(i, rank / 1000 + i / 10, rank / 1000 + (i + 1) / 10) for i in range(STEPS)),
            exchanges=(
                *(near(i, rank / 1000) for i in range(STEPS)),
                *(far(i, rank / 1000) for i in range(7, STEPS, 8)),
            ),
        )
        for rank in range(ranks)
    ]


def untold(algorithm: str, ranks: int = 4) -> list[Timeline]:
    """As plain DDP is: steps and nothing else."""
    return [replace(each, levels=(), exchanges=()) for each in run(algorithm, ranks)]


def scheduled(algorithm: str, *changes: Change) -> list[Timeline]:
    """With a schedule that changed so."""
    return [replace(each, changes=changes if each.rank == 0 else ()) for each in run(algorithm)]


def overlapping(algorithm: str) -> Timeline:
    """One level whose rounds take two steps and leave in every step; nothing waits for them."""
    first = run(algorithm)[0]
    rounds = [Exchange(0, i, i, i / 10 + 0.05, i / 10 + 0.25, 10, False, ()) for i in range(10)]
    return replace(first, levels=("exchange",), exchanges=tuple(rounds))
