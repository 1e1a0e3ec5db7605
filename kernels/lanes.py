"""Sixteen fp32 numbers at once, in compiled loops: loaded from any stored form, multiplied, added, stored.

One value of type `lanes` is one register of AVX-512, two of AVX2, four of NEON: LLVM splits it. Lanes are added up in
one order everywhere, so that a sum has the same bits on each of them; products of bfloat16 (`pairs`) are AVX-512's own.
"""

import operator
from collections.abc import Callable
from typing import Any, ClassVar, Final

import numpy as np
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.core.datamodel import models
from numba.core.typing.templates import ConcreteTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, register_model

WIDTH: Final = 16
PIECE: Final = 2 * WIDTH  # columns that are taken of a row at a time
_FEATURES: Final = (get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES).split(",")
_AVX512: Final = "+avx512f" in _FEATURES
# Vectors and rows that are multiplied at once, as registers hold their sums: of 32 with AVX-512, else of 16 or of 32
# smaller ones. It changes no bit of a product.
BLOCK: Final = 4 if _AVX512 else 2
_F32, _I32, _I16, _I8 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(8)


class _Lanes(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__("lanes")


lanes = _Lanes()
_V: Final = ir.VectorType(_F32, WIDTH)


@register_model(_Lanes)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _V)


def _splat(builder: Any, value: Any) -> Any:
    kind = ir.VectorType(value.type, WIDTH)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(_I32, WIDTH), 0))


def _constant(kind: Any, value: float) -> Any:
    return ir.Constant(ir.VectorType(kind, WIDTH), [value] * WIDTH)


