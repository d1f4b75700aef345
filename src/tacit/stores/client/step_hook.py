"""The hook for servers that step: it pushes gradients in place of `optimizer.step`, and pulls parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from tacit.contracts import PayloadSpec
from tacit.errors import AttachError, ConfigError
from tacit.model.parameter_sample import ParameterSample
from tacit.replicas.outside_writes import lost_at_servers
from tacit.replicas.replica import wide_like
from tacit.session import Session
from tacit.stores.client.buffers import ServerBuffers

_SENT: dict[type[Optimizer], tuple[str, ...]] = {
    SGD: ("momentum", "dampening", "weight_decay", "nesterov"),
    Adam: ("betas", "eps", "weight_decay"),
    AdamW: ("betas", "eps", "weight_decay"),
}
"""Which hyper-parameters a server gets at attach; the learning rate goes with each push."""


class OptimizerGroups:
    """The worker's optimizer, by whose groups a server steps each parameter.

    Args:
        optimizers: of the parameters; one.
        named: the parameters.

    Raises:
        AttachError: a server has none like it, or it does not hold all parameters.

    Attributes:
        rules: the groups' hyper-parameters; the learning rate goes with each push.
        of: the number of each parameter's group.
    """

    def __init__(self, optimizers: Sequence[Optimizer], named: Mapping[str, Tensor]) -> None:
        if len(optimizers) != 1 or type(optimizers[0]) not in _SENT:
            kinds = ", ".join(type(each).__name__ for each in optimizers) or "none"
            raise AttachError(
                f"with optimizer='server' the server steps as the worker's optimizer would, and {kinds} is "
                "no torch.optim.SGD, Adam or AdamW: give attach one of these, or write optimizer='worker'"
            )
        (self._optimizer,) = optimizers
        groups = self._optimizer.param_groups
        for flag in ("maximize", "amsgrad"):
            if any(group.get(flag) for group in groups):
                raise AttachError(f"a server has no {flag}=True: leave it out, or write optimizer='worker'")
        number = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        without = [name for name, p in named.items() if id(p) not in number]
        if without:
            raise AttachError(
                f"with optimizer='server' the server steps every parameter, and {without[0]} is in no group "
                f"of the optimizer: add it, or freeze it ({without[0]}.requires_grad_(False)) before DDP"
            )
        self.of: dict[str, int | None] = {name: number[id(p)] for name, p in named.items()}
        self.rules = tuple(self._rule(group) for group in groups)

    def _rule(self, group: Mapping[str, Any]) -> dict[str, Any]:
        kind = type(self._optimizer)
        return {"kind": kind.__name__, **{key: _plain(group[key]) for key in _SENT[kind]}}

    def rate(self, name: str) -> float:
        """The present learning rate of a parameter."""
        group = self.of[name]
        assert group is not None
        return float(self._optimizer.param_groups[group]["lr"])

    def check(self) -> None:
        """Refuse hyper-parameters other than those that the servers got at attach; learning rates may change.

        Raises:
            ConfigError: names what has changed, and its group.
        """
        for i, (group, sent) in enumerate(zip(self._optimizer.param_groups, self.rules, strict=False)):
            now = self._rule(group)
            if now != sent:
                what = next(key for key in sent if sent[key] != now[key])
                raise ConfigError(
                    f"{what} of the optimizer's group {i} is {now[what]} now, and the server steps by "
                    f"{sent[what]}, as it was at attach: only learning rates may change. Leave that schedule "
                    "out (OneCycleLR(..., cycle_momentum=False)), or write optimizer='worker'"
                )


def _plain(value: Any) -> Any:
    """A hyper-parameter as numbers: some may be tensors."""
    if isinstance(value, Sequence):
        return tuple(_plain(each) for each in value)
    return value if isinstance(value, bool) else float(value)


class ServerStepHook:
    """Takes the gradients from the optimizer, so that its step does nothing, and pushes them.

    Args:
        session: exchanges them.
        named: the parameters.
        back: the format in which the parameters of a bucket come back.
        groups: the worker's optimizer; the parameters of a bucket are of one of its groups.
        beside: buffers, which no gradient moves.
    """

    def __init__(
        self,
        session: Session,
        named: Mapping[str, Tensor],
        back: Callable[[Tensor], PayloadSpec],
        groups: OptimizerGroups,
        beside: ServerBuffers,
    ) -> None:
        self._session, self._named = session, named
        self._groups, self._beside = groups, beside
        self._flat = [torch.zeros_like(bucket.like(bucket.device)) for bucket in session.buckets]
        self._have = [wide_like(bucket) for bucket in session.buckets]  # as the server has it, to the bit
        self._whole = all(back(flat).codec is None for flat in self._flat)
        self._taken: dict[str, Tensor] = {}
        self._sample, self._resumes = ParameterSample(named), False
        self._sample.note()
        for i, have in enumerate(self._have):
            for param in session.buckets[i].slices:
                have[param.start : param.stop] = named[param.name].detach().view(-1)

    def resume(self) -> None:
        """Take the servers' parameters, whatever this worker's are, as after loading a checkpoint."""
        self._resumes = True

    def before_step(self, *_: Any) -> None:
        """To be called before `optimizer.step`, which finds no gradients.

        Raises:
            AttachError: somebody else has written the parameters, which the servers do not know of.
        """
        self._session.failure.raise_first()
        resumes, self._resumes = self._resumes, False
        if not resumes and self._sample.changed(waits=False):
            raise lost_at_servers(self._session.strategy.name)
        self._groups.check()
        for name, p in self._named.items():
            if p.grad is not None:
                self._taken[name] = p.grad
                p.grad = None

    def after_step(self) -> None:
        """To be called after it: push, wait for the parameters, and give the gradients back.

        Raises:
            RoundError: a server or a worker is gone, or a gradient is not finite; nothing was applied then.
        """
        session, taken = self._session, self._taken
        self._taken = {}
        try:
            pending = session.begin()
            for i, flat in enumerate(self._flat):
                for param in session.buckets[i].slices:
                    gradient = taken.get(param.name)
                    flat[param.start : param.stop] = 0.0 if gradient is None else gradient.view(-1)
                session.submit(i, flat, lambda: None)
            session.pending.wait(pending)
            for i, flat in enumerate(self._flat):
                self._write(i, flat, self._whole)
        finally:
            for name, gradient in taken.items():
                self._named[name].grad = gradient
        self._sample.note()
        session.advance()

    def sync(self) -> None:
        """Wait until all workers have pushed, take the resulting parameters, and average buffers."""
        self._session.flush()
        if self._session.agree(self._flat):
            for i, flat in enumerate(self._flat):
                self._write(i, flat, whole=True)
            self._sample.note()
        self._beside.average()  # now that all have come so far, none of them waits for a push of another

    def enter(self, bring: Callable[[str, Tensor], Tensor]) -> None:
        """Take a server's parameters. `bring` sends it this rank's values of a bucket, and returns its."""
        for i, bucket in enumerate(self._session.buckets):
            self._write(i, bring(bucket.name, self._flat[i].copy_(self._have[i])), whole=True)
        self._sample.note()
        self._beside.enter()

    def _write(self, i: int, answer: Tensor, whole: bool) -> None:
        have = self._have[i]
        if whole:
            have.copy_(answer)
        else:
            have.add_(answer)
        with torch.no_grad():
            for param in self._session.buckets[i].slices:
                p = self._named[param.name]
                p.copy_(have[param.start : param.stop].view_as(p))
