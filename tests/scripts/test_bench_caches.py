"""The speed of cache variants: both sides compute the same, and the script says what it measured."""

import json

import pytest
import torch

from kernels.shard import cpu as shard
from model.variants.shard import ShardSettings
from scripts.bench import coda_pairs, compare_coda, speed_page, variant_pairs, variants
from scripts.bench.coda_pairs import CodaLayer
from scripts.bench.command import main
from scripts.bench.pairs import Pair, Timing, measure
from scripts.bench.variant_pairs import GroupedShape, SharedShape
from tests.peak_memory import peak_bytes

TINY = GroupedShape("Llama-3.1-8B", 4, 2, 16, 16)
TINY_V4 = SharedShape(4, 32, 2, 16, 8, 4)


def sides(case):
    with torch.no_grad():
        return case.run_first(), case.run_second()


def relative(case):
    ours, theirs = (part.float() for part in sides(case))
    assert ours.shape == theirs.shape
    return ((ours - theirs).norm() / theirs.norm()).item()


def test_coda_and_the_package_give_the_same():
    layer = CodaLayer(4, 2, 16, coda_pairs.settings(16, 5, 6))
    prompt, decoding = coda_pairs.prompt(layer, 90, 24), coda_pairs.decoding(layer, 90, 24)
    for case in (prompt, decoding):
        ours, theirs = sides(case)
        assert theirs.abs().max() > 0.1
        assert (ours - theirs).abs().max() < 2e-5, case.label


@pytest.mark.parametrize(("bits", "bound"), [(8, 2e-2), (4, 0.2)])
def test_a_stream_is_the_full_cache_but_for_its_codes(bits, bound):
    """Errors of one number are 4.1e-5 and 9.5e-3 of its square; BF16 rounds the output to 2^-9."""
    for which in ("full", "torch"):  # each from the start: a step takes a token
        cases = variant_pairs.grouped_step(TINY, 200, ShardSettings(rank=16, stream_bits=bits), streamed=True)
        (case,) = (case for case in cases if case.second == which)
        assert relative(case) < bound


def test_the_prefill_form_is_near_the_full_cache_and_reads_a_prompt_as_it_does():
    full, _ = variant_pairs.grouped_step(TINY, 200, ShardSettings(rank=16), streamed=False)
    assert relative(full) < 0.4  # values at two bits a number: a tenth of their squares is lost
    assert torch.equal(*sides(variant_pairs.grouped_prompt(TINY, 90, ShardSettings(rank=16), 32)))


@pytest.mark.parametrize("ratio", [4, 128])
def test_coded_entries_are_near_the_plain_ones(ratio):
    assert relative(variant_pairs.shared_step(TINY_V4, 1024, ratio, bits=8, key_bits=8)) < 5e-2


def test_a_long_context_is_filled_and_its_step_takes_the_scratch_of_a_short_one(monkeypatch):
    monkeypatch.setattr(variant_pairs, "SAMPLE", 100)
    monkeypatch.setattr(shard, "KEYS", 16 * TINY.kv_heads * TINY.d)
    for streamed in (False, True):
        peaks = []
        for n in (400, 1600):
            cache = variant_pairs.shard_cache(TINY, ShardSettings(rank=16), n, streamed=streamed)
            assert cache.count == n
            token = tuple(part[:1] for part in variant_pairs.drawn(1, TINY, seed=1))
            assert cache.attend(*token).isfinite().all()
            peaks.append(peak_bytes(lambda cache=cache, token=token: cache.attend(*token)))
        assert peaks[0] == peaks[1]
        assert peaks[0] < 64 << 10


@pytest.fixture
def tiny(monkeypatch):
    for name, value in (("LLAMA", TINY), ("SMALL", TINY._replace(name="a small model")), ("FLASH", TINY_V4)):
        monkeypatch.setattr(variants, name, value)
    for name, value in (("LAYER", (4, 2, 16)), ("SLOTS", (16, 4, 4)), ("BLOCK", 32)):
        monkeypatch.setattr(compare_coda, name, value)
    for bench in (variants, compare_coda):
        monkeypatch.setattr(bench, "rate", lambda: 40.0)
    threads = torch.get_num_threads()
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)


