"""How the stored forms of a cache's rows decode, in fp32, and how rows are encoded."""

import torch
from torch import Tensor

from fathom.kernels.formats.lloyd_max_reference import codebook
from fathom.kernels.formats.reference import e2m1, e8m0
from fathom.kernels.formats.stored import BasisRows, CodedRows, Fp4Keys, Fp8Entries, Fp8Keys, Rows
from fathom.kernels.quantise.reference import E2M1_MAX, E4M3_MAX, hadamard, power_of_two_scale, quantise_fp8, round_e2m1

SMALLEST_SCALE = 2.0**-126  # of keys


def decode(rows: Rows) -> Tensor:
    """Decode rows of any stored form, all of them at once.

    Equations: Fp8Entries ``v[i, j] s[i, j // 64]`` and the rope dims as they are, Fp8Keys ``v[i, j] s[i]``, Fp4Keys
    ``v[i, j] s[i, j // 32]``. Scales are powers of two, so that a product keeps the few mantissa bits of its value.
    CodedRows ``s H(c[code]) |x| d^-0.5``, H the normalised Hadamard matrix, c the centroids, s the signs. BasisRows
    ``mu + g sum_j c[code_j] scale_j basis_scale_j B_j``, 0 where a group has no bits, and CodedRows behind it.

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
        case CodedRows(norm, packed, bits, signs):
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


def write(rows: Rows, start: int, x: Tensor) -> None:
    """Encode `x` [m, d] as rows `start` .. ``start + m - 1``.

    Equations: those of `kernels.quantise.reference`, with the scales of `decode`. A group that holds NaN or an infinity
    has the scale NaN. Rotated rows and rows in a basis have no reference of encoding.
    """
    part = slice(start, start + len(x))
    match rows:
        case Fp8Entries(values, rope, scale):
            nope = values.shape[1]
            codes, scales = quantise_fp8(x[:, :nope], 64)
            values.view(torch.uint8)[part] = codes.view(torch.uint8)
            rope[part] = x[:, nope:].to(rope.dtype)
            scale[part, : nope // 64] = scales.to(scale.dtype)
        case Fp8Keys(values, scale):
            scale[part] = power_of_two_scale(x.abs().amax(1).clamp_min(E4M3_MAX * SMALLEST_SCALE), E4M3_MAX)
            codes = (x.float() / scale[part, None]).clamp(-E4M3_MAX, E4M3_MAX).to(values.dtype)
            values.view(torch.uint8)[part] = codes.view(torch.uint8)
        case Fp4Keys(packed, scale):
            blocks = x.float().unflatten(1, (-1, 32))
            scales = power_of_two_scale(blocks.abs().amax(-1).clamp_min(E2M1_MAX * SMALLEST_SCALE), E2M1_MAX)
            value = round_e2m1((blocks / scales[..., None]).clamp(-E2M1_MAX, E2M1_MAX)).flatten(1)
            sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=x.device)
            code = torch.bucketize(value.abs(), sizes) | value.signbit().int() << 3
            packed[part] = (code[:, ::2] | code[:, 1::2] << 4).to(torch.uint8)
            scale[part] = scales.to(scale.dtype)
        case Tensor():
            rows[part] = x.to(rows.dtype)
        case _:
            raise NotImplementedError(type(rows).__name__)


def _centroids(packed: Tensor, begin: int, count: int, bits: int) -> Tensor:
    """The `count` centroids [n, count] of codes that begin at byte `begin` of each row: code i at bit ``i bits``."""
    place = 8 * begin + torch.arange(count * bits, device=packed.device)
    bit = packed[:, place // 8].int() >> (place % 8) & 1  # [n, count * bits]
    code = (bit.unflatten(1, (count, bits)) << torch.arange(bits, device=packed.device)).sum(-1)
    return codebook(bits, packed.device)[code]
