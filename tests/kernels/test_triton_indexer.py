"""Scores within what fp32 may round, equal for equal keys, and the selection of exactly these scores."""

import math

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kernels.formats import rows
from kernels.formats.rows_reference import decode
from kernels.formats.stored import Fp4Keys, Fp8Keys
from kernels.indexer import reference
from kernels.indexer import triton as indexer
from kernels.indexer.triton import index_scores, select

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf
FORMS = ("bf16", "fp32", "fp8", "fp4")


def stored(form, x):
    if form in {"bf16", "fp32"}:
        return x.to(torch.bfloat16 if form == "bf16" else torch.float32)
    keys = rows.fp8_keys(*x.shape, CPU) if form == "fp8" else rows.fp4_keys(*x.shape, CPU)
    rows.write(keys, 0, x)
    return keys


def made(t, h, d, n, seed=0):
    g = torch.Generator().manual_seed(seed)
    scale = 2.0 ** torch.randint(-9, 9, (n, 1), generator=g)
    return torch.randn(t, h, d, generator=g), torch.randn(t, h, generator=g), torch.randn(n, d, generator=g) * scale


def whole_numbers(t, h, d, n, seed=0):
    """Scores exact in fp32 in every order, and keys in every form; ties are common."""
    g = torch.Generator().manual_seed(seed)
    q, keys = torch.randint(-2, 3, (t, h, d), generator=g), torch.randint(-1, 2, (n, d), generator=g)
    return q.bfloat16(), torch.randint(-1, 3, (t, h), generator=g).float(), keys.float()


