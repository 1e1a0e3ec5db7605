"""Shard on V4 layers: entries and index keys as codes, attended to and scored without being rotated back."""

import json

import pytest
import torch

from fathom.kernels.formats import coded_rows, rows
from fathom.kernels.formats.lloyd_max import distortion
from fathom.kernels.formats.rows_reference import decode
from fathom.kernels.formats.stored import Slots
from fathom.kernels.ops import CPU, REFERENCE
from fathom.model.errors import Tripwire
from fathom.model.observe import invariants
from fathom.probes.subject import Subject
from fathom.runtime.load import load
from fathom.runtime.options import DEMO, RunOptions
from fathom.scripts import generate
from fathom.scripts.cli import run

ON_CPU = torch.device("cpu")
BITS = (2, 3, 4, 6, 8)


def coded(x, bits, seed=0):
    stored = coded_rows.allocate(x.shape[0], x.shape[1], bits, ON_CPU, seed)
    rows.write(stored, 0, x)
    return stored


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("d", [128, 512])
def test_rows_decode_as_the_equation_says(bits, d):
    x = torch.randn(200, d, generator=torch.Generator().manual_seed(d)) * torch.logspace(-3, 3, 200)[:, None]
    stored = coded(x, bits)
    wanted, size = decode(stored), x.norm(dim=1, keepdim=True)
    for found in (rows.read(stored, 0, 200), rows.take(stored, torch.arange(200))):
        assert ((found - wanted).abs() / size).max() < 1e-6
    assert (rows.sum_as_read(stored, rows.read_as_stored(stored, 0, 200)) - wanted).div(size).abs().max() < 1e-6
    error = (wanted - x).square().sum(1) / size[:, 0].square()
    assert error.mean().item() == pytest.approx(distortion(bits), rel=0.1)


def test_bytes_of_v4s_rows():
    for bits, size in ((4, 258), (6, 386), (8, 514)):
        assert rows.nbytes(coded_rows.allocate(10, 512, bits, ON_CPU, 0)) == 10 * size
    assert rows.nbytes(coded_rows.allocate(10, 128, 8, ON_CPU, 0)) == 10 * 130


@pytest.mark.parametrize("bits", [2, 6, 8])
@pytest.mark.parametrize("how", ["all", "masked", "gathered"])
def test_attention_on_codes_is_attention_to_what_they_stand_for(bits, how):
    g = torch.Generator().manual_seed(bits)
    t, h, d, n = 9, 4, 64, 400
    q, ring = torch.randn(t, h, d, generator=g), torch.randn(40, d, generator=g)
    entries, sink = coded(3 * torch.randn(n, d, generator=g), bits), torch.randn(h, generator=g)
    k = {"all": 0, "masked": 390, "gathered": 20}[how]
    picks = [torch.randperm(395, generator=g)[:k].sort().values for _ in range(t)]
    selected = torch.stack(picks).int() if k else None
    given = (q, ring, 1595, 16)
    wanted = REFERENCE.attend(*given, entries, 4, selected, sink)
    found = CPU.attend(*given, entries, 4, selected, sink)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
    bias = torch.randn(n, generator=g)
    wanted = REFERENCE.attend(*given, Slots(entries, bias, 3), 4, selected, sink)
    found = CPU.attend(*given, Slots(entries, bias, 3), 4, selected, sink)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("tokens", [1, 5, 200])  # the last is bounded in integers, where the processor has these
