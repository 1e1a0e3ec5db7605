"""Shared-KV attention: a tile of (token, head) rows against tiles of keys, each loaded once for both of its products.

A program holds up to 64 rows: some heads of one token, or all heads of several where there are few. It walks over tiles
of the window, then of the entries (in place, or gathered where they are selected), and keeps a running softmax (peak,
total, value, all fp32; logits and peaks count in powers of two). Where rows are few, the tiles are dealt to several
programs a row tile, one to each in turn, and a second kernel merges what they found: how many programs follows from
shapes, and how many tiles from the position, read on the device. A tile beyond these, of which no row sees anything,
changes no number, and so none depends on how many entries there might be. Masks are for tiles at the border of what
the rows see.

The sink enters once, at the end. Masses are rounded to bf16 before they multiply bf16 keys; their sum is of what they
were before. As in `kernels.attention.cpu`, rows that no token of the tile may see are not read, whatever they hold,
and NaN in any other row reaches every token of the tile: more than saw it where a tile has several, but never fewer.

`CodedRows` are attended to as they are stored: their tiles come first, met by queries that were rotated, and what they
sum to is rotated back, a row at once, before the window's tiles are added to it. A row's length multiplies its logit
and its mass, so that the operand of both products is its centroids, of fp16 where the others are bf16.

`BasisRows` are too, in programs of their own: what these sum to is brought back by a matrix product, before it is
merged with what the window's programs found. The layer's mean has coefficients in its basis, which are added to a
row's, so that it is no case of its own.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from fathom.kernels.attention import launch as attention_launch
from fathom.kernels.formats import lloyd_max
from fathom.kernels.formats.stored import BasisRows, CodedRows, Fp8Entries, Rows, Slots
from fathom.kernels.formats.triton import centroids, e4m3, e8m0, hadamard, rotated_query, unit
from fathom.kernels.formats.triton_rounding import UPCAST, rounded
from fathom.kernels.position import position
from fathom.kernels.quantise.triton import hadamard as hadamard_rows
from fathom.kernels.target import blackwell

GROUP = tl.constexpr(attention_launch.WIDTH)  # columns of Fp8Entries to a scale
DECODED = 8  # rows of Fp8Entries that a program decodes
LEAST = 16  # columns of coded rows: what a product takes
_TENSOR = tl.constexpr(attention_launch.TENSOR)
_FP8 = tl.constexpr(attention_launch.FP8)
_CODED = tl.constexpr(attention_launch.CODED)
_BASED = tl.constexpr(attention_launch.BASED)
QUERIES = 1 << 15  # (token, head) rows of queries that exist in a basis at a time
LAST = tl.constexpr(torch.iinfo(torch.int32).max)
LOG2E = tl.constexpr(math.log2(math.e))
LIMIT = tl.constexpr(torch.finfo(torch.float32).max)  # of peaks, which stay finite so that none differ by inf - inf


@triton.jit
def _plain(rows, loaded, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, OPERAND: tl.constexpr):
    """The rows that begin at addresses `rows`, as the operand of a dot: [keys, BLOCK_D], 0 where not loaded."""
    column = tl.arange(0, BLOCK_D)
    inside = loaded[:, None]
    if WIDTH != BLOCK_D:
        inside &= (column < WIDTH)[None, :]
    return tl.load(rows[:, None] + column[None, :], inside, 0.0).to(OPERAND)


@triton.jit
def _listed(selected, key, token, picks, stride, SELECTED: tl.constexpr):
    """Entries that stand at places `key` of a token's list; the list of all of them is every entry in order."""
    if SELECTED:
        key = tl.load(selected + token.to(tl.int64) * stride + key, key < picks, -1)
    return key


@triton.jit
def _fp8(
    values, rope, scale, index, loaded, values_stride, rope_stride, scale_stride,
    WIDTH: tl.constexpr, NOPE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, OPERAND: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Rows `index` of `Fp8Entries` decoded: [keys, BLOCK_D]. bf16 holds E4M3 times a power of two exactly."""
    group = tl.arange(0, BLOCK_D // GROUP)
    column = tl.arange(0, GROUP)
    row = index.to(tl.int64)
    stored = loaded[:, None] & (group < NOPE // GROUP)[None, :]
    at = row[:, None] * values_stride + group[None, :] * GROUP
    code = tl.load(values + at[:, :, None] + column[None, None, :], stored[:, :, None], 0)
    power = e8m0(tl.load(scale + row[:, None] * scale_stride + group[None, :], stored, 127))
    narrow = (e4m3(code, tl.float32, UPCAST) * power[:, :, None]).to(OPERAND)
    inside = loaded[:, None] & (column < WIDTH - NOPE)[None, :]
    last = tl.load(rope + row[:, None] * rope_stride + column[None, :], inside, 0.0).to(OPERAND)
    wide = tl.where((group == NOPE // GROUP)[None, :, None], last[:, None, :], narrow)
    return tl.reshape(wide, (BLOCK_N, BLOCK_D))


@triton.jit(do_not_specialize=["n"])
def _decode(
    values, rope, scale, out, n, values_stride, rope_stride, scale_stride,
    WIDTH: tl.constexpr, NOPE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A tile of rows of `Fp8Entries`, to bf16."""
    row, column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    keys = _fp8(
        values, rope, scale, row, row < n, values_stride, rope_stride, scale_stride,
        WIDTH, NOPE, BLOCK_D, BLOCK_N, tl.float32 if UPCAST else tl.bfloat16, UPCAST,
    )  # fmt: skip
    place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out + place, rounded(keys, tl.bfloat16, UPCAST), (row < n)[:, None] & (column < WIDTH)[None, :])