def run(name, tmp_path):
    """Run a bench with --page and --json: both texts."""
    files = [tmp_path / "page.md", tmp_path / "run.json"]
    flags = ["--context", "128", "--seconds", "0", "--page", str(files[0]), "--json", str(files[1])]
    assert main([name, *flags]) == 0
    return [path.read_text(encoding="utf-8") for path in files]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(("name", "cases", "tables"), [("variants", 15, 2), ("compare-coda", 2, 1)])
def test_the_page_has_every_case(name, cases, tables, tmp_path, capsys):
    page, data = run(name, tmp_path)
    found = [line for line in page.splitlines() if "128 tokens |" in line or "tokens after" in line]
    assert len(found) == cases + 1  # one is also a row of what the processor allows
    told = f"python -m scripts.bench {name} --context 128 --seconds 0 --page page.md --json run.json"
    assert f"command: {told}\n" in page
    assert str(tmp_path) not in page + data
    assert "not installed" not in page + capsys.readouterr().out
    results = json.loads(data)["results"]
    assert len(results) == tables
    assert all(len(row["first_ms"]) == 5 for rows in results.values() for row in rows)


@pytest.mark.usefixtures("tiny")
def test_without_the_package_one_line_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(coda_pairs, "PACKAGE", "no_such_package")
    page, _ = run("compare-coda", tmp_path)
    assert page.count("is not installed: its column is empty.") == 1
    assert capsys.readouterr().out.count("not installed") == 1
    (row,) = (line for line in page.splitlines() if line.startswith("| prompt of 128 tokens"))
    assert row.split(" | ")[2:] == ["package", "", "", "", "5 |"]


def test_a_ratio_is_second_over_first():
    pair = Pair("a", "v", lambda: torch.zeros(1), "o", lambda: torch.randn(400_000).sort().values)
    middle, low, high = measure(pair, 0.0, 5, 30).ratio
    assert 10 < low <= middle <= high


def test_the_limit_counts_what_a_prompt_multiplies():
    """2048 tokens: q, k, v, o, lambda, gate; scores of two streams and one sum, of 384 + 128 rows each."""
    pair = Pair("a prompt", "variant", None, "package", None)
    limit = compare_coda.limit(Timing(pair, [(1.0, 110.0), (1.0, 100.0)]), 2048)
    assert limit.products == 2048 * (1024 * (1024 + 2 * 256 + 1024 + 16 + 1) + 3 * 1024 * 512) / 1e9
    assert limit.row(43.15)[1:] == ("8.63", "199.9", "100.0", "0.50")


@pytest.mark.parametrize("name", ["variants", "compare-coda"])
def test_denormals_are_flushed_before_anything_is_timed(name, monkeypatch):
    class Started(Exception):
        pass

    def start(*_):
        raise Started

    asked = []
    monkeypatch.setattr(torch, "set_flush_denormal", asked.append)
    monkeypatch.setattr(speed_page, "measure", start)
    with pytest.raises(Started):
        main([name, "--seconds", "0", "--context", "64"])
    assert asked == [True]


@pytest.mark.parametrize("flags", [["--context", "0"], ["--context", "-5"], ["--seconds", "nan"], ["--seconds", "-1"]])
def test_numbers_that_cannot_be_meant_are_refused(flags, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["variants", *flags])
    assert refused.value.code == 2
    assert flags[1] in capsys.readouterr().err


def test_the_pages_open_with_what_was_reached():
    def timed(label, other, ratio):
        return Timing(Pair(label, "variant", None, other, None), [(1.0, ratio)] * 5)

    grouped = [timed("8192 tokens", "full", 1.0), timed("8192 tokens", "full", 0.9), timed("8192 tokens", "torch", 9.0)]
    tables = {variants.GROUPED: [*grouped, timed("prompt of 1024 tokens", "full", 2.0)], variants.SHARED: []}
    told = variants.opening(tables)
    assert "as the full cache in 1 of 2 cases.**" in told[2]
    assert "* Shard, a prompt with its compression, over the full cache: 2.00." in told  # the slowest row as well
    coda = [timed("prompt of 2048 tokens", "package", 3.1), timed("8 tokens", "package", 2.9)]
    assert "as its package in 1 of 2 cases.**" in compare_coda.opening(coda)[2]