def _called(builder: Any, name: str, result: Any, *args: Any) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _element(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    """Pointer to an element of a flat array."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


def _loaded(context: Any, builder: Any, kind: Any, array: Any, index: Any, count: Any) -> Any:
    """Sixteen elements of an array from `index` on, those from `count` on zeros; None: all are there."""
    element = context.get_data_type(kind.dtype)
    vector = ir.VectorType(element, WIDTH)
    pointer = builder.bitcast(_element(context, builder, kind, array, index), vector.as_pointer())
    if count is None:
        return builder.load(pointer, align=1)
    steps = ir.Constant(ir.VectorType(_I32, WIDTH), list(range(WIDTH)))
    mask = builder.icmp_signed("<", steps, _splat(builder, builder.trunc(count, _I32)))
    name = {_F32: "f32", _I16: "i16", _I8: "i8"}[element]
    zero = ir.Constant(vector, None)
    return _called(builder, f"llvm.masked.load.v16{name}.p0", vector, pointer, _I32(1), mask, zero)


def _halves(builder: Any, bits: Any, scale: float) -> Any:
    """Bits of float16 as fp32, times a power of two. float16 holds E4M3 / 256 and E2M1 / 2^14, subnormals too."""
    count = bits.type.count
    half = builder.bitcast(bits, ir.VectorType(ir.HalfType(), count))
    wide = builder.fpext(half, ir.VectorType(_F32, count))
    return builder.fmul(wide, ir.Constant(wide.type, [scale] * count))


def _bfloat16(builder: Any, x: Any) -> Any:
    wide = builder.zext(x, ir.VectorType(_I32, WIDTH))
    return builder.bitcast(builder.shl(wide, _constant(_I32, 16)), _V)


def _e4m3(builder: Any, x: Any) -> Any:
    kind = ir.VectorType(_I16, x.type.count)

    def all_of(value: int) -> Any:
        return ir.Constant(kind, [value] * kind.count)

    twice = builder.shl(builder.sext(x, kind), all_of(7))  # the sign, two times
    bits = builder.and_(twice, all_of(0xBFFF))
    is_nan = builder.icmp_unsigned("==", builder.and_(bits, all_of(0x3F80)), all_of(0x3F80))
    return _halves(builder, builder.select(is_nan, all_of(0x7E00), bits), 256.0)


def _e2m1(builder: Any, code: Any) -> Any:
    """Codes in the low four bits of 32-bit integers: one instruction where a register holds sixteen numbers."""
    if _AVX512:
        table = ir.Constant(
            _V, [sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
        )
        return _called(builder, "llvm.x86.avx512.permvar.sf.512", _V, table, code)
    code = builder.trunc(code, ir.VectorType(_I16, WIDTH))
    size = builder.shl(builder.and_(code, _constant(_I16, 7)), _constant(_I16, 9))
    sign = builder.shl(builder.and_(code, _constant(_I16, 8)), _constant(_I16, 12))
    return _halves(builder, builder.or_(size, sign), 2.0**14)


_NUMBERS: Final = {  # of an array's elements
    types.float32: lambda builder, x: x,
    types.int16: lambda builder, x: _halves(builder, x, 1.0),
    types.uint16: _bfloat16,
    types.uint8: _e4m3,
}


def _load(array: Any, rest: tuple[Any, ...]) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        count = values[2] if rest else None
        found = _loaded(context, builder, signature.args[0], values[0], values[1], count)
        return _NUMBERS[array.dtype](builder, found)

    return lanes(array, types.int64, *rest), generate


@intrinsic
def load(typing: Any, array: Any, index: Any) -> Any:
    """Sixteen numbers of a flat array from `index` on: uint16 is bfloat16, int16 float16, uint8 E4M3."""
    return _load(array, ())


@intrinsic
def load_some(typing: Any, array: Any, index: Any, count: Any) -> Any:
    """`load`, of which the first `count` are read; the others are 0."""
    return _load(array, (types.int64,))


@intrinsic
def load_piece(typing: Any, array: Any, index: Any) -> Any:
    """Thirty-two numbers of a flat array, as two times sixteen: `load`, but cheaper of E4M3, as its codes are small."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        element = context.get_data_type(array.dtype)
        place = _element(context, builder, signature.args[0], *values)
        found = builder.load(builder.bitcast(place, ir.VectorType(element, PIECE).as_pointer()), align=1)
        orders = [ir.Constant(ir.VectorType(_I32, WIDTH), list(range(at, at + WIDTH))) for at in (0, WIDTH)]
        if array.dtype == types.uint8:
            wide = _e4m3(builder, found)
            both = [builder.shuffle_vector(wide, ir.Constant(wide.type, ir.Undefined), order) for order in orders]
        else:
            halves = [builder.shuffle_vector(found, ir.Constant(found.type, ir.Undefined), order) for order in orders]
            both = [_NUMBERS[array.dtype](builder, half) for half in halves]
        return context.make_tuple(builder, signature.return_type, both)

    return types.UniTuple(lanes, 2)(array, types.int64), generate


def _codes(array: Any, rest: tuple[Any, ...]) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        count = values[2] if rest else None
        found = _loaded(context, builder, signature.args[0], values[0], values[1], count)
        code = builder.zext(found, ir.VectorType(_I32, WIDTH))
        both = [_e2m1(builder, code), _e2m1(builder, builder.lshr(code, _constant(_I32, 4)))]
        return context.make_tuple(builder, signature.return_type, both)

    return types.UniTuple(lanes, 2)(array, types.int64, *rest), generate


@intrinsic
def fetch_line(typing: Any, array: Any, index: Any) -> Any:
    """Ask memory for the cache line of an element of a flat array, which may lie beyond its end."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = builder.bitcast(_element(context, builder, signature.args[0], *values), _I8.as_pointer())
        _called(builder, "llvm.prefetch.p0", ir.VoidType(), place, _I32(0), _I32(3), _I32(1))
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic
def load_e2m1(typing: Any, array: Any, index: Any) -> Any:
    """The E2M1 numbers in the low and in the high halves of sixteen bytes from `index` on."""
    return _codes(array, ())


@intrinsic
def load_some_e2m1(typing: Any, array: Any, index: Any, count: Any) -> Any:
    """`load_e2m1`, of which the first `count` bytes are read; the others are 0."""
    return _codes(array, (types.int64,))


def _stored(builder: Any, array: Any, x: Any) -> Any:
    """Numbers as an array's elements: fp32, or bfloat16 rounded to nearest even as torch does, of NaN one."""
    if array.dtype == types.float32:
        return x
    wide = builder.bitcast(x, ir.VectorType(_I32, WIDTH))
    odd = builder.and_(builder.lshr(wide, _constant(_I32, 16)), _constant(_I32, 1))
    near = builder.lshr(builder.add(wide, builder.add(odd, _constant(_I32, 0x7FFF))), _constant(_I32, 16))
    found = builder.select(builder.fcmp_unordered("uno", x, x), _constant(_I32, 0x7FC0), near)
    return builder.trunc(found, ir.VectorType(_I16, WIDTH))


@intrinsic
def store(typing: Any, array: Any, index: Any, x: Any) -> Any:
    """Store sixteen numbers to a flat array of float32, or of uint16, which is bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer, x = _element(context, builder, array, values[0], values[1]), _stored(builder, array, values[2])
        builder.store(x, builder.bitcast(pointer, x.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(array, types.int64, lanes), generate


@intrinsic
def store_some(typing: Any, array: Any, index: Any, x: Any, count: Any) -> Any:
    """`store` the first `count` of them."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer, x = _element(context, builder, array, values[0], values[1]), _stored(builder, array, values[2])
        pointer = builder.bitcast(pointer, x.type.as_pointer())
        steps = ir.Constant(ir.VectorType(_I32, WIDTH), list(range(WIDTH)))
        mask = builder.icmp_signed("<", steps, _splat(builder, builder.trunc(values[3], _I32)))
        name = "f32" if array.dtype == types.float32 else "i16"
        _called(builder, f"llvm.masked.store.v16{name}.p0", ir.VoidType(), x, pointer, _I32(2), mask)
        return context.get_dummy_value()

    return types.void(array, types.int64, lanes, types.int64), generate


@intrinsic
def interleaved(typing: Any, low: Any, high: Any) -> Any:
    """Two times sixteen numbers, taken in turn: the first sixteen of them, and the others."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        order = [lane // 2 + WIDTH * (lane % 2) for lane in range(2 * WIDTH)]
        both = [
            builder.shuffle_vector(*values, ir.Constant(ir.VectorType(_I32, WIDTH), order[at : at + WIDTH]))
            for at in (0, WIDTH)
        ]
        return context.make_tuple(builder, signature.return_type, both)

    return types.UniTuple(lanes, 2)(lanes, lanes), generate


@intrinsic
def splat(typing: Any, value: Any) -> Any:
    """One number in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _splat(builder, values[0])

    return lanes(types.float32), generate


@intrinsic
def load_splat(typing: Any, array: Any, index: Any) -> Any:
    """One element of a flat float32 array in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _splat(builder, builder.load(_element(context, builder, signature.args[0], values[0], values[1])))

    return lanes(array, types.int64), generate


@intrinsic
def splat_e4m3(typing: Any, low: Any, high: Any) -> Any:
    """The number of one E4M3 code in the first eight lanes, that of another in the others."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        order = ir.Constant(ir.VectorType(_I32, WIDTH), [0] * 8 + [WIDTH] * 8)
        codes = builder.shuffle_vector(_splat(builder, values[0]), _splat(builder, values[1]), order)
        return _e4m3(builder, codes)

    return lanes(types.uint8, types.uint8), generate


@intrinsic
def fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """``x y + z``, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _called(builder, "llvm.fma.v16f32", _V, *values)

    return lanes(lanes, lanes, lanes), generate


@intrinsic
def total(typing: Any, x: Any) -> Any:
    """The sum of the lanes: of halves, of quarters, and so on."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        (x,), width = values, WIDTH
        while width > 1:
            width //= 2
            parts = [
                builder.shuffle_vector(
                    x,
                    ir.Constant(x.type, ir.Undefined),
                    ir.Constant(ir.VectorType(_I32, width), list(range(at, at + width))),
                )
                for at in (0, width)
            ]
            x = builder.fadd(*parts)
        return builder.extract_element(x, _I32(0))

    return types.float32(lanes), generate


@intrinsic
def bits(typing: Any, x: Any) -> Any:
    """The float32 that has the bits of a uint32, or the uint32 of a float32."""
    other = types.float32 if x == types.uint32 else types.uint32

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], context.get_value_type(signature.return_type))

    return other(x), generate


