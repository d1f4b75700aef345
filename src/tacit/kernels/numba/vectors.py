"""Vectors of 64 numbers as values in compiled kernels: added and compared as numbers are, lane by lane.

LLVM cuts them into registers of the processor at hand, and writes what it lacks in steps. So a kernel does
not depend on what the compiler makes of its loops, nor on what it can prove of its pointers.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, overload, register_model

LANES = 64
"""Entries of most vectors: with one bit each, a cache line holds 512."""
VECTOR_BYTES = 4 * LANES
"""Bytes of 64 fp32 numbers."""
LINE = 64
"""Bytes of a cache line."""


class Vector(types.Type):
    """The type of `lanes` numbers."""

    def __init__(self, element: Any, lanes: int = LANES) -> None:
        self.element, self.lanes = element, lanes
        super().__init__(name=f"Vector({element}, {lanes})")

    @property
    def real(self) -> bool:
        """Whether its numbers are floats."""
        return isinstance(self.element, types.Float)


@register_model(Vector)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Vector) -> None:
        one = (
            ir.IntType(1) if kind.element == types.boolean else manager.lookup(kind.element).get_value_type()
        )
        super().__init__(manager, kind, ir.VectorType(one, kind.lanes))


FLOATS, INTS, SHORTS, BYTES = (
    Vector(each) for each in (types.float32, types.int32, types.uint16, types.uint8)
)
SIXTEEN = Vector(types.float32, 16)
"""A cache line of fp32 numbers, for kernels that hold many vectors at a time."""
SIXTEEN_INTS, SIXTEEN_SHORTS = Vector(types.int32, 16), Vector(types.uint16, 16)


# ---- from memory, and back ----------------------------------------------------------------------------


def _loads(kind: Vector) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def load(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vector = context.get_value_type(kind)
            return builder.load(builder.inttoptr(args[0], vector.as_pointer()), align=1)

        return kind(types.int64), generate

    return load


load_floats, load_shorts, load_bytes = _loads(FLOATS), _loads(SHORTS), _loads(BYTES)
load_sixteen, load_sixteen_shorts = _loads(SIXTEEN), _loads(SIXTEEN_SHORTS)


@intrinsic  # type: ignore[untyped-decorator]
def store(typing_context: Any, address: Any, vector: Any) -> Any:
    """Write a vector to an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], args[1].type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, vector), generate


@intrinsic  # type: ignore[untyped-decorator]
def stream(typing_context: Any, address: Any, vector: Any) -> Any:
    """Write a vector to an address, a multiple of 64, past the caches: nothing need be read first."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        written = builder.store(args[1], builder.inttoptr(args[0], args[1].type.as_pointer()), align=64)
        written.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(types.int64, vector), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, address: Any) -> Any:
    """Have the processor fetch the cache line of an address; one that is not there does no harm."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        builder.call(fetch, [builder.inttoptr(args[0], byte), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def settle(typing_context: Any) -> Any:
    """Have all that was streamed be seen by other threads before what is written after it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def broadcast(builder: Any, scalar: Any, lanes: int) -> Any:
    """The instructions that put a number into all lanes."""
    vector = ir.VectorType(scalar.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.IntType(32)(0))
    places = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), places)


def _broadcasts(kind: Vector) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def act(typing_context: Any, scalar: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return broadcast(builder, args[0], kind.lanes)

        return kind(kind.element), generate

    return act


float_vector, int_vector, short_vector, byte_vector = (
    _broadcasts(kind) for kind in (FLOATS, INTS, SHORTS, BYTES)
)
sixteen, sixteen_ints = _broadcasts(SIXTEEN), _broadcasts(SIXTEEN_INTS)


# ---- lane by lane -------------------------------------------------------------------------------------


def _operator(symbol: Any, real: str | None, whole: str | None, compared: str = "") -> None:
    """Let `symbol` work between vectors of one type."""

    @intrinsic  # type: ignore[untyped-decorator]
    def act(typing_context: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            method = getattr(builder, str(real if a.real else whole))
            return method(compared, *args) if compared else method(*args)

        return (Vector(types.boolean, a.lanes) if compared else a)(a, b), generate

    @overload(symbol)  # type: ignore[untyped-decorator]
    def between(a: Any, b: Any) -> Any:
        def each(a: Any, b: Any) -> Any:
            return act(a, b)

        return each if isinstance(a, Vector) and a == b and (real if a.real else whole) else None


_operator(operator.add, "fadd", "add")
_operator(operator.sub, "fsub", "sub")
_operator(operator.mul, "fmul", "mul")
_operator(operator.truediv, "fdiv", None)
_operator(operator.and_, None, "and_")
_operator(operator.or_, None, "or_")
_operator(operator.xor, None, "xor")
_operator(operator.lshift, None, "shl")
_operator(operator.rshift, None, "lshr")
_operator(operator.ge, "fcmp_ordered", "icmp_signed", ">=")
_operator(operator.lt, "fcmp_ordered", "icmp_signed", "<")
_operator(operator.ne, "fcmp_unordered", "icmp_unsigned", "!=")


@intrinsic  # type: ignore[untyped-decorator]
def where(typing_context: Any, mask: Any, one: Any, other: Any) -> Any:
    """`one` where the mask is set, else `other`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(*args)

    return one(mask, one, other), generate


