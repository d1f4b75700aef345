"""Every name that is private to torch, or to a framework around it, and that tacit uses: here, nowhere else.

But for FSDP2's, which are in `torch_fsdp`. All of them are in torch 2.9.0, 2.13.0 and 2.14.1, but where a
function says since which version. Where torch takes one away, the function here that uses it raises an
AttributeError, or the import of tacit an ImportError, unless the function says otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

# torch.distributed shows these by the same names, without types.
from torch._C._distributed_c10d import GradBucket, HashStore, PrefixStore, Store, TCPStore
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

if torch.__version__ < "2.9":  # torch compares it as a version
    raise ImportError(
        f"tacit needs torch 2.9 or newer, and this is {torch.__version__}: pip install 'torch>=2.9'"
    )

_Untyped: Any = dist.ProcessGroup

__all__ = [
    "GradBucket",
    "HashStore",
    "PrefixStore",
    "PythonGroup",
    "ShutdownNotice",
    "Store",
    "TCPStore",
    "abort",
    "add_squares_of_each_",
    "at_end_of_backward",
    "backend_name",
    "behind_accumulation",
    "compiled_module",
    "copy_each_",
    "ddp_buckets",
    "default_store",
    "device_types",
    "divide_each_",
    "fabric_module",
    "gloo_sharing_sockets",
    "group_by_store",
    "group_named",
    "has_bf16_products",
    "in_function_mode",
    "in_join",
    "is_normalising",
    "is_open",
    "is_profiling",
    "largest_of_each",
    "lightning_hook",
    "multiply_each_",
    "own_parameters",
    "python_group",
    "raise_to_squares_",
    "reduces_in_python",
    "scale_on_device",
    "sequence_number",
    "set_timeout",
    "shares_sockets",
    "step_alone",
    "timeout_of",
    "times_written",
    "without_memory",
]


# ---- DDP ----------------------------------------------------------------------------------------------


def ddp_buckets(tensors: list[Tensor], first: int, others: int) -> list[list[int]]:
    """The places of the tensors in each of DDP's buckets, of so many bytes at most."""
    cut: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]  # not in its stub
    found: list[list[int]] = cut(tensors, [first, others])[0]
    return found


# ---- process groups -----------------------------------------------------------------------------------


def device_types(group: dist.ProcessGroup) -> list[str]:
    """The types of device of which the group can send tensors, such as ["cpu", "cuda"]; one may stand twice.

    By `ProcessGroup._device_types`.
    """
    return [torch.device(each).type for each in group._device_types]


def backend_name(group: dist.ProcessGroup, device_type: str) -> str:
    """The name of the group's backend for such tensors, such as "nccl"; by `ProcessGroup._get_backend`."""
    return str(group._get_backend(torch.device(device_type)).name())


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """After which a collective of the group's first backend fails; by `Backend.options._timeout`."""
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """After which a collective of the group fails, from now on; by `Backend._set_default_timeout`."""
    for device in set(group._device_types):
        group._get_backend(device)._set_default_timeout(timeout)


def group_by_store(
    store: Store, rank: int, size: int, backend: str, timeout: timedelta, name: str
) -> dist.ProcessGroup:
    """A group of processes that share nothing but this store, whatever the world of each is.

    Its ranks are numbered in its own order. By `distributed_c10d._new_process_group_helper` and
    `_world.pg_group_ranks`, as `new_group` makes groups.
    """
    c10d: Any = dist.distributed_c10d
    in_world = [dist.get_rank()]  # a helper of torch's asks whether this process takes part
    group, _ = c10d._new_process_group_helper(size, rank, in_world, backend, store, name, timeout=timeout)
    c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}
    made: dist.ProcessGroup = group
    return made


def abort(group: dist.ProcessGroup) -> None:
    """End every collective of the group with an error; by `ProcessGroup._get_backend` and `Backend.abort`."""
    for device in set(group._device_types):
        group._get_backend(device).abort()


def is_open(group: dist.ProcessGroup | None) -> bool:
    """Whether it is a group that has not been destroyed; by `distributed_c10d._world.pg_map`."""
    return group in dist.distributed_c10d._world.pg_map


@contextmanager
def group_named(name: str) -> Iterator[None]:
    """Give process groups of some ranks that are made meanwhile this name.

    Torch takes how many groups this rank has into it, so that ranks which have taken part in unequally many
    wait for each other under different names. By `distributed_c10d._process_group_name`.
    """
    c10d: Any = dist.distributed_c10d
    inner = c10d._process_group_name
    c10d._process_group_name = lambda *_, **__: name
    try:
        yield
    finally:
        c10d._process_group_name = inner


def shares_sockets() -> bool:
    """Whether the group of all ranks sends tensors on the host by Gloo: then `gloo_sharing_sockets` works."""
    world = dist.group.WORLD
    if world is None or not dist.is_gloo_available() or "cpu" not in device_types(world):
        return False
    backend: Any = world._get_backend(torch.device("cpu"))
    return isinstance(backend, dist.ProcessGroupGloo) and hasattr(backend.options, "_devices")


