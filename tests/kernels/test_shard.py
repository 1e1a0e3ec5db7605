"""Attention to Shard's compressed keys and values on every backend, held to float64 attention over all rows decoded.

fp32: logits are sums of products of up to 64 + 32 terms of about one, whose roundings come to 2^-24 times a few tens;
2e-5 leaves room for what values of 3 make of it. 16 bits: Triton's operands of fp16 are off by 2^-12 of themselves,
keys and queries and values alike, so that a logit of size L is off by less than 2^-10 L = 0.03 for the largest here
(about 25), in practice by its root; queries and outputs of bf16 add 2^-9 of values of 3. The CPU op computes in fp32,
and rounds its output alone.
"""

import functools
import math

import pytest
import torch

from fathom.kernels.formats import coded_rows, lloyd_max, qjl
from fathom.kernels.formats.coded_rows import random_signs
from fathom.kernels.formats.stored import CodebookValues, EigenKeys
from fathom.kernels.ops import CPU
from fathom.kernels.rope import reference as rope
from fathom.kernels.shard import cpu
from fathom.kernels.shard.reference import Middle, Stream, relative_scores, rotated_values, turn
from fathom.model.variants.shard import causal
from tests.kernels.every_backend import HAS_TRITON, on_triton
from tests.peak_memory import peak_bytes

if HAS_TRITON:
    from fathom.kernels.shard import triton, triton_middle

ON_CPU = torch.device("cpu")
HEADS, SHARE, D, SINKS = 2, 2, 32, 4
WIDE = 2e-5
BACKENDS = {"cpu": CPU.attend_codes}
if HAS_TRITON:
    BACKENDS["triton"] = triton.attend

# Of BF16 and FP16: the largest error, and its root mean square.
NARROW = {
    "cpu": {torch.bfloat16: (2**-7, 2**-9), torch.float16: (2**-10, 2**-12)},
    "triton": {torch.bfloat16: (2**-6, 2**-9), torch.float16: (2**-7, 2**-11)},
}
CUTS = ["cpu", "cpu in many tiles", *[name for name in BACKENDS if name != "cpu"]]
layouts = pytest.mark.parametrize("interleaved", [False, True])


@pytest.fixture(params=CUTS)
def backend(request, monkeypatch):
    if request.param == "cpu in many tiles":
        monkeypatch.setattr(cpu, "KEYS", 8 * HEADS * D)
        monkeypatch.setattr(cpu, "TOKENS", 2)
    torch.use_deterministic_algorithms(mode=True)  # what is allocated without content holds NaN
    yield request.param.partition(" ")[0]
    torch.use_deterministic_algorithms(mode=False)


def drawn(seed):
    return torch.Generator().manual_seed(seed)


