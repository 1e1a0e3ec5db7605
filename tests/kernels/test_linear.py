"""Products with stored weights on every backend, and the decoding of these weights, against float64."""

import resource
import sys
from functools import lru_cache

import pytest
import torch
from numba import types

from fathom.kernels.compiled import array, compiled, each, loop
from fathom.kernels.formats import cpu as cpu_formats
from fathom.kernels.formats import reference as formats
from fathom.kernels.formats.cpu import decoded as decoded_piece
from fathom.kernels.formats.cpu import held_in_bfloat16, taken
from fathom.kernels.formats.stored import Dense, Fp4, Fp8, NvFp4, rows
from fathom.kernels.lanes import put, store_some
from fathom.kernels.linear import cpu
from fathom.kernels.linear.reference import ByPosition, Product
from fathom.kernels.ops import CPU, REFERENCE
from fathom.probes.child import call
from tests.kernels.every_backend import ULP, on_triton

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
BYTES = torch.arange(256, dtype=torch.uint8)
DTYPES = (torch.bfloat16, torch.float32)
INF, NAN = float("inf"), float("nan")
NO_TRITON = "Triton is not on every platform"


@pytest.fixture(params=["reference", "cpu", "cpu, fp32", "triton"])
def ops(request, monkeypatch):
    """CPU multiplies bfloat16 where the processor can; as where it cannot too."""
    if request.param == "triton":
        return pytest.importorskip("fathom.kernels.triton_ops", reason=NO_TRITON).TRITON
    if request.param == "cpu, fp32":
        monkeypatch.setattr(cpu, "PAIRS", False)
    return REFERENCE if request.param == "reference" else CPU


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
forms = pytest.mark.parametrize("form", FORMS)


# --- the oracle


