"""torchtitan's small Llama: torchtitan shards it inside each machine, and DiLoCo averages between machines.

torchtitan shards the model by its own `parallelize_fn`, along the axis "fsdp" of its meshes. The axis
"dp_replicate" is left to tacit. Losses are normalised by the number of tokens, as torchtitan does. Each
replica counts its own tokens, as it takes steps of its own. Needs torchtitan 0.3 (`pip install torchtitan`).
Run it on this machine:

    torchrun --nproc-per-node 2 examples/09_torchtitan.py

or on two emulated machines of two ranks:

    tacit run --cluster 2x2@100mbit --algorithm diloco -- examples/09_torchtitan.py
"""

import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

DEVICE = utils.device_type if torch.accelerator.is_available() else "cpu"
utils.device_type = DEVICE  # before torchtitan builds meshes: without a GPU it takes "cuda" all the same

from torchtitan.components.loss import cross_entropy_loss  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.utils import clip_grad_norm_, set_spmd_backend  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402

import tacit  # noqa: E402

STEPS = 24
BATCH, LENGTH, TOKENS = 8, 16, 2048
BACKEND = "partial_dtensor"
os.environ.setdefault("TACIT_ALGORITHM", "diloco:sync_every=8,bits=4")  # under plain torchrun


class NearOnly(ParallelDims):
    """torchtitan's axes, of which it shards along the near one and does nothing along the far one."""

    @property
    def dp_replicate_enabled(self) -> bool:
        """False: FSDP2 would average gradients between machines in every step."""
        return False


def sharded_llama(dims: ParallelDims) -> nn.Module:
    """torchtitan's Llama of 6 million parameters, sharded and initialised by torchtitan's functions."""
    set_spmd_backend(BACKEND)
    spec = model_registry("debugmodel", attn_backend="varlen")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # runs on CPUs, too
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(seq_len=LENGTH, local_batch_size=BATCH, mixed_precision_param="float32"),
        parallelism=ParallelismConfig(spmd_backend=BACKEND),
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if DEVICE == "cpu" and isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # Gloo cannot scale while it sums
    torch.manual_seed(0)  # replicas begin alike
    model.to_empty(device=DEVICE)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train()


def main() -> None:
    """Train, and say how well it goes on and what was sent."""
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ours = [0] * dist.get_world_size()
    dist.all_gather_object(ours, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    near = math.gcd(*ours)  # the ranks of a machine; what divides them, where machines differ
    far = dist.get_world_size() // near
    if far == 1:  # one machine: every rank is a replica
        near, far = 1, near
    dims = NearOnly(far, near, cp=1, tp=1, pp=1, ep=1, world_size=far * near, spmd_backend=BACKEND)
    model = sharded_llama(dims)
    optimizers = default_adamw(lr=2e-3).build(model_parts=[model])

    replica = dims.get_mesh("fsdp").get_group()
    mesh = dims.get_mesh(["dp_replicate", "fsdp"])
    mine = torch.Generator().manual_seed(1 + dist.get_rank())  # every rank has data of its own
    with tacit.attach(model, optimizers.optimizers, tacit.from_env(), mesh=mesh) as session:
        for _ in range(STEPS):
            first = torch.randint(0, TOKENS, (BATCH, 1), generator=mine)
            text = ((first + torch.arange(LENGTH + 1)) % TOKENS).to(DEVICE)  # the model learns to count
            tokens = torch.tensor(BATCH * LENGTH, device=DEVICE)
            dist.all_reduce(tokens, group=replica)
            optimizers.zero_grad()
            loss = cross_entropy_loss(model(text[:, :-1]), text[:, 1:]) / tokens
            loss.backward()
            clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
            optimizers.step()
    loss = loss.detach()
    dist.all_reduce(loss, group=replica)  # the sum over the replica's tokens

    if dist.get_rank() == 0:
        told = session.metrics()
        print(session.active_path)
        print(f"{far} replicas, each on {near} ranks: loss {loss.item():.2f} after {told['steps']} steps")
        print(f"a rank sent {told['bytes_out'] / 1e6:.2f} MB to other machines, in {told['rounds']} rounds")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
