"""Tiles of Shard's middle: keys rebuilt and rotated, values looked up, in buffers that one call allocates once.

What does not depend on the token is done once a call: the scales of basis and coefficients are multiplied into the
basis, and its columns are put in the order in which the two of a rotary pair are neighbours, so that a rotation is one
complex product. Scores do not mind the order as long as queries have the same. The largest value of a channel
multiplies the sum of values, not every value.
"""

import torch
from torch import Tensor

from fathom.kernels.formats import eigenbasis
from fathom.kernels.rope import reference as rope
from fathom.kernels.shard.reference import Middle, rotated_values, turn


def middle_keys(middle: Middle, low: int, high: int) -> Tensor:
    """Rebuild keys `low` to `high` - 1 of the middle, rotated to their positions: [high - low, kv heads, d] float32."""
    stored = middle.keys
    d = 2 * middle.freqs.shape[0]
    coefficients = eigenbasis.coefficients(stored, low, high).mul_(stored.basis_scale)
    plain = torch.addmm(stored.mean.float(), coefficients, stored.basis.float().mT)
    cos, sin = rope.angles(_positions(middle, low, high), middle.freqs)
    return turn(plain.unflatten(1, (-1, d)), cos, sin, interleaved=middle.interleaved)


def middle_values(middle: Middle, low: int, high: int) -> Tensor:
    """Values `low` to `high` - 1 of the middle, in the rotated space: [high - low, kv heads, d] float32."""
    stored = middle.values
    return rotated_values(stored.codes[low:high], stored.codebook.float(), stored.largest.float())


class MiddleTiles:
    """Reads a middle in tiles of at most `tokens` tokens; a tile is valid until the next one is read."""

    def __init__(self, middle: Middle, tokens: int) -> None:
        self.middle, stored, d = middle, middle.keys, 2 * middle.freqs.shape[0]
        device, (columns, rank) = stored.codes.device, stored.basis.shape
        self.int4 = stored.bits.shape[0] == 0
        scale = stored.basis_scale.float()
        basis = (stored.basis * (scale * stored.scale if self.int4 else scale)).mT  # [r, kv heads * d]
        if self.int4:  # as codes are unpacked: the low nibbles of all bytes, then the high ones
            basis = torch.cat((basis[::2], basis[1::2]))
        self.basis, self.mean = self._paired(basis), self._paired(stored.mean.float()[None])[0]
        self.table = middle.values.codebook.float().view(torch.complex128)[:, 0]  # four channels are one number of 16 B
        self.largest = middle.values.largest.float()[
            :, None
        ]  # [kv heads, 1, d], by which sums of values are multiplied
        groups = middle.values.codes.shape[1]
        self.nibbles = torch.empty(tokens, rank // 2, dtype=torch.uint8, device=device)
        self.coefficients = torch.empty(tokens, rank, device=device)
        self.rebuilt = torch.empty(tokens, columns, device=device)
        self.index = torch.empty(tokens * groups, dtype=torch.int32, device=device)
        self.found = torch.empty(tokens * groups, dtype=torch.complex128, device=device)
        self.width = d

    def queries(self, q: Tensor) -> Tensor:
        """Queries [kv heads, rows, d] in the order that `keys` has."""
        return self._paired(q)

    def keys(self, low: int, high: int) -> Tensor:
        """Keys `low` to `high` - 1 as they were before compression, rotated; pairs are neighbours: [m, kv heads, d]."""
        m = high - low
        keys = torch.addmm(self.mean, self._coefficients(low, high), self.basis, out=self.rebuilt[:m])
        cos, sin = rope.angles(_positions(self.middle, low, high), self.middle.freqs)
        by_head = keys.view(m, -1, self.width)
        torch.view_as_complex(by_head.unflatten(-1, (-1, 2))).mul_(torch.complex(cos, sin)[:, None])
        return by_head

    def values(self, low: int, high: int) -> Tensor:
        """Values `low` to `high` - 1 in the rotated space, without `largest`: [m, kv heads, d] float32."""
        codes = self.middle.values.codes[low:high].view(-1)
        index = self.index[: codes.shape[0]].copy_(codes)
        found = torch.index_select(self.table, 0, index, out=self.found[: codes.shape[0]])
        return found.view(torch.float32).view(high - low, -1, self.width)

    def _coefficients(self, low: int, high: int) -> Tensor:
        """Coefficients of keys `low` to `high` - 1, [m, r] float32; those of int4 without their scale."""
        stored = self.middle.keys
        if not self.int4:
            return eigenbasis.coefficients(stored, low, high)
        packed, m = stored.codes[low:high], high - low
        out, half = self.coefficients[:m], packed.shape[1]
        out[:, :half] = torch.bitwise_and(packed, 15, out=self.nibbles[:m])
        out[:, half:] = torch.bitwise_right_shift(packed, 4, out=self.nibbles[:m])
        return out.sub_(8)

    def _paired(self, x: Tensor) -> Tensor:
        """Put dims of each head, the last of `x`, so that rotary pairs are neighbours."""
        if self.middle.interleaved:
            return x.contiguous()
        d = 2 * self.middle.freqs.shape[0]
        return x.reshape(*x.shape[:-1], -1, 2, d // 2).mT.flatten(-3)


def _positions(middle: Middle, low: int, high: int) -> Tensor:
    return torch.arange(middle.first + low, middle.first + high, device=middle.freqs.device)
