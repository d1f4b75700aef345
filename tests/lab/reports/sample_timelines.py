"""Timelines of runs that never were, with round numbers."""

from dataclasses import replace

from tacit.timelines import Change, Exchange, PlannedMessage, Span, Step, Timeline

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


def planned(algorithm: str, ranks: int = 4, lanes: int = 8) -> list[Timeline]:
    """One level whose rounds are so many messages; training waits for the first of them in the next step."""
    return [
        replace(
            each,
            levels=("exchange",),
            exchanges=tuple(e for e in each.exchanges if e.level == 0),
            messages=tuple(
                _message(step, turn, lanes) for step in each.steps for turn in reversed(range(lanes))
            ),
        )
        for each in run(algorithm, ranks)
    ]


def _message(step: Step, turn: int, lanes: int) -> PlannedMessage:
    """The last of them is ready first; each is ready for 5 ms, and then 10 ms under way, the first 30."""
    ready = step.begun + 0.05 + 0.04 * (lanes - turn) / lanes
    came = ready + (0.035 if turn == 0 else 0.015)
    waits = (Span(step.ended, came),) if turn == 0 else ()
    return PlannedMessage(
        step.step, turn, f"encoder.layer{turn}.weight and 2 more", 4000, ready, ready + 0.005, came, waits
    )
