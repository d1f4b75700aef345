"""Samples: what the kernel writes is read, addresses get names, and names a cause."""

import ctypes
import errno
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tacit_lab.profiling import sampler, threads
from tacit_lab.profiling.causes import CAUSES, cause
from tacit_lab.profiling.recorder import short, sort_samples
from tacit_lab.profiling.sampler import Denied, Sample, Sampler, parse
from tacit_lab.profiling.stages import UNATTRIBUTED, Moment
from tacit_lab.profiling.symbols import COMPILED, KERNEL, NOWHERE, Frame, Symbols

IN_KERNEL, IN_PROGRAM = (1 << 64) - 128, (1 << 64) - 512
KERNEL_ADDRESS = (1 << 63) + 5


def record(pid: int, tid: int, at: int, *chain: int) -> bytes:
    body = struct.pack("QIIQQ", 0, pid, tid, at, len(chain)) + struct.pack(f"{len(chain)}Q", *chain)
    return struct.pack("IHH", 9, 0, 8 + len(body)) + body


# ---- what the kernel writes ---------------------------------------------------------------------------


def test_samples_of_this_process_are_read_and_lost_ones_counted() -> None:
    data = (
        record(7, 70, 100, IN_KERNEL, KERNEL_ADDRESS, IN_PROGRAM, 11, KERNEL_ADDRESS, 12)
        + struct.pack("IHHQQ", 2, 0, 24, 0, 3)
        + record(8, 80, 101, IN_PROGRAM, 13)
        + struct.pack("IHHQ", 5, 0, 16, 0)
        + record(7, 71, 102, IN_PROGRAM, 14)
    )
    found = [Sample(100, 70, (KERNEL_ADDRESS, 11, 12)), Sample(102, 71, (14,))]
    assert parse(data, 7) == (found, 3)
    assert parse(b"", 7) == ([], 0)


def refusing(code: int, kernel_only: bool = False) -> Callable[[int, bool], int]:
    def open_(cpu: int, kernel: bool) -> int:
        if kernel or not kernel_only:
            raise OSError(code, os.strerror(code))
        return os.open("/dev/zero", os.O_RDONLY)

    return open_


def test_a_kernel_that_does_not_permit_it_is_told_with_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_open", refusing(errno.EACCES))
    with pytest.raises(Denied, match=r"kernel\.perf_event_paranoid is .*write sysctl"):
        Sampler()
    monkeypatch.setattr(sampler, "_open", refusing(errno.ENOSYS))
    with pytest.raises(Denied, match="takes no samples of programs"):
        Sampler()


def test_a_process_that_may_lock_no_memory_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(sampler, "_open", lambda cpu, kernel: os.open("/dev/zero", os.O_RDONLY))
    monkeypatch.setattr(sampler.mmap, "mmap", refuse)
    with pytest.raises(Denied, match=r"kernel\.perf_event_mlock_kb=2000 as root"):
        Sampler()


def test_without_the_right_to_see_the_kernel_the_program_is_still_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = sampler.mmap.mmap(-1, 9 * sampler.mmap.PAGESIZE)
    monkeypatch.setattr(sampler, "_open", refusing(errno.EACCES, kernel_only=True))
    monkeypatch.setattr(sampler, "_shared", lambda handle: shared)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    taking = Sampler()
    assert not taking.sees_kernel
    size = 8 * sampler.mmap.PAGESIZE
    data, at = record(os.getpid(), 1, 5, 9), size - 20  # goes on at the beginning
    shared[sampler.mmap.PAGESIZE + at :] = data[:20]
    shared[sampler.mmap.PAGESIZE : sampler.mmap.PAGESIZE + len(data) - 20] = data[20:]
    struct.pack_into("QQ", shared, 1024, at + len(data), at)
    taking.take()
    taking.take()
    assert taking.samples() == [Sample(5, 1, (9,))]
    assert struct.unpack_from("QQ", shared, 1024) == (at + len(data), at + len(data))
    taking.close()


def test_threads_at_work_are_sampled_in_what_they_do() -> None:
    try:
        taking = Sampler()
    except Denied as denied:
        pytest.skip(str(denied))
    x, tids = torch.randn(256, 256), []

    def work() -> None:
        tids.append(threading.get_native_id())
        while time.thread_time() < 0.1:
            x @ x

    taking.start()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    taking.stop()
    taking.take()
    samples = taking.samples()
    taking.close()
    own = [each for each in samples if each.tid == tids[0]]
    assert len(own) > 20
    symbols = Symbols()
    causes = [cause("working", [symbols.frame(address) for address in each.addresses]) for each in own]
    assert causes.count("arithmetic of the model") > len(own) / 2


# ---- names --------------------------------------------------------------------------------------------


def test_addresses_have_the_names_of_functions() -> None:
    symbols = Symbols()
    system: Any = ctypes.CDLL(None)
    address = ctypes.cast(system.getpid, ctypes.c_void_p).value
    assert address is not None
    assert "getpid" in symbols.frame(address).name
    assert symbols.frame(address).file.startswith("libc")
    assert symbols.frame(8) == Frame("", NOWHERE)
    assert symbols.frame(KERNEL_ADDRESS).file == KERNEL


def test_names_of_cpp_are_those_of_the_source() -> None:
    from tacit_lab.profiling.symbols import _demangled

    torch.zeros(1)  # what names are turned by is loaded with torch
    assert _demangled("_ZN2at6native3addEi") == "at::native::add(int)"
    assert _demangled("main") == "main"
    assert _demangled("_Z") == "_Z"


