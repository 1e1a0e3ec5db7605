"""Attention in Triton against the reference, where every row that must not be read holds NaN or noise."""

import math
import zlib

import pytest
import torch

from kernels.attention import launch as attention_launch
from kernels.attention.triton import attend
from kernels.formats.rows import fp8_entries, write
from kernels.formats.stored import Fp8Entries, Slots
from kernels.ops import REFERENCE

ULP = 2.0**-23  # of float32, relative
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def seeded(*parts):
    return torch.Generator().manual_seed(zlib.crc32(repr(parts).encode()))


def strided(x):
    """The same values with a stride in the last dim, large noise between them."""
    noisy = torch.full((*x.shape, 2), 100.0).to(x.dtype)
    noisy[..., 0] = x
    return noisy[..., 0]


def make(t, h, d, window, first, n=None, k=None, *, ratio=4, spare=0, nan=True, dtype=torch.float32, hidden=0):
    """Arguments of `attend`; rows that no token may see hold NaN or noise of std 100."""
    g = seeded(t, h, d, window, first, n, k)

    def unseen(rows):
        return torch.full((rows, d), torch.nan) if nan else 100 * torch.randn(rows, d, generator=g)

    ring = unseen(window + t - 1 + spare)
    for position in range(max(0, first - window + 1), first + t):
        ring[position % len(ring)] = torch.randn(d, generator=g)
    entries = None
    if n is not None:
        entries, visible = unseen(n), max(0, min((first + t) // ratio - hidden, n))
        entries[:visible] = torch.randn(visible, d, generator=g)
        entries = strided(entries.to(dtype))
    selected = None
    if k is not None:
        selected = torch.stack([torch.randperm(max(n, k), generator=g)[:k] for _ in range(t)]).int()
        pads = torch.tensor([INT_MIN, -1, n, INT_MAX]).int()[torch.randint(4, (t, k), generator=g)]
        selected = strided(torch.where(torch.rand(t, k, generator=g) < 0.3, pads, selected))
    sink = torch.randn(h, generator=g)
    sink[::3], sink[1::3] = -torch.inf, torch.inf
    q = torch.randn(t, h, d, generator=g)
    return strided(q.to(dtype)), strided(ring.to(dtype)), first, window, entries, ratio, selected, strided(sink)


def in_fp8(entries, rope):
    """Rows in the narrow form; what is NaN stays so, in all of its values."""
    rows = fp8_entries(*entries.shape, rope, torch.device("cpu"))
    write(rows, 0, entries)
    rows.scale.view(torch.uint8)[:, (entries.shape[1] - rope) // 64 :] = 255  # padding
    return rows


def assert_same(ours, expected, largest=4.5, *, narrow=False):
    """Compare with the reference.

    Both compute in fp32. Masses carry the rounding of logits of size about 4, and their sums over some hundred keys
    run in another order: 64 ulp of the largest key, which normal numbers keep below 4.5. Where keys are bf16
    (`narrow`), masses were rounded to it before they multiplied keys: half an ulp, 2^-9, of a mean of |keys|. A bf16
    result is rounded by both: half an ulp of the result each.
    """
    assert ours.dtype == expected.dtype
    assert torch.equal(ours.isfinite(), expected.isfinite()), "a row that must not be read was read"
    bound = torch.full_like(expected, 64 * ULP * largest, dtype=torch.float32)
    if narrow:
        bound += 2.0**-9 * largest
    if ours.dtype == torch.bfloat16:
        bound += expected.float().abs() * 2.0**-8
    error = (ours.float() - expected.float()).abs().nan_to_num(0)
    assert (error <= bound).all(), f"off by {error.max()} at {(error - bound).argmax()}"


def check(args, *, narrow=False):
    assert_same(attend(*args), REFERENCE.attend(*args), narrow=narrow)


@pytest.fixture(params=[1, 5])
def programs(request, monkeypatch):
    """One program to a row tile, and several, which are merged."""
    monkeypatch.setattr(attention_launch, "PROGRAMS", request.param)
    return request.param


@pytest.fixture
def dtype(programs):
    """Keys come in tiles of 16 in fp32 and of up to 64 in bf16: more of the former for several programs."""
    return torch.float32 if programs > 1 else torch.bfloat16


@pytest.mark.parametrize(
    ("t", "window", "first", "spare"),
    [(1, 1, 0, 0), (1, 8, 3, 0), (3, 1, 1000, 0), (5, 8, 0, 3), (9, 16, 5, 0), (1, 128, 100_003, 5), (3, 40, 77, 0)],
)
def test_window_alone(t, window, first, spare, dtype):
    for nan in (False, True):
        args = make(t, 5, 32, window, first, spare=spare, nan=nan, dtype=dtype)
        check(args, narrow=dtype == torch.bfloat16)


@pytest.mark.parametrize(("n", "k"), [(0, 3), (0, None), (4, 3), (90, 0), (90, 17), (90, 90), (90, None)])
def test_window_and_entries(n, k, dtype):
    for (t, first), nan in (((1, 2), True), ((2, 300), False)):
        check(make(t, 3, 20, 8, first, n, k, nan=nan, dtype=dtype), narrow=dtype == torch.bfloat16)


@pytest.mark.parametrize(("programs", "dtype"), [(1, torch.float32), (9, torch.bfloat16), (132, torch.bfloat16)])
def test_tile_boundaries(programs, dtype, monkeypatch):
    monkeypatch.setattr(attention_launch, "KEYS", 16)
    monkeypatch.setattr(attention_launch, "ROWS", 16)  # 4 tokens of 4 heads
    monkeypatch.setattr(attention_launch, "PROGRAMS", programs)
    for t, n, k in ((1, 16, None), (5, 17, None), (1, 40, 16), (1, 40, 17)):
        # one token more sees one entry more, in a tile of tokens too
        check(make(t, 3, 16, 20, 4 * n - 3, n, k, dtype=dtype), narrow=dtype == torch.bfloat16)


def test_more_heads_than_a_tile_has_rows(monkeypatch):
    monkeypatch.setattr(attention_launch, "PROGRAMS", 1)
    for h in (16, 17, 40):
        check(make(1, h, 16, 8, 40, 9))


@pytest.mark.parametrize(("d", "rope"), [(80, 16), (128, 64), (64, 0)])
def test_fp8_entries(d, rope, dtype):
    for t, k, start in ((3, None, 90), (2, 17, 150), (1, None, 0)):
        q, ring, first, window, entries, ratio, selected, sink = make(t, 3, d, 8, start, 40, k, dtype=dtype)
        entries = entries * 2.0 ** torch.arange(-8, 12).repeat(2)[:40, None]  # scales that differ
        rows = in_fp8(entries, rope)
        args = (q * 2.0**-6, ring, first, window, rows, ratio, selected, sink)
        largest = entries.float().nan_to_num(0).abs().max().item()
        narrow = dtype == torch.bfloat16
        assert_same(attend(*args), REFERENCE.attend(*args), max(largest, 4.5), narrow=narrow)


def test_fp8_every_code_is_decoded(monkeypatch):
    """A key alone beside a window of mass 0 is the output itself: its logit is above all others."""
    monkeypatch.setattr(attention_launch, "PROGRAMS", 1)
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64)
    scale = torch.tensor([0, 127, 255], dtype=torch.uint8)
    values = codes.repeat(len(scale), 1)
    rows = Fp8Entries(
        values.view(torch.float8_e4m3fn),
        torch.zeros(len(values), 16).bfloat16(),
        scale.repeat_interleave(4)[:, None].view(torch.float8_e8m0fnu),
    )
    n = len(values)
    bias = torch.full((n,), 300.0)
    q, sink = torch.zeros(n, 1, 80), torch.full((1,), -torch.inf)
    ring, selected = torch.zeros(n, 80), torch.arange(n).int()[:, None]
    args = (q, ring, 4 * n, 1, Slots(rows, bias, 0), 4, selected, sink)
    ours, expected = attend(*args), REFERENCE.attend(*args)
    assert expected.isnan().any(-1).sum() == 2 * 2 + 4  # codes 127 and 255 of two scales; all of the third
    assert torch.equal(ours.nan_to_num(7.5), expected.nan_to_num(7.5))


def test_fp8_scale_of_nan_is_not_infinite():
    """An infinite key of logit -inf would show in its own columns alone."""
    rows = Fp8Entries(
        torch.ones(1, 64).to(torch.float8_e4m3fn),
        torch.zeros(1, 16).bfloat16(),
        torch.full((1, 1), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    )
    out = attend(torch.full((1, 1, 80), -1.0), torch.zeros(1, 80), 4, 1, rows, 4, None, torch.zeros(1))
    assert out.isnan().all()


def test_scratch_that_no_program_wrote_is_not_read(monkeypatch):
    args = make(1, 3, 16, 8, 20, 200)
    monkeypatch.setattr(torch, "empty", lambda *shape, **kwargs: torch.full(shape, torch.nan, **kwargs))
    check(args)


@pytest.mark.usefixtures("programs")
def test_v4_rows():
    """One token of 512 columns, from rows of 584 bytes, in bf16."""
    q, ring, first, window, entries, _, selected, sink = make(1, 4, 512, 8, 100, 24, 10, dtype=torch.bfloat16)
    rows = in_fp8(entries, 64)
    assert sum(plane.nbytes for plane in rows) == 24 * 584
    for chosen in (selected, None):
        check((q, ring, first, window, rows, 4, chosen, sink), narrow=True)


@pytest.mark.parametrize(("k", "fp8"), [(None, True), (17, False), (17, True), (None, False)])
@pytest.mark.usefixtures("programs")
def test_slots_have_biases_and_lag_behind(k, fp8):
    for hidden, start in ((5, 70), (30, 20)):
        q, ring, first, window, entries, ratio, selected, sink = make(2, 3, 80, 8, start, 40, k, hidden=hidden)
        bias = torch.randn(40, generator=seeded(k, hidden))
        bias[::3] = -torch.inf  # empty rows; the last ones that are seen are not among them in every case
        bias[max(0, (first + 2) // ratio - hidden) :] = torch.nan
        slots = Slots(in_fp8(entries, 16) if fp8 else entries, strided(bias), hidden)
        check((q, ring, first, window, slots, ratio, selected, sink))


@pytest.mark.parametrize(("k", "fp8"), [(None, True), (None, False), (9, True)])
@pytest.mark.usefixtures("programs")
def test_a_position_on_the_device_and_entries_at_full_capacity(k, fp8):
    for first in (66, 10_000_000_000):
        q, ring, _, window, entries, ratio, selected, sink = make(1, 3, 80, 8, first, 30, k)
        rows = in_fp8(entries, 16) if fp8 else entries
        on_device = torch.tensor(first)
        args = (window, rows, ratio, selected, sink)
        ours = attend(q, ring, on_device, *args)
        assert torch.equal(ours, attend(q, ring, first, *args))
        assert_same(ours, REFERENCE.attend(q, ring, first, *args))
        assert on_device.item() == first


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", ["window", "selected", "visible", "q"])
@pytest.mark.usefixtures("programs")
def test_what_a_token_sees_is_never_lost(place, bad):
    """Not even where a sink of +inf takes all mass, for 0 times NaN is NaN."""
    q, ring, first, window, entries, ratio, _, _ = make(1, 3, 16, 8, 100, 25)
    selected = None if place == "visible" else torch.tensor([[3, 7, -1]]).int()
    sink = torch.tensor([-torch.inf, 0.0, torch.inf])
    args = (q, ring, first, window, entries, ratio, selected, sink)
    out = attend(*args)
    assert out.isfinite().all()
    assert (out[0, 2] == 0).all()
    {"window": ring[100 % 8], "selected": entries[7], "visible": entries[24], "q": q[0].T}[place][5] = bad
    out = attend(*args)
    # an infinite key of mass 0 shows in its own dim alone; a mass of NaN in all
    assert (out[0, :, 5] if place != "q" and math.isinf(bad) else out[0]).isnan().all()


@pytest.mark.usefixtures("programs")
def test_a_sink_of_nan_or_of_any_size_is_as_in_the_reference():
    q, ring, first, window, entries, ratio, _, _ = make(1, 5, 16, 8, 100, 25)
    sink = torch.tensor([torch.nan, 3e38, -3e38, 80.0, -80.0])
    args = (q, ring, first, window, entries, ratio, None, sink)
    ours, expected = attend(*args), REFERENCE.attend(*args)
    assert torch.equal(ours.isnan(), expected.isnan())
    assert_same(ours[:, 1:], expected[:, 1:])
    assert ours[:, 0].isnan().all()


@pytest.mark.usefixtures("programs")
def test_logits_far_apart_do_not_overflow():
    q, ring, *rest = make(2, 3, 16, 40, 100, 25)
    args = (q * 300, ring, *rest)
    ours, expected = attend(*args), REFERENCE.attend(*args)
    # logits of 1000: their rounding, 1000 ulp, is what masses are off by
    assert torch.equal(ours.isfinite(), expected.isfinite())
    assert (ours - expected).abs().max() <= 4.5 * 4000 * ULP


def test_the_noise_would_be_noticed():
    """The tests above rest on unseen rows moving the answer: widen the window by one and it must move."""
    q, ring, first, window, *rest = make(5, 24, 32, 8, 50, spare=4, nan=False)
    wider = REFERENCE.attend(q, ring, first, window + 1, *rest)
    assert (wider - attend(q, ring, first, window, *rest)).abs().max() > 10


@pytest.mark.parametrize(("asked", "stored"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_operands_of_two_dtypes_are_multiplied_in_the_wider(asked, stored):
    q, *rest = make(1, 3, 16, 8, 100, 25, dtype=stored)
    check((q.to(asked), *rest))


def test_no_token_and_forms_that_are_not_read():
    q, ring, first, window, entries, ratio, selected, sink = make(1, 3, 64, 8, 100, 25)
    assert attend(q[:0], ring, first, window, entries, ratio, selected, sink).shape == (0, 3, 64)
    for name in ("CodedRows", "BasisRows"):
        form = getattr(__import__("kernels.formats.stored", fromlist=[name]), name)
        for rows in (form(*[None] * len(form._fields)), Slots(form(*[None] * len(form._fields)), None, 0)):
            with pytest.raises(NotImplementedError, match=name):
                attend(q, ring, first, window, rows, ratio, selected, sink)
    with pytest.raises(AssertionError, match="cannot hold window"):
        attend(q, ring, first, 9, entries, ratio, selected, sink)


def test_how_a_call_is_cut_up_follows_from_shapes():
    """One token fills the machine with programs; a chunk has one program a row tile."""

    def cut(t, h, most, shared):
        return attention_launch.launch(
            torch.empty(t, h, 512).bfloat16(), 128, most, narrow=True, fp8=False, shared=shared
        )  # fmt: skip

    assert cut(1, 64, 8192, shared=True)[:6] == (1, 64, 64, 512, 1, 130)
    assert cut(1, 128, 1024, shared=False)[:6] == (1, 64, 32, 512, 2, 36)
    assert cut(512, 64, 512, shared=False)[:6] == (1, 64, 64, 512, 512, 1)
    assert cut(512, 16, 8192, shared=True)[:6] == (4, 16, 64, 512, 128, 1)
    assert cut(32, 64, 8192, shared=True)[4:6] == (32, 4)