def _operator(function: Callable[..., Any], name: str) -> None:
    @infer_global(function)
    class Typed(ConcreteTemplate):  # type: ignore[misc]
        cases: ClassVar = [lanes(lanes, lanes)]

    @lower_builtin(function, lanes, lanes)
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return getattr(builder, name)(*values)


for _function, _name in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _operator(_function, _name)


# --- element by element


def _integers(builder: Any, x: Any) -> Any:
    return builder.bitcast(x, ir.VectorType(_I32, WIDTH))


def _masked(builder: Any, x: Any, mask: int) -> Any:
    return builder.bitcast(builder.and_(_integers(builder, x), _constant(_I32, mask)), _V)


@intrinsic
def size(typing: Any, x: Any) -> Any:
    """Numbers without their signs."""
    return lanes(lanes), lambda context, builder, signature, values: _masked(builder, values[0], 0x7FFFFFFF)


@intrinsic
def power(typing: Any, x: Any) -> Any:
    """The powers of two at or below the sizes of numbers, 0 below the normal ones; infinity of what is not finite."""
    return lanes(lanes), lambda context, builder, signature, values: _masked(builder, values[0], 0x7F800000)


@intrinsic
def signed(typing: Any, x: Any, like: Any) -> Any:
    """The sizes of x with the signs of `like`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _called(builder, "llvm.copysign.v16f32", _V, *values)

    return lanes(lanes, lanes), generate


def _where(builder: Any, predicate: str, x: Any, y: Any, yes: Any, no: Any) -> Any:
    return builder.select(builder.fcmp_ordered(predicate, x, y), yes, no)


@intrinsic
def larger(typing: Any, x: Any, y: Any) -> Any:
    """The larger ones of sizes, numbers without signs: NaN is larger than all."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.VectorType(_I32, WIDTH)
        found = _called(builder, "llvm.umax.v16i32", kind, *(_integers(builder, x) for x in values))
        return builder.bitcast(found, _V)

    return lanes(lanes, lanes), generate