@intrinsic  # type: ignore[untyped-decorator]
def magnitude(typing_context: Any, x: Any) -> Any:
    """The absolute values of float_vector."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(args[0].type, [args[0].type])
        name = f"llvm.fabs.v{x.lanes}f32"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)

    return x(x), generate


# ---- from type to type --------------------------------------------------------------------------------


def _converts(to: Any, method: str) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def convert(typing_context: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, method)(args[0], context.get_value_type(to))

        return to(x), generate

    return convert


float_bits = _converts(INTS, "bitcast")
"""The bits of floats, as integers."""
floats_of_bits = _converts(FLOATS, "bitcast")
"""The floats with these bits."""
low_bytes, low_shorts = _converts(BYTES, "trunc"), _converts(SHORTS, "trunc")
"""The lowest byte of each integer; the lowest two."""
widen_bytes, narrow_bytes = _converts(SHORTS, "zext"), _converts(BYTES, "trunc")
"""Bytes as numbers of 16 bits, and back."""
zero_extend, sign_extend = _converts(INTS, "zext"), _converts(INTS, "sext")
to_int = _converts(INTS, "fptosi")
to_float = _converts(FLOATS, "sitofp")
sixteen_to_int, sixteen_to_float = _converts(SIXTEEN_INTS, "fptosi"), _converts(SIXTEEN, "sitofp")
sixteen_of_bits = _converts(SIXTEEN, "bitcast")
extend_sixteen = _converts(SIXTEEN_INTS, "sext")
"""Shorts with a sign as integers."""
mask_bits = _converts(types.int64, "bitcast")
"""64 booleans as the bits of an integer, the first one lowest."""


# ---- across lanes -------------------------------------------------------------------------------------


@intrinsic  # type: ignore[untyped-decorator]
def sum_by_halves(typing_context: Any, x: Any) -> Any:
    """The sum of all lanes, in halves: lane i and lane i + half, until one is left."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (value,), width = args, x.lanes
        while width > 1:
            width //= 2
            undefined = ir.Constant(value.type, ir.Undefined)
            halves = [
                builder.shuffle_vector(
                    value,
                    undefined,
                    ir.Constant(ir.VectorType(ir.IntType(32), width), [start + i for i in range(width)]),
                )
                for start in (0, width)
            ]
            value = builder.fadd(*halves)
        return builder.extract_element(value, ir.IntType(32)(0))

    return x.element(x), generate


@intrinsic  # type: ignore[untyped-decorator]
def largest_lane(typing_context: Any, x: Any) -> Any:
    """The largest lane of unsigned integers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [args[0].type])
        name = f"llvm.vector.reduce.umax.v{x.lanes}i32"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)

    return x.element(x), generate


@intrinsic  # type: ignore[untyped-decorator]
def count_true(typing_context: Any, truths: Any) -> Any:
    """How many of 64 booleans are true."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(builder.bitcast(args[0], ir.IntType(64)))

    return types.int64(truths), generate


@intrinsic  # type: ignore[untyped-decorator]
def lowest_set_bit(typing_context: Any, bits: Any) -> Any:
    """The index of the lowest bit that is set; at least one must be."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def float_from_bits(typing_context: Any, bits: Any) -> Any:
    """The fp32 number with these bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate
