"""Attention of a few tokens: every key is decoded once for HEADS heads, straight from its stored form.

The keys of a token, those of its window first, are cut into parts, whose number follows from how many there are and
nothing else. A part is a running softmax of some heads; parts are put together in their order. So a token has the
same bits alone and among others, on every number of threads.
"""

from typing import Final

import numpy as np
import torch
from numba import types
from torch import Tensor

from fathom.kernels.compiled import address, aligned, compiled, each_of, loop, numbers
from fathom.kernels.formats.cpu_rows import BF16, KIND, addresses, decode_row, row_arrays
from fathom.kernels.formats.rows import length
from fathom.kernels.formats.stored import Slots
from fathom.kernels.lanes import (
    dots,
    exp,
    first,
    fma,
    highest,
    load,
    load_splat,
    splat,
    store,
    store_some,
    total,
)

HEADS: Final = 32  # that share a decoded key, sixteen at a time: a multiple of 16
KEYS: Final = 64  # of a part, at least
PARTS: Final = 32  # of a token's keys, at most, times its blocks of heads
_LIMIT: Final = np.float32(np.finfo(np.float32).max)  # of peaks, which begin finite so that none differ by inf - inf
_INFINITY: Final = np.float32(np.inf)
_ZERO: Final = np.float32(0)
_I64: Final = types.int64


