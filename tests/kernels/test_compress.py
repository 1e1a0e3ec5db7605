"""The compressor's tail against one equation of all tokens at once in float64, and against the model's compressors."""

from operator import itemgetter
from types import SimpleNamespace

import pytest
import torch

from fathom.kernels.compress import reference
from fathom.kernels.formats import rows as forms
from fathom.kernels.formats import rows_reference as stored
from fathom.kernels.formats.stored import CodedRows, TokenRing
from fathom.kernels.ops import CPU, REFERENCE
from fathom.kernels.rope.reference import frequencies
from fathom.model.arithmetic import Arithmetic
from fathom.model.cache.entries import Entries
from fathom.model.cache.formats import CacheFormats
from fathom.model.cache.frontier import Frontier
from fathom.model.compressor import EntryCompressor, KeyCompressor
from fathom.model.rope import Rotation
from fathom.model.rounding import FP4, FP8, NONE, Rounding
from tests.kernels.every_backend import HAS_TRITON, ULP, on_triton, strided

BACKENDS = {"reference": reference.compress_at_once}  # and CPU's, which is the reference's
POOLS = {"reference": REFERENCE.pool, "cpu": CPU.pool}
STORES = {"reference": stored.write}  # of the sets REFERENCE and CPU it is what the cache does
if HAS_TRITON:
    from fathom.kernels.compress import triton

    BACKENDS["triton"], POOLS["triton"], STORES["triton"] = triton.compress_at_once, triton.pool, triton.store

HERE = torch.device("cpu")
EPS = 1e-2  # of a size that no bound below hides
ROPE = 16
CHUNKS = (3, 1, 2, 9, 1, 1, 1, 1, 17, 7, 4)  # some close no window, some one, some many; at every place in a window
TOTAL = sum(CHUNKS)
CAPACITY = 20
GEOMETRY = [(4, 2, 64), (8, 1, 80), (3, 2, 32), (20, 2, 32), (40, 1, 64)]  # ratio, series, width
EVERY_BACKEND = pytest.mark.parametrize("compress", BACKENDS.values(), ids=BACKENDS)


def cache(form, width, dtype):
    match form:
        case "entries":
            rows = forms.fp8_entries(CAPACITY, width, ROPE, HERE)
        case "fp8":
            rows = forms.fp8_keys(CAPACITY, width, HERE)
        case "fp4":
            rows = forms.fp4_keys(CAPACITY, width, HERE)
        case _:
            rows = torch.zeros(CAPACITY, width, dtype=dtype)
    for plane in forms.planes(rows).values():
        plane.view(torch.uint8).fill_(0xFF)  # NaN, of every form
    return rows


def bits(rows):
    return torch.cat([plane.view(torch.uint8).reshape(len(plane), -1) for plane in forms.planes(rows).values()], dim=1)


def rows_of(ratio, series, more=0):
    """Rows of a ring: what an entry reads, and windows for tokens that are taken back."""
    return (series + more) * ratio


def ring_of(kv, gate, first, rows):
    """The ring after the tokens at positions ``first ..``, NaN where no token was."""
    ring = TokenRing(*torch.full((2, rows, kv.shape[1]), torch.nan))
    for token in range(len(kv)):
        ring.kv[(first + token) % rows], ring.gate[(first + token) % rows] = kv[token], gate[token]
    return ring


def first_ring(ratio, series, width, more=0):
    return ring_of(*torch.empty(2, 0, series * width), 0, rows_of(ratio, series, more))


def draw(n, series, width, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, series * width, generator=g), 3 * torch.randn(n, series * width, generator=g)


def whole_numbers(n, series, width, seed=0):
    """Small integers of which the softmax takes one: every sum is exact, in whichever order."""
    g = torch.Generator().manual_seed(seed)
    kv = torch.randint(-8, 9, (n, series * width), generator=g).float()
    return kv, torch.rand(n, series * width, generator=g).argsort(0).float() * 200


def norm_of(width):
    return torch.rand(width, generator=torch.Generator().manual_seed(1)) + 0.5


def chunks(*tensors):
    first = 0
    for t in CHUNKS:
        yield first, *(x[first : first + t] for x in tensors)
        first += t


def assert_same_ring(ours, expected):
    for name, part in expected._asdict().items():
        assert torch.equal(getattr(ours, name).view(torch.int32), part.view(torch.int32)), name


