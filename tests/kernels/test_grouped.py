"""`attend_grouped` of the reference and of the CPU, which is Triton's too, against torch's own attention in float64."""

import math

import pytest
import torch
from torch.nn import functional

from fathom.kernels.grouped import cpu
from fathom.kernels.ops import CPU, REFERENCE
from tests.kernels.every_backend import HALF_BF16, both_dtypes, seeded

BOUNDS = {"reference": 1e-6, "cpu": 2e-6}  # the rounding of sums of a hundred terms
both = pytest.mark.parametrize("ops", [REFERENCE, CPU], ids=lambda ops: ops.name)


def heads(t, n, H, K, d, dtype=torch.float32):
    g = seeded(t, n, H, K, d)
    q, k, v = torch.randn(t, H, d, generator=g), *torch.randn(2, K, n, d, generator=g)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def equation(q, k, v, first, window):
    """Softmax attention in which each head of keys is written once for every query head that reads it."""
    (t, H, _), K = q.shape, len(k)
    position, key = torch.arange(first, first + t)[:, None], torch.arange(k.shape[1])
    wide = (x.double().repeat_interleave(H // K, 0) for x in (k, v))
    seen = (key <= position) & (key > position - (window or 10**6))
    return functional.scaled_dot_product_attention(q.double().transpose(0, 1), *wide, attn_mask=seen).transpose(0, 1)


def check(ops, q, k, v, first, window):
    ours, exact = ops.attend_grouped(q, k, v, first, window), equation(q, k, v, first, window)
    assert (ours.dtype, ours.shape) == (q.dtype, q.shape)
    rounding = HALF_BF16 * exact.abs() if q.dtype == torch.bfloat16 else 0
    assert ((ours.double() - exact).abs() <= BOUNDS[ops.name] + rounding).all()
    return ours


@both
@both_dtypes
@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize(("H", "K"), [(4, 4), (4, 2), (8, 2), (3, 1)])
def test_heads_share_keys_within_the_window(ops, H, K, window, dtype):
    check(ops, *heads(9, 2 + 9 + 5, H, K, 12, dtype), 2, window)


@both_dtypes
@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize(("t", "first"), [(1, 0), (1, 90), (33, 0), (33, 61)])
@pytest.mark.parametrize(("rows", "logits", "keys"), [(1024, 1 << 19, 1 << 19), (12, 96, 60), (8, 64, 60), (4, 4, 1)])
def test_tiles_of_cpu_end_anywhere(monkeypatch, rows, logits, keys, t, first, window, dtype):
    for name, value in {"ROWS": rows, "LOGITS": logits, "KEYS": keys}.items():
        monkeypatch.setattr(cpu, name, value)
    check(CPU, *heads(t, first + t + 5, 4, 2, 6, dtype), first, window)


@both
def test_the_future_and_what_the_window_left_are_not_read(ops):
    q, k, v = heads(4, 40, 4, 2, 8)
    wanted = check(ops, q, k, v, 20, 6)
    for x in (k, v):
        x[:, 24:] = math.nan  # after the last token
        x[:, :15] = math.nan  # before the first one's window
    assert torch.equal(ops.attend_grouped(q, k, v, 20, 6), wanted)
    v[:, 15] = math.nan
    assert ops.attend_grouped(q, k, v, 20, 6)[0].isnan().all(), "the oldest position of the window is seen"
    k[0, 23, 5] = math.nan
    assert ops.attend_grouped(q[3:], k, v, 23, 6).isnan().all(-1).tolist() == [[True, True, False, False]]


@both
def test_large_logits_neither_overflow_nor_vanish(ops):
    q, k, v = heads(3, 50, 2, 1, 4)
    ours = ops.attend_grouped(q * 1e4, k, v, 47, None)
    assert ours.isfinite().all()
    assert (ours - equation(q * 1e4, k, v, 47, None)).abs().max() < 1e-6


@both
def test_no_token_has_no_result_and_too_few_rows_are_refused(ops):
    q, k, v = heads(2, 6, 4, 2, 8)
    assert ops.attend_grouped(q[:0], k, v, 4, None).shape == (0, 4, 8)
    with pytest.raises(AssertionError, match="do not hold positions up to 6"):
        ops.attend_grouped(q, k, v, 5, None)
