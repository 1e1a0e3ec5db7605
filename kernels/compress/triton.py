"""The compressor's tail: a program pools, norms, rotates, rounds and stores one entry, whose row stays in registers.

What is read and what is overwritten. A program reads the open window of the state and the series before it, and
`_advance` overwrites both. Fewer tokens than a window close one at most: one program does all, and what it overwrites
it has read. More take a second launch for the state: the program of another entry may yet have to read the window that
the first one closes, and a second copy of the state would move with every call, which a captured graph cannot follow.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.formats.stored import Fp4Keys, Fp8Entries, Fp8Keys, Rounding, Rows, Window
from kernels.formats.triton import (
    E2M1_LARGEST,
    E4M3_LARGEST,
    E4M3_SMALLEST,
    block_exponent,
    code,
    encoded,
    narrow,
    power_of_two,
    simulated,
)
from kernels.formats.triton_rounding import UPCAST, rounded
from kernels.position import position
from kernels.quantise.triton import held, kv_rounded, turned, walsh

TOKENS = 16  # of a tile of the pool
COLUMNS = 128  # of a program of the second launch

_FORMS = {Fp8Entries: 1, Fp8Keys: 2, Fp4Keys: 3}  # 0: a tensor
_ROUNDINGS = {"none": 0, "kv": 1, "index": 2}

_KEY: tl.constexpr = tl.constexpr(2.0**-126)  # the smallest scale of a key


@triton.jit
def _pooled(
    kv, gate, old_kv, old_gate, previous_kv, previous_gate, first, entry, width,
    RATIO: tl.constexpr, SERIES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pool entry `entry`: [BLOCK] fp32. A softmax per channel over tiles of tokens, rescaled as the maximum grows."""
    column = tl.arange(0, BLOCK)[None, :]
    start = first // RATIO * RATIO  # of the open window
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, RATIO * SERIES, TOKENS):
        token = begin + tl.arange(0, TOKENS)[:, None]  # of this window and, with two series, of the one before it
        inside = (token < RATIO * SERIES) & (column < width)
        own = token >= RATIO * (SERIES - 1)
        position = (entry - SERIES + 1) * RATIO + token
        new = position >= first
        old = (position >= start) & (position < first)
        before = position < start
        from_new = (position - first) * (SERIES * width) + tl.where(own, (SERIES - 1) * width, 0) + column
        from_old = (token % RATIO) * (SERIES * width) + tl.where(own, (SERIES - 1) * width, 0) + column
        g = tl.load(gate + from_new, inside & new, float("-inf"))
        v = tl.load(kv + from_new, inside & new, 0.0)
        g = tl.where(old, tl.load(old_gate + from_old, inside & old, float("-inf")), g)
        v = tl.where(old, tl.load(old_kv + from_old, inside & old, 0.0), v)
        if SERIES == 2:
            g = tl.where(before, tl.load(previous_gate + token * width + column, inside & before, float("-inf")), g)
            v = tl.where(before, tl.load(previous_kv + token * width + column, inside & before, 0.0), v)
        grown = tl.maximum(largest, tl.max(g, 0))
        shift = tl.where(grown == float("-inf"), 0.0, grown)  # a tile of tokens that are all taken out weighs 0
        weight = tl.exp(g - shift[None, :])
        kept = tl.exp(largest - shift)
        total = total * kept + tl.sum(weight, 0)
        acc = acc * kept + tl.sum(tl.where(token < RATIO * SERIES, weight * v, 0.0), 0)
        largest = grown
    return acc / total


