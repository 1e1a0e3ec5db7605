"""Differential attention: signal and noise are rows of one product, so that keys and values are read once.

A program has a tile of tokens and a KV head, and goes over the slots written before and then over the tokens' own keys,
up to its last token and from its first token's window on. The noise queries are made in registers. What is subtracted
and normed is what stands in registers at the end; where there are too few programs to fill the device, as in decode,
the slots are split among several, whose parts a second launch adds up in order.

Products take operands of 16 bits where queries and keys have them, noise queries rounded as the reference rounds them;
where either is float32, all are fp32.

Without noise queries a program has rows of the signal alone.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.differential.reference import Noise, Own, Past
from fathom.kernels.formats.triton_rounding import UPCAST, rounded

__all__ = ["Noise", "Own", "Past", "attend", "differential_attend"]

LOG2E = math.log2(math.e)
PROGRAMS = 132  # fewer than this are made more by splitting the slots
SPLITS = 8  # at most
TILE = 64  # keys
ROWS = 64  # of all streams, in prefill
LEAST = 16  # rows and columns of a product


@triton.jit
def _fold(peak, total, summed, logits, values, operand: tl.constexpr):
    """Fold logits [ROWS, TILE] and values [TILE, D] into a running softmax."""
    new = tl.maximum(peak, tl.max(logits, 1))
    base = tl.where(new == -float("inf"), 0.0, new)  # nothing is seen yet: exp2(-inf) and not exp2(NaN)
    mass = tl.exp2(logits - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(mass, 1)
    return new, total, tl.dot(mass.to(operand), values, summed * shrink[:, None], input_precision="ieee")


@triton.jit
def _queries(q, cos, sin, head, noisy, wanted, D: tl.constexpr):
    """Rows [rows, D] fp32 at `q` [rows], those of the noise stream turned by their head's angles."""
    pair = tl.arange(0, D // 2)
    at = q[:, None] + 2 * pair[None, :]
    a = tl.load(at, wanted[:, None], 0.0).to(tl.float32)
    b = tl.load(at + 1, wanted[:, None], 0.0).to(tl.float32)
    angle, turned = (head * (D // 2))[:, None] + pair[None, :], (wanted & noisy)[:, None]
    c = tl.load(cos + angle, turned, 1.0)
    s = tl.load(sin + angle, turned, 0.0)
    x = tl.where(turned, a * c - b * s, a)
    y = tl.where(turned, a * s + b * c, b)
    return tl.reshape(tl.join(x, y), (q.shape[0], D))


@triton.jit
def _finish(total, summed, lam, norm, eps, out, wanted, STREAMS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
            NORMED: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Store ``N(signal - lambda noise)`` of stacked rows [STREAMS ROWS, D] at `out` [ROWS], lambda at `lam` [ROWS]."""
    column = tl.arange(0, D)
    left = summed / tl.where(total == 0, 1.0, total)[:, None]
    if STREAMS == 2:
        signal, noise = tl.split(tl.permute(tl.reshape(left, (2, ROWS, D)), (1, 2, 0)))
        left = signal - tl.load(lam, wanted, 0.0).to(tl.float32)[:, None] * noise
    if NORMED:
        left = left * tl.rsqrt(tl.sum(left * left, 1) / D + eps)[:, None]
        left = left * tl.load(norm + column).to(tl.float32)[None, :]
    tl.store(out[:, None] + column[None, :], rounded(left, out.dtype.element_ty, UPCAST), wanted[:, None])


@triton.jit(do_not_specialize=["tokens", "slots", "window", "seen_token"])
def _attend(q, lam, cos, sin, norm, eps, keys, values, seen, own_keys, own_values, out, peaks, totals, sums,
            tokens, slots, window, q_token, q_head, key_head, key_slot, value_head, value_slot, seen_token,
            own_key_token, own_key_head, own_value_token, own_value_head, H: tl.constexpr, GROUP: tl.constexpr,
            STREAMS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
            SPLIT: tl.constexpr, SEEN: tl.constexpr, OWN: tl.constexpr, NORMED: tl.constexpr, WIDE: tl.constexpr,
            SCALE: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    ALL: tl.constexpr = STREAMS * ROWS
    operand = tl.float32 if WIDE else keys.dtype.element_ty
    head, split = tl.program_id(1).to(tl.int64), tl.program_id(2)  # head strides may be large
    first = tl.program_id(0).to(tl.int64) * TOKENS
    row, column = tl.arange(0, ALL) % ROWS, tl.arange(0, D)
    token, query_head = first + row // GROUP, head * GROUP + row % GROUP
    wanted = (row < TOKENS * GROUP) & (token < tokens)
    x = _queries(
        q + token * q_token + query_head * q_head, cos, sin, query_head, tl.arange(0, ALL) >= ROWS, wanted, D
    ).to(operand)
    peak = tl.full((ALL,), -float("inf"), tl.float32)
    total = tl.zeros((ALL,), tl.float32)
    summed = tl.zeros((ALL, D), tl.float32)
    slots_per_split = tl.cdiv(tl.cdiv(slots, TILE), tl.num_programs(2)) * TILE
    for start in range(split * slots_per_split, tl.minimum(slots, (split + 1) * slots_per_split), TILE):
        slot = start + tl.arange(0, TILE)
        inside = slot < slots
        if SEEN == 1:
            inside &= tl.load(seen + slot, inside, 0) != 0
        shown = tl.broadcast_to(inside[None, :], (ALL, TILE))
        if SEEN == 2:
            shown &= tl.load(seen + token[:, None] * seen_token + slot[None, :], wanted[:, None] & shown, 0) != 0
        place = slot.to(tl.int64)[:, None]
        key = tl.load(keys + head * key_head + place * key_slot + column[None, :], inside[:, None], 0.0).to(operand)
        logits = tl.where(shown, tl.dot(x, tl.trans(key), input_precision="ieee") * SCALE, -float("inf"))
        value = tl.load(values + head * value_head + place * value_slot + column[None, :], inside[:, None], 0.0)
        peak, total, summed = _fold(peak, total, summed, logits, value.to(operand), operand)
    if OWN:
        # the last part has the tokens' own keys, from the first token's window to the last token
        high = tl.where(split == tl.num_programs(2) - 1, tl.minimum(first + TOKENS, tokens), 0)
        for start in range(tl.maximum(first - window + 1, 0), high, TILE):
            other = start + tl.arange(0, TILE).to(tl.int64)
            inside = other < high
            shown = (other[None, :] <= token[:, None]) & (other[None, :] > token[:, None] - window) & inside[None, :]
            place = other[:, None] * own_key_token + head * own_key_head + column[None, :]
            key = tl.load(own_keys + place, inside[:, None], 0.0).to(operand)
            logits = tl.where(shown, tl.dot(x, tl.trans(key), input_precision="ieee") * SCALE, -float("inf"))
            place = other[:, None] * own_value_token + head * own_value_head + column[None, :]
            value = tl.load(own_values + place, inside[:, None], 0.0).to(operand)
            peak, total, summed = _fold(peak, total, summed, logits, value, operand)
    if SPLIT:
        block = (split * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(1) + head
        place = block.to(tl.int64) * ALL + tl.arange(0, ALL)
        tl.store(peaks + place, peak)
        tl.store(totals + place, total)
        tl.store(sums + place[:, None] * D + column[None, :], summed)
    else:
        row = tl.arange(0, ROWS)
        token, query_head = first + row // GROUP, head * GROUP + row % GROUP
        wanted = (row < TOKENS * GROUP) & (token < tokens)
        place = token * H + query_head
        _finish(total, summed, lam + place, norm, eps, out + place * D, wanted, STREAMS, ROWS, D, NORMED, UPCAST)


@triton.jit(do_not_specialize=["tokens", "splits"])
def _combine(lam, norm, eps, out, peaks, totals, sums, tokens, splits, H: tl.constexpr, GROUP: tl.constexpr,
             STREAMS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, NORMED: tl.constexpr,
             UPCAST: tl.constexpr):  # fmt: skip
    """Add up the parts of a tile's rows, one after the other, and finish."""
    ALL: tl.constexpr = STREAMS * ROWS
    head, column = tl.program_id(1).to(tl.int64), tl.arange(0, D)
    peak = tl.full((ALL,), -float("inf"), tl.float32)
    total = tl.zeros((ALL,), tl.float32)
    summed = tl.zeros((ALL, D), tl.float32)
    for split in range(splits):
        block = (split * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(1) + head
        place = block.to(tl.int64) * ALL + tl.arange(0, ALL)
        found = tl.load(peaks + place)
        new = tl.maximum(peak, found)
        base = tl.where(new == -float("inf"), 0.0, new)
        old, add = tl.exp2(peak - base), tl.exp2(found - base)
        total = total * old + tl.load(totals + place) * add
        summed = summed * old[:, None] + tl.load(sums + place[:, None] * D + column[None, :]) * add[:, None]
        peak = new
    row = tl.arange(0, ROWS)
    token = tl.program_id(0).to(tl.int64) * TOKENS + row // GROUP
    wanted = (row < TOKENS * GROUP) & (token < tokens)
    place = token * H + head * GROUP + row % GROUP
    _finish(total, summed, lam + place, norm, eps, out + place * D, wanted, STREAMS, ROWS, D, NORMED, UPCAST)


class _Cut(NamedTuple):
    """How a call is cut up: from shapes alone."""

    rows: int  # of a stream, of a program
    tokens: int  # of a program
    grid: tuple[int, int]  # tiles of tokens, KV heads
    splits: int  # programs that share the slots of a tile


def _cut(t: int, heads: int, kv: int, slots: int, streams: int) -> _Cut:
    group = heads // kv
    tokens = min(t, max(1, ROWS // streams // group))
    rows = max(LEAST // streams, triton.next_power_of_2(group * tokens))
    grid = (triton.cdiv(t, rows // group), kv)
    splits = max(1, min(SPLITS, triton.cdiv(slots, TILE), PROGRAMS // max(1, grid[0] * kv)))
    return _Cut(rows, rows // group, grid, splits)


def attend(q: Tensor, noise: Noise | None, past: Past, own: Own | None) -> Tensor:
    """Attend with grouped queries: `kernels.differential.cpu.attend`, [t, H, D] float32.

    Slots that no token may see are not read, see `differential_attend`, which says what is refused too.
    """
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    return _attended(out, q, noise, None, 0.0, past, own)


def attend_scratch(tokens: int, heads: int, kv_heads: int, d: int, slots: int, own: int, item: int) -> int:
    """Bytes allocated in `attend` of up to so many tokens, without noise queries: the result, and what splits find.

    A call that is split has no more than PROGRAMS programs. (Of a model noise queries are heads.)
    """
    del own, item
    cut, alone = _cut(tokens, heads, kv_heads, slots, 1), _cut(1, heads, kv_heads, slots, 1)
    programs = min(PROGRAMS, alone.splits * cut.grid[0] * kv_heads) if alone.splits > 1 else 0
    return tokens * heads * d * 4 + programs * cut.rows * (d + 2) * 4


def differential_attend(
    q: Tensor, noise: Noise, norm: Tensor | None, eps: float, past: Past, own: Own | None
) -> Tensor:
    """Attend and norm what remains: `kernels.differential.cpu.differential_attend`.

    Slots that no token may see (`past.seen` of [s]) may hold anything: they are not read. NotImplementedError for heads
    of less than 16 columns, or of no power of two.
    """
    return _attended(torch.empty_like(q, memory_format=torch.contiguous_format), q, noise, norm, eps, past, own)


def _attended(
    out: Tensor, q: Tensor, noise: Noise | None, norm: Tensor | None, eps: float, past: Past, own: Own | None
) -> Tensor:
    """Fill `out` [t, H, D]."""
    t, heads, d = q.shape
    kv, slots = past.keys.shape[:2]
    assert heads % kv == 0, f"{heads} query heads do not divide among {kv} KV heads"
    if d < LEAST or d & (d - 1):
        raise NotImplementedError(f"differential attention on a GPU: heads of {d}, want a power of two from 16 on")
    if t == 0:
        return out
    streams = 1 if noise is None else 2
    rows, tokens, grid, splits = _cut(t, heads, kv, slots, streams)
    parts = torch.empty(splits if splits > 1 else 0, *grid, streams * rows, d + 2, device=q.device).view(-1)
    size = parts.shape[0] // (d + 2)
    scratch = (parts[:size], parts[size : 2 * size], parts[2 * size :])
    q, keys, values = _in_rows(q), _in_rows(past.keys), _in_rows(past.values)
    own_keys, own_values, window = keys, values, t
    if own is not None:
        own_keys, own_values = (_in_rows(x.to(keys.dtype)) for x in (own.keys, own.values))
        window = t if own.window is None else own.window
    seen, kind = past.keys, 0
    if past.seen is not None:
        kind, seen = past.seen.ndim, past.seen.contiguous().view(torch.uint8)
    lam, cos, sin = (q, q, q) if noise is None else (x.contiguous() for x in noise)
    weight = q if norm is None else norm
    shared = {
        "H": heads, "GROUP": heads // kv, "STREAMS": streams, "ROWS": rows, "D": d, "TOKENS": tokens,
        "NORMED": norm is not None, "UPCAST": UPCAST, "enable_fp_fusion": False,
    }  # fmt: skip
    _attend[(*grid, splits)](
        q, lam, cos, sin, weight, eps, keys, values, seen, own_keys, own_values, out, *scratch, t, slots, window,
        *q.stride()[:2], *keys.stride()[:2], *values.stride()[:2], slots if kind == 2 else 0, *own_keys.stride()[:2],
        *own_values.stride()[:2], **shared, TILE=TILE, SPLIT=splits > 1, SEEN=kind, OWN=own is not None,
        SCALE=d**-0.5 * LOG2E, WIDE=UPCAST or torch.float32 in (q.dtype, keys.dtype),
        num_warps=4 if streams * rows <= 64 else 8, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _combine[grid](lam, weight, eps, out, *scratch, t, splits, **shared, num_warps=4)
    return out


def _in_rows(x: Tensor) -> Tensor:
    """`x` with its last dim in order, a copy where it is not."""
    return x if x.stride(-1) == 1 else x.contiguous()
