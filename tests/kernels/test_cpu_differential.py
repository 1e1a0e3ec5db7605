"""Differential attention in tiles against its equations, and how much memory it takes."""

import pytest
import torch

from kernels.differential import cpu as differential
from kernels.differential import reference
from kernels.differential.cpu import Noise, Own, Past, attend, differential_attend
from tests.peak_memory import peak_bytes

HEADS, GROUPS, D, SLOTS = 6, 3, 8, 11


def drawn(t, slots=SLOTS, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    past = Past(normal(GROUPS, slots, D), normal(GROUPS, slots, D), None)
    own = Own(normal(t, GROUPS, D), normal(t, GROUPS, D), None)
    theta = torch.randn(HEADS, D // 2, generator=g)
    return 2 * normal(t, HEADS, D), Noise(torch.rand(t, HEADS, generator=g), theta.cos(), theta.sin()), past, own


def wanted(q, noise, past, own, norm=None):
    """The equations, with a mask for what a token's own keys are."""
    segments = [(*past, None)]
    if own is not None:
        order = torch.arange(len(q))
        distance = order[:, None] - order
        seen = (distance >= 0) & (distance < (len(q) if own.window is None else own.window))
        segments.append((own.keys.transpose(0, 1), own.values.transpose(0, 1), seen, None))
    if noise is None:
        return reference.attend_segments(q[None], segments)[0]
    return reference.differential_attend(q.float(), *noise, norm, 1e-6, segments)


@pytest.fixture(params=[1 << 17, 300, 20], ids=["one tile", "tiles of tokens", "tiles of one token"])
def logits(request, monkeypatch):
    monkeypatch.setattr(differential, "LOGITS", request.param)


@pytest.mark.usefixtures("logits")
@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("t", [1, 7, 40])
@pytest.mark.parametrize("seen", ["all", "slots", "by token"])
@pytest.mark.parametrize("own_window", [None, 0, 4])  # no own keys; all of them; a window of 4
def test_it_is_the_equations(streams, t, seen, own_window):
    q, noise, past, own = drawn(t)
    noise = noise if streams == 2 else None
    own = None if own_window is None else own._replace(window=own_window or None)
    g = torch.Generator().manual_seed(1)
    if seen != "all":
        mask = torch.rand(*([SLOTS] if seen == "slots" else [t, SLOTS]), generator=g) < 0.5
        mask[..., 3] = True
        past = past._replace(seen=mask)
    assert (attend(q, noise, past, own) - wanted(q, noise, past, own)).abs().max() < 3e-6


@pytest.mark.usefixtures("logits")
def test_the_norm_follows_and_the_dtype_is_the_querys():
    q, noise, past, own = drawn(7)
    weight = torch.linspace(-1, 2, D)
    expected = wanted(q, noise, past, own, weight)
    assert (differential_attend(q, noise, weight, 1e-6, past, own) - expected).abs().max() < 2e-5
    narrow = drawn(7, dtype=torch.bfloat16)
    got = differential_attend(narrow[0], narrow[1], None, 1e-6, *narrow[2:])
    wide = [part if part is None else type(part)(*(x if x is None else x.float() for x in part)) for part in narrow[2:]]
    assert got.dtype == torch.bfloat16
    # nothing is rounded but the output: 2^-9 of values of a few units
    assert (got.float() - wanted(narrow[0].float(), narrow[1], *wide)).abs().max() < 2**-7


@pytest.mark.usefixtures("logits")
def test_no_token_sees_a_later_one():
    q, noise, past, own = drawn(40)
    before = attend(q, noise, past, own)
    own.keys[20:], own.values[20:] = 7, 1e6
    after = attend(q, noise, past, own)
    assert torch.equal(after[:20], before[:20])
    assert ((after[20:] - before[20:]).abs().amax((1, 2)) > 1).all()


def test_nothing_to_see_gives_zeros():
    q, noise, past, _ = drawn(3, slots=0)
    assert (attend(q, noise, past, None) == 0).all()


def test_scratch_is_two_tiles_of_logits_whatever_there_is_to_see(monkeypatch):
    monkeypatch.setattr(differential, "LOGITS", 1 << 14)
    t = 96
    for slots in (100, 300):
        q, noise, past, _ = drawn(t, slots)
        peak = peak_bytes(lambda q=q, noise=noise, past=past: attend(q, noise, past, None))
        queries = 2 * q.nbytes + q.nbytes  # of both streams, and the output
        assert peak < queries + 2 * 4 * (1 << 14) + (1 << 14), slots
        assert peak < 2 * HEADS * t * slots * 4, "less than the logits"


def test_gradients_are_refused():
    q, noise, past, own = drawn(40)
    with pytest.raises(RuntimeError, match="require"):
        attend(q.requires_grad_(), noise, past, own)


def test_heads_that_do_not_divide_are_refused():
    past = Past(torch.zeros(3, 2, D), torch.zeros(3, 2, D), None)
    with pytest.raises(AssertionError, match="4 query heads do not divide among 3 KV heads"):
        attend(torch.zeros(1, 4, D), None, past, None)