def e4m3_value(byte):
    """From the fields of a code: a sign, four bits of exponent, three of mantissa."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-6 * mantissa / 8
    return (-1.0) ** (byte >> 7) * (NAN if (exponent, mantissa) == (15, 7) else size)


POSITIVE = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # of E2M1
E2M1_PAIRS = [[(POSITIVE + [-v for v in map(float, POSITIVE)])[code] for code in (b & 15, b >> 4)] for b in range(256)]
PAIRS, VALUES = torch.tensor(E2M1_PAIRS).double(), torch.tensor([e4m3_value(byte) for byte in range(256)]).double()
POWERS = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [NAN]).double()  # of E8M0


def exact(weight):
    """Product of values and scales, in which float64 rounds nothing: 4 bits times 24, or 2 + 4 + 24."""
    (o, i), scale = weight.shape, weight[1].double() if len(weight) > 1 and weight[1].dtype == torch.float32 else None
    match weight:
        case Dense(data):
            return data.double()
        case Fp8(data, codes):
            scale = POWERS[codes.view(torch.uint8).int()] if scale is None else scale
            scale = scale.repeat_interleave(128, 0)[:o].repeat_interleave(128, 1)[:, :i]
            return VALUES[data.view(torch.uint8).int()] * scale
        case Fp4(data, codes):
            return PAIRS[data.view(torch.uint8).int()].flatten(1) * POWERS[
                codes.view(torch.uint8).int()
            ].repeat_interleave(32, 1)
        case NvFp4(data, codes, factor):
            scale = VALUES[codes.view(torch.uint8).int()].repeat_interleave(16, 1)
            return PAIRS[data.int()].flatten(1) * scale * factor.double()


@lru_cache(maxsize=1)  # by identity of the tensors: of one weight, for numbers of tokens in turn
def decoded(weight):
    return exact(weight).float().double()


def product(x, weight, groups=1):
    """``y[t, g, r] = sum_d x[t, g, d] W[g * rank + r, d]``, of W as float32 holds it; and the sum of sizes."""
    x, w = x.double(), decoded(weight).unflatten(0, (groups, -1))
    return (torch.einsum("tgd,grd->tgr", *both) for both in ((x, w), (x.abs(), w.abs())))


def assert_product(ours, x, weight, groups=1):
    """Hold `ours` [t, groups, rank] against the equation.

    n ulp of the sum of sizes bounds a sum of n terms in any order; 8 hold for the lengths here, as partial sums are of
    a matrix product's blocks. A scale that is not a power of two rounds once more. In bfloat16 the result is rounded
    once: half an ulp of it.
    """
    total, sizes = product(x, weight, groups)
    assert (ours.dtype, ours.shape) == (x.dtype, total.shape)
    error = (ours.double() - total).abs() - (total.abs() * 2.0**-8 if ours.dtype == torch.bfloat16 else 0)
    assert (error <= 8 * ULP * sizes).all(), f"off by {(error / (ULP * sizes)).max()} ulp of the sum of sizes"


def assert_equal(ours, x, weight):
    """A single product in each sum: the same number, infinity or NaN."""
    total, _ = product(x[:, None], weight)
    expected, nan = total[:, 0].float().to(x.dtype), total[:, 0].isnan()
    assert torch.equal(ours.isnan(), nan)
    assert torch.equal(ours.masked_fill(nan, 0), expected.masked_fill(nan, 0))


# --- products of every form and shape

# (out, in): columns that cut a block of 128, rows that cut a tile, one row. All are multiples of FP4's group of 32
SHAPES = [(256, 256), (130, 96), (384, 1056), (1, 32), (129, 160)]
CASES = {"reference": [(*s, (0, 1, 7)) for s in SHAPES], "cpu": [(*s, (0, 1, 2, 4, 5, 17, 96)) for s in SHAPES]}
# The interpreter is slow: one row; a cut block; a cut tile; many tokens. Tiles of fp32 operands are narrower
TRITON = {
    torch.bfloat16: [(1, 32, (0, 1)), (65, 160, (16,)), (130, 96, (3,)), (129, 288, (17,))],
    torch.float32: [(65, 64, (0, 1)), (2, 96, (33,))],
}


@forms
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_form_and_shape_is_the_product(ops, form, dtype, monkeypatch):
    monkeypatch.setattr(cpu, "PANEL", 40)
    for o, i, tokens in TRITON[dtype] if ops.name == "triton" else CASES[ops.name]:
        weight = FORMS[form](seeded(o), o, i)
        for t in tokens:
            x = torch.randn(t, 2 * i, generator=seeded(t)).to(dtype)[:, ::2]  # columns apart
            ours, wide = ops.linear(x, weight), ops.linear(x, weight, wide=True)
            assert_product(ours[:, None], x[:, None], weight)
            assert_product(wide[:, None], x[:, None].float(), weight)
            assert torch.equal(wide.to(dtype), ours)  # the same sum, rounded or not


# Columns that end amid sixteen, amid 32, and behind a part of 2 KiB
LONG = (5, 100, 257, 1030)
ODD = [(form, columns) for form in ("bf16", "f16", "f32", "fp8", "fp8, f32 scales") for columns in LONG]
ODD += [("nvfp4", columns) for columns in (16, 48, 1040)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "columns"), ODD)
@pytest.mark.parametrize("in_pairs", [True, False])
def test_columns_may_end_anywhere(in_pairs, form, columns, dtype, monkeypatch):
    monkeypatch.setattr(cpu, "PAIRS", cpu.PAIRS and in_pairs)
    weight = FORMS[form](seeded(3), 34, columns)  # rows of two blocks, and two of a third
    for t in (1, 6):
        x = torch.randn(t, columns, generator=seeded(t)).to(dtype)
        assert_product(CPU.linear(x, weight)[:, None], x[:, None], weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [270, 1038])
def test_what_the_last_columns_lack_adds_no_nan(columns, dtype):
    """Behind the last 14 of 1038 stands what the part before had there, here infinity."""
    weight = Dense(torch.ones(16, columns).index_fill(1, torch.tensor([14, 15]), INF).to(dtype))
    scaled = Fp8(torch.ones(16, columns).to(E4M3), torch.full((1, blocks(columns)), INF))
    for t, one in ((t, one) for t in (1, 6, 50) for one in (weight, scaled)):
        assert torch.equal(CPU.linear(torch.ones(t, columns, dtype=dtype), one), torch.full((t, 16), INF, dtype=dtype))


def test_the_cpu_refuses_groups_of_unequal_rows_and_other_dtypes():
    with pytest.raises(AssertionError, match="4 rows in 3 groups"):
        CPU.grouped_linear(torch.ones(1, 3, 4), Dense(torch.ones(4, 4)), 3)
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(AssertionError, match=f"x is {dtype}"):
            CPU.linear(torch.ones(1, 4, dtype=dtype), Dense(torch.ones(4, 4)))


# Groups, their rank, tokens
GROUPS = [(groups, rank, t) for groups, rank in ((1, 130), (3, 43), (2, 128), (4, 96), (5, 1)) for t in (0, 1, 6)]
TRITON_GROUPS = {torch.bfloat16: [(3, 43, 1), (2, 130, 18), (5, 1, 6)], torch.float32: [(5, 1, 6)]}


@forms
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_may_cut_blocks_of_rows_and_of_scales(ops, form, dtype):
    for groups, rank, t in TRITON_GROUPS[dtype] if ops.name == "triton" else GROUPS:
        weight = FORMS[form](seeded(groups), groups * rank, 96)
        x = torch.randn(t, groups, 96, generator=seeded(t)).to(dtype)
        assert_product(ops.grouped_linear(x, weight, groups), x, weight, groups)


@pytest.mark.parametrize("form", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize(("t", "columns"), [(2, 2048), (2, 2080), (18, 2048), (18, 2080)])
def test_long_sums_are_whole(ops, form, t, columns):
    """Of 18 tokens Triton splits 2048 columns; 2080 leave a step cut short in the last split."""
    g = seeded(columns)
    weight, x = FORMS[form](g, 3, columns), torch.randn(t, columns, generator=g).bfloat16()
    if ops.name == "triton" and t == 18:
        fused = pytest.importorskip("fathom.kernels.linear.triton")
        tile = fused._tile("dense" if form == "bf16" else form, t, wide=False)
        assert fused._grid(t, 1, 3, columns, tile)[0][2] > 1
    assert_product(ops.linear(x, weight)[:, None], x[:, None], weight)


# --- several products of one input

SIZES = {"fp8": 130, "fp8, f32 scales": 3, "bf16": 70, "fp4": 5, "nvfp4": 6, "f32": 2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("deployed", [False, True])
@pytest.mark.parametrize(("t", "columns"), [(0, 256), (1, 256), (1, 1152), (3, 256)])
def test_several_products_are_one_after_the_other(ops, dtype, deployed, t, columns):
    """To the bit, of every form beside every other: rounded inputs, biases at any position and factors too."""
    g = seeded(t)
    weights = [FORMS[form](g, rows, columns) for form, rows in SIZES.items()]
    weights += [FORMS[form](g, SIZES[form] + 7, columns) for form in ("fp8", "bf16", "f32")]
    x, table = torch.randn(t, columns, generator=g).to(dtype), torch.randn(3, 77, generator=g)
    x[:1, 5], x[:1, 200] = 0.0, -3e4
    for first in (1, torch.tensor(5)) if t else (0,):
        bias = ByPosition(table, first)
        products = [Product(weight) for weight in weights[:-1]]
        products += [Product(weights[2], wide=True), Product(weights[7], wide=True, bias=bias)]
        products += [Product(weights[2], factor=0.3), Product(weights[0], wide=True)]
        products += [Product(one, added=torch.randn(t, one.shape[0], generator=g)) for one in weights[::3]]
        found = ops.linears(x, products, deployed=deployed)
        rounded = ops.simulate_fp8(x, 128) if deployed else x
        for product, ours in zip(products, found, strict=True):
            given = rounded if isinstance(product.weight, Fp8 | Fp4) else x
            wanted = ops.linear(given, product.weight, wide=product.wide)
            if product.bias is not None:
                wanted = wanted + table[(int(first) + torch.arange(t)) % 3]
            if product.added is not None:
                wanted = (product.added + wanted.float()).to(dtype)
            if product.factor is not None:
                wanted = wanted.float() * product.factor
            assert ours.dtype == wanted.dtype
            assert torch.equal(ours, wanted), product


# --- inputs that are codes, as FP8 tensor cores take them


def of_codes(ops, x, *weights, **more):
    return ops.linears_fp8(x, [Product(weight, **more) for weight in weights], deployed=True)


def launches(monkeypatch):
    """Shapes of what Triton's kernel of codes multiplies from now on, [tokens, rows], and its splits."""
    fused = pytest.importorskip("fathom.kernels.linear.triton_codes", reason=NO_TRITON)
    kernel, seen = fused._product_of_codes, []

    class Kernel:
        def __getitem__(self, grid):
            def launch(*given, **constants):
                seen.append((given[7], given[8], grid[1]))
                return kernel[grid](*given, **constants)

            return launch

    monkeypatch.setattr(fused, "_product_of_codes", Kernel())
    return seen


