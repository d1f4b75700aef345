"""The hierarchical parameter dataset: how single elements of every layer move in ordinary trainings.

MP² (Liu et al., Computer Networks 255, 2024) learns from samples of a model's layers over ordinary
distributed trainings. How many elements, for how long, and with which further values, the paper has not
published; that is ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tacit_lab.predictor_training.simulation import Round, kinds


@dataclass(frozen=True)
class Layer:
    """Some elements of one parameter, over consecutive rounds of one run.

    Attributes:
        run: which training; data sets are split by it.
        split: "train", or why it is held out: "architecture" or "data".
        name: of the parameter; `depth`: how many came before it, as a share of all.
        kind: one of `tacit.prediction.KINDS`.
        phase: which part of the run, counted from 0.
        steps: shape (rounds,), after which step of the optimizer each round came.
        lr: shape (rounds,).
        changes: shape (rounds, elements), the workers' mean progress.
        swings: shape (rounds,), its root mean square over a random part of the layer: what ranks know online.
    """

    run: str
    split: str
    name: str
    kind: str
    shape: tuple[int, ...]
    depth: float
    phase: int
    steps: Tensor
    lr: Tensor
    changes: Tensor
    swings: Tensor


@dataclass
class _Notes:
    chosen: Tensor
    changes: list[Tensor] = field(default_factory=list)
    swings: list[Tensor] = field(default_factory=list)


class Recorder:
    """Takes notes of a training's rounds: of each parameter a random sample, another one in each phase.

    Layers count alike, however large they are: of each there are `elements` elements, or all it has.

    Args:
        run: what it is called; `split`, what it is for.
        share: of which part of a layer the swing is measured.
        seed: decides which elements, and which part.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        run: str = "",
        split: str = "train",
        elements: int = 128,
        share: float = 0.4,
        seed: int = 0,
    ) -> None:
        self._run, self._split, self._share, self._elements = run, split, share, elements
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        self._kinds = kinds(model)
        self._generator = torch.Generator().manual_seed(seed)
        self._phases: dict[int, dict[str, _Notes]] = {}
        self._when: dict[int, list[tuple[int, float]]] = {}

    def note(self, phase: int, round_: Round) -> None:
        """Keep what the chosen elements did in this round; rounds of one phase follow one upon the other."""
        if phase not in self._phases:
            self._phases[phase] = {name: self._begin(round_.progress[name]) for name in self._shapes}
            self._when[phase] = []
        self._when[phase].append((round_.step, round_.lr))
        for name, notes in self._phases[phase].items():
            moved = round_.progress[name].reshape(-1)
            some = torch.rand(moved.numel(), generator=self._generator) < self._share
            notes.swings.append((moved[some] if bool(some.any()) else moved).square().mean().sqrt())
            notes.changes.append(moved[notes.chosen])

    def layers(self) -> list[Layer]:
        """All that was noted."""
        return [
            self._layer(phase, i, name, notes)
            for phase, named in self._phases.items()
            for i, (name, notes) in enumerate(named.items())
        ]

    def _begin(self, x: Tensor) -> _Notes:
        return _Notes(torch.randperm(x.numel(), generator=self._generator)[: self._elements])

    def _layer(self, phase: int, i: int, name: str, notes: _Notes) -> Layer:
        steps, lr = zip(*self._when[phase], strict=True)
        return Layer(
            run=self._run,
            split=self._split,
            name=name,
            kind=self._kinds[name],
            shape=self._shapes[name],
            depth=i / len(self._shapes),
            phase=phase,
            steps=torch.tensor(steps),
            lr=torch.tensor(lr),
            changes=torch.stack(notes.changes).float(),
            swings=torch.stack(notes.swings).float(),
        )
