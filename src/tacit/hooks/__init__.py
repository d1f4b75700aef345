"""The hooks into torch: `attach` puts a strategy to work on a model, and closing takes it away."""

from tacit.hooks.attach import attach, from_env
from tacit.hooks.attached import Attached, measure_consensus
from tacit.hooks.checkpoint import join_states
from tacit.hooks.comm_hook import CommState, comm_hook
from tacit.hooks.scalars import log_metrics

__all__ = [
    "Attached",
    "CommState",
    "attach",
    "comm_hook",
    "from_env",
    "join_states",
    "log_metrics",
    "measure_consensus",
]