def test_a_name_is_short_and_a_loop_says_what_it_does() -> None:
    long = (
        "void c10::function_ref<void (char**)>::callback_fn<at::native::(anonymous namespace)::"
        "div_kernel(at::X&)::{lambda}>(long)"
    )
    assert short(Frame(long, "libtorch_cpu.so")) == "c10::function_ref::callback_fn of div_kernel"
    assert short(Frame("at::native::f(int) [clone .constprop.0]", "x")) == "at::native::f"
    assert short(Frame("", "libc.so.6")) == "libc.so.6"
    assert short(Frame("", NOWHERE)) == "unknown"
    assert ";" not in short(Frame("a;b", ""))


# ---- causes -------------------------------------------------------------------------------------------

TORCH, PYTHON = "libtorch_cpu.so", "libpython3.11.so.1.0"


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([("clear_page_erms", KERNEL), ("asm_exc_page_fault", KERNEL), ("x", TORCH)], "page faults"),
        ([("copy_user", KERNEL), ("tcp_sendmsg_locked", KERNEL)], "network"),
        ([("native_queued", KERNEL), ("do_futex", KERNEL)], "hand-overs"),
        ([("unmap_page_range", KERNEL), ("__x64_sys_munmap", KERNEL)], "allocations"),
        ([("apic_timer", KERNEL)], "other work of the kernel"),
        ([("", COMPILED)], "arithmetic of the model"),
        ([("_PyEval_EvalFrameDefault", PYTHON)], "Python"),
        ([("take_gil", PYTHON)], "hand-overs"),
        ([("gloo::transport::tcp::Pair::handleEvents(int)", TORCH)], "Gloo"),
        ([("__libc_malloc", "libc.so.6")], "allocations"),
        ([("", "libc.so.6")], "C library"),
        ([("at::native::direct_copy_kernel(at::X&)", TORCH)], "copies"),
        ([("f<at::native::div_true_kernel(at::X&)>", TORCH)], "divisions"),
        ([("at::native::vectorized_inner_sum", TORCH)], "reductions"),
        ([("f<at::native::add_kernel(at::X&)>", TORCH)], "other passes"),
        ([("lambda", TORCH), ("at::native::max_pool2d_kernel_impl", TORCH)], "arithmetic of the model"),
        ([("dnnl::impl::execute", TORCH)], "arithmetic of the model"),
        ([("at::_ops::add__Tensor::call", TORCH)], "calls of torch"),
        ([("", "[vdso]")], "other"),
    ],
)
def test_a_cause_is_told_by_functions(frames: list[tuple[str, str]], expected: str) -> None:
    assert cause("any", [Frame(*each) for each in frames]) == expected
    assert expected in CAUSES


def test_machine_code_of_the_process_is_of_tacit_in_its_kernels() -> None:
    assert cause("kernel select.select_largest", [Frame("", COMPILED)]) == "kernels of tacit"


def test_samples_go_to_the_stage_in_which_their_thread_was() -> None:
    moments = {1: [Moment(10, "encode"), Moment(20, UNATTRIBUTED)]}
    frames = {
        3: Frame("take_gil", PYTHON),
        4: Frame("run", PYTHON),
        5: Frame("", NOWHERE),
        6: Frame("", COMPILED),
    }
    samples = [Sample(at, 1, (3, 5, 6, 4)) for at in (9, 10, 19, 20)] + [Sample(15, 2, (6,))]
    found = sort_samples(samples, moments, frames.__getitem__)
    assert found.causes == {
        1: {"encode": {"hand-overs": 2}, UNATTRIBUTED: {"hand-overs": 2}},
        2: {UNATTRIBUTED: {"arithmetic of the model": 1}},
    }
    assert found.stacks == {
        (1, "encode;run;take_gil"): 2,
        (1, f"{UNATTRIBUTED};run;take_gil"): 2,
        (2, f"{UNATTRIBUTED};compiled"): 1,
    }


# ---- threads ------------------------------------------------------------------------------------------


def test_threads_are_named_by_what_they_are_for() -> None:
    end = threading.Event()
    lanes = [threading.Thread(target=end.wait, name="tacit-lane") for _ in range(2)]
    for each in lanes:
        each.start()
    tids = [each.native_id for each in lanes]
    assert all(tid in threads.running() for tid in tids)
    names = threads.names([os.getpid(), *(tid for tid in tids if tid), 1 << 22], main=os.getpid())
    end.set()
    for each in lanes:
        each.join()
    assert [names[tid] for tid in tids if tid] == ["tacit: lane"] * 2
    numbered = threads.numbered(names)
    assert numbered[os.getpid()] == "main"
    assert [numbered[tid] for tid in sorted(tid for tid in tids if tid)] == ["tacit: lane 1", "tacit: lane 2"]


def test_the_counts_of_a_thread_only_rise(tmp_path: Path) -> None:
    before = threads.counts(threading.get_native_id())
    with mmap.mmap(-1, 8 << 20) as memory:  # fresh pages; an allocator may hand out those of before
        memory[:: 1 << 12] = b"x" * (8 << 8)
    time.sleep(0.001)
    more = threads.counts(threading.get_native_id()) - before
    assert more.minor > 0
    assert more.voluntary > 0
    assert min(more.major, more.involuntary, more.ready_ns) >= 0
    with pytest.raises(OSError, match="No such file"):
        threads.counts(1 << 22)
