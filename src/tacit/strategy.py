"""A strategy: the five parts of a communication method, as one value; and levels of strategies."""

from __future__ import annotations

import typing
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

from tacit import checks, compressors
from tacit.compressors import Dense
from tacit.contracts import (
    WORLD,
    Compressor,
    Merge,
    MixingCompressor,
    Overlap,
    Rounds,
    ScheduleState,
    ServerTopology,
    Topology,
)
from tacit.errors import ConfigError
from tacit.merges import Replace, ServerParams
from tacit.overlap import Bucketwise
from tacit.rounds import EveryStep, MomentPeriods, Renewals
from tacit.topologies import Auto

Subject = Literal["nothing", "gradient", "delta"]
MomentumUse = Literal["local", "averaged", "reset"]
Buffers = Literal["averaged", "local", "on_sync"]
Variance = Literal["local", "scaled"]
Accept: TypeAlias = Literal["exact", "rounded", "feedback", "periodic"]
"""What `AutoStrategy` may choose: each of these words allows what those before it allow, and more."""


_KINDS = {"rounds": Rounds, "topology": Topology, "overlap": Overlap, "merge": Merge}
_OF_STEPS = {"momentum": MomentPeriods, "variance": Renewals}
_EXAMPLE = {"rounds": "Every(8)", "topology": "Flat()", "overlap": "Bucketwise()", "merge": "Average()"}


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A communication method: what is sent, when, to whom, how that is hidden, how the result is applied.

    Strategies are values: two of them are equal if all of their fields are.

    Attributes:
        subject: what is exchanged. "gradient": in backward. "delta": how far the parameters have moved
            since the last round, after `optimizer.step`. "nothing": DDP is left as it is.
        blocking: the compressor of phases in which answers are applied at once, for rounds that have such
            phases (`Rounds.phased`); None: the same compressor.
        topology: by default the session picks between `Flat` and `TwoPhase` by predicted bytes.
        momentum: what happens to the optimizer's own state (momentum, Adam's moments) in every round of
            deltas. "local": nothing; "averaged" over the replicas, densely, which costs the bytes of as
            many parameters; "reset": it is set to that before the first step. `MomentPeriods(96, 192)`: it
            is averaged in these periods. Local state is averaged once, when the session closes.
        buffers: floating-point buffers (BatchNorm's statistics). "averaged": they travel with the delta;
            "local": each replica keeps its values until the session closes, when they are averaged once.
            "on_sync": the same, and they are averaged by `session.sync()` too.
        variance: that of Adam and AdamW, where replicas step alone. "local": each replica has the variance of
            its gradients; "scaled": in each step it is scaled to that of the mean gradient, by samples (a few
            entries of each parameter, every eighth step); `Renewals()`: it changes only in steps in which a
            nearer level averages gradients. It has no effect on other optimizers.
        residual_bits: in how many bits an entry of a residual is kept between rounds: 32, or 16 of bf16, to
            which it is rounded at random; so are DGC's velocity and the residuals of means. In a round all
            are computed in float32.
        anchor_bits: in how many bits an entry of an anchor and of an outer momentum is kept between rounds:
            32, or 16, as residuals. Where replicas are made equal, and as the session closes, parameters
            are numbers of bf16 then. Parameters of float64 are left out.
        name: the text form it was made from; without effect.
    """

    subject: Subject = "gradient"
    rounds: Rounds = EveryStep()
    compressor: Compressor = Dense()
    blocking: Compressor | None = None
    topology: Topology = Auto()
    overlap: Overlap = Bucketwise()
    merge: Merge = Replace()
    momentum: MomentumUse | MomentPeriods = "local"
    buffers: Buffers = "averaged"
    variance: Variance | Renewals = "local"
    residual_bits: int = 32
    anchor_bits: int = 32
    name: str = field(default="custom", compare=False)

    def __post_init__(self) -> None:
        if str(self.subject) == "progress":
            raise ConfigError("subject='progress' was renamed: write subject='delta'")
        checks.one_of("subject", self.subject, ("nothing", "gradient", "delta"))
        checks.compressor("compressor", self.compressor)
        for name, kind in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is no {kind.__name__}: leave it out, or write a value "
                    f"such as {_EXAMPLE[name]}"
                )
        self.topology.check(self.compressor)
        if self.server is not None:
            self.server.admit(self.subject, self.rounds, self.merge, self.overlap)
        self._check_mean_feedback()
        if not self.topology.mixes and _holds_mixing(self.compressor):
            raise ConfigError(
                f"{self.compressor} with topology={self.topology} is not possible, as it is for replicas "
                "that differ, each with an answer of its own: write subject='delta', topology=Gossip(), "
                "merge=Mix()"
            )
        if self.subject == "gradient":
            self._check_gradient()
        if self.subject == "delta":
            self._check_delta()
        if self.blocking is not None:
            self._check_blocking(self.blocking)
        for name, what in (("residual_bits", "residuals"), ("anchor_bits", "anchors")):
            given = getattr(self, name)
            if type(given) is not int or given not in (16, 32):
                raise ConfigError(
                    f"{name}={given!r} is no type in which {what} can be kept: write 32, or 16 for bf16, "
                    "rounded at random"
                )
        if self.residual_bits == 16 and self.subject != "gradient":
            raise ConfigError(
                f"residual_bits=16 with subject={self.subject!r} is not possible, as it is for residuals of "
                "gradients: leave it out, or write subject='gradient'"
            )
        if self.anchor_bits == 16:
            self._check_narrow_anchor()
        self._check_replica_option("momentum", self.momentum, MomentumUse, "local")
        self._check_replica_option("buffers", self.buffers, Buffers, "averaged")
        self._check_replica_option("variance", self.variance, Variance, "local")

    def _check_replica_option(self, what: str, given: object, kinds: Any, default: str) -> None:
        if not isinstance(given, _OF_STEPS.get(what, ())):
            checks.one_of(what, given, typing.get_args(kinds))
        if self.server is not None and self.server.optimizer == "server" and given != default:
            raise ConfigError(
                f"{what}={given!r} with optimizer='server' would do nothing, as workers take no steps: the "
                "server has the momentum, and buffers are averaged by session.sync() and as the session "
                "closes. Leave it out"
            )
        if self.subject != "delta" and given != default:
            raise ConfigError(
                f"{what}={given!r} with subject={self.subject!r} would do nothing: replicas that average "
                f"gradients stay equal. Leave it out, or write subject='delta', merge=Average()"
            )
        if self.independent and given != default:
            raise ConfigError(
                f"{what}={given!r} with topology={self.topology} is not possible, as nobody waits for others "
                "to average with: leave it out"
            )

    def _check_blocking(self, blocking: Compressor) -> None:
        checks.compressor("blocking", blocking)
        self.topology.check(blocking)
        if not self.rounds.phased:
            raise ConfigError(
                f"blocking={blocking} with rounds={self.rounds}, which have no phases: leave it out, or "
                "write rounds=Cycling()"
            )

    def _check_gradient(self) -> None:
        if not self.rounds.for_gradients:
            raise ConfigError(
                f"rounds={self.rounds} with subject='gradient' would lose gradients: "
                "write subject='delta', merge=Average()"
            )
        if self.topology.mixes:
            raise ConfigError(
                f"topology={self.topology} of gradients would let replicas drift apart for good: write "
                "subject='delta', merge=Mix()"
            )
        if self.merge.subject != "gradient":
            raise ConfigError(f"merge={self.merge} cannot apply a gradient: write merge=Replace()")
        if self.overlap.steps > 1:
            raise ConfigError(
                f"overlap={self.overlap} of a gradient: one that is {self.overlap.steps} steps old makes "
                "training worse, and hides no more than one a step old: write Delayed(1)"
            )
        if self.overlap.layerwise and (self.server or not self.rounds.every_step):
            raise ConfigError(
                f"overlap={self.overlap} is for gradients that all ranks average in every step, and not for "
                f"topology={self.topology}, rounds={self.rounds}: write Bucketwise()"
            )

    def _check_delta(self) -> None:
        if self.overlap.layerwise:
            raise ConfigError(
                f"overlap={self.overlap} is for gradients, and subject='delta' exchanges parameters after "
                f"optimizer.step: write Bucketwise() or Delayed(1), or subject='gradient'"
            )
        if self.merge.subject == "gradient":
            raise ConfigError(f"merge={self.merge} cannot apply a delta: write merge=Average()")
        if self.overlap.warmup_steps:
            raise ConfigError(
                f"warmup_steps={self.overlap.warmup_steps} is for gradients, and subject='delta': "
                f"write Delayed({self.overlap.steps})"
            )
        self._check_server_merge()
        self._check_mixing()
        lag = self.overlap.apply_at(0)
        if self.rounds.phased and lag:
            raise ConfigError(
                f"overlap={self.overlap} and rounds={self.rounds} both set when answers are applied: leave "
                "the overlap out"
            )
        if self.merge.keeps_unsent:
            self._check_unsent()
        if self.rounds.sync_every is not None and lag > self.rounds.sync_every:
            raise ConfigError(
                f"overlap={self.overlap} would be applied after the next round of the same parameters "
                f"starts, with rounds={self.rounds}: write Delayed(steps={self.rounds.sync_every}) at most"
            )

    def _check_server_merge(self) -> None:
        """Check the merge against what a server answers with: the parameters, or their change."""
        server = self.server if self.independent else None
        if server is None:
            if self.merge.subject == "server":
                raise ConfigError(
                    f"merge={self.merge} does not fit topology={self.topology}: write merge=Average(), or "
                    "topology=Star(Asynchronous())"
                )
            return
        fits = ServerParams(whole=server.pull is None)
        if self.merge == fits:
            return
        if not self.merge.ends_at_anchor:
            raise ConfigError(f"merge={self.merge} does not fit topology={self.topology}: write merge={fits}")
        if server.pull is None or not server.counts_all:
            raise ConfigError(
                f"merge={self.merge} does not fit topology={self.topology}, as a replica that keeps what it "
                "has not sent needs answers that say how far it is from the server's parameters, and pushes "
                "that all count: write topology=Star(StaleSynchronous(0), pull=Blockwise(3)), as "
                "lowbit:bound=0 does, or Star(), where all wait for all"
            )

    def _check_mixing(self) -> None:
        """Check that the merge leaves the anchor alone where each rank gets another answer."""
        mixes = self.merge.mixes
        if self.topology.mixes and not mixes:
            raise ConfigError(
                f"merge={self.merge} does not fit topology={self.topology}, which gives each rank another "
                "answer: write merge=Mix()"
            )
        if mixes and not self.topology.mixes:
            raise ConfigError(
                f"merge={self.merge} does not fit topology={self.topology}, which gives all ranks one "
                "mean: write merge=Average(), or topology=Gossip()"
            )

    def _check_narrow_anchor(self) -> None:
        """Check that there is an anchor, which all ranks round alike, and a merge that allows for parts."""
        merge, refused = self.merge, ""
        if self.subject != "delta" or merge.mixes:
            refused = f"merge={merge}, which keeps no anchor"
        elif self.server is not None:
            refused = f"topology={self.topology}, as a server keeps the anchor of each worker too, unrounded"
        elif not merge.entrywise or merge.by_learning_rate:
            refused = f"merge={merge}, as it needs whole buckets or their learning rates"
        if refused:
            raise ConfigError(
                f"anchor_bits=16 with {refused}, is not possible: leave it out, or write subject='delta' "
                "with merge=OuterStep() or CommonPoint()"
            )

    def _check_mean_feedback(self) -> None:
        one_shot = self.compressor.one_shot(0)
        if one_shot is not None and one_shot.has_mean_feedback and not self.merge.keeps_unsent:
            raise ConfigError(
                f"{self.compressor} with merge={self.merge} would lose what a rank does not send: write "
                "ErrorFeedback for MeanFeedback, or subject='delta', merge=CommonPoint()"
            )

    def _check_unsent(self) -> None:
        """Check for `LocalResidual` that there is no second residual, and that each rank sends its delta."""
        one_shot = self.compressor.one_shot(0)
        if one_shot is not None and one_shot.has_feedback:
            raise ConfigError(
                f"merge={self.merge} with {self.compressor} would keep what was not sent twice: leave "
                "ErrorFeedback out, or write merge=Average()"
            )
        allowed = self.merge.ends_at_anchor and not self.rounds.phased
        if self.late and not allowed:
            raise ConfigError(
                f"merge={self.merge} with answers applied late is not possible: leave overlap and late "
                "rounds out, or write merge=CommonPoint() with overlap=Delayed(1), or merge=Average()"
            )
        if self.topology.scope != self.topology.meets:
            raise ConfigError(
                f"merge={self.merge} with topology={self.topology} is not possible, as there a rank "
                "sends its node's mean: write Flat(), or merge=Average()"
            )

    @property
    def late(self) -> bool:
        """Whether rounds are under way while training goes on."""
        return self.overlap.steps > 0 or self.rounds.phased

    @property
    def parts(self) -> int:
        """The number of parts of the model, each with separate rounds."""
        return self.rounds.fragments

    @cached_property
    def server(self) -> ServerTopology | None:
        """The topology, if it uses parameter servers."""
        return self.topology if isinstance(self.topology, ServerTopology) else None

    @property
    def renewals(self) -> Renewals | None:
        """The steps in which Adam's variance moves, if it does not move in all."""
        return self.variance if isinstance(self.variance, Renewals) else None

    @property
    def independent(self) -> bool:
        """Whether each replica trains without waiting for others, so that there is no collective call."""
        return self.server is not None and self.server.independent

    @property
    def levels(self) -> tuple[Strategy, ...]:
        """This strategy, as the only level."""
        return (self,)

    def for_training(self, schedule_state: ScheduleState) -> Strategy:
        """This strategy with its compressors adapted to this training, one for each phase."""
        compressor = self.compressor.for_training(schedule_state)
        if self.blocking is None or not self.rounds.phased:
            return replace(self, compressor=compressor)
        blocking = self.blocking.for_training(schedule_state)
        stretches = [
            (steps, compressor if late else blocking)
            for steps, late in self.rounds.phases(schedule_state)
            if steps
        ]
        phased = compressors.Scheduled(tuple(stretches[:-1]), stretches[-1][1])
        return replace(self, compressor=phased, blocking=None)


def _holds_mixing(value: object) -> bool:
    """Whether it is a `MixingCompressor`, or has one inside."""
    if isinstance(value, tuple):
        return any(map(_holds_mixing, value))
    inside = [getattr(value, each.name) for each in fields(value)] if is_dataclass(value) else []
    return isinstance(value, MixingCompressor) or any(map(_holds_mixing, inside))


@dataclass(frozen=True)
class Levels:
    """One strategy a level, near to far: the first is used inside the nodes, the last between them.

    The first exchanges gradients in backward; the others average, each after its own number of steps, the
    deltas of the replicas. Closing a session, and `sync`, run the last level, so that all replicas are equal.
    """

    levels: tuple[Strategy, ...]
    name: str = field(default="custom", compare=False)

    def __post_init__(self) -> None:
        subjects = [level.subject for level in self.levels]
        if len(subjects) < 2 or subjects != ["gradient"] + ["delta"] * (len(subjects) - 1):
            raise ConfigError(
                f"levels of {' and '.join(subjects) or 'nothing'} cannot be joined: the first exchanges "
                "the 'gradient', every other one the 'delta'"
            )
        if self.levels[0].overlap.steps:
            raise ConfigError(
                f"overlap={self.levels[0].overlap} of the first level: inside a node there is little to "
                "hide, and old gradients would be applied after a round between nodes: write Bucketwise()"
            )
        if self.levels[0].overlap.layerwise:
            raise ConfigError(
                f"overlap={self.levels[0].overlap} of the first level: inside a node there is little to "
                "hide, and it is not supported there: write Bucketwise()"
            )
        for level in self.levels:
            if level.topology.mixes or level.topology.in_pairs:
                raise ConfigError(
                    f"topology={level.topology} cannot be one of several levels, as all ranks of a node need "
                    "one answer: use it alone, or Flat() here"
                )
            if level.server is not None:
                raise ConfigError(
                    f"topology={level.topology} cannot be one of several levels: its servers belong "
                    "to no node. Use it alone, or Flat() here"
                )
        if self.levels[-1].topology.scope != WORLD:
            raise ConfigError(
                f"topology={self.levels[-1].topology} of the last level does not reach all replicas, and "
                "they would diverge: write Hierarchical() or Flat()"
            )
        near, far = self.levels[0].rounds, self.levels[-1].rounds
        if near.follows not in (None, far):
            raise ConfigError(
                f"rounds={near} of the first level follow another schedule than the last, {far}: give "
                "both the same"
            )


@dataclass(frozen=True, kw_only=True)
class AutoStrategy:
    """A strategy that is chosen in training, by what the first steps have measured.

    Attributes:
        accept: what may be risked. "exact": nothing, the numbers are DDP's. "rounded": gradients may be
            rounded, entry by entry, to 4 bits or more. "feedback": they may be compressed further, where what
            is not sent now is sent later. "periodic": replicas may differ between two rounds.
        watch: over how many steps the time of a step is measured, and compared with the prediction; None:
            what was chosen stays.
        tolerance: the share by which the two may differ before there is another decision.
        rest: between two decisions there are at least so many steps.
        name: the text form it was made from; without effect.
    """

    accept: Accept = "rounded"
    watch: int | None = 100
    tolerance: float = 0.25
    rest: int = 1000
    name: str = field(default="auto", compare=False)

    def __post_init__(self) -> None:
        checks.one_of("accept", self.accept, typing.get_args(Accept))
        if self.watch is not None:
            checks.whole("watch", self.watch, 5, None, "write 100, or none to keep what was chosen")
        checks.real("tolerance", self.tolerance, "write 0.25 for a quarter", above=0.0)
        checks.whole("rest", self.rest, 1, None, "write 1000")

    @property
    def levels(self) -> tuple[Strategy, ...]:
        """The strategy that it begins with: plain averages of gradients."""
        return (Strategy(name="dense"),)


AnyStrategy: TypeAlias = Strategy | Levels | AutoStrategy
