"""Exact top-k of fp32 scores: the k-th largest is found digit by digit, then what reaches it is written out in order.

A score's bits are mapped to an unsigned integer of the same order, of which each of four passes counts one digit of 8
bits among the scores that agree with the k-th largest so far. (Histograms of 11 bits would save a pass, but Triton
builds them from ballots, whose cost grows with the bins.) A last pass takes what is larger, and of what is equal the
first ones, each to the place that a prefix sum gives it: ascending order, and of equal scores the lower index.

A row of two tiles at most is read once: what then counts is what a histogram costs, and its digits are of 5 bits.

Only integers are added up, so nothing depends on the order in which programs run. Where there are many rows, or short
ones, a program does all passes of one row in one launch; else a row is split over programs, and there is a launch for
each pass, with counts kept in between; the first pass may be that of who computes the scores. All find the same.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.position import position

WHOLE_ROWS = 64  # rows from which a program each fills the device: a program of 16 warps, 132 SMs or more
WHOLE_ENTRIES = 1 << 14  # entries up to which one program is faster than five launches
TILE = 1 << 12  # scores that one program reads at a time: 8 in each of 512 threads; of a row that it holds, up to 16
WIDTH = 1 << 10  # columns of a row that are written at once, at least: fewer would compile anew as a context grows
PART = 1 << 11  # the same where rows are split: 262144 entries are 128 parts
PARTS = 128  # of a row, at most


@triton.jit
def ordered(scores):
    """Scores as uint32 of the same order: negative ones are complemented, the others, and -0.0, get the upper bit."""
    bits = scores.to(tl.uint32, bitcast=True)
    return tl.where(bits > 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _ordered(row, entry, inside):
    return ordered(tl.load(row + entry, inside, 0.0))


@triton.jit
def count_first_digits(counts, scores, member):
    """Add the first digits of the scores that are a `member` to a row's counts, as the first pass would."""
    found = tl.histogram((ordered(scores) >> 24).to(tl.int32), 256, member)
    tl.atomic_add(counts + tl.arange(0, 256), found, found > 0, sem="relaxed")


@triton.jit
def _histogram(row, low, high, prefix, digit, TILE: tl.constexpr):
    """How many of entries `low` to `high` - 1 whose upper digits are `prefix` have each next digit: [256] int32."""
    counts = tl.zeros([256], tl.int32)
    for begin in range(low, high, TILE):
        entry = begin + tl.arange(0, TILE)
        member = entry < high
        key = _ordered(row, entry, member)
        member = member & ((key >> 1 >> (31 - 8 * digit)) == prefix)  # a shift by 32 would be undefined
        if tl.sum(member.to(tl.int32)) > 0:  # few tiles have any after the first digits
            counts += tl.histogram(((key >> (24 - 8 * digit)) & 255).to(tl.int32), 256, member)
    return counts


@triton.jit
def _pick(counts, prefix, need, BITS: tl.constexpr = 8):
    """Append the digit of the `need`-th largest to `prefix`; return how many of those that share it are needed."""
    at_least = tl.cumsum(counts, reverse=True)
    digit = tl.sum((at_least >= need).to(tl.int32)) - 1
    return (prefix << BITS) | digit.to(tl.uint32), need - tl.max(tl.where(at_least < need, at_least, 0))


@triton.jit
def _place(out, entry, inside, key, least, need, larger, equal):
    """Write those of some entries that `_take` takes; return how many are larger and, in the lower bits, equal."""
    over = inside & (key > least)
    same = inside & (key == least)
    both = (over.to(tl.int32) << 16) | same.to(tl.int32)  # at most one of the two; there are fewer than 2^15
    before = tl.cumsum(both) - both
    ties = equal + (before & 0xFFFF)
    tl.store(out + larger + (before >> 16) + tl.minimum(ties, need), entry, over | (same & (ties < need)))
    return tl.sum(both)


@triton.jit
def _take(row, out, low, high, least, need, larger, equal, TILE: tl.constexpr):
    """Write entries larger than `least`, and the first `need` that equal it; `larger`, `equal` stand before `low`."""
    for begin in range(low, high, TILE):
        entry = begin + tl.arange(0, TILE)
        inside = entry < high
        total = _place(out, entry, inside, _ordered(row, entry, inside), least, need, larger, equal)
        larger += total >> 16
        equal += total & 0xFFFF


