"""What a sample was taken in, in a word: by the functions that were under way."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tacit_lab.profiling.instruments import KERNELS
from tacit_lab.profiling.symbols import COMPILED, KERNEL, Frame

__all__ = ["CAUSES", "cause"]

CAUSES = {
    "arithmetic of the model": "products and convolutions, by oneDNN or MKL",
    "kernels of tacit": "compiled by numba",
    "divisions": "passes over memory that divide",
    "reductions": "passes that only read: sums, maxima, and so what looks for NaN and overflow",
    "copies": "passes that copy or fill",
    "other passes": "other kernels of torch over whole tensors",
    "calls of torch": "from Python down to a kernel of torch, and autograd's own work",
    "Python": "the interpreter",
    "Gloo": "its loops, in the program",
    "network": "sockets, in the kernel",
    "hand-overs": "locks, waking and going to sleep",
    "allocations": "of memory, and giving it back",
    "page faults": "the kernel finds memory for addresses that are used first",
    "other work of the kernel": "interrupts and other calls",
    "C library": "functions of it that have no names here: mostly copies and allocations",
    "other": "none of these",
}
"""The causes, and what each means."""

_FAULT = re.compile(r"page_fault|handle_mm_fault|do_user_addr_fault|clear_page|clear_huge_page")
_NETWORK = re.compile(
    r"^(tcp|ip|ip6|inet|sock|net|veth|skb|dev|sch|tbf|fq|htb|netem|napi|neigh|nf|br)_|sendmsg|recvmsg"
    r"|__x64_sys_(send|recv)|sys_send|sys_recv|ep_poll|epoll|qdisc|softirq|sock_|loopback"
)
_WAKING = re.compile(r"futex|schedule|try_to_wake_up|switch_to|finish_task|wake_up|yield|rcu_note")
_MEMORY = re.compile(r"mmap|munmap|madvise|brk|vm_area|unmap_|zap_|free_pgtables|tlb_|mprotect|mremap")
_KERNEL_RULES = (
    ("page faults", _FAULT),
    ("network", _NETWORK),
    ("hand-overs", _WAKING),
    ("allocations", _MEMORY),
)
_NEAR = 3
"""A kernel of torch is known by one of so many innermost functions."""
_GLIBC = r"^_?_?(libc_)?(malloc|free|calloc|realloc|posix_memalign|aligned_alloc|memalign)$"
_PROGRAM: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (found, re.compile("|".join(patterns)))
    for found, *patterns in (
        ("Gloo", "gloo::", "uv__", "c10d::"),
        ("allocations", _GLIBC, "_int_(malloc|free|memalign)", "malloc_consolidate", "sysmalloc", "systrim"),
        ("allocations", "tcache_", "unlink_chunk", "alloc_cpu", "CPUAllocator", "^operator (new|delete)"),
        ("hand-overs", "pthread_(mutex|cond)", "lll_", "futex", "sem_(wait|post|timed)", "sched_yield"),
        ("hand-overs", "take_gil", "drop_gil", "PyThread_acquire"),
        (
            "copies",
            "^_?_?mem(cpy|move|set)",
            "copy_kernel",
            "copy_stub",
            "direct_copy",
            "fill_kernel",
            "cat_",
        ),
        ("arithmetic of the model", "dnnl", "mkldnn", "mkl_", "gemm", "sgemv", "conv", "winograd", "im2col"),
        (
            "arithmetic of the model",
            "cblas",
            "pool",
            "batch_norm",
            "softmax",
            "layer_norm",
            "gelu",
            "attention",
        ),
        ("divisions", "div_(true_)?kernel", "div_true", "reciprocal"),
        (
            "reductions",
            "sum_kernel",
            "cascade_sum",
            "inner_sum",
            "outer_sum",
            "reduce",
            "norm_kernel",
            "aminmax",
        ),
        (
            "reductions",
            "isfinite",
            "minmax",
            "all_kernel",
            "any_kernel",
            "max_values",
            "min_values",
            "Reduce",
        ),
        ("other passes", "_kernel", "[vV]ectorized", "cpu_kernel", "TensorIterator.*loop", "callback_fn"),
    )
)


def cause(stage: str, frames: Sequence[Frame]) -> str:
    """One of `CAUSES`.

    Args:
        stage: In which the sample was taken.
        frames: Innermost first; at least one. Those of the kernel come first.
    """
    kernel = [frame.name for frame in frames if frame.file == KERNEL]
    if kernel:
        return _in_kernel(kernel)
    file = frames[0].file
    if file in (COMPILED, "[anon]"):
        return "kernels of tacit" if stage.startswith(KERNELS) else "arithmetic of the model"
    in_torch = re.match(r"libtorch|libc10", file)
    for frame in frames[: _NEAR if in_torch else 1]:
        for found, pattern in _PROGRAM:
            if pattern.search(frame.name):
                return found
    if re.match(r"libpython|python\d|python$", file) or ".cpython-" in file:
        return "Python"
    if re.match(r"libmkl|libdnnl|libopenblas|libgomp|libm[.-]", file):
        return "arithmetic of the model"
    if any("gloo::" in frame.name for frame in frames[1:]):
        return "Gloo"
    if re.match(r"libc[.-]", file):
        return "C library"
    return "calls of torch" if in_torch or file.startswith("libstdc") else "other"


def _in_kernel(names: Sequence[str]) -> str:
    for found, pattern in _KERNEL_RULES:
        if any(pattern.search(name) for name in names):
            return found
    return "other work of the kernel"
