"""The experts on every backend, both halves and the whole, against the equation in float64.

Inputs are such that all agree to the bit: gates are between 18 and 300, where silu(g) is g in fp32, and gate, up and
routing weights have few bits, so that only the roundings that are part of the equation happen.
"""

import inspect
import itertools
import os
import sys
from functools import partial

import pytest
import torch

from fathom.kernels.experts import reference as experts_reference
from fathom.kernels.formats import reference as formats
from fathom.kernels.formats.stored import Apart, Dense, Fp4, Fp8, NvFp4, as_stack, member, members, rows, stack
from fathom.kernels.ops import CPU, REFERENCE
from tests.deepseek_arithmetic import act_quant, in_place
from tests.grids import on_demand
from tests.ptx import run

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
LIMIT = 300.0
NAN = float("nan")
NO_TRITON = "Triton is not on every platform"
ON_DEVICE = "TRITON_INTERPRET" not in os.environ  # `tests.conftest` sets it
# What Hopper's FP8 tensor cores may be off, of the sum of sizes: 33 numbers at once, each cut to 12 bits below the
# largest, four times for 128 columns (`tests/fp8_sums.py`)
CUT_OFF = 4 * 33 * 2.0**-12

WAYS = ["reference", "cpu", "triton by tiles", "triton, numbers of few tokens too", "triton, codes of few tokens too"]


@pytest.fixture(params=WAYS)
def ops(request, monkeypatch):
    """Triton's experts by tiles, and those of Hopper, which run in the interpreter from two tokens on then."""
    if "triton" in request.param:
        triton = pytest.importorskip("fathom.kernels.triton_ops", reason=NO_TRITON).TRITON
        hopper = sys.modules[triton.experts_fp8.__module__]
        if request.param == "triton by tiles":
            return triton._replace(experts=hopper.by_tiles.experts)
        monkeypatch.setattr(hopper, "FEW", 1)
        return triton if "numbers" in request.param else triton._replace(experts=triton.experts_fp8)
    return CPU if request.param == "cpu" else REFERENCE


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# form: rows and columns under one scale, which scales, and whether `deployed` rounds the inputs
FORMS = {
    "bf16": (1, 1, [1.0], False),
    "fp8": (128, 128, [1.0, 2.0], True),
    "fp8, f32 scales": (128, 128, [1.0, 2.0, 3.0], True),
    "fp4": (1, 32, [1.0, 2.0], True),
    "nvfp4": (1, 16, [0.5, 1.0], False),  # E4M3's 1 and 2, times 1/2
}