@pytest.mark.parametrize("form", ["fp8", "fp8, f32 scales"])
@pytest.mark.parametrize(("t", "rows", "columns"), [(17, 1, 128), (65, 130, 384), (20, 64, 1152), (130, 67, 256)])
def test_products_of_codes_are_those_of_rounded_inputs(ops, form, t, rows, columns, monkeypatch):
    """Rows and tokens that cut a tile, more than one tile of either, split columns; inputs of all sizes."""
    seen = launches(monkeypatch) if ops.name == "triton" else []
    g = seeded(t)
    weight, x = FORMS[form](g, rows, columns), torch.randn(t, 2 * columns, generator=g)
    x = (x * torch.logspace(-6, 4, t)[:, None]).bfloat16()[:, ::2]  # rows apart; sizes below the least of a block too
    rounded = ops.simulate_fp8(x, 128)
    (ours,), (wide,) = of_codes(ops, x, weight), of_codes(ops, x, weight, wide=True)
    assert_product(ours[:, None], rounded[:, None], weight)
    assert_product(wide[:, None], rounded[:, None].float(), weight)
    assert torch.equal(wide.bfloat16(), ours)
    if ops.name == "triton":
        assert seen == 2 * [(t, rows, 2 if columns == 1152 else 1)]


def test_codes_are_multiplied_beside_what_is_not(ops, monkeypatch):
    """Of one input: FP8 by codes, FP4 rounded, the rest unrounded; biases, addends and factors behind each product."""
    seen = launches(monkeypatch) if ops.name == "triton" else []
    g, t = seeded(5), 18
    forms = {form: FORMS[form](g, rows, 256) for form, rows in SIZES.items()}
    x, added = torch.randn(t, 256, generator=g).bfloat16(), torch.randn(t, 130, generator=g)
    bias = ByPosition(torch.randn(3, 130, generator=g), 4)
    products = [Product(weight) for weight in forms.values()]
    products += [Product(forms["fp8"], wide=True, bias=bias), Product(forms["fp8"], added=added)]
    products += [Product(forms["fp8, f32 scales"], factor=0.3)]
    found, rounded = ops.linears_fp8(x, products, deployed=True), ops.simulate_fp8(x, 128)
    exact = ops.linears(x, products, deployed=True)
    for of, ours, wanted in zip(products, found, exact, strict=True):
        assert (ours.dtype, ours.shape) == (wanted.dtype, wanted.shape)
        if isinstance(of.weight, Fp8):  # two roundings to bf16 apart, of what is near or of what it was added to
            total, sizes = (part[:, 0].float() for part in product(rounded[:, None], of.weight))
            far = 2.0**-7 * (wanted.abs() + total.abs()) + 256 * 2.0**-24 * sizes
            assert ((ours - wanted).abs() <= far).all()
        else:
            assert torch.equal(ours, wanted)
    if ops.name == "triton":
        assert [rows for _, rows, _ in seen] == [130, 3, 130, 130, 3]
        for few, dtype, deployed in (
            (16, torch.bfloat16, True),
            (18, torch.float32, True),
            (18, torch.bfloat16, False),
        ):
            own, alone = x[:few].to(dtype), products[: len(forms)]
            exactly = ops.linears(own, alone, deployed=deployed)
            assert all(map(torch.equal, ops.linears_fp8(own, alone, deployed=deployed), exactly))
        assert len(seen) == 5, "few tokens, fp32, and inputs that are not rounded are multiplied exactly"


