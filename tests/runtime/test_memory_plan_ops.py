"""The scratch that each blocked op says it takes, against what torch's profiler counts."""

import sys
from functools import cache

import pytest
import torch

from fathom.kernels.formats import basis_fit, basis_rows, coded_rows, rows
from fathom.kernels.formats.stored import Dense, Fp4, Fp8, NvFp4
from fathom.kernels.indexer import cpu as indexer
from fathom.kernels.ops import CPU
from fathom.model.cache.formats import CacheFormats
from fathom.model.checkpoint.tensor_mapping import Form
from tests.peak_memory import peak_bytes

HEADS = 8  # of the indexer
TILE = 1 << 21  # bytes: half of what the largest tile of an op is
ON_CPU = torch.device("cpu")
DTYPES = {2: torch.bfloat16, 4: torch.float32}
LOOPS = 1 << 22  # bytes at most that a linear's loops take themselves, uncounted: tests/kernels/test_linear.py
SLACK = 1 << 16  # bytes that no op counts


def scratch(name, *sizes, **more):
    """What the function says that stands beside an op."""
    op = getattr(CPU, name)
    return getattr(sys.modules[op.__module__], f"{op.__name__}_scratch")(*sizes, **more) + SLACK


def close(planned, run, more=0):
    """The plan is a bound, and at most 5 % and a tile above what is taken."""
    with torch.inference_mode():
        run()
        taken = peak_bytes(run)
    assert taken <= planned <= 1.05 * taken + TILE + more, f"{taken:,} taken, {planned:,} planned"


