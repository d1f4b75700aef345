"""Gradients that leave layer by layer on a simulated GPU: a layer waits for its event, and no later one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_gpu import Future, Gpu, simulated
from test_stream_order import BUCKETS, LR, SHAPES, Bucket, Now, Twin
from torch import Tensor

from tacit.algorithms import parse
from tacit.compressors import LAG, ErrorFeedback, TopK
from tacit.contracts import Collective, Posted, ReduceScatter
from tacit.gradients import ddp_hook
from tacit.gradients.layerwise import hook as layerwise_hook
from tacit.gradients.layerwise.hook import LayerwiseHook
from tacit.gradients.layerwise.message_plan import MessagePlan
from tacit.kernels import dispatch
from tacit.overlap import Fused
from tacit.session import Session, Training
from tacit.strategy import Strategy

ALGORITHMS = ("fusion", "priority", "dear")
ASKS = Strategy(compressor=LAG(xi=0.0), overlap=Fused(credit=1e-6))
"""One message at a time, and the host must know of each whether there is anything to send."""
ROUNDS = 6
"""In the third DDP's buckets are known to stay, and gradients leave by the plan."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    monkeypatch.setenv("TACIT_KERNELS", "reference")
    dispatch.find_backend.cache_clear()
    dispatch.active_backend.cache_clear()
    with simulated(monkeypatch) as found:
        yield found
    dispatch.find_backend.cache_clear()
    dispatch.active_backend.cache_clear()


class Halves(Twin):
    """A twin that adds up spans, too."""

    def post(self, request: Collective, stage: int, key: str) -> Posted:
        if isinstance(request, ReduceScatter):
            request.x.add_(0)
            return Now(request.x)
        return super().post(request, stage, key)


