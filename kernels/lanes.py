"""Sixteen fp32 numbers at once, in compiled loops: loaded from any stored form, multiplied, added, stored.

One value of type `lanes` is one register of AVX-512, two of AVX2, four of NEON: LLVM splits it. Lanes are added up in
one order everywhere, so that a sum has the same bits on each of them.
"""

import operator
from collections.abc import Callable
from typing import Any, ClassVar, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.typing.templates import ConcreteTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, register_model

WIDTH: Final = 16
_F32, _I32, _I16, _I8 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(8)


class _Lanes(types.Type):
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


def _constant(kind: Any, value: int | float) -> Any:
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
    code = builder.zext(x, ir.VectorType(_I16, WIDTH))
    size = builder.and_(code, _constant(_I16, 0x7F))
    sign = builder.shl(builder.and_(code, _constant(_I16, 0x80)), _constant(_I16, 8))
    is_nan = builder.icmp_unsigned("==", size, _constant(_I16, 0x7F))
    bits = builder.select(is_nan, _constant(_I16, 0x7E00), builder.shl(size, _constant(_I16, 7)))
    return _halves(builder, builder.or_(bits, sign), 256.0)


def _e2m1(builder: Any, code: Any) -> Any:
    """Codes in the low four bits of 16-bit integers."""
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
        code = builder.zext(found, ir.VectorType(_I16, WIDTH))
        both = [_e2m1(builder, code), _e2m1(builder, builder.lshr(code, _constant(_I16, 4)))]
        return context.make_tuple(builder, signature.return_type, both)

    return types.UniTuple(lanes, 2)(array, types.int64, *rest), generate


@intrinsic
def load_pairs(typing: Any, array: Any, index: Any) -> Any:
    """The E2M1 numbers in the low and in the high halves of sixteen bytes from `index` on."""
    return _pairs(array, ())


@intrinsic
def load_some_pairs(typing: Any, array: Any, index: Any, count: Any) -> Any:
    """`load_pairs`, of which the first `count` bytes are read; the others are 0."""
    return _pairs(array, (types.int64,))


@intrinsic
def store(typing: Any, array: Any, index: Any, x: Any) -> Any:
    """Store sixteen numbers to a flat float32 array."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = _element(context, builder, signature.args[0], values[0], values[1])
        builder.store(values[2], builder.bitcast(pointer, _V.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, lanes), generate


@intrinsic
def store_some(typing: Any, array: Any, index: Any, x: Any, count: Any) -> Any:
    """`store` the first `count` of them."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = builder.bitcast(_element(context, builder, signature.args[0], values[0], values[1]), _V.as_pointer())
        steps = ir.Constant(ir.VectorType(_I32, WIDTH), list(range(WIDTH)))
        mask = builder.icmp_signed("<", steps, _splat(builder, builder.trunc(values[3], _I32)))
        _called(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), values[2], pointer, _I32(4), mask)
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
def splat_halves(typing: Any, low: Any, high: Any) -> Any:
    """One number in the first eight lanes, another in the others."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        order = ir.Constant(ir.VectorType(_I32, WIDTH), [0] * 8 + [WIDTH] * 8)
        return builder.shuffle_vector(_splat(builder, values[0]), _splat(builder, values[1]), order)

    return lanes(types.float32, types.float32), generate


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


# --- softmax and blocks of rows


def _where(builder: Any, predicate: str, x: Any, y: Any, yes: Any, no: Any) -> Any:
    return builder.select(builder.fcmp_ordered(predicate, x, y), yes, no)


@intrinsic
def larger(typing: Any, x: Any, y: Any) -> Any:
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


_EXP: Final = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)  # Taylor's, to 2^-28 of it below ln(2) / 2
_LN2: Final = (0.693145751953125, 1.428606765330187e-06)  # of few bits, so that multiples are exact; and what is left
_ROUND: Final = 12582912.0  # 1.5 * 2^23: added to a number, it leaves its nearest integer in the lowest bits


@intrinsic
def exp(typing: Any, x: Any) -> Any:
    """``e^x`` to two ulp: 0 and infinity beyond what float32 holds, subnormal numbers below 2^-126; NaN stays."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        integers = ir.VectorType(_I32, WIDTH)
        low, high = _constant(_F32, -104.0), _constant(_F32, 89.0)
        (x,) = values
        x = _where(builder, "<", x, low, low, x)
        x = _where(builder, ">", x, high, high, x)
        moved = _called(builder, "llvm.fma.v16f32", _V, x, _constant(_F32, 1.4426950408889634), _constant(_F32, _ROUND))
        power = builder.sub(builder.bitcast(moved, integers), builder.bitcast(_constant(_F32, _ROUND), integers))
        whole = builder.fsub(moved, _constant(_F32, _ROUND))
        for part in _LN2:
            x = _called(builder, "llvm.fma.v16f32", _V, whole, _constant(_F32, -part), x)
        y = _constant(_F32, _EXP[0])
        for factor in _EXP[1:]:
            y = _called(builder, "llvm.fma.v16f32", _V, y, x, _constant(_F32, factor))
        half = builder.ashr(power, _constant(_I32, 1))
        for some in (half, builder.sub(power, half)):  # 2^power itself may be none that float32 holds
            scale = builder.shl(builder.add(some, _constant(_I32, 127)), _constant(_I32, 23))
            y = builder.fmul(y, builder.bitcast(scale, _V))
        return y

    return lanes(lanes), generate