@intrinsic
def largest(typing: Any, x: Any) -> Any:
    """The largest of sixteen sizes: NaN is larger than all."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = _called(builder, "llvm.vector.reduce.umax.v16i32", _I32, _integers(builder, values[0]))
        return builder.bitcast(found, _F32)

    return types.float32(lanes), generate


def _limited(order: str) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.select(builder.fcmp_ordered(order, *values), values[1], values[0])

    return lanes(lanes, lanes), generate


@intrinsic
def at_most(typing: Any, x: Any, limit: Any) -> Any:
    """``limit where x > limit, else x``: NaN of x stays."""
    return _limited(">")


@intrinsic
def at_least(typing: Any, x: Any, limit: Any) -> Any:
    """``limit where x < limit, else x``: NaN of x stays."""
    return _limited("<")


@intrinsic
def apart(typing: Any, low: Any, high: Any) -> Any:
    """The numbers at even and at odd places of two times sixteen: what `interleaved` puts together."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        orders = (range(first, 2 * WIDTH, 2) for first in (0, 1))
        both = [builder.shuffle_vector(*values, ir.Constant(ir.VectorType(_I32, WIDTH), list(o))) for o in orders]
        return context.make_tuple(builder, signature.return_type, both)

    return types.UniTuple(lanes, 2)(lanes, lanes), generate


_EXP: Final = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)  # Taylor: 2e-9 of the value at ln(2) / 2
_ROUND: Final = 1.5 * 2.0**23  # a sum with it is rounded to a whole number, which stands in its last bits


