"""Which functions of tacit are timed as stages where a script is profiled.

They are replaced by timed ones, so that a run without a profile has nothing of it. Each name is a text here:
other modules may have imported the function by name, and it is replaced there, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from tacit.contracts import Compressor, Merge, OneShot, Topology
from tacit.exports import load_all
from tacit.session.bucket_exchange import BucketExchanges
from tacit_lab.profiling.stages import StageClock

KERNELS = "kernel "
"""How the stages of kernels begin; their names follow."""

FUNCTIONS = {
    "exchange.error_feedback.encoded_spans": "error feedback",
    "exchange.error_feedback.transmitted": "error feedback",
    "exchange.finite_checks.check_payloads": "look for overflow",
    "exchange.finite_checks.refuse_overflow": "look for overflow",
    "exchange.finite_checks.finite": "look for NaN",
    "exchange.finite_checks.divide_": "divide and add up",
    "transports.message_layout.pack_": "pack a message",
    "transports.message_layout.unpack": "unpack a message",
    "contracts.transmitted.add_rescaled": "add the residual",
}
"""Functions, by module and name, and their stages."""

METHODS = {
    "exchange.lane.Lane._take_events": "lane",
    "exchange.lane.Lane._happened": "hand over",
    "exchange.lane.Lane._done": "hand over",
    "exchange.lane.Lane.flush": "hand over",
    "exchange.stream_lane.StreamLane.submit": "lane",
    "transports.message_layout.Slots.pack": "pack a message",
    "transports.message_layout.Slots.payloads": "unpack a message",
    "transports.torch_distributed.TorchTransport.post": "start a collective",
    "transports.started_collectives.Later.answer": "take an answer",
    "session.health.nonfinite.NonfiniteChecks.divide": "look for NaN",
    "session.pending_rounds.PendingRounds.complete": "complete a bucket",
    "session.session.Session.begin": "begin a round",
    "session.session.Session.submit": "submit a bucket",
    "gradients.ddp_hook.GradientHook.__call__": "DDP's hook",
    "gradients.ddp_hook.GradientHook._copy": "copy to a bucket",
    "gradients.ddp_hook.GradientHook._unstage": "copy from a bucket",
    "attaching.step_hooks.StepHooks._after_step": "after the step",
    "model.frozen_check.FrozenCheck.__call__": "before the step",
    "replicas.nonfinite_since.NonfiniteSince.__call__": "look for NaN",
}
"""Methods, by module, class and name, and their stages."""

OVERRIDDEN: Mapping[type, Mapping[str, str]] = {
    OneShot: {
        "encode": "encode",
        "decode_": "decode",
        "decode_add_": "decode",
        "decode_mean_": "decode",
    },
    Merge: {"apply_": "merge"},
}
"""Methods of all that is derived from these, and their stages."""

GENERATORS: Mapping[type, Mapping[str, str]] = {
    Compressor: {"exchange": "exchange of"},
    Topology: {"conduct": "topology"},
    BucketExchanges: {"open": "exchange of a bucket,"},
}
"""The same of methods that make generators; the name of the class follows."""
_HOMES = ("tacit.algorithms", "tacit.compressors", "tacit.merges", "tacit.topologies")
"""Where such classes are."""


def replace(clock: StageClock) -> None:
    """Time all of these, from now on; to be called once, in a process that is profiled to its end."""
    for package in _HOMES:
        load_all(package)
    for path, stage in FUNCTIONS.items():
        home, _, name = path.rpartition(".")
        module = import_module(f"tacit.{home}")
        _everywhere(getattr(module, name), clock.timed(getattr(module, name), stage))
    for path, stage in METHODS.items():
        home, class_, name = path.rsplit(".", 2)
        _method(getattr(import_module(f"tacit.{home}"), class_), name, clock, stage)
    for root, names in OVERRIDDEN.items():
        for owner in (root, *_below(root)):
            for name in names.keys() & vars(owner).keys():
                _method(owner, name, clock, names[name])
    for root, names in GENERATORS.items():
        for owner in (root, *_below(root)):
            for name in names.keys() & vars(owner).keys():
                stage = f"{names[name]} {owner.__name__}"
                setattr(owner, name, clock.stepwise(vars(owner)[name], stage))
    _kernels(clock)


def _kernels(clock: StageClock) -> None:
    """Those in numba, each by its name, once they are compiled; and what calls them or does without."""
    from tacit.kernels import dispatch

    compiled: dict[str, ModuleType] = {}
    load = dispatch.numba_kernels

    def loaded(name: str) -> Any:
        if name not in compiled:
            module = load(name)
            timed: dict[str, Any] = {}
            rows = vars(import_module(f"tacit.kernels.{name}"))
            for each, function in vars(module).items():
                compiled_now = not each.startswith("_") and getattr(function, "signatures", None)
                if compiled_now or hasattr(rows.get(each), "__wrapped__"):
                    timed[each] = clock.timed(function, f"{KERNELS}{name}.{each}")
            compiled[name] = _Named({**vars(module), **timed})
        return compiled[name]

    _everywhere(load, loaded)


class _Named(ModuleType):
    """A module of other functions: those of the true one call each other without delay."""

    def __init__(self, names: dict[str, Any]) -> None:
        super().__init__(names["__name__"])
        self.__dict__.update(names)


def _everywhere(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Have all modules of tacit that know the one by any name know the other by it."""
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == "tacit" and module is not None:
            for each, value in [*vars(module).items()]:
                if value is old:
                    setattr(module, each, new)


def _method(owner: type, name: str, clock: StageClock, stage: str) -> None:
    setattr(owner, name, clock.timed(vars(owner)[name], stage))


def _below(root: type[Any]) -> Iterator[type[Any]]:
    for each in root.__subclasses__():
        yield each
        yield from _below(each)