@intrinsic
def store_bfloat16(typing: Any, array: Any, index: Any, x: Any, count: Any) -> Any:
    """Store the first `count` numbers to a flat array of bfloat16 (uint16), rounded to the nearest, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        wide, narrow = ir.VectorType(_I32, WIDTH), ir.VectorType(_I16, WIDTH)
        word = builder.bitcast(values[2], wide)
        odd = builder.and_(builder.lshr(word, _constant(_I32, 16)), _constant(_I32, 1))
        rounded = builder.add(word, builder.add(odd, _constant(_I32, 0x7FFF)))
        is_nan = builder.fcmp_unordered("uno", values[2], values[2])
        rounded = builder.select(is_nan, _constant(_I32, 0x7FC00000), rounded)
        upper = builder.trunc(builder.lshr(rounded, _constant(_I32, 16)), narrow)
        pointer = _element(context, builder, signature.args[0], values[0], values[1])
        steps = ir.Constant(ir.VectorType(_I32, WIDTH), list(range(WIDTH)))
        mask = builder.icmp_signed("<", steps, _splat(builder, builder.trunc(values[3], _I32)))
        where = builder.bitcast(pointer, narrow.as_pointer())
        _called(builder, "llvm.masked.store.v16i16.p0", ir.VoidType(), upper, where, _I32(1), mask)
        return context.get_dummy_value()

    return types.void(array, types.int64, lanes, types.int64), generate


def _products(context: Any, builder: Any, vectors_of: Any, block_of: Any, first_row: Any) -> Any:
    """Four vectors times four rows of a block: [vector 0's with each row, vector 1's, ...], as by `total`."""
    (kind, x, begin, stride), (block_kind, block, groups), integer = vectors_of, block_of, ir.IntType(64)
    sums = [cgutils.alloca_once(builder, _V) for _ in range(WIDTH)]
    for one in sums:
        builder.store(ir.Constant(_V, None), one)

    def loaded(kind: Any, array: Any, index: Any) -> Any:
        pointer = _element(context, builder, kind, array, index)
        return builder.load(builder.bitcast(pointer, _V.as_pointer()), align=4)

    with cgutils.for_range(builder, groups) as run:
        step = builder.add(begin, builder.mul(run.index, integer(WIDTH)))
        vectors = [loaded(kind, x, builder.add(step, builder.mul(stride, integer(i)))) for i in range(4)]
        here = builder.add(builder.mul(run.index, integer(WIDTH * WIDTH)), builder.mul(first_row, integer(WIDTH)))
        for i in range(4):
            y = loaded(block_kind, block, builder.add(here, integer(i * WIDTH)))
            for j, vector in enumerate(vectors):
                one = sums[4 * j + i]
                builder.store(_called(builder, "llvm.fma.v16f32", _V, vector, y, builder.load(one)), one)
    found, group = [builder.load(one) for one in sums], WIDTH
    while len(found) > 1:  # two vectors whose lanes are parts of `group` each become one of half as many
        group //= 2
        order = [s + n + i for s in range(0, WIDTH, 2 * group) for n in (0, WIDTH) for i in range(group)]
        orders = [ir.Constant(ir.VectorType(_I32, WIDTH), [i + more for i in order]) for more in (0, group)]
        pairs = zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True)
        found = [builder.fadd(*(builder.shuffle_vector(*pair, part) for part in orders)) for pair in pairs]
    return found[0]


@intrinsic
def dots(typing: Any, x: Any, at: Any, stride: Any, block: Any, groups: Any) -> Any:
    """Products of four vectors, in x from `at` on and `stride` apart, with the sixteen rows of a block: four lanes.

    Each adds up as by `total`. A block holds sixteen columns of every row, then the next sixteen: `groups` times.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = signature.args
        slots = cgutils.alloca_once(builder, _V, size=4)
        with cgutils.for_range(builder, ir.IntType(64)(4)) as quad_of_rows:
            row = builder.mul(quad_of_rows.index, ir.IntType(64)(4))
            found = _products(context, builder, (kinds[0], *values[:3]), (kinds[3], values[3], values[4]), row)
            builder.store(found, builder.gep(slots, [quad_of_rows.index]))
        parts = [builder.load(builder.gep(slots, [_I32(i)])) for i in range(4)]

        def shuffled(x: Any, y: Any, order: Any) -> Any:
            return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, WIDTH), order))

        vectors = []
        for vector in range(4):
            quad = [4 * vector + i for i in range(4)]
            order = [*quad, *(i + WIDTH for i in quad), *quad, *(i + WIDTH for i in quad)]
            low, high = (shuffled(*pair, order) for pair in (parts[:2], parts[2:]))
            vectors.append(shuffled(low, high, [*range(8), *range(WIDTH, WIDTH + 8)]))
        return context.make_tuple(builder, signature.return_type, vectors)

    return types.UniTuple(lanes, 4)(x, types.int64, types.int64, block, types.int64), generate