def weight(form, out, columns):
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(out, columns, generator=generator)
    blocks = (-(-out // 128), -(-columns // 128))
    codes = torch.randint(0, 256, (out, columns // 2), generator=generator, dtype=torch.uint8)
    match form:
        case Form.BF16 | Form.F16:
            return Dense(data.to(torch.bfloat16 if form is Form.BF16 else torch.float16))
        case Form.F32:
            return Dense(data)
        case Form.FP8:
            return Fp8(data.to(torch.float8_e4m3fn), torch.ones(blocks).to(torch.float8_e8m0fnu))
        case Form.FP8_F32:
            return Fp8(data.to(torch.float8_e4m3fn), torch.ones(blocks))
        case Form.FP4:
            return Fp4(codes.view(torch.int8), torch.ones(out, columns // 32).to(torch.float8_e8m0fnu))
        case Form.NVFP4:
            scales = torch.ones(out, columns // 16).to(torch.float8_e4m3fn)
            return NvFp4(codes, scales, torch.tensor(1.0))


items = pytest.mark.parametrize("item", [2, pytest.param(4, marks=pytest.mark.slow)], ids=["bf16", "fp32"])


def takes_its_result(run):
    """Of an op without such a function, the plan is its result."""
    with torch.inference_mode():
        found = run()
    close(sum(x.nbytes for x in (found if isinstance(found, tuple) else (found,))) + SLACK, run)


@items
@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norm(item, weighted):
    x = torch.randn(512, 4, 256, dtype=DTYPES[item])
    w = torch.ones(256) if weighted else None
    takes_its_result(lambda: CPU.rms_norm(x, w, 1e-6))


@items
@pytest.mark.parametrize(("width", "rope"), [(256, 64), (128, 64), (64, 64), (512, 64)])
def test_rotate(item, width, rope):
    x, angle = torch.randn(512, 8, width, dtype=DTYPES[item]), torch.randn(512, rope // 2)
    takes_its_result(lambda: CPU.rotate(x, angle, angle))
    takes_its_result(lambda: CPU.norm_rotate(x, None, 1e-6, angle, angle, 0))


@items
@pytest.mark.parametrize("tokens", [4, 2048])
def test_rounding(item, tokens):
    x = torch.randn(tokens, 1024, dtype=DTYPES[item])
    takes_its_result(lambda: CPU.simulate_fp8(x, 128))
    takes_its_result(lambda: CPU.simulate_fp4(x, 32))
    takes_its_result(lambda: CPU.hadamard(x))
    takes_its_result(lambda: CPU.round_index(x, 32))
    close(scratch("pack_fp8", x.numel(), 128, item), lambda: CPU.pack_fp8(x, 128))
    packed = CPU.pack_fp8(x, 128)
    close(scratch("unpack_fp8", x.numel(), 128, item), lambda: CPU.unpack_fp8(packed, 128, x.dtype))


@items
@pytest.mark.parametrize("form", [form for form in Form if form not in (Form.I64, Form.I32, Form.FP8_ROWS)])
@pytest.mark.parametrize(("tokens", "out", "columns"), [(1, 4096, 1024), (512, 4096, 1024), (2048, 256, 128)])
def test_linear(item, form, tokens, out, columns):
    x, w = torch.randn(tokens, columns, dtype=DTYPES[item]), weight(form, out, columns)
    close(scratch("linear", tokens, out, columns, form.name, item, ON_CPU), lambda: CPU.linear(x, w), LOOPS)


@items
def test_grouped_linear(item):
    for t, form in ((512, Form.FP8), (512, Form.BF16), (1, Form.BF16), (1, Form.FP8)):
        x, w = torch.randn(t, 4, 512, dtype=DTYPES[item]), weight(form, 1024, 512)
        taken = scratch("grouped_linear", t, 1024, 512, 4, form.name, item, ON_CPU)
        close(taken, lambda x=x, w=w: CPU.grouped_linear(x, w, 4), LOOPS)


@items
@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu(item, weighted):
    gate, up = torch.randn(2, 1024, 512, dtype=DTYPES[item])
    routed = torch.ones(1024) if weighted else None
    takes_its_result(lambda: CPU.swiglu(gate, up, 10.0, routed))


@pytest.mark.parametrize("selected", [0, 64, 600])
@pytest.mark.parametrize(
    ("form", "tokens", "heads", "width"),
    [
        ("bf16", 512, 4, 128),
        ("fp32", 512, 4, 128),
        ("bf16", 1, 4, 128),
        ("bf16", 64, 16, 512),
        ("fp8", 64, 16, 512),
        ("fp8", 1, 16, 512),
    ],
)
def test_attend(form, selected, tokens, heads, width):
    item, first, window = 4 if form == "fp32" else 2, 40_000, 64
    dtype = DTYPES[item]
    q, ring = torch.randn(tokens, heads, width, dtype=dtype), torch.randn(window + tokens - 1, width, dtype=dtype)
    ratio = 4 if selected else 16
    n = (first + tokens) // ratio
    entries = CacheFormats(dtype, "fp8" if form == "fp8" else "dtype", "dtype").entry_rows(n, width, 64, ON_CPU)
    rows.write(entries, 0, torch.randn(selected or n, width))  # no other is read
    chosen = torch.arange(selected, dtype=torch.int32).expand(tokens, selected).contiguous() if selected else None
    sink = torch.zeros(heads)
    stored = "fp8" if form == "fp8" else "dtype"
    planned = scratch("attend", tokens, heads, width, window, n, selected, stored, item)
    close(planned, lambda: CPU.attend(q, ring, first, window, entries, ratio, chosen, sink))


def fits(planned, run):
    """The plan is a bound; of codes one for all widths, so that of 2 bits is loose."""
    with torch.inference_mode():
        run()
        taken = peak_bytes(run)
    assert taken <= planned <= 3 * taken, f"{taken:,} taken, {planned:,} planned"


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "selected"), [(512, 4, 128, 0), (64, 16, 512, 600), (1, 16, 512, 64)]
)
def test_attend_to_codes(bits, tokens, heads, width, selected):
    first, window, ratio = 40_000, 64, 4 if selected else 16
    q, ring = torch.randn(tokens, heads, width).bfloat16(), torch.randn(window + tokens - 1, width).bfloat16()
    n = (first + tokens) // ratio
    entries = coded_rows.allocate(n, width, bits, ON_CPU, 0)
    rows.write(entries, 0, torch.randn(selected or n, width))  # no other is read
    chosen = torch.arange(selected, dtype=torch.int32).expand(tokens, selected).contiguous() if selected else None
    planned = scratch("attend", tokens, heads, width, window, n, selected, "coded", 2)
    fits(planned, lambda: CPU.attend(q, ring, first, window, entries, ratio, chosen, torch.zeros(heads)))


@pytest.mark.parametrize(
    ("tokens", "heads", "width", "selected"), [(512, 4, 128, 0), (64, 16, 512, 600), (1, 16, 512, 64)]
)
def test_attend_to_coefficients(tokens, heads, width, selected):
    first, window, ratio = 40_000, 64, 4 if selected else 16
    q, ring = torch.randn(tokens, heads, width).bfloat16(), torch.randn(window + tokens - 1, width).bfloat16()
    n = (first + tokens) // ratio
    entries = basis_rows.allocate(n, fitted(width), 64, 8, 0, ON_CPU)
    rows.write(entries, 0, torch.randn(selected or n, width))  # no other is read
    chosen = torch.arange(selected, dtype=torch.int32).expand(tokens, selected).contiguous() if selected else None
    planned = scratch("attend", tokens, heads, width, window, n, selected, "based", 2)
    fits(planned, lambda: CPU.attend(q, ring, first, window, entries, ratio, chosen, torch.zeros(heads)))
    written = torch.randn(tokens, width)
    fits(rows.write_scratch(tokens, width, "based") + SLACK, lambda: rows.write(entries, 0, written))


@cache
def fitted(width):
    x = torch.randn(2000, width) * torch.logspace(0, -2, width)
    sample = basis_fit.Sample(x, torch.randn(16, 4, width), torch.ones(16, len(x), dtype=torch.bool))
    return basis_fit.fit(sample, 64, 6, 100_000).fit


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("tokens", [1, 512])
def test_select_by_codes(bits, tokens):
    q, head_weights, plain = to_select(2, tokens, 10_000, rising=False)
    keys = coded_rows.allocate(10_000, 128, bits, ON_CPU, 0)
    rows.write(keys, 0, plain)
    planned = scratch("select", tokens, HEADS, 128, 10_000, 16, "coded", 2, ON_CPU, few_pass=False)
    fits(planned, lambda: CPU.select(q, head_weights, keys, 4 * 10_000 - tokens, 4, 16))


def to_select(item, tokens, visible, *, rising):
    """Queries, weights and keys, random or such that every entry scores above all before it."""
    q, head_weights, keys = torch.randn(tokens, HEADS, 128), torch.randn(tokens, HEADS), torch.randn(visible, 128)
    if rising:
        q, head_weights, keys = (
            q.abs(),
            head_weights.abs(),
            torch.arange(1, visible + 1)[:, None].expand(-1, 128) / visible,
        )
    return q.to(DTYPES[item]), head_weights, keys.to(DTYPES[item]).contiguous()


SELECTIONS = [(512, 2_500, 16), (1, 10_000, 16), (64, 9_000, 512), (512, 200, 256), (512, 10_000, 16)]


@items
@pytest.mark.parametrize(("tokens", "visible", "k"), SELECTIONS)
def test_select(item, tokens, visible, k):
    """Of random scores. The last of these is bounded in integers: what passes there is not foreseen so closely."""
    q, head_weights, keys = to_select(item, tokens, visible, rising=False)
    take = scratch("select", tokens, HEADS, 128, visible, k, "dtype", item, ON_CPU, few_pass=True)
    more = 2 * indexer.PENDING * indexer.PAIR if indexer._bounded(tokens, HEADS, 128, visible, k, ON_CPU) else 0
    close(take, lambda: CPU.select(q, head_weights, keys, 4 * visible - tokens, 4, k), more)


@items
@pytest.mark.parametrize(("tokens", "visible", "k"), SELECTIONS)
def test_select_whatever_the_scores(item, tokens, visible, k):
    """Where each entry scores above all before it, everything passes: a bound, and no more than that."""
    q, head_weights, keys = to_select(item, tokens, visible, rising=True)
    take = scratch("select", tokens, HEADS, 128, visible, k, "dtype", item, ON_CPU, few_pass=False)
    with torch.inference_mode():
        taken = peak_bytes(lambda: CPU.select(q, head_weights, keys, 4 * visible - tokens, 4, k))
    assert taken <= take


@items
@pytest.mark.parametrize("tokens", [1, 64, 2048])
def test_streams(item, tokens):
    s, hidden = 4, 512
    streams, fn = torch.randn(tokens, s, hidden, dtype=DTYPES[item]), torch.randn((2 + s) * s, s * hidden)
    scale, base = torch.ones(3), torch.zeros((2 + s) * s)
    y, weights = streams[:, 0].contiguous(), torch.rand(tokens, s)
    comb = torch.rand(tokens, s, s)
    sizes = tokens, s, hidden, item
    close(scratch("hyper_weights", *sizes), lambda: CPU.hyper_weights(streams, fn, scale, base, 20, 1e-6, 1e-6))
    takes_its_result(lambda: CPU.collapse(streams, weights))
    takes_its_result(lambda: CPU.expand(y, streams, weights, comb))


@items
@pytest.mark.parametrize("overlap", [False, True])
def test_pool(item, overlap):
    del item
    kv, gate = torch.randn(2, 128, 4, 256)
    previous = (kv.clone(), gate.clone()) if overlap else (None, None)
    takes_its_result(lambda: CPU.pool(kv, gate, *previous))


@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_narrow_rows_take_what_is_planned(form):
    x, make = torch.randn(2048, 512).bfloat16(), rows.fp4_keys if form == "fp4" else rows.fp8_keys
    kept = make(2048, 512, ON_CPU)
    planned = scratch("store", 2048, 512, form)
    fits(planned, lambda: rows.write(kept, 0, x))
