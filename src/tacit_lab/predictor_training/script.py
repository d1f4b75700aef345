"""Records a user's training script: `python -m tacit_lab.predictor_training.script SCRIPT ARGS`.

It runs the script in this process, as Python would, and records after the steps of its optimizer. `tacit
predictor record -- SCRIPT ARGS` starts it, for each rank where torchrun does, and says by an environment
variable what is recorded, and into which folder.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tacit import scripts
from tacit.environment import RECORD
from tacit.errors import ConfigError
from tacit.files import put
from tacit_lab.predictor_training import dataset
from tacit_lab.predictor_training.layers import Layer, Recorder
from tacit_lab.predictor_training.runs import LEAST, Sampling
from tacit_lab.predictor_training.simulation import Round

LAYERS, NOTES = "record.safetensors", "notes.json"
"""What the folder then holds: the recorded layers, if there are any; and how many steps there were."""


class ScriptRecorder:
    """Takes notes of how the first optimizer that steps moves its parameters.

    Attributes:
        steps: of that optimizer.
    """

    def __init__(self, run: str, sampling: Sampling, seed: int = 0) -> None:
        self._run, self._sampling, self._seed = run, sampling, seed
        self._optimizer: Optimizer | None = None
        self._others: set[int] = set()
        self._params: list[Tensor] = []
        self._before: list[Tensor] = []
        self.steps = 0

    @property
    def others(self) -> int:
        """How many more optimizers have stepped, which are not recorded."""
        return len(self._others)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it every step of an optimizer is seen."""
        before = register_optimizer_step_pre_hook(lambda optimizer, *_: self._about_to_step(optimizer))
        after = register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer))
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _about_to_step(self, optimizer: Optimizer) -> None:
        if self._optimizer is None:
            self._begin(optimizer)

    def _stepped(self, optimizer: Optimizer) -> None:
        if optimizer is not self._optimizer:
            self._others.add(id(optimizer))
            return
        self.steps += 1
        number, rest = divmod(self.steps, self._sampling.every)
        if not rest:
            self._round(number - 1)

    def layers(self) -> list[Layer]:
        """What was recorded, without phases that were cut short of the least number of rounds."""
        found = self._recorder.layers() if self._optimizer is not None else []
        return [layer for layer in found if len(layer.steps) >= LEAST]

    def _begin(self, optimizer: Optimizer) -> None:
        self._optimizer, sampling = optimizer, self._sampling
        given = [p for group in optimizer.param_groups for p in group["params"]]
        self._params = [p for p in given if p.requires_grad and p.is_floating_point() and p.numel()]
        self._recorder = Recorder(
            nn.ParameterList(self._params),
            run=self._run,
            elements=sampling.elements,
            share=sampling.share,
            seed=self._seed,
        )
        self._keep(0)

    def _round(self, number: int) -> None:
        """The round of this number has ended."""
        phase = self._sampling.phase_of(number)
        if phase is not None and self._optimizer is not None:
            moved = (p.detach() - was for p, was in zip(self._params, self._before, strict=True))
            progress = {str(i): each.float().cpu() for i, each in enumerate(moved)}
            lr = float(self._optimizer.param_groups[0]["lr"])
            self._recorder.note(phase, Round(number, self.steps, lr, progress, progress))
        self._keep(number + 1)

    def _keep(self, number: int) -> None:
        """Where the parameters are before this round, if it is recorded."""
        recorded = self._sampling.phase_of(number) is not None
        self._before = [p.detach().clone() for p in self._params] if recorded else []


def command(words: Sequence[str]) -> list[str]:
    """The command that runs a script with the recorder: `words` are it and its arguments, or torchrun's.

    Raises:
        ConfigError: torchrun is to start something else than Python.
    """
    if words[0] != "torchrun":
        return [sys.executable, "-m", __name__, *words]
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(words[1:])
    if parsed.no_python:
        raise ConfigError("torchrun --no-python starts what cannot be recorded: write -- torchrun train.py")
    options = words[1 : len(words) - len(parsed.training_script_args) - 1]
    script = [parsed.training_script, *parsed.training_script_args]
    own = [__name__, "-m", *script] if parsed.module else ["-m", __name__, *script]
    return [sys.executable, "-m", "torch.distributed.run", *options, *own]


def variables(folder: Path, run: str, sampling: Sampling, seed: int) -> dict[str, str]:
    """The environment variables that tell the recorder what to record, and into which folder."""
    told = {"folder": str(folder), "run": run, "sampling": asdict(sampling), "seed": seed}
    return {RECORD: json.dumps(told)}


def collected(folder: Path, sampling: Sampling) -> tuple[list[Layer], int]:
    """The recorded layers of a script that has succeeded; and how many other optimizers have stepped.

    Raises:
        ConfigError: there is nothing to learn from; the message says why.
    """
    try:
        notes = json.loads((folder / NOTES).read_text())
    except OSError as error:
        raise ConfigError(
            "the script ended without writing what its optimizer did, as with os._exit: have it end as usual"
        ) from error
    if not notes["steps"]:
        raise ConfigError(
            "no optimizer of torch.optim made a step in the script's process: record a script that "
            "trains; where it starts ranks itself (torch.multiprocessing), have torchrun start them, by "
            "-- torchrun --nproc-per-node 2 train.py"
        )
    if not notes["layers"]:
        rounds = notes["steps"] // sampling.every
        raise ConfigError(
            f"the script made {notes['steps']} steps, which are {rounds} rounds of {sampling.every}, and no "
            f"phase of {LEAST} rounds is among them: train longer, or write --every 1, or fewer --rounds "
            "and a shorter --length"
        )
    if not notes["finite"]:
        raise ConfigError("the training did not stay finite: write a lower learning rate into the script")
    return dataset.load(folder / LAYERS), notes["others"]


def main(words: Sequence[str]) -> None:
    """Run a script, or `-m` and a module, as Python would; rank 0 records it."""
    told = json.loads(os.environ.pop(RECORD))
    if int(os.environ.get("RANK", "0")) != 0:
        scripts.run(words)
        return
    recorder = ScriptRecorder(told["run"], Sampling(**told["sampling"]), told["seed"])
    with recorder.watching():
        try:
            scripts.run(words)
        except SystemExit as end:
            if end.code:
                raise
    layers = recorder.layers()
    finite = all(bool(layer.changes.isfinite().all()) for layer in layers)
    if layers and finite:
        dataset.save(Path(told["folder"], LAYERS), layers)
    notes = {"steps": recorder.steps, "others": recorder.others, "layers": len(layers), "finite": finite}
    put(Path(told["folder"], NOTES), json.dumps(notes))


if __name__ == "__main__":
    main(sys.argv[1:])
