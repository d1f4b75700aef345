"""Which strategies may be chosen for a model, its optimizers and its ranks; the others with their reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.optim import ASGD, SGD, Adam, Optimizer

from tacit.algorithms import parse
from tacit.algorithms.auto import SENT_LATE
from tacit.algorithms.auto import candidates as texts_of
from tacit.attaching.requirements import fitted
from tacit.contracts import WORLD
from tacit.errors import AttachError, ConfigError
from tacit.gradients.layerwise.forward_steps import stepping
from tacit.levels.device_placement import placed
from tacit.levels.node_layout import read_nodes
from tacit.levels.spec import AttachSpec
from tacit.model.trained_model import locals_of
from tacit.optimizer_hooks import momentum
from tacit.replicas.fragments import fragments
from tacit.session.buckets import fitting
from tacit.strategy import Accept, AutoStrategy

STEP_AS_SGD = (SGD, ASGD)
"""Optimizers whose steps add up what they are given, so that what is sent late arrives all the same. Others
divide by its magnitude, or take its sign; of a class that is not here nobody knows."""
NO_MOMENTUM = {
    "dgc": "no optimizer is torch.optim.SGD with momentum, or their momenta differ",
    "onebit-adam": "an optimizer is neither torch.optim.Adam nor AdamW, or their betas[0] differ",
}
"""Why a candidate that takes the optimizer's momentum is left out where no text could be made of it."""


@dataclass(frozen=True)
class Candidates:
    """What may be chosen, and what may not.

    Attributes:
        possible: texts of strategies that can be attached here, plain ones first.
        left_out: texts of those that cannot, each with the reason.
    """

    possible: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]


class CandidateCheck:
    """Checks strategies for one call of `attach`, without changing anything. A collective call.

    Args:
        given: what the user gave. Momenta are noted now, as `dgc` and `onebit-adam` will set them to 0.

    Attributes:
        observed: whether all ranks give the session their loss.
    """

    observed = False

    def __init__(self, given: AttachSpec) -> None:
        self._given = given
        self._with_momentum = {"dgc": _dgc(given.optimizers), "onebit-adam": _onebit_adam(given.optimizers)}
        self._not_sgd = next((each for each in given.optimizers if stepping(each) not in STEP_AS_SGD), None)
        self._nodes, self._no_nodes = _nodes(given)

    def options(self, text: str) -> AttachSpec:
        """What a session of this strategy is made of; no rank asks another.

        Raises:
            ConfigError: it is no strategy, or one for another model.
            AttachError: it does not fit; says why.
        """
        strategy = parse(text)
        if isinstance(strategy, AutoStrategy):
            raise AttachError(f"{text!r} chooses itself: name an algorithm")
        if any({level.topology.scope, level.topology.meets} != {WORLD} for level in strategy.levels):
            self._check_nodes()
        options = fitted(replace(self._given, strategy=strategy))
        if options.scaler is not None and options.periodic:
            raise AttachError(
                f"with a scaler each replica of {text!r} passes over steps of its own, so that ranks could "
                "not choose again behind the same step"
            )
        metrics = [level.rounds.observed_metrics for level in options.strategy.levels]
        if not self.observed and any("loss" in each for each in metrics):
            raise AttachError(
                f"{text!r} goes by the loss: call session.observe(loss) before optimizer.step()"
            )
        momentum.planned(options.strategy, options.policy, options.optimizers, options.named)
        for level in options.strategy.levels:
            if level.subject == "nothing":
                continue
            policy = options.policy or fitting(level.compressor, locals_of(options.named))
            placed(level, options.named, policy, options.group, options.exchange_on)
            fragments(options.named, level.parts)
        return options

    def texts(self, accept: Accept) -> list[str]:
        """What is considered where so much is accepted, possible or not."""
        if self._given.sharded is not None:
            return texts_of(accept)
        world = self._given.model.process_group.size()
        nodes = len(self._nodes) or world
        return texts_of(accept, nodes, world // nodes)

    def candidates(self, accept: Accept) -> Candidates:
        """What may be chosen where so much is accepted."""
        possible, left_out = [], []
        for text in self.texts(accept):
            if text in self._with_momentum:
                chosen = self._with_momentum[text]
                if chosen is None:
                    left_out.append((text, NO_MOMENTUM[text]))
                    continue
                text = chosen
            try:
                if self._not_sgd is not None and text in SENT_LATE:
                    raise AttachError(
                        f"with {type(self._not_sgd).__name__}, which does not step as SGD does, it may cost "
                        "accuracy, as much of a gradient is sent steps late: attach it by its own name if "
                        "you want it all the same"
                    )
                self.options(text)
            except (AttachError, ConfigError) as error:
                left_out.append((text, str(error)))
            else:
                possible.append(text)
        return Candidates(tuple(possible), tuple(left_out))

    def _check_nodes(self) -> None:
        if self._given.sharded is not None:
            return  # FSDP2's near axis is what stands for a node there
        if self._no_nodes:
            raise AttachError(self._no_nodes)
        if len(self._nodes) < 2 or len(self._nodes[0]) < 2:
            raise AttachError("it is for several nodes with several ranks each")


def _nodes(given: AttachSpec) -> tuple[list[list[int]], str]:
    """The ranks of each node; none, and why, where nobody has told. A collective call."""
    if given.sharded is not None:
        return [], ""
    try:
        return read_nodes(given.model.process_group, given.mesh), ""
    except AttachError as error:
        return [], str(error)


def _dgc(optimizers: Sequence[Optimizer]) -> str | None:
    """The text of `dgc` that has the optimizers' momentum; None where they have none, or not the same."""
    groups = [(each, group) for each in optimizers for group in each.param_groups]
    if not all(isinstance(each, SGD) for each in optimizers):
        return None
    found = {(group["momentum"], group["nesterov"]) for _, group in groups}
    if len(found) != 1:
        return None
    ((factor, nesterov),) = found
    return f"dgc:momentum={factor!r},nesterov={str(nesterov).lower()}" if factor else None


def _onebit_adam(optimizers: Sequence[Optimizer]) -> str | None:
    """The text of `onebit-adam` that has the optimizers' first beta; None where one has none, or another."""
    if not all(isinstance(each, Adam) for each in optimizers):
        return None
    found = {group["betas"][0] for each in optimizers for group in each.param_groups}
    return f"onebit-adam:beta={found.pop()!r}" if len(found) == 1 else None
