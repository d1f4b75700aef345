"""`attach`: a strategy begins its work on a DDP model; closing what it returns ends it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tacit import checks
from tacit.algorithms import parse
from tacit.contracts import NODE, WORLD, ScheduleState
from tacit.environment import ALGORITHM
from tacit.errors import AttachError, ConfigError, PeerLost
from tacit.hooks import checkpoint, exit, momentum, run_report, tensorboard
from tacit.hooks import epochs as epochs_said
from tacit.hooks.accumulation import Accumulating, linear
from tacit.hooks.agreement import Meant, agree
from tacit.hooks.arguments import ddp_of, optimizers_of
from tacit.hooks.buffers import OwnBuffers
from tacit.hooks.close_barrier import Reached
from tacit.hooks.ddp import Answer, HookDispatcher, no_exchange, plain_mean
from tacit.hooks.device_placement import check_backend, device_of
from tacit.hooks.failure_detector import FailureDetector, Posted
from tacit.hooks.frozen_check import FrozenCheck, refuse_sparse, trainable
from tacit.hooks.grad_scaler import ScaledSteps, at_work
from tacit.hooks.learning_rates import Notes, Rates
from tacit.hooks.level import Level, own_timeout
from tacit.hooks.memory import too_large
from tacit.hooks.node_layout import read_nodes, warn_of_one
from tacit.hooks.nonfinite_since import Broken
from tacit.hooks.uneven_data import Backwards, joins, refuse_join, untouched
from tacit.kernels.dispatch import find_backend
from tacit.overlap import Delayed
from tacit.parameter_server import placement
from tacit.rounds import EveryStep, NodeRounds, Until
from tacit.session import Session, joined, one_line, timeline
from tacit.session.buckets import Policy
from tacit.strategy import AnyStrategy, Strategy
from tacit.timelines import Timeline
from tacit.topologies.star import Star
from tacit.transports.devices import control
from tacit.transports.torch import abort

MOST_SEED = 2**63 - 1
CLOSE = "write `with tacit.attach(...):` around the loop, or session.close() behind it"

_log = logging.getLogger("tacit")

_ATTACHED: WeakKeyDictionary[DistributedDataParallel, Attached] = WeakKeyDictionary()
_SESSIONS: dict[str, int] = {}


def from_env(variable: str = ALGORITHM) -> AnyStrategy:
    """The strategy that an environment variable names; plain `ddp` where it is not set.

    Raises:
        ConfigError: the text is no strategy.
    """
    run_report.called("from_env")
    text = os.environ.get(variable, "ddp")
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"environment variable {variable}={text!r}: {error}") from None


def attach(
    model: DistributedDataParallel,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    strategy: AnyStrategy | str,
    *,
    scaler: GradScaler | None = None,
    policy: Policy | None = None,
    timeout: timedelta | None = None,
    steps_per_epoch: int | None = None,
    epochs: int | None = None,
    mesh: DeviceMesh | None = None,
    weight: float | None = None,
    servers: Sequence[str] | None = None,
    seed: int = 0,
    exchange_on: Literal["device", "host"] | None = None,
) -> Attached:
    """Put a strategy to work on a DDP model. A collective call: every rank of the model's group makes it.

    Args:
        model: the wrapped model, compiled or not; torch is entered by its own hooks, and nothing is patched.
        optimizer: of the model's parameters, or several; a step counts when the last of them has stepped.
            Wrappers of Accelerate and Lightning are fine. None will do where gradients are exchanged.
        strategy: a value, or its text form such as "topk:ratio=0.01".
        scaler: the one that scales the loss, if any. A step in which a gradient overflows is then passed over
            on all ranks, where without it an infinity is an error; a replica that moves on its own passes
            over steps of its own. Steps are then counted by backward passes: accumulate under `no_sync`.
        policy: `(name, parameter) -> Compressor | None`: which compressor handles which parameter; None
            keeps it dense. Without it: the strategy's, and dense for parameters of fewer than two dimensions
            where its compressor exempts them.
        timeout: after which a peer that does not answer is an error; the process group's where not given.
        steps_per_epoch: for strategies that go by epochs: steps of the optimizer, len(loader) // accumulation
            where that many backward passes make one.
        epochs: how many there will be, for strategies that end otherwise than they begin.
        mesh: of nodes x ranks of a node, for strategies that go by node; torchrun and Slurm tell it too.
        weight: how much this rank counts for when replicas are averaged, above 0, such as its number of
            samples (FedAvg: McMahan et al. 2017); all alike where no rank gives one.
        servers: host:port of each parameter server, in the same order everywhere; where not given, those
            that the launcher tells (`TACIT_SERVERS`).
        seed: of what ranks draw at random while they train, the same on every rank: which entries travel,
            how levels are rounded. From 0 on. PowerSGD's first factors and a server's own draws do not
            depend on it.
        exchange_on: for a model on a GPU, where its exchanges run: on the GPU in stream order ("device"; with
            NCCL, and a strategy that needs no value on the host), or on the host, on copies that travel by
            Gloo ("host": less memory on the GPU, as residuals and anchors are on the host). Where not given,
            on the GPU if that is possible. `session.active_path` tells which, and why.

    Returns:
        The attached session: a context manager. `close` (or leaving the block) takes the optimizer's hooks
        away. DDP keeps its communication hook for life, which then averages as plain DDP does.

    Raises:
        ConfigError: the strategy's text, or a number, is wrong.
        AttachError: the model or the optimizer does not fit, or ranks differ in model or strategy.
    """
    run_report.called("attach")
    strategy = parse(strategy) if isinstance(strategy, str) else strategy
    model, optimizers = ddp_of(model), optimizers_of(optimizer)
    named = checked(model, optimizers, strategy)
    scaler = at_work(scaler, strategy)
    known = {"steps_per_epoch": steps_per_epoch, "epochs": epochs}
    for name, hint in epochs_said.SAID.items():
        if known[name] is not None:
            checks.whole(name, known[name], 1, None, f"write {hint}")
    schedule_state = {name: float(value) for name, value in known.items() if value is not None}
    epochs_said.check(strategy, schedule_state)
    _check_weight(strategy, weight)
    check_seed(seed)
    where = placement.find_servers(strategy, servers)
    strategy = placement.with_servers(strategy, where)
    return Attached(
        model,
        optimizers,
        strategy,
        named,
        scaler,
        policy,
        timeout,
        schedule_state,
        mesh,
        weight=weight,
        servers=where,
        seed=seed,
        exchange_on=exchange_on,
    )


def check_seed(seed: int) -> None:
    """Refuse what is no seed.

    Raises:
        ConfigError: it is none.
    """
    checks.whole("seed", seed, 0, MOST_SEED, "it is the same on every rank")


def checked(
    model: DistributedDataParallel, optimizers: Sequence[Optimizer], strategy: AnyStrategy
) -> dict[str, Tensor]:
    """The trainable parameters by name, if the strategy can work on them.

    Raises:
        AttachError: it cannot.
    """
    if model in _ATTACHED:
        raise AttachError(
            f"{_ATTACHED[model].strategy.name!r} is attached to this model already: close it first"
        )
    subjects = {level.subject for level in strategy.levels}
    farthest = strategy.levels[-1].topology
    if farthest.scope != WORLD and subjects != {"nothing"}:
        raise AttachError(
            f"topology={farthest} does not reach all replicas, and they would drift apart for good: write "
            "Flat() or Hierarchical(), or join it by Levels with one that does"
        )
    last = strategy.levels[-1]
    if last.subject == "gradient" and isinstance(last.rounds, Until):
        raise AttachError(
            f"rounds={last.rounds} would leave replicas to drift apart for good afterwards: "
            "join it by Levels with one that exchanges their progress"
        )
    if not optimizers and ("delta" in subjects or last.topology.independent):
        raise AttachError(f"{strategy.name!r} exchanges after optimizer.step: give attach the optimizer")
    named = trainable(model)
    if subjects != {"nothing"}:
        refuse_join(model)
        check_backend(model.process_group, device_of(named))
        if "gradient" in subjects and getattr(model, "_use_python_reducer", False):
            raise AttachError(
                "DDP uses torch's Python reducer, which gives a communication hook single gradients and no "
                'buckets: write torch._dynamo.config.optimize_ddp = "ddp_optimizer" before you wrap the model'
            )
        for name, p in named.items():
            if p.dtype not in _TYPES:
                raise AttachError(
                    f"{name} is {p.dtype}: only parameters of float32, float64, float16 and bfloat16 are "
                    f"supported. {_instead(p)}, or use 'ddp', which leaves DDP as it is"
                )
        if "gradient" in subjects:
            refuse_sparse(model, strategy.name)
    if isinstance(strategy.levels[0].overlap, Delayed) and strategy.levels[0].subject == "gradient":
        _refuse_unused(
            model,
            f"{strategy.name!r} gives a step the mean of the step before, and with "
            "find_unused_parameters=True DDP throws it away for a parameter that no rank uses in this one",
        )
    topology = strategy.levels[0].topology
    if isinstance(topology, Star) and topology.has_feedback:
        _refuse_unused(
            model,
            f"the server of {strategy.name!r} sends with an answer what the answers before did not say, and "
            "with find_unused_parameters=True DDP throws it away for a parameter that no rank uses in a step",
        )
    _check_optimizers(named, optimizers)
    return named


def _refuse_unused(model: DistributedDataParallel, why: str) -> None:
    if model.find_unused_parameters:
        raise AttachError(
            f"{why}: make the model with find_unused_parameters=False, or attach another algorithm, such as "
            "'dense'"
        )


_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _instead(p: Tensor) -> str:
    if p.is_complex():
        return "Keep it as a real parameter, torch.view_as_real(p), and view it as complex in forward"
    return "Keep it as float32, and convert it in forward"


def _check_optimizers(named: dict[str, Tensor], optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(p) in held for p in named.values()):
            raise AttachError(
                "the optimizer holds no parameter of this model: give attach the optimizer that was made "
                "with model.parameters()"
            )


def _periodic(strategy: AnyStrategy) -> bool:
    return any(level.subject == "delta" for level in strategy.levels)


def _check_weight(strategy: AnyStrategy, weight: float | None) -> None:
    if weight is None:
        return
    if not _periodic(strategy):
        raise AttachError(
            f"weight={weight!r} is for strategies that average replicas, and {strategy.name!r} does not"
        )
    if any(level.merge.keeps_unsent for level in strategy.levels):
        raise AttachError(
            f"weight={weight!r} with {strategy.name!r} is not possible, as what a replica keeps of its own "
            "is not weighed: leave it out, or attach localsgd, say"
        )
    if not (checks.is_real(weight) and weight > 0):
        raise AttachError(
            f"weight={weight!r} is not possible: write a number above 0, such as the rank's samples"
        )


def _share(group: dist.ProcessGroup, strategy: AnyStrategy, weight: float | None) -> float:
    """What this rank counts for, 1 on average. A collective call, of ranks that agree on the strategy."""
    if not _periodic(strategy):
        return 1.0
    mine = torch.tensor([0.0 if weight is None else weight], dtype=torch.float64)
    all_ = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(all_, mine, group=control(group))
    weights = torch.cat(all_)
    if not bool(weights.any()):
        return 1.0
    without = [rank for rank, each in enumerate(weights.tolist()) if not each]
    if without:
        raise AttachError(f"ranks {without} give no weight, and others do: give one on every rank")
    return float(mine / weights.mean())


class Attached:
    """A session at work on a DDP model, and the way out of it.

    Made by `attach`, which registers a communication hook, or around the `board` of a hook that the user
    registers.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizers: Sequence[Optimizer],
        strategy: AnyStrategy,
        named: dict[str, Tensor],
        scaler: GradScaler | None,
        policy: Policy | None,
        timeout: timedelta | None,
        schedule_state: ScheduleState,
        mesh: DeviceMesh | None,
        board: HookDispatcher | None = None,
        weight: float | None = None,
        servers: placement.Addresses = (),
        seed: int = 0,
        exchange_on: str | None = None,
    ) -> None:
        group = model.process_group
        self._model, self._group, self._optimizers, self._named = model, group, optimizers, named
        self._timeout = timeout or own_timeout(group)
        self._handles: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        self._rollcall: FailureDetector | None = None
        self._backwards = Backwards(model)
        self._accumulating: Accumulating | None = None
        self._hinted = False
        self._passes = epochs_said.Passes.of(strategy, named, schedule_state)
        self._still = FrozenCheck(model)
        self._quiet = strategy.levels[0].subject == "nothing"
        self.strategy = strategy
        self._momentum = momentum.planned(strategy, policy, optimizers, named)
        agree(
            model,
            strategy,
            Meant(
                named,
                optimizers,
                scaler=scaler,
                policy=policy,
                schedule_state=schedule_state,
                seed=seed,
                exchange_on=exchange_on,
            ),
        )
        if not self._quiet:
            board = board or HookDispatcher.of(model)
        nodes = read_nodes(group, mesh) if _goes_by_node(strategy) else ()
        if dist.get_rank(group) == 0:
            warn_of_one(strategy, nodes)
        rates = Rates(optimizers, named)
        # A replica that moves on its own may pass over steps of its own with a scaler.
        noting = optimizers and not (scaler is not None and _periodic(strategy)) and not joins(model)
        self._notes = Notes(rates) if noting else None
        options: dict[str, Any] = {
            "nodes": nodes,
            "policy": policy,
            "timeout": self._timeout,
            "rates": rates,
            "schedule_state": schedule_state,
            "share": _share(group, strategy, weight),
            "optimizers": optimizers,
            "servers": servers,
            "seed": seed,
            "taken": self._momentum,
            "exchange_on": exchange_on,
            "replicated_in_node": weight is None and scaler is None and _alike_by_node(strategy),
        }
        self.levels: list[Level] = []
        try:
            for level in _fully_named(strategy):
                self.levels.append(Level(level, model, named, **options))
            for at_work in self.levels:
                if at_work.strategy.rounds.follows:
                    at_work.session.follow(self.levels[-1].session)
            self._scaled = None
            if scaler is not None and not self._quiet:
                self._scaled = ScaledSteps(scaler, self.levels, named, optimizers)
            self._watch()
            self._enter(board)
            exit.watch(dist.get_process_group_ranks(group))
        except torch.OutOfMemoryError as error:
            self._leave()
            raise AttachError(too_large(strategy, named, policy, exchange_on)) from error
        except BaseException:
            self._leave()
            raise
        _ATTACHED[model] = self
        run_report.began(self)
        tensorboard.began(self)
        exit.began(self)

    @property
    def session(self) -> Session:
        """The session of the nearest level; of the only one, where there are no levels."""
        return self.levels[0].session

    # ---- in -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._group.size() == 1 or self.levels[-1].strategy.topology.independent:
            return
        ranks = dist.get_process_group_ranks(self._group)
        name = "-".join(map(str, ranks))
        _SESSIONS[name] = _SESSIONS.get(name, 0) + 1
        self._rollcall = FailureDetector(
            dist.distributed_c10d._get_default_store(),
            f"{name}/{_SESSIONS[name]}",
            dist.get_rank(),
            ranks,
            self._rounds,
            self._reached,
            self._peer_lost,
            self._timeout.total_seconds(),
            None if self._quiet else self._posted,
            self._notes,
        )
        for level in self.levels:
            level.session.explain = self._explain
            if len(level.session.ranks) < len(ranks):
                level.session.tell = self._tell

    def _tell(self, error: BaseException) -> None:
        """Let those know who are not of the scope in which it is known."""
        if self._rollcall is not None and not isinstance(error, PeerLost):
            self._rollcall.leave(f"{type(error).__name__}: {error}")

    def _rounds(self) -> int:
        """How far this rank is, as ranks compare it when a round fails."""
        if self._quiet:
            return self.session.step
        return sum(level.session.round for level in self.levels)

    def _posted(self) -> Posted:
        """What this rank has given to collectives, and when the last of it."""
        sessions = [level.session for level in self.levels]
        begun = self._backwards.begun if self._scaled is not None else 0
        since = max(session.posted_at for session in sessions)
        return Posted(sum(session.posted for session in sessions) + begun, since)

    def _reached(self) -> Reached:
        """How far this rank is, as ranks compare it when one closes its session."""
        steps = self.levels[-1].session.step
        if self._quiet:
            return untouched(self._model, steps)
        begun = sum(level.session.begun for level in self.levels)
        # With a scaler the ranks ask each other in backward, before a round begins.
        return Reached(steps, begun + (self._backwards.begun if self._scaled is not None else 0))

    def _peer_lost(self, error: PeerLost) -> None:
        if self._quiet:
            _log.error("%s", error)  # what hangs is DDP's, and ends with an error of Gloo's
        self._fail(error)
        self._abort()

    def _fail(self, error: BaseException) -> None:
        for level in self.levels:
            level.session.failure = level.session.failure or error

    @property
    def _failure(self) -> BaseException | None:
        return next((level.session.failure for level in self.levels if level.session.failure), None)

    def _abort(self) -> None:
        """End what may hang: our own collectives, or DDP's where it was left to itself."""
        for level in self.levels:
            level.transport.abort(self._failure)
        if self._quiet:
            abort(self._group)

    def _explain(self, error: BaseException) -> BaseException:
        if isinstance(self._failure, PeerLost):
            return self._failure
        assert self._rollcall is not None
        found = self._rollcall.alarm(_first_line(error))
        found.__cause__ = error
        return found

    def _enter(self, board: HookDispatcher | None) -> None:
        if board is not None:
            self._undo.append(lambda: setattr(board, "answer", plain_mean(self._group)))
            answer: Answer = self.levels[0].gradient or no_exchange
            if self.levels[0].gradient is not None and self._minds_a_sum():
                scaled, unseen = self._scaled is not None, not self._optimizers
                self._accumulating = Accumulating(self._model, self.session, self._named, scaled, unseen)
                self._undo.append(self._accumulating.close)
                answer = self._accumulating.around(answer)
            if self._scaled is not None:
                answer = self._scaled.around(answer)
            board.answer = self._backwards.around(answer)
        if any(level.progress is not None or level.stepped is not None for level in self.levels):
            self._undo.append(OwnBuffers(self._model).restore)
        if not self._quiet:
            self._handles += [each.register_step_pre_hook(self._still) for each in self._optimizers]
        for level in self.levels:
            if level.stepped is not None:
                before = level.stepped.before_step
                self._handles += [each.register_step_pre_hook(before) for each in self._optimizers]
        if self.levels[-1].progress is not None and self._scaled is None:
            far = self.levels[-1].session
            broken = Broken(self._named, lambda: far.step)
            far.origin = broken.origin
            self._handles += [each.register_step_pre_hook(broken) for each in self._optimizers]
        if self.levels[-1].progress is not None:
            self._handles.append(self._model.module.register_state_dict_pre_hook(self._hint))
        if self._momentum is not None:
            self._momentum.take()
            self._undo.append(self._momentum.restore)
        if any(level.session.in_stream and level.gradient is not None for level in self.levels):
            # The last of the hooks: while the host waits here, the device runs out of work.
            self._handles += [each.register_step_pre_hook(self._check) for each in self._optimizers]
        if self._optimizers:
            self._handles.append(self._optimizers[-1].register_step_post_hook(self._after_step))
        elif self.levels[0].gradient is not None and self._scaled is None:
            self.levels[0].gradient.counts_steps = True

    def _check(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a step takes the means: read what the device has noted of them; one wait a step.

        A step that is given a closure computes its gradients in there, and is looked at behind it.
        """
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            self._check_means()
            return None

        def verified() -> Any:
            loss = closure()
            self._check_means()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": verified}
        return (args[0], verified, *args[2:]), kwargs

    def _check_means(self) -> None:
        for level in self.levels:
            if level.gradient is not None and not level.session.late:
                level.session.check()

    def _minds_a_sum(self) -> bool:
        """Whether a gradient on top of a mean is to be refused; late means look at the optimizer's steps."""
        return not linear(self.session) or (self.session.late and not self._optimizers)

    def _after_step(self, *_: Any) -> None:
        if self._quiet:
            self.session.raise_failure()  # DDP does not know of it
        if self.session.in_stream and self.levels[0].gradient is not None:
            self.session.verify(())  # keep what was checked before the step; the device is at work again
        if self._accumulating is not None:
            self._accumulating.stepped()
        if self._scaled is not None:
            self._scaled.after_step()
        else:
            for level in self.levels:
                level.after_step()
        step = self.levels[-1].session.step
        if self._notes is not None:
            self._notes.stepped(step)
        if self._passes is not None:
            self._passes.stepped()
        self.session.stats.stepped(step)

    def _hint(self, *_: object) -> None:
        """Somebody takes the model's parameters: between two rounds they are those of this rank alone."""
        independent = self._apart()
        if independent is not None and not self._hinted:
            self._hinted = True
            _log.warning(
                "rank %d saves its own replica: the replicas of %r, %s, agree again after the next round. "
                "Call session.sync() on every rank before, or save behind session.close(). A checkpoint of "
                "every rank, with session.state_dict(), is fine as it is",
                *(dist.get_rank(), self.strategy.name, independent),
            )

    # ---- at work --------------------------------------------------------------------------------------

    def observe(self, loss: Tensor | float) -> None:
        """Tell the loss of this step, for strategies that go by it; others do not look at it.

        To be called once a step, before `optimizer.step`.
        """
        for level in self.levels:
            if level.progress is not None:
                level.progress.facts.observe(loss)

    def flush(self) -> None:
        """Wait until nothing is on the wire; before a checkpoint, say. Raises what went wrong.

        An answer that is to be applied later is kept until then.
        """
        for level in self.levels:
            level.session.flush()

    def sync(self) -> None:
        """Make all replicas equal now, by a round where the strategy lets them differ. A collective call.

        Raises:
            AttachError: a Parameter of the model has been replaced by another.
            RoundError: the round failed.
        """
        self.flush()
        self._still.check_objects()
        self.levels[-1].sync()

    def state_dict(self) -> dict[str, Any]:
        """The session for a checkpoint (`Stateful`): counters, buckets, and all state that it keeps.

        For torch.save each rank saves its own, as residuals differ by rank; torch.distributed.checkpoint
        keeps them apart by their keys. Waits until nothing is under way.
        """
        self.flush()
        return checkpoint.save(self.strategy, self.levels)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, bit for bit; load the model and the optimizer too.

        Raises:
            CheckpointError: it does not fit, or is not whole; nothing has been changed then.
        """
        self.flush()
        checkpoint.load(state_dict, self.strategy, self.levels)
        for level in self.levels:
            level.fetch()
        if self._notes is not None:
            self._notes.loaded()

    def metrics(self) -> dict[str, float]:
        """The session in numbers, of this rank and up to now.

        * `steps`, and `rounds`; `void_rounds`: of these, how many came to nothing as a scaled gradient
          overflowed;
        * `bytes_out`: sent by this rank in training, by the formulas of the collectives; `ddp_bytes_out`:
          what DDP's own all-reduce would have sent of a rank in as many steps; `compression`: how many times
          as much that is. `closing_bytes_out`: sent by closing the session, where replicas are averaged;
        * `exchange_seconds`: with a round under way; `exposed_seconds`: of these, with training waiting;
          `compute_share`: the share of the time between rounds that was not spent waiting;
        * `lag`: how many steps after its round had left an answer was applied, on average.

        With parameter servers also `push_bytes`, `pull_bytes`, `queue_seconds` and `staleness`. Of several
        levels: their sums (`lag`: that of the farthest), and `rounds_0`, `bytes_out_0`, `rounds_1` and so on
        for each, near to far.
        """
        each = [level.metrics() for level in self.levels]
        if len(each) == 1:
            return each[0]
        return joined(each)

    def servers(self) -> list[dict[str, Any]]:
        """What each parameter server tells of itself; nothing where there are none.

        `pushes` and `pulls`, and their `push_bytes` and `pull_bytes`, of all workers; `stale`: how many
        pushes were how many updates old; `late`: how many were dropped; `queue_seconds`: how long messages
        waited for their turn, in all; `busy_seconds`; `transmitted`: bytes that its interface has sent.

        Raises:
            ServerLost: one is gone.
        """
        self.flush()
        return [facts for level in self.levels for facts in level.servers()]

    def timeline(self) -> Timeline:
        """What this rank was doing when: its last thousand steps, and the last thousand rounds of each level.

        Of each round: when it began and ended, when training waited for it, its bytes. What of a step is no
        waiting is computing, tacit's own included. Ranks of one machine have one clock. With `ddp` only steps
        are known. `tacit.lab.reports.trace` makes of all ranks' timelines a trace for Perfetto.
        """
        names = ["exchange"] if len(self.levels) == 1 else [each.name for each in self.strategy.levels]
        sessions = [level.session for level in self.levels]
        return timeline(self.strategy.name, dist.get_rank(), names, sessions)

    @property
    def active_path(self) -> str:
        """What is really at work, in one sentence: the strategy, how it travels, the ranks, the kernels."""
        if self._quiet:
            return "DistributedDataParallel, untouched"
        return one_line(self.strategy.name, [level.session.summary for level in self.levels], self._with())

    def describe(self) -> str:
        """What is really at work, in lines: `active_path`, and the whole of what it sums up.

        Of each level its strategy as a value; which topology was chosen, and by which numbers: the bytes of
        the busiest rank, as sent and as weighed by what a second compression loses; and each bucket with its
        parameters, their compressors, what predicts them, and its bytes.
        """
        lines = [self.active_path]
        for i, level in enumerate(() if self._quiet else self.levels):
            of = "" if len(self.levels) == 1 else f"level {i + 1} of {len(self.levels)}, "
            lines += ["", f"{of}{self._with()}", *level.session.describe()]
        return "\n".join(lines)

    def _with(self) -> str:
        """The ranks, the kernels, and what was taken over."""
        peers, backend = len(self.levels[-1].session.ranks), dist.get_backend(self._group)
        taken = "" if self._momentum is None else f", {self._momentum}"
        devices = {bucket.device.type for level in self.levels for bucket in level.session.buckets}
        kernels = ", ".join(find_backend(device).description for device in sorted(devices))
        where = dict.fromkeys(level.placing.words for level in self.levels if level.placing.words)
        placed_ = f"{backend}, {' and '.join(where)}" if where else backend
        return f"{peers} {'rank' if peers == 1 else 'ranks'} by {placed_}, kernels: {kernels}{taken}"

    # ---- out ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Make replicas and their optimizers equal, drain, and leave plain DDP behind; idempotent.

        The optimizer's hooks are taken away; DDP's communication hook stays, and averages as plain DDP does.
        A collective call: a rank that comes early waits for the others, while they live.

        Raises:
            UnevenData: ranks have taken different numbers of steps.
            RatesDiffer: with different learning rates.
            RoundError: the last round failed, or an earlier one did.
        """
        if self._model not in _ATTACHED:
            return
        try:
            if self._failure is None or any(level.session.unheard for level in self.levels):
                if self._rollcall is not None and self._failure is None:
                    self._rollcall.meet()
                self._now_closing()
                self.sync()
                self.levels[-1].consolidate()
                self._say_how_it_ended()
                if self._scaled is not None:
                    self._scaled.consolidate()
                if self._rollcall is not None:
                    self._rollcall.part()
            elif isinstance(self._failure, PeerLost):
                raise self._failure  # found by the roll call, and perhaps not yet raised
        finally:
            self._leave()

    def _now_closing(self) -> None:
        self.flush()  # what is under way is training's
        for level in self.levels:
            level.session.stats.closing = True

    def _say_how_it_ended(self) -> None:
        for level in self.levels if self._group.rank() == 0 else ():
            if note := level.strategy.compressor.ended(level.session.step):
                _log.warning("%s", note)

    def _leave(self) -> None:
        _ATTACHED.pop(self._model, None)
        for handle in self._handles:
            handle.remove()
        for undo in self._undo:
            undo()
        if self._passes is not None:
            self._passes.close()
        if self._rollcall is not None:
            self._rollcall.close()
        failed = self._failure is not None
        for level in self.levels:
            level.close(failed)
        exit.ended(self)
        run_report.ended(self)
        tensorboard.ended(self)

    def end(self, where: str, error: BaseException | None) -> None:
        """Close what nobody has closed, at `where`; see `doors.ending`. Says what it did, or could not do."""
        independent = self._apart()
        try:
            if error is not None:
                self._lost(error)
                self._leave()
                return
            self.close()
        except Exception as failure:
            undone = "" if independent is None else f" The replicas, {independent}, were not averaged."
            _log.warning(
                "the session of %r was open at %s, and could not be closed: %s.%s Close it yourself: %s",
                *(self.strategy.name, where, _first_line(failure), undone, CLOSE),
            )
        else:
            if independent is not None and dist.get_rank() == 0:
                _log.warning(
                    "the session of %r was open at %s. The replicas, %s, have been averaged now: what was "
                    "saved or evaluated before was one rank's own. Close it where training ends: %s",
                    *(self.strategy.name, where, independent, CLOSE),
                )

    def _apart(self) -> str | None:
        """Since when the replicas differ, in words; None: they do not."""
        progress = self.levels[-1].progress
        since = None if progress is None else progress.independent
        if since is None:
            return None
        return f"which differ after {since} steps of their own"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        lost = self._lost(error)
        self._leave()
        if lost is not None:
            raise lost from error

    def _lost(self, error: BaseException) -> PeerLost | None:
        """An error came out of the block: is a peer to blame, or must the peers be told of this rank?"""
        of_a_collective = isinstance(error, dist.DistError) or _is_of_gloo(error)
        if self._failure is not None:
            return self._failure if of_a_collective and isinstance(self._failure, PeerLost) else None
        if self._rollcall is None:
            return None
        if of_a_collective:
            lost = self._rollcall.alarm(_first_line(error))
            self._fail(lost)
            return lost
        # The peers may be waiting for this rank: tell them, and do not wait for them.
        self._rollcall.leave(f"{type(error).__name__}: {error}")
        self._fail(error)
        self._abort()
        return None


def _is_of_gloo(error: BaseException) -> bool:
    """Whether a collective of Gloo failed; most of its plain errors name a file of its sources."""
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text or "pair closure" in text)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _goes_by_node(strategy: AnyStrategy) -> bool:
    return any({level.topology.scope, level.topology.meets} != {WORLD} for level in strategy.levels)


def _alike_by_node(strategy: AnyStrategy) -> bool:
    """Whether the nearest level gives the ranks of a node the same gradients, in every step that counts."""
    near = strategy.levels[0]
    return near.topology.scope == NODE and isinstance(near.rounds, EveryStep | NodeRounds)


def _fully_named(strategy: AnyStrategy) -> Sequence[Strategy]:
    """The levels, each of several named after the whole too, as the profiler shows them."""
    if len(strategy.levels) == 1:
        return strategy.levels
    whole = strategy.name.partition(":")[0]
    return [replace(level, name=f"{whole}.{level.name}") for level in strategy.levels]
