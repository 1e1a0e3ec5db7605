"""Shared-KV attention in tiles: memory does not grow with the context.

This is for many tokens, and for entries in a coded form: others have `kernels.attention.cpu_few`. Tokens are taken a
few at a time. For these, keys arrive in tiles (at most two row ranges of the ring, then entries) and are folded into a
running softmax (peak, total, accumulator, all fp32), so no logits and no gathered rows beyond one tile ever exist;
entries in a narrow form are decoded tile by tile as well. Those that are stored under a Hadamard transform stay there:
queries are transformed, and the sum once at its end; the window's is kept apart until then. A token's result depends on
the tiles it fell into by rounding alone. Rows that no token of the tile may see are not read, whatever they hold; NaN
in any other row reaches every token of the tile, which may be more than saw it, but never fewer.

Selected entries can be read in two ways: as masked tiles of all visible ones, or gathered row by row. Time of gathering
over time of masking, by visible entries over top-k (``bench kernels --only attend``, one core of an AVX-512 Xeon,
median of 5 to 50 interleaved rounds, spread about 10 %, 40 % for one token):

    heads x width, tokens    1    1.5      2      4     10     20     40
    16 x 128,   1         1.01   1.01   0.98   0.86   0.61   0.34   0.21
    16 x 128,  16         1.34   0.98   0.83   0.50   0.24   0.13   0.07
    16 x 128, 128         1.60   1.13   0.87   0.49   0.22   0.11   0.06
    16 x 128, 512         1.62   1.14   0.83   0.49   0.22   0.11   0.06
    64 x 512,   1         1.19   0.91   0.73   0.45   0.20   0.11   0.05
    64 x 512,  16         1.51   0.99   0.79   0.40   0.17   0.09   0.04

So masking pays until 1.5 times as many entries are visible as are selected, whatever the chunk. In which form entries
are stored does not enter: it must change no bit of the result, and the two ways differ by rounding.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fathom.kernels.attention.cpu_few import HEADS, attend_few, most_parts, state_of_part
from fathom.kernels.formats.cpu_rows import readable
from fathom.kernels.formats.rows import (
    Rows,
    length,
    query_as_stored,
    read_as_stored,
    sum_as_read,
    take_as_stored,
    width,
)
from fathom.kernels.formats.stored import Slots
from fathom.kernels.softmax import Softmax

FEW = 8  # tokens up to which keys are read one by one
ROWS = 1024  # (token, head) pairs per tile
LOGITS = 1 << 19  # numbers in a tile of logits: 2 MiB
KEYS = 1 << 19  # numbers in a tile of keys, shared or gathered: 2 MiB
DENSE_UP_TO = 1.5  # visible entries over selected ones, up to which masked tiles beat gathered rows: see above
# Of scratch: bytes of a number of a narrow entry while a tile is decoded to fp32: E4M3 at once; codes
# by word, centroid, product and code; coefficients are then joined with the rope dims.
_DECODED = {"fp8": 4, "coded": 14, "based": 22}


def attend(
    q: Tensor,
    ring: Tensor,
    first: int,
    window: int,
    entries: Rows | Slots | None,
    ratio: int,
    selected: Tensor | None,
    sink: Tensor,
    *,
    dense_up_to: float = DENSE_UP_TO,
) -> Tensor:
    """Attend from each token to its window and to compressed entries: `kernels.attention.reference.attend`.

    That the entries of a row of `selected` are distinct is not checked here: gathered rows would count one that comes
    twice twice, masked tiles once.

    `dense_up_to` is for tests and benchmarks, which force one of the two ways to read selected entries, for a few
    tokens too.
    """
    t, h, _ = q.shape
    capacity = ring.shape[0]
    assert capacity >= window + t - 1, f"a ring of {capacity} cannot hold window {window} and {t} new tokens"
    slots = entries if entries is None or isinstance(entries, Slots) else Slots(entries, None, 0)
    if t <= FEW and dense_up_to == DENSE_UP_TO and readable(ring if slots is None else slots.rows):
        return attend_few(q, ring, first, window, slots, ratio, selected, sink)
    out = torch.empty_like(q)
    tokens = max(1, ROWS // h)
    for start in range(0, t, tokens):
        own = slice(start, min(start + tokens, t))
        rows = None if selected is None else selected[own]
        out[own] = _attended(q[own], ring, first + start, window, slots, ratio, rows, sink, dense_up_to)
    return out


def _attended(
    q: Tensor, ring: Tensor, first: int, window: int, slots: Slots | None, ratio: int, selected: Tensor | None,
    sink: Tensor, dense_up_to: float,
) -> Tensor:  # fmt: skip
    """`attend` of a tile of tokens: [t, h, d] float32. Nothing of one tile is alive while the next runs."""
    scaled = q.float() * q.shape[2] ** -0.5
    state = _begin(scaled, sink)
    for keys, seen in _window_tiles(ring, first, first + len(q), window, keys_per_tile(*scaled.shape)):
        _accumulate(state, scaled, keys, seen)
    if slots is not None:
        _attend_as_stored(state, scaled, slots, first, ratio, selected, dense_up_to)
    return state.values[0] / state.total[..., None]


def attend_scratch(
    tokens: int, heads: int, width: int, window: int, entries: int, selected: int, form: str, item: int
) -> int:
    """Bytes alive at most in `attend` to `entries`, of which each token reads `selected` (0: all), the result included.

    `form` is how entries are stored: dtype, fp8, coded (`CodedRows`) or based (`BasisRows`).
    """
    if tokens <= FEW and form in ("dtype", "fp8"):
        state = -(-heads // HEADS) * most_parts(window, selected or entries, heads) * state_of_part(width)
        return tokens * heads * width * item + state * 4
    rows = min(tokens, max(1, ROWS // heads))
    dense = min(entries, int(DENSE_UP_TO * selected)) if selected else entries
    queries, decoded = rows * heads * width * 4, _DECODED.get(form, 0 if item == 4 else 4)
    shared = min(keys_per_tile(rows, heads, width), max(window + rows, dense))
    tile = queries + shared * (width * decoded + rows * (heads * 4 + 1))
    gathered = 4 + (decoded + 1 if form in _DECODED else item)  # bytes of a number, in two tiles
    if selected:
        keys = min(selected, 256)
        some = min(rows, max(1, KEYS // (keys * width)))
        by_row = some * (keys * (width * gathered + heads * 4 + 8) + heads * width * 4)
        tile = max(tile, by_row) + rows * selected * 15  # which, as they are and as an index; whether each may be seen
    inside = (2 if form in ("coded", "based") else 0) * queries  # queries and sums in the space of the codes
    if inside:
        tile = max(tile, inside + (2 * queries + width**2 * 4 if form == "based" else 0))
    return tokens * heads * width * item + 2 * queries + inside + tile


def keys_per_tile(t: int, h: int, d: int) -> int:
    """Keys per tile for tokens [t, h, d], shared by all: few tokens take long tiles, for fewer calls."""
    return max(1, min(LOGITS // (t * h), KEYS // d))


def _begin(q: Tensor, sink: Tensor) -> Softmax:
    """Softmax of tokens and heads [t, h] over the sink alone, which has no value.

    The peak is finite even where the sink is not, so that no difference of peaks is inf - inf. A sink of -inf then
    leaves a total of 0 and one of +inf a total of inf, which makes the output 0.
    """
    limits = torch.finfo(torch.float32)
    peak = sink.clamp(limits.min, limits.max)
    total = torch.exp(sink - peak)
    shape = q.shape[:2]
    return Softmax(peak.expand(shape).clone(), total.expand(shape).clone(), (torch.zeros_like(q),))


def _accumulate(state: Softmax, q: Tensor, keys: Tensor, seen: Tensor | None, bias: Tensor | None = None) -> None:
    """Fold one tile of keys into the running softmax of tokens `q` [t, h, d], scaled by d^-0.5.

    `keys` is [m, d], shared by the tokens, or [t, m, d]; `seen` [t, m] says which token sees which key, None: all do.
    `bias`, [m] or [t, 1, m], is added to the logits.
    """
    keys = keys.float()
    logits = q @ keys.mT  # [t, h, m]
    if bias is not None:
        logits += bias
    if seen is not None:
        logits.masked_fill_(~seen[:, None], float("-inf"))
    masses = state.fold(logits)
    state.values[0].add_(masses @ keys)


def _window_tiles(
    ring: Tensor, start: int, stop: int, window: int, tile: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Keys that positions `start` to `stop` - 1 see in their windows, at most `tile` at once, with who sees them."""
    capacity = ring.shape[0]
    position = torch.arange(start, stop, device=ring.device)[:, None]  # [t, 1]
    low = max(0, start - window + 1)
    while low < stop:
        row = low % capacity
        high = min(low + tile, stop, low + capacity - row)  # a tile ends where the ring does
        key = torch.arange(low, high, device=ring.device)  # [m] positions
        all_see = low > stop - 1 - window and high - 1 <= start
        seen = None if all_see else (key <= position) & (key > position - window)
        yield ring[row : row + high - low], seen
        low = high


