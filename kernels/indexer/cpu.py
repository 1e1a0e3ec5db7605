"""The lightning indexer in tiles: a streaming top-k that never holds more than one tile of scores.

`torch.topk` promises nothing about equal values, and equal scores are common: ReLU sends whole rows to 0.0. So a score
and its entry are packed into one int64 whose order is "higher score, then lower entry". All packed values differ, the
k largest are therefore unique, and any top-k of them is the exact answer.

A few tokens keep all their scores: `kernels.indexer.cpu_few`. Of more, entries come in ascending order: once k of them
are held, only a score above the least of these can enter, and in a long context few are. So only what passes that
comparison is packed and merged. And where the processor multiplies 8-bit integers natively, a call of many tokens
scores in fp32 only those entries that `index_bound` cannot rule out.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fathom.kernels.formats import rows
from fathom.kernels.formats.cpu_rows import readable
from fathom.kernels.formats.rows import Rows
from fathom.kernels.indexer import bound as index_bound
from fathom.kernels.indexer.bound import Queries, Scratch
from fathom.kernels.indexer.cpu_few import columns, select_few

FEW = 8  # tokens up to which all scores are kept
ROWS = 1024  # (token, head) pairs per tile
PER_HEAD = 1 << 18  # numbers in a tile of per-head scores: 1 MiB, which stays in a core's L2
KEYS = 1 << 18  # numbers in a tile of keys: 1 MiB in fp32
FIRST = 4096  # entries whose scores are merged without a comparison, at most (or k)
MERGED = 1 << 17  # scores per merge into the running top-k: 1 MiB packed
BOUNDED_ROWS = 8192  # (token, head) pairs that share the rounding of a tile of keys
FEW_ROWS, FEW_ENTRIES = 512, 4096  # (token, head) pairs, and entries, below which bounds take longer than scores
SPARSE = 256  # entries over k, the same: the more are selected, the more come near
PAIRS = 1 << 18  # (token, entry) pairs in a tile of bounds: 3 buffers of 1 MiB
RECENT = 1024  # entries among which a first limit is looked for
PENDING = 1 << 14  # pairs that are scored and merged together
BLOCK = 16  # pairs of one token that are scored in one product
SCORED = 1 << 17  # numbers in the keys of such products
HARD = 1024  # entries of a token, beside a 32nd of all, that may pass before its bounds are given up
PAIR = 96  # bytes of scratch of a pair that is merged: token, entry, order, place, score, and copies of these
_INVISIBLE = torch.iinfo(torch.int64).min  # below every packed score
_LOW = (1 << 32) - 1


def select(q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int, k: int) -> Tensor:
    """Pick the k best visible entries of each token; of equal scores, the lower index.

    Contract: `kernels.indexer.reference.select`. Where no token of a tile sees more than k entries nothing is scored:
    the k best of at most k are all of them, whatever their scores, and rows are in ascending order.

    A NaN score leaves open which entries its row selects; they are visible and distinct all the same.
    """
    n = rows.length(keys)
    t, h, d = q.shape
    bounded = _bounded(t, h, d, n, k, q.device)
    if t <= FEW and not bounded and readable(keys):
        return select_few(q, head_weights, keys, first, ratio, k)
    q = rows.query_as_stored(keys, q)
    width = min(k, n)
    out = torch.empty(t, width, dtype=torch.int32, device=q.device)
    tokens = max(1, (BOUNDED_ROWS if bounded else ROWS) // h)
    for start in range(0, t, tokens):
        stop = min(start + tokens, t)
        position = torch.arange(first + start, first + stop, device=q.device)
        seen = ((position + 1) // ratio).clamp(max=n)[:, None]  # [t, 1]
        most = min((first + stop) // ratio, n)
        if most <= width:
            best = torch.arange(width, device=q.device).expand(stop - start, width)
        else:
            way = _best_bounded if bounded else _best
            best = way(q[start:stop], head_weights[start:stop], keys, seen, width)
        out[start:stop] = torch.where(best < seen, best, -1)
    return out


def _bounded(tokens: int, heads: int, width: int, entries: int, k: int, device: torch.device) -> bool:
    """Whether a call bounds its scores in integers."""
    many = tokens * heads >= FEW_ROWS and entries >= max(FEW_ENTRIES, SPARSE * k)
    return many and index_bound.native(device) and index_bound.finest(heads, width) > 0


def select_scratch(
    tokens: int, heads: int, width: int, entries: int, k: int, form: str, item: int, device: torch.device, *,
    few_pass: bool,
) -> int:  # fmt: skip
    """Bytes alive at most in `select`, the result included.

    `form` is how keys are stored: dtype, fp8, fp4 or coded (`CodedRows`). `few_pass`: whether few entries pass the
    comparisons, as where scores come in no particular order; else all do.
    """
    if not tokens:  # as on a rank that has none of a call's
        return 0
    rows, result = min(tokens, max(1, ROWS // heads)), tokens * min(k, entries) * 4
    bounded = _bounded(tokens, heads, width, entries, k, device)
    if tokens <= FEW and not bounded and form != "coded":
        return result + tokens * columns(entries) * 4
    if entries <= k:
        return result + rows * entries * 12
    decoded = {"dtype": 0 if item == 4 else 4, "coded": 14}.get(form, 4)  # of a number of a key, beside those stored
    work = _merging(rows, heads, width, entries, k, decoded, few_pass=few_pass)
    if bounded:
        many = min(tokens, max(1, BOUNDED_ROWS // heads))
        work = max(work, _bounding(many, heads, width, entries, k, decoded, few_pass=few_pass))
    return result + work


def _merging(rows: int, heads: int, width: int, entries: int, k: int, decoded: int, *, few_pass: bool) -> int:
    """Bytes of `_best` for `rows` tokens: queries, the best so far, and a tile that is scored, packed and merged."""
    first = min(max(k, min(FIRST, 2 * MERGED // rows)), entries)
    step = max(1, min(PER_HEAD // (rows * heads), KEYS // width))

    def scored(count: int) -> int:
        columns = min(step, count)
        return rows * count * 4 + columns * width * decoded + rows * heads * columns * 8

    work = max(scored(first), rows * first * 28)  # a pair's score, twice as bits, and twice as an integer
    if entries > first:
        more = min(max(k, MERGED // rows), entries - first)
        passing = -(-more * k // first) if few_pass else more  # of random scores, so many are above the k-th of `first`
        kept = rows * first * 12  # of the first tile, until the end
        work = max(work, kept + max(scored(more), rows * (more * 7 + passing * PAIR)))
    return rows * heads * width * 4 + rows * k * 32 + work


def _bounding(rows: int, heads: int, width: int, entries: int, k: int, decoded: int, *, few_pass: bool) -> int:
    """Bytes of `_best_bounded`: queries and a tile of keys as integers, bounds, and the pairs that pass and are scored.

    Where all pass, tokens are left to `_best` too.
    """
    numbers, slots, best = heads * rows * width, heads * rows, rows * k * 8
    rounding = 2 * numbers + min(index_bound.WEIGHED, numbers) * 48
    buffers = numbers + slots * 28 + PAIRS * 12
    columns = min(max(4 * k, KEYS // width), entries)  # keys of a tile
    keys, tile = columns * width, min(PAIRS, rows * columns)
    pending = PENDING + min(tile, PENDING)
    products = SCORED * (8 + decoded) + SCORED // BLOCK * heads * 8
    together = rows * 2 * -(-pending // rows) if few_pass else max(rows * k, MERGED)
    merging = pending * PAIR + (pending + rows * BLOCK) * 12 + products + 2 * best + together * 8
    passed, looking = (0, 4) if few_pass else (tile * 16, 56)
    work = max(
        keys * (decoded + 12),
        keys + slots * 32 + tile * looking,
        keys + passed + merging,
        rows * k * PAIR + products,
    )
    if not few_pass:
        left = min(rows, max(1, ROWS // heads))
        work = max(work, _merging(left, heads, width, entries, k, decoded, few_pass=False))
    return 2 * best + max(rounding, buffers + work)


def _best(q: Tensor, head_weights: Tensor, keys: Rows, seen: Tensor, k: int) -> Tensor:
    """Rows of the k best entries in ascending order, an invisible entry where fewer than k are visible: [t, k]."""
    q, most = q.float(), int(seen.max())
    best = torch.full((q.shape[0], k), _INVISIBLE, device=q.device)
    low, high = 0, min(max(k, min(FIRST, 2 * MERGED // q.shape[0])), most)
    while low < most:
        scores = _scores(q, head_weights, keys, low, high)
        entry = torch.arange(low, high, device=q.device)
        if low == 0:
            packed = _pack(scores, entry).masked_fill_(entry >= seen, _INVISIBLE)
            best = packed.topk(k, dim=1, sorted=False).values
        else:
            enters = (scores > _least(best)[:, None]) & (entry < seen)  # k are held by who sees any of these
            token, column = enters.nonzero(as_tuple=True)
            best = _merge(best, token, _pack(scores[token, column], column + low))
        low, high = high, min(high + max(k, MERGED // q.shape[0]), most)
    return _entries(best, most)


def _scores(q: Tensor, head_weights: Tensor, keys: Rows, low: int, high: int) -> Tensor:
    """`kernels.indexer.reference.index_scores` of entries `low` to `high` - 1, key tile by key tile: [t, n] float32."""
    t, h, d = q.shape
    out = torch.empty(t, high - low, device=q.device)
    step = max(1, min(PER_HEAD // (t * h), KEYS // d))
    for start in range(low, high, step):
        stop = min(start + step, high)
        per_head = (q @ rows.read_as_stored(keys, start, stop).float().T).relu_()  # [t, h, m]
        out[:, start - low : stop - low] = (head_weights[:, None] @ per_head)[:, 0]
    return out


def _best_bounded(q: Tensor, head_weights: Tensor, keys: Rows, seen: Tensor, k: int) -> Tensor:
    """`_best` by bounds of the scores, and scores of what these do not rule out.

    A token of which too much passes, because its scores are all nearly the same, is left to `_best`.
    """
    t, h, d = q.shape
    best = torch.full((t, k), _INVISIBLE, device=q.device)
    queries, scratch = index_bound.round_queries(q, head_weights), index_bound.make_scratch(PAIRS)
    hard = ~queries.size.isfinite()
    passed = torch.zeros(t, dtype=torch.int64, device=q.device)
    most = int(seen.max())
    reached = _reached(q, head_weights, keys, queries, scratch, int(seen.min()), k)
    pending: list[tuple[Tensor, Tensor]] = []
    low, step, waiting = 0, 4 * k, 0
    while low < most and not hard.all():
        high = min(low + step, most)
        tile = index_bound.round_keys(rows.read_as_stored(keys, low, high))
        limit = torch.fmax(_least(best), reached).masked_fill_(hard, torch.inf)
        for token, column in _pieces(index_bound.passing(queries, tile, limit, scratch)):
            pending.append((token, column + low))
            waiting += token.numel()
            if waiting < PENDING and high < most:
                continue
            some, entry = _visible(pending, seen)
            pending, waiting = [], 0
            best = _merge(best, some, _pack(_scores_of(q, head_weights, keys, some, entry), entry))
            passed += some.bincount(minlength=t)
            hard |= passed > HARD + most // 32
        low = high
        step = min(2 * step, max(4 * k, KEYS // d))  # few at first, until there is a limit worth comparing with
    found = _entries(best, most)
    for some in hard.nonzero()[:, 0].split(max(1, ROWS // h)):
        if some.numel():
            found[some] = _best(q[some], head_weights[some], keys, seen[some], k)
    return found


def _reached(
    q: Tensor, head_weights: Tensor, keys: Rows, queries: Queries, scratch: Scratch, fewest: int, k: int
) -> Tensor:
    """Scores [t] that k entries of each token surely exceed; NaN where there is none.

    The newest entries that every token sees, since what is near tends to score high: of them those k with the largest
    bounds are scored.
    """
    t = q.shape[0]
    count = min(RECENT, PAIRS // t, fewest)
    if count < 2 * k:
        return torch.full((t,), torch.nan, device=q.device)
    recent = index_bound.round_keys(rows.read_as_stored(keys, fewest - count, fewest))
    entry = index_bound.largest(queries, recent, scratch, k).flatten() + (fewest - count)
    token = torch.arange(t, device=q.device).repeat_interleave(k)
    least = _scores_of(q, head_weights, keys, token, entry).view(t, k).amin(1)
    return torch.nextafter(least, torch.full_like(least, -torch.inf))


def _pieces(pairs: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of a token and an entry, at most PENDING at a time: what works on them takes a hundred bytes for each."""
    for token, entry in pairs:
        yield from zip(token.split(PENDING), entry.split(PENDING), strict=True)