def compressed(n, *, rank=48, bits=(), interleaved=False, first=SINKS, d=D, scale=1.0):
    """A middle of `n` tokens with content of every kind: all codes, negative columns, components that never varied.

    With `bits`, of each group of components, coefficients are not int4 but Lloyd-Max codes of so many bits.
    """
    g = drawn(n)
    basis = torch.randint(-127, 128, (HEADS * d, rank), generator=g, dtype=torch.int8)
    basis_scale, scales = (torch.rand(rank, generator=g).add(0.1).mul(s).half() for s in (0.005, 0.1 * scale))
    scales[3] = 0
    stored = rank // len(bits) * sum(bits) // 8 if bits else rank // 2
    keys = EigenKeys(
        torch.randint(0, 256, (n, stored), generator=g, dtype=torch.uint8),
        basis, basis_scale, scales, torch.randn(HEADS * d, generator=g).half(), torch.tensor(bits, dtype=torch.int8),
    )  # fmt: skip
    values = CodebookValues(
        torch.randint(0, 256, (n, HEADS * d // 4), generator=g, dtype=torch.uint8),
        torch.randn(256, 4, generator=g).half() / 2,
        torch.rand(HEADS, d, generator=g).add(0.5).half(),
    )
    return Middle(keys, values, first, rope.frequencies(d, 10_000.0), interleaved)


def streamed(n, bits=8, value_bits=None, *, seed=None, sketch=False, spare=70, d=D):
    """`n` tokens encoded one by one, and room for more that holds NaN."""
    rows = (n + spare) * HEADS
    keys = (qjl.sketched_rows if sketch else coded_rows.allocate)(rows, d, bits, ON_CPU, seed)
    values = coded_rows.allocate(rows, d, value_bits or bits, ON_CPU, None if seed is None else 5)
    for plane in (*qjl.planes(keys).values(), *coded_rows.planes(values).values()):
        plane.view(torch.uint8).fill_(0xFF)
    qjl.write(keys, 0, torch.randn(n * HEADS, d, generator=drawn(n + 1)))
    coded_rows.write(values, 0, torch.randn(n * HEADS, d, generator=drawn(n + 2)))
    return Stream(keys, values, n)


def given(n, t=1, dtype=torch.float32, share=SHARE, d=D):
    g = drawn(100 + n)
    q = (2 * torch.randn(t, HEADS * share, d, generator=g)).to(dtype)
    return q, *(torch.randn(n, HEADS, d, generator=g).to(dtype) for _ in range(2))


def matrix(d):
    """Hadamard's, [d, d] float64: its own inverse."""
    two = torch.tensor([[1.0, 1], [1, -1]], dtype=torch.float64)
    return functools.reduce(torch.kron, [two] * (d.bit_length() - 1)) * d**-0.5


def unpacked(packed, bits):
    """Codes of [n, bytes] uint8: code i of a row takes bits ``i b .. i b + b - 1`` of its bytes."""
    ones = packed[..., None].long() >> torch.arange(8) & 1
    return (ones.flatten(1).unflatten(1, (-1, bits)) << torch.arange(bits)).sum(-1)


def centroids(packed, bits):
    return lloyd_max.codebook(bits, ON_CPU).double()[unpacked(packed, bits)]


def rotary(x, angle, *, interleaved):
    """Rotation of [n, heads, d] by [n, d / 2] as a product of complex numbers."""
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).mT
    z = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(1).double(), angle)[:, None]
    out = torch.view_as_real(z)
    return out.flatten(-2) if interleaved else out.mT.flatten(-2)