def gloo_sharing_sockets(store: Store, rank: int, size: int, timeout: timedelta, connections: int = 1) -> Any:
    """A backend by Gloo that has the thread for sockets in common with the group of all ranks.

    Each has one else, which wakes a hundred times a second. By `ProcessGroupGloo._Options`, which names a
    device for each of the `connections` between two ranks: Gloo hands collectives to them in turns.
    """
    gloo: Any = dist.ProcessGroupGloo
    world: Any = dist.group.WORLD
    options = gloo._Options()
    devices = world._get_backend(torch.device("cpu")).options._devices * connections
    for name, value in (("_devices", devices), ("_threads", 2 * len(devices)), ("_timeout", timeout)):
        setattr(options, name, value)
    return gloo(store, rank, size, options)


def sequence_number(group: dist.ProcessGroup) -> int:
    """How many collectives the group has begun; by `ProcessGroup._get_sequence_number_for_group`."""
    whole: Any = group
    return int(whole._get_sequence_number_for_group())


def default_store() -> Store:
    """The store by which the ranks found each other; by `distributed_c10d._get_default_store`."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


class ShutdownNotice(dist.ProcessGroup):
    """A process group without collectives, which calls a function when it is shut down.

    Args:
        rank: this rank in the group; `size` are in it.
        name: of its backend, as registered.
        call: what to call.
    """

    supports_splitting = False

    def __init__(self, rank: int, size: int, name: str, call: Callable[[], None]) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._named, self._call = name, call

    def getBackendName(self) -> str:
        """As it was registered."""
        return self._named

    def _get_backend(self, device: Any) -> Any:
        """Itself: where the world is bound to a GPU, torch asks it whether it can be split."""
        return self

    def shutdown(self) -> None:
        """Called by `destroy_process_group`, before any group is destroyed."""
        self._call()


class PythonGroup(_Untyped):  # type: ignore[misc]
    """The base of a process group for tensors on the host whose collectives are written in Python.

    Here are its private names, and torch 2.9's for what later versions call by others.
    """

    supports_splitting = False
    _device_types = (torch.device("cpu"),)
    group_name = ""

    def name(self) -> str:
        """Of its backend."""
        return PYTHON

    getBackendName = name

    def _get_backend(self, device: Any) -> Any:
        return self

    def _set_group_name(self, name: str) -> None:
        self.group_name = name  # C++ has a name only where it has a backend

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """There is none: whoever waits is told when another one is gone."""

    def _allgather_base(self, *given: Any) -> dist.Work:
        work: dist.Work = self.all_gather_single(*given)
        return work

    def alltoall_base(self, *given: Any) -> dist.Work:
        """torch 2.9's name."""
        work: dist.Work = self.all_to_all_single(*given)
        return work


PYTHON = "tacit-python"
"""The name of the backend of such groups."""
_MAKING: list[Callable[[], PythonGroup]] = []
_ONE_AT_A_TIME = threading.Lock()


def python_group(
    make: Callable[[], PythonGroup], rank: int, size: int, timeout: timedelta, name: str
) -> dist.ProcessGroup:
    """Have torch know a group that is written in Python, as `group_by_store` does one of Gloo."""
    with _ONE_AT_A_TIME:
        if PYTHON not in dist.Backend.backend_list:
            dist.Backend.register_backend(PYTHON, lambda *_: _MAKING.pop()(), devices=["cpu"])
        _MAKING[:] = [make]
        return group_by_store(HashStore(), rank, size, PYTHON, timeout, name)


# ---- DDP, and other modules ---------------------------------------------------------------------------


def reduces_in_python(model: object) -> bool:
    """Whether compiled autograd reduces gradients, one by one; by `_use_python_reducer`, if torch has it."""
    return bool(getattr(model, "_use_python_reducer", False))


def compiled_module(model: object) -> object | None:
    """What `torch.compile` has wrapped, by `OptimizedModule._orig_mod`; None where that is not there."""
    return getattr(model, "_orig_mod", None)


def behind_accumulation(p: Tensor, call: Callable[[], None]) -> RemovableHandle:
    """Call `call` in each backward when the gradient of `p` is accumulated, after the present hooks.

    By the node that adds, which an expanded view of `p` leads to; DDP's own hooks are there.
    """
    with torch.enable_grad():
        node: Any = p.expand_as(p).grad_fn
    handle: RemovableHandle = node.next_functions[0][0].register_hook(lambda *_: call())
    return handle


def times_written(tensor: Tensor) -> int:
    """How often it has been written to in place; by `Tensor._version`."""
    return int(tensor._version)


Subclass = TypeVar("Subclass", bound=Tensor)


def without_memory(kind: type[Subclass], like: Tensor) -> Subclass:
    """A tensor of this class, of the other's shape, and of no memory; by `Tensor._make_wrapper_subclass`."""
    made: Subclass = Tensor._make_wrapper_subclass(
        kind, like.shape, like.stride(), dtype=like.dtype, device=like.device
    )
    return made