class Layers:
    """DDP's buckets, autograd's hooks and the optimizer on the main stream, which steps layer by layer."""

    def __init__(self, gpu: Gpu, algorithm: str | Strategy, patch: pytest.MonkeyPatch) -> None:
        self.gpu = gpu
        (strategy,) = (parse(algorithm) if isinstance(algorithm, str) else algorithm).levels
        self.named = {name: torch.zeros(shape, device=gpu.device) for name, shape in SHAPES.items()}
        rates = lambda: dict.fromkeys(SHAPES, LR)  # noqa: E731
        self.session = Session(
            strategy, self.named, Halves(), BUCKETS, training=Training(rates=rates), in_stream=True
        )
        self._queued: list[Callable[[], None]] = []
        self._accumulated: dict[int, Callable[[], None]] = {}

        def behind(p: Tensor, call: Callable[[], None]) -> Any:
            self._accumulated[id(p)] = call
            return SimpleNamespace(remove=lambda: None)

        patch.setattr(layerwise_hook, "behind_accumulation", behind)
        patch.setattr(ddp_hook, "_future", lambda buffer: Future(gpu))
        for module in (ddp_hook, layerwise_hook):
            patch.setattr(module, "at_end_of_backward", self._queued.append)
            patch.setattr(module, "no_exchange", self._at_once)
        model: Any = SimpleNamespace(
            module=SimpleNamespace(register_forward_pre_hook=lambda call: SimpleNamespace(remove=call)),
            require_forward_param_sync=True,
            gradient_as_bucket_view=True,
        )
        self.hook = LayerwiseHook(self.session, model, self.named)
        if strategy.overlap.into_forward:
            self.hook.keep_means(self.hook.settle, lambda: None)
        self.buffers = [
            torch.zeros(sum(self.named[name].numel() for name in names), device=gpu.device)
            for names in BUCKETS
        ]
        self.hook.use(MessagePlan((("f", "e"), ("d",), ("c",), ("b", "a"))))

    def _at_once(self, bucket: Any) -> Any:
        future = Future(self.gpu)
        future.set_result(bucket.buffer())
        return future

    def spans(self) -> Iterator[tuple[int, str, Tensor]]:
        for i, (names, buffer) in enumerate(zip(BUCKETS, self.buffers, strict=True)):
            at = 0
            for name in names:
                yield i, name, buffer[at : at + self.named[name].numel()]
                at += self.named[name].numel()

    def backward(self) -> None:
        futures = []
        filled: Mapping[int, list[str]] = {i: [] for i in range(len(BUCKETS))}
        for i, name, part in self.spans():
            part.copy_(torch.linspace(-1, 1, part.numel(), device=self.gpu.device))
            filled[i].append(name)
            if filled[i] == BUCKETS[i]:
                bucket: Any = Bucket(i, [self.named[each] for each in BUCKETS[i]], self.buffers[i])
                futures.append(self.hook(bucket))
            self._accumulated[id(self.named[name])]()
        for future in futures:
            future.wait()
        while self._queued:
            self._queued.pop(0)()

    def forward(self) -> None:
        """Each layer's step, and its use."""
        planned = self.hook.is_at_work
        for name, p in self.named.items():
            if planned:
                self.hook.wait_for([name])
            for _, each, part in self.spans():
                if each == name:
                    p.sub_(part.view(p.shape), alpha=LR)
            p.sum()

    def train(self) -> None:
        for _ in range(ROUNDS):
            self.backward()
            if not self.hook.into_forward or not self.hook.is_at_work:
                self.session.pending.check()
            self.forward()
            self.session.commit_checked()
            self.session.advance()
        self.hook.settle()
        self.session.flush()
        self.session.close()


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, ASKS])
def test_nothing_races(algorithm: str | Strategy, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Layers(gpu, algorithm, monkeypatch)
    training.train()
    assert training.hook.is_at_work
    assert not gpu.races, "\n".join(dict.fromkeys(gpu.races))
    assert training.session.round == ROUNDS


@pytest.mark.parametrize("algorithm", ["priority", "dear"])
def test_a_layer_waits_for_its_message_and_the_host_for_none(
    algorithm: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Layers(gpu, algorithm, monkeypatch)
    for _ in range(3):
        training.backward()
        training.forward()
        training.session.advance()
    assert training.hook.is_at_work
    training.backward()
    gpu.waited.clear()
    ended = [message.ended.clock for message in training.hook._messages]
    first = min(range(len(ended)), key=lambda i: sum(ended[i].values()))
    (name, *_) = training.session.buckets[first].names
    training.hook.wait_for([name])
    assert training.hook.is_here(name)
    assert gpu.covers("main", ended[first])
    others = [each for i, each in enumerate(ended) if i != first]
    assert not any(gpu.covers("main", each) for each in others)
    training.forward()
    assert all(gpu.covers("main", each) for each in others)
    assert gpu.waited == []
    training.session.close()


def test_a_round_of_other_buckets_is_committed_before_the_plan(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no step was taken of its means, nobody has asked what the device has noted."""
    strategy = Strategy(compressor=ErrorFeedback(TopK(ratio=0.1)), overlap=Fused())

    def residuals(asked: bool) -> dict[str, Tensor]:
        training = Layers(gpu, strategy, monkeypatch)
        for _ in range(3):
            if asked:
                training.session.pending.verify()
            training.backward()
        assert training.hook.is_at_work
        training.session.flush()
        assert training.session.round == 3
        training.session.close()
        return {name: each.tensor for (name, _), each in training.session.whole_state().items()}

    asked, unasked = residuals(asked=True), residuals(asked=False)
    assert asked.keys() == {"a", "c", "e"}
    for name, residual in asked.items():
        assert torch.equal(unasked[name], residual), name


def test_an_event_that_is_not_waited_for_is_a_race(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Layers(gpu, "priority", monkeypatch)
    monkeypatch.setattr(layerwise_hook.LayerMessage, "join", lambda self: None)
    training.train()
    assert any("on main" in each for each in gpu.races)
