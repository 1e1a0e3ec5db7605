"""The compressor's tail: a program pools, norms, rotates, rounds and stores one entry, whose row stays in registers.

What is read and what is overwritten. A program reads the tokens that its entry pools, from the ring those before the
call. Where the ring has room for the call's tokens beside these, each program writes the rows of its own window, and no
program reads a row that another one writes. More tokens take a second launch for the ring.

Of a prompt, whose entries are looked at between these steps, pooling and storing are ops of their own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.compress import cpu
from fathom.kernels.formats.rows import write, write_scratch
from fathom.kernels.formats.stored import Fp4Keys, Fp8Entries, Fp8Keys, Rounding, Rows, TokenRing
from fathom.kernels.formats.triton import (
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
from fathom.kernels.formats.triton_rounding import UPCAST, rounded, widened
from fathom.kernels.position import position
from fathom.kernels.quantise.triton import held, kv_rounded, turned, walsh

TOKENS = 16  # of a tile of the pool
COLUMNS = 128  # of a program of the second launch

_FORMS = {Fp8Entries: 1, Fp8Keys: 2, Fp4Keys: 3}  # 0: a tensor
_ROUNDINGS = {"none": 0, "kv": 1, "index": 2, "row": 3}

_KEY: tl.constexpr = tl.constexpr(2.0**-126)  # the smallest scale of a key


@triton.jit
def _weighed(g, v, there, largest, total, acc):
    """Add a tile of tokens, gates and values [TOKENS, BLOCK], to the softmax of each channel."""
    grown = tl.maximum(largest, tl.max(g, 0))
    shift = tl.where(grown == float("-inf"), 0.0, grown)  # a tile of tokens that are all taken out weighs 0
    weight = tl.exp(g - shift[None, :])
    kept = tl.exp(largest - shift)
    return grown, total * kept + tl.sum(weight, 0), acc * kept + tl.sum(tl.where(there, weight * v, 0.0), 0)


@triton.jit
def _pooled(
    kv, gate, ring_kv, ring_gate, first, entry, width,
    RATIO: tl.constexpr, SERIES: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pool entry `entry`: [BLOCK] fp32. A softmax per channel over tiles of tokens, rescaled as the maximum grows."""
    column = tl.arange(0, BLOCK)[None, :]
    columns = SERIES * width
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, RATIO * SERIES, TOKENS):
        token = begin + tl.arange(0, TOKENS)[:, None]  # of this window and, with two series, of the one before it
        inside = (token < RATIO * SERIES) & (column < width)
        own = token >= RATIO * (SERIES - 1)
        position = (entry - SERIES + 1) * RATIO + token
        new = position >= first
        old = (position >= 0) & (position < first)  # before position 0 there is no token: its gate is -inf
        source = tl.where(own, (SERIES - 1) * width, 0) + column
        from_new, from_ring = (position - first) * columns + source, position % ROWS * columns + source
        g = tl.load(gate + from_new, inside & new, float("-inf"))
        v = tl.load(kv + from_new, inside & new, 0.0)
        g = tl.where(old, tl.load(ring_gate + from_ring, inside & old, float("-inf")), g)
        v = tl.where(old, tl.load(ring_kv + from_ring, inside & old, 0.0), v)
        largest, total, acc = _weighed(g, v, token < RATIO * SERIES, largest, total, acc)
    return acc / total