def _bias(slots: Slots, index: slice | Tensor) -> Tensor | None:
    """Biases of a tile of rows, [m], or of rows `index` [t, m] as [t, 1, m]: to be added to logits [t, h, m]."""
    if slots.bias is None:
        return None
    return slots.bias[index] if isinstance(index, slice) else slots.bias[index.long()][:, None]


def _attend_as_stored(
    state: Softmax,
    q: Tensor,
    entries: Slots,
    start: int,
    ratio: int,
    selected: Tensor | None,
    dense_up_to: float,
) -> None:
    """`_attend_entries` in the space in which they are stored, see `rows.query_as_stored`; the window is in its own."""
    inside = query_as_stored(entries.rows, q)
    if inside is q:
        _attend_entries(state, q, entries, start, ratio, selected, dense_up_to)
        return
    there = Softmax(state.peak.clone(), state.total, (torch.zeros_like(inside),))
    _attend_entries(there, inside, entries, start, ratio, selected, dense_up_to)
    del inside
    shrink = torch.exp(state.peak - there.peak)
    state.values[0].mul_(shrink[..., None]).add_(sum_as_read(entries.rows, there.values[0]))
    state.peak.copy_(there.peak)


def _attend_entries(
    state: Softmax,
    q: Tensor,
    entries: Slots,
    start: int,
    ratio: int,
    selected: Tensor | None,
    dense_up_to: float,
) -> None:
    """Fold in the entries that positions from `start` on see."""
    t, n = q.shape[0], length(entries.rows)
    position = torch.arange(start, start + t, device=q.device)
    visible = ((position + 1) // ratio - entries.hidden).clamp(0, n)[:, None]  # [t, 1]
    fewest, most = (max(0, min((at + 1) // ratio - entries.hidden, n)) for at in (start, start + t - 1))
    if most == 0:
        return
    tile = keys_per_tile(*q.shape)
    if selected is None:
        for low in range(0, most, tile):
            high = min(low + tile, most)
            entry = torch.arange(low, high, device=q.device)
            seen = None if high <= fewest else entry < visible
            _accumulate(state, q, read_as_stored(entries.rows, low, high), seen, _bias(entries, slice(low, high)))
        return
    valid = (selected >= 0) & (selected < visible)  # [t, k]
    if most <= dense_up_to * selected.shape[1]:
        # One column beyond the last takes all that is invalid. Bounded: at most DENSE_UP_TO * k bytes per token.
        chosen = torch.zeros(t, most + 1, dtype=torch.bool, device=q.device)
        chosen.scatter_(1, torch.where(valid, selected, most).long(), value=True)
        for low in range(0, most, tile):
            high = min(low + tile, most)
            part = chosen[:, low:high]
            _accumulate(state, q, read_as_stored(entries.rows, low, high), part, _bias(entries, slice(low, high)))
    else:
        _attend_gathered(state, q, entries, torch.where(valid, selected, 0), valid)


def _attend_gathered(state: Softmax, q: Tensor, entries: Slots, index: Tensor, valid: Tensor) -> None:
    """Fold in entries `index` [t, k] row by row; where not `valid`, the index is any entry that may be read."""
    t, k = index.shape
    d = width(entries.rows)
    keys = max(1, min(k, 256))  # a selection may be of none
    tokens = max(1, KEYS // (keys * d))
    for start in range(0, t, tokens):
        part = slice(start, start + tokens)
        for low in range(0, k, keys):
            chosen = index[part, low : low + keys]  # [t, m]
            rows = take_as_stored(entries.rows, chosen.flatten()).unflatten(0, chosen.shape)  # [t, m, d]
            tile = Softmax(state.peak[part], state.total[part], (state.values[0][part],))
            _accumulate(tile, q[part], rows, valid[part, low : low + keys], _bias(entries, chosen))