@intrinsic
def exp(typing: Any, x: Any) -> Any:
    """``e^x`` within 2 ulp: 0 of -inf, infinity above the largest number, NaN of NaN."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        def fma(x: Any, y: Any, z: Any) -> Any:
            return _called(builder, "llvm.fma.v16f32", _V, x, y, z)

        def number(value: float) -> Any:
            return _constant(_F32, float(np.float32(value)))

        x = values[0]
        for order, limit in ((">", 89.0), ("<", -104.0)):
            x = builder.select(builder.fcmp_ordered(order, x, number(limit)), number(limit), x)
        shifted = fma(x, number(1.4426950408889634), number(_ROUND))
        whole = builder.fsub(shifted, number(_ROUND))
        rest = fma(whole, number(-0.693359375), x)  # x - whole ln(2), whose first nine bits times `whole` are exact
        rest = fma(whole, number(2.12194440e-4), rest)
        y = number(_EXP[0])
        for factor in _EXP[1:]:
            y = fma(y, rest, number(factor))
        count = builder.sub(_integers(builder, shifted), _constant(_I32, 0x4B400000))
        half = builder.ashr(count, _constant(_I32, 1))
        for part in (half, builder.sub(count, half)):  # two powers, as 2^count may be no normal number
            biased = builder.shl(builder.add(part, _constant(_I32, 127)), _constant(_I32, 23))
            y = builder.fmul(y, builder.bitcast(biased, _V))
        return y

    return lanes(lanes), generate


@intrinsic
def bfloat16(typing: Any, x: Any) -> Any:
    """The nearest bfloat16, of two the even one; NaN of NaN."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _bfloat16(builder, _stored(builder, types.uint16[::1], values[0]))

    return lanes(lanes), generate


@intrinsic
def first_of(typing: Any, x: Any) -> Any:
    """The first of sixteen numbers."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.extract_element(values[0], _I32(0))

    return types.float32(lanes), generate


@intrinsic
def copy(typing: Any, x: Any, at: Any, count: Any, out: Any, to: Any) -> Any:
    """Copy `count` elements of a flat array, from `at` on, to another of its kind or to itself, from `to` on."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source, target = (_element(context, builder, x, values[i], values[i + 1]) for i in (0, 3))
        size = builder.mul(values[2], ir.Constant(ir.IntType(64), x.dtype.bitwidth // 8))
        cgutils.raw_memmove(builder, target, source, size, 1)
        return context.get_dummy_value()

    return types.void(x, types.int64, types.int64, x, types.int64), generate


# --- softmax, and blocks of rows


@intrinsic
def maximum(typing: Any, x: Any, y: Any) -> Any:
    """The larger of two numbers, lane by lane: `y` where one is NaN."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _where(builder, ">", *values, *values)

    return lanes(lanes, lanes), generate


@intrinsic
def relu(typing: Any, x: Any) -> Any:
    """0 where it is negative; NaN stays."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        zero = _constant(_F32, 0.0)
        return _where(builder, "<", values[0], zero, zero, values[0])

    return lanes(lanes), generate


@intrinsic
def first(typing: Any, x: Any, count: Any, other: Any) -> Any:
    """The first `count` lanes of x, and those of `other`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        steps = ir.Constant(ir.VectorType(_I32, WIDTH), list(range(WIDTH)))
        mask = builder.icmp_signed("<", steps, _splat(builder, builder.trunc(values[1], _I32)))
        return builder.select(mask, values[0], values[2])

    return lanes(lanes, types.int64, lanes), generate


@intrinsic
def highest(typing: Any, x: Any) -> Any:
    """The largest lane; which it is where some are NaN is open."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        (x,), width = values, WIDTH
        while width > 1:
            width //= 2
            orders = (ir.Constant(ir.VectorType(_I32, width), list(range(at, at + width))) for at in (0, width))
            parts = [builder.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), order) for order in orders]
            x = _where(builder, ">", *parts, *parts)
        return builder.extract_element(x, _I32(0))

    return types.float32(lanes), generate


def _multiply(builder: Any, x: Any, y: Any, total: Any) -> Any:
    """A total plus the products of two registers: of sixteen fp32, or of thirty-two bfloat16, two for each lane."""
    if x.type == _V:
        return _called(builder, "llvm.fma.v16f32", _V, x, y, total)
    pairs = (builder.bitcast(one, ir.VectorType(_BFloat(), 2 * WIDTH)) for one in (x, y))
    return _called(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _V, total, *pairs)


