"""Every error that tacit raises on purpose, in one place.

TacitError
├── ConfigError (also a ValueError)   what the user gave cannot be: an unknown name, a value out of range
├── AttachError (also a ValueError)   the model, the optimizer or the process group does not fit the strategy
├── DecisionError                     `auto` could not choose a strategy, on any rank
├── CheckpointError (also a ValueError)  a saved state does not fit, or is not whole
├── Overflow                          finite entries became too large to be sent, or owed
├── PayloadError                      a peer's payload is not one that this rank's compressor would send
├── TestbedError                      the emulated cluster could not be built, or its programs failed
└── RoundError                        a round of communication failed
    ├── PeerLost                      a rank died, or did not answer within the time-out
    │   ├── UnevenData                a rank closed its session after fewer steps than others
    │   └── RatesDiffer               ranks have taken a step with different learning rates
    ├── ServerLost                    a parameter server died, was silent, or has dropped this worker
    └── NonFinite                     a gradient or parameter holds NaN or infinity
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "AttachError",
    "CheckpointError",
    "ConfigError",
    "DecisionError",
    "NonFinite",
    "Overflow",
    "PayloadError",
    "PeerLost",
    "RatesDiffer",
    "RoundError",
    "ServerLost",
    "TacitError",
    "TestbedError",
    "UnevenData",
    "first_line",
    "installing",
    "of_ranks",
    "unknown",
]


_FEW = 20
"""So many known names are listed even where some of them are near the unknown one."""


class TacitError(Exception):
    """The root of all errors that tacit raises on purpose."""


class ConfigError(TacitError, ValueError):
    """An argument is not possible; the message names it, and says why not, and what to write."""


class AttachError(TacitError, ValueError):
    """The model, the optimizer or the process group does not fit the strategy."""


class DecisionError(TacitError):
    """`auto` could not choose a strategy; raised on all ranks, whichever of them has failed."""


class CheckpointError(TacitError, ValueError):
    """A saved state does not fit the session, or is not whole; nothing was changed."""


class Overflow(TacitError):
    """Finite entries became infinite where they were added to what is owed, rounded, or averaged.

    One rank raises it and reports it; on the others it is the reason of a `PeerLost`.
    """


class PayloadError(TacitError):
    """A payload has another size or type than this rank's compressor sends, or positions beyond the tensor.

    One rank raises it and reports it; on the others it is the reason of a `PeerLost`.
    """


class TestbedError(TacitError):
    """The emulated cluster could not be built, or a program in it failed."""

    __test__ = False  # pytest would collect the name


class ProbeError(TacitError):
    """A link could not be measured."""


class RoundError(TacitError):
    """A round of communication failed; no state was changed by it."""


class PeerLost(RoundError):
    """A rank died, or did not answer within the time-out; the message names it."""


class UnevenData(PeerLost):
    """A rank closed its session after fewer steps than others; the message says which, and by how much."""


class RatesDiffer(PeerLost):
    """Ranks have taken a step with different learning rates; the message names two, and both rates."""


class ServerLost(RoundError):
    """A parameter server died, did not answer in time, or has dropped this worker; the message names it."""


class NonFinite(RoundError):
    """A gradient or parameter holds NaN or infinity; the message names the parameter and the rank."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without Gloo's guesses; its type if the message is empty."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return next(iter(said.splitlines()), type(error).__name__).partition(". This is typically caused")[0]


def of_ranks(ranks: Iterable[int]) -> str:
    """The ranks as a sentence names them: "rank 2", or "ranks 1, 2"."""
    each = [*map(str, ranks)]
    return f"rank{'s' if len(each) > 1 else ''} {', '.join(each)}"


def unknown(kind: str, given: str, known: Iterable[str]) -> ConfigError:
    """An error for an unknown name, with the nearest known names, or all of them where they are few."""
    names = sorted(known)
    by_lower = {name.lower(): name for name in names}
    near = [by_lower[each] for each in get_close_matches(given.lower(), by_lower, n=2, cutoff=0.5)]
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    listed = f" Known: {', '.join(names)}." if not near or len(names) <= _FEW else ""
    return ConfigError(f"unknown {kind} {given!r}.{hint}{listed}")


def installing(extra: str) -> str:
    """The command that installs the packages of an extra: pip adds only what is missing."""
    return f"pip install 'torch-tacit[{extra}]'"
