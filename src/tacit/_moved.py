"""Where modules and names went: an old import raises an error that says what to write now.

Importing tacit puts a finder at the end of `sys.meta_path`. It is asked only for what nothing else has found,
so it costs nothing where a module exists.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

MODULES = {
    "algorithms.catalogue": "algorithms.registry",
    "cli.book": "cli.compare.recorder",
    "cli.contest": "cli.compare.runner",
    "cli.display": "cli.compare.display",
    "cli.endings": "cli.run.failures",
    "cli.job": "cli.run.options",
    "cli.outcome": "cli.run.result",
    "cli.predicting": "cli.predictor.runner",
    "cli.request": "cli.compare.options",
    "cli.tally": "cli.run.rank_counter",
    "cli.texts": "cli.parsing",
    "cluster": "lab.cluster",
    "compressors.budget": "prediction.budget",
    "compressors.coding": "prediction.predictive_coding",
    "compressors.gain": "prediction.gain",
    "compressors.heard": "prediction.entry_history",
    "compressors.mirrored": "prediction.agreement_check",
    "compressors.nowcast": "prediction.nowcaster",
    "compressors.past": "prediction.history",
    "compressors.phases": "compressors.scheduled",
    "compressors.predicted": "prediction.predicted",
    "compressors.pulled": "prediction.server_prediction",
    "compressors.then": "compressors.cascade",
    "compressors.turns": "prediction.subsets",
    "doors": "hooks",
    "doors.accumulating": "hooks.accumulation",
    "doors.agreeing": "hooks.agreement",
    "doors.beside": "hooks.server_buffers",
    "doors.broken": "hooks.nonfinite_since",
    "doors.copies": "hooks.host_copies",
    "doors.decay": "hooks.weight_decay",
    "doors.ending": "hooks.exit",
    "doors.facts": "hooks.observations",
    "doors.footprint": "hooks.run_report",
    "doors.given": "hooks.arguments",
    "doors.hook": "hooks.comm_hook",
    "doors.late": "hooks.delayed",
    "doors.live": "hooks.tensorboard",
    "doors.moments": "hooks.optimizer_state",
    "doors.nodes": "hooks.node_layout",
    "doors.placing": "hooks.device_placement",
    "doors.rates": "hooks.learning_rates",
    "doors.scaling": "hooks.grad_scaler",
    "doors.served": "parameter_server.placement",
    "doors.state": "hooks.checkpoint",
    "doors.stepped": "hooks.server_step",
    "doors.trainable": "hooks.frozen_check",
    "doors.uneven": "hooks.uneven_data",
    "doors.unused": "hooks.unused_parameters",
    "engine": "exchange.lane",
    "exchanges": "exchange.combinators",
    "kernels.cuda": "kernels.triton",
    "kernels.cuda.pieces": "kernels.triton.primitives",
    "kernels.pick": "kernels.dispatch",
    "kernels.carry": "kernels.numba.exponents",
    "kernels.draws": "kernels.numba.levels_wide",
    "kernels.gram": "kernels.numba.orthogonal",
    "kernels.jit": "kernels.numba.jit",
    "kernels.largest": "kernels.reference.select",
    "kernels.parts": "kernels.numba.primitives",
    "kernels.places": "kernels.numba.positions",
    "kernels.pointers": "kernels.numba.pointers",
    "kernels.quantize": "kernels.numba.levels",
    "kernels.rooms": "kernels.thread_scratch",
    "kernels.rounding": "kernels.numba.int8",
    "kernels.scan": "kernels.numba.select",
    "kernels.split": "kernels.numba.signs",
    "kernels.vectors": "kernels.numba.vectors",
    "kernels.weave": "kernels.numba.merge",
    "lots": "session.buckets",
    "predictors": "prediction",
    "predictors.files": "prediction.weight_files",
    "predictors.mp2": "prediction.mp2_network",
    "predictors.opening": "prediction.loading",
    "predictors.wnn": "prediction.wnn_network",
    "recipes": "lab.recipes",
    "recipes.messages": "lab.recipes.progress",
    "recipes.prediction": "lab.predictor_training",
    "recipes.prediction.gains": "lab.predictor_training.gain_search",
    "recipes.prediction.judging": "lab.predictor_training.evaluation",
    "recipes.prediction.made_up": "lab.predictor_training.synthetic",
    "recipes.prediction.motions": "lab.predictor_training.trajectories",
    "recipes.tuning": "lab.recipes.hyperparameters",
    "records": "lab.records",
    "reports": "lab.reports",
    "reports.lanes": "lab.reports.activity",
    "reports.story": "lab.reports.summary",
    "server": "parameter_server",
    "server.averager": "parameter_server.averaging_service",
    "server.desks": "parameter_server.service",
    "server.host": "parameter_server.process",
    "server.keeper": "parameter_server.parameter_service",
    "server.opening": "parameter_server.registration",
    "server.rules": "parameter_server.optimizers",
    "server.seats": "parameter_server.connection",
    "server.tally": "parameter_server.counters",
    "server.words": "parameter_server.allowed_types",
    "session.choosing": "session.topology_choice",
    "session.describing": "session.description",
    "session.holdings": "session.state",
    "session.origins": "session.nonfinite_origin",
    "session.tally": "session.stats",
    "session.times": "session.timeline",
    "testbed": "lab.testbed",
    "testbed.blame": "lab.testbed.failure_attribution",
    "topologies.again": "topologies.recompression",
    "topologies.axis": "topologies.on_axis",
    "transports.bounded": "hooks.bounded_store",
    "transports.closing": "hooks.close_barrier",
    "transports.comparing": "hooks.store_comparison",
    "transports.entrance": "parameter_server.listener",
    "transports.handshake": "parameter_server.handshake",
    "transports.joining": "parameter_server.connecting",
    "transports.messages": "parameter_server.messages",
    "transports.pairs": "parameter_server.protocol",
    "transports.rollcall": "hooks.failure_detector",
    "transports.secret": "parameter_server.secret",
    "transports.servers": "parameter_server.client",
    "transports.settling": "transports.thread_shutdown",
    "transports.stretches": "parameter_server.chunking",
    "transports.told": "parameter_server.encoding",
}
"""Old module -> new one, both below tacit. Where a package moved, a module that is not here kept its name."""

NAMES = {
    "tacit": {
        "Adopt": "tacit.merges.ServerParams",
        "Inside": "tacit.rounds.NodeRounds",
        "Keep": "tacit.merges.LocalResidual",
        "Phases": "tacit.compressors.Scheduled",
        "Select": "tacit.compressors.Partition",
        "Then": "tacit.compressors.Cascade",
    },
    "tacit.compressors": {
        "Nowcast": "tacit.prediction.Nowcast",
        "Phases": "tacit.compressors.Scheduled",
        "Predicted": "tacit.prediction.Predicted",
        "PredictiveCoding": "tacit.prediction.PredictiveCoding",
        "Pulled": "tacit.prediction.Pulled",
        "Select": "tacit.compressors.Partition",
        "Then": "tacit.compressors.Cascade",
    },
    "tacit.contracts": {
        "Ask": "tacit.contracts.PushPull",
        "Collect": "tacit.contracts.AllGatherInto",
        "Deal": "tacit.contracts.AllToAll",
        "Everything": "tacit.contracts.Exact",
        "Gather": "tacit.contracts.AllGather",
        "Landing": "tacit.contracts.Application",
        "Mean": "tacit.contracts.AllReduce",
        "Memory": "tacit.contracts.ScheduleState",
        "Message": "tacit.parameter_server.messages.Message",
        "Piece": "tacit.contracts.PayloadSpec",
        "Place": "tacit.contracts.AxisRank",
        "Reduce": "tacit.contracts.ReduceEncoded",
        "Remembered": "tacit.contracts.Difference",
        "Reply": "tacit.parameter_server.service.Reply",
        "Scatter": "tacit.contracts.ReduceScatter",
        "Send": "tacit.contracts.Permute",
        "Sender": "tacit.parameter_server.service.Sender",
        "Sent": "tacit.contracts.Transmitted",
        "Service": "tacit.parameter_server.service.Service",
        "Spoken": "tacit.contracts.OneShotUse",
        "Together": "tacit.contracts.Grouped",
        "extreme": "tacit.exchange.health.extreme",
        "refuse_overflow": "tacit.exchange.health.refuse_overflow",
    },
    "tacit.merges": {"Adopt": "tacit.merges.ServerParams", "Keep": "tacit.merges.LocalResidual"},
    "tacit.rounds": {"Inside": "tacit.rounds.NodeRounds"},
}
"""Module -> its old names -> where each is now."""


class OldImports:
    """A finder that finds nothing: it raises where an old module, or a package's old name, is imported."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None = None, target: object = None) -> None:
        """Raise for what has another name now, or nearly that of something public; else leave it to Python.

        Raises:
            ModuleNotFoundError: a module of that name moved; says where to.
            ImportError: `from package import name`, and that name is another one now, or nearly a public one;
                says which.
        """
        package, _, name = fullname.rpartition(".")
        if name in NAMES.get(package, ()):
            raise ImportError(_renamed(package, name))
        if package.startswith("tacit") and fullname.removeprefix("tacit.") in MODULES:
            raise ModuleNotFoundError(_moved(fullname.removeprefix("tacit.")))
        near = get_close_matches(name, getattr(sys.modules.get(package), "__all__", ()), n=1)
        if package.startswith("tacit.") and near:
            raise ImportError(f"{package} has no {name}. Did you mean {near[0]!r}?")


