"""The experiment of variants: its numbers against what the models give, and its words against the numbers."""

import shutil
from dataclasses import replace

import pytest

from fathom.probes import kv_variants
from fathom.probes.evaluation import Run
from fathom.probes.finding import Verdict
from fathom.probes.kv_variants import FIDELITY, FULL_CACHE, PLAIN, RECALL, TITLES, Variant, agreed, grouped, held_bytes
from fathom.probes.probe import run_probe, silent
from fathom.probes.subject import Subject
from fathom.runtime.load import load_any
from fathom.runtime.memory import new_state
from fathom.runtime.options import DEMO
from tests.llama_model import oracle

FEW = {
    "full": (),
    "shard, 6 bits": ("all=shard",),
    "coda on both, 256": ("all=coda",),
    "coda on both, 4 + 1 + 1": ("all=coda:window=4,exact=1,summary=1",),
}
KEPT = ("full", "shard, rank 6, stream 8 bits", "coda, 256 + 64 + 64", "coda, 64 + 16 + 16")
PROBE = replace(
    kv_variants.QUICK, lengths=(64, 128), recalled=(96,), questions=2, decoded=6, asked=2, texts=2, written=5
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    oracle(vocab_size=1024, head_dim=16, num_hidden_layers=2, max_position_embeddings=2048).save_pretrained(directory)
    shutil.copy(DEMO / "tokenizer.json", directory)
    return directory


@pytest.fixture(scope="module")
def report(llama):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_variants, "TOLD", 80)
        patch.setattr(kv_variants, "V4", FEW)
        every = grouped(32)
        patch.setattr(kv_variants, "grouped", lambda columns: {name: every[name] for name in KEPT if columns == 32})
        probe = replace(PROBE, llama=str(llama))
        return run_probe(probe, Subject(options=replace(PLAIN, prefill_chunk=48)), silent).report


def rows(report, kind, what):
    (table,) = (part for part in report.parts if part.title == f"{TITLES[kind]}: {what}")
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}


def test_the_tables_have_what_the_models_give(report):
    demo, llama = (rows(report, kind, FIDELITY) for kind in TITLES)
    assert (list(demo), list(llama)) == (list(FEW), list(KEPT))
    for table in (demo, llama):
        full = table["full"]
        assert (full["KL, 64"], full["top-1, 128"], full["greedy texts"], full["median tokens"]) == (
            "0", "100 %", "2 of 2", 5
        )  # fmt: skip
    for kind in TITLES:
        assert all(row["all"].endswith(" of 2") for row in rows(report, kind, RECALL).values())
    exact, bounded = (float(demo[name]["KL, 128"]) for name in list(FEW)[2:])
    assert exact < 1e-6 < bounded, "32 entries fit 256 slots, not 6"
    assert demo["coda on both, 256"]["greedy texts"] == "2 of 2"
    assert 1e-9 < float(demo["shard, 6 bits"]["KL, 128"]) < 1e-2
    exact, bounded = (float(llama[name]["KL, 128"]) for name in KEPT[2:])
    assert exact < 1e-6 < bounded
    scatter = report.parts[0]
    assert [name for name, *_ in scatter.points[TITLES["v4"]]] == list(FEW)[1:]


def test_a_model_that_finds_no_code_is_vacuous(report):
    by_what = {finding.what: finding.verdict for finding in report.findings}
    assert by_what[f"{TITLES['v4']}: codes found with the full cache"] is Verdict.PASS
    assert by_what[f"{TITLES['llama']}: codes found with the full cache"] is Verdict.VACUOUS
    assert by_what[f"{TITLES['llama']}: divergence of the full cache from itself, nats"] is Verdict.PASS


def test_bytes_are_those_of_a_state_that_has_read_its_prompt(llama):
    for kv in (*grouped(32).values(), ("all=shard:rank=8",)):
        run = Run("", load_any(llama, replace(PLAIN, dtype="bf16", kv=kv)).model, 50)
        state = new_state(run.model, 200, 50, 200)
        kv_variants.read(run.model, state, list(range(200)), 50)
        assert held_bytes(run, 200) == sum(state.nbytes().values()), kv
    for kv in FEW.values():
        run = Run("", load_any(DEMO, replace(PLAIN, dtype="bf16", kv=kv)).model, 9)
        assert held_bytes(run, 200) == sum(run.model.new_state(200, 9).nbytes().values()), kv


def found(size, right, same):
    """One variant of a made-up model: bytes, codes found of ten, texts that are the full cache's of eight."""
    codes = [(True, 0.5)] * right + [(False, 0.5)] * (10 - right)
    greedy = [150] * same + [0] * (8 - same)
    return Variant((), {1024: size, 2048: size}, {1024: 0.0}, {1024: 1.0}, {512: codes}, 1.0, greedy)


def test_the_page_opens_with_a_variant_that_saves_and_names_what_shows_nothing():
    variants = {
        FULL_CACHE: found(10240, 10, 8), "idle": found(10000, 10, 8), "small": found(2048, 10, 3),
        "other": found(2048, 10, 2), "large": found(5120, 10, 8), "lossy": found(1024, 9, 1),
    }  # fmt: skip
    told = kv_variants._verdict("A model", variants)
    assert (
        "the smallest is small: at 1K 2 bytes per token instead of 10 (5.0 times fewer), 10 of 10 codes found, 3 of 8"
        in told
    )
    assert "Find less than 95 %: lossy." in told
    assert "Save less than 10% of the bytes at 1K, so nothing is shown: idle." in told
    assert "their difference is not shown: small and other." in told
    for name in ("small", "other", "large"):
        variants[name] = variants[name]._replace(codes=variants["lossy"].codes)
    assert "no variant that saves bytes finds 95 %" in kv_variants._verdict("A model", variants)


def test_what_the_page_says_it_does_not_measure_is_in_no_row():
    rules = [rule for table in (kv_variants.V4, grouped(128)) for rules in table.values() for rule in rules]
    assert not [rule for rule in rules for knob in kv_variants.ABSENT if knob in rule]


def test_greedy_texts_are_compared_up_to_the_first_token_that_differs():
    assert agreed([[1, 2, 3], [1, 2, 3]], [[1, 2, 3], [1, 9, 3]]) == [3, 1]


def test_other_checkpoints_and_other_numerics_are_refused():
    assert "--numerics plain --dtype fp32" in PROBE.needs(Subject())
    assert PROBE.needs(Subject(options=PLAIN)) is None
    assert "takes 2000400 positions" in replace(PROBE, lengths=(2_000_000,)).needs(Subject(options=PLAIN))
    with pytest.raises(ValueError, match="no Llama-family model of the demo language"):
        replace(PROBE, llama=str(DEMO))._llama_runs(PLAIN)
