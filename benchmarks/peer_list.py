"""What `benchmarks/peers.py` compares tacit with, and the virtual environments that it runs them in."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

LOCAL = 8
"""Steps between two averages of local SGD, on both sides."""

OUTER = 12
"""Steps between two outer steps of DiLoCo, on both sides."""

DEMO_TOPK, DEMO_CHUNK = 32, 64
"""Entries that DeMo sends of each chunk, and the chunk's side; its own defaults."""

_STAMP = "installed.json"


class Unavailable(Exception):
    """A peer cannot be installed here; the message says why."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment.

    Attributes:
        name: Its folder.
        pins: What is installed, with its dependencies.
        bare: What is installed without them.
    """

    name: str
    pins: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()

    def wanted(self) -> dict[str, object]:
        """What is to be in it; torch and NumPy are as here, so that rows differ in the peer only."""
        return {
            "python": platform.python_version(),
            "pins": [f"torch=={version('torch')}", f"numpy=={version('numpy')}", *self.pins],
            # Of scikit-learn only the file of the digits is read.
            "bare": [f"scikit-learn=={version('scikit-learn')}", *self.bare],
        }

    def make(self, root: Path, index: Sequence[str] = (), timeout: float = 1800.0) -> Path:
        """Its interpreter; it is made first where it is not there, or holds something else.

        Args:
            root: The folder of all environments.
            index: Options for pip that say where else to look.
            timeout: Seconds for each call of pip.

        Raises:
            Unavailable: pip refuses; the message is its last error.
        """
        folder = root / self.name
        python, stamp = folder / "bin" / "python", folder / _STAMP
        wanted = self.wanted()
        if stamp.is_file() and json.loads(stamp.read_text()) == wanted:
            return python
        print(f"making {folder} ...", file=sys.stderr, flush=True)
        _call([sys.executable, "-m", "venv", "--clear", str(folder)], timeout)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *index]
        for key, options in (("pins", []), ("bare", ["--no-deps"])):
            names = wanted[key]
            assert isinstance(names, list)
            _call([*install, *options, *names], timeout)
        stamp.write_text(json.dumps(wanted))
        return python


def _call(command: Sequence[str], timeout: float) -> None:
    """Run to the end, with all its children; nothing of it is left when this returns."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"pip was not done after {timeout:.0f} s") from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise Unavailable(pip_says(printed))


def pip_says(printed: str) -> str:
    """The last error among what pip has printed; else its last line."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip failed, and printed nothing"])[-1].removeprefix("ERROR:").strip()


TORCH = Environment("torch", (f"numba=={version('numba')}",))
"""That of tacit and of what is in torch. Here torch may find Triton, and load it: 75 MB."""


@dataclass(frozen=True)
class Peer:
    """Another implementation, and what tacit has in its place.

    Attributes:
        name: What `--only` takes.
        way: The function of `peer_rank.py` that sets it up.
        does: What it does, in words.
        distribution: What is asked for its version.
        environment: Where it runs.
        period: Steps between two averages, where it averages.
        ours: What tacit attaches, as text; nothing where that stands beside another peer already.
    """

    name: str
    way: str
    does: str
    distribution: str = "torch"
    environment: Environment = TORCH
    period: int = LOCAL
    ours: str = ""

    @property
    def who(self) -> str:
        """The distribution and its version: the one that is pinned, or that is here."""
        start = f"{self.distribution}=="
        pinned = [pin.removeprefix(start) for pin in self.environment.pins if pin.startswith(start)]
        return f"{self.distribution} {pinned[0] if pinned else version(self.distribution)}"


TORCHFT = Environment("torchft", ("torchft-nightly==2026.10.26",))
ACCELERATE = Environment("accelerate", ("accelerate==1.15.0",))
DEEPSPEED = Environment("deepspeed", ("deepspeed==0.19.8",))
HIVEMIND = Environment("hivemind", ("hivemind==1.1.12",))
# It imports mltiming and does not say so.
DETONATION = Environment("detonation", ("detonation==0.5.2", "mltiming==0.0.5"))

PEERS = (
    Peer("torch-ddp", "ddp", "plain DDP", ours="dense"),
    Peer("torch-fp16", "fp16", "DDP, `fp16_compress_hook`", ours="fp16"),
    Peer("torch-bf16", "bf16", "DDP, `bf16_compress_hook`", ours="bf16"),
    Peer("torch-int8", "int8", "DDP, `quantization_pertensor_hook`", ours="int8"),
    Peer("torch-powersgd", "powersgd", "DDP in one bucket, `powerSGD_hook`, rank 2", ours="powersgd:rank=2"),
    Peer("torch-powersgd-buckets", "powersgd_buckets", "DDP as it comes, `powerSGD_hook`, rank 2"),
    Peer("torch-powersgd-batched", "powersgd_batched", "DDP in one bucket, `batched_powerSGD_hook`"),
    Peer(
        "torch-postlocal",
        "postlocal",
        f"`post_localSGD_hook`, `PeriodicModelAverager`, every {LOCAL} steps after a third",
        ours=f"postlocal:start_step={{third}},sync_every={LOCAL}",
    ),
    Peer(
        "torchft-localsgd",
        "torchft_localsgd",
        f"`LocalSGD`, every {LOCAL} steps",
        "torchft-nightly",
        TORCHFT,
        ours=f"localsgd:sync_every={LOCAL}",
    ),
    Peer(
        "torchft-diloco",
        "torchft_diloco",
        f"`DiLoCo`, every {OUTER} steps, outer rate 0.7, Nesterov 0.9",
        "torchft-nightly",
        TORCHFT,
        period=OUTER,
        ours=f"diloco:sync_every={OUTER}",
    ),
    Peer(
        "accelerate-localsgd",
        "accelerate_localsgd",
        f"`LocalSGD`, every {LOCAL} steps",
        "accelerate",
        ACCELERATE,
        ours=f"localsgd:sync_every={LOCAL}",
    ),
    Peer(
        "deepspeed-bf16",
        "deepspeed_bf16",
        "ZeRO stage 0, `communication_data_type` bf16",
        "deepspeed",
        DEEPSPEED,
        ours="bf16",
    ),
    Peer(
        "hivemind-local",
        "hivemind_local",
        f"`Optimizer(use_local_updates=True)`, when the peers have made about {LOCAL} steps each",
        "hivemind",
        HIVEMIND,
        ours=f"localsgd:sync_every={LOCAL}",
    ),
    Peer("detonation-demo", "demo", "`DeToSGD`, `DeMoReplicator`", "detonation", DETONATION),
    Peer(
        "detonation-demo-matrices",
        "demo_matrices",
        "`DeToSGD`, `DeMoReplicator`, convolutions seen as matrices; "
        f"{DEMO_TOPK} of {DEMO_CHUNK}x{DEMO_CHUNK} entries",
        "detonation",
        DETONATION,
        ours=f"topk:ratio={DEMO_TOPK / DEMO_CHUNK**2}",
    ),
)


def chosen(names: str) -> list[Peer]:
    """The peers of these names, in the order of the list; all where no name is given.

    Raises:
        ValueError: A name is not known.
    """
    given = [name.strip() for name in names.split(",") if name.strip()]
    known = {peer.name: peer for peer in PEERS}
    wrong = [name for name in given if name not in known]
    if wrong:
        raise ValueError(f"there is no peer {wrong[0]!r}; write one or more of {', '.join(known)}")
    return [peer for peer in PEERS if not given or peer.name in given]
