"""The costs of a training on this machine: those of a step, and of each strategy's computing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch

from tacit.described import Duration, Positive, Saved, Whole
from tacit.errors import ConfigError
from tacit.optimizer_hooks.optimizer_facts import OptimizerFacts


@dataclass(frozen=True)
class ParamReady:
    """A trainable parameter, and when backward has its gradient.

    Attributes:
        shape: its dimensions.
        dtype: its type, such as "float32".
        ready: seconds from the end of the forward pass until its gradient is computed.
    """

    name: str
    shape: tuple[Whole, ...]
    dtype: str
    ready: Duration

    @property
    def meta(self) -> torch.Tensor:
        """A meta tensor of this shape and type."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device="meta")

    @property
    def nbytes(self) -> int:
        """The number of its bytes."""
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)


@dataclass(frozen=True)
class StepProfile:
    """One step of a rank, in seconds of its main thread's processor time, each a median over steps.

    If torch computes with several threads a rank, they are seconds of wall-clock time instead; on a GPU those
    of its stream, by events.

    Attributes:
        data: from the end of the optimizer's step until the last forward pass begins, in wall-clock time, as
            a loader may work in other processes. With accumulation it includes all passes but the last.
        forward: the last forward pass.
        backward: from its end until all gradients are computed.
        optimizer: the optimizer's step.
        parameters: in the order of the model.
        loading: of `data`, the seconds in which the main thread did not run, as it waited for the loader.
        passes: the number of forward passes in it, more than one with accumulation.
    """

    data: Duration
    forward: Duration
    backward: Duration
    optimizer: Duration
    parameters: tuple[ParamReady, ...]
    loading: Duration = 0.0
    passes: Whole = 1

    @property
    def seconds(self) -> float:
        """The whole step, without communication."""
        return self.data + self.forward + self.backward + self.optimizer

    def scaled(self, factor: float) -> StepProfile:
        """The same step, `factor` times as long, except waiting for the loader."""
        return replace(
            self,
            data=factor * (self.data - self.loading) + self.loading,
            forward=factor * self.forward,
            backward=factor * self.backward,
            optimizer=factor * self.optimizer,
            parameters=tuple(replace(each, ready=factor * each.ready) for each in self.parameters),
        )


@dataclass(frozen=True)
class BucketCost:
    """The cost of one exchange of a bucket for a rank, in seconds of processor time, or of a GPU's time.

    Attributes:
        numel: the bucket's entries.
        segments: before the first message, between messages, and after the last.
        launching: the host's seconds to launch it, where it runs on a GPU.
    """

    numel: Whole
    segments: tuple[Duration, ...]
    launching: Duration = 0.0


@dataclass(frozen=True)
class LevelCost:
    """The cost of a round of one level of a strategy for a rank.

    Attributes:
        buckets: in the order of sending.
        main: seconds of the main thread for a round of deltas: reading parameters, applying the answer.
        kept_bytes: the session's memory in addition to the model, its gradients and the optimizer.
    """

    buckets: tuple[BucketCost, ...]
    main: Duration = 0.0
    kept_bytes: Whole = 0


@dataclass(frozen=True)
class StrategyCost:
    """The cost of a strategy for a rank of a cluster of `nodes` nodes of `ranks` ranks, level by level."""

    algorithm: str
    nodes: Positive
    ranks: Positive
    levels: tuple[LevelCost, ...]


@dataclass(frozen=True)
class Launching:
    """The host's wall-clock seconds for the parts of a step that a GPU computes: see `StepProfile`."""

    PARTS: ClassVar[tuple[str, ...]] = ("forward", "backward", "optimizer")

    forward: Duration = 0.0
    backward: Duration = 0.0
    optimizer: Duration = 0.0

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.forward + self.backward + self.optimizer


@dataclass(frozen=True)
class GpuLinks:
    """What NCCL's collectives take between GPUs; 0: not measured, as there are no such links.

    Attributes:
        rate: bytes a second that a rank sends in a ring of all ranks, over several nodes.
        latency: seconds of a message of a chain, between nodes.
        near_rate: bytes a second that a rank sends in a ring inside a node.
        near_latency: seconds of a message of a chain there.
    """

    rate: Duration = 0.0
    latency: Duration = 0.0
    near_rate: Duration = 0.0
    near_latency: Duration = 0.0


@dataclass(frozen=True)
class GpuProfile:
    """The GPU of a rank.

    Attributes:
        name: as the driver has it.
        by_nccl: whether DDP exchanges on the GPU.
        in_stream: whether tacit may exchange there, too, where the algorithm can.
        down: bytes a second that are copied to the host's pinned memory; `up`: back.
        launching: what a step's launches take of the host.
        links: what NCCL's collectives take where the profile was taken.
        tf32_gain: the share of a product of float32 matrices that TF32 would save, where it is off.
        channels_last_gain: the share of a convolution that `torch.channels_last` would save, where it is off.
    """

    name: str
    by_nccl: bool
    in_stream: bool
    down: Duration
    up: Duration
    launching: Launching = Launching()
    links: GpuLinks = GpuLinks()
    tf32_gain: Duration = 0.0
    channels_last_gain: Duration = 0.0