@triton.jit
def _pool(
    kv, gate, before_kv, before_gate, out, width,
    kv_window, kv_token, gate_window, gate_token,
    before_kv_window, before_kv_token, before_gate_window, before_gate_token,
    RATIO: tl.constexpr, SERIES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pool columns of a window, as `_pooled` does, from where they lie; with two series also of the one before."""
    window = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, RATIO * SERIES, TOKENS):
        token = begin + tl.arange(0, TOKENS)[:, None] - RATIO * (SERIES - 1)  # negative: of the window before
        own = (token >= 0) & (token < RATIO) & (column < width)
        g = tl.load(gate + window * gate_window + token * gate_token + column, own, float("-inf"))
        v = tl.load(kv + window * kv_window + token * kv_token + column, own, 0.0)
        if SERIES == 2:
            older, earlier = (token < 0) & (column < width), token + RATIO
            gates = before_gate + window * before_gate_window + earlier * before_gate_token
            values = before_kv + window * before_kv_window + earlier * before_kv_token
            g = tl.where(older, tl.load(gates + column, older, float("-inf")), g)
            v = tl.where(older, tl.load(values + column, older, 0.0), v)
        largest, total, acc = _weighed(g, v, token < RATIO, largest, total, acc)
    place = window * width + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, acc / total, tl.program_id(1) * BLOCK + tl.arange(0, BLOCK) < width)


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
    if ROUNDING == 3:
        whole = simulated(tl.reshape(x, [1, BLOCK]), 1, E4M3_SMALLEST, E4M3_LARGEST, 3, 7)
        x = held(tl.reshape(whole, [BLOCK]), DTYPE, UPCAST)
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


@triton.jit(do_not_specialize=["start"])
def _store(
    x, values, rope, scales, start, width, rope_width, scale_width,
    BLOCK: tl.constexpr, FORM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Row ``start + program``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    wide = widened(tl.load(x + row * width + column, column < width, 0.0), UPCAST)
    _stored(wide, values, rope, scales, start + row, width, rope_width, scale_width, BLOCK, FORM, UPCAST)


@triton.jit
def _kept(
    kv, gate, ring_kv, ring_gate, first, low, high, columns, begin,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns ``begin .. begin + BLOCK - 1`` of the ring after the tokens at positions ``low .. high - 1``."""
    column = begin + tl.arange(0, BLOCK)[None, :]
    for token in range(low, high, TOKENS):
        position = token + tl.arange(0, TOKENS)[:, None]
        inside = (position < high) & (column < columns)
        source, place = (position - first) * columns + column, position % ROWS * columns + column
        tl.store(ring_kv + place, tl.load(kv + source, inside), inside)
        tl.store(ring_gate + place, tl.load(gate + source, inside), inside)


@triton.jit(do_not_specialize=["t"])
def _compress(
    kv, gate, ring_kv, ring_gate, first, norm, freqs, values, rope, scales, out,
    t, width, rope_width, scale_width, eps, half, shrink,
    RATIO: tl.constexpr, SERIES: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    LOG: tl.constexpr, ROUNDING: tl.constexpr, FORM: tl.constexpr, DTYPE: tl.constexpr, FEW: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Entry ``first // ratio + program``, if it is closed; FEW: and the ring's rows of the tokens of its window."""
    position = tl.load(first)
    entry = position // RATIO + tl.program_id(0)
    if (entry + 1) * RATIO <= position + t:
        x = _pooled(
            kv, gate, ring_kv, ring_gate, position, entry, width, RATIO, SERIES, ROWS, TOKENS, BLOCK
        )  # fmt: skip
        x = _finished(x, norm, freqs, entry * RATIO, width, eps, half, shrink, BLOCK, LOG, ROUNDING, DTYPE, UPCAST)
        _stored(x, values, rope, scales, entry, width, rope_width, scale_width, BLOCK, FORM, UPCAST)
        column = tl.arange(0, BLOCK)
        place = tl.program_id(0).to(tl.int64) * width + column
        tl.store(out + place, rounded(x, out.dtype.element_ty, UPCAST), column < width)
    if FEW:
        low, high = tl.maximum(entry * RATIO, position), tl.minimum((entry + 1) * RATIO, position + t)
        for begin in range(0, SERIES * width, BLOCK):
            _kept(
                kv, gate, ring_kv, ring_gate, position, low, high, SERIES * width, begin, ROWS, TOKENS, BLOCK
            )  # fmt: skip


@triton.jit(do_not_specialize=["t"])
def _keep(
    kv, gate, ring_kv, ring_gate, first, t, columns, ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns of the ring after t more tokens, of which it takes the last."""
    position = tl.load(first)
    low, begin = position + tl.maximum(t - ROWS, 0), tl.program_id(0) * BLOCK
    _kept(
        kv, gate, ring_kv, ring_gate, position, low, position + t, columns, begin, ROWS, TOKENS, BLOCK
    )  # fmt: skip


def pool(kv: Tensor, gate: Tensor, previous_kv: Tensor | None, previous_gate: Tensor | None) -> Tensor:
    """Pool each window by a softmax over its tokens: `kernels.compress.reference.pool`."""
    assert kv.dtype == torch.float32, f"kv: {kv.dtype}, want float32"
    n, ratio, width = kv.shape
    out = torch.empty(n, width, dtype=torch.float32, device=kv.device)
    if not n:
        return out
    before = [] if previous_kv is None or previous_gate is None else [previous_kv, previous_gate]
    series = 2 if before else 1
    given = [cpu.side_by_side(x) for x in (kv, gate, *(before or (kv, gate)))]
    block = min(COLUMNS, triton.next_power_of_2(width))
    _pool[(n, triton.cdiv(width, block))](
        *given, out, width, *(stride for x in given for stride in x.stride()[:2]), RATIO=ratio, SERIES=series,
        TOKENS=min(TOKENS, triton.next_power_of_2(ratio * series)), BLOCK=block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def store(rows: Rows, start: int, x: Tensor) -> None:
    """Store `x` [m, d] as rows from `start` on: `kernels.formats.rows.write`, which stores other forms."""
    if not isinstance(rows, Fp8Entries | Fp8Keys | Fp4Keys):
        write(rows, start, x)
        return
    m, width = x.shape
    assert width == rows.shape[1], f"{width} columns for rows of {rows.shape[1]}"
    assert start + m <= rows.shape[0], f"{rows.shape[0]} rows, none for row {start + m - 1}"
    values, tail, scales, form = planes(rows)
    if m:
        _store[(m,)](
            x.contiguous(), values, tail, scales, start, width, tail.shape[-1], scales.shape[-1],
            BLOCK=_block(width, rows), FORM=form, UPCAST=UPCAST, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def store_scratch(vectors: int, width: int, form: str) -> int:
    """Bytes allocated in `store` of so many rows."""
    return write_scratch(vectors, width, form) if form in ("coded", "based") else 0


def _block(width: int, rows: Rows) -> int:
    """Columns of a program that stores a row: whole groups of its form."""
    padded: int = triton.next_power_of_2(width)
    return max(64 if isinstance(rows, Fp8Entries) else 32, padded)


def compress_at_once(
    kv: Tensor, gate: Tensor, ring: TokenRing, first: int | Tensor, ratio: int, norm: Tensor, eps: float, freqs: Tensor,
    rounding: Rounding, rows: Rows, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Take t tokens and write the entries that they close: `kernels.compress.reference.compress_at_once`.

    `first` may be a tensor, [] int64 on the device. Whether the entries fit the cache is then for the caller to see to,
    and of the rows returned, ``t // ratio + 1``, those of windows that are not closed hold anything.
    """
    (t, columns), width = kv.shape, norm.shape[0]
    series, held = columns // width, ring.kv.shape[0]
    rope = 2 * freqs.shape[0]
    assert columns == ring.kv.shape[1] == series * width, f"{columns} columns, want 1 or 2 x {width}"
    assert series in {1, 2}, f"{series} series of {width} columns"
    assert held >= series * ratio, f"a ring of {held} tokens, an entry reads {series * ratio}"
    assert dtype in {torch.float32, torch.bfloat16}, f"a run in {dtype}"
    assert rope <= width, f"{rope} columns to rotate, of {width}"
    assert width % 2 == 0, f"{width} columns"
    assert rounding != "kv" or (width - rope) % 64 == 0, f"{width - rope} columns are no multiple of 64"
    assert rounding != "index" or (width >= 32 and width & (width - 1) == 0), f"{width} is no power of two from 32 on"
    assert rows.shape[1] == width, f"rows of {rows.shape[1]}, want {width}"
    assert all(part.is_contiguous() for part in ring), "the ring is written in place"
    if not isinstance(first, Tensor):
        assert (first + t) // ratio <= rows.shape[0], f"{rows.shape[0]} rows for {first + t} tokens"
    count = t // ratio + 1 if isinstance(first, Tensor) else (first + t) // ratio - first // ratio
    out = torch.empty(t // ratio + 1, width, dtype=dtype, device=kv.device)
    first = position(first, kv.device)
    if not t:
        return out[:0]
    values, tail, scales, form = planes(rows)
    state = kv.contiguous(), gate.contiguous(), *ring, first
    tile = min(TOKENS, triton.next_power_of_2(ratio * series))
    block = max(64 if rounding == "kv" else 32, _block(width, rows))
    few = t <= held - series * ratio + 1  # no row that an entry of this call reads is written
    sizes = {"RATIO": ratio, "SERIES": series, "ROWS": held, "TOKENS": tile}
    constants = {"BLOCK": block, "LOG": block.bit_length() - 1, "ROUNDING": _ROUNDINGS[rounding], "FORM": form}
    constants |= {"DTYPE": tl.bfloat16 if dtype == torch.bfloat16 else tl.float32, "FEW": few}
    _compress[(triton.cdiv(t - 1, ratio) + 1,)](  # windows of t tokens, wherever in one they begin
        *state, norm, freqs, values, tail, scales, out, t, width, tail.shape[-1], scales.shape[-1], eps, rope // 2,
        width**-0.5, **sizes, **constants, UPCAST=UPCAST,
        num_warps=8 if tile * block > 2048 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    if not few:
        _keep[(triton.cdiv(columns, COLUMNS),)](
            *state, t, columns, ROWS=held, TOKENS=tile, BLOCK=COLUMNS, num_warps=4, enable_fp_fusion=False
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
