"""Cache rows in every stored form: each code and scale decoded, rounded values kept to the bit, ops that read tiles."""

import pytest
import torch

from fathom.kernels.attention import cpu as attention
from fathom.kernels.formats import rows
from fathom.kernels.formats import rows_reference as reference
from fathom.kernels.formats.stored import Fp4Keys, Fp8Entries, Fp8Keys
from fathom.kernels.ops import CPU, REFERENCE
from fathom.kernels.quantise.reference import simulate_fp4, simulate_fp8
from tests.make_checkpoint import pack_e2m1
from tests.peak_memory import peak_bytes

ON_CPU, META = torch.device("cpu"), torch.device("meta")
BYTES = torch.arange(256, dtype=torch.uint8)
E4M3 = BYTES.view(torch.float8_e4m3fn)
POWERS = [2.0 ** (byte - 127) for byte in range(255)] + [float("nan")]  # of E8M0
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
DENSE, GATHERED = float("inf"), 0.0

ALLOCATE = {
    "fp8 entries": lambda n, d=512, rope=64, device=ON_CPU: rows.fp8_entries(n, d, rope, device),
    "fp8 keys": lambda n, d=128, device=ON_CPU: rows.fp8_keys(n, d, device),
    "fp4 keys": lambda n, d=128, device=ON_CPU: rows.fp4_keys(n, d, device),
}
forms = pytest.mark.parametrize("form", ALLOCATE)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def written(form, x, **shape):
    out = ALLOCATE[form](x.shape[0], x.shape[1], **shape)
    rows.write(out, 0, x)
    return out


def same_bits(one, other):
    """Equal to the bit, but for which of the NaNs it is."""
    assert one.shape == other.shape
    one, other = one.float(), other.float()
    assert torch.equal(one.isnan(), other.isnan())
    differ = (one.view(torch.int32) != other.view(torch.int32)) & ~one.isnan()
    assert not differ.any(), f"{one[differ][0]} for {other[differ][0]} at {differ.nonzero()[0].tolist()}"


def exact(values, scales):
    """Products [n, d] of Python's floats as float32: none of them is rounded."""
    product = torch.tensor(values, dtype=torch.float64) * torch.tensor(scales, dtype=torch.float64)
    assert (product.isnan() | (product.abs() > torch.finfo(torch.float32).max) | (product.float() == product)).all()
    return product.float()


def codes_of(e4m3_byte):
    """The value of an E4M3 byte from its fields."""
    sign, exponent, mantissa = e4m3_byte >> 7, e4m3_byte >> 3 & 15, e4m3_byte & 7
    if (exponent, mantissa) == (15, 7):
        return float("nan")
    size = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-6 * mantissa / 8
    return -size if sign else size


# --- bytes


def test_v4_rows_take_584_132_and_68_bytes():
    for form, want in (("fp8 entries", 584), ("fp8 keys", 132), ("fp4 keys", 68)):
        held = ALLOCATE[form](1000)
        storages = sum(plane.untyped_storage().nbytes() for plane in rows.planes(held).values())
        assert storages == rows.nbytes(held) == 1000 * want
        assert rows.nbytes(ALLOCATE[form](1000, device=META)) == 1000 * want
    assert rows.planes(ALLOCATE["fp8 entries"](3))["scale"].shape == (3, 8)  # 7 groups, 1 byte of padding