def _visible(pairs: list[tuple[Tensor, Tensor]], seen: Tensor) -> tuple[Tensor, Tensor]:
    """Those of the pairs of a token and an entry [c] in which the token sees the entry."""
    token, entry = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    visible = entry < seen[token, 0]
    return token[visible], entry[visible]


def _scores_of(q: Tensor, head_weights: Tensor, keys: Rows, token: Tensor, entry: Tensor) -> Tensor:
    """Scores of pairs of a token and an entry, [c] float32.

    Pairs of a token are multiplied in blocks of BLOCK, so that its queries are read once for all of them. All blocks
    are products of the same shape, in which every score is summed in the same order: equal keys have equal scores,
    whatever is scored beside them.
    """
    t, _, d = q.shape
    order, place, owner = _grouped(token, t)
    entries = torch.zeros(owner.numel() * BLOCK, dtype=torch.int64, device=q.device)
    entries[place] = entry[order]
    scores = torch.empty(owner.numel(), BLOCK, device=q.device)
    step = max(1, SCORED // (BLOCK * d))
    for low in range(0, owner.numel(), step):
        some = owner[low : low + step]
        key = rows.take_as_stored(keys, entries[low * BLOCK : (low + step) * BLOCK]).float().view(-1, BLOCK, d)
        per_head = torch.bmm(key, q[some].float().mT).relu_()  # [b, BLOCK, h]
        scores[low : low + step] = (per_head * head_weights[some, None]).sum(-1)
    out = torch.empty_like(token, dtype=torch.float32)
    out[order] = scores.view(-1)[place]
    return out


def _grouped(row: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Deal items of rows `row` [c] into blocks of BLOCK places, each of one row.

    Returns their order by row, the place of each in that order, and the row of each block.
    """
    order = torch.argsort(row, stable=True)
    items = row.bincount(minlength=count)
    blocks = (items + BLOCK - 1) // BLOCK
    start, first_block = items.cumsum(0) - items, blocks.cumsum(0) - blocks
    ordered = row[order]
    place = first_block[ordered] * BLOCK + torch.arange(row.numel(), device=row.device) - start[ordered]
    return order, place, torch.arange(count, device=row.device).repeat_interleave(blocks)


def _merge(best: Tensor, token: Tensor, packed: Tensor) -> Tensor:
    """Return the k largest of each row of `best` [t, k] and the values `packed` [c] that belong to rows `token` [c].

    Many values may belong to one row, and none to the others. So the values of rows that have any are merged in
    rounds, which end sooner for a row with few: no round holds more than about MERGED values.
    """
    enters = packed > best.amin(1)[token]
    token, packed = token[enters], packed[enters]
    best, k = best.clone(), best.shape[1]
    order = torch.argsort(token, stable=True)
    token, packed = token[order], packed[order]
    while token.numel():
        items = token.bincount(minlength=len(best))
        some = items.nonzero()[:, 0]
        width = min(max(k, MERGED // some.numel()), int(items.max()))
        column = torch.arange(token.numel(), device=best.device).sub_((items.cumsum(0) - items)[token])
        later = column >= width
        both = torch.full((some.numel(), k + width), _INVISIBLE, device=best.device)
        both[:, :k] = best[some]
        now = slice(None) if width == items.max() else ~later
        row = ((items > 0).cumsum(0) - 1)[token[now]]
        both[row, column[now] + k] = packed[now]
        best[some] = both.topk(k, dim=1, sorted=False).values
        token, packed = token[later], packed[later]
    return best


def _least(best: Tensor) -> Tensor:
    """Return the least score in each row of `best` [t, k]: [t] float32, NaN where fewer than k are held."""
    ordered = (best.amin(1) >> 32).to(torch.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _entries(best: Tensor, beyond: int) -> Tensor:
    """Entries of packed values in ascending order, `beyond` where fewer than k are held."""
    return torch.where(best == _INVISIBLE, beyond, _LOW - (best & _LOW)).sort(dim=1).values


def _pack(scores: Tensor, entry: Tensor) -> Tensor:
    """Scores float32 of entries, of shapes that broadcast, as int64: ordered by score, of equals by lower entry."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: the two zeros are equal scores
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # a negative float's bits grow with its size: flip them
    return (ordered.long() << 32) | (_LOW - entry)