def encoded(form, g, signs):
    """A matrix of +-1 (`signs`) times scales that differ from block to block, stored and in float64."""
    (o, i), (high, wide, scales, _) = signs.shape, FORMS[form]
    scale = torch.tensor(scales)[torch.randint(len(scales), (-(-o // high), -(-i // wide)), generator=g)]
    values = signs.double() * scale.double().repeat_interleave(high, 0)[:o].repeat_interleave(wide, 1)[:, :i]
    code = torch.where(signs > 0, 2, 10).byte()
    packed = code[:, ::2] | code[:, 1::2] << 4
    match form:
        case "bf16":
            return Dense(signs.bfloat16()), values
        case "fp8" | "fp8, f32 scales":
            return Fp8(signs.to(E4M3), scale.to(E8M0) if form == "fp8" else scale), values
        case "fp4":
            return Fp4(packed.view(torch.int8), scale.to(E8M0)), values
    return NvFp4(packed, (2 * scale).to(E4M3), torch.tensor(0.5)), values


def signs(g, *shape):
    return torch.randint(0, 2, shape, generator=g) * 2.0 - 1


def layer(form, count, hidden, inner, seed):
    """w1, w3, w2 of `count` experts, stored and in float64: gates are sums of 128 or so positive numbers."""
    g = seeded(seed)
    made = (
        [encoded(form, g, torch.ones(inner, hidden)) for _ in range(count)],
        [encoded(form, g, signs(g, inner, hidden)) for _ in range(count)],
        [encoded(form, g, signs(g, hidden, inner)) for _ in range(count)],
    )
    return tuple(stack([held for held, _ in of]) for of in made), tuple([values for _, values in of] for of in made)


def tokens(t, k, hidden, of, seed):
    g = seeded(seed)
    x = torch.randint(1, 4, (t, hidden), generator=g).div(4).bfloat16()
    ids = torch.rand(t, of, generator=g).argsort(1)[:, :k]
    return x, ids, torch.randint(1, 8, (t, k), generator=g) / 4


def summed(x, ids, weights, values, limit, *, rounding=False):
    """``sum_e W2_e swiglu(W1_e x, W3_e x, limit, weight_e)``, each rounded to the dtype of `x` as the contract says."""
    return summed_down(inner(x, ids, weights, values, limit, rounding=rounding), ids, values[2], rounding=rounding)


def product(rows, w, *, rounding):
    rows = in_place(act_quant(rows, 128), rows) if rounding else rows
    return (rows.double() @ w.T).to(rows.dtype)


def inner(x, ids, weights, values, limit, *, rounding=False):
    """The first half: [t, k, inner]."""
    out = x.new_zeros(*ids.shape, values[0][0].shape[0])
    for expert, (w1, w3) in enumerate(zip(*values[:2], strict=True)):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = (product(x[token], w, rounding=rounding).double() for w in (w1, w3))
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        out[token, slot] = ((gate * gate.sigmoid()).float().double() * up * weights[token, slot, None]).to(x.dtype)
    return out


def summed_down(a, ids, w2, *, rounding=False):
    """The second half: [t, hidden]."""
    out = torch.zeros(a.shape[0], w2[0].shape[0], dtype=torch.float64)
    for expert, w in enumerate(w2):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        out.index_add_(0, token, product(a[token, slot], w, rounding=rounding).double())
    return out.float()


def assert_summed(ops, form, made, x, ids, weights, *, deployed=False):
    """Both halves in one, and one after the other."""
    (w1, w3, w2), values = made
    ours = ops.experts(x, ids, weights, w1, w3, w2, LIMIT, deployed=deployed)
    assert (ours.dtype, ours.shape) == (torch.float32, x.shape)
    rounding = deployed and FORMS[form][3]
    of_codes = ops.name == "triton" and ops.experts == ops.experts_fp8 and deployed and form == "fp4"
    assert_same(ours, summed(x, ids, weights, values, LIMIT, rounding=rounding), of_codes=of_codes)
    up = ops.experts_up(x, ids, weights, w1, w3, LIMIT, deployed=deployed)
    assert (up.dtype, up.shape) == (x.dtype, (*ids.shape, w1.shape[0]))
    assert torch.equal(up, inner(x, ids, weights, values, LIMIT, rounding=rounding))
    assert_same(ours, ops.experts_down(up, ids, w2, deployed=deployed), of_codes=of_codes)
    return ours


def assert_same(ours, expected, *, of_codes):
    """To the bit; sums of codes on a GPU, whose tensor cores cut off what they add, as near as `bench gpu` wants."""
    if of_codes and ON_DEVICE:
        from fathom.scripts.bench.gpu_cases import ROUNDED  # noqa: PLC0415 -- it imports Triton

        assert ROUNDED.error(ours, expected) <= 1
    else:
        assert torch.equal(ours, expected)


# Each form is decoded, and inputs are rounded or not, whatever the form.
PAIRS = [(True, "fp8"), (True, "fp4"), (True, "nvfp4"), (False, "bf16"), (False, "fp8, f32 scales")]
OTHERS = sorted({*itertools.product((False, True), FORMS)} - {*PAIRS})


@pytest.mark.parametrize(
    ("deployed", "form", "t"),
    [
        (False, "fp4", 1),
        *((*pair, t) for pairs, t in ((PAIRS, 6), (OTHERS, 3)) for pair in pairs),
        *on_demand(*((*pair, t) for pairs, t in ((PAIRS, 3), (OTHERS, 6)) for pair in pairs)),
    ],
)
def test_experts_are_summed(ops, form, deployed, t):
    """Four experts, some without a token; two tiles of rows, the last cut where nothing forbids it."""
    hidden, columns = (256, 128) if deployed else (160, 160)
    if form in {"bf16", "fp8, f32 scales"} or (form == "nvfp4" and deployed):  # one tile of what lies as another does
        hidden = columns = 128
    made = layer(form, 4, hidden, columns, t)
    assert_summed(ops, form, made, *tokens(t, 2, hidden, 4, 3), deployed=deployed)


@pytest.mark.parametrize(
    ("deployed", "form", "ranks"),
    [(*pair, ranks) for pair, ranks in zip(PAIRS, (2, 4, 2, 4, 4), strict=True)]
    + on_demand(*((*pair, ranks) for pair, ranks in zip(PAIRS, (4, 2, 4, 2, 2), strict=True)))
    + on_demand(*((*pair, ranks) for pair in OTHERS for ranks in (2, 4))),
)
def test_parts_by_rows_make_up_the_whole(ops, form, deployed, ranks):
    """Rows of w1 and w3 are columns of what w2 is given, and rows of w2 columns of the sum: of parts of a block too."""
    (w1, w3, w2), _ = layer(form, 3, 128, 128, 0)
    x, ids, weights = tokens(5, 2, 128, 3, 1)

    def part(stacked, rank):
        of = [member(stacked, expert) for expert in range(3)]
        return as_stack([rows(one, rank * 128 // ranks, (rank + 1) * 128 // ranks) for one in of])

    up = [
        ops.experts_up(x, ids, weights, part(w1, rank), part(w3, rank), LIMIT, deployed=deployed)
        for rank in range(ranks)
    ]
    a = torch.cat(up, dim=2)
    assert torch.equal(a, ops.experts_up(x, ids, weights, w1, w3, LIMIT, deployed=deployed))
    down = [ops.experts_down(a, ids, part(w2, rank), deployed=deployed) for rank in range(ranks)]
    assert torch.equal(torch.cat(down, dim=1), ops.experts(x, ids, weights, w1, w3, w2, LIMIT, deployed=deployed))


@pytest.mark.parametrize("t", [1, 5, 9])
def test_experts_of_several_forms_are_run_one_by_one(ops, t):
    """Of one form in one tensor, apart, and one of them in another form: the same numbers."""
    (w1, w3, w2), _ = layer("fp8", 3, 128, 128, 7)
    x, ids, weights = tokens(t, 2, 128, 3, 1)
    apart = [[member(of, e) for e in range(3)] for of in (w1, w3, w2)]
    apart[2][1] = Dense(formats.decode(apart[2][1]).bfloat16())  # E4M3 times a power of two: as it was
    one, three, two = (as_stack(of) for of in apart)
    wanted = ops.experts(x, ids, weights, w1, w3, w2, LIMIT, deployed=False)
    assert torch.equal(ops.experts(x, ids, weights, one, three, two, LIMIT, deployed=False), wanted)
    up = ops.experts_up(x, ids, weights, one, three, LIMIT, deployed=False)
    assert torch.equal(ops.experts_down(up, ids, two, deployed=False), wanted)


@pytest.mark.parametrize("form", FORMS)
def test_what_lies_one_behind_another_is_a_stack_where_it_lies(form):
    (w1, _, w2), _ = layer(form, 3, 128, 128, 7)
    for stacked in (w1, w2):
        found = as_stack([member(stacked, e) for e in range(3)])
        assert type(found) is type(stacked)
        for plane, own in zip(found, stacked, strict=True):
            assert (plane.data_ptr(), plane.shape, plane.stride()) == (own.data_ptr(), own.shape, own.stride())
        assert isinstance(as_stack([member(stacked, e) for e in (0, 2, 1)]), Apart)
        assert isinstance(as_stack([member(stacked, e) for e in (0, 1, 1)]), Apart)
        assert isinstance(as_stack([type(stacked)(*map(torch.clone, member(stacked, e))) for e in range(3)]), Apart)
        assert as_stack([member(stacked, 2)]).data.shape[0] == 1


def test_blocks_whose_codes_are_subnormal_or_whose_scale_is_the_smallest(ops):
    """Ups are E4M3's first hundred numbers times 1.375, so that most fall between two codes of the block's scale.

    Of the routing weights, the last leaves a block below 1e-4, which its scale no longer follows. All else is exact.
    """
    codes = torch.arange(1, 101, dtype=torch.uint8).view(E4M3).float()
    first, third, second = torch.zeros(128, 128), torch.zeros(128, 128), signs(seeded(1), 128, 128)
    first[:, 1], third[:100, 0] = 1.0, codes * signs(seeded(0), 100)
    one, values = torch.ones(1, 1).to(E8M0), tuple([w.double()] for w in (first, third, second))
    made = tuple(stack([Fp8(w.to(E4M3), one)]) for w in (first, third, second)), values
    x, ids = torch.zeros(3, 128).bfloat16(), torch.zeros(3, 1, dtype=torch.int64)
    x[:, 0], x[:, 1] = 1.375, 32.0
    ours = assert_summed(ops, "fp8", made, x, ids, torch.tensor([[1.0], [2.0**-6], [2.0**-28]]), deployed=True)
    assert (ours != 0).all()
    assert not torch.equal(ours[2], ours[0] * 2.0**-28), "the smallest scale rounds otherwise"


def test_fp32_activations_are_not_narrowed(ops):
    """Sums of 32 products of which the last bits may fall: in any order within 32 ulp of the sum of sizes."""
    stacks, values = layer("fp4", 2, 32, 32, 0)
    x, ids, weights = tokens(3, 2, 32, 2, 1)
    x = x.float() + 2.0**-12
    ours = ops.experts(x, ids, weights, *stacks, 20.0, deployed=False)
    sizes = 32 * 20.0 * 20.0 * 2 * weights.sum(1, keepdim=True)  # 32 columns of gate <= 20, up <= 20, w2 <= 2
    assert ((ours - summed(x, ids, weights, values, 20.0)).abs() <= 3 * 32 * 2.0**-23 * sizes).all()
    assert not torch.equal(ours, ops.experts(x.bfloat16(), ids, weights, *stacks, 20.0, deployed=False))


@pytest.mark.parametrize("counts", [(17, 17, 1, 1), (36, 0, 0, 0), (0, 16, 0, 20)])
def test_tokens_may_fall_on_experts_in_any_number(ops, counts):
    """Blocks of 16: the first needs as many as Triton's grid has; others leave experts without any."""
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))[torch.randperm(36, generator=seeded(2))]
    x, _, weights = tokens(36, 1, 32, 4, 5)
    if ops.name == "triton":
        assert pytest.importorskip("fathom.kernels.experts.triton")._tokens(36, 4) == 16
    assert_summed(ops, "bf16", layer("bf16", 4, 32, 32, 0), x, ids[:, None], weights)


def test_triton_sorts_more_pairs_than_one_chunk(monkeypatch):
    monkeypatch.setattr(pytest.importorskip("fathom.kernels.experts.triton", reason=NO_TRITON), "CHUNK", 8)
    triton = pytest.importorskip("fathom.kernels.triton_ops").TRITON
    assert_summed(triton, "bf16", layer("bf16", 2, 32, 32, 0), *tokens(33, 2, 32, 2, 5))


def test_scratch_is_filled_before_it_is_read(ops, monkeypatch):
    """Scratch that nobody filled is NaN; neither weights nor ids need lie in order."""

    def filled(make):
        def made(*args, **more):
            out = make(*args, **more)
            return out.fill_(NAN) if out.is_floating_point() else out

        return made

    made, (x, ids, weights) = layer("bf16", 4, 32, 32, 0), tokens(5, 3, 32, 4, 5)
    monkeypatch.setattr(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty", filled(torch.empty))
    assert assert_summed(ops, "bf16", made, x, ids.T.contiguous().T, weights.T.contiguous().T).isfinite().all()
    assert over_ranks(ops, 2, x, ids.T.contiguous().T, weights.T.contiguous().T, made[0]).isfinite().all()


@pytest.mark.parametrize("slots", [(0, 1, 2), (2, 0, 1), (2, 1, 0), (1, 2, 0)])
def test_outputs_are_summed_in_ascending_order_of_experts(ops, slots):
    """2^30 and -2^30 first, then 1: any other order loses the 1."""
    one = Dense(torch.ones(3, 32, 32).bfloat16() / 32)
    weights = torch.tensor([[2.0**30, -(2.0**30), 1.0]])[:, list(slots)]
    x = torch.full((1, 32), 32.0).bfloat16()
    given = x, torch.tensor([slots]), weights, one, one, one, 100.0
    ours = ops.experts(*given, deployed=False)
    assert (ours == 32 * 32).all()
    assert torch.equal(ops.sum_slots(ops.experts(*given, deployed=False, summed=False), given[1]), ours)


def test_a_token_does_not_depend_on_the_others(ops):
    stacks, _ = layer("fp4", 3, 128, 128, 0)
    x, ids, weights = tokens(5, 2, 128, 3, 5)
    alone = ops.experts(x[:2], ids[:2], weights[:2], *stacks, LIMIT, deployed=True)
    x[3, 7] = NAN
    ours = ops.experts(x, ids, weights, *stacks, LIMIT, deployed=True)
    assert torch.equal(ours[:2], alone)
    assert ours.isnan().all(1).tolist() == [False, False, False, True, False]


def test_without_tokens_or_slots_the_sum_is_zero(ops):
    stacks, _ = layer("bf16", 2, 32, 32, 0)
    for t, k in ((0, 2), (3, 0)):
        x, ids, weights = torch.ones(t, 32).bfloat16(), torch.zeros(t, k, dtype=torch.int64), torch.ones(t, k)
        assert torch.equal(ops.experts(x, ids, weights, *stacks, 1.0, deployed=False), torch.zeros(t, 32))
        apart = ops.experts(x, ids, weights, *stacks, 1.0, deployed=False, summed=False)
        assert (apart.dtype, apart.shape) == (x.dtype, (t, k, 32))
        assert torch.equal(ops.sum_slots(apart, ids), torch.zeros(t, 32))


@pytest.mark.parametrize(
    ("deployed", "form", "most"),
    [(*pair, 3 if at else 32) for at, pair in enumerate(PAIRS)]  # where they begin to be sorted, no form decides
    + on_demand(*((*pair, 32) for pair in PAIRS[1:] + OTHERS)),
)
def test_triton_pairs_of_up_to_32_tokens_have_the_bits_of_a_token_alone(form, deployed, most, monkeypatch):
    """Numbers of which every sum rounds. Of up to `most` tokens, of which 32 are the last that are not sorted.

    Nor do bits depend on how many rows a program has: in the interpreter more than on a GPU.
    """
    triton = pytest.importorskip("fathom.kernels.triton_ops", reason=NO_TRITON).TRITON
    kernel = pytest.importorskip("fathom.kernels.experts.triton", reason=NO_TRITON)
    hidden, inner = (384, 128) if deployed else (416, 96)  # a step with idle threads
    (w1, w3, w2), _ = layer(form, 3, hidden, inner, 4)
    _, ids, weights = tokens(33, 2, hidden, 3, 5)
    x = torch.randn(33, hidden, generator=seeded(6)).bfloat16()

    def run(t, first=0):
        part = slice(first, first + t)
        return triton.experts(x[part], ids[part], weights[part], w1, w3, w2, 20.0, deployed=deployed)

    places = torch.tensor([0, 2, 7, 15, 16, 31])
    places = places[places < most]
    alone = torch.cat([run(1, first) for first in places.tolist()])
    for t in (t for t in (3, 8) if t <= most):
        assert torch.equal(run(t)[places[places < t]], alone[places < t])
    if most == 32 or form in {"bf16", "fp4"}:  # a GPU's programs, of which there are many more
        with monkeypatch.context() as patch:
            patch.setattr(pytest.importorskip("fathom.kernels.linear.weight_rows"), "INTERPRETED", None)
            assert torch.equal(run(1), alone[:1])
    if most == 32:
        sorted_ones, sort = [], kernel._sort

        class Noted:
            def __getitem__(self, grid):
                sorted_ones.append(grid)
                return sort[grid]

        monkeypatch.setattr(kernel, "_sort", Noted())
        assert torch.equal(run(32)[places], alone)
        assert not sorted_ones
        run(33)
        assert sorted_ones
    assert not pytest.importorskip("fathom.kernels.linear.weight_tiles").counters(x.device).any()


@pytest.mark.parametrize("form", ["fp8", "fp4", "nvfp4"])
def test_a_scale_that_is_nan_stays_in_its_rows(ops, form):
    """Of w1 a row, or a block of them: all of an expert's outputs. Of w2 its own rows; other experts' tokens none."""
    for plane, t in ((0, 1), (2, 1), (2, 34)):
        made, _ = layer(form, 2, 128, 128, 3)
        made[plane].scale.view(torch.uint8)[0, 0, 0] = 0x7F if form == "nvfp4" else 255
        x, _, weights = tokens(t, 1, 128, 2, 5)
        ids = torch.arange(t)[:, None] % 2
        bad = ops.experts(x, ids, weights, *made, LIMIT, deployed=False).isnan()
        assert not bad[1::2].any()
        assert bad[::2].sum(1).tolist() == [1 if plane == 2 and form != "fp8" else 128] * len(bad[::2])


def test_rows_that_are_not_made_of_whole_words_are_summed_too(ops):
    """Of 131 and 35 numbers in bf16: Triton sorts even one token's pairs."""
    (w1, w3, w2), values = layer("bf16", 3, 132, 36, 2)
    cut = [(w1, 35, 131), (w3, 35, 131), (w2, 131, 35)]
    stacks = tuple(Dense(of.data[:, :high, :wide].contiguous()) for of, high, wide in cut)
    exact = tuple([one[:high, :wide] for one in of] for of, (_, high, wide) in zip(values, cut, strict=True))
    for t in (1, 3):
        assert_summed(ops, "bf16", (stacks, exact), *tokens(t, 2, 131, 3, 1))


def test_columns_that_cut_a_rounded_block_are_refused(ops):
    stacks, _ = layer("fp4", 2, 32, 32, 0)
    with pytest.raises(AssertionError, match="128"):
        ops.experts(*tokens(1, 1, 32, 2, 0), *stacks, 1.0, deployed=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("deployed", [False, True])
def test_cpu_experts_together_have_the_bits_of_one_after_the_other(form, dtype, deployed):
    """Of matrices that lie apart, as a mapped checkpoint's; numbers of which every sum rounds."""
    g = seeded(3)
    made = [[encoded(form, g, signs(g, *s))[0] for _ in range(4)] for s in ((256, 128), (256, 128), (128, 256))]
    x, ids, weights = torch.randn(4, 128, generator=g).to(dtype), *tokens(4, 3, 128, 4, 1)[1:]
    stacks = [Apart(of) for of in made]
    ours = CPU.experts(x, ids, weights, *stacks, 2.0, deployed=deployed)
    parts = experts_reference.Experts(CPU.linear, CPU.swiglu, CPU.simulate_fp8)
    assert torch.equal(ours, parts(x, ids, weights, *stacks, 2.0, deployed=deployed))
    assert torch.equal(ours, CPU.experts(x, ids, weights, *(stack(of) for of in made), 2.0, deployed=deployed))


@pytest.mark.parametrize("odd", [None, 0, 2])
def test_cpu_experts_some_of_which_bfloat16_does_not_hold_have_the_bits_of_one_after_the_other(odd):
    g = seeded(3)
    made = [[encoded("fp8", g, signs(g, *s))[0] for _ in range(4)] for s in ((256, 128), (256, 128), (128, 256))]
    made = [[Fp8(one.data, one.scale.float()) for one in of] for of in made]
    if odd is not None:
        made[0][odd].scale.mul_(0.75)
    x, (_, ids, weights) = torch.randn(4, 128, generator=g).bfloat16(), tokens(4, 3, 128, 4, 1)
    stacks = [Apart(of) for of in made]
    parts = experts_reference.Experts(CPU.linear, CPU.swiglu, CPU.simulate_fp8)
    expected = parts(x, ids, weights, *stacks, 2.0, deployed=True)
    assert torch.equal(CPU.experts(x, ids, weights, *stacks, 2.0, deployed=True), expected)


@pytest.mark.parametrize("ops", ["reference", "cpu"], indirect=True)
def test_a_few_tokens_whose_ids_lie_column_by_column_are_taken_as_they_are(ops):
    made, (x, ids, weights) = layer("bf16", 4, 32, 32, 0), tokens(4, 3, 32, 4, 5)
    assert_summed(ops, "bf16", made, x.T.contiguous().T, ids.T.contiguous().T, weights.T.contiguous().T)


def test_cpu_refuses_what_it_would_read_at_wrong_places():
    (w1, w3, w2), _ = layer("bf16", 2, 32, 32, 0)
    given = tokens(1, 1, 32, 2, 0)
    apart = [Apart([Dense(member(of, e).data.T) for e in range(2)]) for of in (w1, w3, w2)]
    with pytest.raises(AssertionError, match="rows of a matrix lie apart"):
        CPU.experts(*given, *apart, 1.0, deployed=False)
    other = layer("fp4", 2, 32, 32, 0)[0][1]
    with pytest.raises(AssertionError, match="w3 Fp4"):
        CPU.experts(*given, w1, other, w2, 1.0, deployed=False)


def test_triton_and_stacks_take_matrices_of_one_form():
    (w1, _, w2), _ = layer("bf16", 2, 32, 32, 0)
    other = layer("fp4", 2, 32, 32, 0)[0][0]
    with pytest.raises(AssertionError, match="forms"):
        stack([member(w1, 0), member(other, 0)])
    triton = pytest.importorskip("fathom.kernels.triton_ops", reason=NO_TRITON).TRITON
    with pytest.raises(AssertionError, match="w3 Fp4"):
        triton.experts(*tokens(1, 1, 32, 2, 0), w1, other, w2, 1.0, deployed=False)


# --- whole experts on ranks


def over_ranks(ops, ranks, x, ids, weights, stacks, limit=LIMIT, *, deployed=False):
    """Outputs of pairs, each from the rank that has its expert."""
    each, y = members(stacks[0]) // ranks, x.new_full((*ids.shape, x.shape[1]), NAN)
    for rank in range(ranks):
        own = [as_stack([member(of, e) for e in range(rank * each, (rank + 1) * each)]) for of in stacks]
        there = ids // each == rank
        how = {"deployed": deployed, "summed": False, "total": members(stacks[0])}
        found = ops.experts(x, ids - rank * each, weights, *own, limit, **how)
        assert (found.dtype, found.shape) == (y.dtype, y.shape)
        y[there] = found[there]
    return y


OF_RANKS = [  # how a form is decoded, and how inputs are rounded: each once
    *(("bf16", torch.bfloat16, False), ("fp8", torch.bfloat16, True), ("nvfp4", torch.bfloat16, False)),
    *(("fp4", torch.bfloat16, True), ("bf16", torch.float32, False), ("fp4", torch.float32, True)),
]
EVERY_RANKS = set(itertools.product(set(FORMS) - {"fp8, f32 scales"}, (torch.bfloat16, torch.float32), (False, True)))


@pytest.mark.parametrize(
    ("ops", "form", "dtype", "deployed"),
    [
        *((way, *one) for one in OF_RANKS for way in WAYS[:3]),
        *((way, "fp4", torch.bfloat16, deployed) for deployed in (False, True) for way in WAYS[3:]),  # of Hopper
        *on_demand(*((way, *one) for one in sorted(EVERY_RANKS - {*OF_RANKS}, key=str) for way in WAYS[:3])),
    ],
    indirect=["ops"],
)
def test_experts_of_ranks_have_the_bits_of_one(ops, form, dtype, deployed):
    """Of numbers of which every sum rounds. Of four ranks, a token alone leaves two without a pair."""
    g = seeded(3)
    stacks = [
        stack([encoded(form, g, signs(g, *shape))[0] for _ in range(4)])
        for shape in ((128, 256), (128, 256), (256, 128))
    ]
    for t, ranks in ((0, 2), (1, 4), (8, 2), (32, 4), (33, 1), (100, 4)):
        x, (_, ids, weights) = torch.randn(t, 256, generator=g).to(dtype), tokens(t, 2, 256, 4, t)
        one = ops.experts(x, ids, weights, *stacks, 2.0, deployed=deployed)
        y = over_ranks(ops, ranks, x, ids, weights, stacks, 2.0, deployed=deployed)
        assert torch.equal(ops.sum_slots(y, ids).view(torch.int32), one.view(torch.int32)), (t, ranks)


def test_a_rank_without_any_pair_gives_nothing(ops):
    stacks, _ = layer("fp4", 2, 128, 128, 0)
    for t in (1, 5, 40):
        x, ids, weights = tokens(t, 2, 128, 2, 1)
        apart = ops.experts(x, torch.full_like(ids, -1), weights, *stacks, LIMIT, deployed=True, summed=False)
        assert (apart.dtype, apart.shape) == (x.dtype, (t, 2, 128))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [1, 6, 8])
def test_slots_are_summed_in_fp32_in_ascending_order_of_experts(ops, dtype, k):
    g = seeded(k)
    y, ids = torch.randn(7, k, 1100, generator=g).to(dtype), torch.rand(7, 16, generator=g).argsort(1)[:, :k]
    wanted = torch.zeros(7, 1100)
    for token in range(7):
        for slot in ids[token].argsort():
            wanted[token] += y[token, slot].float()
    ours = ops.sum_slots(y.mT.contiguous().mT, ids.T.contiguous().T)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, wanted)


def test_tiles_of_a_rank_are_those_of_one_that_has_all():
    """A block's tokens follow from what an expert gets, and that from how many there are on all ranks."""
    tiles = pytest.importorskip("fathom.kernels.experts.triton", reason=NO_TRITON)
    codes = pytest.importorskip("fathom.kernels.experts.triton_expert_codes", reason=NO_TRITON)
    ids = torch.arange(2048).view(512, 4) % 64
    every, own = tiles._sorted(ids, 64), tiles._sorted(ids, 8, 64)
    assert own.tokens == every.tokens == 32
    assert own.blocks < every.blocks
    assert tiles._sorted(ids, 8).tokens == 64
    assert codes._tiles(ids.numel(), 64) != codes._tiles(ids.numel(), 8)


# --- FP4 experts of Hopper


@pytest.fixture
def of_codes(monkeypatch):
    """The file of kernels, whose ops run from two tokens on."""
    kernels = pytest.importorskip("fathom.kernels.experts.triton_expert_codes", reason=NO_TRITON)
    monkeypatch.setattr(kernels, "FEW", 1)
    return kernels


def tiled(kernels, monkeypatch, tokens, rows=64):
    monkeypatch.setattr(kernels, "_tiles", lambda *_: 2 * (kernels.Tile(rows, tokens, 128, 4, 3),))


def drawn(g, count, o, i, scales):
    """All codes, and E8M0 scales of this many rows and groups in turn."""
    codes = torch.randint(0, 256, (count, o, i // 2), dtype=torch.uint8, generator=g)
    picked = scales[torch.randint(len(scales), (count, o, i // 32), generator=g)]
    return Fp4(codes.view(torch.int8), picked.view(E8M0))


NEAR, FAR = torch.arange(110, 122).byte(), torch.arange(104, 127).byte()  # 2^11 apart, and further
WIDE = torch.arange(91, 152, 6).byte()  # 2^60 apart


@pytest.mark.parametrize("tile", [16, 32, 64, 128])
@pytest.mark.parametrize("scales", [NEAR, FAR, torch.cat([NEAR, FAR[:1]])], ids=["near", "far", "a step too far"])
def test_experts_of_codes_are_the_products(of_codes, monkeypatch, tile, scales):
    assert_products(of_codes, monkeypatch, of_codes._codes, tile, scales)


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize(
    "scales", [NEAR, WIDE, torch.cat([WIDE, WIDE[-1:] - 125]), torch.arange(12).byte()],
    ids=["near", "far", "a step too far", "the smallest"],
)  # fmt: skip
@pytest.mark.parametrize("deployed", [False, True])
def test_experts_of_numbers_are_the_products(of_codes, monkeypatch, tile, scales, deployed):
    assert_products(of_codes, monkeypatch, partial(of_codes._numbers, deployed=deployed), tile, scales, deployed)


def assert_products(of_codes, monkeypatch, given, tile, scales, deployed=True):
    """Sums of a few hundred exact products: within 8 ulp of the sum of sizes of what is multiplied, and rounded."""
    more = CUT_OFF if ON_DEVICE and given == of_codes._codes else 0.0
    tiled(of_codes, monkeypatch, tile)
    g = seeded(tile)
    w1, w3 = (drawn(g, 3, 128, 384, scales) for _ in range(2))
    w2 = drawn(g, 3, 384, 128, scales)
    # Of a tile of 128: what smaller ones hold, of 32 and of 64; a whole one, and what no smaller one holds
    ids = torch.arange(3).repeat_interleave(torch.tensor([20, 33, tile + tile // 2 + 1]))
    ids = ids[torch.randperm(len(ids), generator=g)].view(-1, 2)
    t = len(ids)
    x = (torch.randn(t, 384, generator=g) * torch.logspace(-2, 2, t)[:, None]).bfloat16()
    weights = torch.rand(t, 2, generator=g)
    pairs = of_codes._sort_pairs(ids, 3, tile)
    tiles = of_codes._tiles()
    up = of_codes._up(pairs, given(x), weights, w1, w3, LIMIT, tiles[0]).double().unflatten(0, (t, 2))
    rounded = (in_place(act_quant(x, 128), x) if deployed else x).double()
    values = [[formats.decode(member(stacked, e)).double() for e in range(3)] for stacked in (w1, w3, w2)]
    for e in range(3):
        token, slot = (ids == e).nonzero(as_tuple=True)
        gate, gate_off = within(rounded[token], values[0][e], more)
        value, value_off = within(rounded[token], values[1][e], more)
        low, high = ((gate + sign * gate_off).clamp(max=LIMIT) for sign in (-1, 1))
        wanted = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * value.clamp(-LIMIT, LIMIT)
        # silu moves by 1.1 of what its argument does at most, then three roundings in fp32 and one to bf16
        moved = 1.1 * (high - low) * value.clamp(-LIMIT, LIMIT).abs() + value_off * (gate.clamp(max=LIMIT).abs() + 1)
        off = (up[token, slot] - wanted * weights[token, slot, None].double()).abs()
        assert (off <= weights[token, slot, None] * (moved + wanted.abs() * 2.0**-7) + 1e-30).all()
    inner = up.bfloat16().flatten(0, 1)
    y = of_codes._down(pairs, given(inner), w2, tiles[1]).double().unflatten(0, (t, 2))
    rounded = (in_place(act_quant(inner, 128), inner) if deployed else inner).double().unflatten(0, (t, 2))
    for e in range(3):
        token, slot = (ids == e).nonzero(as_tuple=True)
        wanted, off = within(rounded[token, slot], values[2][e], more)
        assert ((y[token, slot] - wanted).abs() <= off).all()


def within(x, w, more=0.0):
    """``x @ w^T`` in float64, and what an fp32 sum rounded to bf16 may be off, one that is off by `more` of sizes."""
    total, sizes = x @ w.T, x.abs() @ w.abs().T
    return total, (8 * 2.0**-23 + more) * sizes + total.abs() * 2.0**-8


@pytest.mark.parametrize("op", ["experts", "experts_fp8"])
@pytest.mark.parametrize("tile", [16, 64])
def test_a_scale_that_is_no_number_is_of_its_row_alone(of_codes, monkeypatch, tile, op):
    tiled(of_codes, monkeypatch, tile)
    (w1, w3, w2), _ = layer("fp4", 2, 256, 128, 1)
    scale = w2.scale.clone()
    scale.view(torch.uint8)[1, 7, 2] = 255
    x, ids, weights = tokens(5, 1, 256, 2, 2)
    found = getattr(of_codes, op)(x, ids, weights, w1, w3, Fp4(w2.data, scale), LIMIT, deployed=True)
    exact = REFERENCE.experts(x, ids, weights, w1, w3, w2, LIMIT, deployed=True)
    wrong = torch.zeros(found.shape, dtype=torch.bool)
    wrong[ids[:, 0] == 1, 7] = True
    assert wrong.any()
    assert torch.equal(found.isnan(), wrong)
    assert_same(found[~wrong], exact[~wrong], of_codes=op == "experts_fp8")


def test_what_experts_of_codes_leave_to_the_others_runs_there(of_codes, monkeypatch):
    """Few tokens, fp32, other forms, and matrices that begin amid 16 bytes: by tiles; plain numerics: numbers."""
    ran = []
    monkeypatch.setattr(of_codes.by_tiles, "experts", lambda *given, **how: ran.append((given, how)))
    (w1, w3, w2), _ = layer("fp4", 2, 128, 128, 1)
    x, ids, weights = tokens(4, 1, 128, 2, 2)
    amid = torch.zeros(w1.data.numel() + 8, dtype=torch.int8)[8:].view(w1.data.shape)
    given = [
        (x[:1], w1, w3, True), (x.float(), w1, w3, True), (x, Fp4(amid, w1.scale), w3, True),
        (x, *layer("fp8", 2, 128, 128, 1)[0][:2], True), (x[:1], w1, w3, False),
    ]  # fmt: skip
    for some, first, third, deployed in given:
        how = {"deployed": deployed, "summed": len(ran) % 2 == 0, "total": len(ran)}
        of_codes.experts_fp8(some, ids[: len(some)], weights[: len(some)], first, third, w2, LIMIT, **how)
        assert ran[-1][1] == how
    assert len(ran) == len(given)
    monkeypatch.setattr(of_codes, "_codes", None)
    found = of_codes.experts_fp8(x, ids, weights, w1, w3, w2, LIMIT, deployed=False)
    assert found.equal(of_codes.experts(x, ids, weights, w1, w3, w2, LIMIT, deployed=False))


@pytest.mark.parametrize("deployed", [False, True])
def test_halves_of_experts_of_numbers_have_the_bits_of_the_whole(of_codes, deployed):
    (w1, w3, w2), _ = layer("fp4", 3, 256, 128, 1)
    x, ids, weights = tokens(40, 2, 256, 3, 2)
    up = of_codes.experts_up(x, ids, weights, w1, w3, LIMIT, deployed=deployed)
    whole = of_codes.experts(x, ids, weights, w1, w3, w2, LIMIT, deployed=deployed)
    assert of_codes.experts_down(up, ids, w2, deployed=deployed).equal(whole)


def test_the_instructions_that_make_numbers_of_words_do_what_the_interpreter_does(of_codes):
    """The text of the assembly, run: every four nibbles in either half of a word, each under a power of its own."""
    text = inspect.getsource(of_codes._numbers_of_e2m1.fn).split('"""{')[1].split('}"""')[0]
    half = torch.arange(1 << 16)
    words = half | half.flip(0) << 16
    nibbles = words[:, None] >> (4 * torch.arange(8))[None, :] & 15
    value = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).repeat(2)
    value[8:] *= -1
    for low, high in ((121, 254), (253, 122), (245, 245)):
        held = run(text, {"$4": words, "$5": torch.full_like(words, low << 7 | high << 23)})
        powers = torch.tensor([2.0 ** (low - 253), 2.0 ** (high - 253)])
        for place, out in enumerate(("$0", "$1", "$2", "$3")):
            numbers = torch.stack([held[out] & 0xFFFF, held[out] >> 16], 1).to(torch.uint16).view(torch.bfloat16)
            assert torch.equal(numbers.float(), value[nibbles[:, [place, place + 4]]] * powers)


def test_the_instructions_that_take_codes_out_of_words_do_what_the_interpreter_does(of_codes):
    """The text of the assembly, run: every four nibbles in either half of a word, under every exponent."""
    text = inspect.getsource(of_codes._codes_of_e2m1.fn).split('"""{')[1].split('}"""')[0]
    half = torch.arange(1 << 16)
    words = half | half.flip(0) << 16
    for exponent in range(1, 13):
        held = {"$2": words}
        held["$3"], held["$7"] = (torch.full_like(words, size) for size in sizes(exponent))
        held = run(text, held)
        nibbles = words[:, None] >> (4 * torch.arange(8))[None, :] & 15
        value = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).repeat(2) * 2.0 ** (exponent - 6)
        value[8:] *= -1
        for out, part in (("$0", nibbles[:, :4]), ("$1", nibbles[:, 4:])):
            codes = (held[out][:, None] >> (8 * torch.arange(4))[None, :] & 255).to(torch.uint8)
            assert torch.equal(codes.view(E4M3).float(), value[part])


def sizes(exponent):
    """Of `_sizes`: E4M3 codes of E2M1's sizes, four in a word."""
    codes = (torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * 2.0 ** (exponent - 6)).to(E4M3).view(torch.uint8).tolist()
    return [sum(code << (8 * place) for place, code in enumerate(part)) for part in (codes[:4], codes[4:])]
