"""How a call of attention is cut up: a function of shapes, dtypes and the kind of GPU, never of a position."""

from typing import NamedTuple

import triton
from torch import Tensor

from kernels.target import blackwell

PROGRAMS = 132  # to fill the machine with: multiprocessors of an H200; a B200 has 148
ROWS = (
    64  # (token, head) rows of a program: what tensor cores take, and all that 512 fp32 columns of them leave room for
)
KEYS = 64  # keys of a tile
TENSOR, FP8, CODED, BASED = 0, 1, 2, 3  # forms of entries; queries are met as they are in the first two
WIDTH = 64  # columns of a tile at least: a group of Fp8Entries


def _keys(*, narrow: bool, decoded: bool) -> int:
    """Keys of a tile, as many as there is room for.

    Decoded ones pass through registers; and the compiler keeps a tile more for Blackwell, whose products run behind.
    """
    if not narrow:
        return min(KEYS, 16)
    return KEYS // 2 if decoded or blackwell() else KEYS


class Launch(NamedTuple):
    """How one call is cut up."""

    tokens: int  # of a row tile
    heads: int  # of a row tile
    keys: int  # of a tile
    width: int  # columns of a tile, a power of two
    programs: int  # row tiles
    splits: int  # programs of a row tile
    narrow: bool  # whether products are of bf16


def launch(q: Tensor, window: int, most: int, *, narrow: bool, form: int, shared: bool) -> Launch:
    """Cut up a call in which a token sees `most` entries at most; `shared`: tokens may share a tile of them.

    `form` of entries is TENSOR, FP8, CODED or BASED; what CODED rotates has no columns beside its own.

    In fp32 no tensor core is used and a tile of 64 rows would not leave room for keys: tiles are small, and slow.
    """
    t, h, d = q.shape
    rows = ROWS if narrow else min(ROWS, 16)
    keys = _keys(narrow=narrow, decoded=form != TENSOR)
    heads = min(rows, triton.next_power_of_2(h))
    tokens = min(rows // heads, triton.next_power_of_2(t)) if shared else 1
    if tokens * heads < 16:  # a dot takes no fewer rows
        heads = 16 // tokens
    programs = triton.cdiv(t, tokens) * triton.cdiv(h, heads)
    room = max(1, PROGRAMS // programs)

    def tiles(size: int) -> int:
        return -(-(tokens + window - 1) // size) - (-most // size)

    if 2 * tiles(keys) <= room:  # shorter tiles, for more programs
        keys = max(16, keys // 2)
    width = d if form == CODED else max(WIDTH, triton.next_power_of_2(d))
    return Launch(tokens, heads, keys, width, programs, min(room, tiles(keys)), narrow)


def split_rows(tokens: int, heads: int, window: int, most: int, *, narrow: bool) -> int:
    """(token, head) rows that splits keep sums of, at most, in calls of up to so many tokens; 0: none is split.

    There are no more row tiles times splits than PROGRAMS; on Blackwell tiles have fewer keys, never fewer than 16.
    """
    rows = ROWS if narrow else 16
    splits = min(PROGRAMS, triton.cdiv(rows + window - 1, 16) + triton.cdiv(most, 16))
    return min(PROGRAMS * rows, tokens * heads * splits) if splits > 1 else 0
