"""Grouped-query attention and the Llama family's rotation: reference against torch's own, blocked against reference."""

import math

import pytest
import torch
from torch.nn import functional

from kernels.grouped import cpu as gqa
from kernels.ops import CPU, REFERENCE
from kernels.rope import reference as rope


def heads(t, n, H, K, d, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(t, H, d, generator=generator)
    k, v = (torch.randn(K, n, d, generator=generator) for _ in range(2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize(("H", "K"), [(4, 4), (4, 2), (8, 2), (3, 1)])
def test_reference_is_softmax_attention_with_repeated_heads(H, K, window):
    t, first, d = 9, 13, 12
    q, k, v = heads(t, first + t, H, K, d)
    position, key = torch.arange(first, first + t)[:, None], torch.arange(first + t)
    seen = (key <= position) & (key > position - (window or 10**6))
    wanted = functional.scaled_dot_product_attention(
        q.double().transpose(0, 1),
        k.double().repeat_interleave(H // K, 0),
        v.double().repeat_interleave(H // K, 0),
        attn_mask=seen,
    ).transpose(0, 1)
    found = REFERENCE.attend_grouped(q, k, v, first, window)
    assert (found - wanted).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize(("t", "first"), [(1, 0), (1, 90), (33, 0), (33, 61)])
@pytest.mark.parametrize(("rows", "logits", "keys"), [(1024, 1 << 19, 1 << 19), (12, 96, 60), (8, 64, 60), (4, 4, 1)])
def test_cpu_equals_reference_whatever_the_tiles(monkeypatch, rows, logits, keys, t, first, window, dtype):
    monkeypatch.setattr(gqa, "ROWS", rows)
    monkeypatch.setattr(gqa, "LOGITS", logits)
    monkeypatch.setattr(gqa, "KEYS", keys)
    q, k, v = heads(t, first + t + 5, 4, 2, 6, seed=t + first, dtype=dtype)
    wanted = REFERENCE.attend_grouped(q, k, v, first, window)
    found = CPU.attend_grouped(q, k, v, first, window)
    assert found.dtype == dtype
    # fp32: rounding of sums of a hundred terms; bf16: one step of the result, of at most 4
    assert (found.float() - wanted.float()).abs().max() <= (2e-6 if dtype == torch.float32 else 2**-6)


@pytest.mark.parametrize("ops", [REFERENCE, CPU], ids=lambda ops: ops.name)
def test_the_future_and_what_the_window_left_are_not_read(ops):
    q, k, v = heads(4, 40, 4, 2, 8)
    wanted = ops.attend_grouped(q, k, v, 20, 6)
    for tensor in (k, v):
        tensor[:, 24:] = math.nan  # after the last token
        tensor[:, :15] = math.nan  # before the first one's window
    assert torch.equal(ops.attend_grouped(q, k, v, 20, 6), wanted)
    v[:, 15] = math.nan
    assert ops.attend_grouped(q, k, v, 20, 6)[0].isnan().all(), "the oldest position of the window is seen"


def test_large_logits_neither_overflow_nor_vanish():
    q, k, v = heads(3, 50, 2, 1, 4)
    found, wanted = (ops.attend_grouped(q * 1e4, k, v, 47, None) for ops in (CPU, REFERENCE))
    assert found.isfinite().all()
    assert (found - wanted).abs().max() < 1e-6


def test_rotation_in_halves_is_the_complex_product():
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))
    cos, sin = rope.angles(torch.arange(7, 12), rope.frequencies(8, 100.0))
    turned = REFERENCE.rotate_halves(x, cos, sin)
    as_complex = torch.complex(x[..., :4], x[..., 4:]) * torch.complex(cos, sin)[:, None]
    assert (turned - torch.cat((as_complex.real, as_complex.imag), -1)).abs().max() < 1e-6
    assert (REFERENCE.rotate_halves(turned, cos, -sin) - x).abs().max() < 1e-6


def test_llama3_keeps_short_waves_slows_long_ones_and_interpolates_between():
    """Llama 3.1-8B: by its own numbers in float64, pair by pair."""
    found = rope.llama3_frequencies(
        128, 500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
    )
    seen = set()
    for i, value in enumerate(found.tolist()):
        f = 500000.0 ** (-i / 64)
        turns = 8192 * f / (2 * math.pi)
        if turns > 4:
            wanted, what = f, "kept"
        elif turns < 1:
            wanted, what = f / 8, "slowed"
        else:
            share = (turns - 1) / 3
            wanted, what = (1 - share) * f / 8 + share * f, "between"
        seen.add(what)
        assert math.isclose(value, wanted, rel_tol=1e-5)
    assert seen == {"kept", "slowed", "between"}