@pytest.mark.parametrize("shape", [(2, 64, 128, 300), (1, 3, 96, 40), (2, 20, 64, 1)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_those_of_the_equation(shape, form, dtype):
    q, weights, keys = made(*shape)
    q, keys = q.to(dtype), stored(form, keys)
    wide, real = q.double(), decode(keys).double()
    want = torch.einsum("th,thn->tn", weights.double(), torch.einsum("thd,nd->thn", wide, real).relu())
    size = torch.einsum("th,thn->tn", weights.abs().double(), torch.einsum("thd,nd->thn", wide.abs(), real.abs()))
    # d - 1 additions after a product that may be rounded, h - 1 after another: each rounds by 2^-24 of what it adds to
    off = (shape[1] + shape[2]) * 2.0**-24 * size
    assert ((index_scores(q, weights, keys) - want).abs() <= off).all()


@pytest.fixture
def in_order(monkeypatch):
    """Dots summed in one order for every row, as tensor cores do: numpy's BLAS, in the interpreter, sums by place."""

    def dot(_, a, b, d, *__):
        products = a.data[:, :, None] * b.data[None]
        return TensorHandle(products.sum(1, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("in_order")
def test_equal_keys_have_equal_scores_wherever_they_lie(form, monkeypatch):
    # A sum of a hundred rounded numbers shows any other order. Of each key 100 copies, in tiles of 256 or 32, the last
    # of which is partial.
    monkeypatch.setattr(indexer, "PROGRAMS", 1)  # all tokens to a program
    q, weights, keys = made(2, 64, 128, 3)
    which = torch.randint(3, (300,), generator=torch.Generator().manual_seed(1))
    scores = index_scores(q.bfloat16(), weights, stored(form, keys[which]))
    one = [int((which == key).nonzero()[0]) for key in range(3)]
    assert torch.equal(scores, scores[:, one][:, which])
    assert scores[:, one].unique().numel() == 6
    alone = index_scores(q[1:].bfloat16(), weights[1:], stored(form, keys))
    assert torch.equal(alone, scores[1:, one]), "other tokens or keys matter"


@pytest.mark.usefixtures("in_order")
def test_a_key_stored_in_two_ways_has_one_score():
    q, weights, keys = made(1, 64, 128, 50)
    whole = stored("fp8", keys)
    halves = Fp8Keys((whole.values.float() / 2).to(torch.float8_e4m3fn), whole.scale * 2)
    same = (decode(halves) == decode(whole)).all(1)  # but for what is rounded below the smallest number
    assert same.sum() > 20
    found, other = index_scores(q.bfloat16(), weights, whole), index_scores(q.bfloat16(), weights, halves)
    assert torch.equal(found[:, same], other[:, same])


def test_every_code_of_fp4_is_decoded_at_every_size():
    # One column of a query is 1, so a score is a value: all codes in the columns, scales in the rows.
    keys = rows.fp4_keys(9, 32, CPU)
    keys.packed[:] = torch.arange(16, dtype=torch.uint8) + 16 * torch.arange(16, dtype=torch.uint8).flip(0)
    keys.scale.view(torch.uint8)[:, 0] = torch.tensor([0, 1, 2, 100, 255, 127, 128, 200, 252])
    q, weights = torch.eye(32)[:, None].repeat(1, 2, 1), torch.tensor([1.0, -1.0]).expand(32, 2)
    q[:, 1] *= -1  # relu(x) - relu(-x)
    found, real = index_scores(q, weights, keys), decode(keys)
    assert found.isnan().all(0).nonzero()[:, 0].tolist() == [4]
    finite = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(found[:, finite], real.T[:, finite])
    assert torch.equal(real[finite].bfloat16().float(), real[finite]), "what tensor cores take is not exact"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_of_fp8_is_decoded(dtype):
    codes = torch.arange(256, dtype=torch.uint8).clamp(max=254)
    codes[127] = 126  # no NaN, of which the interpreter makes a number; `rows.write` makes the scale NaN too
    values = codes.view(torch.float8_e4m3fn).view(8, 32)
    keys = Fp8Keys(values, torch.tensor([1.0, 2.0**-126, 2.0**100, 0.5, NAN, 4.0, 2.0**-20, 1.0]))
    q, weights = torch.eye(32)[:, None].repeat(1, 2, 1).to(dtype), torch.tensor([1.0, -1.0]).expand(32, 2)
    q[:, 1] *= -1
    assert torch.equal(index_scores(q, weights, keys).nan_to_num(9), decode(keys).T.nan_to_num(9))
    assert torch.equal(values.float().bfloat16().float(), values.float()), "what tensor cores take is not exact"


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_is_in_the_scores_of_the_reference(bad):
    q, weights, keys = made(3, 3, 20, 10)
    keys[4, 3], q[1, 2, 5] = bad, bad
    weights[2, 1] = bad
    torch.testing.assert_close(
        index_scores(q, weights, keys), reference.index_scores(q, weights, keys), equal_nan=True, rtol=1e-5, atol=1e-4
    )


def test_what_lies_otherwise_is_read_as_it_is():
    q, weights, keys = whole_numbers(3, 4, 32, 50)
    apart = torch.cat((keys, keys), 1)[:, :32]
    found = index_scores(q.transpose(0, 1).contiguous().transpose(0, 1), weights.T.contiguous().T, apart)
    assert torch.equal(found, reference.index_scores(q, weights, keys))


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


@pytest.mark.parametrize(
    ("form", "first"), [("bf16", 0), ("bf16", 69), ("bf16", 10**6), ("fp32", 10**6), ("fp8", 150), ("fp4", 150)]
)
def test_selection_is_that_of_the_reference(form, first, monkeypatch):
    monkeypatch.setattr(indexer, "KEYS", 32)
    monkeypatch.setattr(indexer, "SCRATCH", 250)  # of 100 scores, or 112: two tokens at a time
    q, weights, keys = whole_numbers(3, 3, 32, 100)
    keys = stored(form, keys)
    want = reference.select(q, weights, keys, first, 4, 17)
    keys = spoilt(keys, (first + 3) // 4)
    assert torch.equal(select(q, weights, keys, torch.tensor(first), 4, 17), want)
    assert torch.equal(select(q, weights, keys, first, 4, 17), want)


@pytest.mark.parametrize(("t", "n", "k"), [(0, 10, 4), (2, 0, 4), (1, 1, 1)])
def test_there_may_be_nothing_to_select_from(t, n, k):
    q, weights, keys = whole_numbers(t, 2, 32, n)
    assert torch.equal(select(q, weights, keys, 100, 4, k), torch.zeros(t, min(n, k), dtype=torch.int32))


@pytest.mark.usefixtures("in_order")
def test_equal_keys_are_taken_in_order():
    q, weights, keys = made(1, 64, 128, 3)  # not exact: what is equal is so by the arithmetic alone
    found = select(q.bfloat16(), weights, keys.bfloat16().repeat(200, 1), 10**6, 4, 150)
    best = reference.index_scores(q.bfloat16(), weights, keys.bfloat16()).argmax(1)
    assert torch.equal(found, best[:, None].int() + 3 * torch.arange(150, dtype=torch.int32))


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_key_leaves_rows_visible_and_distinct(bad):
    q, weights, keys = whole_numbers(2, 2, 32, 90)
    keys[::3] = bad
    for row in select(q, weights, keys, 300, 4, 40).tolist():
        assert row == sorted(set(row))
        assert row[0] >= 0
        assert row[-1] < 301 // 4 + 1


def test_nothing_is_scored_that_nobody_sees_or_that_is_selected_anyway(monkeypatch):
    monkeypatch.setattr(indexer, "KEYS", 32)
    monkeypatch.setattr(indexer, "EXACT_KEYS", 32)
    monkeypatch.setattr(indexer, "PROGRAMS", 8)  # with 4 tiles: two tokens to a program
    q, weights, keys = whole_numbers(4, 2, 32, 128)
    out, at = torch.full((4, 128), NAN), torch.tensor(28)
    indexer._score(out, q, weights, indexer._planes(keys), (at, 1, 1, 31))  # seen: 30, 31 | 32, 33
    scored = ~out.isnan()
    assert not scored[:2].any()
    assert scored[2:].sum(1).tolist() == [64, 64]


@pytest.mark.parametrize("first", [1 << 20, torch.tensor(1 << 20)])
def test_scores_of_a_long_context_never_exist_at_once(first, monkeypatch):
    scratches, tokens = set(), []

    def score(out, q, _weights, _planes, seen):
        scratches.add(out.untyped_storage().data_ptr())
        assert out.untyped_storage().nbytes() <= 1 << 28
        tokens.extend(range(seen[1], seen[1] + len(q)))

    monkeypatch.setattr(indexer, "_score", score)
    monkeypatch.setattr(indexer, "top_k_into", lambda *_: None)
    q, weights = torch.empty(8192, 64, 1, dtype=torch.bfloat16), torch.empty(8192, 64)
    select(q, weights, torch.empty(262144, 1, dtype=torch.bfloat16), first, 4, 1024)
    assert len(scratches) == 1
    assert tokens == list(range(8192))


def test_a_form_without_a_kernel_is_named():
    q, weights, _ = whole_numbers(1, 2, 32, 4)
    keys = rows.CodedRows(torch.empty(4), torch.empty(4, 16, dtype=torch.uint8), 4, None)
    with pytest.raises(NotImplementedError, match="CodedRows"):
        index_scores(q, weights, keys)
    with pytest.raises(NotImplementedError, match="CodedRows"):
        select(q, weights, keys, 100, 4, 2)
