"""The indexer on every backend: scores of an equation in float64, and what a stable sort selects by them."""

import functools
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numba import types

from fathom.kernels.compiled import address, compiled, numbers
from fathom.kernels.formats import coded_rows, lloyd_max, rows
from fathom.kernels.formats.cpu_rows import KIND, addresses, row_arrays
from fathom.kernels.formats.rows_reference import decode
from fathom.kernels.formats.stored import Fp4Keys, Fp8Keys
from fathom.kernels.indexer import bound as index_bound
from fathom.kernels.indexer import cpu, cpu_few, reference
from fathom.kernels.ops import CPU, REFERENCE
from fathom.kernels.quantise.reference import quantise_fp8, simulate_fp4
from tests.kernels.every_backend import HAS_TRITON, every_backend, on_triton
from tests.peak_memory import peak_bytes

HERE = torch.device("cpu")
NAN, INF = math.nan, math.inf
FORMS = ("bf16", "fp32", "fp8", "fp4")
_I64 = types.int64
FAR = 10**6  # a position from which every entry is seen
NATIVE = pytest.mark.skipif(not index_bound.native(HERE), reason="no native product of int8 here")


@compiled((KIND, _I64, KIND, _I64, _I64, _I64, _I64))
def _score_all(queries, weights, keys, tokens, heads, count, scores):
    cpu_few._score(
        row_arrays(queries), numbers(weights, np.float32), row_arrays(keys), tokens, heads, count,
        numbers(scores, np.float32),
    )  # fmt: skip


def scores_of_few(q, head_weights, keys):
    """`kernels.indexer.reference.index_scores` as `select_few` has them."""
    t, h, d = q.shape
    n = rows.length(keys)
    (queries, given), (stored, kept) = addresses(q.reshape(t * h, d)), addresses(keys)
    head_weights, scores = head_weights.contiguous(), torch.empty(t, cpu_few.columns(n))
    _score_all(queries, address(head_weights), stored, t, h, n, address(scores))
    del given, kept
    return scores[:, :n]


SCORES = {
    "reference": reference.index_scores,
    "cpu": lambda q, weights, keys: cpu._scores(q.float(), weights, keys, 0, rows.length(keys)),
    "cpu few": scores_of_few,
}
ALL_BOUNDED = {"FEW_ROWS": 0, "FEW_ENTRIES": 0, "SPARSE": 0}
SMALL_TILES = {"KEYS": 4 * 90, "PAIRS": 40 * 64, "PENDING": 50, "BLOCK": 3, "SCORED": 60}
# Ways to select: the ops, and the constants with which tiles end everywhere.
WAYS = {
    "reference": (REFERENCE.select, reference, {}),
    "cpu": (CPU.select, cpu, {}),
    "cpu, all as few": (CPU.select, cpu, {"FEW": 1 << 30}),
    "cpu, small tiles": (
        CPU.select,
        cpu,
        {"FEW": 0, "PER_HEAD": 21, "FIRST": 1, "MERGED": 20},
    ),  # k entries, then 20 numbers
    "bounds": (CPU.select, cpu, ALL_BOUNDED),
    "bounds, small tiles": (CPU.select, cpu, ALL_BOUNDED | SMALL_TILES),
}
PICKS = ["reference", "cpu", "cpu few"]
if HAS_TRITON:
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from fathom.kernels.indexer import topk, triton
    from fathom.kernels.triton_ops import TRITON

    SCORES["triton"] = triton.index_scores
    WAYS["triton"] = (TRITON.select, triton, {"KEYS": 32, "SCRATCH": 250})  # scores of two tokens, or one
    PICKS += ["whole rows", "rows in a tile", "parts"]
EVERY_SCORE = pytest.mark.parametrize("index_scores", SCORES.values(), ids=SCORES)


def ways(*names):
    """Of WAYS: those of these names that there are."""
    found = [pytest.param(name, marks=NATIVE if "bounds" in name else ()) for name in names if name in WAYS]
    return pytest.mark.parametrize("way", found, indirect=True)


@pytest.fixture
def way(request, monkeypatch):
    """A way to select; those by bounds must have used them."""
    select, module, constants = WAYS[request.param]
    for name, value in constants.items():
        monkeypatch.setattr(module, name, value)
    calls, bounded = [], cpu._best_bounded
    monkeypatch.setattr(cpu, "_best_bounded", lambda *given: calls.append(1) or bounded(*given))
    yield SimpleNamespace(name=request.param, select=select, triton=request.param == "triton")
    assert bool(calls) == ("bounds" in request.param)


def strided(x):
    """The same values with a stride in the last dim, large noise between them."""
    return torch.stack((x, torch.full_like(x, 100.0)), -1)[..., 0]


def stored(form, x):
    if form in {"bf16", "fp32"}:
        return x.to(torch.bfloat16 if form == "bf16" else torch.float32)
    keys = rows.fp8_keys(*x.shape, HERE) if form == "fp8" else rows.fp4_keys(*x.shape, HERE)
    rows.write(keys, 0, x)
    return keys


def spoilt(keys, seen):
    """Keys beyond `seen` become NaN."""
    match keys:
        case Fp8Keys():
            keys.scale[seen:] = NAN
        case Fp4Keys():
            keys.scale.view(torch.uint8)[seen:] = 255
        case _:
            keys[seen:] = NAN
    return keys


def whole_numbers(t, h, d, n):
    """Scores exact in fp32 in every order, and keys in every form; ties are common, most of all 0.0 and -0.0."""
    g = torch.Generator().manual_seed(hash((t, h, d, n)) % 2**31)
    q, keys = torch.randint(-2, 3, (t, h, d), generator=g).float(), torch.randint(-1, 2, (n, d), generator=g).float()
    return q, torch.randint(-1, 3, (t, h), generator=g).float(), keys


def real_numbers(t, h, d, n, seed=0):
    g = torch.Generator().manual_seed(seed)
    scale = 2.0 ** torch.randint(-9, 9, (n, 1), generator=g)
    return torch.randn(t, h, d, generator=g), torch.randn(t, h, generator=g), torch.randn(n, d, generator=g) * scale


