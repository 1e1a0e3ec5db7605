"""Attention over Shard's forms, split over keys, against float64 attention over everything decoded.

fp32 tolerances: logits are sums of products of up to 64 + 32 terms of about one, whose roundings come to 2^-24 times
a few tens; 2e-5 leaves room for what values of 3 make of it. 16-bit ones: operands of fp16 are off by 2^-12 of
themselves, keys and queries and values alike, so that a logit of size L is off by less than 2^-10 L = 0.03 for the
largest here (about 25), in practice by its root; what bf16 queries and outputs add is 2^-9 of values of 3.
"""

import pytest
import torch

from kernels.formats import coded_rows, lloyd_max, qjl
from kernels.formats.stored import CodebookValues, EigenKeys
from kernels.quantise.reference import hadamard
from kernels.rope import reference as rope
from kernels.shard import cpu as blocked
from kernels.shard import triton as shard
from kernels.shard import triton_middle as shard_middle
from kernels.shard.reference import rotated_values, turn
from kernels.shard.triton import Middle, Stream, attend

CPU = torch.device("cpu")
HEADS, SHARE, D, SINKS = 2, 2, 32, 4
WIDE = 2e-5


def drawn(seed):
    return torch.Generator().manual_seed(seed)


def compressed(n, *, rank=48, interleaved=False, first=SINKS, d=D, scale=1.0):
    """A middle of `n` tokens with content of every kind: all codes, negative columns, components that never varied."""
    g = drawn(n)
    basis = torch.randint(-127, 128, (HEADS * d, rank), generator=g, dtype=torch.int8)
    basis_scale, scales = (torch.rand(rank, generator=g).add(0.1).mul(s).half() for s in (0.005, 0.1 * scale))
    scales[3] = 0
    keys = EigenKeys(
        torch.randint(0, 256, (n, rank // 2), generator=g, dtype=torch.uint8),
        basis, basis_scale, scales, torch.randn(HEADS * d, generator=g).half(), torch.zeros(0, dtype=torch.int8),
    )  # fmt: skip
    values = CodebookValues(
        torch.randint(0, 256, (n, HEADS * d // 4), generator=g, dtype=torch.uint8),
        torch.randn(256, 4, generator=g).half() / 2,
        torch.rand(HEADS, d, generator=g).add(0.5).half(),
    )
    return Middle(keys, values, first, rope.frequencies(d, 10_000.0), interleaved)


def streamed(n, bits=8, value_bits=None, *, seed=None, spare=70, d=D):
    """`n` tokens encoded one by one, and room for more that holds NaN."""
    rows = (n + spare) * HEADS
    keys = coded_rows.allocate(rows, d, bits, CPU, seed)
    values = coded_rows.allocate(rows, d, value_bits or bits, CPU, None if seed is None else 5)
    for plane in (*coded_rows.planes(keys).values(), *coded_rows.planes(values).values()):
        plane.view(torch.uint8).fill_(0xFF)
    coded_rows.write(keys, 0, torch.randn(n * HEADS, d, generator=drawn(n + 1)))
    coded_rows.write(values, 0, torch.randn(n * HEADS, d, generator=drawn(n + 2)))
    return Stream(keys, values, n)


def given(n, t=1, dtype=torch.float32, share=SHARE, d=D):
    g = drawn(100 + n)
    q = (2 * torch.randn(t, HEADS * share, d, generator=g)).to(dtype)
    return q, *(torch.randn(n, HEADS, d, generator=g).to(dtype) for _ in range(2))


def wanted(q, keys, values, middle, stream, signs):
    """Float64 attention; angles are rounded as the equation has them."""
    keys, values = [keys.double()], [values.double()]
    if middle is not None:
        stored, (codes, codebook, largest) = middle.keys, middle.values
        c = torch.stack((stored.codes & 15, stored.codes >> 4), dim=-1).flatten(1).double() - 8
        c = c * stored.scale.double() * stored.basis_scale.double()
        angle = (torch.arange(middle.first, middle.first + len(c)).float()[:, None] * middle.freqs).double()
        rebuilt = (c @ stored.basis.double().mT + stored.mean.double()).unflatten(1, (HEADS, -1))
        keys.append(turn(rebuilt, angle.cos(), angle.sin(), interleaved=middle.interleaved))
        plain = rotated_values(codes, codebook.double(), largest.double()) @ hadamard(torch.eye(q.shape[2])).double()
        values.append(plain if signs is None else plain * signs)
    if stream is not None:
        for rows, into in ((stream.keys, keys), (stream.values, values)):
            into.append(coded_rows.read(rows, 0, int(stream.tokens) * HEADS).double().view(-1, HEADS, q.shape[2]))
    share = q.shape[1] // HEADS
    keys, values = (torch.cat(x).repeat_interleave(share, dim=1) for x in (keys, values))
    logits = torch.einsum("thd,nhd->thn", q.double(), keys) * q.shape[2] ** -0.5
    return torch.einsum("thn,nhd->thd", logits.softmax(-1), values)


def off(*args):
    """Largest error."""
    return (attend(*args).double() - wanted(*args)).abs().max()


@pytest.mark.parametrize(
    ("n", "rank", "interleaved"),
    [(1, 32, False), (70, 32, True), (64, 48, False), (65, 90, True), (129, 50, False)],
)  # one run of nibbles; 16 + 8; 32 + 13; 16 + 9
def test_the_middle(n, rank, interleaved):
    middle = compressed(n, rank=rank, interleaved=interleaved)
    args = (*given(5), middle, None, None)
    assert off(*args) < WIDE
    assert (wanted(*args) - wanted(*args[:3], None, None, None)).abs().max() > 0.1, "it carries weight"


@pytest.mark.parametrize(
    ("bits", "value_bits", "seed"), [(8, 4, None), (4, 8, 5), (3, 2, None), (1, 7, 5), (5, 6, None)]
)
def test_the_stream(bits, value_bits, seed):
    signs = None if seed is None else coded_rows.random_signs(D, 5, CPU)
    args = (*given(5), None, streamed(67, bits, value_bits, seed=None if seed is None else 9), signs)
    assert off(*args) < WIDE
    assert (wanted(*args) - wanted(*args[:3], None, None, None)).abs().max() > 0.1, "it carries weight"


@pytest.mark.parametrize("parts", [64, 2])
def test_all_segments_however_they_are_split(parts, monkeypatch):
    monkeypatch.setattr(shard, "PARTS", parts)
    monkeypatch.setattr(shard, "TILE", 16)
    monkeypatch.setattr(shard_middle, "PROGRAMS", 4 if parts == 64 else parts)
    signs = coded_rows.random_signs(D, 5, CPU)
    args = (*given(37), compressed(330), streamed(50, 4, seed=5), signs)
    assert off(*args) < WIDE
    assert (attend(*args) - blocked.attend(*args)).abs().max() < WIDE


@pytest.mark.parametrize(("share", "t"), [(1, 17), (3, 1), (17, 1)])
def test_any_number_of_queries_and_heads(share, t):
    args = (*given(7, t, share=share), compressed(20), streamed(6, 8), None)
    assert off(*args) < WIDE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_queries(dtype):
    args = (*given(37, 3, dtype), compressed(100, interleaved=True), streamed(50, 8, 4), None)
    got, want = attend(*args), wanted(*args)
    assert got.dtype == dtype
    assert (got.double() - want).abs().max() < (2**-6 if dtype == torch.bfloat16 else 2**-7)
    assert (got.double() - want).square().mean().sqrt() < (2**-9 if dtype == torch.bfloat16 else 2**-11)


def test_narrow_products_hold_any_scale():
    """Coefficients and queries that fp16 would lose; 1e5 of logits in place of a few would be infinite."""
    middle = compressed(100, scale=1e-5)
    middle = middle._replace(keys=middle.keys._replace(mean=middle.keys.mean * 1e-5))
    q, keys, values = given(5, 1, torch.bfloat16)
    args = (q * 2.0**17, keys * 2.0**-17, values, middle, None, None)
    assert off(*args) < 2**-5
    stream = streamed(20, 8)
    stream.keys.norm.mul_(2.0**-12)
    assert off(*args[:3], None, stream, None) < 2**-5


def test_far_positions_turn_by_the_rounded_angle():
    args = (*given(5), compressed(70, first=900_001), None, None)
    assert off(*args) < WIDE


@pytest.mark.parametrize("tokens", [1, 65])
def test_the_streams_length_may_lie_on_the_device(tokens):
    """Rows beyond it hold NaN."""
    stream = streamed(tokens, 8, spare=90 - tokens)
    q, keys, values = given(5)
    want = attend(q, keys, values, None, stream, None)
    assert want.isfinite().all()
    on_device = stream._replace(tokens=torch.tensor(tokens))
    assert torch.equal(attend(q, keys, values, None, on_device, None), want)
    nothing = stream._replace(tokens=torch.tensor(0))
    assert torch.equal(attend(q, keys, values, None, nothing, None), attend(q, keys, values, None, None, None))


def test_keys_that_do_not_lie_in_order_are_read_as_they_are():
    q, keys, values = given(37)
    middle = compressed(20)
    want = attend(q, keys, values, middle, None, None)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (keys, values)]
    assert torch.equal(attend(q.mT.contiguous().mT, *strided, middle, None, None), want)
    strided = [x.mT.contiguous().mT for x in (keys, values)]
    assert torch.equal(attend(q, *strided, middle, None, None), want)


def test_logits_that_grow_from_tile_to_tile(monkeypatch):
    monkeypatch.setattr(shard, "PARTS", 2)
    monkeypatch.setattr(shard, "TILE", 16)
    q, keys, values = given(70, 1)
    q, keys = q.abs(), keys.abs() * torch.arange(70)[:, None, None] * 30
    # logits of thousands: fp32 holds them to 2^-12, which is what their exponentials are off by
    assert off(q, keys, values, None, streamed(5, 8), None) < 2**-9
    assert off(q, keys.flip(0), values, compressed(70), None, None) < 2**-9


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize(
    "place", ["q", "keys", "values", "basis scale", "mean", "codebook", "largest", "stream keys", "stream values"]
)
def test_what_is_no_number_is_not_lost(place, dtype):
    middle, stream = compressed(70), streamed(9, 8)
    q, keys, values = given(5, 1, dtype)
    {
        "q": q[:, 2:],
        "keys": keys[3, 1],
        "values": values[3, 1],
        "basis scale": middle.keys.basis_scale[2:3],
        "mean": middle.keys.mean[D:],
        "codebook": middle.values.codebook,
        "largest": middle.values.largest[1],
        "stream keys": stream.keys.norm[5:6],
        "stream values": stream.values.norm[5:6],
    }[place].fill_(torch.nan)
    got = attend(q, keys, values, middle, stream, None)
    assert got[:, 2:].isnan().all(), "heads 2 and 3 read KV head 1"
    assert place in {"basis scale", "codebook"} or got[:, :2].isfinite().all()


def test_minus_infinity_in_a_whole_part_has_no_weight(monkeypatch):
    monkeypatch.setattr(shard, "TILE", 16)
    q, keys, values = given(32, 1)
    q[...] = 1
    keys[:16] = -torch.inf
    middle = compressed(20)
    got = attend(q, keys, values, middle, None, None)
    assert (got - attend(q, keys[16:], values[16:], middle, None, None)).abs().max() < WIDE


def test_what_is_not_taken_is_named():
    q, keys, values = given(5)
    grouped = compressed(9)
    grouped = grouped._replace(keys=grouped.keys._replace(bits=torch.tensor([4, 4], dtype=torch.int8)))
    with pytest.raises(NotImplementedError, match="bits by group"):
        attend(q, keys, values, grouped, None, None)
    sketched = blocked.Stream(qjl.sketched_rows(4, D, 8, CPU), coded_rows.allocate(4, D, 8, CPU), 2)
    with pytest.raises(NotImplementedError, match="QJL"):
        attend(q, keys, values, None, sketched, None)
    with pytest.raises(NotImplementedError, match="rank 24"):
        attend(q, keys, values, compressed(9, rank=24), None, None)
    with pytest.raises(NotImplementedError, match="heads of 16"):
        attend(*given(5, d=16), compressed(9, d=16), None, None)
    with pytest.raises(NotImplementedError, match="heads of 8"):
        attend(*given(5, d=8), None, None, None)


def test_the_published_sizes():
    """Heads of 128, rank 192 in two runs of bytes, four queries to a head."""
    middle = compressed(66, rank=192, d=128)
    args = (*given(68, 1, share=4, d=128), middle, streamed(3, 8, d=128), None)
    assert off(*args) < 4 * WIDE  # keys of 192 components have logits of up to 100
    assert lloyd_max.packed_bytes(192, 4) == middle.keys.codes.shape[1]
