"""Sixteen entries at once for `scan`: what numba cannot say by itself, written as LLVM's own instructions.

A processor that has no instruction for it (`vcompressps`, of AVX-512) gets a loop instead, from LLVM.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

WIDTH = 16
INT32, INT64 = ir.IntType(32), ir.IntType(64)
LANES = list(range(WIDTH))


@intrinsic  # type: ignore[untyped-decorator]
def sift_lanes(
    _: Any, x: Any, residual: Any, owed: Any, start: Any, threshold: Any, index: Any, values: Any, found: Any
) -> Any:
    """Look at 16 entries a = x + residual from `start` on; how many are found by then.

    Those with |a| >= threshold go to `index` and `values` from place `found` on; `owed` gets the others, and
    zeros in their places. `residual` and `owed` may both be None.
    """
    signature = types.int64(x, residual, owed, types.int64, threshold, index, values, types.int64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _Block(context, builder, signature.args, args).sift()

    return signature, generate


class _Block:
    """The instructions for one block."""

    def __init__(self, context: Any, builder: Any, kinds: Any, args: Any) -> None:
        self.context, self.builder = context, builder
        self.kinds, self.args = kinds, args
        real = kinds[0].dtype
        self.bytes = real.bitwidth // 8
        self.real = context.get_data_type(real)
        self.vector = ir.VectorType(self.real, WIDTH)
        self.name = f"v{WIDTH}f{real.bitwidth}"

    def sift(self) -> Any:
        builder, (start, threshold, found) = self.builder, (self.args[i] for i in (3, 4, 7))
        a = self._load(0)
        if self.kinds[1] is not types.none:
            a = builder.fadd(a, self._load(1))
        magnitude = self._call(f"llvm.fabs.{self.name}", self.vector, a)
        hits = builder.fcmp_ordered(">=", magnitude, self._spread(threshold, self.vector))
        if self.kinds[2] is not types.none:
            zeros = ir.Constant(self.vector, [0.0] * WIDTH)
            self._store(builder.select(hits, zeros, a), 2)
        bits = builder.bitcast(hits, ir.IntType(WIDTH))
        after = cgutils.alloca_once_value(builder, found)
        with builder.if_then(builder.icmp_unsigned("!=", bits, ir.IntType(WIDTH)(0))):
            integers = ir.VectorType(INT32, WIDTH)
            first = self._spread(builder.trunc(start, INT32), integers)
            positions = builder.add(first, ir.Constant(integers, LANES))
            self._compress(positions, f"v{WIDTH}i32", 5, hits)
            self._compress(a, self.name, 6, hits)
            count = self._call(f"llvm.ctpop.i{WIDTH}", ir.IntType(WIDTH), bits)
            builder.store(builder.add(found, builder.zext(count, INT64)), after)
        return builder.load(after)

    def _place(self, argument: int, at: Any) -> Any:
        array = self.context.make_array(self.kinds[argument])
        return self.builder.gep(array(self.context, self.builder, self.args[argument]).data, [at])

    def _as_vector(self, argument: int) -> Any:
        return self.builder.bitcast(self._place(argument, self.args[3]), self.vector.as_pointer())

    def _load(self, argument: int) -> Any:
        return self.builder.load(self._as_vector(argument), align=self.bytes)

    def _store(self, vector: Any, argument: int) -> None:
        self.builder.store(vector, self._as_vector(argument), align=self.bytes)

    def _spread(self, scalar: Any, kind: Any) -> Any:
        anything = ir.Constant(kind, ir.Undefined)
        one = self.builder.insert_element(anything, scalar, INT32(0))
        return self.builder.shuffle_vector(
            one, anything, ir.Constant(ir.VectorType(INT32, WIDTH), [0] * WIDTH)
        )

    def _call(self, name: str, returns: Any, *args: Any) -> Any:
        kind = ir.FunctionType(returns, [arg.type for arg in args])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), args)

    def _compress(self, vector: Any, name: str, argument: int, hits: Any) -> None:
        target = self._place(argument, self.args[7])
        self._call(f"llvm.masked.compressstore.{name}", ir.VoidType(), vector, target, hits)
