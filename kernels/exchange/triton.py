"""Rows that a rank writes into the memory of others, where peers may write: their addresses are numbers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 1024  # of a row, that a program copies at once


@triton.jit
def _push(rows, places, addresses, words, ranks, BLOCK: tl.constexpr):
    """Copy a row to one rank's buffer, whose words are of the dtype of `rows`."""
    row, rank = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places + row * ranks + rank).to(tl.int64)
    if place < 0:
        return
    target = tl.load(addresses + rank).to(rows.dtype) + place * words
    rows += row * words
    for start in range(0, words, BLOCK):
        word = start + tl.arange(0, BLOCK)
        tl.store(target + word, tl.load(rows + word, word < words, 0), word < words)


def push(rows: Tensor, places: Tensor, addresses: Tensor) -> None:
    """Write rows into buffers of ranks, each row into as many of them as want it, bit for bit.

    Parameters
    ----------
    rows
        [n, w] of any dtype, whose rows are whole words of four bytes.
    places
        [n, ranks] int32 or int64: the row of a rank's buffer at which it wants a row, -1 where it does not.
    addresses
        [ranks] int64: where the buffers begin, tables of rows of the same width; multiples of 16.

    """
    (n, width), ranks = rows.shape, len(addresses)
    assert rows.is_contiguous(), f"rows lie {rows.stride()} apart"
    assert places.shape == (n, ranks), f"places {tuple(places.shape)}, {n} rows and {ranks} ranks"
    assert addresses.dtype == torch.int64, f"addresses: {addresses.dtype}, want int64"
    row = width * rows.element_size()
    word = torch.int64 if row % 8 == rows.data_ptr() % 8 == 0 else torch.int32
    assert row % word.itemsize == rows.data_ptr() % word.itemsize == 0, f"rows of {row} bytes are no whole words"
    if n:
        words = row // word.itemsize
        _push[n, ranks](
            rows.view(word), places.contiguous(), addresses, words, ranks,
            BLOCK=min(WORDS, triton.next_power_of_2(words)), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