def step_alone(optimizer: Optimizer) -> None:
    """Step it, and call none of the hooks on its steps.

    `Optimizer.profile_hook_step` wraps each class's `step`, marks it by `hooked`, and calls the hooks;
    learning rate schedulers wrap that of the object.
    """
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def fabric_module(model: object) -> object | None:
    """The module that Fabric of Lightning 2.6.6 has wrapped, or None; by `_FabricModule._forward_module`."""
    return getattr(model, "_forward_module", None)


def lightning_hook(strategy: object) -> object | None:
    """The hook that a DDPStrategy of Lightning's Trainer is to register; by `_ddp_comm_hook`, as of 2.6.6."""
    return getattr(strategy, "_ddp_comm_hook", None)


def share_buffers(module: nn.Module, other: nn.Module) -> None:
    """Give another module the same buffers, also those that are assigned later."""
    vars(other).update(_buffers=module._buffers)
    vars(other).update(_non_persistent_buffers_set=module._non_persistent_buffers_set)


def mesh_of_one(device: str, shards: int, number: int) -> DeviceMesh:
    """A mesh of so many ranks, in which this process has that place; it has no process groups."""
    ranks = [dist.get_rank() + (i - number) % shards for i in range(shards)]
    return DeviceMesh(device, ranks, _init_backend=False)


def shard_of(whole: Tensor, rows: Tensor, mesh: DeviceMesh) -> Tensor:
    """A tensor's rows as FSDP2 has them: a DTensor, which shares their memory."""
    from torch.distributed.tensor import DTensor, Shard  # importing it takes seconds

    like: Any = {"shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, **like)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of the module itself, as it keeps them; by `Module._parameters`."""
    return module._parameters


def is_normalising(module: nn.Module) -> bool:
    """Whether the module gathers means and variances as buffers; by `nn.modules.batchnorm._NormBase`."""
    return isinstance(module, nn.modules.batchnorm._NormBase)


# What every exchange asks is torch's own function, without one of ours around it.
at_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
"""Has a function called in backward's thread when the graph is done; by `Variable._execution_engine`.

To be called in backward. Functions that are queued by these are called after them."""

in_join: Callable[[DistributedDataParallel], bool] = attrgetter("_join_config.enable")
"""Whether a DDP model's forward and backward take part in torch's `Join`; by `_join_config`."""

in_function_mode: Callable[[], int] = torch._C._len_torch_function_stack
"""How many function modes, as that of another default device, are on."""

is_profiling: Callable[[], bool] = partial(getattr, torch.autograd.profiler, "_is_profiler_enabled")
"""Whether a profiler of torch is on."""


# ---- numbers ------------------------------------------------------------------------------------------


# In place, pair by pair, and on a GPU in one launch for many.
multiply_each_: Callable[[list[Tensor], list[float]], None] = torch._foreach_mul_
divide_each_: Callable[[list[Tensor], list[float]], None] = torch._foreach_div_
add_each_: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_add_


def add_squares_of_each_(tensors: list[Tensor], roots: list[Tensor], by: list[float]) -> None:
    """Add the square of each root to its tensor, times its number, in place."""
    torch._foreach_addcmul_(tensors, roots, roots, by)


def copy_each_(tensors: list[Tensor], given: list[Tensor]) -> None:
    """Overwrite each tensor by another one, which is broadcast; on a GPU in one launch for many."""
    if tensors and not tensors[0].is_meta:
        torch._foreach_copy_(tensors, given)


def zero_each_(tensors: list[Tensor]) -> None:
    """Zero each tensor."""
    if tensors and not tensors[0].is_meta:
        torch._foreach_zero_(tensors)


def raise_to_squares_(xs: list[Tensor], copies: list[Tensor], roots: list[Tensor], by: list[float]) -> None:
    """Raise each tensor to the square of its root, times its number, where that is more; and copy it."""
    torch._foreach_zero_(copies)  # the copies have room for the squares
    add_squares_of_each_(copies, roots, by)
    torch._foreach_maximum_(xs, copies)
    copy_each_(copies, xs)


def largest_of_each(tensors: list[Tensor]) -> list[Tensor]:
    """The largest magnitude of each tensor, in few launches; by `torch._foreach_norm`."""
    return list(torch._foreach_norm(tensors, torch.inf))


def scale_on_device(scaler: GradScaler) -> Callable[[], Tensor | None]:
    """What reads the scale without waiting for the device; by `GradScaler._get_scale_async`."""
    return scaler._get_scale_async


def spin(seconds: float) -> None:
    """Have the current stream of the GPU wait for about so long, or longer where its clock is slower."""
    torch.cuda._sleep(int(2e9 * seconds))  # type: ignore[no-untyped-call]  # cycles


def has_bf16_products() -> bool:
    """Whether oneDNN multiplies bf16 matrices here; by `torch.ops.mkldnn._is_mkldnn_bf16_supported`."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
