"""Runs a training script, and reports after its first steps where their time goes. The script ends there.

On each machine, as a training is started there::

    torchrun --nnodes 4 --nproc-per-node 1 ... -m tacit.diagnose train.py --epochs 3

The script need not know tacit: where it attaches none, its DistributedDataParallel is looked at as it is.
`tacit diagnose -- train.py` runs it on an emulated cluster.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tacit import scripts
from tacit.api.attach import attach
from tacit.api.attached import session_of
from tacit.environment import DIAGNOSE
from tacit.errors import TacitError
from tacit.files import output
from tacit.optimizer_hooks.global_hooks import after_steps
from tacit.planning.live_diagnosis import DiagnoseRequest, needs

_FIRST = 2
"""After so many steps of an optimizer its model is looked up: a script that attaches tacit has done so by
then.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script, on every rank; rank 0 logs what was found."""
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m tacit.diagnose",
        description="Run a training script, and say where the time of its steps goes.",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="save it there, e.g. diagnosis.json")
    parser.add_argument("--steps", type=int, default=0, help="how many steps are measured, e.g. 20")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script, and its arguments")
    options = parser.parse_args(argv)
    if not options.script:
        parser.error("there is no script: write it last, such as train.py --epochs 3")
    if options.out is not None:
        output(options.out, "--out")
    by_hand = DIAGNOSE not in os.environ
    if by_hand:
        request = DiagnoseRequest(str(options.out or ""), options.steps, ends=True)
        os.environ[DIAGNOSE] = json.dumps(asdict(request))
    _Watch()
    scripts.run(options.script)  # raises SystemExit after a diagnosis
    if by_hand and os.environ.get("RANK", "0") == "0":
        raise TacitError(f"there is no diagnosis, as the script has ended: {needs(options.steps)}")


class _Watch:
    """Attaches plain `ddp` to the first model of DDP that takes steps and has no session."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        self._handle = after_steps(self._stepped)

    def _stepped(self, optimizer: Optimizer) -> None:
        steps = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if steps < _FIRST:
            return
        self._handle.remove()
        model = _model_of(optimizer)
        if model is not None and session_of(model) is None:
            attach(model, optimizer, "ddp")


def _model_of(optimizer: Optimizer) -> DistributedDataParallel | None:
    """The model of DDP whose parameters it steps."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    # By the type itself: to ask an object for its class may run what a proxy does then.
    models = (each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel))
    return next((each for each in models if stepped & {id(p) for p in each.parameters()}), None)


if __name__ == "__main__":
    try:
        main()
    except TacitError as error:
        print(f"tacit.diagnose: {error}", file=sys.stderr)
        raise SystemExit(1) from None