def components(stored):
    """Coefficients of the middle's keys times the scale of their columns, [n, rank] float64."""
    bits, place, groups = stored.bits.tolist(), 0, []
    for wide in bits:
        size = stored.basis.shape[1] // len(bits) * wide // 8
        part = stored.codes[:, place : place + size]
        groups.append(centroids(part, wide) if wide else torch.zeros(len(part), stored.basis.shape[1] // len(bits)))
        place += size
    c = torch.cat(groups, 1).double() if bits else unpacked(stored.codes, 4).double() - 8
    return c * stored.scale.double() * stored.basis_scale.double()


def plain_attention(q, keys, values, seen=None):
    """Softmax attention in float64, heads repeated."""
    keys, values = (x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (keys, values))
    logits = torch.einsum("thd,nhd->thn", q.double(), keys) * q.shape[2] ** -0.5
    if seen is not None:
        logits.masked_fill_(~seen[:, None], -torch.inf)
    return torch.einsum("thn,nhd->thd", logits.softmax(-1), values)


def wanted(q, keys, values, middle, stream, signs):
    """Attention over keys and values that are decoded by their formats' definitions, in float64."""
    d = q.shape[2]
    keys, values = [keys.double()], [values.double()]
    if middle is not None:
        n, width = middle.values.codes.shape[0], (HEADS, d)
        plain = components(middle.keys) @ middle.keys.basis.double().mT + middle.keys.mean.double()
        # angles are rounded to fp32, as the equation of rotary embeddings has them
        angle = (torch.arange(middle.first, middle.first + n).float()[:, None] * middle.freqs).double()
        keys.append(rotary(plain.unflatten(1, width), angle, interleaved=middle.interleaved))
        codebook, largest = middle.values.codebook.double(), middle.values.largest.double()
        stored = codebook[middle.values.codes.long()].view(n, *width) * largest
        values.append(stored @ matrix(d) * (1 if signs is None else signs))
    if stream is not None:
        n = int(stream.tokens) * HEADS
        rows = stream.keys.rows if isinstance(stream.keys, qjl.SketchedRows) else stream.keys
        key, value = (
            centroids(x.codes[:n], x.bits) * x.norm[:n, None].double() * d**-0.5 for x in (rows, stream.values)
        )
        if rows is not stream.keys:  # a sketch adds to the score of a rotated query: (S q) . sign = q . (sign S)
            length = stream.keys.residual[:n, None].double() * (math.pi / 2) ** 0.5 / d
            key += (2 * unpacked(stream.keys.sketch[:n], 1) - 1) * length @ qjl.gaussian(d, ON_CPU).double()
        for x, into, sign in ((key, keys, rows.signs), (value, values, signs)):
            into.append((x @ matrix(d) * (1 if sign is None else sign)).view(-1, HEADS, d))
    return plain_attention(q, torch.cat(keys), torch.cat(values))


def off(backend, *args):
    """The largest error."""
    return (BACKENDS[backend](*args).double() - wanted(*args)).abs().max()


def weight(*args):
    """What the compressed segments change."""
    return (wanted(*args) - wanted(*args[:3], None, None, None)).abs().max()


@pytest.mark.parametrize(
    ("n", "rank", "interleaved"),
    [(1, 32, False), (70, 32, True), (64, 48, False), (65, 90, True), (129, 50, False)],
)  # on Triton one run of nibbles; 16 + 8; 32 + 13; 16 + 9
def test_the_middle(backend, n, rank, interleaved):
    args = (*given(5), compressed(n, rank=rank, interleaved=interleaved), None, None)
    assert off(backend, *args) < WIDE
    assert weight(*args) > 0.1


@pytest.mark.parametrize(
    ("bits", "value_bits", "seed"), [(8, 4, None), (4, 8, 5), (3, 2, None), (1, 7, 5), (5, 6, None)]
)
def test_the_stream(backend, bits, value_bits, seed):
    signs = None if seed is None else random_signs(D, 5, ON_CPU)
    args = (*given(5), None, streamed(67, bits, value_bits, seed=None if seed is None else 9), signs)
    assert off(backend, *args) < WIDE
    assert weight(*args) > 0.1


@pytest.mark.parametrize("parts", [64, 2])
def test_all_segments_however_they_are_split(backend, parts, monkeypatch):
    signs = random_signs(D, 5, ON_CPU)
    args = (*given(37), compressed(330), streamed(50, 4, seed=5), signs)
    on_cpu = cpu.attend(*args)
    if backend == "triton":
        monkeypatch.setattr(triton, "PARTS", parts)
        monkeypatch.setattr(triton, "TILE", 16)
        monkeypatch.setattr(triton_middle, "PROGRAMS", 4 if parts == 64 else parts)
    got = BACKENDS[backend](*args)
    assert (got - wanted(*args)).abs().max() < WIDE
    assert (got - on_cpu).abs().max() < WIDE


# Only the CPU op takes components with bits by group, and sketched keys.
BY_GROUP = {"rank": 32, "bits": (2, 2, 0, 4)}


@pytest.mark.parametrize("backend", CUTS[:2], indirect=True)
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("form", [{}, BY_GROUP], ids=["int4", "bits by group"])
@layouts
@pytest.mark.parametrize("stream", [None, (8, False), (2, False), (2, True), (4, True)])
def test_cpu_takes_every_mix_of_forms(backend, stream, interleaved, form, seed):
    signs = None if seed is None else random_signs(D, 5, ON_CPU)
    q, keys, values = given(12, 3)
    held = None if stream is None else streamed(33, stream[0], seed=seed, sketch=stream[1])
    args = (q.mT.contiguous().mT, keys, values, compressed(50, interleaved=interleaved, **form), held, signs)
    assert off(backend, *args) < WIDE
    assert weight(*args) > 0.3
    if held is not None and stream[1]:
        without = held._replace(keys=held.keys.rows)
        assert (wanted(*args) - wanted(*args[:4], without, signs)).abs().max() > 1e-2, "the sketch enters the scores"


@pytest.mark.parametrize(("share", "t"), [(1, 17), (3, 1), (17, 1)])
def test_any_number_of_queries_and_heads(backend, share, t):
    args = (*given(7, t, share=share), compressed(20), streamed(6, 8), None)
    assert off(backend, *args) < WIDE


def test_cpu_splits_many_queries():
    args = (*given(7, 130), compressed(20), streamed(6, 8), None)
    assert off("cpu", *args) < WIDE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_queries(backend, dtype):
    args = (*given(37, 3, dtype), compressed(70, interleaved=True), streamed(50, 8, 4), None)
    got, want = BACKENDS[backend](*args), wanted(*args)
    assert got.dtype == dtype
    most, usual = NARROW[backend][dtype]
    assert (got.double() - want).abs().max() < most
    assert (got.double() - want).square().mean().sqrt() < usual


def test_narrow_products_hold_any_scale(backend):
    """Coefficients and queries that fp16 would lose; 1e5 of logits in place of a few would be infinite."""
    bound = {"cpu": 2**-7, "triton": 2**-5}[backend]
    middle = compressed(70, scale=1e-5)
    middle = middle._replace(keys=middle.keys._replace(mean=middle.keys.mean * 1e-5))
    q, keys, values = given(5, 1, torch.bfloat16)
    assert off(backend, q * 2.0**17, keys * 2.0**-17, values, middle, None, None) < bound
    stream = streamed(20, 8)
    stream.keys.norm.mul_(2.0**-12)
    assert off(backend, q * 2.0**17, keys * 2.0**-17, values, None, stream, None) < bound


def test_far_positions_turn_by_the_rounded_angle(backend):
    assert off(backend, *given(5), compressed(70, first=900_001), None, None) < WIDE


@on_triton
@pytest.mark.parametrize("tokens", [1, 65])
def test_on_triton_the_streams_length_may_lie_on_the_device(tokens):
    """Rows beyond it hold NaN."""
    stream = streamed(tokens, 8, spare=90 - tokens)
    q, keys, values = given(5)
    want = triton.attend(q, keys, values, None, stream, None)
    assert want.isfinite().all()
    assert torch.equal(triton.attend(q, keys, values, None, stream._replace(tokens=torch.tensor(tokens)), None), want)


def test_a_stream_of_no_tokens_weighs_nothing(backend):
    q, keys, values = given(5)
    want = BACKENDS[backend](q, keys, values, None, None, None)
    for tokens in [0, *([torch.tensor(0)] if backend == "triton" else [])]:
        assert torch.equal(BACKENDS[backend](q, keys, values, None, streamed(3)._replace(tokens=tokens), None), want)


def test_keys_that_do_not_lie_in_order_are_read_as_they_are(backend):
    q, keys, values = given(37)
    middle = compressed(20)
    straight, want = BACKENDS[backend](q, keys, values, middle, None, None), wanted(q, keys, values, middle, None, None)
    tokens = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (keys, values)]
    columns = [x.mT.contiguous().mT for x in (q, keys, values)]
    for x, *strided in ((columns[0], *tokens), (q, *columns[1:])):
        got = BACKENDS[backend](x, *strided, middle, None, None)
        assert (got - want).abs().max() < WIDE
        assert backend != "triton" or torch.equal(got, straight)


def test_logits_that_grow_from_tile_to_tile(backend, monkeypatch):
    """Every tile raises the peak by far more than fp32's exponents hold."""
    if backend == "triton":
        monkeypatch.setattr(triton, "PARTS", 2)
        monkeypatch.setattr(triton, "TILE", 16)
    # logits of thousands: fp32 holds them to 2^-12, which is what their exponentials are off by
    bound = {"cpu": 1e-4, "triton": 2**-9}[backend]
    q, keys, values = given(70)
    q, keys = q.abs(), keys.abs() * torch.arange(70)[:, None, None] * 30
    assert off(backend, q, keys, values, None, streamed(5, 8), None) < bound
    assert off(backend, q, keys.flip(0), values, compressed(70), None, None) < bound


@pytest.mark.parametrize(
    "place", ["q", "keys", "values", "basis scale", "mean", "codebook", "largest", "stream keys", "stream values"]
)
def test_what_is_no_number_is_not_lost(backend, place):
    middle, stream = compressed(20), streamed(9, 8)
    for dtype in (torch.bfloat16, torch.float32)[: 1 if backend == "triton" else 2]:
        q, keys, values = given(12, 1, dtype)
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
        got = BACKENDS[backend](q, keys, values, middle, stream, None)
        assert got[:, 2:].isnan().all(), "heads 2 and 3 read KV head 1"
        assert place in {"basis scale", "codebook"} or got[:, :2].isfinite().all()


def test_minus_infinity_in_a_whole_part_has_no_weight(backend, monkeypatch):
    if backend == "triton":
        monkeypatch.setattr(triton, "TILE", 16)
    q, keys, values = given(32)
    q[...] = 1
    keys[:16] = -torch.inf
    middle = compressed(20)
    want = wanted(q, keys[16:], values[16:], middle, None, None)
    assert (BACKENDS[backend](q, keys, values, middle, None, None) - want).abs().max() < WIDE


def test_heads_that_do_not_divide_are_refused(backend):
    q, keys, values = given(5)
    with pytest.raises(AssertionError, match="3 query heads are no multiple of 2 KV heads"):
        BACKENDS[backend](q[:, :3], keys, values, None, None, None)


@on_triton
def test_triton_names_what_it_does_not_take():
    q, keys, values = given(5)
    with pytest.raises(NotImplementedError, match="bits by group"):
        triton.attend(q, keys, values, compressed(9, **BY_GROUP), None, None)
    with pytest.raises(NotImplementedError, match="QJL"):
        triton.attend(q, keys, values, None, streamed(2, sketch=True), None)
    with pytest.raises(NotImplementedError, match="rank 24"):
        triton.attend(q, keys, values, compressed(9, rank=24), None, None)
    with pytest.raises(NotImplementedError, match="heads of 16"):
        triton.attend(*given(5, d=16), compressed(9, d=16), None, None)
    with pytest.raises(NotImplementedError, match="heads of 8"):
        triton.attend(*given(5, d=8), None, None, None)


def test_the_published_sizes(backend):
    """Heads of 128, rank 192 in two runs of bytes, four queries to a head."""
    middle = compressed(66, rank=192, d=128)
    args = (*given(68, 1, share=4, d=128), middle, streamed(3, 8, d=128), None)
    assert off(backend, *args) < 4 * WIDE  # keys of 192 components have logits of up to 100
    assert lloyd_max.packed_bytes(192, 4) == middle.keys.codes.shape[1]


@pytest.mark.parametrize(("first", "t"), [(0, 1), (0, 7), (0, 70), (5, 3), (61, 6), (130, 1)])
def test_exact_attention_is_causal(first, t):
    _, keys, values = given(first + t)
    q = given(1, t)[0]
    seen = torch.arange(first + t) <= torch.arange(first, first + t)[:, None]
    want = plain_attention(q, keys, values, seen)
    assert (causal(CPU, q, keys, values, first) - want).abs().max() < WIDE
    narrow = causal(CPU, q.bfloat16(), keys.bfloat16(), values.bfloat16(), first)
    assert narrow.dtype == torch.bfloat16
    assert (narrow - want).abs().max() < 0.1


def test_cpu_scratch_does_not_grow_with_the_context(monkeypatch):
    """One tile of eight tokens: its keys, values, coefficients, logits and their temporaries, and the basis in fp32."""
    monkeypatch.setattr(cpu, "KEYS", 8 * HEADS * D)
    q, keys, values = given(12)
    peaks = []
    for n in (100, 500):
        args = (q, keys, values, compressed(n, rank=16), streamed(n, 4, sketch=True), None)
        cpu.attend(*args)  # tables and constants that stay
        peaks.append(peak_bytes(lambda args=args: cpu.attend(*args)))
    assert peaks[1] == peaks[0]
    tile = 8 * HEADS * D * 4
    assert peaks[0] < 16 * tile + 2 * HEADS * D * 16 * 4
    assert peak_bytes(lambda: wanted(*args[:4], None, None)) > 10 * peaks[0], "the measure is blind"


# The equations of the reference: the relative identity, its mean and its layouts, against rotate and dot in float64.
N, AT = 40, 57
FREQS = rope.frequencies(D, 10_000.0).double()


def angles(positions):
    return torch.as_tensor(positions, dtype=torch.float64).reshape(-1, 1) * FREQS


def trig(positions):
    return angles(positions).cos(), angles(positions).sin()


def identity():
    g = drawn(0)
    shapes = (HEADS * 3, D), (N, 12), (HEADS * D, 12), (HEADS * D,)
    q, c, basis, mean = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes)
    return q, c, basis, 3 * mean


