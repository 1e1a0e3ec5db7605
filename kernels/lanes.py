"""Sixteen fp32 numbers at once, in compiled loops: loaded from any stored form, multiplied, added, stored.

One value of type `lanes` is one register of AVX-512, two of AVX2, four of NEON: LLVM splits it. Lanes are added up in
one order everywhere, so that a sum has the same bits on each of them.
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
_AVX512: Final = "+avx512f" in (get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES)
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
    """Bits of float16 [16] as fp32, times a power of two. float16 holds E4M3 / 256 and E2M1 / 2^14, subnormals too."""
    half = builder.bitcast(bits, ir.VectorType(ir.HalfType(), WIDTH))
    return builder.fmul(builder.fpext(half, _V), _constant(_F32, scale))


def _bfloat16(builder: Any, x: Any) -> Any:
    wide = builder.zext(x, ir.VectorType(_I32, WIDTH))
    return builder.bitcast(builder.shl(wide, _constant(_I32, 16)), _V)


def _e4m3(builder: Any, x: Any) -> Any:
    twice = builder.shl(builder.sext(x, ir.VectorType(_I16, WIDTH)), _constant(_I16, 7))  # the sign, two times
    bits = builder.and_(twice, _constant(_I16, 0xBFFF))
    is_nan = builder.icmp_unsigned("==", builder.and_(bits, _constant(_I16, 0x3F80)), _constant(_I16, 0x3F80))
    return _halves(builder, builder.select(is_nan, _constant(_I16, 0x7E00), bits), 256.0)


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


def _pairs(array: Any, rest: tuple[Any, ...]) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        count = values[2] if rest else None
        found = _loaded(context, builder, signature.args[0], values[0], values[1], count)
        code = builder.zext(found, ir.VectorType(_I32, WIDTH))
        both = [_e2m1(builder, code), _e2m1(builder, builder.lshr(code, _constant(_I32, 4)))]
        return context.make_tuple(builder, signature.return_type, both)

    return types.UniTuple(lanes, 2)(array, types.int64, *rest), generate


@intrinsic
def fetch(typing: Any, array: Any, index: Any) -> Any:
    """Ask memory for the cache line of an element of a flat array, which may lie beyond its end."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = builder.bitcast(_element(context, builder, signature.args[0], *values), _I8.as_pointer())
        _called(builder, "llvm.prefetch.p0", ir.VoidType(), place, _I32(0), _I32(2), _I32(1))
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic
def load_pairs(typing: Any, array: Any, index: Any) -> Any:
    """The E2M1 numbers in the low and in the high halves of sixteen bytes from `index` on."""
    return _pairs(array, ())


@intrinsic
def load_some_pairs(typing: Any, array: Any, index: Any, count: Any) -> Any:
    """`load_pairs`, of which the first `count` bytes are read; the others are 0."""
    return _pairs(array, (types.int64,))


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


def _vectors(context: Any, builder: Any, kind: Any, array: Any, begin: Any, step: int, count: int) -> list[Any]:
    """Pointers to vectors in a flat float32 array, `step` numbers apart."""
    places = [builder.add(begin, ir.IntType(64)(i * step)) for i in range(count)]
    return [builder.bitcast(_element(context, builder, kind, array, at), _V.as_pointer()) for at in places]


def _products(context: Any, builder: Any, kinds: Any, given: Any, row: Any, finish: Callable[..., None]) -> None:
    """Four vectors times four rows of a block from `row` on, lane by lane, as many at once as registers hold.

    `finish` is called with a vector, a row, and where the sum of their products is.
    """
    (x, at, stride, block, groups), integer = given, ir.IntType(64)
    for vector, other in [(v, r) for v in range(0, 4, BLOCK) for r in range(0, 4, BLOCK)]:
        pairs = [(v, r) for v in range(vector, vector + BLOCK) for r in range(other, other + BLOCK)]
        sums = {pair: cgutils.alloca_once(builder, _V) for pair in pairs}
        for one in sums.values():
            builder.store(ir.Constant(_V, None), one)
        with cgutils.for_range(builder, groups) as run:
            step = builder.add(at, builder.mul(run.index, integer(WIDTH)))
            here = builder.add(builder.mul(run.index, integer(WIDTH * WIDTH)), builder.mul(row, integer(WIDTH)))
            starts = {v: builder.add(step, builder.mul(stride, integer(v))) for v, _ in pairs}
            vectors = {v: _vectors(context, builder, kinds[0], x, start, 0, 1)[0] for v, start in starts.items()}
            rows = {r: _vectors(context, builder, kinds[3], block, here, WIDTH, 4)[r] for _, r in pairs}
            numbers = {place: builder.load(place, align=4) for place in (*vectors.values(), *rows.values())}
            for (v, r), one in sums.items():
                parts = numbers[vectors[v]], numbers[rows[r]], builder.load(one)
                builder.store(_called(builder, "llvm.fma.v16f32", _V, *parts), one)
        for (v, r), one in sums.items():
            finish(v, r, builder.load(one))


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


@intrinsic
def dots(typing: Any, x: Any, at: Any, stride: Any, block: Any, groups: Any) -> Any:
    """Products of four vectors, in x from `at` on and `stride` apart, with the sixteen rows of a block: four lanes.

    Each adds up as by `total`. A block holds sixteen columns of every row, then the next sixteen: `groups` times.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        slots = cgutils.alloca_once(builder, _V, size=4)
        with cgutils.for_range(builder, ir.IntType(64)(4)) as quad:
            row, found = builder.mul(quad.index, ir.IntType(64)(4)), {}
            _products(context, builder, signature.args, values, row, lambda v, r, one: found.update({(v, r): one}))
            builder.store(_totals(builder, [found[pair] for pair in sorted(found)]), builder.gep(slots, [quad.index]))
        parts = [builder.load(builder.gep(slots, [_I32(i)])) for i in range(4)]
        return _by_vector(context, builder, signature.return_type, parts)

    return types.UniTuple(lanes, 4)(x, types.int64, types.int64, block, types.int64), generate


@intrinsic
def add_products(typing: Any, x: Any, at: Any, stride: Any, block: Any, groups: Any, sums: Any, to: Any) -> Any:
    """Add products as of `dots` to `sums` from `to` on, lane by lane: what `totals` adds up."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        *given, sums, to = values
        with cgutils.for_range(builder, ir.IntType(64)(4)) as quad:
            row = builder.mul(quad.index, ir.IntType(64)(4))
            begin = builder.add(to, builder.mul(row, ir.IntType(64)(4 * WIDTH)))
            places = _vectors(context, builder, signature.args[5], sums, begin, WIDTH, WIDTH)

            def finish(v: int, r: int, one: Any, places: Any = places) -> None:
                place = places[4 * v + r]
                builder.store(builder.fadd(builder.load(place, align=4), one), place, align=4)

            _products(context, builder, signature.args, given, row, finish)
        return context.get_dummy_value()

    return types.void(x, types.int64, types.int64, block, types.int64, sums, types.int64), generate


@intrinsic
def totals(typing: Any, sums: Any, at: Any) -> Any:
    """What `add_products` added to `sums` from `at` on, added up: four vectors times sixteen rows, as of `dots`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array, at = values
        parts = []
        for quad in range(4):
            begin = builder.add(at, ir.IntType(64)(quad * WIDTH * WIDTH))
            places = _vectors(context, builder, signature.args[0], array, begin, WIDTH, WIDTH)
            parts.append(_totals(builder, [builder.load(place, align=4) for place in places]))
        return _by_vector(context, builder, signature.return_type, parts)

    return types.UniTuple(lanes, 4)(sums, types.int64), generate
