"""Ops of DeepSeek-V4.1: entries in E2M1, candidates, FP8 in blocks of 32, n-grams; against equations written anew."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.autograd.profiler import profile

from fathom.kernels.formats import rows as stored
from fathom.kernels.formats.reference import decode, e8m0, looked_up
from fathom.kernels.formats.stored import Dense, Fp4, Fp8, Fp8Rows, rows
from fathom.kernels.indexer import cpu_candidates
from fathom.kernels.linear.reference import Product
from fathom.kernels.ops import CPU, REFERENCE, rounding_by
from fathom.kernels.quantise.reference import simulate_entries, simulate_fp8
from fathom.model.config import ModelConfig
from fathom.model.engram import Hash, table_primes
from fathom.probes.judge.engram import multipliers, primes, table_rows
from fathom.probes.judge.oracle_v41 import E2M1_ENTRY
from tests.make_checkpoint import v41_config

SETS = pytest.mark.parametrize("ops", [REFERENCE, CPU], ids=lambda ops: ops.name)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 3e3, 1e6])
def test_entries_are_rounded_as_the_oracle_rounds_them(size):
    x = torch.randn(64, 96, generator=seeded()) * size
    x[0, :16], x[1, 3] = 0, -0.0
    assert simulate_entries(x, 16).double().equal(E2M1_ENTRY.rounded(x.double()))


def test_a_block_with_an_infinity_is_no_number():
    x = torch.ones(2, 32)
    x[0, 3], x[1, 20] = torch.inf, torch.nan
    out = simulate_entries(x, 16)
    assert out.isnan().tolist() == [[True] * 16 + [False] * 16, [False] * 16 + [True] * 16]


def scored(t, n, heads=4, width=32, seed=0):
    g = seeded(seed)
    q, w = torch.randn(t, heads, width, generator=g), torch.randn(t, heads, generator=g)
    keys = torch.randn(n, width, generator=g)
    scores = (torch.einsum("thd,nd->thn", q, keys).relu() * w[..., None]).sum(1)
    return (q, w, keys), scores


@pytest.mark.parametrize(("first", "ratio"), [(0, 1), (40, 1), (0, 2), (13, 2)])
@pytest.mark.parametrize("size", [1, 4, 8])
@SETS
def test_open_blocks_are_the_best_and_the_newest(ops, first, ratio, size):
    t, count = 30, 3
    n = (first + t) // ratio
    given, scores = scored(t, n)
    found = ops.open_blocks(*given, first, ratio, size, count)
    assert found.dtype == torch.int32
    for row in range(t):
        seen = (first + row + 1) // ratio
        best = {b: float(scores[row, b * size : min((b + 1) * size, seen)].max()) for b in range(-(-seen // size))}
        newest = (seen - 1) // size
        ordered = sorted(best, key=lambda b: (b != newest, -best[b]))[:count]
        assert [b for b in found[row].tolist() if b >= 0] == sorted(ordered)
        assert found[row].tolist()[len(ordered) :] == [-1] * (found.shape[1] - len(ordered))


@pytest.mark.parametrize(("first", "ratio"), [(0, 1), (40, 1), (13, 2)])
@pytest.mark.parametrize("k", [5, 40])
@SETS
def test_a_selection_is_of_open_blocks_alone(ops, first, ratio, k):
    t, size = 30, 4
    n = (first + t) // ratio
    given, scores = scored(t, n, seed=3)
    blocks = ops.open_blocks(*given, first, ratio, size, 3)
    found = ops.select_open(*given, first, ratio, k, blocks, size)
    assert found.shape == (t, min(k, n))
    for row in range(t):
        seen, opened = (first + row + 1) // ratio, {*blocks[row].tolist()}
        able = [e for e in range(seen) if e // size in opened]
        assert [e for e in found[row].tolist() if e >= 0] == sorted(sorted(able, key=lambda e: -scores[row, e])[:k])


@pytest.mark.parametrize("size", [1, 8, 7])
def test_tiles_change_nothing(monkeypatch, size):
    given, _ = scored(50, 60)
    whole = REFERENCE.open_blocks(*given, 10, 1, size, 4)
    chosen = REFERENCE.select_open(*given, 10, 1, 6, whole, size)
    for name, few in (("ROWS", 12), ("KEYS", 32 * 13), ("PER_HEAD", 12 * 13)):  # 3 tokens, 13 keys
        monkeypatch.setattr(cpu_candidates, name, few)
    assert CPU.open_blocks(*given, 10, 1, size, 4).equal(whole)
    assert CPU.select_open(*given, 10, 1, 6, whole, size).equal(chosen)


def test_a_token_has_the_bits_of_a_call_of_its_own():
    """Of calls of few tokens, as drafts are verified in: sums are rounded, and keys lie close together."""
    (q, w, keys), _ = scored(8, 3000, heads=16, width=64)
    keys = keys[:1] + 1e-6 * keys  # scores differ in their last bits alone
    whole = CPU.open_blocks(q, w, keys, 2992, 1, 8, 40)
    chosen = CPU.select_open(q, w, keys, 2992, 1, 50, whole, 8)
    for token in range(8):
        one = q[token : token + 1], w[token : token + 1], keys[: 2993 + token], 2992 + token, 1
        blocks = CPU.open_blocks(*one, 8, 40)
        assert blocks[0].equal(whole[token])
        assert CPU.select_open(*one, 50, blocks, 8)[0].equal(chosen[token])


@SETS
def test_of_equal_scores_the_lower_is_taken(ops):
    q, w, keys = torch.ones(3, 2, 32), torch.ones(3, 2), torch.ones(40, 32)
    blocks = ops.open_blocks(q, w, keys, 37, 1, 4, 3)
    assert blocks.tolist() == [[0, 1, 9]] * 3  # the best two, and that of the newest entry
    assert ops.select_open(q, w, keys, 37, 1, 5, blocks, 4).tolist() == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize("op", ["open_blocks", "select_open"])
@pytest.mark.parametrize("tokens", [1, 8, 64])
@pytest.mark.parametrize("form", ["dtype", "fp4"])
@pytest.mark.parametrize("opened", [64, 512])
def test_what_candidates_take_is_what_is_planned(op, tokens, form, opened):
    """Of 20,000 keys, by the heads and the width of the published model: no more, and not half of it."""
    n, k, heads, width, size = 20_000, 64, 32, 128, 16
    (q, w, keys), _ = scored(tokens, n, heads=heads, width=width)
    kept = keys.bfloat16()
    if form == "fp4":
        stored.write(kept := stored.fp4_keys(n, width, torch.device("cpu")), 0, keys)
    given = (q.bfloat16(), w, kept, n - tokens, 1)
    more = (size, opened) if op == "open_blocks" else (k, CPU.open_blocks(*given, size, opened), size)
    with profile(profile_memory=True) as profiler:
        getattr(CPU, op)(*given, *more)
    sizes = sorted((e.start_ns(), e.nbytes()) for e in profiler.kineto_results.events() if e.name() == "[memory]")
    taken = max(itertools.accumulate(nbytes for _, nbytes in sizes))
    shape = (tokens, heads, width, n)
    if op == "open_blocks":
        planned = cpu_candidates.open_blocks_scratch(*shape, *more)
    else:
        planned = cpu_candidates.select_open_scratch(*shape, k, opened, size, 2 if form == "dtype" else 5)
    assert planned / 2 <= taken <= planned


@SETS
@pytest.mark.parametrize("first", [10, 90])
def test_as_many_blocks_as_there_may_be_are_told(ops, first):
    """Of 100 keys, though the tokens see few."""
    (q, w, keys), _ = scored(2, 100)
    assert ops.open_blocks(q, w, keys, first, 1, 8, 4).shape == (2, 4)


@SETS
def test_where_all_blocks_are_open_a_selection_is_any_other(ops):
    given, _ = scored(50, 60)
    every = torch.arange(8, dtype=torch.int32).expand(50, -1)
    assert ops.select_open(*given, 10, 1, 6, every, 8).equal(REFERENCE.select(*given, 10, 1, 6))


# --- FP8 in blocks of 32


def blocked(height, columns, block, seed=0):
    g = seeded(seed)
    data = torch.randn(height, columns, generator=g).to(torch.float8_e4m3fn)
    powers = torch.randint(-6, 7, (-(-height // block), -(-columns // block)), generator=g)
    return Fp8(data, torch.exp2(powers.float()).to(torch.float8_e8m0fnu))


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize(("height", "columns"), [(64, 96), (33, 32), (200, 300), (256, 128), (130, 31)])
def test_the_scale_of_a_number_is_that_of_its_block(block, height, columns):
    weight = blocked(height, columns, block)
    if max(height, columns) > 32:
        assert weight.block == block
    r, c = torch.arange(height)[:, None], torch.arange(columns)[None]
    wanted = weight.data.float() * e8m0(weight.scale)[r // block, c // block]
    assert decode(weight).equal(wanted)
    part = rows(weight, block, height) if height > block else weight
    assert decode(part).equal(wanted[-len(part.data) :])


@SETS
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize(("height", "columns"), [(64, 96), (200, 320), (33, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_of_small_blocks(ops, tokens, height, columns, dtype):
    weight, x = blocked(height, columns, 32), torch.randn(tokens, columns, generator=seeded(1)).to(dtype)
    wanted = x.double() @ decode(weight).double().T
    found = ops.linear(x, weight, wide=True).double()
    size = x.double().abs() @ decode(weight).double().abs().T
    assert ((found - wanted).abs() <= 2.0**-18 * size).all()


# --- inputs of linears by 32 columns


@SETS
def test_inputs_are_rounded_by_so_many_columns(ops):
    by_32 = rounding_by(ops, 32)
    weight, x = blocked(64, 128, 32), torch.randn(3, 128, generator=seeded(1))
    x[:, 32:64] *= 1e-4  # far below the others: of one scale with them it is subnormal
    (found,) = by_32.linears(x, [Product(weight)], deployed=True)
    assert found.equal(ops.linear(simulate_fp8(x, 32), weight))
    assert not found.equal(ops.linears(x, [Product(weight)], deployed=True)[0])
    assert rounding_by(ops, 128) is ops


@SETS
def test_experts_round_so_too_and_keep_it_where_a_part_is_replaced(ops):
    g = seeded(2)

    def fp4(height, columns):
        codes = torch.randint(0, 256, (height, columns // 2), generator=g, dtype=torch.uint8).view(torch.int8)
        scale = torch.exp2(torch.randint(-8, -4, (height, columns // 32), generator=g).float())
        return Fp4(codes, scale.to(torch.float8_e8m0fnu))

    one, three, two = fp4(64, 96), fp4(64, 96), fp4(96, 64)
    stacks = [type(w)(*(plane[None] for plane in w)) for w in (one, three, two)]
    x, ids, weights = torch.randn(2, 96, generator=g), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    by_32 = rounding_by(ops, 32)
    found = by_32.experts(x, ids, weights, *stacks, 10.0, deployed=True)
    given = simulate_fp8(x, 32)
    a = ops.swiglu(ops.linear(given, one), ops.linear(given, three), 10.0, weights[:, 0])
    wanted = ops.linear(simulate_fp8(a, 32), two)
    assert found.equal(wanted)
    again = by_32._replace(linear=ops.linear)
    assert again.experts(x, ids, weights, *stacks, 10.0, deployed=True).equal(wanted)


# --- n-grams


CONFIG = ModelConfig.from_json(v41_config(), "small")


def test_rows_of_a_table():
    data = torch.randn(5, 64, generator=seeded()).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5, 4.0]] * 5).to(torch.float8_e8m0fnu)
    ids = torch.tensor([[4, 0], [2, 2]])
    found = looked_up(Fp8Rows(data, scale), ids, torch.float32)
    assert found.equal(data.float()[ids] * torch.tensor([0.5, 4.0]).repeat_interleave(32))


@pytest.mark.parametrize("layer", CONFIG.v41.engram.layer_ids)
def test_rows_that_are_looked_up_are_the_judges(layer):
    """Two programs, written apart."""
    tables, t = CONFIG.v41.engram, 60
    alike = torch.randint(0, tables.compressed_vocab, (CONFIG.vocab_size,), generator=seeded())
    tokens = torch.randint(0, CONFIG.vocab_size, (t,), generator=seeded(1))
    before = torch.full((tables.max_ngram - 1,), tables.pad_token_id)
    grams = alike[torch.cat((before, tokens))].unfold(0, tables.max_ngram, 1).flip(1)
    own = Hash(tables, layer, tokens.device)
    assert own(grams).equal(table_rows(CONFIG, layer, tokens, alike, torch.arange(t)))
    assert own.multipliers.tolist() == multipliers(CONFIG, layer)
    assert table_primes(tables) == primes(CONFIG)


def test_primes_that_are_not_the_tables_are_refused():
    tables = replace(CONFIG.v41.engram, rows=(CONFIG.v41.engram.rows[0] + 1,))
    with pytest.raises(ValueError, match="do not add up to"):
        table_primes(tables)


def test_a_dense_matrix_is_rounded_for_nobody():
    weight, x = Dense(torch.randn(8, 64, generator=seeded())), torch.randn(3, 64, generator=seeded(1))
    (found,) = rounding_by(REFERENCE, 32).linears(x, [Product(weight)], deployed=True)
    assert found.equal(REFERENCE.linear(x, weight))
