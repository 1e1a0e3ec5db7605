"""Blocked linears and decoding against the reference: every stored form, odd shapes, every byte."""

import pytest
import torch

from kernels.formats import cpu as decode
from kernels.formats import reference as formats
from kernels.formats.stored import Dense, Fp4, Fp8, NvFp4, rows
from kernels.linear import cpu as linear
from kernels.ops import CPU, REFERENCE
from tests.peak_memory import peak_bytes

ULP = 2.0**-23  # of float32, relative; bfloat16's is 2^-7


def random_bytes(g, *shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=g)


def e4m3(g, *shape):
    return torch.randn(*shape, generator=g).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)


def e8m0(g, *shape):
    return torch.randint(118, 128, shape, dtype=torch.uint8, generator=g).view(torch.float8_e8m0fnu)


def blocks(n):
    return -(-n // 128)


WEIGHTS = {
    "bf16": lambda g, o, i: Dense(torch.randn(o, i, generator=g).bfloat16()),
    "f32": lambda g, o, i: Dense(torch.randn(o, i, generator=g)),
    "fp8": lambda g, o, i: Fp8(e4m3(g, o, i), e8m0(g, blocks(o), blocks(i))),
    "fp8, f32 scales": lambda g, o, i: Fp8(e4m3(g, o, i), torch.rand(blocks(o), blocks(i), generator=g)),
    "fp4": lambda g, o, i: Fp4(random_bytes(g, o, i // 2).view(torch.int8), e8m0(g, o, i // 32)),
    "nvfp4": lambda g, o, i: NvFp4(random_bytes(g, o, i // 2), e4m3(g, o, i // 16), torch.tensor(0.0123)),
}
# in columns that cut a 128 block, rows that do, one row; all are multiples of FP4's group of 32
SHAPES = [(256, 256), (130, 96), (384, 1056), (1, 32), (129, 160)]


def assert_same(ours, expected, x, weight):
    """Compare with the reference: sums of the same exact products in fp32, in another order, rounded once.

    8 ulp of the sum of sizes covers a reordering of a thousand terms; in bfloat16 the rounding may fall on the other
    side: one ulp of the result more. `expected` is the fp32 reference, not rounded.
    """
    sizes = x.float().abs() @ formats.decode(weight).abs().T
    bound = 8 * ULP * sizes + (expected.abs() * 2.0**-7 if ours.dtype == torch.bfloat16 else 0)
    error = (ours.float() - expected).abs()
    assert (error <= bound).all(), f"off by {error.max()}"


@pytest.mark.parametrize("form", WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("native", [False, True])
def test_linear(form, shape, native, monkeypatch):
    """`native`: as on a processor that multiplies bfloat16 itself; here it is emulated, with the same accumulator."""
    monkeypatch.setattr(linear, "_native_bfloat16", lambda _: native)
    monkeypatch.setattr(linear, "TILE", 2 * 128 * shape[1])  # two 128-row blocks
    monkeypatch.setattr(linear, "ROWS", 100 * shape[1])
    g = torch.Generator().manual_seed(shape[0])
    weight = WEIGHTS[form](g, *shape)
    for t in (0, 1, 2, 4, 5, 7, 128):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(t, 2 * shape[1], generator=g).to(dtype)[:, ::2]
            ours = CPU.linear(x, weight)
            assert ours.dtype == dtype
            assert_same(ours, REFERENCE.linear(x.float(), weight), x, weight)


@pytest.mark.parametrize("form", WEIGHTS)
@pytest.mark.parametrize(("groups", "rank"), [(1, 130), (3, 43), (2, 128), (4, 96), (5, 1)])
def test_grouped_linear_where_groups_cut_tiles(form, groups, rank, monkeypatch):
    monkeypatch.setattr(linear, "TILE", 128 * 64)
    g = torch.Generator().manual_seed(groups)
    weight = WEIGHTS[form](g, groups * rank, 64)
    for t in (0, 1, 6):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(t, groups, 64, generator=g).to(dtype)
            ours, expected = (
                CPU.grouped_linear(x, weight, groups),
                REFERENCE.grouped_linear(x.float(), weight, groups),
            )
            assert ours.shape == (t, groups, rank)
            for group in range(groups):
                own = Dense(formats.decode(weight)[group * rank : (group + 1) * rank])
                assert_same(ours[:, group], expected[:, group], x[:, group], own)


@pytest.mark.parametrize("form", ["bf16", "fp8", "fp4"])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("t", [1, 2, 5, 64])
def test_the_accumulator_is_wider_than_bfloat16(form, native, t, monkeypatch):
    """256 + 1 is 256 in bfloat16: a sum of ones kept in it would stop there."""
    monkeypatch.setattr(linear, "_native_bfloat16", lambda _: native)
    ones = {
        "bf16": Dense(torch.ones(128, 1024).bfloat16()),
        "fp8": Fp8(torch.ones(128, 1024).to(torch.float8_e4m3fn), torch.ones(1, 8).to(torch.float8_e8m0fnu)),
        "fp4": Fp4(torch.full((128, 512), 0x22, dtype=torch.int8), torch.ones(128, 32).to(torch.float8_e8m0fnu)),
    }
    assert (CPU.linear(torch.ones(t, 1024).bfloat16(), ones[form]) == 1024).all()


def assert_same_bits(ours, expected):
    assert torch.equal(ours.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(ours.view(torch.int32)[numbers], expected.view(torch.int32)[numbers])


def every_byte(times):
    return torch.arange(256, dtype=torch.uint8).repeat(times)


def test_decode_every_e4m3_byte_with_every_e8m0_scale():
    data = every_byte(256).view(torch.float8_e4m3fn)  # [65536]: a row of blocks, two of them per scale
    data, scale = data.view(1, -1), every_byte(1).repeat_interleave(2).view(1, -1).view(torch.float8_e8m0fnu)
    weight = Fp8(data, scale)
    assert_same_bits(decode.decode(weight), formats.decode(weight))


def test_decode_every_fp4_byte_with_every_scale():
    packed, scale = every_byte(16).view(256, 16), every_byte(1).view(256, 1)
    weight = Fp4(packed.view(torch.int8), scale.view(torch.float8_e8m0fnu))
    assert_same_bits(decode.decode(weight), formats.decode(weight))
    weight = NvFp4(packed, scale.repeat(1, 2).view(torch.float8_e4m3fn), torch.tensor(0.0123))
    assert_same_bits(decode.decode(weight), formats.decode(weight))


def test_decoding_is_exact_with_powers_of_two_and_else_rounds_once():
    """Against float64, which holds every product: at most 2 + 4 + 24 bits."""
    byte = every_byte(1)[:255]  # every power of two; 255 is NaN
    powers = torch.ldexp(torch.ones(255).double(), byte.int() - 127)
    values = every_byte(1).view(torch.float8_e4m3fn).double()
    values = values[values.isfinite()]  # [254], in columns 0, 128, 256, ...
    scale = byte.view(1, -1).view(torch.float8_e8m0fnu)
    for value in values.tolist():
        ours = formats.decode(Fp8(torch.full((1, 255 * 128), value).to(torch.float8_e4m3fn), scale))[0, ::128]
        exact = value * powers
        held = exact.abs() <= torch.finfo(torch.float32).max
        assert torch.equal(ours[held].double(), exact[held])
        assert ours[~held].isinf().all()
    nibbles = formats.e2m1(torch.arange(256, dtype=torch.uint8))[:32].double()  # all sixteen twice
    packed = torch.arange(16, dtype=torch.uint8).repeat(255, 1)
    ours = formats.decode(Fp4(packed.view(torch.int8), byte.view(-1, 1).view(torch.float8_e8m0fnu)))
    exact = nibbles * powers[:, None]
    held = exact.abs() <= torch.finfo(torch.float32).max
    assert torch.equal(ours[held].double(), exact[held])
    general = torch.tensor(1 / 3)  # all 24 bits in use
    eight = formats.decode(Fp8(values.float().to(torch.float8_e4m3fn).view(1, -1), general.expand(1, 2)))
    assert torch.equal(eight[0], (values * general.double()).float())
    assert not torch.equal(eight[0].double(), values * general.double())
    blocks_of_16 = values.float().to(torch.float8_e4m3fn).view(-1, 1).repeat(1, 2)
    four = formats.decode(NvFp4(packed[:254], blocks_of_16, general))
    assert torch.equal(four, (nibbles * values[:, None] * general.double()).float())
    assert not torch.equal(four.double(), nibbles * values[:, None] * general.double())


@pytest.mark.parametrize("form", WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_of_a_tile_is_that_part_of_the_whole(form, shape):
    weight = WEIGHTS[form](torch.Generator().manual_seed(1), *shape)
    for start in range(0, shape[0], 128):
        stop = min(start + 128, shape[0])
        assert_same_bits(decode.decode(rows(weight, start, stop)), formats.decode(weight)[start:stop])


def test_a_nan_weight_stays_nan():
    data = torch.zeros(2, 64, dtype=torch.uint8)
    data[0, 3], data[1, 5] = 0x7F, 0xFF
    weight = Fp8(data.view(torch.float8_e4m3fn), torch.ones(1, 1).to(torch.float8_e8m0fnu))
    assert CPU.linear(torch.ones(1, 64), weight).isnan().all()


@pytest.mark.parametrize("form", ["fp8", "fp4", "nvfp4"])
def test_memory_is_a_few_tiles(form):
    weight = WEIGHTS[form](torch.Generator().manual_seed(2), 16384, 1024)  # 64 MiB decoded
    x = torch.randn(1, 1024)
    # a tile of 2^20 weights is 4 MiB of fp32; a table look-up holds as much again in indices and in results
    assert peak_bytes(lambda: CPU.linear(x, weight)) < 16 * 2**20
    assert peak_bytes(lambda: REFERENCE.linear(x, weight)) > 64 * 2**20