def install() -> None:
    """Put the finder behind all others, once."""
    if OldImports not in sys.meta_path:
        sys.meta_path.append(OldImports)


def attributes(module: str) -> Callable[[str], Any]:
    """What a module's `__getattr__` is, where some of its names are other ones now.

    Where a package's attribute is missing, `from package import name` asks the finder. A module that is a
    file has no such second question, so there the error is an `ImportError` from the start.
    """

    def missing(name: str) -> Any:
        if name in NAMES.get(module, ()):
            kind = AttributeError if hasattr(sys.modules[module], "__path__") else ImportError
            raise kind(_renamed(module, name))
        old = f"{module}.{name}".removeprefix("tacit.")
        raise AttributeError(
            _moved(old) if old in MODULES else f"module {module!r} has no attribute {name!r}"
        )

    return missing


def _renamed(module: str, name: str) -> str:
    return f"{module}.{name} is {NAMES[module][name]} now: write that instead"


def _moved(old: str) -> str:
    """One sentence about a module; for a package another one, about its modules that have other names."""
    new = MODULES[old]
    inside = {each.removeprefix(f"{old}."): to for each, to in MODULES.items() if each.startswith(f"{old}.")}
    told = f"tacit.{old} is tacit.{new} now: write that instead"
    if not inside:
        return told
    others = ", ".join(f"{name} is tacit.{to}" for name, to in inside.items())
    return f"{told}. Of its modules, {others}; all others keep their names"