def test_a_token_of_codes_does_not_depend_on_its_place():
    """The tile has its tokens at any place, and beside others; NaN there stays there."""
    ops = pytest.importorskip("fathom.kernels.triton_ops", reason=NO_TRITON).TRITON
    g = seeded(6)
    weight, x = FORMS["fp8"](g, 70, 256), torch.randn(70, 256, generator=g).bfloat16()
    (found,) = of_codes(ops, x, weight)
    moved = x.roll(7, 0)
    moved[:7] = NAN
    (other,) = of_codes(ops, moved, weight)
    assert torch.equal(other[7:], found[:-7])
    assert other[:7].isnan().all()


def test_codes_and_scales_that_are_no_numbers_make_none(ops):
    """NaN in x, infinity in x, a NaN code of W, a NaN scale of W: what they are multiplied into, and nothing else."""
    t, rows, columns = 18, 130, 256
    data, scale = torch.full((rows, columns), 0x38, dtype=torch.uint8), torch.full((2, 2), 127, dtype=torch.uint8)
    data[3, 200], scale[1, 0], x = 0x7F, 255, torch.ones(t, columns).bfloat16()
    x[2, 130], x[5, 1] = NAN, INF
    (found,) = of_codes(ops, x, Fp8(data.view(E4M3), scale.view(E8M0)))
    wrong = torch.zeros(t, rows, dtype=torch.bool)
    wrong[[2, 5]], wrong[:, 3], wrong[:, 128:] = True, True, True
    assert torch.equal(found.isfinite(), ~wrong)
    assert (found[~wrong] == columns).all()
    assert all(found[place].isnan().all() for place in ((slice(None), 3), (slice(None), slice(128, None)), 2))


def test_every_code_of_weights_and_inputs_counts(ops):
    """Each code of W by each code of x that rounding makes, a product in each sum: bf16 has its 8 bits."""
    values = VALUES[torch.arange(127)].float()
    t, x = 127, torch.zeros(127, 128).bfloat16()
    x[:, 0], x[:, 1] = values, 448.0  # the largest, by which the block is scaled by 1; its weight is 0
    data = torch.zeros(256, 128, dtype=torch.uint8)
    data[:, 0] = BYTES
    weight = Fp8(data.view(E4M3), torch.full((2, 1), 127, dtype=torch.uint8).view(E8M0))
    (found,) = of_codes(ops, x, weight)
    wanted = values.double()[:, None] * VALUES[None, :]
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(0).double(), wanted.nan_to_num(0))
    assert found.shape == (t, 256)


# --- numbers that must not be lost


@pytest.mark.parametrize("form", ["bf16", "fp8", "fp4"])
def test_the_accumulator_is_wider_than_bfloat16(ops, form):
    """256 + 1 is 256 in bfloat16: a sum of ones kept in it would stop there."""
    o, tokens = (2, (1, 18)) if ops.name == "triton" else (128, (1, 2, 5, 64))
    weight = {
        "bf16": Dense(torch.ones(o, 1024).bfloat16()),
        "fp8": Fp8(torch.ones(o, 1024).to(E4M3), torch.ones(1, 8).to(E8M0)),
        "fp4": Fp4(torch.full((o, 512), 0x22, dtype=torch.int8), torch.ones(o, 32).to(E8M0)),
    }[form]
    for t in tokens:
        assert (ops.linear(torch.ones(t, 1024).bfloat16(), weight) == 1024).all()


