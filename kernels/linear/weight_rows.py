"""Whole rows of stored weights times a few tokens, without tensor cores: of `linear`, `gate` and `experts`.

Of a token alone a product takes as long as the weight takes to be read, so a program has a few rows and nothing else:
its threads lie along the columns, each with 16 bytes of every row at a time, which are four words of 4 bytes. They are
decoded in registers and multiplied in fp32, with one rounding for each product and sum (`tl.fma`), in an order that
the width of the row alone decides: no column is split over programs, and no number of one token enters another's.

A scale multiplies the sum of what lies under it in a thread (16 columns of Fp8, 32 of Fp4, 16 of NvFp4). Both operands
are exact in fp32 whatever their dtypes. Under a weight of Fp4 that fp32 does not hold the sum is NaN.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

import triton
import triton.language as tl
from torch import int32

from fathom.kernels.formats.stored import Dense, Weight
from fathom.kernels.formats.triton import (
    E4M3_LARGEST,
    E4M3_SMALLEST,
    e2m1_word,
    e4m3,
    e4m3_word,
    e8m0,
    eighths,
    halves,
    quarters,
    simulated,
)
from fathom.kernels.formats.triton_rounding import UPCAST, widened
from fathom.kernels.linear.weight_tiles import Planes, planes

_WORD: Final = 4  # bytes
_DENSE: Final = {2: {"bfloat16": "bf16", "float16": "f16"}, 4: {"float32": "f32"}}
_COLUMNS: Final = {"f32": 4, "bf16": 8, "f16": 8, "fp8": 16, "fp4": 32, "nvfp4": 32}  # of 16 bytes
_LANES: Final = (128, 64, 32)
_MANY_LANES: Final = 256  # of rows that are longer than UNROLLED steps of fewer
UNROLLED: tl.constexpr = tl.constexpr(8)  # steps that are written out one after the other; more are a loop
WARPS = 1056  # wanted of a launch: eight for each multiprocessor of an H200
INTERPRETED = 256 if UPCAST else None  # rows of a program there, which takes as long whatever it does


class Lanes(NamedTuple):
    """How the columns of a row lie on a program's threads."""

    lanes: int
    steps: int  # times 16 bytes for each

    @property
    def warps(self) -> int:
        """Of a program."""
        return self.lanes // 32


def words(weight: Weight) -> Planes | None:
    """`planes` with data as int32, of a dense one its dtype for a form; None where rows are not made of words."""
    form, data, scale, global_scale = planes(weight)
    if isinstance(weight, Dense):
        form = _DENSE[data.element_size()][str(data.dtype).removeprefix("torch.")]
    sizes = (data.shape[-1], data.storage_offset(), *data.stride()[:-1])
    amid = data.data_ptr() % _WORD and not UPCAST  # of a mapped file, which the interpreter reads as well
    if amid or any(size * data.element_size() % _WORD for size in sizes):
        return None
    viewed = data.view(int32)
    return Planes(form, viewed, viewed if scale is data else scale, viewed if global_scale is data else global_scale)


def all_words(weights: Iterable[Weight]) -> list[Planes] | None:
    """`words` of some weights; None where one of them has none."""
    found = []
    for weight in weights:
        if (of := words(weight)) is None:
            return None
        found.append(of)
    return found


def whole_words(form: str, columns: int) -> bool:
    """Whether rows of a matrix of its own, stored as `kernels.linear.cpu` names it, are made of whole words."""
    return columns * {"F32": 32, "BF16": 16, "F16": 16, "FP8": 8, "FP8_F32": 8}.get(form, 4) % (8 * _WORD) == 0


def lanes(of: Planes) -> Lanes:
    """Threads along a row: so that few are idle, then that each takes two steps, then as many as there may be.

    Of E2M1, whose 16 bytes are 32 columns, one step. Fewer threads add up across fewer warps.
    """
    needed = triton.cdiv(of.data.shape[-1], 4)
    made = [Lanes(count, triton.cdiv(needed, count)) for count in _LANES]
    few = [one for one in made if one.steps <= UNROLLED] or [Lanes(_MANY_LANES, triton.cdiv(needed, _MANY_LANES))]
    wanted = 1 if _COLUMNS[of.form] == 32 else 2
    return min(few, key=lambda one: (one.lanes * one.steps, one.steps < wanted))  # of equal ones the first


