"""What the blocked indexer takes while it selects: read off `kernels.indexer.cpu` and `index_bound`.

How much it takes depends on the scores: of entries that cannot be among a token's best nothing is kept. `few_pass` says
that few pass these comparisons, as where scores come in no particular order; else all do.
"""

from typing import Final

from kernels.indexer import bound as index_bound
from kernels.indexer import cpu as indexer

F32, F64, I64 = 4, 8, 8  # bytes
PACKED: Final = 3 * F32 + 2 * I64  # of a pair of token and entry: its score, twice as bits, and twice as an integer
COMPARED: Final = F32 + 3  # its score, and masks
MERGED: Final = 12 * I64  # of a pair that passes: token, entry, order, place, score, and copies of these
FOUND: Final = 2 * I64  # of one that is kept until all of the tile's are merged
LOOKED_AT: Final = 7 * I64  # of a pair in a tile of bounds that passes


def select(rows: int, heads: int, width: int, visible: int, k: int, widened: int, *, few_pass: bool) -> int:
    """Bytes beside queries, keys and result, of all heads of `rows` tokens that share a tile of scores.

    Parameters
    ----------
    rows, heads, width
        Tokens of the tile, index heads, and columns of a key.
    visible, k
        Entries, more than k, and how many of them are selected.
    widened
        Bytes that a number of a key takes while it is made fp32.
    few_pass
        Whether few entries pass the comparisons.
    """
    best = rows * k * I64
    first = min(max(k, min(indexer.FIRST, 2 * indexer.MERGED // rows)), visible)
    step = max(1, min(indexer.PER_HEAD // (rows * heads), indexer.KEYS // width))

    def scored(entries: int) -> int:
        columns = min(step, entries)
        return rows * entries * F32 + columns * width * widened + 2 * rows * heads * columns * F32

    work = max(scored(first), rows * first * PACKED)
    if visible > first:
        more = min(max(k, indexer.MERGED // rows), visible - first)
        kept = rows * first * (I64 + F32)  # of the first tile, until the end
        passing = -(-more * k // first) if few_pass else more  # of random scores, so many are above the k-th of `first`
        work = max(work, kept + max(scored(more), rows * (more * COMPARED + passing * MERGED)))
    return rows * heads * width * F32 + 4 * best + work


def bounded(heads: int, width: int, entries: int, k: int, tokens: int) -> bool:
    """Whether a call of so many tokens bounds its scores in integers, where the processor multiplies these."""
    many = tokens * heads >= indexer.FEW_ROWS and entries >= max(indexer.FEW_ENTRIES, indexer.SPARSE * k)
    return many and index_bound.finest(heads, width) > 0


def select_bounded(rows: int, heads: int, width: int, visible: int, k: int, widened: int, *, few_pass: bool) -> int:
    """The same where scores are bounded first; see `select`, to which tokens are left of which too much passes."""
    numbers, slots = heads * rows * width, heads * rows
    best = rows * k * I64
    rounding = 2 * numbers + 6 * min(index_bound.WEIGHED, numbers) * F64
    held = numbers + slots * (F32 + 3 * F64) + 3 * indexer.PAIRS * F32  # queries as integers, and buffers
    columns = min(max(4 * k, indexer.KEYS // width), visible)  # keys of a tile
    keys = columns * width
    tile = min(indexer.PAIRS, rows * columns)  # pairs
    pending = indexer.PENDING + min(tile, indexer.PENDING)
    blocks = pending // indexer.BLOCK + rows
    products = indexer.SCORED * (2 * F32 + widened) + indexer.SCORED // indexer.BLOCK // width * heads * width * 2 * F32
    merged = rows * 2 * -(-pending // rows) if few_pass else max(rows * k, indexer.MERGED)
    merging = pending * MERGED + blocks * indexer.BLOCK * (I64 + F32) + products + (2 * rows * k + merged) * I64
    found = 0 if few_pass else tile * FOUND
    looking = slots * 4 * F64 + tile * (F32 if few_pass else LOOKED_AT)
    work = max(keys * (widened + 3 * F32), keys + looking, keys + found + merging, rows * k * MERGED + products)
    if not few_pass:
        some = min(rows, max(1, indexer.ROWS // heads))
        work = max(work, select(some, heads, width, visible, k, widened, few_pass=False))
    return 2 * best + max(rounding, held + work)
