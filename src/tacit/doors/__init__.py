"""The doors into torch: `attach` puts a strategy to work on a model, and closing takes it away again."""

from tacit.doors.attach import Attached, attach, from_env

__all__ = ["Attached", "attach", "from_env"]