def rows_at_once(rows: int, most: int, along: Lanes) -> int:
    """Rows of a program, a power of two up to `most`: fewer where programs would be too few, or registers.

    What is done once for all rows of a program, as the rounding of its input, takes the less the more they are.
    """
    if INTERPRETED is not None:
        return INTERPRETED
    while most > 1 and (triton.cdiv(rows, most) * along.warps < WARPS or most * min(along.steps, UNROLLED.value) > 32):
        most //= 2
    return most


@triton.constexpr_function
def columns_of(form):
    """Columns of a row that are 16 bytes."""
    return _COLUMNS[form]


@triton.jit
def input_words(
    x, columns, step, FORM: tl.constexpr, ROUND: tl.constexpr, LANES: tl.constexpr, UPCAST: tl.constexpr
):  # fmt: skip
    """What one step of rows of `FORM` multiplies, of a token at x: of each of a lane's four words, [1, 1, LANES, n].

    ROUND: as deployed numerics round the input of a linear, in each program anew: a few numbers for a thread.
    """
    EACH: tl.constexpr = columns_of(FORM)
    column = ((step * LANES + tl.arange(0, LANES))[:, None] * EACH + tl.arange(0, EACH)[None, :])[None]
    found = widened(tl.load(x + column, column < columns, 0.0), UPCAST)
    if ROUND:
        groups = tl.reshape(found, [1, LANES * EACH // 128, 128])
        found = tl.reshape(simulated(groups, 2, E4M3_SMALLEST, E4M3_LARGEST, 3, 7), [1, LANES, EACH])
    return quarters(tl.permute(tl.reshape(found, [1, 1, LANES, 4, EACH // 4]), (0, 1, 2, 4, 3)))


@triton.jit
def _added(total, word, x, FORM: tl.constexpr, UPCAST: tl.constexpr):
    """`total` [1, ROWS, LANES] and the columns of a word [1, ROWS, LANES] times x [1, 1, LANES, n]."""
    if columns_of(FORM) == 32:  # two for each byte
        w0, w1, w2, w3, w4, w5, w6, w7 = e2m1_word(word, UPCAST)
        x0, x1, x2, x3, x4, x5, x6, x7 = eighths(x)
        total = tl.fma(w3, x3, tl.fma(w2, x2, tl.fma(w1, x1, tl.fma(w0, x0, total))))
        total = tl.fma(w7, x7, tl.fma(w6, x6, tl.fma(w5, x5, tl.fma(w4, x4, total))))
    elif FORM == "fp8":
        w0, w1, w2, w3 = e4m3_word(word, UPCAST)
        x0, x1, x2, x3 = quarters(x)
        total = tl.fma(w3, x3, tl.fma(w2, x2, tl.fma(w1, x1, tl.fma(w0, x0, total))))
    elif FORM == "f32":
        total = tl.fma(word.to(tl.float32, bitcast=True), tl.reshape(x, x.shape[:-1]), total)
    else:
        x0, x1 = tl.split(x)
        bits = word.to(tl.uint32, bitcast=True)
        if FORM == "bf16":
            w0, w1 = (bits << 16).to(tl.float32, bitcast=True), (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            w0, w1 = halves(word)
        total = tl.fma(w1, x1, tl.fma(w0, x0, total))
    return total


@triton.jit
def _scales(scale, row, there, group, scale_width, stride, FORM: tl.constexpr, UPCAST: tl.constexpr):
    """Scales [1, ROWS, LANES] fp32 of the groups of columns [LANES]."""
    mask = there[:, None] & (group < scale_width)[None, :]
    found = tl.load(scale + row.to(tl.int64)[:, None] * stride + group[None, :], mask, 0)
    if FORM == "nvfp4":
        found = e4m3(found, tl.float32, UPCAST)
    elif found.dtype == tl.uint8:
        found = e8m0(found)
    return found[None]


@triton.jit
def _beyond(scale, first, second, third, fourth):
    """Whether fp32 does not hold a weight of these words: 2 and more times 2^127, or 4 and more times 2^126."""
    two = first | second | third | fourth  # bit 2 of a nibble; bit 1 too of 4 and more
    four = (first & (first << 1)) | (second & (second << 1)) | (third & (third << 1)) | (fourth & (fourth << 1))
    return ((scale == 2.0**127) & ((two & 0x44444444) != 0)) | ((scale == 2.0**126) & ((four & 0x44444444) != 0))


@triton.jit
def with_words(
    total, x, data, scale, row, there, width, scale_width, stride, scale_stride, step,
    FORM: tl.constexpr, LANES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """`total` [1, ROWS, LANES] and one step of rows `row` [ROWS] times `input_words`."""
    lane = step * LANES + tl.arange(0, LANES)
    word = lane[:, None] * 4 + tl.arange(0, 4)[None, :]
    mask = there[:, None, None] & (word < width)[None]
    loaded = tl.load(data + row.to(tl.int64)[:, None, None] * stride + word[None], mask, 0)
    first, second, third, fourth = quarters(loaded[None])
    x0, x1, x2, x3 = x
    if columns_of(FORM) > 8:  # scales are beside them
        zero = tl.zeros(total.shape, tl.float32)
        half = _added(_added(zero, first, x0, FORM, UPCAST), second, x1, FORM, UPCAST)
        if FORM == "nvfp4":  # E2M1 counts 2^-6 of its value
            own = _scales(scale, row, there, lane * 2, scale_width, scale_stride, FORM, UPCAST)
            total = tl.fma(half * 64.0, own, total)
            half = _added(_added(zero, third, x2, FORM, UPCAST), fourth, x3, FORM, UPCAST)
            own = _scales(scale, row, there, lane * 2 + 1, scale_width, scale_stride, FORM, UPCAST)
            total = tl.fma(half * 64.0, own, total)
        else:
            whole = _added(_added(half, third, x2, FORM, UPCAST), fourth, x3, FORM, UPCAST)
            if FORM == "fp4":
                own = _scales(scale, row, there, lane, scale_width, scale_stride, FORM, UPCAST)
                own = tl.where(_beyond(own, first, second, third, fourth), float("nan"), own)
                total = tl.fma(whole * 64.0, own, total)
            else:
                own = _scales(scale, row // 128, there, lane // 8, scale_width, scale_stride, FORM, UPCAST)
                total = tl.fma(whole, own, total)
    else:
        total = _added(_added(total, first, x0, FORM, UPCAST), second, x1, FORM, UPCAST)
        total = _added(_added(total, third, x2, FORM, UPCAST), fourth, x3, FORM, UPCAST)
    return total


@triton.jit
def of_lanes(total):
    """Sums [ROWS] of [1, ROWS, LANES].

    The order is that in which threads hold lanes. The axis of one makes compilers lay every thread along the lanes,
    whatever is beside (`tests/kernels/test_triton_compile.py`): else a token had other bits beside others.
    """
    return tl.reshape(tl.sum(total, 2), total.shape[1:2])


@triton.jit
def row_products(
    x, columns, data, scale, row, there, width, scale_width, stride, scale_stride,
    FORM: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Products of rows `row` [ROWS] with a token at x: [ROWS] fp32."""
    total = tl.zeros([1, ROWS, LANES], tl.float32)
    if STEPS > UNROLLED:
        for step in range(STEPS):
            own = input_words(x, columns, step, FORM, ROUND, LANES, UPCAST)
            total = with_words(
                total, own, data, scale, row, there, width, scale_width, stride, scale_stride, step,
                FORM, LANES, UPCAST,
            )  # fmt: skip
    else:
        for step in tl.static_range(STEPS):
            own = input_words(x, columns, step, FORM, ROUND, LANES, UPCAST)
            total = with_words(
                total, own, data, scale, row, there, width, scale_width, stride, scale_stride, step,
                FORM, LANES, UPCAST,
            )  # fmt: skip
    return of_lanes(total)
