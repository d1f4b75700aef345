"""Ranges for torch's profiler, named `tacit::<algorithm>::<phase>`; nothing where no profiler is on.

`wait`: backward waits for exchanges; `sync`: a round after `optimizer.step`, waiting included; `start` and
`resume`: an exchange runs up to its first message, and on from an answer; `post_allreduce_world`
and the like: a message is handed to the backend.

torch profiles the thread that starts the profiler, and backward's. Of algorithms that cost more than a cast,
`start` and `resume` run in a thread of tacit: they are seen with
`profile(experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True))`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

from tacit.torch_compat import is_profiling

_NOTHING = nullcontext()


def within(algorithm: str, phase: str) -> AbstractContextManager[object]:
    """A context manager that marks this phase; `algorithm` may have parameters, and is named without."""
    if not is_profiling():
        return _NOTHING
    return profiler.record_function(f"tacit::{algorithm.partition(':')[0]}::{phase}")