def test_no_bits_are_lost_on_the_way_to_the_accumulator(ops):
    """A single product, of a value and scales that take all bits of their form; then fp32 activations."""
    third = torch.tensor(1 / 3)
    for weight in (
        Fp8(torch.full((1, 128), 1.875).to(E4M3), third.view(1, 1)),
        NvFp4(torch.full((1, 64), 0x55, dtype=torch.uint8), torch.full((1, 8), 1.875).to(E4M3), third),
        Dense(third.expand(1, 128).contiguous()),
        Dense(third.expand(1, 128).half()),
    ):
        for dtype in DTYPES:
            x = torch.zeros(1, 128, dtype=dtype)
            x[0, 5] = 1.0
            assert_equal(ops.linear(x, weight), x, weight)
    fine = torch.full((1, 128), 1 + 2.0**-20)  # lost if fp32 activations went through a narrower operand
    total = ops.linear(fine, Fp8(torch.ones(1, 128).to(E4M3), torch.ones(1, 1).to(E8M0)))
    assert (total.double() - fine.double().sum()).abs().item() <= 128 * 2.0**-20 / 2  # the sum itself rounds


SCALES = torch.tensor([0, 1, 2, 64, 126, 127, 128, 250, 253, 254, 255], dtype=torch.uint8)  # 0 is a subnormal, 255 NaN
LARGE = 2.0**20  # with it results are no subnormals of bfloat16, which the interpreter makes zero


def test_every_fp4_code_counts_under_scales_of_all_sizes(ops):
    """Sixteen codes in 32 columns, even and odd, under each scale; an infinite or NaN one makes its row NaN."""
    packed = (BYTES[:16] | BYTES[:16].flip(0) << 4).expand(11, 16).contiguous()
    weight = Fp4(packed.view(torch.int8), SCALES.view(E8M0)[:, None])
    for x in (torch.eye(32)[::5], torch.eye(32)[:16].bfloat16() * LARGE):
        assert_equal(ops.linear(x, weight), x, weight)


def test_every_byte_of_e4m3_counts_as_a_value_and_as_a_scale(ops):
    every, x = BYTES[:, None], torch.zeros(1, 128)
    x[0, 77] = 1.0
    for scale in (torch.tensor([[1.0], [0.3]]), torch.tensor([[0], [200]], dtype=torch.uint8).view(E8M0)):
        weight = Fp8(every.expand(256, 128).contiguous().view(E4M3), scale)
        for one in (x, x.bfloat16() * LARGE):
            assert_equal(ops.linear(one, weight), one, weight)
    weight = NvFp4(torch.full((256, 8), 0x73, dtype=torch.uint8), every.view(E4M3), torch.tensor(0.7))
    assert_equal(ops.linear(torch.eye(16)[:2], weight), torch.eye(16)[:2], weight)


def test_every_block_of_columns_has_its_own_scale(ops):
    x = torch.zeros(11, 11 * 128)
    x[torch.arange(11), torch.arange(11) * 128] = 1.0
    weight = Fp8(torch.full((1, 11 * 128), 0.5).to(E4M3), SCALES.view(E8M0)[None, :])
    assert ops.linear(x.bfloat16(), weight).isnan().all()  # of the last block
    x, weight = x[:-1, :-128].bfloat16() * LARGE, Fp8(weight.data[:, :-128], weight.scale[:, :-1])
    assert_equal(ops.linear(x, weight), x, weight)


@pytest.mark.parametrize("form", ["bf16", "fp8", "fp4", "nvfp4"])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_is_not_finite_stays_in_its_token(ops, form, bad):
    for t in (3, 20):
        g = seeded(t)
        weight, x = FORMS[form](g, 5, 96), torch.randn(t, 96, generator=g).bfloat16()
        x[1, 40] = bad
        ours, (total, _) = ops.linear(x, weight), product(x[:, None], weight)
        assert ours.isfinite().all(1).tolist() == [token != 1 for token in range(t)]
        assert torch.equal(ours.isnan(), total[:, 0].isnan())


def test_a_nan_weight_stays_nan(ops):
    data = torch.zeros(2, 64, dtype=torch.uint8)
    data[0, 3], data[1, 5] = 0x7F, 0xFF
    assert ops.linear(torch.ones(1, 64), Fp8(data.view(E4M3), torch.ones(1, 1).to(E8M0))).isnan().all()


