"""Codes of the Lloyd-Max codebooks (`kernels.formats.lloyd_max_reference`), and how they are packed into bytes.

Code i of a row takes bits ``i b .. i b + b - 1`` of the row's bytes, the low bits of a byte first: with 4 bits the even
column is the low nibble, as in `kernels.formats.stored.Fp4`; 3 bits pack 8 codes into 3 bytes, 6 bits 4 into 3. No bit
is spent on padding.
"""

import math
from functools import cache

import torch
from torch import Tensor

from fathom.kernels.formats.lloyd_max_reference import BITS, codebook, distortion

__all__ = [
    "BITS", "codebook", "decode", "decode_packed", "distortion", "encode", "look_up", "pack", "packed_bytes",
    "rounded_codebook", "unpack", "word_table",
]  # fmt: skip


def encode(x: Tensor, bits: int) -> Tensor:
    """Index of the centroid nearest to each number, uint8 of the same shape; a tie goes to the lower index."""
    return torch.bucketize(x.float().contiguous(), _midpoints(bits, x.device), out_int32=True).to(torch.uint8)


def decode(codes: Tensor, bits: int) -> Tensor:
    """Centroids of `codes` [...] uint8, float32 of the same shape."""
    return codebook(bits, codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def packed_bytes(columns: int, bits: int) -> int:
    """Bytes of a row of `columns` codes, which must fill whole bytes."""
    group, _ = _word(bits)
    assert columns % group == 0, f"{columns} codes of {bits} bits do not fill groups of {group}"
    return columns * bits // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack `codes` [n, d] uint8, each below 2^bits, into [n, d * bits / 8] uint8."""
    n, d = codes.shape
    group, size = _word(bits)
    out = torch.empty(n, packed_bytes(d, bits), dtype=torch.uint8, device=codes.device)
    place = torch.arange(group, device=codes.device) * bits
    word = (codes.unflatten(1, (-1, group)).long() << place).sum(-1)  # [n, d / group]
    for byte in range(size):
        out[:, byte::size] = (word >> (8 * byte) & 255).to(torch.uint8)
    return out


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Undo `pack`: [n, m] uint8 to [n, 8 m / bits] uint8."""
    group, size = _word(bits)
    place = torch.arange(size, device=packed.device) * 8
    word = (packed.unflatten(1, (-1, size)).long() << place).sum(-1, keepdim=True)  # [n, m / size, 1]
    shift = torch.arange(group, device=packed.device) * bits
    codes: Tensor = (word >> shift & ((1 << bits) - 1)).to(torch.uint8)
    return codes.flatten(1)


def decode_packed(packed: Tensor, bits: int) -> Tensor:
    """Centroids of packed codes: [n, m] uint8 to [n, 8 m / bits] float32."""
    return look_up(packed, bits, _centroid_words(bits, packed.device))


def look_up(packed: Tensor, bits: int, words: Tensor) -> Tensor:
    """Look packed codes up in `words`, which `word_table` made: [n, m] uint8 to [n, 8 m / bits] in its dtype.

    Codes of 1, 2 and 4 bits are looked up a byte at a time and those of 3 and 6 bits 12 bits at a time, among all rows
    that such a word can mean.
    """
    if bits in (5, 7):
        word = unpack(packed, bits)
    elif bits in (3, 6):
        low, middle, high = packed.int().unflatten(1, (-1, 3)).unbind(-1)
        word = torch.stack((low | (middle & 15) << 8, middle >> 4 | high << 4), dim=-1)
    else:
        word = packed
    found = _as_numbers(words).index_select(0, word.flatten().int())
    return found.view(words.dtype).view(packed.shape[0], 8 * packed.shape[1] // bits)


def _as_numbers(words: Tensor) -> Tensor:
    """A table with one number of 4, 8 or 16 bytes for each row where there is such: looked up three times as fast."""
    if not words.is_contiguous():
        return words
    dtype = {4: torch.int32, 8: torch.int64, 16: torch.complex128}.get(words.shape[1] * words.element_size())
    return words if dtype is None else words.view(dtype)[:, 0]


def word_table(table: Tensor) -> Tensor:
    """What each word of codes means in `table` [2^bits]: [words, codes per word]."""
    bits = table.shape[0].bit_length() - 1
    width = {3: 12, 5: 5, 6: 12, 7: 7}.get(bits, 8)
    words = torch.arange(1 << width, device=table.device)[:, None]
    return table[words >> torch.arange(0, width, bits, device=table.device) & ((1 << bits) - 1)]


def _word(bits: int) -> tuple[int, int]:
    """Codes and bytes of the shortest run of codes that fills whole bytes."""
    assert bits in BITS, f"{bits} bits, want 1 to 8"
    common = math.gcd(8, bits)
    return 8 // common, bits // common


@cache
def rounded_codebook(bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`codebook` in another dtype, [2^bits]; shared, not to be written to."""
    return codebook(bits, device).to(dtype)


@cache
def _centroid_words(bits: int, device: torch.device) -> Tensor:
    return word_table(codebook(bits, device))


@cache
def _midpoints(bits: int, device: torch.device) -> Tensor:
    """Midpoints between centroids, [2^bits - 1] float32: of the centroids in float64, which are symmetric."""
    centroids = codebook(bits, device).double()
    return ((centroids[1:] + centroids[:-1]) / 2).float()
