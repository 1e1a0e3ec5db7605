"""How a call of attention is cut up: a function of shapes and dtypes, never of a position.

A call of up to SHORT tokens is cut up as so many calls of one token: each token has the bits that it has alone. More
entries than a token sees, which a capacity or another token brings, change none of its numbers: see `_attend`.

In bf16 a program of more tokens has 64 rows, because sums of 128 rows of 512 columns are all registers that a Hopper's
multiprocessor has, and all of a Blackwell's tensor memory. Where row tiles alone fill a Hopper, a tile has 64 keys, two
of which have room beside the queries in shared memory: products twice as wide, for which ptxas waits not one by one.
Where they do not, it has 32, so that there are more of them to deal out, and three have room; so always on a Blackwell,
for which the compiler keeps one tile more.

Of up to SHORT tokens a program has a quarter of a token's heads, so that more of them share the latency of its loads.
On an H200 a token of V4-Flash took 9 and 15 us to attend to its window and to 512 entries where it took 13 and 18 with
all heads in one, though 35 us to 8,192 entries where it took 30. How many entries there are does not decide: on that no
bit may depend.

Beside the sums of 64 rows there are no registers left to decode Fp8Entries in: what many tokens meet is decoded first,
once, to the same bits. 4,096 tokens that met 512 entries each took an H200 0.6 ms longer than of bf16, 0.29 ns an
entry; to read and write one takes 0.37 ns at its 4.3 TB/s. AHEAD leaves room for what was not measured.
"""

from typing import NamedTuple

import triton

PROGRAMS = 132  # to fill the machine with: multiprocessors of an H200; a B200 has 148
SHORT = 8  # tokens of a call, at most, that are treated as calls of one
ROWS = 64  # (token, head) rows of a program
FEW_TILES = 4  # row tiles of a token, of up to SHORT of them; V4-Pro's, of 32 rows, were not measured
KEYS = 32  # keys of a tile, of what several programs share
MANY_KEYS = 64  # of what a program has to itself
EXACT = 16  # rows, and keys, in fp32: no tensor core multiplies it, and more would not leave room
LEAST = 16  # rows that a dot takes
AHEAD = 2  # times that a row of Fp8Entries is met; where it is more, all are decoded first
TENSOR, FP8, CODED, BASED = 0, 1, 2, 3  # forms of entries; queries are met as they are in the first two
WIDTH = 64  # columns of a tile at least: a group of Fp8Entries


class Launch(NamedTuple):
    """How one call is cut up."""

    tokens: int  # of a row tile
    heads: int  # of a row tile
    keys: int  # of a tile
    width: int  # columns of a tile, a power of two
    programs: int  # row tiles
    splits: int  # programs of a row tile
    narrow: bool  # whether products are of bf16
    stages: int  # steps of fetching and multiplying that are under way at a time


def launch(
    t: int, h: int, d: int, window: int, most: int, *, narrow: bool, form: int, shared: bool, wide: bool = False
) -> Launch:
    """Cut up a call of queries [t, h, d] in which a token sees `most` entries at most.

    `shared`: tokens may share a tile of entries. `form` of entries is TENSOR, FP8, CODED or BASED; what CODED rotates
    has no columns beside its own. `wide`: whether tiles of MANY_KEYS have room.
    """
    rows, keys = (ROWS, KEYS) if narrow else (min(ROWS, EXACT), min(KEYS, EXACT))
    if t <= SHORT and form in {TENSOR, FP8}:
        rows = min(rows, max(LEAST, triton.next_power_of_2(h) // FEW_TILES))
    heads = min(rows, triton.next_power_of_2(h))
    tokens = min(rows // heads, triton.next_power_of_2(t)) if shared and t > SHORT else 1
    heads = max(heads, LEAST // tokens)
    of_token = triton.cdiv(h, heads)
    programs = triton.cdiv(t, tokens) * of_token
    alone = t > SHORT and programs > PROGRAMS // 2
    if wide and narrow and alone and form in {TENSOR, FP8}:
        keys = MANY_KEYS
    tiles = triton.cdiv(tokens + window - 1, keys) + triton.cdiv(most, keys)
    splits = min(tiles, max(1, PROGRAMS // (of_token if t <= SHORT else programs)))
    width = d if form == CODED else max(WIDTH, triton.next_power_of_2(d))
    stages = 3
    if form in {CODED, BASED} or keys == MANY_KEYS:  # what is decoded by many steps leaves no room either
        stages = 2
    elif form == TENSOR and not shared:  # the list of what is selected is fetched ahead of the keys
        stages = 5
    return Launch(tokens, heads, keys, width, programs, splits, narrow, stages)


def ahead(t: int, n: int, most: int) -> bool:
    """Whether `n` rows of Fp8Entries are decoded before t tokens attend to `most` of them each, at most."""
    return t > SHORT and t * most > AHEAD * n


def rows_ahead(t: int, entries: int, selected: int) -> int:
    """Rows of the memory into which they are decoded ahead, at most, of up to so many entries.

    `selected` of each token, 0: all.
    """
    if t <= SHORT:
        return 0
    most = min(entries, max(selected, (t * selected - 1) // AHEAD)) if selected else entries
    padded: int = triton.next_power_of_2(most)
    return padded


def split_rows(tokens: int, heads: int, window: int, most: int, *, narrow: bool, form: int) -> int:
    """(token, head) rows that splits keep sums of, at most, in calls of up to so many tokens; 0: none is split.

    In calls of more than SHORT there are no more row tiles times splits than PROGRAMS, and no more splits than tiles.
    """
    short, rows = min(tokens, SHORT), ROWS if narrow else EXACT
    cut = launch(short, heads, WIDTH, window, most, narrow=narrow, form=form, shared=False)
    kept = short * heads * cut.splits if cut.splits > 1 else 0
    if tokens > SHORT:
        tiles = triton.cdiv(rows + window - 1, cut.keys) + triton.cdiv(most, cut.keys)
        kept = max(kept, min(PROGRAMS * rows, tokens * heads * tiles))
    return kept