@triton.jit
def _take_all(out, seen, width, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    tl.store(out + column, tl.where(column < seen, column, -1), column < width)


@triton.jit
def seen_by(first, token, ratio, entries):
    """How many of `entries` the token sees that stands `token` behind position [first]: int32."""
    return tl.minimum((tl.load(first) + token + 1) // ratio, entries).to(tl.int32)


@triton.jit
def _held(row, out, seen, prefix, need, zero, HELD: tl.constexpr):
    """All passes of a row that is read once: the `need` best of HELD entries at most."""
    entry = tl.arange(0, HELD)
    inside = entry < seen
    key = _ordered(row, entry, inside)
    for digit in range(7):
        upper = key >> (30 - 5 * digit)
        counts = tl.histogram((upper & 31).to(tl.int32), 32, inside & (upper >> 5 == prefix))
        prefix, need = _pick(counts, prefix, need, 5)
    _place(out, entry, inside, key, prefix, need, zero, zero)


@triton.jit(do_not_specialize=["start", "entries", "width"])
def _whole(scores, out, first, start, ratio, entries, stride, width, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """All passes of one row."""
    token = tl.program_id(0).to(tl.int64)
    row, out = scores + token * stride, out + token * width
    seen = seen_by(first, start + token, ratio, entries)
    prefix, need, zero = tl.full([], 0, tl.uint32), tl.full([], 0, tl.int32) + width, tl.full([], 0, tl.int32)
    if seen <= width:
        _take_all(out, seen, width, WIDTH)
    elif seen <= TILE // 2:
        _held(row, out, seen, prefix, need, zero, TILE // 2)
    elif seen <= TILE:
        _held(row, out, seen, prefix, need, zero, TILE)
    elif seen <= 2 * TILE:
        _held(row, out, seen, prefix, need, zero, 2 * TILE)
    else:
        for digit in range(4):
            prefix, need = _pick(_histogram(row, 0, seen, prefix, digit, TILE), prefix, need)
        _take(row, out, 0, seen, prefix, need, zero, zero, TILE)


@triton.jit(do_not_specialize=["start", "digit", "entries", "width", "part_length"])
def _count(
    scores, counts, larger, equal, digit, first, start, ratio, entries, stride, width, part_length, TILE: tl.constexpr
):
    """Add one part's histogram of a digit to its row's; of the last digit keep what the part itself holds."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seen = seen_by(first, start + token, ratio, entries)
    low = part * part_length
    if (seen > width) & (low < seen):
        bins = tl.arange(0, 256)
        counts += token * 1024
        prefix, need = tl.full([], 0, tl.uint32), tl.full([], 0, tl.int32) + width
        for before in range(digit):
            prefix, need = _pick(tl.load(counts + before * 256 + bins), prefix, need)
        row, high = scores + token * stride, tl.minimum(low + part_length, seen)
        found = _histogram(row, low, high, prefix, digit, TILE)
        tl.atomic_add(counts + digit * 256 + bins, found, found > 0, sem="relaxed")
        if digit == 3:
            over = tl.zeros([TILE], tl.int32)
            for begin in range(low, high, TILE):
                entry = begin + tl.arange(0, TILE)
                inside = entry < high
                over += (inside & ((_ordered(row, entry, inside) >> 8) > prefix)).to(tl.int32)
            at = (token * tl.num_programs(1) + part) * 256 + bins
            tl.store(larger + at, tl.sum(over) + tl.cumsum(found, reverse=True) - found)
            tl.store(equal + at, found)


@triton.jit(do_not_specialize=["start", "entries", "width", "part_length"])
def _collect(
    scores, out, counts, larger, equal, first, start, ratio, entries, stride, width, part_length,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write what one part contributes, behind what the parts before it do."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seen = seen_by(first, start + token, ratio, entries)
    low = part * part_length
    out += token * width
    if seen <= width:
        if part == 0:
            _take_all(out, seen, width, WIDTH)
    elif low < seen:
        bins = tl.arange(0, 256)
        prefix, need = tl.full([], 0, tl.uint32), tl.full([], 0, tl.int32) + width
        for before in range(4):
            prefix, need = _pick(tl.load(counts + token * 1024 + before * 256 + bins), prefix, need)
        parts = tl.arange(0, PARTS)
        at = (token * tl.num_programs(1) + parts) * 256 + (prefix & 255).to(tl.int32)
        over, same = tl.load(larger + at, parts < part, 0), tl.load(equal + at, parts < part, 0)
        high = tl.minimum(low + part_length, seen)
        _take(scores + token * stride, out, low, high, prefix, need, tl.sum(over), tl.sum(same), TILE)


def top_k(scores: Tensor, first: int | Tensor, ratio: int, k: int) -> Tensor:
    """Pick the k best visible entries of each token; of equal scores, the lower index.

    What `kernels.indexer.reference.select` does with its scores: -0.0 equals 0.0. Scores of entries that a token does
    not see are not read. A NaN leaves open which entries its row selects; they are visible and distinct all the same.

    Parameters
    ----------
    scores
        [t, n] float32.
    first
        Position of the first token, or [] int64 on the device; token i sees entries ``e < (first + i + 1) // ratio``.
    ratio
        Tokens per entry.
    k
        `index_topk`.

    Returns
    -------
    Tensor
        [t, min(k, n)] int32: each row the selected entries in ascending order, then -1 where fewer are visible.

    """
    assert scores.dtype == torch.float32, f"scores: {scores.dtype}, want float32"
    t, n = scores.shape
    out = torch.empty(t, min(k, n), dtype=torch.int32, device=scores.device)
    top_k_into(out, scores, position(first, scores.device), 0, ratio, None)
    return out


def first_counts(t: int, n: int, device: torch.device) -> Tensor | None:
    """Counts of each digit, [t, 4, 256] int32, all 0, of rows that are split over programs; None where they are not.

    What computes the scores may add their first digits by `count_first_digits`: a launch, and a pass over them, less.
    Where a program does all passes of a row, counting there costs more than the pass that it saves.
    """
    whole = t >= WHOLE_ROWS or n <= WHOLE_ENTRIES
    return None if whole else torch.zeros(t, 4, 256, dtype=torch.int32, device=device)


def top_k_into(out: Tensor, scores: Tensor, first: Tensor, start: int, ratio: int, counts: Tensor | None) -> None:
    """`top_k` of tokens that stand `start` and more behind `first`, as many as `out` [t, k] int32 has columns.

    `scores` [t, n] may have fewer columns than `out`, if no token sees more. `counts`: as `first_counts` gives them,
    with the first digits of all that tokens see of which more than `out` has columns; None: not counted yet.
    """
    (t, n), width = scores.shape, out.shape[1]
    if out.numel() == 0:
        return
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    stride, block = scores.stride(0), max(WIDTH, triton.next_power_of_2(width))
    counted, counts = counts is not None, first_counts(t, n, scores.device) if counts is None else counts
    if counts is None:
        options = {"num_warps": TILE // 256, "maxnreg": 64, "enable_fp_fusion": False}  # two programs to an SM, or more
        _whole[(t,)](scores, out, first, start, ratio, n, stride, width, WIDTH=block, TILE=TILE, **options)
        return
    part_length = -(-n // (PARTS * PART)) * PART
    parts = -(-n // part_length)
    larger, equal = torch.empty(2, t, parts, 256, dtype=torch.int32, device=scores.device)
    rows = (first, start, ratio, n, stride, width, part_length)
    options = {"TILE": PART, "num_warps": 4, "enable_fp_fusion": False}
    for digit in range(1 if counted else 0, 4):
        _count[t, parts](scores, counts, larger, equal, digit, *rows, **options)
    _collect[t, parts](scores, out, counts, larger, equal, *rows, WIDTH=block, PARTS=PARTS, **options)


def top_k_scratch(tokens: int, entries: int) -> int:
    """Bytes allocated in `top_k_into` of up to so many tokens: counts of each digit, of rows split over programs."""
    if entries <= WHOLE_ENTRIES:
        return 0
    return min(tokens, WHOLE_ROWS - 1) * (4 + 2 * min(PARTS, -(-entries // PART))) * 256 * 4
