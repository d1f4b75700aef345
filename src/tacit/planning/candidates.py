"""Which strategies may be chosen for a model, its optimizers and its ranks; the others with their reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.optim import ASGD, SGD, Adam, Optimizer

from tacit.algorithms import parse
from tacit.algorithms.auto import SENT_LATE
from tacit.algorithms.auto import candidates as texts_of
from tacit.attaching.requirements import fitted, steps_with
from tacit.contracts import WORLD
from tacit.errors import AttachError, ConfigError
from tacit.gradients.layerwise.forward_steps import stepping
from tacit.levels.device_placement import placed
from tacit.levels.node_layout import read_nodes
from tacit.levels.spec import AttachSpec
from tacit.model.trained_model import locals_of
from tacit.optimizer_hooks import momentum
from tacit.optimizer_hooks.optimizer_facts import made_again
from tacit.planning.profile import Profile
from tacit.replicas.fragments import fragments
from tacit.session.buckets import fitting
from tacit.strategy import Accept, AnyStrategy, AutoStrategy

STEP_AS_SGD = (SGD, ASGD)
"""Optimizers whose steps are linear in the gradient, so that what is sent late has the same effect. Others
divide by its magnitude, or take its sign; of other classes this is not known.
"""
NO_MOMENTUM = {
    "dgc": "no optimizer is torch.optim.SGD with momentum, or their momenta differ",
    "onebit-adam": "an optimizer is neither torch.optim.Adam nor AdamW, or their betas[0] differ",
}
"""The reason for leaving out a candidate that takes the optimizer's momentum, if no text fits the momentum.
"""


@dataclass(frozen=True)
class Candidates:
    """The strategies that may be chosen, and those that may not.

    Attributes:
        possible: texts of strategies that can be attached here, plain ones first.
        left_out: texts of the others, each with the reason.
    """

    possible: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]


class OptimizerCheck:
    """Checks strategies against the optimizers alone.

    Args:
        optimizers: momenta are recorded now, as `dgc` and `onebit-adam` will set them to 0.
        named: the parameters.
    """

    def __init__(self, optimizers: Sequence[Optimizer], named: Mapping[str, Tensor]) -> None:
        self._optimizers, self._named = optimizers, named
        self._with_momentum = {"dgc": _dgc(optimizers), "onebit-adam": _onebit_adam(optimizers)}
        self._not_sgd = next((each for each in optimizers if stepping(each) not in STEP_AS_SGD), None)

    def text(self, text: str) -> str:
        """The text of a candidate with the optimizers' momentum, if it takes one.

        Raises:
            AttachError: no text fits; or it would cost accuracy.
        """
        if text in self._with_momentum:
            chosen = self._with_momentum[text]
            if chosen is None:
                raise AttachError(NO_MOMENTUM[text])
            return chosen
        if self._not_sgd is not None and text.partition(":")[0] in SENT_LATE:
            raise AttachError(
                f"with {type(self._not_sgd).__name__}, which does not step as SGD does, it may cost "
                "accuracy, as much of a gradient is sent steps late: attach it by its name if you "
                "want it all the same"
            )
        return text

    def refuse(self, strategy: AnyStrategy) -> None:
        """Refuse what `attach` would refuse with these optimizers.

        Raises:
            AttachError: the strategy does not fit them.
        """
        for why in steps_with(strategy, self._optimizers, self._named):
            raise AttachError(why)
        momentum.planned(strategy, None, self._optimizers, self._named)


def fitting_texts(texts: Iterable[str], profile: Profile, asked: bool) -> tuple[list[str], dict[str, str]]:
    """The texts that fit the optimizers of a profile, and the others with the reason; all if none is known.

    Args:
        asked: whether the user has named these texts; else they are candidates, as of `auto`.
    """
    if not profile.optimizers:
        return [*texts], {}
    check = OptimizerCheck(made_again(profile.optimizers, profile.named), profile.named)
    found, refused = [], {}
    for text in texts:
        try:
            fits = text if asked else check.text(text)
            check.refuse(parse(fits))
        except AttachError as error:
            refused[text] = str(error)
        else:
            found.append(fits)
    return found, refused


class CandidateCheck:
    """Checks strategies for one call of `attach`, without changing anything. A collective call.

    Args:
        given: the user's arguments. Momenta are recorded now, as `dgc` and `onebit-adam` will set them to 0.

    Attributes:
        observed: whether all ranks pass their loss to the session.
    """

    observed = False

    def __init__(self, given: AttachSpec) -> None:
        self._given = given
        self._by_optimizer = OptimizerCheck(given.optimizers, given.named)
        self._nodes, self._no_nodes = _nodes(given)

    def options(self, text: str) -> AttachSpec:
        """The options of a session with this strategy; no collective call.

        Raises:
            ConfigError: the text is no strategy, or one for another model.
            AttachError: the strategy does not fit; the message says why.
        """
        strategy = parse(text)
        if isinstance(strategy, AutoStrategy):
            raise AttachError(f"{text!r} chooses itself: name an algorithm")
        if any({level.topology.scope, level.topology.meets} != {WORLD} for level in strategy.levels):
            self._check_nodes()
        options = fitted(replace(self._given, strategy=strategy))
        if options.scaler is not None and options.periodic:
            raise AttachError(
                f"with a scaler each replica of {text!r} skips steps alone, so that ranks could not choose "
                f"again after the same step"
            )
        metrics = [level.rounds.observed_metrics for level in options.strategy.levels]
        if not self.observed and any("loss" in each for each in metrics):
            raise AttachError(
                f"{text!r} depends on the loss: call session.observe(loss) before optimizer.step()"
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
        """The texts of all strategies that `accept` allows, possible here or not."""
        if self._given.sharded is not None:
            return texts_of(accept)
        world = self._given.model.process_group.size()
        nodes = len(self._nodes) or world
        return texts_of(accept, nodes, world // nodes)

    def candidates(self, accept: Accept) -> Candidates:
        """The strategies that `accept` allows, and whether each is possible here."""
        possible, left_out = [], []
        for text in self.texts(accept):
            try:
                fits = self._by_optimizer.text(text)
                self.options(fits)
            except (AttachError, ConfigError) as error:
                left_out.append((text, str(error)))
            else:
                possible.append(fits)
        return Candidates(tuple(possible), tuple(left_out))

    def _check_nodes(self) -> None:
        if self._given.sharded is not None:
            return  # FSDP2's near axis takes the part of a node
        if self._no_nodes:
            raise AttachError(self._no_nodes)
        if len(self._nodes) < 2 or len(self._nodes[0]) < 2:
            raise AttachError("it is for several nodes with several ranks each")


def _nodes(given: AttachSpec) -> tuple[list[list[int]], str]:
    """The ranks of each node; none, with the reason, if nodes are not known. A collective call."""
    if given.sharded is not None:
        return [], ""
    try:
        return read_nodes(given.model.process_group, given.mesh), ""
    except AttachError as error:
        return [], str(error)


def _dgc(optimizers: Sequence[Optimizer]) -> str | None:
    """The text of `dgc` with the optimizers' momentum; None if they have none, or different ones."""
    groups = [(each, group) for each in optimizers for group in each.param_groups]
    if not all(isinstance(each, SGD) for each in optimizers):
        return None
    found = {(group["momentum"], group["nesterov"]) for _, group in groups}
    if len(found) != 1:
        return None
    ((factor, nesterov),) = found
    return f"dgc:momentum={factor!r},nesterov={str(nesterov).lower()}" if factor else None


def _onebit_adam(optimizers: Sequence[Optimizer]) -> str | None:
    """The text of `onebit-adam` with the optimizers' first beta; None if one has none, or another."""
    if not all(isinstance(each, Adam) for each in optimizers):
        return None
    found = {group["betas"][0] for each in optimizers for group in each.param_groups}
    return f"onebit-adam:beta={found.pop()!r}" if len(found) == 1 else None
