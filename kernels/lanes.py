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
