"""Differential attention in Triton against its equations.

fp32: sums of up to 16 + 100 terms of a few units, 3e-6 as the cpu op; the norm multiplies that by up to 10. bf16
products are computed in fp32 here, so that what is off is the output's rounding, 2^-9 of values of a few units, and the
noise query's, which the reference rounds: 2^-9 of logits of a few units.
"""

import pytest
import torch

from kernels.differential import cpu as blocked
from kernels.differential import reference
from kernels.differential import triton as differential
from kernels.differential.triton import Noise, Own, Past, differential_attend

HEADS, GROUPS, D, SLOTS = 6, 2, 16, 70


def drawn(t, slots=SLOTS, seed=0, dtype=torch.float32, heads=HEADS):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    past = Past(normal(GROUPS, slots, D), normal(GROUPS, slots, D), None)
    own = Own(normal(t, GROUPS, D), normal(t, GROUPS, D), None)
    theta = torch.randn(heads, D // 2, generator=g)
    return 2 * normal(t, heads, D), Noise(torch.rand(t, heads, generator=g), theta.cos(), theta.sin()), past, own


def wanted(q, noise, past, own, norm=None):
    """The equations, with a mask for what a token's own keys are."""
    segments = [(*past, None)]
    if own is not None:
        order = torch.arange(len(q))
        distance = order[:, None] - order
        seen = (distance >= 0) & (distance < (len(q) if own.window is None else own.window))
        segments.append((own.keys.transpose(0, 1), own.values.transpose(0, 1), seen, None))
    return reference.differential_attend(q, *noise, norm, 1e-6, segments)


def masked(past, t, kind):
    """Half of the slots, and one at least; the rest holds NaN where none may be read."""
    if kind == "all":
        return past
    g = torch.Generator().manual_seed(1)
    seen = torch.rand(*([past.keys.shape[1]] if kind == "slots" else [t, past.keys.shape[1]]), generator=g) < 0.5
    seen[..., 3] = True
    return past._replace(seen=seen)


def spoiled(past):
    """`past` with NaN where no token may look."""
    keys, values = past.keys.clone(), past.values.clone()
    keys[:, ~past.seen], values[:, ~past.seen] = torch.nan, torch.nan
    return Past(keys, values, past.seen)


@pytest.mark.parametrize("seen", ["all", "slots", "by token"])
@pytest.mark.parametrize("t", [1, 40])
@pytest.mark.parametrize("own_window", [None, 0, 4])  # no own keys; all of them; a window of 4
def test_it_is_the_equations(t, seen, own_window):
    q, noise, past, own = drawn(t)
    own = None if own_window is None else own._replace(window=own_window or None)
    past = masked(past, t, seen)
    weight = None if t == 1 else torch.linspace(-1, 2, D)
    want = wanted(q, noise, past, own, weight)
    if seen == "slots":
        past = spoiled(past)
    got = differential_attend(q, noise, weight, 1e-6, past, own)
    assert (got - want).abs().max() < (3e-6 if weight is None else 3e-5)


@pytest.mark.parametrize(("splits", "slots"), [(1, 64), (2, 300), (5, 257), (8, 63)])
def test_decode_however_the_slots_are_split(splits, slots, monkeypatch):
    monkeypatch.setattr(differential, "SPLITS", splits)
    q, noise, past, own = drawn(1, slots)
    past = masked(past, 1, "slots")
    want = wanted(q, noise, past, None)
    assert (differential_attend(q, noise, None, 1e-6, spoiled(past), None) - want).abs().max() < 3e-6
    want = wanted(q, noise, past, own)
    assert (differential_attend(q, noise, None, 1e-6, spoiled(past), own) - want).abs().max() < 3e-6


def test_parts_in_which_nothing_is_seen():
    q, noise, past, _ = drawn(1, 300)
    seen = torch.zeros(300, dtype=torch.bool)
    seen[200:210] = True
    want = wanted(q, noise, past._replace(seen=seen), None)
    got = differential_attend(q, noise, None, 1e-6, spoiled(past._replace(seen=seen)), None)
    assert (got - want).abs().max() < 3e-6
    nothing = spoiled(past._replace(seen=seen))
    nothing = nothing._replace(seen=torch.zeros_like(seen))
    assert torch.equal(differential_attend(q, noise, None, 1e-6, nothing, None), torch.zeros_like(q))


@pytest.mark.parametrize("slots", [0, 5])
def test_an_empty_past_and_no_tokens(slots):
    q, noise, past, own = drawn(20, slots)
    want = wanted(q, noise, past, own)
    assert (differential_attend(q, noise, None, 1e-6, past, own) - want).abs().max() < 3e-6
    none = [Own(own.keys[:0], own.values[:0], None), Noise(noise.lam[:0], *noise[1:])]
    assert differential_attend(q[:0], none[1], None, 1e-6, past, none[0]).shape == (0, HEADS, D)
    if not slots:
        assert torch.equal(differential_attend(q, noise, torch.ones(D), 1e-6, past, None), torch.zeros_like(q))


@pytest.mark.parametrize(("t", "window"), [(80, None), (80, 33), (80, 1), (33, 1000)])
def test_blocks_over_several_tiles(t, window, monkeypatch):
    monkeypatch.setattr(differential, "TILE", 32)
    q, noise, past, own = drawn(t, 11, heads=GROUPS)
    own = own._replace(window=window)
    assert (differential_attend(q, noise, None, 1e-6, past, own) - wanted(q, noise, past, own)).abs().max() < 3e-6


def test_no_token_sees_a_later_one():
    q, noise, past, own = drawn(40, heads=GROUPS)
    before = differential_attend(q, noise, None, 1e-6, past, own)
    own.keys[20:], own.values[20:] = 7, 1e6
    after = differential_attend(q, noise, None, 1e-6, past, own)
    assert torch.equal(before[:20], after[:20])
    assert not torch.equal(before[20], after[20])


@pytest.mark.parametrize("heads", [2, 8, 80])  # to a KV head: 1, 4, 40
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(heads, dtype):
    q, noise, past, own = drawn(2, dtype=dtype, heads=heads)
    got = differential_attend(q, noise, None, 1e-6, past, own)
    assert got.dtype == dtype
    wide = [part._replace(keys=part.keys.float(), values=part.values.float()) for part in (past, own)]
    want = blocked.differential_attend(q.float(), noise, None, 1e-6, *wide)
    # fp16 operands are used as they are, masses and noise queries rounded to 2^-12; values and logits of a few units
    assert (got.float() - want).abs().max() < (2**-7 if dtype == torch.bfloat16 else 2**-8)


def test_rows_that_do_not_lie_in_order_are_read_as_they_are():
    q, noise, past, own = drawn(5)
    want = differential_attend(q, noise, None, 1e-6, past, own)
    turned = [x.mT.contiguous().mT for x in (q, past.keys, past.values, own.keys, own.values)]
    shifted = torch.cat((past.keys, past.values), dim=1)  # strides between heads that are not those of the slots
    for keys, values in ((turned[1], turned[2]), (shifted[:, :SLOTS], shifted[:, SLOTS:])):
        got = differential_attend(turned[0], noise, None, 1e-6, Past(keys, values, None), Own(*turned[3:], None))
        assert torch.equal(got, want)
    across = Noise(noise.lam.T.contiguous().T, noise.cos, noise.sin)
    assert torch.equal(differential_attend(q, across, None, 1e-6, past, own), want)


@pytest.mark.parametrize("place", ["q", "key", "value", "lambda"])
def test_what_is_no_number_is_not_lost(place):
    q, noise, past, _ = drawn(2)
    {"q": q[1, 2:3], "key": past.keys[1, 4], "value": past.values[1, 4], "lambda": noise.lam[1, 2:3]}[place].fill_(
        torch.nan
    )
    got = differential_attend(q, noise, None, 1e-6, past, None).isnan()
    want = wanted(q, noise, past, None).isnan()
    assert torch.equal(got, want)
    assert want.any()
    assert not want.all()


def test_widths_that_are_not_taken_are_named():
    q, noise, past, _ = drawn(1)
    narrow = Past(past.keys[..., :8], past.values[..., :8], None)
    with pytest.raises(NotImplementedError, match="heads of 8"):
        differential_attend(q[..., :8], noise, None, 1e-6, narrow, None)
