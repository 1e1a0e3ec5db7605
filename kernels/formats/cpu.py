"""Fast decoding of stored weights; the same numbers, bit for bit, as `kernels.formats.reference.decode`.

The plain conversions are what makes a decode step slow on CPU: on one core of an AVX-512 Xeon the reference takes 6 ns
for an E4M3 weight and 9 ns for an FP4 one. Here E4M3 takes 2.3 ns, through float16, which the hardware converts, and
FP4 2.0 ns, from a table of all 256 bytes, which yields two weights a look-up (``scripts.bench kernels --only decode``).
"""

from torch import Tensor

from kernels.formats.codes import e2m1, e4m3, e8m0
from kernels.formats.groups import FP4_BLOCK, FP8_BLOCK, NVFP4_BLOCK
from kernels.formats.stored import Dense, Fp4, Fp8, NvFp4, Weight


def decode(weight: Weight) -> Tensor:
    """Decode a tile of rows to [rows, in] float32, which the caller may overwrite unless it is `Dense`."""
    match weight:
        case Dense(data):
            return data.float()
        case Fp8(data, scale):
            out = e4m3(data)
            per_column = e8m0(scale).repeat_interleave(FP8_BLOCK, 1)[:, : data.shape[1]]  # [blocks, in]
            whole = len(out) // FP8_BLOCK  # rows of blocks; one more may be partial
            out[: whole * FP8_BLOCK].view(whole, FP8_BLOCK, data.shape[1]).mul_(per_column[:whole, None])
            out[whole * FP8_BLOCK :].mul_(per_column[-1])
            return out
        case Fp4(data, scale):
            out = e2m1(data)
            out.unflatten(1, (-1, FP4_BLOCK)).mul_(e8m0(scale)[..., None])
            return out
        case NvFp4(data, scale, global_scale):
            out = e2m1(data)
            out.unflatten(1, (-1, NVFP4_BLOCK)).mul_(e4m3(scale)[..., None])
            return out.mul_(global_scale)
