"""Names of the functions at addresses of this process, by the tables in the files that it has loaded."""

from __future__ import annotations

import ctypes
import mmap
import struct
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["COMPILED", "KERNEL", "NOWHERE", "Frame", "Symbols"]

KERNEL = "kernel"
"""The file of what the kernel executes."""
COMPILED = "compiled"
"""The file of machine code that the process has made itself: numba's, or oneDNN's."""
NOWHERE = ""
"""The file of an address at which nothing is: chains of functions that keep no frames go astray."""
_KERNEL_HALF = 1 << 63
_SYMBOLS, _DYNAMIC_SYMBOLS, _LOADED = 2, 11, 1
_FUNCTIONS = (2, 10)
_ENTRY = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("at", "<u8"), ("size", "<u8")]
)


class Frame(NamedTuple):
    """A function, and the name of the file that it is from; an empty name where the file does not tell."""

    name: str
    file: str


@dataclass(frozen=True)
class _Mapping:
    """A stretch of memory into which a file was loaded from an offset on."""

    start: int
    stop: int
    offset: int
    path: str


class _Table:
    """The functions of one file in ELF, by their addresses in it.

    Raises:
        OSError, ValueError, struct.error: It cannot be read as such a file of 64 bits.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._data[:5] != b"\x7fELF\x02":
            raise ValueError(f"{path} is no ELF file of 64 bits")
        sections = [*self._rows(0x28, 0x3A, "IIQQQQIIQQ")]
        tables = [each for kind in (_SYMBOLS, _DYNAMIC_SYMBOLS) for each in sections if each[1] == kind]
        self._loads = [
            (row[2], row[3], row[5]) for row in self._rows(0x20, 0x36, "IIQQQQQQ") if row[0] == _LOADED
        ]
        # A stripped file still has the dynamic symbols; the others are a superset.
        best = max(tables, key=lambda row: row[5], default=None)
        if best is None:
            raise ValueError(f"{path} names no functions")
        entries: Any = np.frombuffer(self._data, _ENTRY, best[5] // _ENTRY.itemsize, best[4])
        entries = entries[np.isin(entries["info"] & 15, _FUNCTIONS) & (entries["at"] > 0)]
        self._entries = entries[np.argsort(entries["at"], kind="stable")]
        self._names = sections[best[6]][4]

    def _rows(self, at: int, shape: int, form: str) -> Iterator[tuple[int, ...]]:
        (start,) = struct.unpack_from("Q", self._data, at)
        size, count = struct.unpack_from("HH", self._data, shape)
        for i in range(count):
            yield struct.unpack_from(form, self._data, start + i * size)

    def name(self, offset: int) -> str:
        """The function at this offset of the file; empty if it names none there."""
        for begins, address, length in self._loads:
            if begins <= offset < begins + length:
                offset += address - begins
                break
        place = int(np.searchsorted(self._entries["at"], offset, side="right")) - 1
        if place < 0:
            return ""
        entry = self._entries[place]
        if entry["size"] and offset >= entry["at"] + entry["size"]:
            return ""
        start = self._names + int(entry["name"])
        return self._data[start : self._data.find(b"\0", start)].decode(errors="replace")


class Symbols:
    """Names by address, as the process has its files loaded now."""

    def __init__(self) -> None:
        self._mappings = [*_mappings(Path("/proc/self/maps").read_text())]
        self._starts = [each.start for each in self._mappings]
        self._tables: dict[str, _Table | None] = {}
        self._known: dict[int, Frame] = {}

    def frame(self, address: int) -> Frame:
        """What is at this address."""
        if address not in self._known:
            self._known[address] = self._frame(address)
        return self._known[address]

    def _frame(self, address: int) -> Frame:
        if address >= _KERNEL_HALF:
            return Frame(_kernel_name(address), KERNEL)
        place = bisect_right(self._starts, address) - 1
        found = self._mappings[place] if place >= 0 else None
        if found is None or address >= found.stop:
            return Frame("", NOWHERE)
        if not found.path.startswith("/"):
            return Frame("", found.path or COMPILED)
        table = self._table(found.path)
        name = table.name(address - found.start + found.offset) if table else ""
        return Frame(_demangled(name), Path(found.path).name)

    def _table(self, path: str) -> _Table | None:
        if path not in self._tables:
            self._tables[path] = None
            with suppress(OSError, ValueError, struct.error):
                self._tables[path] = _Table(Path(path))
        return self._tables[path]


def _mappings(text: str) -> Iterator[_Mapping]:
    for line in text.splitlines():
        range_, flags, offset, _, _, *path = line.split(maxsplit=5)
        if "x" in flags:
            start, stop = (int(each, 16) for each in range_.split("-"))
            yield _Mapping(start, stop, int(offset, 16), path[0] if path else "")


@cache
def _kernel_symbols() -> tuple[list[int], list[str]]:
    """Empty where the kernel hides its addresses."""
    found = []
    with suppress(OSError):
        for line in Path("/proc/kallsyms").read_text().splitlines():
            at, kind, name, *_ = line.split()
            if kind in "tTwW" and int(at, 16):
                found.append((int(at, 16), name))
    found.sort()
    return [at for at, _ in found], [name for _, name in found]


def _kernel_name(address: int) -> str:
    starts, names = _kernel_symbols()
    place = bisect_right(starts, address) - 1
    return names[place] if place >= 0 else ""


@cache
def _demangler() -> Any:
    """What turns the linker's names of C++ into those of the source; None where it is not loaded."""
    with suppress(OSError, AttributeError):
        function = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
        function.restype = ctypes.c_void_p
        return function
    return None


def _demangled(name: str) -> str:
    demangle = _demangler() if name.startswith("_Z") else None
    if demangle is None:
        return name
    status = ctypes.c_int()
    found = demangle(name.encode(), None, None, ctypes.byref(status))
    if not found:
        return name
    text = ctypes.string_at(found).decode(errors="replace")
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free(found)
    return text
