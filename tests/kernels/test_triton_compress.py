"""The compressor's tail in one op against its equation, against the model's own compressors, and against float64."""

from types import SimpleNamespace

import pytest
import torch

from kernels.compress import reference
from kernels.compress.triton import compress
from kernels.formats import rows as forms
from kernels.formats import rows_reference as stored
from kernels.formats.stored import CodedRows, Window
from kernels.ops import REFERENCE
from kernels.rope.reference import angles, frequencies, rotate
from model.arithmetic import Arithmetic
from model.cache.entries import Entries
from model.cache.formats import CacheFormats
from model.cache.frontier import Frontier
from model.compressor import EntryCompressor, KeyCompressor

HERE = torch.device("cpu")
EPS = 1e-6
ROPE = 16
CHUNKS = (3, 1, 2, 9, 1, 1, 1, 1, 17, 7, 4)  # some close no window, some one, some many; at every place in a window
CAPACITY = 20
GEOMETRY = [(4, 2, 64), (8, 1, 80), (3, 2, 32), (20, 2, 32), (40, 1, 64)]  # ratio, series, width


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


def window(ratio, series, width):
    """What a model starts with, and NaN where nothing has been stored."""
    kept = ratio if series == 2 else 0
    own = torch.full((2, ratio, series * width), torch.nan)
    return Window(own[0], own[1], torch.zeros(kept, width), torch.full((kept, width), -torch.inf))


def draw(n, series, width, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, series * width, generator=g), 3 * torch.randn(n, series * width, generator=g)


def exact(n, series, width, seed=0):
    """Small integers of which the softmax takes one: every sum is exact, in whichever order."""
    g = torch.Generator().manual_seed(seed)
    kv = torch.randint(-8, 9, (n, series * width), generator=g).float()
    return kv, torch.rand(n, series * width, generator=g).argsort(0).float() * 200


def chunks(*tensors):
    first = 0
    for t in CHUNKS:
        yield first, *(x[first : first + t] for x in tensors)
        first += t


TOTAL = sum(CHUNKS)


def same_state(ours, expected, filled):
    for name in ("kv", "gate"):
        assert torch.equal(getattr(ours, name)[:filled], getattr(expected, name)[:filled]), name
    for name in ("previous_kv", "previous_gate"):
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name


FORMS = [
    ("none", "rows"), ("kv", "rows"), ("kv", "entries"), ("index", "rows"), ("index", "fp8"), ("index", "fp4"),
    ("none", "entries"), ("none", "fp8"), ("none", "fp4"),
]  # fmt: skip
IN_FP32 = [("kv", "entries"), ("index", "rows"), ("index", "fp4")]  # the others are the slow test's


