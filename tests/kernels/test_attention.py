"""`attend` of every backend against its equation in float64; rows that no token may see hold NaN or noise.

Entries in a basis, `BasisRows`, are attended to in `test_basis_rows`.
"""

import itertools
import math
from functools import partial

import pytest
import torch

from fathom.kernels.attention import cpu
from fathom.kernels.formats import coded_rows, lloyd_max
from fathom.kernels.formats.rows import first as first_rows
from fathom.kernels.formats.rows import fp8_entries, write
from fathom.kernels.formats.rows_reference import decode
from fathom.kernels.formats.stored import CodedRows, Fp8Entries, Fp8Keys, Slots
from fathom.kernels.ops import CPU, REFERENCE
from tests.kernels.every_backend import HALF_BF16, HAS_TRITON, ULP, on_triton, seeded, strided
from tests.peak_memory import peak_bytes

if HAS_TRITON:
    from fathom.kernels.attention import launch
    from fathom.kernels.attention import triton as attention_triton

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
F32, BF16 = torch.float32, torch.bfloat16
# Ulp of float32, of keys of size 4: masses carry the rounding of logits of about that size, and their sums over some
# hundred keys run in orders that differ.
SUMS = {"reference": 16, "cpu": 32, "triton": 32}


class Way:
    """One way to run `attend`: a backend's function, with constants of its module set while it runs."""

    def __init__(self, name, attend, module=None, *, dtypes=(F32, BF16), **constants):
        self.name, self.attend, self.module, self.dtypes, self.constants = name, attend, module, dtypes, constants
        self.backend = name.split()[0]

    def __call__(self, *args):
        with pytest.MonkeyPatch.context() as patch:
            for constant, value in self.constants.items():
                patch.setattr(self.module, constant, value)
            return self.attend(*args)


MASKED, GATHERED = (partial(cpu.attend, dense_up_to=limit) for limit in (math.inf, 0.0))  # ways to read the selected
WAYS = [
    Way("reference", REFERENCE.attend),
    Way("cpu", CPU.attend),
    Way("cpu masked", MASKED),
    Way("cpu gathered", GATHERED),
]
small = {"ROWS": 12, "LOGITS": 16 * 12, "KEYS": 16 * 16}  # tiles of 4 tokens and 16 keys
SMALL_TILES = [Way(f"cpu {i}", way, cpu, dtypes=(F32,), **small) for i, way in enumerate((MASKED, GATHERED))]
if HAS_TRITON:
    # One program to a row tile, and several, which are merged. Keys come in tiles of 16 in fp32 and of up to 64 in
    # bf16: more of the former for several programs.
    WAYS += [
        Way("triton whole", attention_triton.attend, launch, dtypes=(BF16,), PROGRAMS=1),
        Way("triton split", attention_triton.attend, launch, dtypes=(F32,), PROGRAMS=5),
    ]
    narrow = {"KEYS": 16, "MANY_KEYS": 16, "ROWS": 16}
    SMALL_TILES += [
        Way(f"triton {programs}", attention_triton.attend, launch, dtypes=(dtype,), PROGRAMS=programs, **narrow)
        for programs, dtype in ((1, F32), (9, BF16), (132, BF16))
    ]

every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)


def crossed(names, few, many=(), ways=WAYS):
    """Each way, in each of its dtypes, with each case; those of many numbers are not for the interpreter."""
    cases = [
        pytest.param(way, dtype, *case, id="-".join(map(str, (way.name, dtype, *case))))
        for way in ways
        for case in (*few, *(many if way.backend != "triton" else ()))
        for dtype in way.dtypes
    ]
    return pytest.mark.parametrize(f"way, dtype, {names}", cases)


