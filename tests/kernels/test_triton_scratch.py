"""The scratch that each fused op says it takes, against the tensors that its launch code allocates.

The kernels themselves are not run: they allocate nothing, and so shapes can be those of a model. The launch code is run
as it is in Triton's interpreter, where no GPU is asked; `tests.model.test_triton_model` runs kernels, and holds a call
of a whole model against its plan.
"""

import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not on every platform")

from triton.runtime.interpreter import InterpretedFunction

from fathom.kernels.attention import launch as attention_launch
from fathom.kernels.attention import triton as attention
from fathom.kernels.compress.triton import compress_at_once
from fathom.kernels.differential.reference import Own, Past
from fathom.kernels.experts.triton_expert_codes import experts, experts_down_scratch, experts_scratch
from fathom.kernels.formats import basis_rows, coded_rows, eigenbasis, lloyd_max, product_quantise
from fathom.kernels.formats import rows as stored
from fathom.kernels.formats.stored import Dense, Fp4, Fp8, NvFp4, TokenRing, stack
from fathom.kernels.hyper import triton as hyper
from fathom.kernels.linear import triton as linear
from fathom.kernels.linear.reference import Product
from fathom.kernels.linear.weight_tiles import counters
from fathom.kernels.shard import triton_middle
from fathom.kernels.shard.reference import Middle, Stream
from fathom.kernels.triton_ops import TRITON
from fathom.probes.shared.alive import peak_alive

pytestmark = pytest.mark.interpreted  # launch code that runs as it does there

CPU = torch.device("cpu")
DTYPES = {2: torch.bfloat16, 4: torch.float32}
POSITION = 8  # bytes of the first token's position, which is not counted

items = pytest.mark.parametrize("item", [2, 4], ids=["bf16", "fp32"])


@pytest.fixture(autouse=True)
def _counters_are_there():
    """Made once for a device, by the first launch whose columns are split; in the plan they are the reserve's."""
    counters(CPU)


@pytest.fixture(autouse=True)
def launch_nothing(monkeypatch):
    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda *_: lambda *_, **__: None)


def scratch(name, *sizes, **more):
    """What the function says that stands beside an op."""
    op = getattr(TRITON, name)
    return getattr(sys.modules[op.__module__], f"{op.__name__}_scratch")(*sizes, **more)


def taken(run):
    with torch.inference_mode():
        return peak_alive(run)