@triton.jit
def _finished(
    x, norm, freqs, position, width, eps, half, shrink,
    BLOCK: tl.constexpr, LOG: tl.constexpr, ROUNDING: tl.constexpr, DTYPE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and round a pooled row: [BLOCK] fp32, each step's result rounded to the dtype of the run."""
    column = tl.arange(0, BLOCK)
    x = held(tl.where(column < width, x, 0.0), DTYPE, UPCAST)
    x *= tl.rsqrt(tl.sum(x * x) / width + eps)
    x = held(x * tl.load(norm + column, column < width, 0.0), DTYPE, UPCAST)
    pair = tl.arange(0, BLOCK // 2) - (width // 2 - half)
    turns = (pair >= 0) & (pair < half)
    angle = position.to(tl.float32) * tl.load(freqs + pair, turns, 0.0)
    c, s = tl.cos(angle), tl.sin(angle)
    x = held(turned(x, c, s, turns, BLOCK), DTYPE, UPCAST)
    if ROUNDING == 1:
        x = kv_rounded(x, width - 2 * half, 64, BLOCK, DTYPE, UPCAST)
    if ROUNDING == 2:
        x = held(walsh(tl.reshape(x, [1, BLOCK]), 1, BLOCK, LOG) * shrink, DTYPE, UPCAST)
        group = simulated(tl.reshape(x, [BLOCK // 32, 32]), 1, E2M1_LARGEST * _KEY, E2M1_LARGEST, 1, 1)
        x = held(tl.reshape(group, [BLOCK]), DTYPE, UPCAST)
    return x


@triton.jit
def _stored(
    x, values, rope, scales, entry, width, rope_width, scale_width,
    BLOCK: tl.constexpr, FORM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Store a row as `kernels.formats.rows.write` does; what a rounded row needs is found again there, and so here."""
    column = tl.arange(0, BLOCK)
    if FORM == 0:
        tl.store(values + entry * width + column, rounded(x, values.dtype.element_ty, UPCAST), column < width)
    if FORM == 1:
        nope = width - rope_width
        group = tl.reshape(x, [BLOCK // 64, 64])
        codes, exponent = encoded(group, 1, E4M3_SMALLEST, E4M3_LARGEST, 3, 7, 7)
        codes = tl.where(exponent == 255, 0x7F, codes)
        tl.store(values + entry * nope + column, tl.reshape(codes, [BLOCK]).to(tl.uint8), column < nope)
        place = entry * rope_width + column - nope
        tl.store(rope + place, rounded(x, tl.bfloat16, UPCAST), (column >= nope) & (column < width))
        row = tl.arange(0, BLOCK // 64)
        tl.store(scales + entry * scale_width + row, tl.reshape(exponent, [BLOCK // 64]), row < nope // 64)
    if FORM == 2:
        exponent = block_exponent(x, 0, E4M3_LARGEST * _KEY, E4M3_LARGEST)
        codes = code(narrow(x * power_of_two(254 - exponent), 3, 7), 3, 7, 7)
        codes = tl.where(exponent == 255, 0x7F, codes)
        tl.store(values + entry * width + column, codes.to(tl.uint8), column < width)
        tl.store(scales + entry, power_of_two(exponent))
    if FORM == 3:
        group = tl.reshape(x, [BLOCK // 32, 32])
        codes, exponent = encoded(group, 1, E2M1_LARGEST * _KEY, E2M1_LARGEST, 1, 1, 3)
        low, high = tl.split(tl.reshape(codes, [BLOCK // 2, 2]))
        pair = tl.arange(0, BLOCK // 2)
        tl.store(values + entry * (width // 2) + pair, low | (high << 4), pair < width // 2)
        row = tl.arange(0, BLOCK // 32)
        tl.store(scales + entry * scale_width + row, tl.reshape(exponent, [BLOCK // 32]), row < width // 32)


@triton.jit
def _advanced(
    kv, gate, old_kv, old_gate, previous_kv, previous_gate, first, t, width, begin,
    RATIO: tl.constexpr, SERIES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns ``begin .. begin + BLOCK - 1`` of the state after t more tokens."""
    columns = SERIES * width
    column = begin + tl.arange(0, BLOCK)[None, :]
    row = tl.arange(0, TOKENS)[:, None]
    end = first + t
    start = end // RATIO * RATIO  # of the window that stays open
    if SERIES == 2 and start > first:  # and the one before it was closed now
        for low in range(0, RATIO, TOKENS):
            token = low + row
            inside = (token < RATIO) & (column < width)
            position = start - RATIO + token
            new, old = inside & (position >= first), inside & (position < first)
            source, kept_at = (position - first) * columns + column, token * columns + column
            v = tl.where(new, tl.load(kv + source, new, 0.0), tl.load(old_kv + kept_at, old, 0.0))
            g = tl.where(new, tl.load(gate + source, new, 0.0), tl.load(old_gate + kept_at, old, 0.0))
            tl.store(previous_kv + token * width + column, v, inside)
            tl.store(previous_gate + token * width + column, g, inside)
        tl.debug_barrier()  # every thread has read what is overwritten below
    low = tl.maximum(start, first)
    for token in range(low, end, TOKENS):
        position = token + row
        inside = (position < end) & (column < columns)
        source, kept_at = (position - first) * columns + column, (position - start) * columns + column
        tl.store(old_kv + kept_at, tl.load(kv + source, inside), inside)
        tl.store(old_gate + kept_at, tl.load(gate + source, inside), inside)


@triton.jit(do_not_specialize=["t"])
def _compress(
    kv, gate, old_kv, old_gate, previous_kv, previous_gate, first, norm, freqs, values, rope, scales, out,
    t, width, rope_width, scale_width, eps, half, shrink,
    RATIO: tl.constexpr, SERIES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, LOG: tl.constexpr,
    ROUNDING: tl.constexpr, FORM: tl.constexpr, DTYPE: tl.constexpr, ALONE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Entry ``first // ratio + program``, if it is closed; ALONE: there is no other program, and this one advances."""
    position = tl.load(first)
    entry = position // RATIO + tl.program_id(0)
    if (entry + 1) * RATIO <= position + t:
        x = _pooled(
            kv, gate, old_kv, old_gate, previous_kv, previous_gate, position, entry, width, RATIO, SERIES, TOKENS,
            BLOCK,
        )  # fmt: skip
        x = _finished(x, norm, freqs, entry * RATIO, width, eps, half, shrink, BLOCK, LOG, ROUNDING, DTYPE, UPCAST)
        _stored(x, values, rope, scales, entry, width, rope_width, scale_width, BLOCK, FORM, UPCAST)
        column = tl.arange(0, BLOCK)
        place = tl.program_id(0).to(tl.int64) * width + column
        tl.store(out + place, rounded(x, out.dtype.element_ty, UPCAST), column < width)
    if ALONE:
        tl.debug_barrier()  # every thread has read what is overwritten below
        for begin in range(0, SERIES * width, BLOCK):
            _advanced(
                kv, gate, old_kv, old_gate, previous_kv, previous_gate, position, t, width, begin,
                RATIO, SERIES, TOKENS, BLOCK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["t"])
def _advance(
    kv, gate, old_kv, old_gate, previous_kv, previous_gate, first, t, width,
    RATIO: tl.constexpr, SERIES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program has columns of its own: of the last series it reads the first, before it overwrites them."""
    _advanced(
        kv, gate, old_kv, old_gate, previous_kv, previous_gate, tl.load(first), t, width, tl.program_id(0) * BLOCK,
        RATIO, SERIES, TOKENS, BLOCK,
    )  # fmt: skip


def compress(
    kv: Tensor, gate: Tensor, window: Window, first: int | Tensor, norm: Tensor, eps: float, freqs: Tensor,
    rounding: Rounding, rows: Rows, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Take t tokens and write the entries that they close: `kernels.compress.reference.compress`.

    `first` may be a tensor, [] int64 on the device. Whether the entries fit the cache is then for the caller to see to,
    and of the rows returned, ``t // ratio + 1``, those of windows that are not closed hold anything.
    """
    (t, columns), (ratio, width) = kv.shape, (window.kv.shape[0], norm.shape[0])
    series = 2 if len(window.previous_kv) > 0 else 1
    rope = 2 * freqs.shape[0]
    assert columns == window.kv.shape[1] == series * width, f"{columns} columns, want {series} x {width}"
    assert dtype in {torch.float32, torch.bfloat16}, f"a run in {dtype}"
    assert rope <= width, f"{rope} columns to rotate, of {width}"
    assert width % 2 == 0, f"{width} columns"
    assert rounding != "kv" or (width - rope) % 64 == 0, f"{width - rope} columns are no multiple of 64"
    assert rounding != "index" or (width >= 32 and width & (width - 1) == 0), f"{width} is no power of two from 32 on"
    assert rows.shape[1] == width, f"rows of {rows.shape[1]}, want {width}"
    assert all(part.is_contiguous() for part in window), "the state is written in place"
    if not isinstance(first, Tensor):
        assert (first + t) // ratio <= rows.shape[0], f"{rows.shape[0]} rows for {first + t} tokens"
    count = t // ratio + 1 if isinstance(first, Tensor) else (first + t) // ratio - first // ratio
    out = torch.empty(t // ratio + 1, width, dtype=dtype, device=kv.device)
    first = position(first, kv.device)
    if not t:
        return out[:0]
    values, tail, scales, form = planes(rows)
    state = kv.contiguous(), gate.contiguous(), *window, first
    tile = min(TOKENS, triton.next_power_of_2(ratio * series))
    block = max(64 if rounding == "kv" or isinstance(rows, Fp8Entries) else 32, triton.next_power_of_2(width))
    sizes = {"RATIO": ratio, "SERIES": series, "TOKENS": tile}
    constants = {"BLOCK": block, "LOG": block.bit_length() - 1, "ROUNDING": _ROUNDINGS[rounding], "FORM": form}
    constants |= {"DTYPE": tl.bfloat16 if dtype == torch.bfloat16 else tl.float32, "ALONE": t < ratio}
    _compress[(t // ratio + 1,)](
        *state, norm, freqs, values, tail, scales, out, t, width, tail.shape[-1], scales.shape[-1], eps, rope // 2,
        width**-0.5, **sizes, **constants, UPCAST=UPCAST,
        num_warps=8 if tile * block > 2048 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    if t >= ratio:
        _advance[(triton.cdiv(columns, COLUMNS),)](
            *state, t, width, **sizes, BLOCK=COLUMNS, num_warps=4, enable_fp_fusion=False
        )
    return out[:count]


def planes(rows: Rows) -> tuple[Tensor, Tensor, Tensor, int]:
    """Planes that the kernel writes: values, rope dims, scales; narrow ones as bytes. A plane that is not there: rows.

    And the number of the form.
    """
    match rows:
        case Fp8Entries(values, rope, scale):
            found = values.view(torch.uint8), rope, scale.view(torch.uint8)
        case Fp8Keys(values, scale):
            found = values.view(torch.uint8), scale, scale
        case Fp4Keys(packed, scale):
            found = packed, packed, scale.view(torch.uint8)
        case Tensor():
            found = rows, rows, rows
        case _:
            raise NotImplementedError(f"{type(rows).__name__} are coded by torch, after a compressor of its own")
    assert all(plane.is_contiguous() for plane in found), "rows are written in place"
    return *found, _FORMS.get(type(rows), 0)