def make(t, h, d, window, first, n=None, k=None, *, spare=0, nan=True, dtype=F32, hidden=0):
    """Arguments of `attend`; rows that no token may see hold NaN or noise of std 100."""
    g = seeded(t, h, d, window, first, n, k)

    def unseen(rows):
        return torch.full((rows, d), torch.nan) if nan else 100 * torch.randn(rows, d, generator=g)

    ring = unseen(window + t - 1 + spare)
    for position in range(max(0, first - window + 1), first + t):
        ring[position % len(ring)] = torch.randn(d, generator=g)
    entries = selected = None
    if n is not None:
        entries, visible = unseen(n), max(0, min((first + t) // 4 - hidden, n))
        entries[:visible] = torch.randn(visible, d, generator=g)
        entries = strided(entries.to(dtype))
    if k is not None:
        selected = torch.stack([torch.randperm(max(n, k), generator=g)[:k] for _ in range(t)]).int()
        pads = torch.tensor([INT_MIN, -1, n, INT_MAX]).int()[torch.randint(4, (t, k), generator=g)]
        selected = strided(torch.where(torch.rand(t, k, generator=g) < 0.3, pads, selected))
    sink = torch.randn(h, generator=g)
    sink[::3], sink[1::3] = -torch.inf, torch.inf
    q = torch.randn(t, h, d, generator=g)
    return strided(q.to(dtype)), strided(ring.to(dtype)), first, window, entries, 4, selected, strided(sink)


def in_fp8(entries, rope):
    """Rows in the narrow form; what is NaN stays so, in all of its values."""
    rows = fp8_entries(*entries.shape, rope, torch.device("cpu"))
    write(rows, 0, entries)
    rows.scale.view(torch.uint8)[:, (entries.shape[1] - rope) // 64 :] = 255  # padding
    return rows


def in_codes(entries, bits=6, seed=0):
    """Rows as codes; what is NaN stays so, in its norm."""
    rows = coded_rows.allocate(*entries.shape, bits, torch.device("cpu"), seed)
    write(rows, 0, entries)
    return rows


def numbers(rows):
    """Entries in float64; of codes what the reference's equation of them gives, which `test_coded_rows` holds."""
    if isinstance(rows, CodedRows):
        return decode(rows).double()
    if isinstance(rows, Fp8Entries):
        scale = rows.scale[:, : rows.values.shape[1] // 64].double()
        return torch.cat((rows.values.double() * scale.repeat_interleave(64, 1), rows.rope.double()), 1)
    return rows.double()


def equation(q, ring, first, window, entries, ratio, selected, sink):
    """``sum_j exp(l_j) kv_j / (exp(sink) + sum_j exp(l_j))`` in float64, token by token over the keys that it sees."""
    out = torch.empty(q.shape, dtype=torch.float64)
    slots = entries if isinstance(entries, Slots) else Slots(ring[:0] if entries is None else entries, None, 0)
    rows = numbers(slots.rows)
    bias = torch.zeros(len(rows)) if slots.bias is None else slots.bias
    for i in range(len(q)):
        newest = first + i
        recent = [position % len(ring) for position in range(max(0, newest - window + 1), newest + 1)]
        visible = min((newest + 1) // ratio - slots.hidden, len(rows)) if entries is not None else 0
        seen = [e for e in (range(visible) if selected is None else selected[i].tolist()) if 0 <= e < visible]
        keys = torch.cat((ring[recent].double(), rows[seen]))
        logits = q[i].double() @ keys.T / math.sqrt(q.shape[2])
        logits[:, len(recent) :] += bias[seen]
        total = torch.cat((logits, sink[:, None]), 1).logsumexp(1, keepdim=True)
        out[i] = (logits - total).exp() @ keys
    return out


def assert_same(way, ours, exact, *, dtype, largest=4.0, more=0.0):
    """Compare with the equation, where keys are at most `largest` and all operands are of `dtype` (None: of two).

    Where they are bf16, Triton rounds masses to bf16 before they multiply keys: half an ulp of a mean of keys.
    `more` is what else may be rounded.
    """
    assert torch.equal(ours.isfinite(), exact.isfinite()), "a row that must not be read was read, or one was lost"
    assert (ours[exact == 0] == 0).all(), "a sink of +inf takes all mass"
    bound = SUMS[way.backend] * ULP * largest + (largest * 2.0**-9 if way.backend == "triton" and dtype == BF16 else 0)
    bound += exact.nan_to_num(0).abs() * (HALF_BF16 if ours.dtype == BF16 else 0) + more
    error = (ours.double() - exact).abs().nan_to_num(0)
    assert (error <= bound).all(), f"off by {error.max()} at {(error - bound).argmax()}"


def check(way, args, largest=4.0):
    q, ring = args[:2]
    ours, dtype = way(*args), q.dtype if q.dtype == ring.dtype else None
    assert (ours.dtype, ours.shape) == (q.dtype, q.shape)
    rows = args[4].rows if isinstance(args[4], Slots) else args[4]
    more = rotation(way, dtype, q, rows) if isinstance(rows, CodedRows) else 0.0
    assert_same(way, ours, equation(*args), dtype=dtype, largest=largest, more=more)
    return ours


def rotation(way, dtype, q, rows):
    """What rotations may round of an output, where all but them is as without.

    Each of the log2 d steps rounds a number by half an ulp of at most the length of its row: of queries, which moves a
    logit by as much of both lengths' product, and all masses by twice that; and of the sum, whose length is no more
    than the longest row's. In bf16 Triton's operands are fp16: a query, centroids, and masses are off by 2^-12 each.
    """
    length, d = max([0.0, *decode(rows).nan_to_num(0).norm(dim=1).tolist()]), rows.shape[1]
    logit = q.float().norm(dim=-1).max().item() * length * d**-0.5
    steps = math.log2(d) * ULP / 2
    narrow = 2.0**-11 if way.backend == "triton" and dtype == BF16 else 0.0
    return (2 * logit * (steps + narrow) + steps + narrow) * length


@crossed(
    "t, window, first, spare",
    [(1, 1, 0, 0), (1, 8, 3, 0), (5, 1, 1000, 0), (5, 8, 0, 3), (9, 16, 5, 0), (1, 128, 100_003, 5), (3, 40, 77, 0)],
    [(70, 16, 5, 0), (33, 128, 100_003, 5), (5, 4, 37, 2)],
    [way for way in WAYS if way.name != "cpu masked"],
)
def test_a_token_sees_its_window_and_nothing_else(way, dtype, t, window, first, spare):
    for nan in (False, True):
        check(way, make(t, 5, 32, window, first, spare=spare, nan=nan, dtype=dtype))


FEW_ENTRIES = ((0, 3), (0, None), (4, 3), (90, 0), (90, 17), (90, 90), (90, None))
MANY_ENTRIES = ((0, 3), (3, 3), (4, 3), (40, 3), (300, 17), (300, 300), (300, None), (0, None))


@crossed(
    "n, k, t, first",
    [(n, k, *at) for n, k in FEW_ENTRIES for at in ((1, 2), (2, 300))],
    [(n, k, *at) for n, k in MANY_ENTRIES for at in ((1, 0), (1, 2000), (7, 0), (40, 1100))],
)
def test_a_token_sees_complete_entries_or_those_selected(way, dtype, n, k, t, first):
    check(way, make(t, 3, 20, 8, first, n, k, nan=t != 2, dtype=dtype))


@crossed("t, k", [(1, None), (9, None)], [(9, 300), (9, 4500), (40, None)])
def test_no_entry_is_left_out_of_more_than_any_tile_holds(way, dtype, t, k):
    """More than 4096 of them, in a call of few tokens and in long ones; the last are the largest."""
    n, d = 5000, 16
    q, ring, first, window, entries, ratio, selected, _ = make(t, 2, d, 8, 4 * n + 3, n, k, nan=False, dtype=dtype)
    late = entries.float().clone()
    late[4096:] *= 3  # they take most of the mass: whoever leaves some of them out is far off
    sink = torch.full((2,), -torch.inf)
    check(way, (q, ring, first, window, late.to(dtype), ratio, selected, sink), largest=16.0)


@pytest.mark.parametrize("way", SMALL_TILES, ids=lambda way: way.name)
def test_tiles_end_within_what_is_seen(way):
    few, many = [(1, 16, None), (5, 17, None), (1, 40, 16), (1, 40, 17)], []
    if way.backend == "cpu":
        many = itertools.product((1, 2, 3, 4, 5), (15, 16, 17, 32, 33), (None, 15, 16, 17))
    for after, cases in ((-3, few), (100, many)):  # from -3 on, one token more sees one entry more, in a tile too
        for t, n, k in cases:
            check(way, make(t, 3, 16, 20, 4 * n + after, n, k, dtype=way.dtypes[0]))


@pytest.mark.parametrize("way", WAYS[:4], ids=lambda way: way.name)
@pytest.mark.parametrize("k", [None, 40])
def test_a_token_does_not_depend_on_its_chunk(way, k):
    """As long as this are the tiles of CPU; how tokens share Triton's is seen above, in small ones."""
    q, ring, first, window, entries, ratio, selected, sink = make(90, 16, 32, 24, 700, 300, k)
    whole = way(q, ring, first, window, entries, ratio, selected, sink)
    for i in (0, 1, 63, 64, 65, 89):
        chosen = None if selected is None else selected[i : i + 1]
        alone = way(q[i : i + 1], ring, first + i, window, entries, ratio, chosen, sink)
        assert_same(way, alone, whole[i : i + 1].double(), dtype=F32)


@pytest.mark.parametrize("way", WAYS[:5], ids=lambda way: way.name)
@pytest.mark.parametrize("h", [16, 17, 40])
def test_more_heads_than_a_tile_has_rows(way, h):
    check(way, make(1, h, 16, 8, 40, 9))


@crossed("d, rope", [(80, 16), (128, 64), (64, 0)])
def test_fp8_entries(way, dtype, d, rope):
    for t, k, start in ((3, None, 90), (2, 17, 150), (1, None, 0)):
        q, ring, first, window, entries, ratio, selected, sink = make(t, 3, d, 8, start, 40, k, dtype=dtype)
        entries = entries * 2.0 ** torch.arange(-8, 12).repeat(2)[:40, None]  # scales that differ
        largest = max(entries.float().nan_to_num(0).abs().max().item(), 4.0)
        rows = in_fp8(entries, rope)
        check(way, (q * 2.0**-6, ring, first, window, rows, ratio, selected, sink), largest)


@on_triton
@pytest.mark.parametrize(("k", "tokens"), [(None, 9), (17, 9), (17, 3)])
def test_triton_fp8_entries_have_the_same_bits_decoded_ahead(k, tokens, monkeypatch):
    """Which they are in a call of more than a few tokens that meet each row more than twice."""
    decoded, found, decode = [], [], attention_triton._decoded
    monkeypatch.setattr(attention_triton, "_decoded", lambda rows: decoded.append(rows) or decode(rows))
    q, ring, first, window, entries, ratio, selected, sink = make(tokens, 3, 80, 8, 150, 40, k, dtype=BF16)
    rows = in_fp8(entries * 2.0 ** torch.arange(-8, 12).repeat(2)[:, None], 16)
    given = q * 2.0**-6, ring, first, window, rows, ratio, selected, sink
    for limit in (launch.AHEAD, math.inf):
        monkeypatch.setattr(launch, "AHEAD", limit)
        found.append(attention_triton.attend(*given))
    assert len(decoded) == (tokens > launch.SHORT)
    assert torch.equal(found[0].isnan(), found[1].isnan())
    assert torch.equal(found[0].nan_to_num(7), found[1].nan_to_num(7))
    check(WAYS[4], given, 2.0**12)


@crossed("d, bits, seed", [(64, 6, 0), (128, 4, None)], [(16, 8, 0), (64, 2, 0), (64, 3, None)])
def test_coded_entries(way, dtype, d, bits, seed):
    """Tokens of a tile that see different numbers of entries, a selection, and no entry at all."""
    for t, k, start in ((3, None, 90), (2, 17, 150), (1, None, 0)):
        q, ring, first, window, entries, ratio, selected, sink = make(t, 3, d, 8, start, 40, k, dtype=dtype)
        rows = in_codes(entries * 2.0 ** torch.arange(-2, 3).repeat(8)[:, None], bits, seed)  # lengths that differ
        for form in (rows, Slots(rows, None, 0)):
            check(way, (q * 0.5, ring, first, window, form, ratio, selected, sink), largest=32.0)


@every_way
@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_every_width_are_decoded(way, bits):
    """A key alone beside a window of mass 0 is the output itself, and its codes are all that there are."""
    codes = torch.arange(64 * 4).view(4, 64).sub(128 - 2 ** (bits - 1)).clamp(0, 2**bits - 1).to(torch.uint8)
    rows = in_codes(torch.randn(4, 64, generator=seeded(bits)), bits)
    rows.codes.copy_(lloyd_max.pack(codes, bits))
    assert codes.unique().tolist() == list(range(2**bits))
    q, ring, sink = torch.zeros(4, 1, 64), torch.zeros(4, 64), torch.full((1,), -torch.inf)
    selected = torch.arange(4).int()[:, None]
    ours = way(q, ring, 16, 1, Slots(rows, torch.full((4,), 300.0), 0), 4, selected, sink)[:, 0]
    wanted = numbers(rows)
    # a rotation here and one in `numbers`, of six steps each
    assert ((ours - wanted).abs() <= 12 * ULP * wanted.norm(dim=1, keepdim=True)).all()


@pytest.mark.parametrize("way", [WAYS[0], WAYS[1], *WAYS[3:5]], ids=lambda way: way.name)
def test_every_fp8_code_is_decoded(way):
    """A key alone beside a window of mass 0 is the output itself: its logit is above all others.

    Masked tiles of CPU are left out: there, NaN of an entry may reach every token of the tile. So is Triton's split,
    which a call of so many tokens does not take.
    """
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64).repeat(3, 1)
    scale = torch.tensor([0, 127, 255], dtype=torch.uint8).repeat_interleave(4)[:, None]
    n = len(codes)
    rows = Fp8Entries(codes.view(torch.float8_e4m3fn), torch.zeros(n, 16).bfloat16(), scale.view(torch.float8_e8m0fnu))
    q, sink = torch.zeros(n, 1, 80), torch.full((1,), -torch.inf)
    ring, selected = torch.zeros(n, 80), torch.arange(n).int()[:, None]
    ours = way(q, ring, 4 * n, 1, Slots(rows, torch.full((n,), 300.0), 0), 4, selected, sink)[:, 0]
    assert ours.isnan().any(-1).sum() == 2 * 2 + 4  # codes 127 and 255 of two scales; all of the third
    exact = numbers(rows).float()
    exact[exact.isnan().any(-1)] = torch.nan  # a logit of NaN reaches all columns
    assert torch.equal(ours.nan_to_num(7.5), exact.nan_to_num(7.5))


@every_way
def test_an_fp8_scale_of_nan_is_not_infinite(way):
    """An infinite key of logit -inf would show in its own columns alone."""
    scale = torch.full((1, 1), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    rows = Fp8Entries(torch.ones(1, 64).to(torch.float8_e4m3fn), torch.zeros(1, 16).bfloat16(), scale)
    assert way(torch.full((1, 1, 80), -1.0), torch.zeros(1, 80), 4, 1, rows, 4, None, torch.zeros(1)).isnan().all()


def test_cpu_a_token_has_the_same_bits_among_others_and_on_any_number_of_threads():
    before = torch.get_num_threads()
    for h, d, n, k in ((20, 80, 700, None), (3, 16, 40, 9), (64, 128, 9000, 300), (5, 512, 3000, None)):
        q, ring, first, window, entries, ratio, selected, sink = make(8, h, d, 24, 4 * n - 5, n, k, dtype=BF16)
        whole = CPU.attend(q, ring, first, window, entries, ratio, selected, sink)
        try:
            for threads in (1, 3):
                torch.set_num_threads(threads)
                for i in range(8):
                    chosen = None if selected is None else selected[i : i + 1]
                    alone = CPU.attend(q[i : i + 1], ring, first + i, window, entries, ratio, chosen, sink)
                    assert torch.equal(alone[0].nan_to_num(7), whole[i].nan_to_num(7))
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("n", [64, 1000, 1985, 1986, 2048, 2049, 4100])  # with a window of 63: around 32 parts of 64
def test_cpu_keys_of_a_token_fall_into_parts(n):
    q, ring, first, window, entries, ratio, _, sink = make(1, 40, 48, 63, 4 * n + 1, n)
    check(WAYS[1], (q, ring, first, window, entries, ratio, None, sink))


@every_way
def test_v4_rows(way):
    """One token of 512 columns, from rows of 584 bytes, in bf16."""
    q, ring, first, window, entries, _, selected, sink = make(1, 4, 512, 8, 100, 24, 10, dtype=BF16)
    rows = in_fp8(entries, 64)
    assert sum(plane.nbytes for plane in rows) == 24 * 584
    for chosen in (selected, None):
        check(way, (q, ring, first, window, rows, 4, chosen, sink))


STORED = {"dtype": lambda entries: entries, "fp8": lambda entries: in_fp8(entries, 16), "coded": in_codes}


@every_way
@pytest.mark.parametrize("k", [None, 17])
@pytest.mark.parametrize("form", STORED)
def test_slots_have_biases_and_lag_behind(way, k, form):
    d = 64 if form == "coded" else 80
    for hidden, start in ((5, 74), (30, 20)):  # the second token sees one more, or neither sees any
        q, ring, first, window, entries, ratio, selected, sink = make(2, 3, d, 8, start, 40, k, hidden=hidden)
        bias = torch.randn(40, generator=seeded(k, hidden))
        bias[::3] = -torch.inf  # empty rows, the last that the first token sees among them
        bias[max(0, (first + 2) // ratio - hidden) :] = torch.nan
        slots = Slots(STORED[form](entries), strided(bias), hidden)
        check(way, (q, ring, first, window, slots, ratio, selected, sink))


@every_way
@pytest.mark.parametrize(("k", "form"), [(None, "fp8"), (None, "dtype"), (9, "fp8"), (9, "coded"), (None, "coded")])
def test_positions_beyond_int32_and_on_the_device(way, k, form):
    """Entries are given at full capacity. A position on the device is for Triton alone."""
    for first in (66, 10_000_000_000):
        q, ring, _, window, entries, ratio, selected, sink = make(1, 3, 64 if form == "coded" else 80, 8, first, 30, k)
        args = (window, STORED[form](entries), ratio, selected, sink)
        ours = check(way, (q, ring, first, *args))
        if way.backend == "triton":
            on_device = torch.tensor(first)
            assert torch.equal(way(q, ring, on_device, *args), ours)
            assert on_device.item() == first


@every_way
@pytest.mark.parametrize("form", STORED)
def test_slots_that_are_none_yet(way, form):
    d = 64 if form == "coded" else 80
    q, ring, first, window, _, ratio, _, sink = make(1, 3, d, 8, 2)
    slots = Slots(STORED[form](torch.zeros(0, d)), torch.zeros(0), 0)
    for selected in (None, torch.full((1, 2), -1, dtype=torch.int32)):
        check(way, (q, ring, first, window, slots, ratio, selected, sink))


@every_way
@pytest.mark.parametrize("k", [None, 17])
def test_a_coded_entry_of_no_number_is_never_lost(way, k):
    q, ring, first, window, entries, ratio, selected, _ = make(1, 3, 16, 8, 100, 25, k)
    entries[entries.isnan()] = 1.0
    rows, sink = in_codes(entries), torch.tensor([-torch.inf, 0.0, torch.inf])
    assert way(q, ring, first, window, rows, ratio, selected, sink).isfinite().all()
    rows.norm[24 if k is None else selected[0][(selected[0] >= 0) & (selected[0] < 25)][0]] = torch.nan
    assert way(q, ring, first, window, rows, ratio, selected, sink).isnan().all()


@every_way
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", ["window", "selected", "visible", "q"])
def test_what_a_token_sees_is_never_lost(way, place, bad):
    """Not even where a sink of +inf takes all mass, for 0 times NaN is NaN."""
    q, ring, first, window, entries, ratio, _, _ = make(1, 3, 16, 8, 100, 25)
    selected = None if place == "visible" else torch.tensor([[3, 7, -1]]).int()
    args = (q, ring, first, window, entries, ratio, selected, torch.tensor([-torch.inf, 0.0, torch.inf]))
    out = check(way, args)
    assert out.isfinite().all()
    assert (out[0, 2] == 0).all()
    {"window": ring[100 % 8], "selected": entries[7], "visible": entries[24], "q": q[0].T}[place][5] = bad
    out = check(way, args)
    # an infinite key of mass 0 shows in its own dim alone; a mass of NaN in all
    assert (out[0, :, 5] if place != "q" and math.isinf(bad) else out[0]).isnan().all()


@every_way
def test_a_sink_may_be_of_any_size_or_nan(way):
    q, ring, first, window, entries, ratio, _, _ = make(1, 5, 16, 8, 100, 25)
    sink = torch.tensor([torch.nan, 3e38, -3e38, 80.0, -80.0])
    out = check(way, (q, ring, first, window, entries, ratio, None, sink))
    assert out[:, 0].isnan().all()
    assert not out[:, 1:].isnan().any()


@every_way
def test_a_sink_of_minus_infinity_is_none_and_an_entry_is_not_seen_before_it_is_complete(way):
    sink = torch.full((1,), -torch.inf)
    q, ring = torch.randn(1, 1, 8, generator=seeded(0)), torch.randn(4, 8, generator=seeded(1))
    weights = (q[0, 0] @ ring.T * 8**-0.5).softmax(-1)
    assert (way(q, ring, 3, 4, None, 0, None, sink)[0, 0] - weights @ ring).abs().max() < 1e-6
    out = way(torch.zeros(5, 1, 8), torch.zeros(8, 8), 0, 4, torch.ones(1, 8), 4, None, sink)[:, 0, 0]
    # positions 0, 1, 2 see no entry; 3 sees one among 4 + 1 keys, as does 4
    assert out.tolist() == pytest.approx([0, 0, 0, 0.2, 0.2], abs=1e-7)


@every_way
def test_logits_far_apart_do_not_overflow(way):
    q, ring, *rest = make(2, 3, 16, 40, 100, 25)
    args = (q * 300, ring, *rest)
    ours, exact = way(*args), equation(*args)
    # logits of 1000: their rounding, 1000 ulp, is what masses are off by
    assert torch.equal(ours.isfinite(), exact.isfinite())
    assert (ours - exact).abs().max() <= 4.5 * 4000 * ULP


@every_way
@pytest.mark.parametrize(("asked", "stored"), [(F32, BF16), (BF16, F32)])
def test_operands_of_two_dtypes_are_multiplied_in_the_wider(way, asked, stored):
    q, *rest = make(1, 3, 16, 8, 100, 25, dtype=stored)
    check(way, (q.to(asked), *rest))


@every_way
def test_scratch_that_was_not_written_is_not_read(way, monkeypatch):
    args = make(1, 3, 16, 8, 20, 200)
    empty = torch.empty

    def unwritten(*shape, dtype=torch.float32, **kwargs):
        return empty(*shape, dtype=dtype, **kwargs).fill_(
            torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max
        )

    monkeypatch.setattr(torch, "empty", unwritten)
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, torch.nan))
    ours = way(*args)
    monkeypatch.undo()
    assert_same(way, ours, equation(*args), dtype=F32)


@every_way
def test_no_token_has_no_result_and_a_ring_too_short_is_refused(way):
    q, ring, first, window, entries, ratio, selected, sink = make(1, 3, 64, 8, 100, 25)
    assert way(q[:0], ring, first, window, entries, ratio, selected, sink).shape == (0, 3, 64)
    with pytest.raises(AssertionError, match="cannot hold window"):
        way(q, ring, first, 9, entries, ratio, selected, sink)


def test_the_noise_would_be_noticed():
    """The tests above rest on unseen rows moving the answer: widen the window by one and it must move."""
    q, ring, first, window, *rest = make(5, 24, 32, 8, 50, spare=4, nan=False)
    wider = equation(q, ring, first, window + 1, *rest)
    for way in WAYS:
        assert (wider - way(q, ring, first, window, *rest)).abs().max() > 10


def test_the_reference_refuses_an_entry_that_is_selected_twice():
    q, ring, sink, entries = torch.zeros(2, 1, 8), torch.zeros(8, 8), torch.zeros(1), torch.eye(8)

    def attend(*rows):
        return REFERENCE.attend(q, ring, 9, 4, entries, 4, torch.tensor(rows).int(), sink)

    attend([1, 0, -1, -1], [0, 1, 5, 5])  # no entries: -1, and 5 at positions before 23
    with pytest.raises(AssertionError, match=r"token 1 selects an entry twice: \[1, 0, 1\]"):
        attend([1, 0, -1, -1], [1, 0, -1, 1])


def test_memory_of_cpu_does_not_grow_with_the_context():
    # 32 tokens, 2 heads, 200 000 entries. Logits of all would take 51 MB, and gathered rows 34 MB. Tiles are of 2 MiB;
    # with masks and the temporaries of an expression, no more than eight live at once.
    t, h, d, n, k = 32, 2, 64, 200_000, 4096
    g = seeded(0)
    q, ring = torch.randn(t, h, d, generator=g), torch.randn(128 + t, d, generator=g)
    entries = torch.randn(n, d, generator=g).bfloat16()
    first, sink = 4 * n, torch.zeros(h)
    bound = 16 * 2**20
    assert peak_bytes(lambda: CPU.attend(q, ring, first, 128, entries, 4, None, sink)) < bound
    selected = torch.arange(0, n, n // k)[:k].int().expand(t, k)
    assert peak_bytes(lambda: CPU.attend(q, ring, first, 128, entries, 4, selected, sink)) < bound
    assert peak_bytes(lambda: torch.einsum("thd,nd->tn", q, entries.float())) > 4 * bound, "the measure is blind"


@on_triton
def test_forms_that_triton_does_not_read_are_refused():
    q, ring, first, window, entries, ratio, selected, sink = make(1, 3, 8, 8, 100, 25)
    keys = Fp8Keys(*[None] * len(Fp8Keys._fields))
    for rows, named in ((keys, "Fp8Keys"), (in_codes(entries), "coded rows of 8, want 16")):
        for given in (rows, Slots(rows, None, 0)):
            with pytest.raises(NotImplementedError, match=named):
                attention_triton.attend(q, ring, first, window, given, ratio, selected, sink)


KINDS = {"SWA": (None, None), "HCA": (90, None), "CSA": (90, 17)}  # entries, and selected ones


@on_triton
@pytest.mark.parametrize("programs", [3, 132])  # with several tiles to a program, and with one at most
@pytest.mark.parametrize(("kind", "form"), [("SWA", "dtype"), *itertools.product(("HCA", "CSA"), ("dtype", "fp8"))])
def test_triton_rows_of_a_short_call_have_the_bits_of_calls_of_one_token(kind, form, programs, monkeypatch):
    """Whatever the call, and whether entries, and places of a selection, are as many as a token sees or more."""
    monkeypatch.setattr(launch, "PROGRAMS", programs)
    (n, k), rows = KINDS[kind], None
    q, ring, first, window, entries, ratio, selected, sink = make(8, 3, 80, 40, 277, n, k, dtype=BF16)
    sink[:] = torch.tensor([0.5, -torch.inf, -1.0])
    if n is not None:
        rows = STORED[form](entries)

    def given(columns):
        return None if selected is None else torch.nn.functional.pad(selected, (0, columns), value=-1)

    alone = []
    for i in range(8):
        seen = rows if rows is None else first_rows(rows, (first + i + 1) // ratio)
        one = None if selected is None else given(0)[i : i + 1]
        args = (q[i : i + 1], ring, first + i, window, seen, ratio, one, sink)
        alone.append(attention_triton.attend(*args))
        assert_same(WAYS[-1], alone[i], equation(*args), dtype=BF16)
    for t in (1, 2, 3, 8):
        chosen = None if selected is None else given(40)[:t]
        together = attention_triton.attend(q[:t], ring, first, window, rows, ratio, chosen, sink)
        assert torch.equal(together, torch.cat(alone[:t]))


@on_triton
def test_how_a_call_of_triton_is_cut_up_follows_from_shapes():
    """One token fills the machine with programs, as does each of a short call; a chunk has one program a row tile."""

    def cut(t, h, most, shared, wide=False, form=launch.TENSOR):
        return launch.launch(t, h, 512, 128, most, narrow=True, form=form, shared=shared, wide=wide)

    assert cut(1, 64, 8192, shared=True)[:6] == (1, 16, 32, 512, 4, 33)
    assert cut(1, 128, 1024, shared=False)[:6] == (1, 32, 32, 512, 4, 33)
    assert cut(1, 64, 8192, shared=True, form=launch.CODED)[:6] == (1, 64, 32, 512, 1, 132)
    assert cut(512, 64, 512, shared=False)[:6] == (1, 64, 32, 512, 512, 1)
    assert cut(512, 16, 8192, shared=True)[:6] == (4, 16, 32, 512, 128, 1)
    assert cut(32, 64, 8192, shared=True)[4:6] == (32, 4)
    assert (cut(512, 64, 512, shared=True).stages, cut(512, 64, 512, shared=False).stages) == (3, 5)
    for shared in (True, False):  # wide tiles have room, of what one program has to itself
        narrower, wider = (cut(512, 64, 512, shared=shared, wide=wide) for wide in (False, True))
        assert wider == narrower._replace(keys=64, stages=2)
        assert cut(512, 64, 512, shared, wide=True, form=launch.FP8).keys == 64
        for t, form in ((8, launch.TENSOR), (66, launch.TENSOR), (512, launch.CODED), (512, launch.BASED)):
            assert cut(t, 64, 512, shared, True, form) == cut(t, 64, 512, shared, False, form)
    for h, form in itertools.product((4, 16, 64, 128), (launch.TENSOR, launch.FP8, launch.CODED)):
        entries = 0, 1, 384, 385, 928, 929, 8192, 1 << 18
        assert len({cut(1, h, most, shared=True, form=form)[:4] for most in entries}) == 1, "entries decide on no rows"
    for h, most, shared in ((64, 8192, True), (16, 100, True), (128, 1024, False)):
        one = cut(1, h, most, shared)
        for t in range(2, launch.SHORT + 1):
            assert cut(t, h, most, shared) == one._replace(programs=t * one.programs)
    assert launch.launch(1, 3, 32, 128, 9, narrow=True, form=launch.CODED, shared=True).width == 32