def exact_scores(q, weights, keys):
    return torch.einsum("th,thn->tn", weights.double(), torch.einsum("thd,nd->thn", q.double(), keys.double()).relu())


def best(scores, first, ratio, k, ties=None):
    """The k best entries that each row sees by a stable sort, ascending, then -1; `ties`: of cuts, to be added to."""
    out = np.full((len(scores), min(k, scores.shape[1])), -1, np.int32)
    for i, row in enumerate(scores.numpy()):
        order = np.argsort(-row[: (first + i + 1) // ratio], kind="stable")
        out[i, : len(order[:k])] = np.sort(order[:k])
        if ties is not None and len(order) > k and row[order[k - 1]] == row[order[k]]:
            ties.append(i)
    return torch.from_numpy(out)


# --- selection, by scores that are exact


MERGES = list(itertools.product((19, 20, 21, 39, 40, 41, 100), ((1, 5), (3, 7), (3, 19), (3, 20), (40, 5)), (0, 2, 4)))
BOUNDS = itertools.product(((1, 1), (40, 3), (90, 8), (10, 64)), (90, 400), (1, 16), (0, 390, FAR))
SIZES = itertools.product(
    ((1, 1), (1, 16), (70, 16), (30, 64)), (0, 1, 16, 17, 18, 900, 1500), (1, 17, 512), (0, 50, 3500, 100_000)
)
CASES = {  # tokens, heads, entries, k, position
    "sizes": [(*shape, *rest) for shape, *rest in SIZES],
    "bounds": [(*shape, *rest) for shape, *rest in BOUNDS],
    # 40 tokens see entry counts that differ by ten, which is two merges of five
    "merges": [(t, 3, n, k, blocks * n) for n, (t, k), blocks in MERGES],
    "few": [(2, 3, n, k, FAR) for n, k in ((1, 1), (16, 17), (17, 17), (18, 17), (33, 17))],
}
RUN = {"cpu, small tiles": "merges", "bounds": "merges bounds", "bounds, small tiles": "bounds", "triton": "few"}


@functools.cache
def with_scores(t, h, n):
    numbers = whole_numbers(t, h, 4, n)
    return *numbers, exact_scores(*numbers)


@functools.cache
def exact_case(t, h, n, k, first):
    """Arguments of `select`, NaN where nobody sees; what is selected; and how many cuts fall between equal scores."""
    q, weights, keys, scores = with_scores(t, h, n)
    expected = best(scores, first, 4, k, ties := [])
    seen = spoilt(keys.clone(), min((first + t) // 4, n))
    return (strided(q), strided(weights), strided(seen), first, 4, k), expected, len(ties)


@ways(*WAYS)
def test_entries_are_those_of_a_stable_sort(way):
    ties = 0
    for case in itertools.chain.from_iterable(CASES[name] for name in RUN.get(way.name, "sizes merges bounds").split()):
        args, expected, cuts = exact_case(*case)
        found = way.select(*args)
        assert found.dtype == torch.int32
        assert torch.equal(found, expected), case
        ties += cuts
    assert ties > (1 if way.triton else 500), "few cuts fall between equal scores"


@ways(*WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_keys_in_every_form_select_as_their_numbers_do(way, form):
    q, weights, keys = whole_numbers(3, 3, 32, 100)
    for first in {"bf16": (0, 69, FAR), "fp32": (FAR,)}.get(form, (150,)):
        narrow = spoilt(stored(form, keys), (first + 3) // 4)
        expected = best(exact_scores(q, weights, keys), first, 4, 17)
        for where in (first, torch.tensor(first)) if way.triton else (first,):  # a position on the device
            assert torch.equal(way.select(q.bfloat16(), weights, narrow, where, 4, 17), expected)


@ways("reference", "cpu", "bounds")  # Triton's products of fp32 keys have tiles of another shape
@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_keys_of_real_numbers_select_as_these_decoded(way, form):
    q, weights, numbers = real_numbers(64, 8, 128, 3000)
    q, keys = simulate_fp4(q, 32), stored(form, numbers)
    expected = way.select(q, weights, rows.read(keys, 0, 3000), 12_000, 4, 16)
    assert torch.equal(way.select(q, weights, keys, 12_000, 4, 16), expected)


@ways(*WAYS)
def test_scores_of_fp4_numbers_are_exact(way):
    # Twice a number of E2M1 is a whole one of at most 12. With scales from 1/8 to 1, products of two and sums of 128 of
    # these are whole multiples of 2^-8 below 2^15, exact in fp32, and so they are times weights of up to 8.
    g, t = torch.Generator().manual_seed(1), 2 if way.triton else 60
    q = simulate_fp4(torch.randn(60, 8, 128, generator=g).clamp(-2.9, 2.9), 32)[:t]
    keys = simulate_fp4(torch.randn(1500, 128, generator=g).clamp(-2.9, 2.9) + 0.05, 32)
    weights = torch.randint(-2, 9, (60, 8), generator=g).float()[:t]
    n = 100 if way.triton else 1500 if "bounds" in way.name else 300
    found = way.select(q.bfloat16(), weights, keys[:n].bfloat16(), 5900, 4, 16)
    assert torch.equal(found, best(exact_scores(q, weights, keys[:n]), 5900, 4, 16))


@ways(*WAYS)
@pytest.mark.parametrize("case", ["negative weights", "no weights", "one key", "half shut", "shut"])
def test_of_scores_that_are_nearly_all_the_same_the_lower_entries_are_selected(way, case, monkeypatch):
    monkeypatch.setattr(cpu, "HARD", 20)  # so many may pass before a token is left to its scores
    t, h, n, k = (3, 2, 5000, 512) if case == "shut" else (60, 3, 2000, 16)
    if way.triton or "small" in way.name:
        t, n, k = (2, 40, 12) if way.triton else (10, 500, 16)
    q, weights, keys = whole_numbers(t, h, 8, n)
    weights = {"negative weights": -weights.abs() - 1, "no weights": weights * 0}.get(case, weights.abs() + 1)
    weights[::2] = weights[::2].abs()  # other tokens are as ever
    if case == "one key":
        keys[:] = keys[0]
    elif "shut" in case:
        q[1::2], keys = -q[1::2].abs(), keys.abs()
        q[::2] = -q[::2].abs() if case == "shut" else q[::2]
    assert torch.equal(way.select(q, weights, keys, FAR, 4, k), best(exact_scores(q, weights, keys), FAR, 4, k))


@every_backend
def test_rows_end_in_minus_one_and_may_be_empty(ops):
    for n, k in ((0, 4), (3, 4), (4, 4)):
        out = ops.select(torch.ones(2, 1, 32), torch.ones(2, 1), torch.ones(n, 32), 6, 4, k)
        assert out.tolist() == [[0, -1, -1, -1][:n], [0, 1, -1, -1][:n]]
    for t, n, k in ((0, 10, 4), (2, 0, 4), (1, 1, 1)):
        out = ops.select(*whole_numbers(t, 2, 32, n), 100, 4, k)
        assert torch.equal(out, torch.zeros(t, min(n, k), dtype=torch.int32))


# --- selection, by scores that are rounded or not finite


@ways(*WAYS)
@pytest.mark.parametrize("weights_are", ["mixed", "positive"])
def test_real_scores_differ_from_the_equation_by_near_ties_alone(way, weights_are):
    t, h, d, k = 2 if way.triton else 50, 8, 128, 16
    n = 5000 if way.name == "bounds" else 100 if way.triton else 1000
    g = torch.Generator().manual_seed(8)
    q, keys, weights = torch.randn(t, h, d, generator=g), torch.randn(n, d, generator=g), torch.randn(t, h, generator=g)
    if weights_are == "positive":
        weights = weights.abs()
    ours, scores = way.select(q, weights, keys, FAR, 4, k).long(), exact_scores(q, weights, keys)
    size = torch.einsum("th,n->tn", weights.double().abs() * q.double().norm(dim=-1), keys.double().norm(dim=-1))
    off = (d + h + 2) * 2.0**-24 * size.amax(1)  # what fp32 may round of a score
    assert (scores.gather(1, ours).amin(1) >= scores.topk(k).values[:, -1] - 2 * off).all()
    assert (ours.diff(dim=1) > 0).all()


@ways("reference", "cpu", "cpu, small tiles", "bounds", "triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("d", "bits", "seed"), [(128, 8, 0), (64, 3, None), (16, 6, 0)])
def test_coded_keys_select_as_what_they_stand_for(way, dtype, d, bits, seed):
    """But near ties: a step of a rotation rounds half an ulp of a row, Triton's fp16 of both sides 2^-12 each."""
    t, h, k, n = 2 if way.triton else 50, 8, 16, 100 if way.triton else 1000
    g = torch.Generator().manual_seed(d)
    q, weights = torch.randn(t, h, d, generator=g).to(dtype), torch.randn(t, h, generator=g)
    keys = coded_rows.allocate(n, d, bits, HERE, seed)
    rows.write(keys, 0, torch.randn(n, d, generator=g) * torch.rand(n, 1, generator=g))
    numbers = decode(keys)
    scores = exact_scores(q, weights, numbers)
    size = torch.einsum("th,n->tn", weights.double().abs() * q.double().norm(dim=-1), numbers.double().norm(dim=-1))
    narrow = way.triton and dtype == torch.bfloat16
    off = ((d + h + 2 + 2 * math.log2(d)) * 2.0**-24 + (2.0**-11 if narrow else 0)) * size.amax(1)
    for first in (FAR, 4 * n - 20, *([torch.tensor(FAR)] if way.triton else [])):
        spoilt = keys._replace(norm=keys.norm.clone())
        spoilt.norm[(int(first) + t) // 4 :] = NAN
        ours = way.select(q, weights, spoilt, first, 4, k).long()
        seen = scores.masked_fill(torch.arange(n) >= ((int(first) + torch.arange(t) + 1) // 4)[:, None], -INF)
        assert (seen.gather(1, ours).amin(1) >= seen.topk(k).values[:, -1] - 2 * off).all()
        assert (ours.diff(dim=1) > 0).all()


@pytest.mark.parametrize("name", [name for name in SCORES if "cpu" not in name])  # those rotate queries elsewhere
@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_every_width_are_scored(name, bits):
    codes = torch.arange(64 * 4).view(4, 64).sub(128 - 2 ** (bits - 1)).clamp(0, 2**bits - 1).to(torch.uint8)
    keys = coded_rows.allocate(4, 64, bits, HERE, 1)
    keys.codes.copy_(lloyd_max.pack(codes, bits))
    keys.norm.copy_(torch.tensor([1.0, 2.0, NAN, 0.5]))
    q = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(bits))
    weights = torch.tensor([[1.0, -2.0, 0.5], [0.25, 1.0, -1.0]])
    found, wanted = SCORES[name](q, weights, keys), exact_scores(q, weights, decode(keys))
    assert found[:, 2].isnan().all()
    length = decode(keys)[[0, 1, 3]].norm(dim=1).max()
    bound = (64 + 3 + 2 + 12) * 2.0**-24 * (weights.abs() * q.norm(dim=-1)).sum(1).max() * length
    assert (found - wanted)[:, [0, 1, 3]].abs().max() <= bound


@ways(*WAYS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", ["keys", "all keys", "q", "weights"])
def test_bad_numbers_leave_rows_visible_and_distinct(way, bad, place):
    t, n, k = (3, 40, 12) if way.triton else (6, 400, 50)
    q, weights, keys = whole_numbers(t, 2, 4, n)
    some = slice(t // 3, t // 3 * 2)
    first = 4 * n - 10
    expected = best(exact_scores(q, weights, keys), first, 4, k)
    {"keys": keys[::3], "all keys": keys, "q": q[some], "weights": weights[some]}[place][:] = bad
    found = way.select(q, weights, keys, first, 4, k)
    for i, row in enumerate(found.tolist()):
        assert row == sorted(set(row)), "repeated or out of order"
        assert row[0] >= 0
        assert row[-1] < min((first + i + 1) // 4, n)
    if place in {"q", "weights"}:  # the other tokens' rows are as ever
        found[some] = expected[some]
        assert torch.equal(found, expected)


@ways(*WAYS)
def test_an_infinite_score_is_selected(way):
    g, t, n = torch.Generator().manual_seed(11), *((2, 90) if way.triton else (20, 900))
    q, weights = torch.rand(t, 4, 16, generator=g), torch.rand(t, 4, generator=g) + 0.1
    keys = torch.randn(n, 16, generator=g)
    keys[n - 20, 3], keys[n // 2] = INF, 3e38  # one infinite, one whose product with a query overflows
    out = way.select(q * 10, weights, keys, FAR, 4, 8)
    assert (out == n - 20).any(1).all()
    assert (out == n // 2).any(1).all()


@pytest.fixture
def in_order(monkeypatch):
    """Dots summed in one order for every row, as tensor cores do: numpy's BLAS, in the interpreter, sums by place."""

    def dot(_, a, b, d, *__):
        products = a.data[:, :, None] * b.data[None]
        return TensorHandle(products.sum(1, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    if HAS_TRITON:
        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@ways(
    "cpu, all as few", "bounds", "triton"
)  # BLAS, in the other ways, sums by place: nothing says that equal keys have equal scores
@pytest.mark.usefixtures("in_order")
def test_equal_keys_are_taken_in_order(way):
    # Scores of these are not exact, so what is equal is so by the arithmetic alone.
    t, h, some, copies, k = (1, 64, 3, 200, 150) if way.triton else (40, 8, 30, 100, 16)
    g = torch.Generator().manual_seed(10)
    q, keys = torch.randn(t, h, 128, generator=g).bfloat16(), torch.randn(some, 128, generator=g).bfloat16()
    weights = torch.rand(t, h, generator=g)
    expected = exact_scores(q, weights, keys).argmax(1)[:, None].int() + some * torch.arange(k).int()
    assert torch.equal(way.select(q, weights, keys.repeat(copies, 1), FAR, 4, k), expected)


# --- scores


def assert_scores(found, q, weights, keys):
    """Within what fp32 may round: d - 1 additions after a product that may be rounded, h - 1 after another."""
    exact, sizes = exact_scores(q, weights, keys), (x.nan_to_num(0, 0, 0).abs() for x in (q, weights, keys))
    off, finite = (q.shape[1] + q.shape[2]) * 2.0**-24 * exact_scores(*sizes), exact.isfinite()
    assert (found.double() - exact).abs()[finite].le(off[finite]).all()
    assert torch.equal(found[~finite].nan_to_num(9), exact[~finite].float().nan_to_num(9))


@pytest.mark.parametrize("shape", [(2, 64, 128, 300), (1, 3, 96, 40), (2, 20, 64, 1)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EVERY_SCORE
def test_scores_are_those_of_the_equation(index_scores, shape, form, dtype):
    q, weights, keys = real_numbers(*shape)
    q, keys = q.to(dtype), stored(form, keys)
    assert_scores(index_scores(q, weights, keys), q, weights, decode(keys))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@EVERY_SCORE
def test_what_is_not_finite_is_in_the_scores_of_the_equation(index_scores, bad):
    q, weights, keys = real_numbers(3, 3, 20, 10)
    keys[4, 3], q[1, 2, 5], weights[2, 1] = bad, bad, bad
    assert_scores(index_scores(q, weights, keys), q, weights, keys)


@EVERY_SCORE
def test_what_lies_otherwise_is_read_as_it_is(index_scores):
    q, weights, keys = whole_numbers(3, 4, 32, 50)
    apart = torch.cat((keys, keys), 1)[:, :32]
    found = index_scores(q.transpose(0, 1).contiguous().transpose(0, 1), weights.T.contiguous().T, apart)
    assert torch.equal(found.double(), exact_scores(q, weights, keys))


def reading(dtype):
    """Queries and weights of which a score is a value: column i of a key is relu(x) - relu(-x) for token i."""
    q = torch.eye(32)[:, None].repeat(1, 2, 1).to(dtype)
    q[:, 1] *= -1
    return q, torch.tensor([1.0, -1.0]).expand(32, 2)


def assert_values(index_scores, dtype, keys, values, scales):
    real = values.double() * scales.double()[:, None]
    found = index_scores(*reading(dtype), keys)
    assert torch.equal(found.nan_to_num(9), real.T.float().nan_to_num(9))
    assert torch.equal(values.bfloat16().float(), values), "what tensor cores take is not exact"


@EVERY_SCORE
def test_every_code_of_fp4_is_decoded_at_every_size(index_scores):
    keys, scales = rows.fp4_keys(9, 32, HERE), torch.tensor([0, 1, 2, 100, 255, 127, 128, 200, 252])
    keys.packed[:] = torch.arange(16, dtype=torch.uint8) + 16 * torch.arange(16, dtype=torch.uint8).flip(0)
    keys.scale.view(torch.uint8)[:, 0] = scales
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.cat((sizes, -sizes))
    values = torch.stack((codes, codes.flip(0)), 1).flatten().expand(9, 32)  # low nibbles, then high ones
    real = torch.where(scales == 255, NAN, 2.0 ** (scales - 127.0).double())
    assert_values(index_scores, torch.float32, keys, values, real)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EVERY_SCORE
def test_every_code_of_fp8_is_decoded(index_scores, dtype):
    codes = torch.arange(256, dtype=torch.uint8).clamp(max=254)
    codes[127] = 126  # no NaN, of which the interpreter makes a number; `rows.write` makes the scale NaN too
    sign, exponent, digits = codes >> 7, (codes >> 3 & 15).int(), (codes & 7) / 8
    sizes = torch.where(exponent == 0, digits * 2.0**-6, (1 + digits) * 2.0 ** (exponent - 7))
    scales = torch.tensor([1.0, 2.0**-126, 2.0**100, 0.5, NAN, 4.0, 2.0**-20, 1.0])
    values = torch.where(sign == 1, -sizes, sizes).view(8, 32)
    assert_values(index_scores, dtype, Fp8Keys(codes.view(torch.float8_e4m3fn).view(8, 32), scales), values, scales)


# --- the k best of given scores


@pytest.fixture(params=PICKS)
def pick(request, monkeypatch):
    """Select by given scores: in Triton's three ways, of tiles of 256, half of one of 1024, and 64 in two parts."""
    if request.param == "reference":
        monkeypatch.setattr(reference, "index_scores", lambda scores, *_: scores)
        return lambda scores, *rest: reference.select(scores, None, scores.T, *rest)
    if request.param == "cpu few":  # a number is the score of a key that holds it: relu(x) - relu(-x)

        def alone(row, first, ratio, k):
            q, weights = torch.tensor([[[1.0], [-1.0]]]), torch.tensor([[1.0, -1.0]])
            return cpu_few.select_few(q, weights, row[:, None], first, ratio, k)

        return lambda scores, first, *rest: torch.cat(
            [alone(row, first + i, *rest) for i, row in enumerate(scores)]
            or [torch.zeros(0, min(rest[1], scores.shape[1])).int()]
        )
    if request.param == "cpu":
        monkeypatch.setattr(cpu, "FEW", 0)
        monkeypatch.setattr(cpu, "FIRST", 1)
        monkeypatch.setattr(cpu, "MERGED", 20)

        def select(scores, *rest):
            monkeypatch.setattr(cpu, "_scores", lambda _q, _w, _k, low, high: scores[:, low:high])
            return cpu.select(torch.zeros(len(scores), 1, 1), scores, torch.empty(scores.shape[1], 1), *rest)

        return select
    small = {"WHOLE_ROWS": 1 << 30, "WHOLE_ENTRIES": 0, "PART": 64, "PARTS": 2}
    tiles = {"whole rows": {"TILE": 256}, "rows in a tile": {"TILE": 1024}, "parts": small}
    for name, value in tiles[request.param].items():
        monkeypatch.setattr(topk, name, value)
    return topk.top_k


def hard_rows(n):
    """Ties at the k-th place, both zeros, infinities, the smallest numbers, one digit that differs, all equal."""
    g = torch.Generator().manual_seed(0)
    near = torch.randint(-200, 200, (n,), generator=g)
    return torch.stack((
        torch.randint(-3, 4, (n,), generator=g).float(),
        torch.tensor([0.0, -0.0])[torch.randint(2, (n,), generator=g)],
        torch.tensor([-INF, INF, -1.0, 3e38])[torch.randint(4, (n,), generator=g)],
        near * 2.0**-149,
        (near + 0x3F800100).int().view(torch.float32),  # beside 1, ends in every byte
        (near.abs() % 7 << 16).add(0x40000000).int().view(torch.float32).neg(),
        torch.full((n,), -2.5),
        torch.randn(n, generator=g),
    ))  # fmt: skip


def test_the_best_of_hard_rows_are_those_of_a_stable_sort(pick):
    for count, n, k in ((8, 260, 17), (1, 200, 1), (1, 200, 199)):  # one may be picked, or left
        scores = hard_rows(n)[:count]
        assert torch.equal(pick(scores, 4 * n, 4, k), best(scores, 4 * n, 4, k))


def test_what_a_token_does_not_see_is_not_read(pick):
    scores = hard_rows(200)[[0, 4]]
    expected = best(scores, 520, 3, 20)
    for row, seen in zip(scores, (173, 174), strict=True):
        row[seen:] = torch.tensor([NAN, INF]).repeat(100)[: 200 - seen]
    for first in (520, torch.tensor(520)) if HAS_TRITON and pick is topk.top_k else (520,):
        assert torch.equal(pick(scores, first, 3, 20), expected)


@pytest.mark.parametrize("first", [0, 70])
def test_rows_that_see_fewer_than_k_end_in_minus_one(pick, first):
    scores = torch.full((5, 40), -INF)  # seen all the same
    expected = best(scores, first, 4, 18)
    assert torch.equal(pick(scores, first, 4, 18), expected)
    assert first == 0 or (expected == -1).any()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 1)])
def test_there_may_be_nothing_to_pick_from(pick, shape):
    assert torch.equal(pick(torch.zeros(shape), 100, 4, 8), torch.zeros(shape[0], min(8, shape[1]), dtype=torch.int32))


def test_rows_lie_as_they_do(pick):
    scores = hard_rows(100)[[0, 7]]
    for lying in (scores.T.contiguous().T, torch.cat((scores, scores), 1)[:, :100]):
        assert torch.equal(pick(lying, 600, 4, 30), best(scores, 600, 4, 30))


def test_a_nan_leaves_its_row_visible_and_distinct(pick):
    scores = hard_rows(130)[[0, 0]]
    expected = best(scores, 400, 4, 50)
    scores[1, ::3] = NAN
    scores[1, 1::5] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # all bits set
    found = pick(scores, 400, 4, 50)
    assert torch.equal(found[0], expected[0])
    row = found[1].tolist()
    assert row == sorted(set(row))
    assert row[0] >= 0
    assert row[-1] < 402 // 4


def test_more_entries_than_a_tile_holds(pick, request, monkeypatch):
    n = 450 if "parts" in request.node.name else 2500  # 4 parts of two tiles
    if HAS_TRITON:
        monkeypatch.setattr(topk, "PARTS", 4)
    scores = torch.randint(-40, 40, (1, n), generator=torch.Generator().manual_seed(1)).float()
    for k in (100, 445):
        assert torch.equal(pick(scores, 4 * n - 5, 4, k), best(scores, 4 * n - 5, 4, k))


# --- selections by FP8 scores, which round the queries


OPS = [REFERENCE, CPU, *([TRITON] if HAS_TRITON else [])]
every_op_set = pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.name)


def fp8_rounded(q):
    """The equation in float64: E4M3 times a power of two for each head."""
    scale = 2.0 ** (q.double().abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448).log2().ceil()
    return (q.double() / scale).to(torch.float8_e4m3fn).double() * scale


def recall(exact, found):
    """How many of the entries that exact scores select stay, as a share."""
    return np.mean([np.isin(a, b).mean() for a, b in zip(exact.numpy(), found.numpy(), strict=True)])


@every_op_set
@pytest.mark.parametrize(("t", "h", "d", "n"), [(3, 5, 32, 90), (2, 3, 20, 70), (1, 64, 128, 40)])
def test_fp8_scores_of_queries_that_fit_are_exact(ops, t, h, d, n):
    """Heads of sizes far apart, each with a power of its own; ties are common."""
    q, weights, keys = whole_numbers(t, h, d, n)
    size = 2.0 ** torch.arange(-4, 4).repeat(8)[:h]
    found = ops.select_fp8((q * size[:, None]).bfloat16(), weights / size, stored("fp8", keys), 2 * n - 5, 2, 17)
    assert torch.equal(found, best(exact_scores(q, weights, keys), 2 * n - 5, 2, 17))
    assert ops.select_fp8(q[:0].bfloat16(), weights[:0], stored("fp8", keys), 9, 2, 17).shape == (0, 17)


@every_op_set
def test_fp8_scores_round_the_queries_and_nothing_else(ops):
    """A selection is that of exact scores of rounded queries, but for near ties; with exact ones it is another."""
    t, n, k = 6, 400, 50
    q, weights, keys = real_numbers(t, 8, 128, n, seed=3)
    q, keys = q.bfloat16(), stored("fp8", keys)
    found = ops.select_fp8(q, weights, keys, FAR, 4, k)
    assert torch.equal(found, found.sort(1).values)
    scores, other = (exact_scores(x, weights, decode(keys)) for x in (fp8_rounded(q), q))
    noise = 1024 * 2.0**-24 * exact_scores(q.abs(), weights.abs(), decode(keys).abs()).amax(1)  # of 8 x 128 sums
    for row, chosen, bound in zip(scores, found.long(), 2 * noise, strict=True):
        assert row[chosen].min() >= row.topk(k).values[-1] - bound
    assert not torch.equal(found, best(other.float(), FAR, 4, k))


def test_fp8_scores_keep_what_deployed_queries_select():
    """Of rotated queries, rounded to E2M1 per 32 columns, nothing is lost; of unrounded ones what lies near the cut.

    Of these fewer entries are lost than by that rounding, which is DeepSeek's own.
    A query moves by 2^-4 of each of its numbers at most, or by half of the smallest of E4M3: so do scores.
    """
    t, h, d, n, k = 8, 16, 128, 3000, 512
    g = torch.Generator().manual_seed(5)
    q, weights = torch.randn(t, h, d, generator=g).bfloat16(), torch.randn(t, h, generator=g)
    keys = stored("fp8", CPU.round_index(torch.randn(n, d, generator=g), 32))
    deployed = CPU.round_index(q, 32)
    assert torch.equal(CPU.simulate_fp8(deployed, d), deployed)
    assert torch.equal(
        CPU.select_fp8(deployed, weights, keys, FAR, 4, k), CPU.select(deployed, weights, keys, FAR, 4, k)
    )
    exact, found = CPU.select(q, weights, keys, FAR, 4, k), CPU.select_fp8(q, weights, keys, FAR, 4, k)
    narrower = CPU.select(CPU.simulate_fp4(q, 32), weights, keys, FAR, 4, k)
    assert recall(exact, narrower) < recall(exact, found) < 1
    wide, scores = decode(keys).double(), exact_scores(q, weights, decode(keys))
    moved = 2.0**-4 * q.double().abs() + q.double().abs().amax(-1, keepdim=True) / 224 * 2.0**-10
    bound = torch.einsum("th,thd,nd->tn", weights.double().abs(), moved, wide.abs())
    for i in range(t):
        lost, new = (list(set(a[i].tolist()) - set(b[i].tolist())) for a, b in ((exact, found), (found, exact)))
        assert 0 < len(lost) == len(new) < k
        for e, f in itertools.product(lost, new):
            assert scores[i, e] - scores[i, f] <= bound[i, e] + bound[i, f]


@on_triton
def test_triton_fp8_scores_are_those_of_codes_times_powers_of_heads():
    q, weights, keys = real_numbers(3, 8, 128, 70, seed=4)
    q[1, 2], q[2, 3, 5] = 0.0, NAN
    q, keys, kept = q.bfloat16(), stored("fp8", keys), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "_select", lambda queries, *_: kept.append(queries))
        triton.select_fp8(q, weights, keys, FAR, 4, 7)
    codes, powers = quantise_fp8(q, 128)
    assert torch.equal(kept[0].values.float().nan_to_num(7), codes.float().nan_to_num(7))
    assert torch.equal(kept[0].weights.nan_to_num(7), (weights * powers[..., 0]).nan_to_num(7))


@on_triton
def test_triton_fp8_scores_are_of_fp8_keys_alone():
    q, weights, keys = whole_numbers(1, 2, 32, 4)
    for form in ("bf16", "fp4"):
        with pytest.raises(NotImplementedError, match=r"FP8 scores in Triton: .*, want Fp8Keys"):
            TRITON.select_fp8(q, weights, stored(form, keys), FAR, 4, 2)


# --- what one backend alone has


def test_cpu_packed_scores_order_as_floats_and_both_zeros_tie():
    scores = torch.tensor([[3.0, -INF, 0.0, -0.0, 1e-45, -1e-45, INF, -2.0, 0.0, 3.0]])
    order = cpu._pack(scores, 7).argsort(descending=True)[0].tolist()
    assert order == [6, 0, 9, 4, 2, 3, 8, 5, 7, 1]


def test_cpu_scores_of_a_few_tokens_depend_on_nothing_around_them():
    q, weights, keys = real_numbers(8, 6, 100, 3, seed=2)  # heads and columns that fill no block
    which = torch.randint(3, (5000,), generator=torch.Generator().manual_seed(1))
    one = scores_of_few(q, weights, keys)
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert torch.equal(scores_of_few(q, weights, keys[which]), one[:, which])
            assert torch.equal(scores_of_few(q[5:6], weights[5:6], keys[which[:17]]), one[5:6, which[:17]])
        finally:
            torch.set_num_threads(before)


@NATIVE
def test_cpu_equal_keys_have_equal_scores_wherever_they_stand():
    q, weights, keys = real_numbers(50, 8, 128, 500, seed=9)
    copies = torch.randperm(500, generator=torch.Generator().manual_seed(9))[:200]
    keys[copies] = keys[copies[0]].clone()
    alone = torch.cat([cpu._scores_of(q, weights, keys, t[None], copies[:1]) for t in torch.arange(50)])
    for count in (1, 2, 15, 16, 17, 33, 200):
        token, entry = torch.arange(50).repeat_interleave(count), copies[:count].repeat(50)
        mixed = torch.randperm(len(token), generator=torch.Generator().manual_seed(count))
        assert torch.equal(cpu._scores_of(q, weights, keys, token[mixed], entry[mixed]), alone[token[mixed]])


@NATIVE
def test_cpu_a_first_limit_is_reached_by_k_entries_of_each_token(monkeypatch):
    g = torch.Generator().manual_seed(13)
    q, weights = torch.randn(30, 4, 32, generator=g), torch.randn(30, 4, generator=g)
    keys = torch.randn(500, 32, generator=g)
    queries, scratch = index_bound.round_queries(q, weights), index_bound.make_scratch(1 << 16)
    scores = exact_scores(q, weights, keys)
    for recent, fewest in ((1024, 400), (100, 500), (40, 300)):
        monkeypatch.setattr(cpu, "RECENT", recent)
        reached = cpu._reached(q, weights, keys, queries, scratch, fewest, 16)
        near = scores[:, max(0, fewest - recent) : fewest]
        assert ((near > reached[:, None] - 1e-4).sum(1) >= 16).all()
        assert (reached > near.median(1).values).all() or recent == 40, "hardly better than none"
    assert cpu._reached(q, weights, keys, queries, scratch, 31, 16).isnan().all()
    keys[250:] = NAN
    assert cpu._reached(q, weights, keys, queries, scratch, 300, 16).isnan().any()
    assert cpu._reached(q * 0, -weights.abs() * INF, keys[:200], queries, scratch, 200, 16).isnan().all()


def memory_of_select(t, h, d, k, *lengths):
    g = torch.Generator().manual_seed(12)
    q, weights = torch.randn(t, h, d, generator=g).bfloat16(), torch.rand(t, h, generator=g)
    keys = torch.randn(lengths[-1], d, generator=g).bfloat16()
    assert peak_bytes(lambda: 2 * keys.float()) >= 2 * keys.numel() * 4, "the measure is blind"
    return [peak_bytes(functools.partial(CPU.select, q, weights, keys[:n], 4 * n, 4, k)) for n in lengths]


@NATIVE
def test_cpu_memory_of_bounds_does_not_grow_with_the_context():
    # Buffers of tiles are 3 MiB, 2048 keys in fp32 and their copies as much; scores of all would take 14 MB.
    taken = memory_of_select(128, 8, 128, 16, 9000, 27_000)
    assert taken[1] < 12 * 2**20, taken
    assert taken[1] < 1.1 * taken[0], taken


def test_cpu_memory_does_not_grow_with_the_context():
    # Logits of all would take 51 MB, scores without heads 26 MB. A tile of logits is 2 MiB and so is one of keys; with
    # packed scores and the temporaries of an expression, no more than eight such tiles live at once.
    assert memory_of_select(32, 2, 64, 4096, 200_000)[0] < 16 * 2**20


@on_triton
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("in_order")
def test_triton_equal_keys_have_equal_scores_wherever_they_lie(form, monkeypatch):
    # A sum of a hundred rounded numbers shows any other order. Of each key 100 copies, in tiles of 256 or 32, the last
    # of which is partial.
    monkeypatch.setattr(triton, "PROGRAMS", 1)  # all tokens to a program
    q, weights, keys = real_numbers(2, 64, 128, 3)
    which = torch.randint(3, (300,), generator=torch.Generator().manual_seed(1))
    scores = triton.index_scores(q.bfloat16(), weights, stored(form, keys[which]))
    one = [int((which == key).nonzero()[0]) for key in range(3)]
    assert torch.equal(scores, scores[:, one][:, which])
    assert scores[:, one].unique().numel() == 6
    alone = triton.index_scores(q[1:].bfloat16(), weights[1:], stored(form, keys))
    assert torch.equal(alone, scores[1:, one]), "other tokens or keys matter"


@on_triton
@pytest.mark.usefixtures("in_order")
def test_triton_a_key_stored_in_two_ways_has_one_score():
    q, weights, keys = real_numbers(1, 64, 128, 50)
    whole = stored("fp8", keys)
    halves = Fp8Keys((whole.values.float() / 2).to(torch.float8_e4m3fn), whole.scale * 2)
    same = (decode(halves) == decode(whole)).all(1)  # but for what is rounded below the smallest number
    assert same.sum() > 20
    found, other = (triton.index_scores(q.bfloat16(), weights, form) for form in (whole, halves))
    assert torch.equal(found[:, same], other[:, same])


@on_triton
def test_triton_scores_nothing_that_nobody_sees_or_that_is_selected_anyway(monkeypatch):
    for name, value in {"KEYS": 32, "EXACT_KEYS": 32, "PROGRAMS": 8}.items():  # with 4 tiles: two tokens to a program
        monkeypatch.setattr(triton, name, value)
    q, weights, keys = whole_numbers(4, 2, 32, 128)
    out, at = torch.full((4, 128), NAN), torch.tensor(28)
    planes = triton._planes(keys)
    triton._score(out, triton._met(q, weights, planes), planes, (at, 1, 1, 31), None)  # seen: 30, 31 | 32, 33
    scored = ~out.isnan()
    assert not scored[:2].any()
    assert scored[2:].sum(1).tolist() == [64, 64]


@on_triton
@pytest.mark.parametrize("first", [1 << 20, torch.tensor(1 << 20)])
def test_triton_scores_of_a_long_context_never_exist_at_once(first, monkeypatch):
    scratches, tokens = set(), []

    def score(out, queries, _planes, seen, counts):
        assert counts is None
        scratches.add(out.untyped_storage().data_ptr())
        assert out.untyped_storage().nbytes() <= 1 << 28
        tokens.extend(range(seen[1], seen[1] + len(queries.values)))

    monkeypatch.setattr(triton, "_score", score)
    monkeypatch.setattr(triton, "top_k_into", lambda *_: None)
    q, weights = torch.empty(8192, 64, 1, dtype=torch.bfloat16), torch.empty(8192, 64)
    triton.select(q, weights, torch.empty(262144, 1, dtype=torch.bfloat16), first, 4, 1024)
    assert len(scratches) == 1
    assert tokens == list(range(8192))


@on_triton
def test_triton_names_a_form_without_a_kernel():
    q, weights, _ = whole_numbers(1, 2, 8, 4)
    based = rows.BasisRows(*[None] * len(rows.BasisRows._fields))
    for keys, named in ((based, "BasisRows"), (coded_rows.allocate(4, 8, 4, HERE), "coded rows of 8, want 16")):
        for op, rest in ((triton.index_scores, ()), (triton.select, (100, 4, 2))):
            with pytest.raises(NotImplementedError, match=named):
                op(q, weights, keys, *rest)


@on_triton
@pytest.mark.parametrize("pick", ["whole rows", "rows in a tile", "parts"], indirect=True)
def test_triton_tokens_stand_behind_the_first_and_write_their_rows_alone(pick):
    del pick
    scores = torch.stack((torch.arange(100.0), torch.full((100,), -2.5)))  # of what is equal, more could be taken
    out = torch.full((4, 20), -7, dtype=torch.int32)
    topk.top_k_into(out[1:3], scores, torch.tensor(100), 120, 3, None)
    assert torch.equal(out[1:3], best(scores, 220, 3, 20))
    assert (out[[0, 3]] == -7).all()


@on_triton
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spoil", [False, True])
def test_triton_first_digits_are_counted_with_the_scores(form, spoil, monkeypatch):
    """The counts are those of the first pass, and so the selection is: of tokens that see enough, ties among them."""
    small = {"WHOLE_ROWS": 1 << 30, "WHOLE_ENTRIES": 0, "PART": 64, "PARTS": 4}
    for name, value in small.items():
        monkeypatch.setattr(topk, name, value)
    for name, value in {"KEYS": 32, "EXACT_KEYS": 32, "PROGRAMS": 4}.items():  # several tokens to a program
        monkeypatch.setattr(triton, name, value)
    t, n, k, first, kept = 5, 150, 13, 9, []
    q, weights, keys = (whole_numbers if spoil else real_numbers)(t, 3, 32, n)
    keys = stored(form, keys)
    if spoil:  # infinite scores, and NaN
        q[1, 0], weights[2, 1], q[3, 2] = INF, -INF, NAN
    collect = topk.top_k_into

    def spy(out, scores, at, start, ratio, counts):
        counted, again = counts.clone(), out.clone()
        collect(again, scores, at, start, ratio, None)
        collect(out, scores, at, start, ratio, counts)
        assert torch.equal(out, again)
        kept.append((scores.clone(), counted))

    monkeypatch.setattr(triton, "top_k_into", spy)
    triton.select(q.to(torch.bfloat16), weights, keys, first, 1, k)
    (scores, counts), seen = kept[0], torch.arange(t) + first + 1
    bits = scores.view(torch.int32).long() & 0xFFFFFFFF
    digits = torch.where(bits > 1 << 31, bits ^ 0xFFFFFFFF, bits | 1 << 31) >> 24
    assert not counts[:, 1:].any()
    assert (seen > k).any()
    for i in range(t):
        if seen[i] > k:
            assert torch.equal(counts[i, 0].long(), digits[i, : seen[i]].bincount(minlength=256))


@on_triton
def test_triton_many_rows_and_long_ones_go_their_ways(monkeypatch):
    launched = []
    for name in ("_whole", "_count", "_collect"):
        run = lambda _, grid, name=name: lambda *_, **__: launched.append((name, grid))  # noqa: E731
        monkeypatch.setattr(topk, name, type("Spy", (), {"__getitem__": run})())
    topk.top_k(torch.empty(1, 262144), 1 << 20, 4, 512)
    assert launched == [("_count", (1, 128))] * 4 + [("_collect", (1, 128))]
    launched.clear()
    monkeypatch.setattr(triton, "_score", lambda *_: None)  # counts first digits
    q, keys = torch.empty(1, 2, 32).bfloat16(), torch.empty(262144, 32).bfloat16()
    triton.select(q, torch.empty(1, 2), keys, 1 << 20, 4, 512)
    assert launched == [("_count", (1, 128))] * 3 + [("_collect", (1, 128))]
    launched.clear()
    topk.top_k(torch.empty(3, 300001), 1 << 21, 4, 512)  # parts of two tiles
    assert launched[-1] == ("_collect", (3, 74))
    launched.clear()
    topk.top_k(torch.empty(64, 20000), 1 << 20, 4, 512)
    topk.top_k(torch.empty(1, 16384), 1 << 20, 4, 512)
    assert launched == [("_whole", (64,)), ("_whole", (1,))]