@pytest.mark.parametrize(("d", "rope", "want"), [(128, 64, 200), (80, 16, 104), (144, 16, 168), (64, 0, 72)])
def test_entries_of_other_widths_are_aligned_too(d, rope, want):
    assert rows.nbytes(rows.fp8_entries(5, d, rope, ON_CPU)) == 5 * want
    assert want % 8 == 0
    assert want - (d - rope + 2 * rope + (d - rope) // 64) in range(8)


# --- every code under every scale


def test_fp8_entries_decode_every_code_under_every_scale():
    values = E4M3.repeat(256, 1)  # [256 scales, 256 codes], four groups of one scale
    rope = torch.arange(256 * 256, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    held = Fp8Entries(values, rope, BYTES[:, None].repeat(1, 8).view(torch.float8_e8m0fnu))
    got = rows.read(held, 0, 256)
    assert got.dtype == torch.float32
    same_bits(got, reference.decode(held))
    scaled = exact([[codes_of(byte) for byte in range(256)]], [[power] for power in POWERS])
    same_bits(got[:, :256], scaled)
    same_bits(got[:, 256:], rope)


def test_each_group_of_an_entry_has_its_own_scale():
    exponents = [0, 3, -5, 7, -20, 1, 2]
    scale = torch.tensor([[127 + e for e in exponents] + [255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    ones = torch.ones(1, 448).to(torch.float8_e4m3fn)
    got = rows.read(Fp8Entries(ones, torch.full((1, 64), 9.0).bfloat16(), scale), 0, 1)[0]
    assert got.tolist() == [2.0**e for e in exponents for _ in range(64)] + [9.0] * 64  # the padding's NaN is not read


def test_fp8_keys_decode_every_code_under_every_scale_that_is_written():
    exponents = range(-126, 120)  # 448 * 2^119 is the largest that bfloat16 holds
    scale = torch.tensor([2.0**e for e in exponents])
    held = Fp8Keys(E4M3.repeat(len(scale), 1), scale)
    got = rows.read(held, 0, len(scale))
    assert got.dtype == torch.float32
    same_bits(got, reference.decode(held))
    same_bits(got, exact([[codes_of(byte) for byte in range(256)]], scale[:, None].tolist()))


def test_fp4_keys_decode_every_byte_under_every_scale():
    packed = BYTES.repeat(256, 1)  # [256 scales, 256 bytes], sixteen groups of one scale
    held = Fp4Keys(packed, BYTES[:, None].repeat(1, 16).view(torch.float8_e8m0fnu))
    got = rows.read(held, 0, 256)
    assert got.dtype == torch.float32
    same_bits(got, reference.decode(held))
    values = [code for byte in range(256) for code in (E2M1[byte & 15], E2M1[byte >> 4])]  # the even column is low
    same_bits(got, exact([values], [[power] for power in POWERS]))


# --- what is written comes back


def test_every_rounded_group_of_an_entry_comes_back():
    """Groups of 64 that hold a largest code and all codes up to it, under scales as deployed rounding makes them."""
    codes = [code for code in map(codes_of, range(256)) if code == code]  # noqa: PLR0124 -- NaN is not
    for exponent in (-22, -21, -3, 0, 60, 119):  # 1e-4 / 448 gives 2^-22; 448 * 2^119 is the largest bfloat16 holds
        groups = []
        for largest in (code for code in codes if code > 0):
            below = [code for code in codes if abs(code) <= largest]
            for low in range(0, len(below), 63):
                some = below[low : low + 63]
                groups.append([largest, *some, *[-0.0] * (63 - len(some))])
        x = (torch.tensor(groups, dtype=torch.float64) * 2.0**exponent).bfloat16()
        rope = torch.randn(len(x), 8, generator=generator(exponent + 200)).bfloat16()
        same_bits(
            rows.read(written("fp8 entries", torch.cat((x, rope), 1), rope=8), 0, len(x)), torch.cat((x, rope), 1)
        )


def test_every_rounded_group_of_a_key_comes_back():
    for exponent in (-126, -60, -1, 0, 100, 124):
        for form in ("fp4 keys", "fp8 keys"):
            top = [[largest, *[code for code in E2M1 if abs(code) <= largest]] for largest in E2M1 if largest > 0]
            x = torch.tensor([(group + [0.0] * 32)[:32] for group in top], dtype=torch.float64) * 2.0**exponent
            same_bits(rows.read(written(form, x.float()), 0, len(x)), x.float())


@forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 3e4])
def test_rows_rounded_as_deployed_come_back(form, dtype, size):
    g = generator(7)
    for spread in (0.0, 2.0):  # of the logarithms of columns: groups of like and of unlike sizes
        x = torch.randn(500, 512 if form == "fp8 entries" else 128, generator=g)
        x = (x * torch.exp(spread * torch.randn(x.shape[1], generator=g)) * size).to(dtype)
        x[::7, ::5] = 0.0
        x[3] = 0.0
        if form == "fp8 entries":
            kept = x[:, 448:].bfloat16().to(dtype)  # rope dims of an fp32 run are not BF16: it is refused
            x = torch.cat((simulate_fp8(x[:, :448], 64), kept), dim=1)
        else:
            x = simulate_fp4(x, 32)
        same_bits(rows.read(written(form, x), 0, 500), x)


def test_a_key_whose_groups_are_too_far_apart_does_not_fit_one_scale():
    row = torch.zeros(1, 64)
    row[0, 0], row[0, 32:34] = 4.0, torch.tensor([4.0, 0.5]) * 2.0**-14  # E4M3: 256, and 2^-6 and 2^-9
    same_bits(rows.read(written("fp8 keys", row), 0, 1), row)
    same_bits(rows.read(written("fp4 keys", row), 0, 1), row)
    row[0, 32:34] /= 2
    assert rows.read(written("fp8 keys", row), 0, 1)[0, 33] == 0  # 2^-10 is half of the least: a tie, to even
    same_bits(rows.read(written("fp4 keys", row), 0, 1), row)


def test_unrounded_rows_are_rounded_as_deployed():
    x = torch.randn(300, 128, generator=generator(3)) * 5
    same_bits(rows.read(written("fp4 keys", x), 0, 300), simulate_fp4(x, 32))
    same_bits(rows.read(written("fp8 keys", x), 0, 300), simulate_fp8(x, 128))
    got = rows.read(written("fp8 entries", x, rope=64), 0, 300)
    same_bits(got, torch.cat((simulate_fp8(x[:, :64], 64), x[:, 64:].bfloat16().float()), 1))


def test_fp4_bytes_are_those_of_a_checkpoint():
    x = simulate_fp4(torch.randn(50, 64, generator=generator(5)), 32)
    held = written("fp4 keys", x)
    scale = held.scale.float().repeat_interleave(32, 1)
    assert torch.equal(
        held.packed, pack_e2m1(x / scale) | (torch.signbit(x[:, ::2]) * 8 | torch.signbit(x[:, 1::2]) * 128)
    )


@forms
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows_in_its_whole_group(form, bad):
    x = torch.ones(2, 192 if form == "fp8 entries" else 128)
    x[1, 33] = bad
    shape = {"rope": 64} if form == "fp8 entries" else {}
    got = rows.read(written(form, x, **shape), 0, 2)
    group = {"fp8 entries": slice(0, 64), "fp8 keys": slice(0, 128), "fp4 keys": slice(32, 64)}[form]
    wanted = torch.ones(2, x.shape[1])
    wanted[1, group] = torch.nan
    same_bits(got, wanted)


# --- access


@forms
def test_reading_writing_and_taking_rows(form):
    x = rows.read(
        written(form, torch.randn(40, 512, generator=generator(9))[:, : 512 if "ent" in form else 128]), 0, 40
    )
    held = ALLOCATE[form](40)
    rows.write(held, 10, x[:5])
    rows.write(held, 15, x[5:25])
    assert (rows.length(held), rows.width(held)) == (40, x.shape[1]) == tuple(held.shape)
    wanted = torch.zeros_like(x)
    wanted[10:35] = x[:25]
    assert torch.equal(rows.read(held, 0, 40), wanted), "other rows are as they were"
    for low, high in ((0, 0), (12, 12), (12, 13), (34, 40)):
        assert torch.equal(rows.read(held, low, high), wanted[low:high])
    for index in ([], [34], [12, 12, 0, 39, 11]):
        for dtype in (torch.int32, torch.int64):
            assert torch.equal(rows.take(held, torch.tensor(index, dtype=dtype)), wanted[index])
    front = rows.first(held, 13)
    assert rows.length(front) == 13
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(front, held, strict=True)), "views"
    assert torch.equal(rows.read(front, 11, 13), wanted[11:13])
    assert [plane.shape[0] for plane in rows.planes(front).values()] == [13] * len(front)


def test_rows_of_a_tensor_are_its_own():
    x = torch.randn(9, 4)
    assert rows.read(x, 2, 5).data_ptr() == x[2].data_ptr()
    assert torch.equal(rows.take(x, torch.tensor([8, 0])), x[[8, 0]])
    assert (rows.length(x), rows.width(x), rows.nbytes(x)) == (9, 4, 144)
    rows.write(x, 3, torch.ones(2, 4))
    assert x[3:5].eq(1).all()
    assert list(rows.planes(rows.first(x, 6))) == ["rows"]


# --- ops on narrow rows


def poisoned(held, visible):
    """`held` with NaN in all rows that no token may see."""
    for plane in rows.planes(held).values():
        plane[visible:].view(torch.uint8).fill_(0xFF)
    return held


def attended(n, t, k, first):
    """Arguments of `attend` with FP8 entries, of which only the visible ones hold numbers."""
    g = generator(n + t)
    entries = poisoned(written("fp8 entries", torch.randn(n, 192, generator=g), rope=64), min((first + t) // 4, n))
    ring = torch.randn(8 + t, 192, generator=g)
    q, sink = torch.randn(t, 3, 192, generator=g), torch.randn(3, generator=g)
    selected = None if k is None else torch.stack([torch.randperm(n, generator=g)[:k] for _ in range(t)]).int()
    return q, ring, first, 8, entries, 4, selected, sink


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(300, None), (300, 17), (17, 17), (5, 5), (1, None)])
@pytest.mark.parametrize(("t", "first"), [(1, 2000), (7, 0), (90, 500)])
def test_attend_on_narrow_rows_is_attend_on_what_they_decode_to(t, first, n, k, dtype):
    q, ring, first, window, entries, ratio, selected, sink = attended(n, t, k, first)
    for op in (
        REFERENCE.attend,
        lambda *args: attention.attend(*args, dense_up_to=DENSE),
        lambda *args: attention.attend(*args, dense_up_to=GATHERED),
    ):
        given = (q.to(dtype), ring.to(dtype), first, window)
        narrow = op(*given, entries, ratio, selected, sink)
        assert torch.equal(narrow, op(*given, reference.decode(entries), ratio, selected, sink))
        assert narrow.isfinite().all(), "a row that no token may see was read"


def test_attend_on_narrow_rows_across_tiles(monkeypatch):
    monkeypatch.setattr(attention, "ROWS", 12)  # 4 tokens
    monkeypatch.setattr(attention, "LOGITS", 16 * 12)  # 16 keys
    monkeypatch.setattr(attention, "KEYS", 16 * 192)
    for n, k in ((15, 5), (16, 16), (33, None), (33, 20)):
        q, ring, first, window, entries, ratio, selected, sink = attended(n, 5, k, 4 * n + 3)
        wide = reference.decode(entries)
        for reading in (DENSE, GATHERED):
            ours = attention.attend(q, ring, first, window, entries, ratio, selected, sink, dense_up_to=reading)
            assert torch.equal(
                ours, attention.attend(q, ring, first, window, wide, ratio, selected, sink, dense_up_to=reading)
            )
            off = (ours - REFERENCE.attend(q, ring, first, window, entries, ratio, selected, sink)).abs().max()
            assert off < 1e-5


@pytest.mark.parametrize("form", ["fp8 keys", "fp4 keys"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(1, 4), (17, 16), (900, 16), (5000, 128)])
@pytest.mark.parametrize(("t", "first"), [(1, 100_000), (70, 0), (70, 3500)])
def test_select_on_narrow_rows_is_select_on_what_they_decode_to(form, t, first, n, k, dtype):
    """Keys as deployed; the first of every three comes again, so that scores tie."""
    g = generator(n)
    x = simulate_fp4(torch.randn(n, 64, generator=g).to(dtype), 32)
    x[1::3] = x[::3][: len(x[1::3])]
    keys = poisoned(written(form, x), min((first + t) // 4, n))
    q, weights = simulate_fp4(torch.randn(t, 8, 64, generator=g).to(dtype), 32), torch.randn(t, 8, generator=g)
    for ops in (REFERENCE, CPU):
        narrow = ops.select(q, weights, keys, first, 4, k)
        assert torch.equal(narrow, ops.select(q, weights, rows.read(keys, 0, n).to(dtype), first, 4, k))


def repeated(form, x, times, **shape):
    """Narrow rows of `x`, over and over."""
    held = written(form, x, **shape)
    return type(held)(*(plane.repeat(times, *(1,) * (plane.ndim - 1)) for plane in held))


# Up to 32 tokens, 2 heads, 150 000 rows of 128: decoded, they would take 77 MB. A tile of keys is 2 MiB and so is one
# of logits; with what decoding a tile takes beside it, masks, packed scores and the temporaries of an expression, no
# more than eight such tiles live at once.
LONG, BOUND = 150_000, 16 * 2**20


@pytest.mark.parametrize(("t", "k"), [(32, None), (32, 2000), (1, 120_000)])  # all; gathered; masked tiles
def test_attend_never_decodes_the_cache(t, k):
    g = generator(0)
    entries = repeated("fp8 entries", torch.randn(1000, 128, generator=g), LONG // 1000, rope=64)
    q, ring, sink = torch.randn(t, 2, 128, generator=g), torch.randn(160, 128, generator=g), torch.zeros(2)
    selected = None if k is None else torch.arange(0, LONG, LONG // k)[:k].int().expand(t, -1)
    assert peak_bytes(lambda: CPU.attend(q, ring, 4 * LONG, 128, entries, 4, selected, sink)) < BOUND
    assert peak_bytes(lambda: reference.decode(entries)) > 4 * BOUND, "the measure is blind"


@pytest.mark.parametrize("form", ["fp8 keys", "fp4 keys"])
def test_select_never_decodes_the_cache(form):
    g = generator(0)
    keys = repeated(form, torch.randn(1000, 128, generator=g), LONG // 1000)
    q, weights = torch.randn(32, 2, 128, generator=g), torch.randn(32, 2, generator=g)
    assert peak_bytes(lambda: CPU.select(q, weights, keys, 4 * LONG, 4, 2000)) < BOUND
    assert peak_bytes(lambda: reference.decode(keys)) > 4 * BOUND, "the measure is blind"
