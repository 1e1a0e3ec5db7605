"""Attention over compressed forms against float64 attention over everything decoded; scratch of one tile."""

import pytest
import torch

from kernels.formats import coded_rows, eigenbasis, product_quantise, qjl
from kernels.formats.eigenbasis import measured_distortion
from kernels.ops import CPU
from kernels.quantise.reference import hadamard
from kernels.rope import reference as rope
from kernels.shard import cpu as shard
from kernels.shard.reference import rotated_values, turn
from model.variants.shard import causal
from tests.peak_memory import peak_bytes

ON_CPU = torch.device("cpu")
HEADS, QUERY_HEADS, D, SINKS = 2, 6, 16, 4
FREQS = rope.frequencies(D, 10_000.0)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def compressed(n, *, distortion=None, interleaved=False, seed=None):
    """A middle of `n` tokens, fitted to rows that lie near a few directions."""
    g = generator(n)
    x = torch.randn(n, 6, generator=g) @ torch.randn(6, HEADS * D, generator=g) + torch.randn(HEADS * D, generator=g)
    groups = 0 if distortion is None else 4
    keys = eigenbasis.eigen_keys(n, HEADS * D, 16, 16 if distortion is None else 32, groups, ON_CPU)
    eigenbasis.fit(keys, lambda: iter([x]), distortion)
    values = product_quantise.codebook_values(n, HEADS, D, ON_CPU)
    signs = None if seed is None else coded_rows.random_signs(D, seed, ON_CPU)
    product_quantise.fit(
        values, lambda: iter([coded_rows.signed_hadamard(torch.randn(n, HEADS, D, generator=g), signs)])
    )
    return shard.Middle(keys, values, SINKS, FREQS, interleaved)


def streamed(n, bits, *, sketch=False, seed=None, spare=9):
    """`n` tokens encoded one by one, and room for more that holds NaN."""
    allocate = qjl.sketched_rows if sketch else coded_rows.allocate
    keys = allocate((n + spare) * HEADS, D, bits, ON_CPU, seed)
    values = coded_rows.allocate((n + spare) * HEADS, D, bits, ON_CPU, seed)
    for plane in (*qjl.planes(keys).values(), *coded_rows.planes(values).values()):
        plane.view(torch.uint8).fill_(0xFF)
    qjl.write(keys, 0, torch.randn(n * HEADS, D, generator=generator(n + 1)))
    coded_rows.write(values, 0, torch.randn(n * HEADS, D, generator=generator(n + 2)))
    return shard.Stream(keys, values, n)


def decoded(middle, stream, signs):
    """Keys and values of both segments, float64, by the formulas; the keys of sketched rows without their sketch."""
    keys, values = [], []
    if middle is not None:
        stored, (codes, codebook, largest) = middle.keys, middle.values
        n = codes.shape[0]
        c = eigenbasis.coefficients(stored, 0, n).double() * stored.basis_scale.double()
        angle = torch.arange(middle.first, middle.first + n).double()[:, None] * middle.freqs.double()
        rebuilt = (c @ stored.basis.double().mT + stored.mean.double()).unflatten(1, (HEADS, -1))
        keys.append(turn(rebuilt, angle.cos(), angle.sin(), interleaved=middle.interleaved))
        matrix = hadamard(torch.eye(D)).double()
        plain = rotated_values(codes, codebook.double(), largest.double()) @ matrix
        values.append(plain if signs is None else plain * signs)
    if stream is not None:
        rows = stream.keys.rows if isinstance(stream.keys, qjl.SketchedRows) else stream.keys
        keys.append(coded_rows.read(rows, 0, stream.tokens * HEADS).double().view(-1, HEADS, D))
        values.append(coded_rows.read(stream.values, 0, stream.tokens * HEADS).double().view(-1, HEADS, D))
    return keys, values


def plain_attention(q, keys, values, seen=None, extra=None):
    """Softmax attention in float64, heads repeated; `extra` is added to the logits of the last keys."""
    share = q.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(share, dim=1) for x in (keys, values))
    logits = torch.einsum("thd,nhd->thn", q.double(), keys)
    if extra is not None:
        logits[..., -extra.shape[-1] :] += extra
    logits *= q.shape[2] ** -0.5
    if seen is not None:
        logits.masked_fill_(~seen[:, None], -torch.inf)
    return torch.einsum("thn,nhd->thd", logits.softmax(-1), values)


def exact(n, t=3):
    g = generator(100 + n)
    q = 2 * torch.randn(t, QUERY_HEADS, D, generator=g)
    return q, torch.randn(n, HEADS, D, generator=g), torch.randn(n, HEADS, D, generator=g)


@pytest.fixture(params=[False, True], ids=["one tile", "many tiles"])
def tiles(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(shard, "KEYS", 8 * HEADS * D)
        monkeypatch.setattr(shard, "TOKENS", 2)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("distortion", [None, measured_distortion])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("n", "bits"), [(50, None), (None, 4), (50, 8), (65, 2)])