def scores(q, keys):
    return torch.einsum("hd,nhd->hn", q, keys.repeat_interleave(q.shape[0] // HEADS, dim=1))


@layouts
def test_turn_is_a_complex_product_and_undone_by_the_negative_sine(interleaved):
    x, (cos, sin) = torch.randn(N, HEADS, D, generator=drawn(0)).double(), trig(torch.arange(N) + 1000)
    turned = turn(x, cos, sin, interleaved=interleaved)
    assert (turned - rotary(x, angles(torch.arange(N) + 1000), interleaved=interleaved)).abs().max() < 1e-13
    assert (turn(turned, cos, -sin, interleaved=interleaved) - x).abs().max() < 1e-14
    x, cos, sin = x.float(), cos.float(), sin.float()
    there = turn(x, cos, sin, interleaved=interleaved)
    assert (turn(there, cos, -sin, interleaved=interleaved) - x).abs().max() < 4e-6


@layouts
def test_the_identity_equals_rotate_and_dot(interleaved):
    q, c, basis, mean = identity()
    positions = torch.arange(N) + 9
    keys = rotary((c @ basis.mT + mean).view(N, HEADS, D), angles(positions), interleaved=interleaved)
    want = scores(rotary(q[None], angles(AT), interleaved=interleaved)[0], keys)
    cos, sin = trig(positions - AT)
    right = relative_scores(q, c, basis, mean, cos, sin, interleaved=interleaved)
    assert (right - want).abs().max() < 1e-12 * want.abs().max()
    # each way to get it wrong is far off: no mean, the distance's sign, the other layout, the absolute position
    for wrong in (
        relative_scores(q, c, basis, torch.zeros_like(mean), cos, sin, interleaved=interleaved),
        relative_scores(q, c, basis, mean, cos, -sin, interleaved=interleaved),
        relative_scores(q, c, basis, mean, cos, sin, interleaved=not interleaved),
        relative_scores(q, c, basis, mean, *trig(positions), interleaved=interleaved),
    ):
        assert (wrong - right).square().mean().sqrt() > 0.3 * right.square().mean().sqrt()


@layouts
def test_the_identity_is_what_the_tiles_compute(interleaved):
    """Stored keys in fp32: within 3e-6 of the scores' root mean square, as kv-variants C.4 demands."""
    q, middle = identity()[0], compressed(N, rank=12, interleaved=interleaved)
    stored, distance = middle.keys, trig(torch.arange(SINKS, SINKS + N) - AT)
    parts = components(stored), stored.basis.double(), stored.mean.double()
    want = relative_scores(q, *parts, *distance, interleaved=interleaved)
    turned = rotary(q[None], angles(AT), interleaved=interleaved)[0].float()
    got = scores(turned, torch.cat((cpu.middle_keys(middle, 0, 23), cpu.middle_keys(middle, 23, N))))
    assert (got - want).abs().max() < 3e-6 * want.square().mean().sqrt()


def test_values_rotated_late_are_values_rotated_early():
    values = compressed(N).values
    stored = rotated_values(values.codes, values.codebook.float(), values.largest.float())
    for i, head, j in ((0, 0, 0), (39, 1, 3), (7, 1, 0)):
        row = values.codebook[int(values.codes[i, head * D // 4 + j])].float()
        assert torch.equal(stored[i, head, 4 * j : 4 * j + 4], row * values.largest[head, 4 * j : 4 * j + 4])
    weights = torch.rand(N, generator=drawn(2))
    early = torch.einsum("n,nhd->hd", weights, (stored.double() @ matrix(D)).float())
    late = coded_rows.undo_hadamard(torch.einsum("n,nhd->hd", weights, stored), None)
    assert (early - late).abs().max() < 2e-6 * N**0.5
