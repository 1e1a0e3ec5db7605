"""Shared-KV attention: a tile of (token, head) rows against tiles of keys, each loaded once for both of its products.

A program holds up to 64 rows: heads of one token, or all heads of several where there are few. It walks over tiles of
the window, then of the entries (in place, or gathered where they are selected), and keeps a running softmax (peak,
total, value, all fp32). Where rows are few, the tiles are dealt to several programs a row tile, and a second kernel
merges what they found: how many follows from shapes, and the tiles of each from the position, read on the device.

The sink enters once, at the end. Masses are rounded to bf16 before they multiply bf16 keys; their sum is of what they
were before. As in `kernels.attention.cpu`, rows that no token of the tile may see are not read, whatever they hold,
and NaN in any other row reaches every token of the tile: more than saw it where a tile has several, but never fewer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import launch as attention_launch
from kernels.formats.stored import Fp8Entries, Rows, Slots
from kernels.formats.triton import e4m3, e8m0
from kernels.formats.triton_rounding import UPCAST, rounded
from kernels.position import position

GROUP = tl.constexpr(attention_launch.WIDTH)  # columns of Fp8Entries to a scale
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
def _entry(selected, key, token, picks, stride, SELECTED: tl.constexpr):
    """Entries that stand at places `key` of a token's list; the list of all of them is every entry in order."""
    if SELECTED:
        key = tl.load(selected + token.to(tl.int64) * stride + key, (key >= 0) & (key < picks), -1)
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
    narrow = e4m3(code, OPERAND, UPCAST) * power.to(OPERAND)[:, :, None]
    inside = loaded[:, None] & (column < WIDTH - NOPE)[None, :]
    last = tl.load(rope + row[:, None] * rope_stride + column[None, :], inside, 0.0).to(OPERAND)
    wide = tl.where((group == NOPE // GROUP)[None, :, None], last[:, None, :], narrow)
    return tl.reshape(wide, (BLOCK_N, BLOCK_D))


@triton.jit
def _fold(
    q, keys, seen, bias, peak, total, value, scale,
    BIASED: tl.constexpr, NARROW: tl.constexpr, OPERAND: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Fold a tile of keys into the running softmax."""
    logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    if BIASED:
        logits += bias[None, :]
    logits = tl.where(seen, logits, float("-inf"))
    higher = tl.maximum(peak, tl.max(logits, 1))
    mass = tl.exp(logits - higher[:, None])
    shrink = tl.exp(peak - higher)
    total = total * shrink + tl.sum(mass, 1)
    if NARROW:
        mass = rounded(mass, tl.bfloat16, UPCAST)
    value = tl.dot(mass.to(OPERAND), keys, value * shrink[:, None], input_precision="ieee")
    return higher, total, value


@triton.jit
def _with_sink(peak, total, sink):
    """Total with the sink among it, and by how much what was summed below the old peak shrinks."""
    higher = tl.maximum(peak, tl.minimum(tl.maximum(sink, -LIMIT), LIMIT))
    shrink = tl.exp(peak - higher)
    return total * shrink + tl.exp(sink - higher), shrink


@triton.jit(do_not_specialize=["tokens", "n", "picks", "selected_stride", "splits"])
def _attend(
    q, ring, first, entries, rope, scales, bias, selected, sink, out, peaks, totals, sums,
    tokens, heads, capacity, ring_stride, window, n, ratio, hidden, picks,
    entries_stride, rope_stride, scales_stride, selected_stride, scale, splits,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, NOPE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, ENTRIES: tl.constexpr, FP8: tl.constexpr, ALIGNED: tl.constexpr, SELECTED: tl.constexpr,
    BIASED: tl.constexpr, SPLIT: tl.constexpr, OPERAND: tl.constexpr, NARROW: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    head_tiles = tl.cdiv(heads, HEADS)
    begin_token = tl.program_id(0) // head_tiles * TOKENS
    pair = tl.arange(0, TOKENS * HEADS)
    token = begin_token + pair // HEADS
    head = tl.program_id(0) % head_tiles * HEADS + pair % HEADS
    wanted = (token < tokens) & (head < heads)
    row = token.to(tl.int64) * heads + head
    column = tl.arange(0, BLOCK_D)
    queries = _plain(q + row * WIDTH, wanted, WIDTH, BLOCK_D, OPERAND)

    start = tl.load(first)
    newest = start + tl.minimum(begin_token + TOKENS, tokens) - 1  # position
    oldest = tl.maximum(start + begin_token - window + 1, 0)
    span = (newest + 1 - oldest).to(tl.int32)
    window_tiles = tl.cdiv(span, BLOCK_N)
    tiles = window_tiles
    if ENTRIES:
        visible = tl.minimum((start + token + 1) // ratio - hidden, n).to(tl.int32)
        most = tl.minimum((newest + 1) // ratio - hidden, n).to(tl.int32)
        tiles += tl.cdiv(picks if SELECTED else tl.maximum(most, 0), BLOCK_N)
    tiles_per_split = tl.cdiv(tiles, splits)
    begin = tl.program_id(1) * tiles_per_split
    end = tl.minimum(begin + tiles_per_split, tiles)

    peak = tl.full((TOKENS * HEADS,), -LIMIT, tl.float32)
    total = tl.zeros((TOKENS * HEADS,), tl.float32)
    value = tl.zeros((TOKENS * HEADS, BLOCK_D), tl.float32)
    own = (start + token - oldest).to(tl.int32)  # position, counted from the oldest that the tile sees
    first_row = (oldest % capacity).to(tl.int32)
    for tile in tl.range(begin, tl.minimum(end, window_tiles) if FP8 else end):
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        place = first_row + key
        place = tl.where(place >= capacity, place - capacity, place)
        loaded = key < span
        seen = (key[None, :] <= own[:, None]) & (key[None, :] > own[:, None] - window)
        at = ring + place.to(tl.int64) * ring_stride
        if ENTRIES and not FP8:  # one loop over both, whose keys are fetched ahead across the border
            recent = key < window_tiles * BLOCK_N
            entry = _entry(selected, key - window_tiles * BLOCK_N, begin_token, picks, selected_stride, SELECTED)
            present = (entry >= 0) & (entry < most)
            at = tl.where(recent, at, entries + entry.to(tl.int64) * entries_stride)
            if ALIGNED:  # which the compiler no longer sees behind the choice, and without it fetches nothing ahead
                at = tl.multiple_of(at, 16)
            loaded = tl.where(recent, loaded, present)
            seen = tl.where(recent[None, :], seen, present[None, :] & (entry[None, :] < visible[:, None]))
        keys = _plain(at, loaded, WIDTH, BLOCK_D, OPERAND)
        more = tl.load(bias + entry, present, 0.0) if BIASED and not FP8 else None
        peak, total, value = _fold(
            queries, keys, seen, more, peak, total, value, scale, BIASED and not FP8, NARROW, OPERAND, UPCAST
        )  # fmt: skip
    if FP8:
        for tile in tl.range(tl.maximum(begin, window_tiles), end):
            key = (tile - window_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
            entry = _entry(selected, key, begin_token, picks, selected_stride, SELECTED)
            present = (entry >= 0) & (entry < most)
            seen = present[None, :] & (entry[None, :] < visible[:, None])
            keys = _fp8(
                entries, rope, scales, entry, present, entries_stride, rope_stride, scales_stride,
                WIDTH, NOPE, BLOCK_D, BLOCK_N, OPERAND, UPCAST,
            )  # fmt: skip
            more = tl.load(bias + entry, present, 0.0) if BIASED else None
            peak, total, value = _fold(
                queries, keys, seen, more, peak, total, value, scale, BIASED, NARROW, OPERAND, UPCAST
            )  # fmt: skip

    inside = wanted[:, None] & (column < WIDTH)[None, :]
    if SPLIT:
        place = tl.program_id(1).to(tl.int64) * tokens * heads + row
        used = wanted & (begin + tl.zeros_like(pair) < end)  # the interpreter makes int32 of a scalar's comparison
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
    total = tl.sum(tl.where(used, total * tl.exp(peak - highest), 0.0), 0)
    total, shrink = _with_sink(highest, total, tl.load(sink + row % heads))
    value = tl.zeros((BLOCK_D,), tl.float32)
    for begin in tl.range(0, splits, CHUNK):
        some = begin + tl.arange(0, CHUNK)
        at = some * rows + row
        there = tl.load(totals + at, some < splits, -1.0) != -1
        weight = tl.exp(tl.load(peaks + at, there, -LIMIT) - highest)
        inside = there[:, None] & (column < WIDTH)[None, :]
        part = tl.load(sums + at[:, None] * WIDTH + column[None, :], inside, 0.0)
        value += tl.sum(tl.where(inside, part * weight[:, None], 0.0), 0)
    value = value * shrink / total
    tl.store(out + row * WIDTH + column, rounded(value, out.dtype.element_ty, UPCAST), column < WIDTH)


def _planes(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Values, rope dims and scales; all three are the tensor where it is no narrow form."""
    match rows:
        case Tensor():
            rows = _rows(rows)
            return rows, rows, rows
        case Fp8Entries(values, rope, scale):
            assert rope.shape[1] <= GROUP.value, f"{rope.shape[1]} rope dims, want {GROUP.value} at most"
            return _rows(values.view(torch.uint8)), _rows(rope), _rows(scale.view(torch.uint8))
        case _:
            raise NotImplementedError(f"attention in Triton reads no {type(rows).__name__}")


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
    are of bf16 where all are.
    That the entries of a row of `selected` are distinct is not checked: one that comes twice counts twice.

    Raises
    ------
    NotImplementedError
        If entries are `CodedRows` or `BasisRows`; what is read: a tensor, `Fp8Entries`, and `Slots` of them.

    """
    t, h, d = q.shape
    capacity = ring.shape[0]
    assert capacity >= window + t - 1, f"a ring of {capacity} cannot hold window {window} and {t} new tokens"
    assert sink.dtype == torch.float32, f"sink: {sink.dtype}, want float32"
    assert selected is None or selected.dtype == torch.int32, f"selected: {selected.dtype}, want int32"
    slots = entries if isinstance(entries, Slots) else Slots(ring[:0] if entries is None else entries, None, 0)
    values, rope, scales = _planes(slots.rows)
    dtypes = {x.dtype for x in (q, ring, rope)}
    assert isinstance(slots.rows, Fp8Entries) or rope.dtype == ring.dtype, f"{rope.dtype} entries, {ring.dtype} ring"
    assert dtypes <= {torch.bfloat16, torch.float32}, f"{dtypes}: want bfloat16 or float32"
    out = torch.empty(t, h, d, dtype=q.dtype, device=q.device)
    if t == 0:
        return out
    ring, q, sink = _rows(ring), q.contiguous(), sink.contiguous()
    selected = None if selected is None else _rows(selected)
    bias = None if slots.bias is None else slots.bias.contiguous()
    n, picks = values.shape[0], 0 if selected is None else selected.shape[1]
    most = n if selected is None else min(n, picks)
    fp8, narrow = isinstance(slots.rows, Fp8Entries), dtypes == {torch.bfloat16}
    cut = attention_launch.launch(q, window, most, narrow=narrow, fp8=fp8, shared=selected is None)
    first = position(first, q.device)
    split = cut.splits > 1
    # two allocations: a pointer's alignment is part of what is compiled
    parts = (cut.splits, t, h)
    found = [torch.empty(*parts, dtype=torch.float32, device=q.device) if split else sink for _ in range(2)]
    sums = torch.empty(*parts, d, dtype=torch.float32, device=q.device) if split else sink
    _attend[(cut.programs, cut.splits)](
        q, ring, first, values, rope, scales, bias, selected, sink, out, found[0], found[1], sums,
        t, h, capacity, ring.stride(0), window, n, ratio, slots.hidden, picks,
        values.stride(0), rope.stride(0), scales.stride(0), 0 if selected is None else selected.stride(0), d**-0.5,
        cut.splits,
        TOKENS=cut.tokens, HEADS=cut.heads, WIDTH=d, NOPE=values.shape[1], BLOCK_N=cut.keys, BLOCK_D=cut.width,
        ENTRIES=entries is not None, FP8=fp8, ALIGNED=_aligned(ring) and _aligned(values),
        SELECTED=selected is not None, BIASED=bias is not None, SPLIT=split,
        OPERAND=tl.bfloat16 if cut.narrow and not UPCAST else tl.float32, NARROW=cut.narrow, UPCAST=UPCAST,
        num_warps=8 if cut.tokens * cut.heads * cut.width >= 64 * 256 else 4, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip
    if split:
        _merge[(t * h, triton.cdiv(d, 128))](
            found[0], found[1], sums, sink, out, t * h, h, cut.splits,
            WIDTH=d, SPLITS=triton.next_power_of_2(attention_launch.PROGRAMS), CHUNK=16, BLOCK_D=min(128, cut.width),
            UPCAST=UPCAST, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def attend_scratch(
    tokens: int, heads: int, width: int, window: int, entries: int, selected: int, form: str, item: int
) -> int:
    """Bytes allocated in `attend` of up to so many tokens: the result, and in fp32 what splits find of their rows."""
    del form
    most = min(entries, selected) if selected else entries
    rows = attention_launch.split_rows(tokens, heads, window, most, narrow=item == 2)
    return tokens * heads * width * item + rows * (2 + width) * 4