@on_triton
@pytest.mark.parametrize(("groups", "rows", "columns"), [(1, 130, 200), (2, 66, 128)])
def test_of_many_tokens_codes_are_decoded_first(groups, rows, columns, monkeypatch):
    """Under scales of 2^-20 to 2^20, which bf16 holds with every byte of E4M3: the product, as it is without."""
    triton, g = pytest.importorskip("fathom.kernels.linear.triton", reason=NO_TRITON), seeded(3)
    shape = groups * rows, columns
    scale = torch.randint(107, 148, (-(-shape[0] // 128), -(-columns // 128)), dtype=torch.uint8, generator=g)
    weight = Fp8(e4m3(g, *shape), scale.view(E8M0))
    x = torch.randint(-4, 5, (37, groups, columns), generator=g).bfloat16()
    made, found = triton._decoded, []
    monkeypatch.setattr(triton, "_decoded", lambda given: found.append(made(given)) or found[-1])
    fused = triton.grouped_linear(x, weight, groups)
    assert not found
    monkeypatch.setattr(triton, "MANY", 33)
    first = triton.grouped_linear(x, weight, groups)
    assert_product(first, x, weight, groups)
    assert_product(fused, x, weight, groups)
    assert torch.equal(found[0].data.float(), formats.decode(weight))
    for other in (Fp8(weight.data, weight.scale.float()), Dense(found[0].data)):  # nothing to decode, or not exactly
        triton.grouped_linear(x, other, groups)
    triton.grouped_linear(x.float(), weight, groups)
    assert len(found) == 1


@on_triton
def test_what_is_decoded_first_are_all_bytes_under_all_scales_that_bfloat16_holds():
    decoded = pytest.importorskip("fathom.kernels.linear.triton", reason=NO_TRITON)._decoded(CODES["fp8"])
    expected = formats.decode(CODES["fp8"])
    assert_same_bits(decoded.data.float(), expected.bfloat16().float())


@pytest.mark.parametrize("t", [2, 20])
def test_neighbours_in_memory_are_not_read(ops, t):
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
        assert_product(ops.linear(own, weight)[:, None], own[:, None], weight)


def test_inputs_of_another_width_are_refused(ops):
    with pytest.raises((AssertionError, RuntimeError), match=r"want|the weight 4|size mismatch"):
        ops.linear(torch.ones(1, 5), Dense(torch.ones(4, 4)))


# --- what one backend promises


@forms
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_cpu_a_token_has_the_same_bits_alone_among_others_and_on_all_threads(form, dtype, threads, monkeypatch):
    """Beside it is NaN, and a panel ends."""
    monkeypatch.setattr(cpu, "PANEL", 16)
    g = seeded(7)
    weight, x = FORMS[form](g, 130, 1056), torch.randn(37, 1056, generator=g).to(dtype)
    alone = torch.cat([CPU.linear(token[None], weight) for token in x])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for t in (2, 3, 4, 5, 37):
            assert torch.equal(CPU.linear(x[:t], weight), alone[:t])
        x[1::2] = NAN
        assert torch.equal(CPU.linear(x, weight)[::2], alone[::2])
    finally:
        torch.set_num_threads(before)


# Numbers below 2^-126, which the processor's product of bfloat16 would take as 0
TINY = {
    "bf16": Dense(torch.tensor([[2.0**-130, 1.0]]).bfloat16().repeat(1, 16)),
    "fp8": Fp8(torch.full((1, 32), 2.0**-9).to(E4M3), torch.tensor([[9]], dtype=torch.uint8).view(E8M0)),
    "fp8, f32 scales": Fp8(torch.full((1, 32), 2.0**-9).to(E4M3), torch.full((1, 1), 2.0**-118)),
    "fp4": Fp4(torch.full((1, 16), 0x11, dtype=torch.int8), torch.tensor([[1]], dtype=torch.uint8).view(E8M0)),
}


@pytest.mark.parametrize("form", TINY)
def test_a_subnormal_weight_counts(form):
    x = torch.zeros(2, 32).bfloat16()
    x[:, 0] = 2.0**100
    for t in (1, 2):
        assert_equal(CPU.linear(x[:t], TINY[form]), x[:t], TINY[form])
    assert not held_in_bfloat16(TINY[form])


def test_ordinary_weights_are_multiplied_as_bfloat16():
    g = seeded(1)
    held = {form for form in FORMS if held_in_bfloat16(FORMS[form](g, 256, 256))}
    assert held == {"bf16", "fp8", "fp4", "nvfp4"}
    powers = Fp8(e4m3(g, 256, 256), torch.tensor([[1.0, 2.0**-117], [2.0**118, 0.5]]))
    assert held_in_bfloat16(powers)
    for other in (0.75, -1.0, 0.0, 2.0**-118, 2.0**119, INF, NAN):
        assert not held_in_bfloat16(powers._replace(scale=powers.scale.index_fill(1, torch.tensor([1]), other)))
    codes = torch.arange(256, dtype=torch.uint8)[:, None]
    fours = [Fp4(torch.zeros(1, 16, dtype=torch.int8), code[None].view(E8M0)) for code in codes]
    assert [code for code in range(256) if held_in_bfloat16(fours[code])] == list(range(10, 246))
    nvfp4 = FORMS["nvfp4"](g, 16, 32)
    for size, common in ((1.0, True), (2.0**-64, True), (2.0**65, False), (2.0**-65, False), (NAN, False)):
        assert held_in_bfloat16(nvfp4._replace(global_scale=torch.tensor(size))) == common
    powers.scale[0, 0] = 3.0  # what is changed is looked at again
    assert not held_in_bfloat16(powers)
    zeros = torch.tensor([0.0, -0.0, NAN, INF, 2.0**-126] * 7).bfloat16()
    assert held_in_bfloat16(Dense(zeros[None]))
    for at in (0, 33, 34):
        assert not held_in_bfloat16(Dense(zeros.index_fill(0, torch.tensor([at]), -(2.0**-127))[None]))


@forms
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_few_tokens_do_not_depend_on_one_another(form, dtype, monkeypatch):
    """Nor on how many rows a program has: in the interpreter more than on a GPU. Beside a token is NaN."""
    fused = pytest.importorskip("fathom.kernels.linear.triton", reason=NO_TRITON)
    g = seeded(1)
    x, weight = torch.randn(16, 1056, generator=g).to(dtype), FORMS[form](g, 7, 1056)
    alone = torch.cat([fused.linear(token[None], weight) for token in x])
    assert alone.isfinite().all()
    for t in (2, 5, 16):
        assert torch.equal(fused.linear(x[:t], weight), alone[:t])
    x[1::2] = NAN
    monkeypatch.setattr(pytest.importorskip("fathom.kernels.linear.weight_rows"), "INTERPRETED", None)
    assert torch.equal(fused.linear(x[:6], weight)[::2], alone[:6:2])
    several = [Product(weight), Product(FORMS["bf16"](g, 9, 1056), wide=True)]
    assert torch.equal(fused.linears(x[:1], several, deployed=False)[0], alone[:1])


@pytest.mark.parametrize("form", ["bf16", "f16", "fp8", "fp4", "nvfp4"])
@pytest.mark.parametrize("t", [1, 3])
def test_rows_that_are_not_made_of_whole_words_are_products_too(ops, form, t):
    """Of 3 or 6 bytes, or 8 that begin beside a word: Triton's tiles take them."""
    g = seeded(t)
    columns = {"fp4": 32, "nvfp4": 16}.get(form, 3)
    weight = FORMS[form](g, 6, columns)
    if columns > 3:
        wide = torch.zeros(6, columns // 2 + 1, dtype=weight.data.dtype)
        wide[:, 1:] = weight.data
        weight = weight._replace(data=wide[:, 1:])
    x = torch.randn(t, columns, generator=g).bfloat16()
    if ops.name == "triton":
        assert pytest.importorskip("fathom.kernels.linear.weight_rows").words(weight) is None
    assert_product(ops.linear(x, weight)[:, None], x[:, None], weight)
    both = ops.linears(x, [Product(weight), Product(FORMS["f32"](g, 2, columns), wide=True)], deployed=False)
    assert torch.equal(both[0], ops.linear(x, weight))


def test_triton_refuses_columns_that_are_apart_and_groups_of_unequal_rows():
    fused = pytest.importorskip("fathom.kernels.linear.triton", reason=NO_TRITON)
    with pytest.raises(AssertionError, match="columns of a weight"):
        fused.linear(torch.ones(1, 4), Dense(torch.ones(4, 4).T))
    with pytest.raises(AssertionError, match="groups"):
        fused.grouped_linear(torch.ones(1, 3, 4), Dense(torch.ones(4, 4)), 3)


def resident_beyond(tokens):
    """Bytes that the process takes at most for a product beyond what it had: of 128 MiB of fp32, in FP4."""
    small = Fp4(torch.zeros(1, 16, dtype=torch.int8), torch.full((1, 1), 127).byte().view(E8M0))
    x = torch.randn(tokens, 4096).bfloat16()
    weight = Fp4(random_bytes(seeded(2), 8192, 2048).view(torch.int8), torch.full((8192, 128), 127).byte().view(E8M0))
    CPU.linear(x[:, :32], small)  # what is loaded for the first
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    CPU.linear(x, weight)
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


@pytest.mark.skipif(sys.platform != "linux", reason="another system counts in another unit")
@pytest.mark.parametrize("tokens", [1, 256])
def test_cpu_decodes_no_whole_matrix_and_its_plan_counts_what_it_takes(tokens):
    planned = cpu.linear_scratch(tokens, 8192, 4096, "FP4", 2, torch.device("cpu"))
    assert call(resident_beyond, tokens) < planned + 2**20
    assert planned < (8 if "FP4" in cpu.IN_BFLOAT16 else 9) * 2**20  # of 64 that the matrix takes in bf16


# --- decoding


@loop
def _rows(low, high, weight, columns, out):
    for row in range(low, high):
        for i in range(0, columns, 32):
            first, second = decoded_piece(weight, row, columns, i)
            store_some(out, row * columns + i, first, columns - i)
            store_some(out, row * columns + i + 16, second, columns - i - 16)


@compiled(*((form, types.int64, types.int64, types.float32[::1]) for form in cpu_formats.FORMS.values()))
def decode_all(weight, rows, columns, out):
    each(_rows, rows, (weight, columns, out))


def decode_on_cpu(weight):
    laid = torch.full(weight.shape, NAN)
    decode_all(cpu_formats.arrays(weight), *weight.shape, array(laid))
    out = laid.clone()
    if isinstance(weight, Fp4 | NvFp4):  # of 32 the even columns first, of a last sixteen too
        for low in range(0, laid.shape[1], 32):
            part = laid[:, low : low + 32]
            out[:, low : low + 32 : 2], out[:, low + 1 : low + 32 : 2] = part.chunk(2, dim=1)
    return out * weight.global_scale if isinstance(weight, NvFp4) else out


@pytest.fixture(params=[formats.decode, decode_on_cpu], ids=["reference", "cpu"])
def decode(request):
    return request.param


def assert_same_bits(ours, expected):
    """The same bits, so that -0.0 is not 0.0, and NaN, of which there are many, at the same places."""
    nan = expected.isnan()
    assert torch.equal(ours.isnan(), nan)
    assert torch.equal(ours.masked_fill(nan, 0).view(torch.int32), expected.masked_fill(nan, 0).view(torch.int32))


EVERY_BYTE, EVERY_SCALE = BYTES.repeat(256, 1), BYTES[:, None].repeat(1, 32)  # [256 scales, 256 bytes]; one in a row
# All bytes under all scales; under float32's, those that take all 24 bits
CODES = {
    "fp8": Fp8(EVERY_BYTE.view(1, -1).view(E4M3), EVERY_SCALE[:, :2].reshape(1, -1).view(E8M0)),
    "fp4": Fp4(EVERY_BYTE.view(torch.int8), EVERY_SCALE[:, :16].contiguous().view(E8M0)),
    "fp8, f32 scales": Fp8(BYTES[None].view(E4M3), torch.tensor([[1 / 3, 0.0123]])),
    "nvfp4": NvFp4(EVERY_BYTE, EVERY_SCALE.contiguous().view(E4M3), torch.tensor(1 / 3)),
}


@pytest.mark.parametrize("form", CODES)
def test_every_code_is_decoded_exactly_under_a_power_of_two_and_else_rounded_once(decode, form):
    product = exact(CODES[form])
    assert_same_bits(decode(CODES[form]), product.float())
    held = product.abs() <= torch.finfo(torch.float32).max
    assert torch.equal(product.float().double()[held], product[held]) == (form in {"fp8", "fp4"})


@loop
def _rows_of_bfloat16(low, high, weight, columns, out):
    for row in range(low, high):
        for i in range(0, columns, 32):
            put(out, row * columns + i, taken(weight, row, columns, i, out))


NARROW = [(form, kind) for form, kind in cpu.KINDS if kind.dtype == types.uint16]


@compiled(*((form, types.int64, types.int64, kind) for form, kind in NARROW))
def decode_as_bfloat16(weight, rows, columns, out):
    each(_rows_of_bfloat16, rows, (weight, columns, out))


@pytest.mark.skipif(not cpu.PAIRS, reason="this processor does not multiply bfloat16")
@pytest.mark.parametrize("form", ["fp8", "fp4", "nvfp4"])
def test_every_code_is_decoded_to_bfloat16_under_every_scale_that_is_taken(form):
    """All bytes in a row, under one scale."""
    scales = range(256) if form == "nvfp4" else range(10, 246)
    width = 128 if form == "fp8" else 16 if form == "nvfp4" else 32
    for code in scales:
        if form == "fp8":
            weight = Fp8(BYTES[None].view(E4M3), torch.full((1, 2), code, dtype=torch.uint8).view(E8M0))
        else:
            scale = torch.full((1, 512 // width), code, dtype=torch.uint8)
            weight = Fp4(BYTES[None].view(torch.int8), scale.view(E8M0))
            if form == "nvfp4":
                weight = NvFp4(BYTES[None], scale.view(E4M3), torch.tensor(1.0))
        assert held_in_bfloat16(weight)
        laid, expected = torch.full(weight.shape, NAN).bfloat16(), exact(weight)
        decode_as_bfloat16(cpu_formats.arrays(weight), *weight.shape, array(laid))
        if form != "fp8":  # of 32 the even columns first
            expected = expected.unflatten(1, (-1, 16, 2)).transpose(2, 3).flatten(1)
        nan = expected.isnan()
        assert torch.equal(laid.isnan(), nan)
        assert torch.equal(laid.double().masked_fill(nan, 0), expected.masked_fill(nan, 0))


@forms
def test_a_tile_is_decoded_as_that_part_of_the_whole(decode, form):
    for shape in SHAPES:
        weight = FORMS[form](seeded(1), *shape)
        for start in range(0, shape[0], 128):
            part = slice(start, min(start + 128, shape[0]))
            assert_same_bits(decode(rows(weight, part.start, part.stop)), exact(weight)[part].float())