def _products(builder: Any, sums: dict[tuple[int, int], Any], steps: Any, vector: Any, row: Any) -> None:
    """Add the products of four vectors and four rows to `sums`, by vector and row, as many at once as registers hold.

    ``vector(v, step)`` and ``row(r, step)`` give the registers that are multiplied in one of `steps`.
    """
    for low, other in [(v, r) for v in range(0, 4, BLOCK) for r in range(0, 4, BLOCK)]:
        some = {(v, r): sums[v, r] for v in range(low, low + BLOCK) for r in range(other, other + BLOCK)}
        held = {pair: cgutils.alloca_once(builder, _V) for pair in some}
        for pair, place in some.items():
            builder.store(builder.load(place, align=4), held[pair])
        with cgutils.for_range(builder, steps) as run:
            vectors = {v: vector(v, run.index) for v in range(low, low + BLOCK)}
            rows = {r: row(r, run.index) for r in range(other, other + BLOCK)}
            for (v, r), place in held.items():
                total = builder.load(place)
                for x, y in zip(vectors[v], rows[r], strict=True):
                    total = _multiply(builder, x, y, total)
                builder.store(total, place)
        for pair, place in some.items():
            builder.store(builder.load(held[pair]), place, align=4)


def _totals(builder: Any, sums: list[Any]) -> Any:
    """The totals of sixteen vectors, each added up as by `total`."""
    group = WIDTH
    while len(sums) > 1:  # two vectors whose lanes are parts of `group` each become one of half as many
        group //= 2
        order = [s + n + i for s in range(0, WIDTH, 2 * group) for n in (0, WIDTH) for i in range(group)]
        orders = [ir.Constant(ir.VectorType(_I32, WIDTH), [i + more for i in order]) for more in (0, group)]
        pairs = zip(sums[: len(sums) // 2], sums[len(sums) // 2 :], strict=True)
        sums = [builder.fadd(*(builder.shuffle_vector(*pair, part) for part in orders)) for pair in pairs]
    return sums[0]


def _by_vector(context: Any, builder: Any, kind: Any, parts: list[Any]) -> Any:
    """Of each of four quads of rows the products of four vectors, [vector 0 with each row, ...]: a tuple by vector."""

    def shuffled(pair: Any, order: Any) -> Any:
        return builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(_I32, WIDTH), order))

    vectors = []
    for vector in range(4):
        quad = [4 * vector + i for i in range(4)]
        order = [*quad, *(i + WIDTH for i in quad), *quad, *(i + WIDTH for i in quad)]
        low, high = (shuffled(pair, order) for pair in (parts[:2], parts[2:]))
        vectors.append(shuffled((low, high), [*range(8), *range(WIDTH, WIDTH + 8)]))
    return context.make_tuple(builder, kind, vectors)


