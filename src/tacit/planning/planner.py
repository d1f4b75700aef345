"""The decider of `auto`: predicts a step with each candidate by simulation, and takes the fastest."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace

import torch
from torch import Tensor

from tacit.algorithms import parse
from tacit.errors import ConfigError
from tacit.model.trained_model import locals_of
from tacit.planning.cluster_prediction import BASE, Prediction, computing
from tacit.planning.decider import Choice, ChoosingSession, from_all_texts
from tacit.planning.gpu_profiler import layout
from tacit.planning.profile import Profile
from tacit.planning.simulation import networks
from tacit.planning.step_prediction import StepPredictor
from tacit.planning.step_profiler import take
from tacit.planning.step_timer import StepTimer
from tacit.topologies.flat import gathered_use
from tacit.topologies.recompression import loss
from tacit.transports.probing import RingCost, ring_cost

FEWEST, MOST, ENOUGH = 3, 9, 1.0
"""Steps are measured until they have taken `ENOUGH` seconds, but at least and at most so many."""
WORTH = 0.03
"""The factor by which a candidate that changes the arithmetic must be faster than DDP, or than a plainer one.
"""


class Planner:
    """Profiles the steps, measures a ring of all ranks, and predicts every candidate.

    Long steps vary little, and cost much: three are enough where one takes a third of a second.

    Candidates are tried in the order of their seconds if encoding cost nothing. Once the next one could not
    be faster than the best, the others are left out, as measuring their cost takes time.

    Attributes:
        steps: the number of steps of plain averages after which it looks; the first is not measured.
    """

    steps = 1 + FEWEST

    def __init__(self) -> None:
        self._timer: StepTimer | None = None
        self._asks = False
        self._found: list[Prediction] = []
        self._order: list[str] = []
        self._compute = 0.0

    def begin(self, session: ChoosingSession) -> None:
        """Time the steps from now on; kernels are compiled before."""
        options = session.options
        self.stop()
        _compile(session.candidates().possible)
        self._asks = True
        self._timer = StepTimer(options.model.module, options.optimizers, options.named)

    def stop(self) -> None:
        """Time no more steps; `auto` calls it when it ends, whether it has chosen or not."""
        if self._timer is not None:
            self._timer.close()

    def measure(self, session: ChoosingSession) -> int:
        """Make the profile, and predict the candidates. A collective call.

        Returns:
            How many more steps are to be measured before; asked for once.
        """
        options = session.options
        assert self._timer is not None
        if self._asks:
            self._asks = False
            step = statistics.median([each.wall for each in self._timer.steps] or [0.0])
            longest = float(session.from_all(torch.tensor([step], dtype=torch.float64)).max())
            wanted = math.ceil(ENOUGH / longest) if longest else MOST
            if wanted > FEWEST:
                return min(wanted, MOST) - FEWEST
        self.stop()
        ring = ring_cost(options.group)
        profile = take(self._timer, options, ring)
        laid_out = layout(options)
        nodes, ranks = len(laid_out), len(laid_out[0])
        # Where shards are averaged, several groups of ranks have measured: all use the first one's.
        mine = json.dumps([profile.to_json(), asdict(ring), nodes, ranks])
        text, rings, nodes, ranks = json.loads(from_all_texts(session.from_all, mine)[0])
        profile, ring = Profile.from_json(text), RingCost(**rings)
        network = networks.of_ring(nodes, ranks, ring.rate, ring.latency, profile)
        network = replace(network, connections=ring.rate_of_sums / ring.rate)
        self._compute = computing(profile, network)
        self._order = [*session.candidates().possible]
        predictor = StepPredictor(
            profile=profile,
            network=network,
            tensors=_as_profiled(profile, locals_of(options.named)),
            slowest=lambda mine: float(session.from_all(torch.tensor([mine], dtype=torch.float64)).max()),
        )
        self._found = predictor.predict_all([parse(text) for text in self._order])
        return 0

    def decide(self) -> Choice:
        """Choose the fastest candidate, and of about equally fast ones the plainest."""
        if not self._found:
            raise ConfigError("no candidate could be predicted")
        best = min(self._found, key=lambda each: each.seconds)
        by_text = {each.algorithm: each for each in self._found}
        near = [by_text[text] for text in self._order if text in by_text]
        chosen = next(each for each in near if each.seconds <= (1 + WORTH) * best.seconds)
        base = by_text.get(BASE)
        return Choice(
            algorithm=chosen.algorithm,
            reason=self._reason(chosen, base),
            seconds=chosen.seconds,
            considered=tuple(
                (text, by_text[text].seconds if text in by_text else None) for text in self._order
            ),
        )

    def _reason(self, chosen: Prediction, base: Prediction | None) -> str:
        step, alone = 1e3 * chosen.seconds, 1e3 * self._compute
        if base is None or chosen.algorithm == BASE:
            return (
                f"{chosen.algorithm} stays: a step of {step:.1f} ms is predicted, of which {alone:.1f} "
                f"compute, and nothing that may be chosen would be faster by {100 * WORTH:.0f} %"
            )
        return (
            f"{chosen.algorithm}: a step of {step:.1f} ms is predicted, {base.seconds / chosen.seconds:.1f} "
            f"times as fast as ddp ({1e3 * base.seconds:.1f} ms); {alone:.1f} ms would be computing alone"
        )


def _as_profiled(profile: Profile, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's tensors; shards that are of another size on the rank of the profile are made up in that."""
    return {
        name: tensor
        if tensor.shape == profile.named[name].shape
        else torch.full(profile.named[name].shape, 0.01, dtype=tensor.dtype, device=tensor.device)
        for name, tensor in tensors.items()
    }


def _compile(texts: Iterable[str]) -> None:
    """Load the kernels of these strategies' codecs now: between two steps all ranks would wait for it."""
    for strategy in map(parse, texts):
        for level in strategy.levels:
            if (side := gathered_use(level.compressor, 0)) is not None:
                loss(side.codec)
