"""Fused experts against the reference, which is held against the model's loop over experts.

Inputs are such that all agree to the bit: gates are between 18 and 300, where silu(g) is g in fp32, and gate, up and
routing weights have few bits, so that only the roundings that are part of the equation happen.
"""

import pytest
import torch

from kernels.experts import triton as fused
from kernels.experts.reference import experts as reference
from kernels.experts.triton import experts
from kernels.formats.stored import Dense, Fp4, Fp8, NvFp4, member, stack
from kernels.ops import REFERENCE
from model.arithmetic import Arithmetic
from model.ranks import dispatch

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
LIMIT = 300.0
NAN = float("nan")


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def bytes_of(g, low, high, *shape):
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=g)


def encoded(form, g, signs):
    """A matrix of +-1 (`signs`) times powers of two that differ from block to block."""
    o, i = signs.shape
    match form:
        case "bf16":
            return Dense(signs.bfloat16())
        case "fp8":
            scale = bytes_of(g, 127, 129, -(-o // 128), -(-i // 128))
            return Fp8(signs.to(E4M3), scale.view(E8M0))
        case "fp8, f32 scales":
            return Fp8(signs.to(E4M3), bytes_of(g, 1, 4, -(-o // 128), -(-i // 128)).float())
    code = torch.where(signs > 0, 2, 10).byte()
    packed = code[:, ::2] | code[:, 1::2] << 4
    if form == "fp4":
        return Fp4(packed.view(torch.int8), bytes_of(g, 127, 129, o, i // 32).view(E8M0))
    return NvFp4(packed, bytes_of(g, 1, 3, o, i // 16).float().to(E4M3), torch.tensor(0.5))


def signs(g, *shape):
    return torch.randint(0, 2, shape, generator=g) * 2.0 - 1


def layer(form, count, hidden, inner, seed):
    """w1, w3, w2 of `count` experts: gates are sums of 128 or so positive numbers."""
    g = seeded(seed)
    first = [encoded(form, g, torch.ones(inner, hidden)) for _ in range(count)]
    third = [encoded(form, g, signs(g, inner, hidden)) for _ in range(count)]
    second = [encoded(form, g, signs(g, hidden, inner)) for _ in range(count)]
    return stack(first), stack(third), stack(second)


def tokens(t, k, hidden, of, seed):
    g = seeded(seed)
    x = torch.randint(1, 4, (t, hidden), generator=g).div(4).bfloat16()
    ids = torch.rand(t, of, generator=g).argsort(1)[:, :k]
    return x, ids, torch.randint(1, 8, (t, k), generator=g) / 4


FORMS = ["bf16", "fp8", "fp8, f32 scales", "fp4", "nvfp4"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("deployed", [False, True])
def test_the_reference_is_the_models_loop(form, deployed):
    w1, w3, w2 = layer(form, 4, 128, 128, 0)
    x, ids, weights = tokens(5, 2, 128, 4, 1)
    arithmetic = Arithmetic(REFERENCE, deployed, torch.bfloat16, None, None, {})

    def run(expert, rows, weight):
        gate, up = (arithmetic.linear(rows, member(w, expert)) for w in (w1, w3))
        return arithmetic.linear(REFERENCE.swiglu(gate, up, LIMIT, weight), member(w2, expert))

    want = dispatch.alone(x, ids, weights, 4, run)
    assert want.abs().max() > 1000
    assert torch.equal(reference(x, ids, weights, w1, w3, w2, LIMIT, 0, deployed=deployed), want)
    assert torch.equal(experts(x, ids, weights, w1, w3, w2, LIMIT, 0, deployed=deployed), want)


@pytest.mark.parametrize(
    ("form", "deployed", "t"),
    [
        ("fp4", False, 1),
        *((form, deployed, 6) for form in ("fp8", "fp4") for deployed in (False, True)),
        ("nvfp4", False, 6),
    ],
)
def test_experts_of_one_rank(form, deployed, t):
    """Three experts of five, from 1 on; two tiles of rows, the last cut where nothing forbids it."""
    hidden, inner = (256, 128) if deployed else (160, 160)
    w1, w3, w2 = layer(form, 3, hidden, inner, t)
    x, ids, weights = tokens(t, 2, hidden, 5, 3)
    ours = experts(x, ids, weights, w1, w3, w2, LIMIT, 1, deployed=deployed)
    assert (ours.dtype, ours.shape) == (torch.float32, (t, hidden))
    assert torch.equal(ours, reference(x, ids, weights, w1, w3, w2, LIMIT, 1, deployed=deployed))


def test_blocks_whose_codes_are_subnormal_or_whose_scale_is_the_smallest():
    """Ups are E4M3's first hundred numbers times 1.375, so that most fall between two codes of the block's scale.

    Of the routing weights, the last leaves a block below 1e-4, which its scale no longer follows. All else is exact.
    """
    codes = torch.arange(1, 101, dtype=torch.uint8).view(E4M3).float()
    first, third = torch.zeros(128, 128), torch.zeros(128, 128)
    first[:, 1], third[:100, 0] = 1.0, codes * signs(seeded(0), 100)
    one = torch.full((1, 1), 127, dtype=torch.uint8).view(E8M0)
    w1, w3, w2 = (stack([Fp8(w.to(E4M3), one)]) for w in (first, third, signs(seeded(1), 128, 128)))
    x, ids = torch.zeros(3, 128).bfloat16(), torch.zeros(3, 1, dtype=torch.int64)
    x[:, 0], x[:, 1] = 1.375, 32.0
    weights = torch.tensor([[1.0], [2.0**-6], [2.0**-28]])
    ours = experts(x, ids, weights, w1, w3, w2, LIMIT, 0, deployed=True)
    want = reference(x, ids, weights, w1, w3, w2, LIMIT, 0, deployed=True)
    assert torch.equal(ours, want)
    assert (want != 0).all()
    assert not torch.equal(want[2], want[0] * 2.0**-28), "the smallest scale rounds otherwise"


def test_fp32_activations():
    """Sums of 32 products of which the last bits may fall: in any order within 32 ulp of the sum of sizes."""
    w1, w3, w2 = layer("fp4", 2, 32, 32, 0)
    x, ids, weights = tokens(3, 2, 32, 2, 1)
    x = x.float() + 2.0**-12
    want = reference(x, ids, weights, w1, w3, w2, 20.0, 0, deployed=False)
    ours = experts(x, ids, weights, w1, w3, w2, 20.0, 0, deployed=False)
    sizes = 32 * 20.0 * 20.0 * 2 * weights.sum(1, keepdim=True)  # 32 columns of gate <= 20, up <= 20, w2 <= 2
    assert ((ours - want).abs() <= 3 * 32 * 2.0**-23 * sizes).all()
    assert not torch.equal(ours, experts(x.bfloat16(), ids, weights, w1, w3, w2, 20.0, 0, deployed=False))


@pytest.mark.parametrize("counts", [(17, 17, 1, 1), (36, 0, 0, 0), (0, 16, 0, 20)])
def test_blocks_of_every_filling(counts):
    """The first needs as many blocks as the grid has; others leave experts without any."""
    w1, w3, w2 = layer("bf16", 4, 32, 32, 0)
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))[torch.randperm(36, generator=seeded(2))]
    x, _, weights = tokens(36, 1, 32, 4, 5)
    assert fused._tokens(36, 4) == 16
    ours = experts(x, ids[:, None], weights, w1, w3, w2, LIMIT, 0, deployed=False)
    assert torch.equal(ours, reference(x, ids[:, None], weights, w1, w3, w2, LIMIT, 0, deployed=False))


def test_more_pairs_than_are_sorted_at_once(monkeypatch):
    monkeypatch.setattr(fused, "CHUNK", 8)
    w1, w3, w2 = layer("bf16", 2, 32, 32, 0)
    x, ids, weights = tokens(9, 3, 32, 4, 5)
    ours = experts(x, ids, weights, w1, w3, w2, LIMIT, 1, deployed=False)
    assert torch.equal(ours, reference(x, ids, weights, w1, w3, w2, LIMIT, 1, deployed=False))


def test_slots_of_other_ranks_are_not_read(monkeypatch):
    """Scratch that nobody filled is NaN; neither weights nor ids need lie in order."""
    empty = torch.Tensor.new_empty

    def filled(self, *shape, **more):
        made = empty(self, *shape, **more)
        return made.fill_(NAN) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    w1, w3, w2 = layer("bf16", 2, 32, 32, 0)
    x, ids, weights = tokens(5, 3, 32, 8, 5)
    ids[0], ids[1], weights[ids > 4] = torch.tensor([7, 0, 1]), torch.tensor([4, 7, 3]), NAN
    for first in (3, 0, 6):
        held = torch.where((ids >= first) & (ids < first + 2), torch.nan_to_num(weights), NAN)
        ours = experts(x, ids.T.contiguous().T, held.T.contiguous().T, w1, w3, w2, LIMIT, first, deployed=False)
        assert torch.equal(ours, reference(x, ids, held, w1, w3, w2, LIMIT, first, deployed=False))
        assert ours.isfinite().all()


@pytest.mark.parametrize("slots", [(0, 1, 2), (2, 0, 1), (2, 1, 0), (1, 2, 0)])
def test_outputs_are_summed_in_ascending_order_of_experts(slots):
    """2^30 and -2^30 first, then 1: any other order loses the 1."""
    one = Dense(torch.ones(3, 32, 32).bfloat16() / 32)
    weights = torch.tensor([[2.0**30, -(2.0**30), 1.0]])[:, list(slots)]
    x = torch.full((1, 32), 32.0).bfloat16()
    ours = experts(x, torch.tensor([slots]), weights, one, one, one, 100.0, 0, deployed=False)
    assert (ours == 32 * 32).all()


def test_a_token_does_not_depend_on_the_others():
    w1, w3, w2 = layer("fp4", 3, 128, 128, 0)
    x, ids, weights = tokens(5, 2, 128, 3, 5)
    alone = experts(x[:2], ids[:2], weights[:2], w1, w3, w2, LIMIT, 0, deployed=True)
    x[3, 7] = NAN
    ours = experts(x, ids, weights, w1, w3, w2, LIMIT, 0, deployed=True)
    assert torch.equal(ours[:2], alone)
    assert ours.isnan().all(1).tolist() == [False, False, False, True, False]


def test_nothing_to_do():
    w1, w3, w2 = layer("bf16", 2, 32, 32, 0)
    for t, k in ((0, 2), (3, 0)):
        x, ids, weights = torch.ones(t, 32).bfloat16(), torch.zeros(t, k, dtype=torch.int64), torch.ones(t, k)
        assert torch.equal(experts(x, ids, weights, w1, w3, w2, 1.0, 0, deployed=False), torch.zeros(t, 32))


def test_what_does_not_fit():
    w1, _, w2 = layer("bf16", 2, 32, 32, 0)
    other = layer("fp4", 2, 32, 32, 0)[0]
    x, ids, weights = tokens(1, 1, 32, 2, 0)
    with pytest.raises(AssertionError, match="w3 Fp4"):
        experts(x, ids, weights, w1, other, w2, 1.0, 0, deployed=False)
    with pytest.raises(AssertionError, match="forms"):
        stack([member(w1, 0), member(other, 0)])
    with pytest.raises(AssertionError, match="128"):
        experts(x, ids, weights, other, other, w2, 1.0, 0, deployed=True)
