"""Fused linears against the reference: every stored form, odd shapes, every byte, and what must not be read."""

import pytest
import torch

from kernels.formats import reference as formats
from kernels.formats.stored import Dense, Fp4, Fp8, NvFp4
from kernels.linear import triton as fused
from kernels.linear.reference import grouped_linear as reference_grouped
from kernels.linear.reference import linear as reference
from kernels.linear.triton import grouped_linear, linear

ULP = 2.0**-23  # of float32, relative; bfloat16's is 2^-7
E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
INF, NAN = float("inf"), float("nan")


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def random_bytes(g, *shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=g)


def e4m3(g, *shape):
    return torch.randn(*shape, generator=g).mul(100).clamp(-448, 448).to(E4M3)


def e8m0(g, *shape):
    return torch.randint(118, 128, shape, dtype=torch.uint8, generator=g).view(E8M0)


def blocks(n):
    return -(-n // 128)


FORMS = {
    "bf16": lambda g, o, i: Dense(torch.randn(o, i, generator=g).bfloat16()),
    "f16": lambda g, o, i: Dense(torch.randn(o, i, generator=g).half()),
    "f32": lambda g, o, i: Dense(torch.randn(o, i, generator=g)),
    "fp8": lambda g, o, i: Fp8(e4m3(g, o, i), e8m0(g, blocks(o), blocks(i))),
    "fp8, f32 scales": lambda g, o, i: Fp8(e4m3(g, o, i), torch.rand(blocks(o), blocks(i), generator=g)),
    "fp4": lambda g, o, i: Fp4(random_bytes(g, o, i // 2).view(torch.int8), e8m0(g, o, i // 32)),
    "nvfp4": lambda g, o, i: NvFp4(random_bytes(g, o, i // 2), e4m3(g, o, i // 16), torch.tensor(0.0123)),
}


def assert_same(ours, expected, x, weight):
    """Compare with the fp32 reference, not rounded: the same products in another order, decoded without a rounding.

    n ulp of the sum of sizes bounds a sum of n terms in any order; 8 hold for the lengths here, as partial sums are of
    a matrix product's blocks. A scale that is not a power of two is rounded once on either side: 2 ulp. In bfloat16
    the result is rounded once: half an ulp of it.
    """
    sizes = x.float().abs() @ formats.decode(weight).abs().T
    bound = 10 * ULP * sizes + (expected.abs() * 2.0**-8 if ours.dtype == torch.bfloat16 else 0)
    error = (ours.float() - expected).abs()
    assert (error <= bound).all(), f"off by {(error - bound).max()}"


# (tokens, out, in): one row and group; columns that cut a block of 128; rows that cut a tile; many tokens, cut tile
SHAPES = [(1, 1, 32), (16, 65, 160), (3, 130, 96), (17, 129, 288)]
WIDE_SHAPES = [(1, 65, 64), (33, 2, 96)]  # fp32 operands have narrower tiles


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linear(form, dtype):
    for t, rows, columns in SHAPES if dtype == torch.bfloat16 else WIDE_SHAPES:
        g = seeded(t)
        weight = FORMS[form](g, rows, columns)
        x = torch.randn(t, 2 * columns, generator=g).to(dtype)[:, ::2]  # columns apart
        ours = linear(x, weight)
        assert (ours.dtype, ours.shape) == (dtype, (t, rows))
        assert_same(ours, reference(x.float(), weight), x, weight)
        assert linear(x[:0], weight).shape == (0, rows)


@pytest.mark.parametrize("form", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("t", [2, 18])
def test_splits_of_the_columns_are_summed(form, t):
    """2048 columns are steps enough to be split; 2080 leave a step cut short in the last split."""
    for columns in (2048, 2080):
        g = seeded(columns)
        weight, x = FORMS[form](g, 3, columns), torch.randn(t, columns, generator=g).bfloat16()
        tile = fused._tile("dense" if form == "bf16" else form, t, wide=False)
        assert fused._grid(t, 1, 3, columns, tile)[0][2] > 1
        assert_same(linear(x, weight), reference(x.float(), weight), x, weight)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("groups", "rank", "t"), [(3, 43, 1), (2, 130, 18), (5, 1, 6)])
def test_groups_cut_tiles_and_scale_blocks(form, groups, rank, t):
    g = seeded(groups)
    weight = FORMS[form](g, groups * rank, 96)
    x = torch.randn(t, groups, 96, generator=g).bfloat16()
    ours, expected = grouped_linear(x, weight, groups), reference_grouped(x.float(), weight, groups)
    assert ours.shape == (t, groups, rank)
    for group in range(groups):
        own = Dense(formats.decode(weight)[group * rank : (group + 1) * rank])
        assert_same(ours[:, group], expected[:, group], x[:, group], own)


@pytest.mark.parametrize("t", [1, 16, 5])
def test_few_tokens_do_not_depend_on_one_another(t):
    g = seeded(t)
    x, weight = torch.randn(16, 1024, generator=g).bfloat16(), FORMS["fp4"](g, 4, 1024)
    assert torch.equal(linear(x, weight)[:t], linear(x[:t], weight))


def test_no_bits_are_lost_on_the_way_to_the_accumulator():
    """A single product, of a value and scales that take all 24 bits, and ones whose sum bfloat16 would not hold."""
    third = torch.tensor(1 / 3)
    for weight in (
        Fp8(torch.full((1, 128), 1.875).to(E4M3), third.view(1, 1)),
        NvFp4(torch.full((1, 64), 0x55, dtype=torch.uint8), torch.full((1, 8), 1.875).to(E4M3), third),
        Dense(third.expand(1, 128).contiguous()),
    ):
        x = torch.zeros(1, 128)
        x[0, 5] = 1.0
        assert torch.equal(linear(x, weight), reference(x, weight))
        assert torch.equal(linear(x.bfloat16(), weight), reference(x.bfloat16(), weight))
    ones = Fp4(torch.full((2, 512), 0x22, dtype=torch.int8), torch.ones(2, 32).to(E8M0))
    assert (linear(torch.ones(1, 1024).bfloat16(), ones) == 1024).all()
    fine = torch.full((1, 128), 1 + 2.0**-20)  # lost if fp32 activations went through a narrower operand
    total = linear(fine, Fp8(torch.ones(1, 128).to(E4M3), torch.ones(1, 1).to(E8M0)))
    lost = (
        128 * 2.0**-20
    )  # by a narrower operand; the order of the sum, and with it some last places, is the processor's
    assert (total.double() - fine.double().sum()).abs().item() <= lost / 2


def same(ours, expected):
    """The same number or NaN at each place."""
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


SCALES = torch.tensor([0, 1, 2, 64, 126, 127, 128, 250, 253, 254, 255], dtype=torch.uint8)  # 0 is a subnormal, 255 NaN


def test_every_fp4_code_with_scales_of_all_sizes():
    """Sixteen codes in 32 columns, even and odd, under each scale; an infinite or NaN one makes its row NaN."""
    packed = (torch.arange(16, dtype=torch.uint8) | torch.arange(16, dtype=torch.uint8).flip(0) << 4).expand(11, 16)
    weight = Fp4(packed.contiguous().view(torch.int8), SCALES.view(E8M0)[:, None])
    large = torch.eye(32)[:16].bfloat16() * 2**20  # the interpreter makes bfloat16's subnormals zero
    for x in (torch.eye(32)[::5], large):
        same(linear(x, weight), reference(x, weight))


def test_every_byte_of_e4m3_and_scales_of_all_sizes():
    every = torch.arange(256, dtype=torch.uint8)[:, None]
    x = torch.zeros(1, 128).bfloat16()
    x[0, 77] = 1.0
    for scale in (torch.tensor([[1.0], [0.3]]), torch.tensor([[0], [200]], dtype=torch.uint8).view(E8M0)):
        weight = Fp8(every.expand(256, 128).contiguous().view(E4M3), scale)
        same(linear(x.float(), weight), reference(x.float(), weight))
        same(linear(x * 2**20, weight), reference(x * 2**20, weight))  # as above
    columns = torch.zeros(11, 11 * 128)
    columns[torch.arange(11), torch.arange(11) * 128] = 1.0
    weight = Fp8(torch.full((1, 11 * 128), 0.5).to(E4M3), SCALES.view(E8M0)[None, :])
    assert linear(columns.bfloat16(), weight).isnan().all()  # of the last block
    weight = Fp8(weight.data[:, :-128], weight.scale[:, :-1])
    columns = columns[:-1, :-128].bfloat16() * 2**20
    same(linear(columns, weight), reference(columns, weight))
    weight = NvFp4(torch.full((256, 8), 0x73, dtype=torch.uint8), every.view(E4M3), torch.tensor(0.7))
    same(linear(torch.eye(16)[:2], weight), reference(torch.eye(16)[:2], weight))


@pytest.mark.parametrize("form", ["bf16", "fp8", "fp4", "nvfp4"])
@pytest.mark.parametrize("t", [3, 20])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_is_not_finite_stays_in_its_token(form, t, bad):
    g = seeded(t)
    weight, x = FORMS[form](g, 5, 96), torch.randn(t, 96, generator=g).bfloat16()
    x[1, 40] = bad
    ours = linear(x, weight)
    assert ours.isfinite().all(1).tolist() == [token != 1 for token in range(t)]
    assert torch.equal(ours.isnan(), reference(x, weight).isnan())


@pytest.mark.parametrize("t", [2, 20])
def test_neighbours_in_memory_are_not_read(t):
    """A weight and rows that are parts of larger tensors: what lies beside them is NaN."""
    g = seeded(t)
    x = torch.full((t + 2, 160), NAN).bfloat16()
    x[1:-1, :96] = torch.randn(t, 96, generator=g)
    codes = torch.full((8, 128), 0x7F, dtype=torch.uint8).view(E4M3)
    codes[2:7, :96] = e4m3(g, 5, 96)
    dense = torch.full((8, 128), NAN).bfloat16()
    dense[2:7, :96] = codes[2:7, :96].bfloat16()
    scales = torch.full((3, 3), NAN)
    scales[1:2, 1:2] = 0.5
    packed, bytes_beside = random_bytes(g, 8, 64), torch.full((8, 9), 255, dtype=torch.uint8)
    bytes_beside[2:7, 2:5] = 127
    own = x[1:-1, :96]
    for weight in (
        Dense(dense[2:7, :96]),
        Fp8(codes[2:7, :96], scales[1:2, 1:2]),
        Fp4(packed.view(torch.int8)[2:7, :48], bytes_beside.view(E8M0)[2:7, 2:5]),
    ):
        assert_same(linear(own, weight), reference(own.float(), weight), own, weight)


def test_what_a_weight_may_not_be():
    with pytest.raises(AssertionError, match="columns of a weight"):
        linear(torch.ones(1, 4), Dense(torch.ones(4, 4).T))
    with pytest.raises(AssertionError, match="want"):
        linear(torch.ones(1, 5), Dense(torch.ones(4, 4)))
    with pytest.raises(AssertionError, match="groups"):
        grouped_linear(torch.ones(1, 3, 4), Dense(torch.ones(4, 4)), 3)