@triton.jit
def _coefficients(
    codes, rope, gain, norm, table, places, factors, index, loaded, codes_stride, rope_stride,
    NOPE: tl.constexpr, ROPE: tl.constexpr, BLOCK_D: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """Rows `index` of `BasisRows` as stored, [keys, BLOCK_D]: coefficients with those of the mean, then rope dims.

    Of a column `places` says at which bit its code begins, how many there are, and where its codebook is in `table`;
    `factors` by what a centroid is multiplied, and what is added.
    """
    column = tl.arange(0, BLOCK_D)
    bit, bits = tl.load(places + column), tl.load(places + BLOCK_D + column)
    book = tl.load(places + 2 * BLOCK_D + column)
    row, nope = index.to(tl.int64)[:, None], (column < NOPE)[None, :]
    at = tl.where(nope, codes + row * codes_stride, rope + row * rope_stride) + (bit // 8)[None, :]
    shift, inside = (bit % 8)[None, :], loaded[:, None] & (bits > 0)[None, :]
    word = tl.load(at, inside, 0).to(tl.int32)
    word |= tl.load(at + 1, inside & (shift + bits[None, :] > 8), 0).to(tl.int32) << 8
    centroid = tl.load(table + book[None, :] + ((word >> shift) & ((1 << bits) - 1)[None, :]))
    of_nope = tl.load(gain + index, loaded, 0.0).to(tl.float32)[:, None]
    of_rope = tl.load(norm + index, loaded, 0.0).to(tl.float32)[:, None] * (ROPE**-0.5)
    scaled = centroid * tl.load(factors + column)[None, :] * tl.where(nope, of_nope, of_rope)
    return (scaled + tl.load(factors + BLOCK_D + column)[None, :]).to(FINE)


@triton.jit
def _whole(at, first, low, high, BLOCK_N: tl.constexpr, SELECTED: tl.constexpr):
    """Whether all keys of a tile stand `at` places between `low` and `high`: from `first` on, unless SELECTED."""
    if SELECTED:
        found = tl.min(((at > low) & (at < high)).to(tl.int32)) == 1
    else:
        found = (first > low) & (first + BLOCK_N <= high)
    return found


@triton.jit
def _fold(
    q, keys, at, low, high, whole, bias, length, peak, total, value, scale,
    BIASED: tl.constexpr, LONG: tl.constexpr, NARROW: tl.constexpr, OPERAND: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Fold a tile of keys into the running softmax; LONG: keys are to be multiplied by their `length`, in fp16.

    A row sees the keys that stand `at` places between its `low` and its `high`; `whole`: every row sees all of them.
    """
    logits = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if LONG:
        logits *= length[None, :]
    if not whole:
        seen = (at[None, :] > low[:, None]) & (at[None, :] < high[:, None])
        logits = tl.where(seen, logits, float("-inf"))
    if BIASED:
        logits = logits * scale[:, None] + bias[None, :] * LOG2E
        higher = tl.maximum(peak, tl.max(logits, 1))
        mass = tl.exp2(logits - higher[:, None])
    else:  # a scale is above 0
        higher = tl.maximum(peak, tl.max(logits, 1) * scale)
        mass = tl.exp2(tl.fma(logits, scale[:, None], -higher[:, None]))
    shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(mass, 1)
    if LONG:
        mass *= length[None, :]
    if NARROW:
        mass = rounded(mass, tl.float16 if LONG else tl.bfloat16, UPCAST)
    value = tl.dot(mass.to(OPERAND), keys, value * shrink[:, None], input_precision="ieee")
    return higher, total, value


@triton.jit
def _with_sink(peak, total, sink):
    """Total with the sink among it, and by how much what was summed below the old peak shrinks."""
    sink *= LOG2E
    higher = tl.maximum(peak, tl.minimum(tl.maximum(sink, -LIMIT), LIMIT))
    shrink = tl.exp2(peak - higher)
    return total * shrink + tl.exp2(sink - higher), shrink


@triton.jit(do_not_specialize=["tokens", "n", "picks", "selected_stride", "splits"])
def _attend(
    q, ring, first, entries, rope, scales, norm, table, places, signs, bias, selected, sink, out, peaks,
    totals, sums, tokens, heads, capacity, ring_stride, window, n, ratio, hidden, picks,
    entries_stride, rope_stride, scales_stride, selected_stride, scale, splits,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, NOPE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, ENTRIES: tl.constexpr, FORM: tl.constexpr, BITS: tl.constexpr, STEPS: tl.constexpr,
    SIGNED: tl.constexpr, ALIGNED: tl.constexpr, SELECTED: tl.constexpr, BIASED: tl.constexpr, SPLIT: tl.constexpr,
    OPERAND: tl.constexpr, FINE: tl.constexpr, NARROW: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """FINE is the operand of products with codes. Of `BasisRows` the window is not attended to here."""
    ROWS: tl.constexpr = TOKENS * HEADS
    head_tiles = tl.cdiv(heads, HEADS)
    begin_token = tl.program_id(0) // head_tiles * TOKENS
    pair = tl.arange(0, TOKENS * HEADS)
    token = begin_token + pair // HEADS
    head = tl.program_id(0) % head_tiles * HEADS + pair % HEADS
    wanted = (token < tokens) & (head < heads)
    row = token.to(tl.int64) * heads + head
    column = tl.arange(0, BLOCK_D)
    if FORM < _CODED:
        queries = _plain(q + row * WIDTH, wanted, WIDTH, BLOCK_D, OPERAND)

    start = tl.load(first)
    newest = start + tl.minimum(begin_token + TOKENS, tokens) - 1  # position
    oldest = tl.maximum(start + begin_token - window + 1, 0)
    span = (newest + 1 - oldest).to(tl.int32)
    position = start + tl.minimum(token if TOKENS > 1 else begin_token + tl.arange(0, 1), tokens - 1)
    recent_high = (position - oldest + 1).to(tl.int32)  # counted from the oldest that the tile sees
    recent_low = recent_high - window - 1
    window_tiles = 0 if FORM == _BASED else tl.cdiv(span, BLOCK_N)
    tiles, visible = window_tiles, recent_high
    if ENTRIES:
        visible = tl.minimum((position + 1) // ratio - hidden, n).to(tl.int32)
        most = tl.minimum((newest + 1) // ratio - hidden, n).to(tl.int32)
        tiles += tl.cdiv(picks if SELECTED else tl.maximum(most, 0), BLOCK_N)
    # every so many tiles are a program's: more tiles, of which no row sees anything, change no number
    begin, step = tl.program_id(1), splits if SPLIT else 1
    begin_entries = begin + tl.cdiv(tl.maximum(window_tiles - begin, 0), step) * step
    none, all_visible = tl.full(visible.shape, -1, tl.int32), tl.min(visible)

    peak = tl.full((TOKENS * HEADS,), -LIMIT, tl.float32)
    total = tl.zeros((TOKENS * HEADS,), tl.float32)
    value = tl.zeros((TOKENS * HEADS, BLOCK_D), tl.float32)
    scale = tl.full((TOKENS * HEADS,), 1.0, tl.float32) * scale
    if FORM == _CODED:
        turned, size = rotated_query(
            _plain(q + row * WIDTH, wanted, WIDTH, BLOCK_D, tl.float32), signs, ROWS, BLOCK_D, STEPS, SIGNED
        )  # fmt: skip
        turned = turned.to(FINE)
        for tile in tl.range(begin_entries, tiles, step):
            key = (tile - window_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
            entry = _listed(selected, key, begin_token, picks, selected_stride, SELECTED)
            present = (entry >= 0) & (entry < most)
            keys = centroids(entries, table, entry, present, BLOCK_D, BITS)
            length = tl.load(norm + entry, present, 0.0).to(tl.float32) * (WIDTH**-0.5)
            more = tl.load(bias + entry, present, 0.0) if BIASED else None
            whole = _whole(entry, (tile - window_tiles) * BLOCK_N, -1, all_visible, BLOCK_N, SELECTED)
            peak, total, value = _fold(
                turned, keys, entry, none, visible, whole, more, length, peak, total, value, size * scale,
                BIASED, LONG=True, NARROW=NARROW, OPERAND=FINE, UPCAST=UPCAST,
            )  # fmt: skip
        value = hadamard(value, ROWS, BLOCK_D, STEPS) * (WIDTH**-0.5)
        if SIGNED:
            value *= tl.load(signs + column)[None, :]
        queries = _plain(q + row * WIDTH, wanted, WIDTH, BLOCK_D, OPERAND)
    if FORM == _BASED:
        wide = _plain(q + row * WIDTH, wanted, WIDTH, BLOCK_D, tl.float32)
        size = unit(tl.max(tl.abs(wide), 1))
        queries, length = (wide / size[:, None]).to(FINE), tl.full((BLOCK_N,), 1.0, tl.float32)
        for tile in tl.range(begin, tiles, step):
            key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            entry = _listed(selected, key, begin_token, picks, selected_stride, SELECTED)
            present = (entry >= 0) & (entry < most)
            keys = _coefficients(
                entries, rope, scales, norm, table, places, signs, entry, present, entries_stride, rope_stride,
                NOPE, WIDTH - NOPE, BLOCK_D, FINE,
            )  # fmt: skip
            more = tl.load(bias + entry, present, 0.0) if BIASED else None
            whole = _whole(entry, tile * BLOCK_N, -1, all_visible, BLOCK_N, SELECTED)
            peak, total, value = _fold(
                queries, keys, entry, none, visible, whole, more, length, peak, total, value, size * scale,
                BIASED, LONG=True, NARROW=NARROW, OPERAND=FINE, UPCAST=UPCAST,
            )  # fmt: skip
    if FORM != _BASED:
        first_row, all_low, all_high = (oldest % capacity).to(tl.int32), tl.max(recent_low), tl.min(recent_high)
        BOTH: tl.constexpr = ENTRIES and FORM == _TENSOR  # in one loop, whose keys are fetched ahead across the border
        for tile in tl.range(begin, tiles if BOTH else window_tiles, step):
            ahead = tile * BLOCK_N
            at = ahead + tl.arange(0, BLOCK_N)
            base, stride, turn, end, count = ring, ring_stride, first_row, capacity, span
            low, high, lowest, highest = recent_low, recent_high, all_low, all_high
            if BOTH:
                recent = tile < window_tiles
                ahead -= tl.where(recent, 0, window_tiles * BLOCK_N)
                at = ahead + tl.arange(0, BLOCK_N)
                if SELECTED:
                    listed = _listed(selected, at, begin_token, tl.where(recent, 0, picks), selected_stride, SELECTED)
                    at = tl.where(recent, at, listed)
                base, stride = tl.where(recent, base, entries), tl.where(recent, stride, entries_stride)
                turn, end = tl.where(recent, turn, 0), tl.where(recent, end, LAST)
                count = tl.where(recent, count, most)
                low, high = tl.where(recent, low, none), tl.where(recent, high, visible)
                lowest, highest = tl.where(recent, lowest, -1), tl.where(recent, highest, all_visible)
            present = (at >= 0) & (at < count)
            line = at + turn
            line = tl.where(line >= end, line - end, line)
            begins = base + line.to(tl.int64) * stride
            if BOTH and ALIGNED:  # which the compiler no longer sees behind the choice, and fetches nothing ahead
                begins = tl.multiple_of(begins, 16)
            keys = _plain(begins, present, WIDTH, BLOCK_D, OPERAND)
            # the interpreter makes int32 of a scalar's comparison
            of_entry = present & (tile + tl.zeros_like(at) >= window_tiles)
            more = tl.load(bias + at, of_entry, 0.0) if BOTH and BIASED else None
            whole = _whole(at, ahead, lowest, highest, BLOCK_N, BOTH and SELECTED)
            peak, total, value = _fold(
                queries, keys, at, low, high, whole, more, None, peak, total, value, scale,
                BOTH and BIASED, LONG=False, NARROW=NARROW, OPERAND=OPERAND, UPCAST=UPCAST,
            )  # fmt: skip
    if FORM == _FP8:
        for tile in tl.range(begin_entries, tiles, step):
            key = (tile - window_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
            entry = _listed(selected, key, begin_token, picks, selected_stride, SELECTED)
            present = (entry >= 0) & (entry < most)
            keys = _fp8(
                entries, rope, scales, entry, present, entries_stride, rope_stride, scales_stride,
                WIDTH, NOPE, BLOCK_D, BLOCK_N, OPERAND, UPCAST,
            )  # fmt: skip
            more = tl.load(bias + entry, present, 0.0) if BIASED else None
            whole = _whole(entry, (tile - window_tiles) * BLOCK_N, -1, all_visible, BLOCK_N, SELECTED)
            peak, total, value = _fold(
                queries, keys, entry, none, visible, whole, more, None, peak, total, value, scale,
                BIASED, LONG=False, NARROW=NARROW, OPERAND=OPERAND, UPCAST=UPCAST,
            )  # fmt: skip

    inside = wanted[:, None] & (column < WIDTH)[None, :]
    if SPLIT:
        place = tl.program_id(1).to(tl.int64) * tokens * heads + row
        used = wanted & (begin + tl.zeros_like(pair) < tiles)  # the interpreter makes int32 of a scalar's comparison
        tl.store(peaks + place, peak, wanted)
        tl.store(totals + place, tl.where(used, total, -1.0), wanted)  # -1: no tile fell to this program
        tl.store(sums + place[:, None] * WIDTH + column[None, :], value, inside & used[:, None])
    else:
        total, shrink = _with_sink(peak, total, tl.load(sink + head, head < heads, 0.0))
        value = value * shrink[:, None] / total[:, None]
        tl.store(out + row[:, None] * WIDTH + column[None, :], rounded(value, out.dtype.element_ty, UPCAST), inside)


@triton.jit(do_not_specialize=["rows", "splits"])
def _merge(
    peaks, totals, sums, sink, out, rows, heads, splits,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Merge what the programs of a row found, in their order, and the sink: BLOCK_D columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    split = tl.arange(0, SPLITS)
    total = tl.load(totals + split * rows + row, split < splits, -1.0)
    used = total != -1
    peak = tl.load(peaks + split * rows + row, used, -LIMIT)
    highest = tl.max(peak, 0)
    total = tl.sum(tl.where(used, total * tl.exp2(peak - highest), 0.0), 0)
    total, shrink = _with_sink(highest, total, tl.load(sink + row % heads))
    value = tl.zeros((BLOCK_D,), tl.float32)
    for begin in tl.range(0, tl.max(tl.where(used, split + 1, 0), 0), CHUNK):
        some = begin + tl.arange(0, CHUNK)
        at = some * rows + row
        there = tl.load(totals + at, some < splits, -1.0) != -1
        weight = tl.exp2(tl.load(peaks + at, there, -LIMIT) - highest)
        inside = there[:, None] & (column < WIDTH)[None, :]
        part = tl.load(sums + at[:, None] * WIDTH + column[None, :], inside, 0.0)
        value += tl.sum(tl.where(inside, part * weight[:, None], 0.0), 0)
    value = value * shrink / total
    tl.store(out + row * WIDTH + column, rounded(value, out.dtype.element_ty, UPCAST), column < WIDTH)


class _Planes(NamedTuple):
    """Entries as the kernel takes them; of what a form does not have, any tensor."""

    form: int
    values: Tensor  # rows, E4M3 values, or codes
    rope: Tensor  # [n, r] of Fp8Entries
    scales: Tensor  # [n, g] of Fp8Entries; gains [n] of BasisRows
    norm: Tensor  # [n] of CodedRows, or of rope dims
    table: Tensor  # [2^bits], centroids; of all bits, one after the other
    places: Tensor  # [3, columns] int32 of BasisRows
    signs: Tensor | None  # [d] of CodedRows, or none; [2, columns] float32, factors of BasisRows
    bits: int
    nope: int = 0  # columns of BasisRows before the rope dims


def _planes(rows: Rows, *, narrow: bool) -> _Planes:
    """The tensors of entries; `narrow`: those that products take are of 16 bits."""
    match rows:
        case Tensor():
            rows = _rows(rows)
            return _Planes(_TENSOR.value, rows, rows, rows, rows, rows, rows, None, 0)
        case Fp8Entries(values, rope, scale):
            assert rope.shape[1] <= GROUP.value, f"{rope.shape[1]} rope dims, want {GROUP.value} at most"
            values, rope = _rows(values.view(torch.uint8)), _rows(rope)
            scale, nope = _rows(scale.view(torch.uint8)), values.shape[1]
            return _Planes(_FP8.value, values, rope, scale, rope, rope, rope, None, 0, nope)
        case CodedRows(norm, codes, bits, signs):
            if rows.shape[1] < LEAST:
                raise NotImplementedError(f"attention in Triton: coded rows of {rows.shape[1]}, want {LEAST} at least")
            table = lloyd_max.rounded_codebook(bits, torch.float16 if narrow else torch.float32, codes.device)
            return _Planes(_CODED.value, codes.contiguous(), table, table, norm.contiguous(), table, table, signs, bits)
        case BasisRows(nope, gain, rope):
            columns, norm, gain = _columns(rows), rope.norm.contiguous(), gain.contiguous()
            codes, rope_codes, p = nope.codes.contiguous(), rope.codes.contiguous(), nope.basis.shape[0]
            return _Planes(
                _BASED.value, codes, rope_codes, gain, norm, columns.table, columns.places, columns.factors, 0, p
            )
        case _:
            raise NotImplementedError(f"attention in Triton reads no {type(rows).__name__}")


def _decoded(rows: _Planes) -> Tensor:
    """Those of `Fp8Entries` in bf16: the numbers that the loop would make.

    The memory has room for a power of two of them: of entries that grow with each call, else no freed block would fit.
    """
    n, nope = rows.values.shape
    width = nope + rows.rope.shape[1]
    out = torch.empty(triton.next_power_of_2(n), width, dtype=torch.bfloat16, device=rows.values.device)[:n]
    _decode[(triton.cdiv(n, DECODED),)](
        rows.values, rows.rope, rows.scales, out, n, *(plane.stride(0) for plane in rows[1:4]), WIDTH=width, NOPE=nope,
        BLOCK_D=max(attention_launch.WIDTH, triton.next_power_of_2(width)), BLOCK_N=DECODED, UPCAST=UPCAST,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


class _Columns(NamedTuple):
    """How the columns of a layer's `BasisRows` are stored."""

    places: Tensor  # [3, width] int32: first bit of a code, bits of it, and where its codebook begins
    factors: Tensor  # [2, width] float32: by what a centroid is multiplied, and what is added, of the mean
    table: Tensor  # [511] float32: the codebooks of 1 to 8 bits, and a 0 for what is not stored


_OF_BASES = WeakTensorKeyDictionary()  # what `_columns` found, by the basis of a layer


def _columns(rows: BasisRows) -> _Columns:
    """Of a layer, found once: the mean's coefficients are those with which the basis gives the mean."""
    keys = rows.nope
    if keys.basis not in _OF_BASES:
        p, bits = keys.basis.shape[0], keys.bits.long().repeat_interleave(keys.basis.shape[1] // len(keys.bits))
        bits = torch.cat((bits, torch.full((rows.rope.shape[1],), rows.rope.bits)))
        begin = torch.cat([part.cumsum(0) - part for part in bits.split([p, len(bits) - p])])
        book = torch.where(bits > 0, 2**bits - 2, 510)
        width = max(attention_launch.WIDTH, triton.next_power_of_2(len(bits)))
        beyond = (0, width - len(bits))
        places = torch.stack((pad(begin, beyond), pad(bits, beyond), pad(book, beyond, value=510)))
        basis, scales = keys.basis.cpu().double(), keys.basis_scale.cpu().double()
        mean = torch.linalg.solve(basis * scales, keys.mean.cpu().double())
        added = torch.cat((mean, torch.zeros(len(bits) - p)))
        scale = torch.cat((keys.scale.cpu().double(), torch.ones(len(bits) - p)))
        factors = torch.stack((pad(scale, beyond), pad(added, beyond))).float()
        table = torch.cat([lloyd_max.codebook(b, torch.device("cpu")) for b in lloyd_max.BITS] + [torch.zeros(1)])
        device = keys.codes.device
        _OF_BASES[keys.basis] = _Columns(places.int().to(device), factors.to(device), table.to(device))
    found: _Columns = _OF_BASES[keys.basis]
    return found


def _rows(x: Tensor) -> Tensor:
    """`x` [n, d] with its columns side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _aligned(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def attend(
    q: Tensor,
    ring: Tensor,
    first: int | Tensor,
    window: int,
    entries: Rows | Slots | None,
    ratio: int,
    selected: Tensor | None,
    sink: Tensor,
) -> Tensor:
    """Attend from each token to its window and to compressed entries: `kernels.attention.reference.attend`.

    `first` may be a [] int64 on the device; `entries` may then be given at full capacity, for rows that are not
    visible are not read. `q`, `ring` and `entries` are bfloat16 or float32, a tensor of entries as `ring` is; products
    are of bf16 where all are, and of fp16 with `CodedRows` and `BasisRows`, of which a number of 65 520 or more is
    infinite.
    That the entries of a row of `selected` are distinct is not checked: one that comes twice counts twice.

    Raises
    ------
    NotImplementedError
        If entries are `CodedRows` of less than 16 columns, or in a form of index keys.

    """
    t, h, d = q.shape
    capacity = ring.shape[0]
    assert capacity >= window + t - 1, f"a ring of {capacity} cannot hold window {window} and {t} new tokens"
    assert sink.dtype == torch.float32, f"sink: {sink.dtype}, want float32"
    assert selected is None or selected.dtype == torch.int32, f"selected: {selected.dtype}, want int32"
    slots = entries if isinstance(entries, Slots) else Slots(ring[:0] if entries is None else entries, None, 0)
    dtypes = {q.dtype, ring.dtype} | ({slots.rows.rope.dtype} if isinstance(slots.rows, Fp8Entries) else set())
    if isinstance(slots.rows, Tensor):
        assert slots.rows.dtype == ring.dtype, f"{slots.rows.dtype} entries, {ring.dtype} ring"
    assert dtypes <= {torch.bfloat16, torch.float32}, f"{dtypes}: want bfloat16 or float32"
    narrow = dtypes == {torch.bfloat16}
    rows, n = _planes(slots.rows, narrow=narrow), slots.rows.shape[0]
    most = n if selected is None else min(n, selected.shape[1])
    if narrow and rows.form == _FP8.value and attention_launch.ahead(t, n, most):
        rows = _planes(_decoded(rows), narrow=narrow)
    bias = None if slots.bias is None else slots.bias.contiguous()
    selected = None if selected is None else _rows(selected)
    given = _Given(rows, entries is not None, bias, slots.hidden, ratio, selected, _rows(ring), window, narrow)
    q, first, sink = q.contiguous(), position(first, q.device), sink.contiguous()
    out = torch.empty(t, h, d, dtype=q.dtype, device=q.device)
    if t == 0:
        return out
    if isinstance(slots.rows, BasisRows) and given.most > 0:
        step = max(1, QUERIES // h)
        for start in range(0, t, step):
            part = slice(start, start + step)
            _attend_in_basis(out[part], q[part], slots.rows, given.of(part), first + start, sink)
        return out
    cut = given.cut(q)
    found = _Parts.empty(cut.splits, q) if cut.splits > 1 else _Parts(sink, sink, sink)
    _run(q, first, given, cut, sink, out, found, split=cut.splits > 1)
    if cut.splits > 1:
        _merged(out, found, sink, cut.splits)
    return out


class _Parts(NamedTuple):
    """What programs found of each row."""

    peaks: Tensor  # [splits, t, h] float32
    totals: Tensor  # [splits, t, h]; -1: no tile fell to a program
    sums: Tensor  # [splits, t, h, d]

    @classmethod
    def empty(cls, splits: int, q: Tensor) -> "_Parts":
        """Allocate those of `splits` programs of each row, each apart: a pointer's alignment is compiled in."""
        peaks, totals = (torch.empty(splits, *q.shape[:2], dtype=torch.float32, device=q.device) for _ in range(2))
        return cls(peaks, totals, torch.empty(splits, *q.shape, dtype=torch.float32, device=q.device))

    def of(self, splits: slice) -> "_Parts":
        """Those of some programs."""
        return _Parts(*(part[splits] for part in self))


class _Given(NamedTuple):
    """What tokens attend to."""

    rows: _Planes
    entries: bool  # whether there may be any, if not yet
    bias: Tensor | None
    hidden: int
    ratio: int
    selected: Tensor | None
    ring: Tensor
    window: int
    narrow: bool

    @property
    def most(self) -> int:
        """Entries that a token sees at most."""
        n = self.rows.values.shape[0]
        return n if self.selected is None else min(n, self.selected.shape[1])

    @property
    def used(self) -> bool:
        """Whether the kernel looks for entries: the same before the first of them, but of those in a basis."""
        return self.entries and (self.most > 0 or self.rows.form != _BASED.value)

    @property
    def form(self) -> int:
        """How entries are stored; where none are looked for, as a tensor."""
        return self.rows.form if self.used else _TENSOR.value

    def of(self, tokens: slice) -> "_Given":
        """The same for some of the tokens."""
        return self._replace(selected=None if self.selected is None else self.selected[tokens])

    def cut(self, q: Tensor) -> attention_launch.Launch:
        """How a call of queries is cut up; entries in a basis are attended to without the window."""
        window, shared = (0 if self.form == _BASED.value else self.window), self.selected is None or not self.used
        t, h, d = q.shape
        return attention_launch.launch(
            t, h, d, window, self.most, narrow=self.narrow, form=self.form, shared=shared, wide=not blackwell()
        )


def _run(
    q: Tensor, first: Tensor, given: _Given, cut: attention_launch.Launch, sink: Tensor, out: Tensor, found: _Parts, *,
    split: bool,
) -> None:  # fmt: skip
    (t, h, d), (rows, _, bias, hidden, ratio, selected, ring, window, _) = q.shape, given
    picks, picks_stride = (0, 0) if selected is None else (selected.shape[1], selected.stride(0))
    _attend[(cut.programs, cut.splits)](
        q, ring, first, *rows[1:7], q if rows.signs is None else rows.signs, bias, selected, sink, out, *found,
        t, h, ring.shape[0], ring.stride(0), window, rows.values.shape[0], ratio, hidden, picks,
        rows.values.stride(0), rows.rope.stride(0), rows.scales.stride(0), picks_stride, d**-0.5 * LOG2E.value,
        cut.splits,
        TOKENS=cut.tokens, HEADS=cut.heads, WIDTH=d, NOPE=rows.nope, BLOCK_N=cut.keys, BLOCK_D=cut.width,
        ENTRIES=given.used, FORM=given.form, BITS=rows.bits, STEPS=d.bit_length() - 1,
        SIGNED=rows.signs is not None, ALIGNED=_aligned(ring) and _aligned(rows.values), SELECTED=selected is not None,
        BIASED=bias is not None and given.used, SPLIT=split,
        OPERAND=tl.bfloat16 if cut.narrow and not UPCAST else tl.float32,
        FINE=tl.float16 if cut.narrow else tl.float32, NARROW=cut.narrow, UPCAST=UPCAST,
        num_warps=8 if cut.tokens * cut.heads * cut.width >= 64 * 256 else 4, num_stages=cut.stages,
        enable_fp_fusion=False,
    )  # fmt: skip


def _merged(out: Tensor, found: _Parts, sink: Tensor, splits: int) -> None:
    """Fill `out` [t, h, d] from what programs found."""
    t, h, d = out.shape
    _merge[(t * h, triton.cdiv(d, 128))](
        *found, sink, out, t * h, h, splits,
        WIDTH=d, SPLITS=triton.next_power_of_2(max(splits, attention_launch.PROGRAMS)), CHUNK=16,
        BLOCK_D=min(128, max(attention_launch.WIDTH, triton.next_power_of_2(d))), UPCAST=UPCAST,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _attend_in_basis(out: Tensor, q: Tensor, entries: BasisRows, given: _Given, first: Tensor, sink: Tensor) -> None:
    """Fill `out` [t, h, d]: programs of the window, and programs of the entries, whose sums are then brought back."""
    keys, p, signs = entries.nope, entries.nope.basis.shape[0], entries.rope.signs
    inside = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    flat, wide = inside.flatten(0, 1), q.flatten(0, 1).float()
    flat[:, :p] = wide[:, :p] @ (keys.basis.float() * keys.basis_scale)
    flat[:, p:] = hadamard_rows(wide[:, p:] if signs is None else wide[:, p:] * signs)
    del wide
    recent = given._replace(rows=_planes(given.ring[:0], narrow=given.narrow), entries=False, bias=None, selected=None)
    cuts = recent.cut(q), given.cut(q)
    splits = cuts[0].splits + cuts[1].splits
    found = _Parts.empty(splits, q)
    _run(q, first, recent, cuts[0], sink, out, found.of(slice(cuts[0].splits)), split=True)
    _run(inside, first, given, cuts[1], sink, out, stored := found.of(slice(cuts[0].splits, None)), split=True)
    del inside, flat
    sums = stored.sums.flatten(0, 2)
    sums[:, :p] = sums[:, :p] @ (keys.basis.float() * keys.basis_scale).mT
    rope = hadamard_rows(sums[:, p:])
    sums[:, p:] = rope if signs is None else rope.mul_(signs)
    _merged(out, found, sink, splits)


def attend_scratch(
    tokens: int, heads: int, width: int, window: int, entries: int, selected: int, form: str, item: int
) -> int:
    """Bytes allocated in `attend` of up to so many tokens: the result, and in fp32 what splits find of their rows.

    Of `Fp8Entries`, also the rows that are decoded ahead. Of entries in a basis, for as many rows as are in it at a
    time: queries as they are stored, made of wide ones; what all programs find; and what a product makes of their sums.
    """
    most, result = min(entries, selected) if selected else entries, tokens * heads * width * item
    if form != "based" or most == 0:
        known = {"fp8": attention_launch.FP8, "coded": attention_launch.CODED}
        stored_as = known.get(form, attention_launch.TENSOR)
        rows = attention_launch.split_rows(tokens, heads, window, most, narrow=item == 2, form=stored_as)
        ahead = attention_launch.rows_ahead(tokens, entries, selected) if form == "fp8" and item == 2 else 0
        return result + rows * (2 + width) * 4 + ahead * width * 2
    some = min(tokens, max(1, QUERIES // heads))
    inside, basis = some * heads * width * 4, 2 * width * width * 4
    recent, stored = (
        max(some * heads, attention_launch.split_rows(some, heads, *seen, narrow=item == 2, form=stored_as))
        for *seen, stored_as in ((window, 0, attention_launch.TENSOR), (0, most, attention_launch.BASED))
    )
    found = (recent + stored) * (2 + width) * 4
    made = (2 if item == 4 else 3) * inside + basis
    return result + max(made, inside + found, found + stored * width * 4 + basis)
