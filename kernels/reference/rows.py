"""How the stored forms of a cache's rows decode, in fp32."""

import torch
from torch import Tensor

from kernels.formats import BasisRows, Fp4Keys, Fp8Entries, Fp8Keys, RotatedRows, Rows
from kernels.reference.formats import e2m1, e8m0
from kernels.reference.lloyd_max import codebook
from kernels.reference.quantise import hadamard


def decode(rows: Rows) -> Tensor:
    """Decode rows of any stored form, all of them at once.

    Equations: Fp8Entries ``v[i, j] s[i, j // 64]`` and the rope dims as they are, Fp8Keys ``v[i, j] s[i]``, Fp4Keys
    ``v[i, j] s[i, j // 32]``. Scales are powers of two, so that a product keeps the few mantissa bits of its value.
    RotatedRows ``s H(c[code]) |x| d^-0.5``, H the normalised Hadamard matrix, c the centroids, s the signs. BasisRows
    ``mu + g sum_j c[code_j] scale_j basis_scale_j B_j``, 0 where a group has no bits, and RotatedRows behind it.

    Parameters
    ----------
    rows
        [n, d] in their stored form.

    Returns
    -------
    Tensor
        [n, d] float32.

    """
    match rows:
        case Fp8Entries(values, rope, scale):
            groups = e8m0(scale[:, : values.shape[1] // 64])  # padding stands behind them
            return torch.cat((values.float() * groups.repeat_interleave(64, 1), rope.float()), dim=1)
        case Fp8Keys(values, scale):
            return values.float() * scale[:, None]
        case Fp4Keys(packed, scale):
            return e2m1(packed) * e8m0(scale).repeat_interleave(32, 1)
        case RotatedRows(norm, packed, bits, signs):
            d = rows.shape[1]
            turned = hadamard(_centroids(packed, 0, d, bits) * (norm.float()[:, None] * d**-0.5))
            return turned if signs is None else turned * signs
        case BasisRows(nope, gain, rope):
            group, begin, parts = nope.basis.shape[1] // len(nope.bits), 0, []
            for bits in nope.bits.tolist():
                none = torch.zeros(len(nope.codes), group, device=nope.codes.device)
                parts.append(_centroids(nope.codes, begin, group, bits) if bits else none)
                begin += group * bits // 8
            coefficients = torch.cat(parts, dim=1) * gain[:, None].float() * nope.scale * nope.basis_scale
            return torch.cat((nope.mean + coefficients @ nope.basis.float().T, decode(rope)), dim=1)
        case _:
            return rows.float()


def _centroids(packed: Tensor, begin: int, count: int, bits: int) -> Tensor:
    """The `count` centroids [n, count] of codes that begin at byte `begin` of each row: code i at bit ``i bits``."""
    place = 8 * begin + torch.arange(count * bits, device=packed.device)
    bit = packed[:, place // 8].int() >> (place % 8) & 1  # [n, count * bits]
    code = (bit.unflatten(1, (count, bits)) << torch.arange(bits, device=packed.device)).sum(-1)
    return codebook(bits, packed.device)[code]
