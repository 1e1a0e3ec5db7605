"""What the tests of ops share: the op sets that they run over, and how they make inputs."""

import importlib.util
import zlib

import pytest
import torch

from fathom.kernels.ops import CPU, REFERENCE

ULP = 2.0**-23  # of float32, relative; half an ulp of bfloat16 is 2^-8
HALF_BF16 = 2.0**-8
OP_SETS = [REFERENCE, CPU]
HAS_TRITON = importlib.util.find_spec("triton") is not None  # not every platform has it
if HAS_TRITON:
    from fathom.kernels.triton_ops import TRITON

    OP_SETS.append(TRITON)

on_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not on every platform")
every_backend = pytest.mark.parametrize("ops", OP_SETS, ids=lambda ops: ops.name)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def seeded(*parts):
    return torch.Generator().manual_seed(zlib.crc32(repr(parts).encode()))


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed, shape))


def strided(x):
    """The same values with a stride in the last dim, large noise between them."""
    noisy = torch.full((*x.shape, 2), 100.0).to(x.dtype)
    noisy[..., 0] = x
    return noisy[..., 0]
