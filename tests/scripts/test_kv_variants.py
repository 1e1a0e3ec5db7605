"""The audit of the variants: its numbers against what the models themselves give, and its page against the numbers."""

import json

import pytest
import torch

from runtime.options import DEMO
from scripts import kv_variants as command
from scripts.cli import run
from scripts.tasks import kv_variants
from scripts.variants import measures, page, runs
from tests.llama_model import oracle

SIZES = ("--lengths", "64,128", "--recalled", "96", "--documents", "1", "--questions", "2", "--chunk", "48")
FEW = {
    "full": (),
    "shard, 6 bits": ("all=shard",),
    "coda on both, 256": ("all=coda",),
    "coda on both, 4 + 1 + 1": ("all=coda:window=4,exact=1,summary=1",),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    oracle(vocab_size=1024, head_dim=16, num_hidden_layers=2, max_position_embeddings=2048).save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    for name, value in {"DECODED": 6, "FACTS": 2, "WRITTEN": 5, "PROMPTS": 2}.items():
        monkeypatch.setattr(measures, name, value)
    monkeypatch.setattr(page, "WRITTEN", 5)
    monkeypatch.setattr(kv_variants, "TOLD", 80)
    monkeypatch.setattr(kv_variants, "V4", FEW)
    kept = ("full", "shard, rank 6, stream 8 bits", "coda, 256 + 64 + 64", "coda, 64 + 16 + 16")
    every = runs.grouped(32)
    monkeypatch.setattr(kv_variants, "grouped", lambda columns: {name: every[name] for name in kept if columns == 32})


def measured(tmp_path, llama):
    flags = [*SIZES, "--llama", str(llama), "--out", str(tmp_path), "--json", str(tmp_path / "found.json")]
    assert command.main(flags) == 0
    return json.loads((tmp_path / "kv-variants.json").read_text()), (tmp_path / "kv-variants.md").read_text()


def test_the_page_and_its_numbers(tmp_path, llama):
    data, text = measured(tmp_path, llama)
    demo, grouped = data["models"]
    assert list(demo["bytes"]) == list(FEW)
    for model in data["models"]:
        for length in ("64", "128"):
            full = model["fidelity"]["full"][length]
            assert (full["kl"], full["same"], full["decode"]) == (0, 1, [1, 1, 1])
        assert model["written"]["full"] == [5, 5]
        for name in model["bytes"]:
            assert len(model["recall"][name]["96"]["right"]) == 2
            assert 0 <= model["facts"][name] <= 1
            assert f"| {name} |" in text
    exact, bounded = (demo["fidelity"][name]["128"]["kl"] for name in ("coda on both, 256", "coda on both, 4 + 1 + 1"))
    assert exact < 1e-6 < bounded, "32 entries fit 256 slots, not 6"
    assert demo["written"]["coda on both, 256"] == [5, 5]
    assert 1e-9 < demo["fidelity"]["shard, 6 bits"]["128"]["kl"] < 1e-2
    exact = grouped["fidelity"]["coda, 256 + 64 + 64"]["128"]["kl"]
    assert exact < 1e-6 < grouped["fidelity"]["coda, 64 + 16 + 16"]["128"]["kl"]
    assert json.loads((tmp_path / "found.json").read_text()) == data["models"]
    for picture in page.SHOWN:
        assert f"({picture})" in text
        assert (tmp_path / picture).read_text().startswith("<svg")
    assert str(tmp_path) not in text


def test_bytes_are_those_of_a_state_that_has_read_its_prompt(llama):
    options = kv_variants.RunOptions("plain", "bf16")
    variants = runs.grouped(32) | {"shard": ("all=shard:rank=8",)}
    for one in runs.runs(llama, options, variants, None):
        state = one.state(200, 50, 200)
        runs.read(one, state, list(range(200)), 50)
        assert runs.held_bytes(one, one.model.config, 200, 50) == sum(state.nbytes().values()), one.name
    for one in runs.runs(DEMO, kv_variants.RunOptions(), FEW, None):
        assert runs.held_bytes(one, one.model.config, 200, 9) == sum(one.state(200, 9, 200).nbytes().values()), one.name


def found(size, right, same):
    """One variant of a made-up model: bytes, codes found of ten, texts that are the full cache's of eight."""
    return {
        "bytes": {"1024": size, "2048": size},
        "recall": {"512": {"right": [True] * right + [False] * (10 - right), "depth": [0.5] * 10}},
        "written": [page.WRITTEN] * same + [0] * (8 - same),
        "fidelity": {"1024": {}},
    }


def test_the_page_opens_with_a_variant_that_saves_and_names_what_shows_nothing():
    variants = {
        "full": found(10240, 10, 8), "idle": found(10000, 10, 8), "small": found(2048, 10, 3),
        "other": found(2048, 10, 2), "large": found(5120, 10, 8), "lossy": found(1024, 9, 1),
    }  # fmt: skip
    fields = ("bytes", "recall", "written", "fidelity")
    model = {"kind": "llama"} | {name: {v: one[name] for v, one in variants.items()} for name in fields}
    told = page.verdict(model)
    assert (
        "the smallest is small: at 1K 2 bytes per token instead of 10 (5.0 times fewer), 10 of 10 codes, 3 of 8" in told
    )
    assert "More than 5 in 100 of the codes lost: lossy." in told
    assert "Saves nothing to speak of at 1K, so its row is vacuous: idle." in told
    assert "is not exercised: small and other." in told
    for name in ("small", "other", "large"):
        model["recall"][name] = variants["lossy"]["recall"]
    assert "no variant that saves anything finds all but 5 in 100" in page.verdict(model)


def test_what_the_page_says_it_does_not_measure_is_in_no_row():
    rules = [rule for rows in (runs.V4, runs.grouped(128)) for rules in rows.values() for rule in rules]
    assert not [rule for rule in rules for knob in page.ABSENT if knob in rule]


def test_divergence_is_of_the_variant_from_the_full_cache():
    """``sum p log(p / q)``: 0.9 log(0.9 / 0.5) + 0.1 log(0.1 / 0.5), which the other direction is not."""
    full, variant = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert measures.divergence(full, variant).item() == pytest.approx(0.368064, abs=1e-6)
    assert measures.divergence(variant, full).item() == pytest.approx(0.510826, abs=1e-6)


def test_speeds_are_ratios_of_the_same_round():
    times = [[1.0, 9.0], [2.0, 1.0], [4.0, 1.0], [6.0, 2.0], [8.0, 1.0]]  # the first of five rounds warms up
    found = measures.ratio(times, 1)
    assert found == (3.5, 2.75, 5.0)
    assert measures.whole(times, 1) == 21 / 14
    assert measures.ratio(times[:1], 1) == (1 / 9,) * 3


def test_greedy_texts_are_compared_up_to_the_first_token_that_differs():
    assert measures.agreed([[1, 2, 3], [1, 2, 3]], [[1, 2, 3], [1, 9, 3]]) == [3, 1]


def test_recall_asks_behind_the_compressed_document(llama):
    """The last call of the prompt ends before the first question, so that Shard has compressed what is asked for."""
    asked = []

    class Watched(runs.Run):
        def state(self, context, chunk, prompt):
            asked.append((context, prompt))
            return super().state(context, chunk, prompt)

    one = Watched(*runs.runs(llama, kv_variants.RunOptions("plain", "bf16"), {"full": ()}, None)[0])
    found = measures.recall(one, 96, 1, 2, 48, 0)
    prompt = measures.needle_prompts(96, 1, 0, 2)[0]
    assert asked == [(len(prompt.ids), prompt.answers[0].position - measures.QUESTION)]
    assert [answer.source for answer in prompt.answers] == [round(depth * asked[0][1]) for depth in found.depth]
    assert max(answer.source for answer in prompt.answers) < asked[0][1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--lengths", "64,4096"), "the model has 2048 positions"),
        (("--model", "none"), "none/config.json"),
        (("--llama", str(DEMO)), "not of the architecture that its flag asks for"),
        (("--recalled", "10"), "--recalled 10: documents with codes have 96 tokens at least"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags, words, llama, tmp_path, capsys):
    torch.set_num_threads(1)
    given = [*SIZES, "--llama", str(llama), "--out", str(tmp_path), *flags]
    assert run(lambda: command.main(given)) == 2
    assert words in capsys.readouterr().err
