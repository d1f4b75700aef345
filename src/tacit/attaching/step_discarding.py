"""Whether a step can be discarded, and whether a rank asks for it."""

from __future__ import annotations

from collections.abc import Sequence

from tacit.attaching.failures import Failures
from tacit.errors import AttachError
from tacit.gradients.accumulation_checks import linear
from tacit.levels.level import Level
from tacit.levels.spec import AttachSpec

WRITE = "call it once, after a step's last backward and before optimizer.step"
_COUNT = 20
"""The bits for a number of ranks."""


def refuse_discard(spec: AttachSpec, levels: Sequence[Level]) -> None:
    """Refuse strategies that cannot discard a step; equally on all ranks.

    Raises:
        AttachError: the strategy cannot; the message says what to write.
    """
    why = why_not(spec, levels)
    if why is not None:
        raise AttachError(f"{spec.strategy.name!r} cannot discard a step here: {why}")


def why_not(spec: AttachSpec, levels: Sequence[Level]) -> str | None:
    """The reason why a step cannot be discarded; None: it can. Equal on all ranks."""
    near, server = levels[0].strategy, levels[0].strategy.server
    if not spec.optimizers and not spec.leaves_ddp_alone:
        return "without an optimizer the end of a backward counts as the step: give attach the optimizer"
    if spec.scaled:
        return (
            "a GradScaler counts each backward as an attempt, and skips those that overflow by itself: "
            "train in bfloat16 without a scaler"
        )
    if any(level.strategy.independent for level in levels):
        return (
            "nobody waits for anybody, so that ranks cannot agree on a step: attach an algorithm in which "
            "they wait for each other, such as 'dense'"
        )
    if spec.in_join:
        return "in torch's Join ranks take different numbers of steps: give all the same number of batches"
    if near.subject != "gradient":
        return None
    if near.late:
        return (
            "it gives a step the mean of the step before, so that what you see is that of an earlier batch: "
            "attach the same compressor without the delay, such as 'dense', 'bf16' or 'int8'"
        )
    if near.overlap.into_forward:
        return (
            "means come during the next forward pass, so that nobody can look at them before the step: "
            "attach 'fusion'"
        )
    uses = [
        use for bucket in levels[0].session.buckets for each in bucket.chosen if (use := each.one_shot(0))
    ]
    if server is not None and (server.pull or any(use.has_mean_feedback or use.is_predicted for use in uses)):
        return "a server's answers depend on those before: write pull='dense'"
    return None


def mistimed(spec: AttachSpec, levels: Sequence[Level], backwards: int, half_taken: bool) -> str | None:
    """The reason why this rank cannot discard now; None: it can.

    `backwards`: the number of backward passes since the last step. `half_taken`: whether some optimizers have
        stepped.
    """
    if half_taken:
        return (
            "some of the optimizers have stepped already, and others have not, so that it is half taken: "
            "call it before any of them steps"
        )
    if levels[0].gradient is None:
        # In a CUDA graph's replay no hook is called, so that passes cannot be counted.
        there = any(p.grad is not None for p in spec.named.values())
    else:
        there = backwards > 0
    if not there:
        return f"there was no backward since the last step, or since it was called: {WRITE}"
    if levels[0].gradient is not None and backwards > 1 and not linear(levels[0].session):
        return (
            f"{backwards} backward passes were exchanged since the last step, and only one can be taken "
            "back: call it after each that you leave out"
        )
    return None


def no_wish(given: object) -> str | None:
    """The reason why `given` is no wish; None: it is a bool, or a number or tensor that is 0 or 1."""
    try:
        fits = given in (0, 1)
    except (RuntimeError, ValueError):  # of several elements
        fits = False
    return (
        None if fits else f"wish={given!r} is neither True nor False: write session.discard(norm > 50), say"
    )


def agreed(failures: Failures, step: int, wish: bool, wrong: str | None) -> bool:
    """Whether any rank asks for it. A collective call; nothing is sent before all ranks have called it.

    Raises:
        AttachError: a rank cannot discard now; all ranks raise it.
        PeerLost: a rank is gone, or has gone on without it.
    """
    total = failures.come_to("session.discard()", int(wish) + (int(wrong is not None) << _COUNT))
    if total >> _COUNT:
        why = wrong or f"another rank has called it at a wrong time, or with no wish: {WRITE}"
        raise AttachError(f"session.discard() of step {step}: {why}")
    return total > 0