@dataclass(frozen=True)
class Profile(Saved):
    """The profile of a training on this machine.

    Attributes:
        step: the computing of one step.
        bucket_bytes: the most bytes of one bucket of DDP.
        threads: the number of threads of a rank for computing.
        ranks: how many ranks of this training were on the machine while it was measured.
        cores: of the machine.
        per_byte: seconds of processor time of the backend for each byte that a rank sends and receives.
        per_message: seconds of processor time for each message of a chain of them.
        buffers: bytes that DDP broadcasts before each forward pass.
        state_bytes: bytes of the optimizer's state.
        costs: the costs of strategies.
        processor: its name; `backend`, `torch_version`: of the training; `date`: ISO 8601.
        gpu: the GPU of a rank, if the model is on one: then a step's parts are its seconds; `threads` is 1.
        optimizers: what steps the parameters; empty: not known.
        shards: how many ranks share a replica; above 1 FSDP2 shards it, and the parameters are a rank's
            shards.
    """

    what: ClassVar[str] = "profile"
    made_by: ClassVar[str] = "tacit profile"

    step: StepProfile
    bucket_bytes: Positive
    threads: Positive
    ranks: Positive
    cores: Positive
    per_byte: Duration
    per_message: Duration
    buffers: Whole
    state_bytes: Whole
    costs: tuple[StrategyCost, ...] = ()
    processor: str = ""
    backend: str = "gloo"
    torch_version: str = ""
    date: str = field(default="", compare=False)
    gpu: GpuProfile | None = None
    optimizers: tuple[OptimizerFacts, ...] = ()
    shards: Positive = 1

    @cached_property
    def named(self) -> dict[str, torch.Tensor]:
        """The trainable parameters as meta tensors, in the order of the model."""
        return {each.name: each.meta for each in self.step.parameters}

    @property
    def model_bytes(self) -> int:
        """Bytes of all trainable parameters."""
        return sum(each.nbytes for each in self.step.parameters)

    @property
    def stepped_by(self) -> str:
        """The classes of the optimizers, such as "SGD"; "": not known."""
        return " and ".join(dict.fromkeys(each.kind for each in self.optimizers))

    @property
    def kind(self) -> str:
        """What computes, and by what DDP exchanges, such as "CPU (Gloo)"."""
        if self.gpu is None:
            return "CPU (Gloo)"
        return f"GPU ({'NCCL' if self.gpu.by_nccl else 'Gloo'})"

    def with_costs(self, costs: Sequence[StrategyCost]) -> Profile:
        """This profile with more costs; newer ones of a strategy replace older ones."""
        new = {(each.algorithm, each.nodes, each.ranks): each for each in (*self.costs, *costs)}
        return replace(self, costs=tuple(new.values()))

    def check_model(self, named: Mapping[str, torch.Tensor]) -> None:
        """Check that this is a profile of a model with these parameters.

        Raises:
            ConfigError: it is the profile of another model.
        """
        here = {name: tuple(p.shape) for name, p in named.items()}
        there = {each.name: tuple(each.shape) for each in self.step.parameters}
        if here != there:
            differing = [name for name in {**here, **there} if here.get(name) != there.get(name)]
            raise ConfigError(
                f"the profile is of another model: it differs in {differing[0]!r} and {len(differing) - 1} "
                "other parameters. Make one of this model with tacit profile -- SCRIPT"
            )

    def check_whole(self) -> None:
        """Check that each rank has a whole replica, as it does on the clusters that are planned.

        Raises:
            ConfigError: several ranks share one.
        """
        if self.shards > 1:
            raise ConfigError(
                f"the profile is of a model that FSDP2 shards: {self.shards} ranks share a replica. A plan "
                "takes each rank for a whole replica, so its bytes, seconds and algorithms would be wrong. "
                "Where it trains, attach 'auto' or call session.diagnose(), which know the mesh; or "
                "give a profile of the same model in DDP"
            )

    def check(self) -> None:
        """Refuse a profile without parameters, and types that torch does not have."""
        types = [getattr(torch, each.dtype, None) for each in self.step.parameters]
        if not types or not all(isinstance(each, torch.dtype) for each in types):
            raise ValueError("it has no parameters, or some of a type that torch does not have")
        if self.gpu is not None and not (self.gpu.down and self.gpu.up):
            raise ValueError("its GPU copies nothing to the host, or nothing back")