def attend_few(
    q: Tensor, ring: Tensor, position: int, window: int, entries: Slots | None, ratio: int, selected: Tensor | None,
    sink: Tensor,
) -> Tensor:  # fmt: skip
    """`kernels.attention.reference.attend` of a few tokens, in one compiled call."""
    t, h, d = q.shape
    recent, kept = addresses(ring)
    older, rows, n, hidden, bias = recent, None, 0, 0, None
    if entries is not None:
        older, rows = addresses(entries.rows)
        hidden, bias = entries.hidden, None if entries.bias is None else entries.bias.contiguous()
        n = max(0, min((position + t) // ratio - hidden, length(entries.rows)))  # that the last token sees
    selected = None if selected is None or entries is None else selected.contiguous()
    picks = -1 if selected is None else selected.shape[1]
    parts = most_parts(window, n if picks < 0 else picks, h)
    state = torch.empty(-(-h // HEADS) * parts * state_of_part(d))
    sink, out = sink.contiguous(), torch.empty(t, h, d, dtype=q.dtype)
    queries, given = addresses(q.reshape(t * h, d))
    _attend(
        queries, d**-0.5, recent, kept.shape[0], position, window, older, n, ratio,
        hidden, address(bias), address(selected), picks, address(sink), t, h, parts, address(state), address(out),
    )  # fmt: skip
    del rows, given  # copies lay where their addresses said, until now
    return out


def most_parts(window: int, entries: int, heads: int) -> int:
    """Parts of a token's keys, at most."""
    return min(max(1, PARTS // -(-heads // HEADS)), -(-(window + entries) // KEYS))


def state_of_part(width: int) -> int:
    """Numbers in the running softmax of HEADS heads: peaks, totals, sums of columns filled up to 32."""
    return HEADS * (2 + (width + 31) // 32 * 32)


@loop
def _part_size(count, blocks):
    """Keys of a part, a multiple of 16."""
    parts = max(1, PARTS // blocks)
    return max(KEYS, (count + 16 * parts - 1) // (16 * parts) * 16)


@loop
def _seen(position, window, n, ratio, hidden, picks):
    """The oldest position of a token's window, the entries that are visible, and places of keys in all."""
    oldest = max(0, position - window + 1)
    visible = max(0, min((position + 1) // ratio - hidden, n)) if n > 0 else 0
    return oldest, visible, position + 1 - oldest + (visible if picks < 0 else picks)


@loop
def _parts(
    low, high, token, q, scale, ring, capacity, position, window, entries, n, ratio, hidden, bias, selected, picks,
    heads, parts, state,
):  # fmt: skip
    """Parts of a token's keys, each for some of its heads; `position` is the token's."""
    width = ring.width
    wide, blocks = (width + 31) // 32 * 32, (heads + HEADS - 1) // HEADS
    keys, queries = aligned(16 * wide, state), aligned(HEADS * wide, state)
    masses, biases = aligned(256, state), aligned(16, state)
    oldest, visible, count = _seen(position, window, n, ratio, hidden, picks)
    recent, size, held = position + 1 - oldest, _part_size(count, blocks), -1
    for item in range(low, high):
        part, head = item % parts, item // parts * HEADS
        some, end = min(HEADS, heads - head), min((part + 1) * size, count)
        if part * size >= count:
            continue
        if head != held:
            _scaled(q, token * heads + head, some, scale, queries, wide)
            held = head
        at = item * HEADS * (2 + wide)
        for begin in range(at, at + some * (2 + wide), 16 * (2 + wide)):
            store(state, begin, splat(-_LIMIT))
            for i in range(begin + 16, begin + 16 * (2 + wide), 16):
                store(state, i, splat(_ZERO))
        filled = 0
        for place in range(part * size, end):
            row, source, seen, more = (oldest + place) % capacity, ring, True, _ZERO
            if place >= recent:
                row, source = place - recent, entries
                if picks >= 0:
                    row = np.int64(numbers(selected, np.int32)[token * picks + row])
                seen = 0 <= row < visible
                if seen and bias != 0:
                    more = numbers(bias, np.float32)[row]
            if seen:
                decode_row(source, row, keys, filled * 16, np.int64(256))
                biases[filled] = more
                filled += 1
            if filled == 16 or (place == end - 1 and filled > 0):
                for i in range(0, some, 16):
                    sixteen = min(16, some - i)
                    _fold(queries, i * wide, keys, biases, filled, sixteen, wide, masses, state, at + i * (2 + wide))
                filled = 0


@loop
def _scaled(q, row, heads, scale, queries, wide):
    """Queries of some heads, in rows that are filled up."""
    s = splat(np.float32(scale))
    for head in range(heads):
        decode_row(q, row + head, queries, head * wide, np.int64(16))
    for i in range(0, heads * wide, 16):
        store(queries, i, load(queries, i) * s)


@loop
def _fold(queries, query, keys, biases, count, heads, wide, masses, state, at):
    """Take a block of up to sixteen keys into the running softmax of sixteen heads in `state` from `at` on."""
    groups, old = wide // 16, load(state, at)
    for head in range(0, heads, 4):
        a, b, c, d = dots(queries, query + head * wide, wide, keys, groups)
        _logits(a, biases, count, masses, head, state, at)
        _logits(b, biases, count, masses, head + 1, state, at)
        _logits(c, biases, count, masses, head + 2, state, at)
        _logits(d, biases, count, masses, head + 3, state, at)
    shrink = exp(old - load(state, at))
    for head in range(heads):
        store(masses, head * 16, exp(load(masses, head * 16) - load_splat(state, at + head)))
    totals = at + 16
    store(state, totals, load(state, totals) * shrink)
    for head in range(heads):
        state[totals + head] += total(load(masses, head * 16))
    factors = np.empty(16, np.float32)
    store(factors, 0, shrink)
    for head in range(0, heads, 4):
        _weigh(masses, head * 16, keys, count, groups, factors, head, state, at + 32 + head * wide, wide)


@loop
def _logits(products, biases, count, logits, head, state, at):
    """Keep the logits of a head, and the peak."""
    found = first(products + load(biases, 0), count, splat(-_INFINITY))
    store(logits, head * 16, found)
    top = highest(found)  # a comparison leaves out NaN: masses will be NaN
    state[at + head] = max(state[at + head], top)


@loop
def _weigh(masses, mass, keys, count, groups, factors, head, state, to, wide):
    """Shrink the sums of four heads and add keys by their masses, 32 columns at a time."""
    p, r, s, u = (load_splat(factors, head), load_splat(factors, head + 1), load_splat(factors, head + 2),
                  load_splat(factors, head + 3))  # fmt: skip
    for group in range(0, groups, 2):
        a, b = load(state, to) * p, load(state, to + 16) * p
        c, d = load(state, to + wide) * r, load(state, to + wide + 16) * r
        e, f = load(state, to + 2 * wide) * s, load(state, to + 2 * wide + 16) * s
        g, h = load(state, to + 3 * wide) * u, load(state, to + 3 * wide + 16) * u
        begin = group * 256
        for j in range(count):
            one, other = load(keys, begin + j * 16), load(keys, begin + 256 + j * 16)
            m = load_splat(masses, mass + j)
            a, b = fma(m, one, a), fma(m, other, b)
            m = load_splat(masses, mass + 16 + j)
            c, d = fma(m, one, c), fma(m, other, d)
            m = load_splat(masses, mass + 32 + j)
            e, f = fma(m, one, e), fma(m, other, f)
            m = load_splat(masses, mass + 48 + j)
            g, h = fma(m, one, g), fma(m, other, h)
        store(state, to, a)
        store(state, to + 16, b)
        store(state, to + wide, c)
        store(state, to + wide + 16, d)
        store(state, to + 2 * wide, e)
        store(state, to + 2 * wide + 16, f)
        store(state, to + 3 * wide, g)
        store(state, to + 3 * wide + 16, h)
        to += 32


@loop
def _merge(low, high, token, position, window, n, ratio, hidden, picks, sink, heads, width, parts, state, out, narrow):
    """Put the parts of a token's heads together, and the sink, which has a mass and no value."""
    wide, blocks = (width + 31) // 32 * 32, (heads + HEADS - 1) // HEADS
    factors, totals = np.empty(PARTS + 16, np.float32), np.empty(PARTS + 1, np.float32)
    count, stride = _seen(position, window, n, ratio, hidden, picks)[2], HEADS * (2 + wide)
    size = _part_size(count, blocks)
    used = (count + size - 1) // size
    for head in range(low, high):
        to, lane = (token * heads + head) * width, head % 16
        begin = head // HEADS * parts * stride + head % HEADS // 16 * 16 * (2 + wide)
        peak = max(-_LIMIT, min(_LIMIT, sink[head])) if sink[head] == sink[head] else -_LIMIT
        for part in range(used):
            factors[part] = state[begin + part * stride + lane]
            totals[part] = state[begin + part * stride + 16 + lane]
            peak = max(peak, factors[part])
        factors[used], totals[used] = sink[head], np.float32(1)
        for i in range(0, used + 1, 16):
            store(factors, i, exp(load(factors, i) - splat(peak)))
        mass = _ZERO
        for part in range(used + 1):
            mass += totals[part] * factors[part]
        for i in range(0, width, 16):
            at = begin + 32 + lane * wide + i
            y = splat(_ZERO)
            for part in range(used):
                y = fma(load(state, at + part * stride), load_splat(factors, part), y)
            if narrow:
                store_some(numbers(out, np.uint16), to + i, y / splat(mass), width - i)
            else:
                store_some(numbers(out, np.float32), to + i, y / splat(mass), width - i)


@compiled(
    (
        KIND, types.float64, KIND, _I64, _I64, _I64, KIND, _I64, _I64, _I64, _I64, _I64, _I64, _I64,
        _I64, _I64, _I64, _I64, _I64,
    )
)  # fmt: skip
def _attend(
    q, scale, ring, capacity, position, window, entries, n, ratio, hidden, bias, selected, picks, sink, tokens,
    heads, parts, state, out,
):  # fmt: skip
    queries, recent, older = row_arrays(q), row_arrays(ring), row_arrays(entries)
    width, items, sums = recent.width, (heads + HEADS - 1) // HEADS * parts, numbers(state, np.float32)
    work = heads * width * (window + (n if picks < 0 else picks)) // 4
    for token in range(tokens):
        at = position + token
        of_parts = (
            token, queries, scale, recent, capacity, at, window, older, n, ratio, hidden, bias, selected, picks, heads,
            parts, sums,
        )  # fmt: skip
        of_heads = (
            token, at, window, n, ratio, hidden, picks, numbers(sink, np.float32), heads, width, parts, sums, out,
            queries.form == BF16,
        )  # fmt: skip
        each_of(_parts, items, work, of_parts)
        each_of(_merge, heads, work, of_heads)