def _places(context: Any, builder: Any, kind: Any, array: Any, begin: Any) -> dict[tuple[int, int], Any]:
    """Where sums of four vectors and four rows lie, from `begin` on."""
    places = {}
    for i in range(WIDTH):
        place = _element(context, builder, kind, array, builder.add(begin, ir.IntType(64)(i * WIDTH)))
        places[i // 4, i % 4] = builder.bitcast(place, _V.as_pointer())
    return places


def _added(builder: Any, *terms: Any) -> Any:
    """The sum of products of integers: each term a number, or a number times another."""
    total = ir.IntType(64)(0)
    for term in terms:
        total = builder.add(total, builder.mul(*(ir.IntType(64)(one) if isinstance(one, int) else one for one in term)))
    return total


@intrinsic
def dots(typing: Any, x: Any, at: Any, stride: Any, block: Any, groups: Any) -> Any:
    """Products of four vectors, in x from `at` on and `stride` apart, with the sixteen rows of a block: four lanes.

    Each adds up as by `total`. A block holds sixteen columns of every row, then the next sixteen: `groups` times.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        vectors, at, stride, rows, groups = values
        kinds = signature.args

        def vector(v: int, step: Any) -> list[Any]:
            place = _added(builder, (at, 1), (stride, v), (step, WIDTH))
            return [_loaded(context, builder, kinds[0], vectors, place, None)]

        slots, sums = cgutils.alloca_once(builder, _V, size=4), cgutils.alloca_once(builder, _V, size=WIDTH)
        places = {(i // 4, i % 4): builder.gep(sums, [_I32(i)]) for i in range(WIDTH)}
        with cgutils.for_range(builder, ir.IntType(64)(4)) as quad:

            def row(r: int, step: Any) -> list[Any]:
                place = _added(builder, (step, WIDTH * WIDTH), (quad.index, 4 * WIDTH), (r, WIDTH))
                return [_loaded(context, builder, kinds[3], rows, place, None)]

            for place in places.values():
                builder.store(ir.Constant(_V, None), place)
            _products(builder, places, groups, vector, row)
            total = _totals(builder, [builder.load(place) for place in places.values()])
            builder.store(total, builder.gep(slots, [quad.index]))
        parts = [builder.load(builder.gep(slots, [_I32(i)])) for i in range(4)]
        return _by_vector(context, builder, signature.return_type, parts)

    return types.UniTuple(lanes, 4)(x, types.int64, types.int64, block, types.int64), generate


# --- pieces: 32 columns of a row, as products take them


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


PAIRS: Final = "+avx512bf16" in _FEATURES  # the processor multiplies bfloat16


class _Pairs(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__("pairs")


pairs, _two = _Pairs(), types.UniTuple(lanes, 2)
_P: Final = ir.VectorType(_I32, WIDTH)


@register_model(_Pairs)
class _PairsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _P)


def _piece(array: Any) -> Any:
    """The type of pieces that lie in an array: 32 bfloat16 in one register, or two times sixteen fp32."""
    return {types.uint16: pairs, types.float32: _two}[array.dtype]


def _registers(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> list[Any]:
    """What is multiplied of a piece that lies in an array."""
    if _piece(kind) == pairs:
        return [builder.load(builder.bitcast(_element(context, builder, kind, array, at), _P.as_pointer()), align=2)]
    return [_loaded(context, builder, kind, array, _added(builder, (at, 1), (more, 1)), None) for more in (0, WIDTH)]


@intrinsic
def piece(typing: Any, array: Any, at: Any) -> Any:
    """The piece that begins in an array at `at`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = _registers(context, builder, signature.args[0], *values)
        return found[0] if len(found) == 1 else context.make_tuple(builder, signature.return_type, found)

    return _piece(array)(array, types.int64), generate


@intrinsic
def as_piece(typing: Any, low: Any, high: Any, like: Any) -> Any:
    """Sixteen numbers and sixteen more as a piece of such an array: bfloat16 must hold them, no subnormal ones.

    Infinity and NaN stay, subnormal numbers become 0.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if signature.return_type == _two:
            return context.make_tuple(builder, signature.return_type, values[:2])
        kind = ir.VectorType(_BFloat(), PIECE)
        return builder.bitcast(
            _called(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind, values[1], values[0]), _P
        )

    return _piece(like)(lanes, lanes, like), generate


_E2M1: Final = [
    code << 12 & 0x8000 | size
    for code, size in enumerate(
        2 * [0, *(int(np.float32(size).view(np.uint32)) >> 16 for size in (0.5, 1, 1.5, 2, 3, 4, 6))]
    )
]  # by code, the bits of bfloat16


@intrinsic
def e2m1_pairs(typing: Any, array: Any, index: Any, code: Any) -> Any:
    """The piece of the E2M1 numbers in sixteen bytes from `index` on, under an E8M0 scale: low halves, then high ones.

    The scale is one that `held_in_bfloat16` allows, so that no product leaves the normal numbers: it is added to the
    exponents.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind, half = ir.VectorType(_I16, PIECE), ir.VectorType(_I16, WIDTH)
        low = builder.zext(_loaded(context, builder, signature.args[0], values[0], values[1], None), half)
        high = builder.lshr(low, _constant(_I16, 4))
        codes = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, PIECE), list(range(PIECE))))
        number = builder.shl(builder.zext(values[2], _I16), _I16(7))
        every = builder.insert_element(ir.Constant(kind, ir.Undefined), number, _I32(0))
        every = builder.shuffle_vector(
            every, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(_I32, PIECE), None)
        )
        table = 2 * _E2M1  # of a code and four bits, of which the fifth is another's
        shifted = builder.add(ir.Constant(kind, [(bits - (127 << 7)) % (1 << 16) for bits in table]), every)
        filled = ir.Constant(ir.VectorType(ir.IntType(1), PIECE), [bits & 0x7FFF != 0 for bits in table])
        table = builder.select(filled, shifted, ir.Constant(kind, table))
        return builder.bitcast(_called(builder, "llvm.x86.avx512.permvar.hi.512", kind, table, codes), _P)

    return pairs(array, types.int64, types.uint8), generate