def exact_entries(kv, gate, ratio, series, width, norm, freqs, origin=0):
    """Entries of all tokens from position `origin` on, no state kept, and how far fp32 may be from them."""
    rows, bounds = [], []
    for end in range(ratio, len(kv) + 1, ratio):
        start = end - ratio
        values, gates = kv[start:end, -width:], gate[start:end, -width:]
        if series == 2 and start > 0:
            before = slice(start - ratio, start)
            values, gates = torch.cat((values, kv[before, :width])), torch.cat((gates, gate[before, :width]))
        values, mass = values.double(), (gates - gates.amax(0)).double().exp()
        pooled = (values * mass).sum(0) / mass.sum(0)
        scale = norm.double() / (pooled.square().mean() + EPS).sqrt()
        row, turned = pooled * scale, 2 * len(freqs)
        angle = (torch.tensor(float(origin + start)) * freqs).double()  # rounded to fp32, as the equation says
        pairs = torch.view_as_complex(row[width - turned :].view(-1, 2).contiguous())
        turns = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle))
        rows.append(torch.cat((row[: width - turned], turns.flatten())))
        # a sum of n terms below the largest, exponentials of two ulp, a division, a norm, and a rotation of pairs
        bounds.append((len(values) + 16) * ULP * values.abs().max() * scale.max() * 2)
    return torch.stack(rows), torch.stack(bounds)[:, None]


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("overlap", [False, True])
def test_pool_is_one_softmax_per_channel(overlap, pool):
    n, r, d = 3, 4, 5
    kv, gates, before_kv, before_gates = torch.randn(4, n, r, d, generator=torch.Generator().manual_seed(8)).unbind()
    gates[1, 2], before_gates[0] = -torch.inf, -torch.inf  # a token taken out; no window before the first
    before = (before_kv, before_gates) if overlap else (None, None)
    values = torch.cat((before_kv, kv), 1).double() if overlap else kv.double()
    mass = (torch.cat((before_gates, gates), 1) if overlap else gates).double().exp()
    exact = (values * mass).sum(1) / mass.sum(1)
    assert ((pool(kv, gates, *before) - exact).abs() <= 16 * ULP * exact.abs().clamp(min=1)).all()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pool", [POOLS[name] for name in list(POOLS)[1:]], ids=list(POOLS)[1:])
@pytest.mark.parametrize(("n", "r", "d"), [(0, 4, 16), (1, 1, 1), (1, 4, 128), (3, 5, 33), (70, 8, 80), (2, 128, 130)])
def test_pools_are_that_of_the_reference(n, r, d, overlap, pool):
    g = torch.Generator().manual_seed(n)
    kv, gates = (torch.randn(n, r, 2 * d, generator=g)[..., -d:] * size for size in (1, 30))  # rows lie apart
    before = tuple(torch.randn(n, r, d, generator=g).mT.contiguous().mT for _ in range(2)) if overlap else (None, None)
    if n > 2:
        kv[0, 0, 0], kv[1, 0, 1], kv[1, 1, 1] = torch.nan, torch.inf, -torch.inf
        gates[2, :, 0], gates[2, 0, 1], gates[2, 0, 2] = -torch.inf, torch.inf, torch.nan
        gates[2, :, 3], gates[2, 0, 3] = -torch.inf, 2.0
        gates[2, 1:, 4] = gates[2, 0, 4] - 90  # masses that are subnormal
    if n > 2 and overlap:
        before[1][0], before[1][2, :, 0] = -torch.inf, -torch.inf
    ours, expected = pool(kv, gates, *before), REFERENCE.pool(kv, gates, *before)
    assert ours.shape == (n, d)
    assert torch.equal(ours.isnan(), expected.isnan())
    assert n < 3 or expected[:3].isnan().any(1).all()
    assert ((ours - expected).abs().nan_to_num(0) <= 32 * ULP * expected.abs().nan_to_num(0).clamp(min=1)).all()