def test_attention_is_that_over_all_rows_decoded(n, bits, interleaved, distortion, seed):
    signs = None if seed is None else coded_rows.random_signs(D, seed, ON_CPU)
    middle = None if n is None else compressed(n, distortion=distortion, interleaved=interleaved, seed=seed)
    stream = None if bits is None else streamed(33, bits, seed=seed)
    q, keys, values = exact(12)
    more_keys, more_values = decoded(middle, stream, signs)
    wanted = plain_attention(q, torch.cat((keys, *more_keys)), torch.cat((values, *more_values)))
    got = shard.attend(q.mT.contiguous().mT, keys, values, middle, stream, signs)  # strided
    assert (got - wanted).abs().max() < 2e-5
    without = plain_attention(q, keys, values)
    assert (wanted - without).abs().max() > 0.3, "the compressed segments carry weight"


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("bits", [2, 4])
def test_the_sketch_enters_the_scores_of_the_stream_alone(bits):
    middle, stream = compressed(40), streamed(33, bits, sketch=True)
    q, keys, values = exact(12)
    more_keys, more_values = decoded(middle, stream, None)
    rows = qjl.read_hadamard(stream.keys, 0, 33 * HEADS)[:, D:].view(33, HEADS, D).double()
    projected = coded_rows.signed_hadamard(q, None).double() @ qjl.gaussian(D, ON_CPU).double().mT
    extra = torch.einsum("thd,nhd->thn", projected, rows.repeat_interleave(QUERY_HEADS // HEADS, dim=1))
    args = (torch.cat((keys, *more_keys)), torch.cat((values, *more_values)))
    got = shard.attend(q, keys, values, middle, stream, None)
    assert (got - plain_attention(q, *args, extra=extra)).abs().max() < 2e-5
    assert (got - plain_attention(q, *args)).abs().max() > 1e-2


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("first", "t"), [(0, 1), (0, 7), (0, 70), (5, 3), (61, 6), (130, 1)])
def test_exact_attention_is_causal(first, t):
    _, keys, values = exact(first + t)
    q = exact(1, t)[0]
    seen = torch.arange(first + t) <= torch.arange(first, first + t)[:, None]
    wanted = plain_attention(q, keys, values, seen)
    assert (causal(CPU, q, keys, values, first) - wanted).abs().max() < 2e-5
    narrow = causal(CPU, q.bfloat16(), keys.bfloat16(), values.bfloat16(), first)
    assert narrow.dtype == torch.bfloat16
    assert (narrow - wanted).abs().max() < 0.1


def test_logits_that_grow_from_tile_to_tile(monkeypatch):
    """Every tile raises the peak by far more than fp32's exponents hold."""
    monkeypatch.setattr(shard, "KEYS", 4 * HEADS * D)
    q, keys, values = exact(12, 1)
    q, keys = q.abs(), keys.abs() * torch.arange(12)[:, None, None] * 100
    stream = streamed(5, 8)
    more_keys, more_values = decoded(None, stream, None)
    wanted = plain_attention(q, torch.cat((keys, *more_keys)), torch.cat((values, *more_values)))
    got = shard.attend(q, keys, values, None, stream, None)
    assert (got - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("place", ["keys", "values", "codebook", "stream keys", "stream values"])
def test_what_is_no_number_is_not_lost(place):
    middle, stream = compressed(40), streamed(9, 8)
    q, keys, values = exact(12)
    target = {
        "keys": keys[3, 1],
        "values": values[3, 1],
        "codebook": middle.values.codebook,
        "stream keys": stream.keys.norm[5:6],
        "stream values": stream.values.norm[5:6],
    }[place]
    target.fill_(torch.nan)
    assert shard.attend(q, keys, values, middle, stream, None)[:, 3:].isnan().all(), "heads 3 to 5 read KV head 1"


def test_scratch_does_not_grow_with_the_context(monkeypatch):
    """One tile of eight tokens: its keys, values, coefficients, logits and their temporaries, and the basis in fp32."""
    monkeypatch.setattr(shard, "KEYS", 8 * HEADS * D)
    q, keys, values = exact(12, 1)
    peaks = []
    for n in (100, 1000):
        middle, stream = compressed(n), streamed(n, 4, sketch=True)
        shard.attend(q, keys, values, middle, stream, None)  # tables and constants that stay
        peaks.append(peak_bytes(lambda m=middle, s=stream: shard.attend(q, keys, values, m, s, None)))
    assert peaks[1] == peaks[0]
    tile = 8 * HEADS * D * 4
    assert peaks[0] < 16 * tile + 2 * HEADS * D * 16 * 4
    assert peak_bytes(lambda: decoded(middle, None, None)) > 10 * peaks[0], "the measure is blind"
