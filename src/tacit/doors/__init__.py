"""The doors into torch: `attach` puts a strategy to work on a model, and closing takes it away again."""

from tacit.doors.attach import Attached, attach, from_env
from tacit.doors.hook import CommState, comm_hook
from tacit.doors.scalars import log_metrics
from tacit.doors.state import join_states

__all__ = ["Attached", "CommState", "attach", "comm_hook", "from_env", "join_states", "log_metrics"]