def weight(form, rows, columns):
    codes, blocks = torch.zeros(rows, columns // 2, dtype=torch.uint8), (-(-rows // 128), -(-columns // 128))
    match form:
        case "BF16" | "F32":
            return Dense(torch.zeros(rows, columns, dtype=DTYPES[2 if form == "BF16" else 4]))
        case "FP8":
            return Fp8(torch.zeros(rows, columns).to(torch.float8_e4m3fn), torch.ones(blocks).to(torch.float8_e8m0fnu))
        case "FP4":
            return Fp4(codes.view(torch.int8), torch.ones(rows, columns // 32).to(torch.float8_e8m0fnu))
        case "NVFP4":
            return NvFp4(codes, torch.ones(rows, columns // 16).to(torch.float8_e4m3fn), torch.tensor(1.0))


@items
def test_ops_that_allocate_their_result(item):
    t, s, d = 3, 4, 128
    x, angle = torch.zeros(t, s, d, dtype=DTYPES[item]), torch.zeros(t, 32)
    flat, y, narrow = x.view(t * s, d), x[:, 0].contiguous(), x[..., :64].contiguous()
    pre, comb, norm = torch.zeros(t, s), torch.zeros(t, s, s), torch.ones(d)
    packed, ids = torch.zeros(t * s, d + d // 64, dtype=torch.uint8), torch.arange(s).expand(t, s).contiguous()
    for run in (
        lambda: TRITON.rms_norm(x, norm, 1e-6),
        lambda: TRITON.rotate(x, angle, angle),
        lambda: TRITON.rotate_halves(narrow, angle, angle),
        lambda: TRITON.simulate_fp8(x, 128),
        lambda: TRITON.simulate_fp4(x, 32),
        lambda: TRITON.hadamard(x),
        lambda: TRITON.round_index(x, 32),
        lambda: TRITON.pack_fp8(flat, 64),
        lambda: TRITON.unpack_fp8(packed, 64, x.dtype),
        lambda: TRITON.sum_slots(x, ids),
        lambda: TRITON.norm_rotate(x, None, 1e-6, angle, angle, 64),
        lambda: TRITON.swiglu(flat, flat, 10.0, None),
        lambda: TRITON.collapse(x, pre),
        lambda: TRITON.expand(y, x, pre, comb),
    ):
        assert taken(run) == run().nbytes


@items
@pytest.mark.parametrize("t", [1, 16, 17, 100, 300, 4096, 9000])
def test_mhc(item, t):
    """Exact but where tiles of tokens do not divide the programs."""
    s, hidden = 4, 1024
    streams, fn = torch.zeros(t, s, hidden, dtype=DTYPES[item]), torch.zeros((2 + s) * s, s * hidden)
    scale, base, norm = torch.ones(3), torch.zeros((2 + s) * s), torch.ones(hidden)
    read = fn, scale, base, 2, 1e-6, 1e-6
    spare = hyper.PROGRAMS * hyper.TOKENS * 32 * 4 if t == 300 else 0
    for planned, run in (
        (scratch("hyper_weights", t, s, hidden, item), lambda: TRITON.hyper_weights(streams, *read)),
        (hyper.read_streams_scratch(t, s, hidden, item), lambda: hyper.read_streams(streams, *read, norm, 1e-6)),
    ):
        assert taken(run) <= planned <= taken(run) + spare


@pytest.fixture
def many(monkeypatch):
    """From how many tokens on Fp8 is decoded first: fewer than elsewhere."""
    monkeypatch.setattr(linear, "MANY", 512)
    linear.grouped_linear_scratch.cache_clear()
    yield linear.MANY
    linear.grouped_linear_scratch.cache_clear()


@items
@pytest.mark.parametrize("form", ["BF16", "F32", "FP8", "FP4", "NVFP4"])
@pytest.mark.parametrize(("rows", "columns"), [(128, 4096), (1536, 7168), (12800, 512)])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.usefixtures("many")
def test_linear(item, form, rows, columns, wide):
    """The result, and the most that is beside it up to t tokens: sums of split columns, or what is decoded first."""
    x, w = torch.zeros(700, columns, dtype=DTYPES[item]), weight(form, rows, columns)
    sums = 0
    for t in (1, 7, 16, *range(32, 700, 32), 700):
        found, results = taken(lambda t=t: TRITON.linear(x[:t], w, wide=wide)), t * rows * (4 if wide else item)
        sums = max(sums, found - results)
        assert found <= scratch("linear", t, rows, columns, form, item, CPU, wide=wide) == results + sums


@pytest.mark.parametrize(("rows", "columns"), [(128, 4096), (1536, 7168), (12800, 512)])
@pytest.mark.parametrize("wide", [False, True])
def test_linears_of_codes_take_less_than_is_planned(rows, columns, wide):
    """A plan is of rounded inputs and of `linear`: codes are half as long, and fewer columns are split."""
    x, product = torch.zeros(700, columns, dtype=torch.bfloat16), Product(weight("FP8", rows, columns), wide=wide)
    for t in (1, 16, 17, *range(32, 700, 32), 700):
        found = taken(lambda t=t: TRITON.linears_fp8(x[:t], [product], deployed=True))
        planned = scratch("linear", t, rows, columns, "FP8", 2, CPU, wide=wide)
        assert found <= planned + (t * columns * 2 if t > 1 else 0)
        assert found >= t * rows * (4 if wide else 2) + (t * columns * 129 // 128 if t > 16 else 0)


@items
def test_grouped_linear(item, many):
    for t in (1, 16, 128, many):
        x, w = torch.zeros(t, 4, 2048, dtype=DTYPES[item]), weight("FP8", 512, 2048)
        planned, found = scratch("grouped_linear", t, 512, 2048, 4, "FP8", item, CPU), t * 512 * item
        run = taken(lambda x=x, w=w: TRITON.grouped_linear(x, w, 4))
        assert run == planned == found if t <= 16 else found < run <= planned, "sums of split columns are of more"
        if t == many and item == 2:
            assert run >= found + 512 * 2048 * 2


def held(form, n, d, item):
    """Rows of a cache; the codebook that all calls share is there before."""
    lloyd_max.rounded_codebook(6, torch.float16 if item == 2 else torch.float32, CPU)
    match form:
        case "fp8":
            return stored.fp8_entries(n, d, 0, CPU)
        case "coded":
            return coded_rows.allocate(n, d, 6, CPU, seed=0)
        case "based":
            fit = eigenbasis.eigen_keys(0, d - 32, d - 32, d - 32, 2, CPU)
            fit.basis.copy_(torch.eye(d - 32))
            fit.basis_scale.fill_(1)
            fit.bits.fill_(4)
            rows = basis_rows.allocate(n, fit, 32, 6, 0, CPU)
            attention._columns(rows)  # what all calls share
            return rows
    return torch.zeros(n, d, dtype=DTYPES[item])


forms = pytest.mark.parametrize("form", ["dtype", "coded"])


@items
@pytest.mark.parametrize("form", ["dtype", "coded", "fp8"])
@pytest.mark.parametrize(
    ("t", "h", "n", "selected"),
    [
        (1, 64, 60_000, 0),
        (1, 128, 60_000, 0),
        (1, 128, 60_000, 4096),
        (66, 64, 60_000, 512),
        (66, 64, 8192, 512),
        (256, 16, 4096, 0),
    ],
)
def test_attend(item, form, t, h, n, selected):
    """Of calls of up to t tokens, those of eight may take the most: each token is split as it is alone.

    The plan adds to that the result of all t, and the most rows that are decoded ahead: of fewer entries, perhaps.
    """
    d, window, most = 64, 128, 0
    entries, sink = held(form, n, d, item), torch.zeros(h)
    for size in {1, min(t, attention_launch.SHORT), min(t, attention_launch.SHORT + 1), t}:
        q, ring = torch.zeros(size, h, d, dtype=DTYPES[item]), torch.zeros(window + t - 1, d, dtype=DTYPES[item])
        chosen = torch.zeros(size, selected, dtype=torch.int32) if selected else None
        most = max(most, taken(lambda: TRITON.attend(q, ring, 4 * n, window, entries, 4, chosen, sink)) - POSITION)  # noqa: B023
    planned = scratch("attend", t, h, d, window, n, selected, form, item)
    ahead = attention_launch.rows_ahead(t, n, selected) * d * item if (form, item) == ("fp8", 2) else 0
    assert most <= planned <= 1.05 * most + (t > 1) * t * h * d * item + ahead


def test_rows_that_are_decoded_ahead():
    """As many as `ahead` ever says of entries up to a number."""
    for t, selected in ((9, 0), (66, 512), (30, 5), (8, 512)):
        told = [n for n in range(1, 20_000) if attention_launch.ahead(t, n, min(n, selected) if selected else n)]
        most = max(told, default=0)
        assert attention_launch.rows_ahead(t, 19_999, selected) == (1 << (most - 1).bit_length() if most else 0)


@items
@pytest.mark.parametrize("limit", [1 << 15, 2 * 64])
@pytest.mark.parametrize(
    ("t", "h", "n", "selected"), [(1, 64, 60_000, 0), (1, 128, 60_000, 4096), (66, 64, 60_000, 512)]
)
def test_attend_in_a_basis(item, limit, t, h, n, selected, monkeypatch):
    """Of calls of up to t tokens, those of fewer may be split more; a product's own memory is torch's."""
    monkeypatch.setattr(attention, "QUERIES", limit)
    d, window, most = 64, 128, 0
    entries, sink = held("based", n, d, item), torch.zeros(h)
    for size in {1, min(t, attention_launch.SHORT), t // 2 or 1, t}:
        q, ring = torch.zeros(size, h, d, dtype=DTYPES[item]), torch.zeros(window + t - 1, d, dtype=DTYPES[item])
        chosen = torch.zeros(size, selected, dtype=torch.int32) if selected else None
        most = max(most, taken(lambda: TRITON.attend(q, ring, 4 * n, window, entries, 4, chosen, sink)) - POSITION)  # noqa: B023
    planned = scratch("attend", t, h, d, window, n, selected, "based", item)
    assert most <= planned <= 1.6 * most


@items
@forms
@pytest.mark.parametrize(("t", "n"), [(1, 900), (1, 20_000), (63, 20_000), (63, 300_000), (300, 300_000)])
def test_select(item, form, t, n):
    q, weights, keys = torch.zeros(t, 4, 32, dtype=DTYPES[item]), torch.zeros(t, 4), held(form, n, 32, item)
    planned = scratch("select", t, 4, 32, n, 512, form, item, CPU, few_pass=True)
    found = taken(lambda: TRITON.select(q, weights, keys, 4 * n - t, 4, 512)) - POSITION
    assert found <= planned <= 1.1 * found


@items
@pytest.mark.parametrize(("heads", "kv"), [(32, 8), (64, 8), (8, 8), (4, 1)])
@pytest.mark.parametrize("slots", [40, 384, 4000])
def test_attend_banks(item, heads, kv, slots):
    """The result, and the most that splits of calls of up to t tokens find."""
    d, parts = 32, 0
    past = Past(*torch.zeros(2, kv, slots, d, dtype=DTYPES[item]), None)
    for t in (1, 2, 3, 5, 8, 13, 16, 24, 64, 300):
        q, own = torch.zeros(t, heads, d, dtype=DTYPES[item]), Own(*torch.zeros(2, t, kv, d, dtype=DTYPES[item]), None)
        found, result = taken(lambda q=q, own=own: TRITON.attend_banks(q, None, past, own)), t * heads * d * 4
        parts = max(parts, found - result)
        planned = scratch("attend_banks", t, heads, kv, d, slots, t, item)
        assert found <= planned
        assert parts <= planned - result <= 2 * parts + 132 * 64 * (d + 2) * 4 * (t > 16)


@items
@pytest.mark.parametrize(("t", "heads", "kv", "rank"), [(1, 32, 8, 192), (5, 16, 2, 64), (1, 4, 4, 32)])
def test_attend_codes(item, t, heads, kv, rank):
    """With segments so long that they have all programs there are; the codebook is there before."""
    lloyd_max.codebook(8, CPU)
    d, n = 64, triton_middle.PROGRAMS * 128
    keys = eigenbasis.eigen_keys(n, kv * d, rank, rank, 0, CPU)
    values = product_quantise.codebook_values(n, kv, d, CPU)
    rows = [coded_rows.allocate(64 * 64 * kv, d, 8, CPU) for _ in range(2)]
    middle, stream = Middle(keys, values, 4, torch.ones(d // 2), False), Stream(*rows, torch.tensor(5))
    q, exact = torch.zeros(t, heads, d, dtype=DTYPES[item]), torch.zeros(64 * 64, kv, d, dtype=DTYPES[item])
    planned = scratch("attend_codes", t, heads, kv, d, rank, item)
    assert planned == taken(lambda: TRITON.attend_codes(q, exact, exact, middle, stream, None)) - 4  # a factor


@items
@pytest.mark.parametrize("form", ["BF16", "FP8", "FP4", "NVFP4"])
@pytest.mark.parametrize("deployed", [False, True])
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize(("t", "hidden", "inner"), [(5, 256, 128), (5, 4096, 2048), (40, 4096, 2048), (40, 256, 1024)])
def test_experts(item, form, deployed, summed, t, hidden, inner):
    """Whole columns; split ones, of few tokens; and as many as are split in no call, beside those of fewer."""
    slots, count = 2, 4
    x, ids, routed = torch.zeros(t, hidden, dtype=DTYPES[item]), torch.zeros(t, slots).long(), torch.zeros(t, slots)
    up, down = (stack([weight(form, *shape)] * count) for shape in ((inner, hidden), (hidden, inner)))
    found = taken(lambda: experts(x, ids, routed, up, up, down, 10.0, deployed=deployed, summed=summed))
    planned = experts_scratch(t, slots, count, hidden, inner, form, item, deployed=deployed, summed=summed)
    codes = deployed and form == "FP4" and item == 2  # inputs, and what is between the products: a byte for two
    assert found == planned if t <= 16 and not codes else planned / 2 <= found <= planned


@items
@pytest.mark.parametrize("form", ["BF16", "FP8", "FP4"])
@pytest.mark.parametrize("deployed", [False, True])
@pytest.mark.parametrize(("t", "hidden", "inner"), [(5, 256, 128), (40, 256, 1024)])
def test_the_second_half_of_experts_copies_an_input_in_pieces(item, form, deployed, t, hidden, inner):
    """As `model.ranks.experts.ByRows` gives it: the shared expert's columns lie between."""
    slots, count = 2, 4
    a = torch.zeros(t, slots + 1, inner, dtype=DTYPES[item])[:, :-1]
    ids, down = torch.zeros(t, slots).long(), stack([weight(form, hidden, inner)] * count)
    found = taken(lambda: TRITON.experts_down(a, ids, down, deployed=deployed))
    planned = experts_down_scratch(t, slots, count, hidden, inner, form, item, deployed=deployed)
    assert found <= planned <= 2 * found


@pytest.mark.parametrize("slots", [2, 6, 8])
@pytest.mark.parametrize(
    ("t", "hidden", "inner"),
    [(40, 4096, 2048), (200, 4096, 2048), (200, 1024, 1024), (200, 256, 1024), (700, 512, 256)],
)
def test_experts_of_codes_take_less_than_is_planned(t, hidden, inner, slots):
    """A plan is of `experts`, whose rounded inputs are twice as long."""
    count = 8
    x, ids, routed = torch.zeros(t, hidden).bfloat16(), torch.zeros(t, slots).long(), torch.zeros(t, slots)
    up, down = (stack([weight("FP4", *shape)] * count) for shape in ((inner, hidden), (hidden, inner)))
    found = taken(lambda: TRITON.experts_fp8(x, ids, routed, up, up, down, 10.0, deployed=True))
    planned = experts_scratch(t, slots, count, hidden, inner, "FP4", 2, deployed=True)
    assert planned / 2 <= found <= planned


def test_compress_allocates_the_rows_that_it_returns():
    kv, gate = torch.zeros(2, 9, 2 * 128)
    ring = TokenRing(*torch.zeros(2, 8, 2 * 128))
    entries, first = stored.fp8_entries(9, 128, 64, CPU), torch.tensor(0)
    run = kv, gate, ring, first, 4, torch.ones(128), 1e-6, torch.ones(32), "none", entries, torch.bfloat16
    assert taken(lambda: compress_at_once(*run)) == (9 // 4 + 1) * 128 * 2