@pytest.mark.parametrize("more", [0, 2])
@pytest.mark.parametrize(("ratio", "series", "width"), GEOMETRY)
@EVERY_BACKEND
def test_entries_and_ring_are_those_of_all_tokens_at_once(compress, ratio, series, width, more):
    kv, gate = draw(TOTAL, series, width)
    norm, freqs = norm_of(width), frequencies(ROPE, 1e4)
    ring, rows, given = first_ring(ratio, series, width, more), cache("rows", width, torch.float32), []
    for first, *part in chunks(kv, gate):
        given.append(compress(*part, ring, first, ratio, norm, EPS, freqs, "none", rows, torch.float32))
        end = first + len(part[0])
        assert_same_ring(ring, ring_of(kv[:end], gate[:end], 0, len(ring.kv)))
    exact, bound = exact_entries(kv, gate, ratio, series, width, norm, freqs)
    assert len(exact) == TOTAL // ratio
    assert ((rows[: len(exact)] - exact).abs() <= bound).all()
    assert torch.equal(torch.cat(given), rows[: len(exact)])
    assert rows[len(exact) :].isnan().all()


@pytest.mark.parametrize("t", [1, 3, 5, 12])
@pytest.mark.parametrize("deferred", [False, True], ids=["int", "tensor"])
@EVERY_BACKEND
def test_the_position_may_be_a_tensor_far_into_a_context(compress, deferred, t):
    """The angle is that of a position near a million, rounded to fp32 as the equation says."""
    ratio, width, first = 4, 32, 1_000_001 + (t == 3)
    origin, filled = first // ratio * ratio - ratio, first % ratio
    kv, gate = draw(ratio + filled + t, 2, width, seed=4)
    norm, freqs, past = torch.ones(width), frequencies(ROPE, 1e4), ratio + filled
    ring = ring_of(kv[:past], gate[:past], origin, rows_of(ratio, 2))  # where it is NaN, it must not be read
    rows = torch.full(((first + t) // ratio + 1, width), torch.nan)
    where = torch.tensor(first) if deferred else first
    given = compress(kv[past:], gate[past:], ring, where, ratio, norm, EPS, freqs, "none", rows, torch.float32)
    exact = exact_entries(kv, gate, ratio, 2, width, norm, freqs, origin)[0][1:]  # of the first, one window is known
    found = rows[first // ratio :]
    assert ((found[: len(exact)] - exact).abs() <= 5e-6).all()
    assert torch.equal(given[: len(exact)], found[: len(exact)])
    assert found[len(exact) :].isnan().all()
    assert rows[: first // ratio].isnan().all()
    assert_same_ring(ring, ring_of(kv, gate, origin, rows_of(ratio, 2)))


@pytest.mark.parametrize(("ratio", "series", "width"), GEOMETRY)
@EVERY_BACKEND
def test_tokens_that_are_taken_back_leave_nothing(compress, ratio, series, width):
    """Of every call some tokens are rejected, and the next one begins before them: entries are those of a plain run."""
    most, g = 2 * ratio, torch.Generator().manual_seed(ratio)
    kv, gate = draw(TOTAL, series, width)
    wrong = draw(TOTAL + most, series, width, seed=9)
    tail = norm_of(width), EPS, frequencies(ROPE, 1e4), "none"
    plain, ring = first_ring(ratio, series, width, 2), first_ring(ratio, series, width, 2)
    wanted, rows = cache("rows", width, torch.float32), cache("rows", width, torch.float32)
    for first in range(TOTAL):
        compress(kv[first : first + 1], gate[first : first + 1], plain, first, ratio, *tail, wanted, torch.float32)
    first = 0
    while first < TOTAL:
        right = min(int(torch.randint(1, 4, (), generator=g)), TOTAL - first)
        rejected = min(int(torch.randint(0, most + 1, (), generator=g)), CAPACITY * ratio - first - right)
        parts = (
            torch.cat((x[first : first + right], other[first + right : first + right + rejected]))
            for x, other in zip((kv, gate), wrong, strict=True)
        )
        compress(*parts, ring, first, ratio, *tail, rows, torch.float32)
        first += right
    assert torch.equal(rows[: TOTAL // ratio], wanted[: TOTAL // ratio])
    needed = torch.arange(max(0, (TOTAL // ratio - series + 1) * ratio), TOTAL) % len(ring.kv)
    assert_same_ring(TokenRing(*(part[needed] for part in ring)), TokenRing(*(part[needed] for part in plain)))


FORMS = [
    ("none", "rows"), ("kv", "rows"), ("kv", "entries"), ("index", "rows"), ("index", "fp8"), ("index", "fp4"),
    ("row", "rows"), ("row", "fp8"), ("none", "entries"), ("none", "fp8"), ("none", "fp4"),
]  # fmt: skip
IN_FP32 = [("kv", "entries"), ("index", "rows"), ("index", "fp4"), ("row", "rows")]  # the others are the slow test's


def in_fp32(rounding, form):
    """Some are slow. A GPU's rsqrt is its own, and fp32 keeps the last bits of a norm where nothing else rounds it."""
    kept = form in ("rows", "entries") and rounding in ("none", "kv")
    return [*[pytest.mark.interpreted] * kept, *[pytest.mark.slow] * ((rounding, form) not in IN_FP32)]


@on_triton
@pytest.mark.parametrize(
    ("dtype", "rounding", "form"),
    [
        *((torch.bfloat16, *pair) for pair in FORMS),
        *(pytest.param(torch.float32, *pair, marks=in_fp32(*pair)) for pair in FORMS),
    ],
)
def test_triton_and_the_reference_store_the_same_bits_where_every_sum_is_exact(dtype, rounding, form):
    ratio, series, width = (8, 1, 80) if rounding == "kv" or form == "entries" else (4, 2, 64)
    kv, gate = whole_numbers(TOTAL, series, width)
    norm, freqs = norm_of(width), torch.zeros(ROPE // 2)
    sides = [(op, first_ring(ratio, series, width), cache(form, width, dtype)) for op in BACKENDS.values()]
    for first, *part in chunks(kv, gate):
        given = [op(*part, ring, first, ratio, norm, EPS, freqs, rounding, rows, dtype) for op, ring, rows in sides]
        end = first + len(part[0])
        for _, ring, _ in sides:
            assert_same_ring(ring, ring_of(kv[:end], gate[:end], 0, len(ring.kv)))
        assert torch.equal(*given)
        assert torch.equal(bits(sides[0][2]), bits(sides[1][2]))  # those that are not written stay, too
        assert (bits(sides[0][2])[end // ratio :] == 0xFF).all()
    assert not stored.decode(forms.first(sides[0][2], TOTAL // ratio)).isnan().any()


AS_THE_MODEL = {
    "none": Rounding(NONE, NONE, NONE),
    "kv": Rounding(NONE, FP8, NONE),
    "index": Rounding(NONE, NONE, FP4),
    "row": Rounding(NONE, NONE, FP8),
}


def model_compressor(kind, freqs, dtype, rounding):
    nobody, formats = SimpleNamespace(note=lambda *_: None), CacheFormats(dtype, "dtype", "dtype")
    numerics = Arithmetic(REFERENCE, rounding, dtype, formats, nobody, {})
    made = kind.__new__(kind)
    made.arithmetic, made.coded, made.eps = numerics, False, EPS
    made.rotation = Rotation(freqs)
    return made


@pytest.mark.parametrize(("kind", "rounding", "form", "shape"), [
    (EntryCompressor, "none", "rows", (4, 2, 80)), (EntryCompressor, "kv", "entries", (8, 1, 80)),
    (EntryCompressor, "kv", "rows", (4, 2, 80)), (KeyCompressor, "none", "rows", (4, 2, 64)),
    (KeyCompressor, "index", "rows", (4, 2, 64)), (KeyCompressor, "index", "fp4", (4, 2, 64)),
    (KeyCompressor, "row", "rows", (4, 2, 64)), (KeyCompressor, "row", "fp8", (4, 2, 64)),
])  # fmt: skip
@EVERY_BACKEND
def test_it_is_what_the_model_does(compress, kind, rounding, form, shape):
    (ratio, series, width), dtype = shape, torch.bfloat16
    kv, gate = whole_numbers(TOTAL, series, width, seed=2)
    norm = norm_of(width)
    freqs = torch.zeros(ROPE // 2) if kind is KeyCompressor else frequencies(ROPE, 1e4)
    model = model_compressor(kind, freqs, dtype, AS_THE_MODEL[rounding])
    model.norm, model.wkv, model.wgate = norm, itemgetter(0), itemgetter(1)
    frontier = Frontier(ratio, width, overlap=series == 2, device=HERE)
    for part in frontier.ring():
        part.fill_(torch.nan)
    entries = Entries(ratio, cache(form, width, dtype))
    ring, rows = first_ring(*shape), cache(form, width, dtype)
    for first, *part in chunks(kv, gate):
        model(part, SimpleNamespace(first=first, count=len(part[0]), angles_of_windows=Rotation.at), frontier, entries)
        compress(*part, ring, first, ratio, norm, EPS, freqs, rounding, rows, dtype)
        assert_same_ring(frontier.ring(), ring)
    ours, expected = (bits(forms.first(x, entries.count)) for x in (rows, entries.data))
    if kind is KeyCompressor:
        assert torch.equal(ours, expected)
    else:  # a cosine may differ in its last bit, and one rotated number in 2^13 be rounded another way
        assert (ours != expected).float().mean() < 0.01
        decoded = [stored.decode(forms.first(x, entries.count)) for x in (rows, entries.data)]
        assert (decoded[0] - decoded[1]).abs().max() <= 2**-6 * decoded[1].abs().max()


@pytest.mark.parametrize("where", ["kv", "gate"])
@pytest.mark.parametrize("form", ["rows", "entries", "fp8", "fp4"])
def test_what_is_not_finite_spoils_the_entries_that_it_enters(form, where):
    ratio, series, width = (8, 1, 80) if form == "entries" else (4, 2, 64)
    kv, gate = draw(40, series, width)
    bad = {3: torch.nan, 17: torch.inf, 30: -torch.inf}  # no entry reads two of them
    for token, value in bad.items():
        {"kv": kv, "gate": gate}[where][token, 5] = value  # 5 is of the first series, where there are two
    spoilt = []
    for compress in BACKENDS.values():
        ring, rows, freqs = first_ring(ratio, series, width), cache(form, width, torch.bfloat16), torch.zeros(ROPE // 2)
        compress(kv, gate, ring, 0, ratio, torch.ones(width), EPS, freqs, "none", rows, torch.bfloat16)
        spoilt.append(stored.decode(rows).isnan()[: 40 // ratio])
    assert all(torch.equal(spoilt[0], other) for other in spoilt)
    harmful = [token for token, value in bad.items() if where == "kv" or value != -torch.inf]
    assert spoilt[0].any(1).nonzero().flatten().tolist() == [token // ratio + (series == 2) for token in harmful]


@EVERY_BACKEND
def test_no_tokens_change_nothing(compress):
    ring, rows = first_ring(4, 2, 32), cache("rows", 32, torch.float32)
    given = compress(*draw(0, 2, 32), ring, 7, 4, torch.ones(32), EPS, torch.zeros(2), "none", rows, torch.float32)
    assert given.shape == (0, 32)
    assert rows.isnan().all()
    assert ring.kv.isnan().all()


@EVERY_BACKEND
def test_forms_that_are_coded_elsewhere_are_refused(compress):
    rotated = CodedRows(torch.zeros(20), torch.zeros(20, 16, dtype=torch.uint8), 4, None)
    rest = torch.ones(32), EPS, torch.zeros(2), "none", rotated, torch.float32
    with pytest.raises(NotImplementedError, match="CodedRows"):
        compress(*draw(4, 2, 32), first_ring(4, 2, 32), 0, 4, *rest)


@on_triton
def test_triton_refuses_rows_that_do_not_fit():
    rest = torch.ones(32), EPS, torch.zeros(2), "none", cache("rows", 32, torch.float32), torch.float32
    with pytest.raises(AssertionError, match="20 rows for 84 tokens"):
        triton.compress_at_once(*draw(4, 2, 32), first_ring(4, 2, 32), 80, 4, *rest)


@pytest.mark.parametrize("form", ["rows", "entries", "fp8", "fp4"])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-4, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
def test_rows_are_stored_as_the_cache_does(form, size, store, dtype):
    x = torch.randn(6, 96 - 16 * (form == "entries"), generator=torch.Generator().manual_seed(3)) * size
    x[1, 3], x[2, 40] = torch.nan, torch.inf
    x[3, ::2] *= -0.0
    pair = cache(form, x.shape[1], torch.bfloat16), cache(form, x.shape[1], torch.bfloat16)
    x = strided(x.to(dtype))
    store(pair[0], 2, x)
    forms.write(pair[1], 2, x)
    ours, expected = (stored.decode(rows) for rows in pair)
    assert torch.equal(ours.isnan(), expected.isnan())
    assert torch.equal(ours.nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32))
