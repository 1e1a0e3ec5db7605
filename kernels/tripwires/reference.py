"""Checksums by which ranks compare what must be the same on all of them."""

import torch
from torch import Tensor

ADDED = 0x9E3779B9
FACTOR = 0x2545F4914F6CDD1D
CHECKED = 1 << 18  # words in a tile, whose temporaries are 8 bytes for each


def checksums(tensors: list[Tensor]) -> Tensor:
    """Of each tensor a number that any change of its shape, its bits or their order is all but sure to change.

    Equation: ``mark + sum_i (word_i + ADDED) (i FACTOR | 1)``, i from 1, of integers of 64 bits that wrap around; words
    and mark are those of `words` and `mark`. It is a sum that no order changes.

    Parameters
    ----------
    tensors
        Of any shape and dtype, on one device.

    Returns
    -------
    Tensor
        [n] int64, on that device: nothing is brought over.

    """
    return torch.stack([_checksum(x) for x in tensors])


def mark(x: Tensor) -> int:
    """What the shape of a tensor adds to its checksum."""
    return hash(tuple(x.shape)) % (1 << 62)


def words(x: Tensor) -> Tensor:
    """The bits of a tensor: [n] int32, or [n] uint8 where they are no whole words."""
    given = bits(x)
    return given.view(torch.int32) if given.numel() % 4 == 0 else given


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor, [n] uint8, in the order of its numbers."""
    return x.contiguous().flatten().view(torch.uint8)


def _checksum(x: Tensor) -> Tensor:
    given = words(x)
    total = torch.full((), mark(x), device=x.device)
    for start in range(0, given.numel(), CHECKED):
        tile = given[start : start + CHECKED].long()
        place = torch.arange(start + 1, start + 1 + tile.numel(), device=x.device)
        total += (tile.add_(ADDED) * (place * FACTOR | 1)).sum()
    return total