@intrinsic
def put(typing: Any, array: Any, at: Any, x: Any) -> Any:
    """Store a piece."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array, at, x = values
        parts = [x] if signature.args[2] == pairs else cgutils.unpack_tuple(builder, x, 2)
        for part, more in zip(parts, (0, WIDTH), strict=False):
            place = _element(context, builder, signature.args[0], array, _added(builder, (at, 1), (more, 1)))
            builder.store(part, builder.bitcast(place, part.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(array, types.int64, _piece(array)), generate


@intrinsic
def multiply(typing: Any, x: Any, y: Any, total: Any) -> Any:
    """A total in lanes plus the products of two pieces."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, y, total = values
        if signature.args[0] == pairs:
            return _multiply(builder, x, y, total)
        for one, other in zip(*(cgutils.unpack_tuple(builder, pair, 2) for pair in (x, y)), strict=True):
            total = _multiply(builder, one, other, total)
        return total

    return lanes(x, x, lanes), generate


@intrinsic
def add_products(typing: Any, x: Any, at: Any, stride: Any, block: Any, pieces: Any, sums: Any, to: Any) -> Any:
    """Add products of four vectors, in x from `at` on and `stride` apart, and the sixteen rows of a block, to `sums`.

    They add up lane by lane in the order of `multiply`, in fp32 from `to` on: what `totals` adds up. A block holds four
    rows, then the next four; of each four a piece of every row, then the next `pieces`.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        (vectors, at, stride, rows, pieces, sums, to), kinds = values, signature.args

        def vector(v: int, step: Any) -> list[Any]:
            place = _added(builder, (at, 1), (stride, v), (step, PIECE))
            return _registers(context, builder, kinds[0], vectors, place)

        with cgutils.for_range(builder, ir.IntType(64)(4)) as quad:

            def row(r: int, step: Any) -> list[Any]:
                four = _added(builder, (quad.index, pieces), (step, 1))
                return _registers(context, builder, kinds[3], rows, _added(builder, (four, 4 * PIECE), (r, PIECE)))

            begin = _added(builder, (to, 1), (quad.index, WIDTH * WIDTH))
            _products(builder, _places(context, builder, kinds[5], sums, begin), pieces, vector, row)
        return context.get_dummy_value()

    return types.void(x, types.int64, types.int64, x, types.int64, sums, types.int64), generate


@intrinsic
def totals(typing: Any, sums: Any, at: Any) -> Any:
    """What `add_products` added to `sums` from `at` on, added up as by `total`: of each vector sixteen rows."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array, at = values
        parts = []
        for quad in range(4):
            begin = builder.add(at, ir.IntType(64)(quad * WIDTH * WIDTH))
            places = _places(context, builder, signature.args[0], array, begin)
            parts.append(_totals(builder, [builder.load(place, align=4) for place in places.values()]))
        return _by_vector(context, builder, signature.return_type, parts)

    return types.UniTuple(lanes, 4)(sums, types.int64), generate