def test_selection_on_codes_is_that_of_what_they_stand_for(tokens):
    g = torch.Generator().manual_seed(tokens)
    h, d, n, k = 4, 64, 5000, 12
    q, weights = torch.randn(tokens, h, d, generator=g), torch.randn(tokens, h, generator=g)
    keys = coded(torch.randn(n, d, generator=g), 8)
    found = CPU.select(q, weights, keys, 4 * n - tokens, 4, k)
    scores = torch.einsum("thn,th->tn", torch.relu(q.double() @ decode(keys).double().T), weights.double())
    position = torch.arange(4 * n - tokens, 4 * n)
    scores[torch.arange(n) >= ((position + 1) // 4)[:, None]] = -torch.inf
    best = scores.topk(k + 1, dim=1).values
    least = scores.gather(1, found.long()).amin(1)
    assert (least >= best[:, k - 1] - 1e-5 * best[:, 0]).all()
    clear = best[:, k - 1] - best[:, k] > 1e-5 * best[:, 0]
    assert clear.float().mean() > 0.9
    exact = REFERENCE.select(q, weights, keys, 4 * n - tokens, 4, k)
    assert torch.equal(found[clear], exact[clear])


def test_a_row_that_comes_back_wrong_trips():
    x = torch.randn(8, 64)
    stored = coded(x, 6)
    invariants.stored("attention.entry", 1, 0, x, stored)
    for damage in (
        stored._replace(signs=-stored.signs * torch.linspace(-1, 1, 64).sign()),
        stored._replace(norm=stored.norm * 1.5),
        stored._replace(codes=stored.codes.flip(1)),
        stored._replace(norm=stored.norm.clone().fill_(torch.nan)),
    ):
        with pytest.raises(Tripwire, match=r"row 0 comes back .* at most 0\.0213 with 6 bits"):
            invariants.stored("attention.entry", 1, 0, x, damage)


def test_a_row_with_a_long_tail_does_not_trip():
    """After the rotation one column holds half of its energy: 4 bits clip it, which is what they do, and no fault."""
    y = torch.randn(8, 64, generator=torch.Generator().manual_seed(4))
    y[:, 5] = 8
    x = coded_rows.undo_hadamard(y, coded_rows.random_signs(64, 0, ON_CPU))
    stored = coded(x, 4)
    error = (rows.read(stored, 0, 8) - x).square().sum(1) / x.square().sum(1)
    assert error.min() > 0.03
    invariants.stored("attention.entry", 1, 0, x, stored)
    with pytest.raises(Tripwire, match="row 0 comes back"):
        invariants.stored("attention.entry", 1, 0, x, stored._replace(codes=stored.codes.flip(1)))


# --- in the model

LENGTH = 600


@pytest.fixture(scope="module")
def ids():
    return torch.tensor(Subject(DEMO, RunOptions()).tokens(LENGTH))


def logits(ids, *kv, options=("plain", "fp32"), chunk=100):
    model = load(DEMO, RunOptions(*options, kv=kv)).model
    state = model.new_state(LENGTH, chunk)
    out = [model.logits(model(part, state)) for part in (*ids[:-20].split(chunk), *ids[-20:].split(1))]
    return torch.cat(out), state


def divergence(whole, found):
    return (whole.softmax(-1) * (whole.log_softmax(-1) - found.log_softmax(-1))).sum(-1).mean().item()


def test_fewer_bits_cost_more(ids):
    whole, full = logits(ids)
    cost, size = {}, {}
    for bits in (2, 4, 8):
        found, state = logits(ids, f"all=shard:bits={bits}")
        cost[bits], size[bits] = (
            divergence(whole, found),
            sum(cache.nbytes().get("entries", 0) for cache in state.layers),
        )
    assert 0 < cost[8] < cost[4] < cost[2] < 0.01
    entries = sum(cache.nbytes().get("entries", 0) for cache in full.layers) // (4 * 128)
    assert size == {bits: entries * (128 * bits // 8 + 2) for bits in (2, 4, 8)}


def test_codes_are_made_of_what_was_not_rounded_before(ids):
    """In deployed numerics an entry is coded as the compressor makes it, and not after it was rounded to E4M3."""
    found = {}
    for kv in ((), ("all=shard:bits=8",)):
        model = load(DEMO, RunOptions(kv=kv)).model
        state = model.new_state(LENGTH, 64)
        for part in ids[:64].split(64):
            model(part, state)
        found[kv] = [rows.read(state.layers[1].entries.view(), 0, 16), rows.read(state.layers[1].keys.view(), 0, 16)]
    for rounded, from_codes, step in zip(*found.values(), (2**-4, 2**-2), strict=True):  # half a step of E4M3 and E2M1
        off = (rounded.float() - from_codes).norm() / rounded.float().norm()
        assert 0.1 * step < off < step
    plain = load(DEMO, RunOptions("plain", "bf16")).model
    assert plain.arithmetic.formats.variants[1].__class__.__name__ == "Full"


def test_a_saved_state_knows_its_variants(tmp_path, capsys):
    saved, flags = (
        tmp_path / "s.safetensors",
        ["--raw", "--prompt", "The capital of France is", "--max-new-tokens", "2"],
    )
    kv = ["--kv", "all=shard", "--kv", "hca=coda:window=9"]
    assert generate.main([*flags, *kv, "--max-context", "64", "--save-state", str(saved)]) == 0
    report = tmp_path / "r.json"
    again = ["--raw", "--prompt", " It", "--max-new-tokens", "2", "--load-state", str(saved), "--max-context", "64"]
    assert generate.main([*again, *kv, "--json", str(report)]) == 0
    assert json.loads(report.read_text())["options"]["kv"] == ["all=shard", "hca=coda:window=9"]
    capsys.readouterr()
    for other in ([], ["--kv", "all=shard"], ["--kv", "all=shard:bits=8", "--kv", "hca=coda:window=9"]):
        assert run(lambda given=other: generate.main([*again, *given])) == 2
        assert "saved with kv 'full shard:bits=6,keys=8 coda:window=9" in capsys.readouterr().err