@pytest.mark.parametrize(
    ("dtype", "rounding", "form"),
    [
        *((torch.bfloat16, *pair) for pair in FORMS),
        *((torch.float32, *pair) for pair in IN_FP32),
        *(pytest.param(torch.float32, *pair, marks=pytest.mark.slow) for pair in FORMS if pair not in IN_FP32),
    ],
)
def test_rows_and_state_are_bit_equal_where_every_sum_is_exact(dtype, rounding, form):
    ratio, series, width = (8, 1, 80) if rounding == "kv" or form == "entries" else (4, 2, 64)
    kv, gate = exact(TOTAL, series, width)
    norm, freqs = torch.rand(width, generator=torch.Generator().manual_seed(1)) + 0.5, torch.zeros(ROPE // 2)
    sides = [(op, window(ratio, series, width), cache(form, width, dtype)) for op in (compress, reference.compress)]
    for first, *part in chunks(kv, gate):
        for op, state, rows in sides:
            op(*part, state, first, norm, EPS, freqs, rounding, rows, dtype)
        end = first + len(part[0])
        same_state(sides[0][1], sides[1][1], end % ratio)
        assert torch.equal(bits(sides[0][2]), bits(sides[1][2]))  # those that are not written stay, too
        assert (bits(sides[0][2])[end // ratio :] == 0xFF).all()
    assert not stored.decode(forms.first(sides[0][2], TOTAL // ratio)).isnan().any()


def model_compressor(kind, width, freqs, dtype, deployed):
    nobody, formats = SimpleNamespace(note=lambda *_: None), CacheFormats(dtype, "dtype", "dtype")
    numerics = Arithmetic(REFERENCE, deployed, dtype, formats, nobody, {})
    made = kind.__new__(kind)
    made.arithmetic, made.coded, made.eps = numerics, False, EPS
    made.rope_dim, made.width = 2 * len(freqs), width
    positions = lambda first, n, step: torch.arange(first, first + n * step, step)  # noqa: E731
    made.rotation = SimpleNamespace(at=lambda *where: angles(positions(*where), freqs))
    return made


@pytest.mark.parametrize(("kind", "rounding", "form", "shape"), [
    (EntryCompressor, "none", "rows", (4, 2, 80)), (EntryCompressor, "kv", "entries", (8, 1, 80)),
    (EntryCompressor, "kv", "rows", (4, 2, 80)), (KeyCompressor, "none", "rows", (4, 2, 64)),
    (KeyCompressor, "index", "rows", (4, 2, 64)), (KeyCompressor, "index", "fp4", (4, 2, 64)),
])  # fmt: skip
@pytest.mark.parametrize("op", [compress, reference.compress])
def test_it_is_what_the_model_does(kind, rounding, form, shape, op):
    (ratio, series, width), dtype = shape, torch.bfloat16
    kv, gate = exact(TOTAL, series, width, seed=2)
    norm = torch.rand(width, generator=torch.Generator().manual_seed(1)) + 0.5
    freqs = torch.zeros(ROPE // 2) if kind is KeyCompressor else frequencies(ROPE, 1e4)
    model = model_compressor(kind, width, freqs, dtype, rounding != "none")
    frontier = Frontier(ratio, width, overlap=series == 2, device=HERE)
    entries = Entries(ratio, cache(form, width, dtype))
    state, rows = window(*shape), cache(form, width, dtype)
    for first, *part in chunks(kv, gate):
        model.project = lambda _x, _first, part=part: part
        model.project.norm = norm
        model(part[0], SimpleNamespace(first=first), frontier, entries)
        op(*part, state, first, norm, EPS, freqs, rounding, rows, dtype)
        same_state(state, frontier, frontier.filled)
    ours, expected = (bits(forms.first(x, entries.count)) for x in (rows, entries.data))
    if kind is KeyCompressor:
        assert torch.equal(ours, expected)
    else:  # a cosine may differ in its last bit, and one rotated number in 2^13 be rounded another way
        assert (ours != expected).float().mean() < 0.01
        decoded = [stored.decode(forms.first(x, entries.count)) for x in (rows, entries.data)]
        assert (decoded[0] - decoded[1]).abs().max() <= 2**-6 * decoded[1].abs().max()


def in_float64(kv, gate, ratio, series, width, norm, freqs):
    """Entries from all tokens at once, no state kept, and how far fp32 may be from them."""
    rows, bounds = [], []
    for end in range(ratio, len(kv) + 1, ratio):
        start = end - ratio
        values, gates = kv[start:end, -width:], gate[start:end, -width:]
        if series == 2 and start > 0:
            before = slice(start - ratio, start)
            values, gates = torch.cat((values, kv[before, :width])), torch.cat((gates, gate[before, :width]))
        values, gates = values.double(), gates.double()
        pooled = (values * gates.softmax(0)).sum(0)
        scale = norm.double() * (pooled.square().mean() + EPS).rsqrt()
        cos, sin = angles(torch.tensor([start]), freqs)
        rows.append(rotate((pooled * scale)[None].float(), cos, sin)[0])
        # a sum of n terms below the largest, exponentials of two ulp, a division, a norm, and a rotation of pairs
        bounds.append((len(values) + 16) * 2.0**-23 * values.abs().max() * scale.max())
    return torch.stack(rows), torch.stack(bounds).float()[:, None] * 2


@pytest.mark.parametrize(("ratio", "series", "width"), GEOMETRY)
@pytest.mark.parametrize("op", [compress, reference.compress])
def test_entries_are_those_of_all_tokens_at_once(ratio, series, width, op):
    kv, gate = draw(TOTAL, series, width)
    norm, freqs = torch.rand(width, generator=torch.Generator().manual_seed(1)) + 0.5, frequencies(ROPE, 1e4)
    state, rows = window(ratio, series, width), cache("rows", width, torch.float32)
    for first, *part in chunks(kv, gate):
        op(*part, state, first, norm, EPS, freqs, "none", rows, torch.float32)
    expected, bound = in_float64(kv, gate, ratio, series, width, norm, freqs)
    assert len(expected) == TOTAL // ratio
    assert ((rows[: len(expected)] - expected).abs() <= bound).all()
    assert rows[len(expected) :].isnan().all()


@pytest.mark.parametrize("t", [1, 3, 5, 12])
def test_the_position_may_be_a_tensor_far_into_a_context(t):
    """The angle is that of a position near a million, rounded to fp32 as the reference rounds it."""
    ratio, width, first = 4, 32, 1_000_001 + (t == 3)
    kv, gate = draw(t, 2, width, seed=4)
    norm, freqs = torch.ones(width), frequencies(ROPE, 1e4)
    found = []
    for op, where in ((reference.compress, first), (compress, first), (compress, torch.tensor(first))):
        rows, state = torch.full(((first + t) // ratio + 1, width), torch.nan), window(ratio, 2, width)
        past = draw(ratio, 2, width, seed=5)
        for stored_part, part in zip(state, (*past, past[0][:, :width], past[1][:, :width]), strict=True):
            stored_part.copy_(part)
        state.kv[first % ratio :] = torch.nan  # must not be read
        op(kv, gate, state, where, norm, EPS, freqs, "none", rows, torch.float32)
        found.append((rows[first // ratio - 1 :], state))
    for rows, state in found[1:]:
        torch.testing.assert_close(rows, found[0][0], rtol=0, atol=1e-5, equal_nan=True)
        same_state(state, found[0][1], (first + t) % ratio)
    assert torch.equal(found[1][0].nan_to_num(), found[2][0].nan_to_num())


@pytest.mark.parametrize("where", ["kv", "gate"])
@pytest.mark.parametrize("form", ["rows", "entries", "fp8", "fp4"])
def test_what_is_not_finite_spoils_the_entries_that_it_enters(form, where):
    ratio, series, width = (8, 1, 80) if form == "entries" else (4, 2, 64)
    kv, gate = draw(40, series, width)
    bad = {3: torch.nan, 17: torch.inf, 30: -torch.inf}  # no entry reads two of them
    for token, value in bad.items():
        {"kv": kv, "gate": gate}[where][token, 5] = value  # 5 is of the first series, where there are two
    spoilt = []
    for op in (compress, reference.compress):
        state, rows = window(ratio, series, width), cache(form, width, torch.bfloat16)
        op(kv, gate, state, 0, torch.ones(width), EPS, torch.zeros(ROPE // 2), "none", rows, torch.bfloat16)
        spoilt.append(stored.decode(rows).isnan()[: 40 // ratio])
    assert torch.equal(*spoilt)
    harmful = [token for token, value in bad.items() if where == "kv" or value != -torch.inf]
    assert spoilt[0].any(1).nonzero().flatten().tolist() == [token // ratio + (series == 2) for token in harmful]


def test_no_tokens_change_nothing():
    state, rows = window(4, 2, 32), cache("rows", 32, torch.float32)
    compress(*draw(0, 2, 32), state, 7, torch.ones(32), EPS, torch.zeros(2), "none", rows, torch.float32)
    assert rows.isnan().all()
    assert state.kv.isnan().all()


def test_rows_that_do_not_fit_and_forms_that_are_coded_elsewhere_are_refused():
    rest = torch.ones(32), EPS, torch.zeros(2), "none"
    with pytest.raises(AssertionError, match="20 rows for 84 tokens"):
        compress(*draw(4, 2, 32), window(4, 2, 32), 80, *rest, cache("rows", 32, torch.float32), torch.float32)
    rotated = CodedRows(torch.zeros(20), torch.zeros(20, 16, dtype=torch.uint8), 4, None)
    for op in (compress, reference.compress):
        with pytest.raises(NotImplementedError, match="CodedRows"):
            op(*draw(4, 2, 32), window(4, 2, 32), 0, *rest, rotated, torch.float32)


@pytest.mark.parametrize("form", ["rows", "entries", "fp8", "fp4"])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-4, 1.0, 1e4, 1e30])
def test_the_reference_stores_as_the_cache_does(form, size):
    x = torch.randn(6, 96 - 16 * (form == "entries"), generator=torch.Generator().manual_seed(3)) * size
    x[1, 3], x[2, 40] = torch.nan, torch.inf
    x[3, ::2] *= -0.0
    pair = cache(form, x.shape[1], torch.bfloat16), cache(form, x.shape[1], torch.bfloat16)
    stored.write(pair[0], 2, x.bfloat16())
    forms.write(pair[1], 2, x.bfloat16())
    ours, expected = (stored.decode(rows) for rows in pair)
    assert torch.equal(ours.isnan(), expected.isnan())
    assert torch.equal(ours.nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32))
